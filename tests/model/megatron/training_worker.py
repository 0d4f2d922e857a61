"""What the tests of test_megatron_training.py do in each layout: updates, checkpoints, refusals (see ranks.py).

A transformers model has made the same updates in one process, and has left its checkpoints. A process that finds a difference
fails; what is measured rather than exact is left in a file.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from training_cases import KINDS, LAYOUTS, LORA, Layout, call, everything, same, set_up, step, stored

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.gradients import MeshGradients
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.megatron.multi_lora import MultiLoraMegatronModel


class Checked:
    """One kind of training in one layout. ``expected``: the folder of what transformers did, ``out``: of what is done here."""

    def __init__(self, runtime: Runtime, folders: Path, expected: Path, out: Path, layout: Layout, kind: str) -> None:
        self.runtime, self.out, self.layout, self.name = runtime, out, layout, kind
        self.expected, self.kind = expected, KINDS[kind]
        self.folder = folders / self.kind.model
        self.models: list[MegatronModel] = []
        self.measured: dict[str, float] = {}

    def new(self) -> MegatronModel:
        layout = MegatronBackendConfig(**self.layout.options)
        model = MegatronModel(self.folder, dtype=self.kind.dtype, layout=layout, seed=3, runtime=self.runtime)
        self.models.append(model)
        return set_up(model, self.kind, 1 if self.layout.overlaps else 2)

    def close(self) -> None:
        for model in self.models:
            model.close()

    def compare(self, what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Notes the largest distance of a weight, and of a moment relative to the largest of its tensor."""
        assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in expected.items()}
        gaps = {"weights": 0.0, "moments": 0.0}
        for name, tensor in found.items():
            gap, size = float((tensor.float() - expected[name].float()).abs().max()), float(expected[name].abs().max())
            key = "moments" if name.endswith(("exp_avg", "exp_avg_sq", "momentum")) else "weights"
            gaps[key] = max(gaps[key], gap / max(size, 1e-30) if key == "moments" else gap)
        self.measured |= {f"{what}: {key}": value for key, value in gaps.items()}

    def updates(self) -> MegatronModel:
        model = self.new()
        norms = [step(model, number) for number in range(3)]
        wanted = json.loads((self.expected / f"{self.name}.json").read_text())
        self.measured["norm"] = max(abs(a - b) / b for a, b in zip(norms, wanted, strict=True))
        model.save(f"{self.name}-closed", str(self.out), save_optimizer=True)
        where = self.out / f"{self.name}-closed"
        self.compare("three steps", stored(where), stored(self.expected / f"{self.name}-closed"))
        self.replicas(model, where)
        return model

    def replicas(self, model: MegatronModel, where: Path) -> None:
        """Whoever has a part of a weight has what was written of it."""
        folder, stem = ("adapter", "adapter_model") if self.kind.lora else ("model", "model")
        tensors, directory = CheckpointReader(where).tensors(folder, stem), model.directory_of(model.trained())
        for name in directory.loaded():
            parameter = model.training_state().parameters[name]
            written = torch.empty_like(parameter)
            directory.fill(tensors, name, written)
            assert torch.equal(written, parameter), name

    def other_checkpoints(self) -> MegatronModel:
        """Read here and written here: the same bits. An open window of another layout goes on."""
        model = self.new()
        for name in ["closed"] if self.layout.overlaps else ["closed", "open"]:
            wanted = self.expected / f"{self.name}-{name}"
            model.resume_from_checkpoint(wanted)
            found = everything(model)
            # The gradients of an open window are with one process each, where another had them: with the one that writes.
            assert same(found, stored(wanted)) or (name == "open" and not self.runtime.is_main), name
        if not self.layout.overlaps:
            call(model, 7)
            model.clip_grad_and_step(None)
            self.compare("window", everything(model), stored(self.expected / f"{self.name}-end"))
        return model

    def own_checkpoints(self, model: MegatronModel, other: MegatronModel) -> None:
        """A model that resumes is bit for bit the one that went on."""
        other.resume_from_checkpoint(self.out / f"{self.name}-closed")
        assert step(other, 3) == step(model, 3)
        if not self.layout.overlaps:
            call(model, 8)
            model.clip_grad_and_step(None)
            model.save(f"{self.name}-open", str(self.out), save_optimizer=True)
            other.resume_from_checkpoint(self.out / f"{self.name}-open")
            for each in (model, other):
                call(each, 9)
                each.clip_grad_and_step(0.5)
        assert same(everything(other), everything(model))

    def not_finite(self, model: MegatronModel) -> None:
        """A gradient that is not finite on one process changes nothing on any."""
        before, training = everything(model), model.training_state()
        steps = training.optimizer.steps_done
        if self.layout.overlaps:  # gradients are on their way to the other process when the call returns
            weight = next(iter(training.parameters.values())).data
            good = weight.clone()
            weight.fill_(float("nan") if self.runtime.rank == 0 else 1.0)
            call(model, 10)
            weight.copy_(good)
        else:
            call(model, 10)
            model.clip_grad_and_step()
            call(model, 11)
            own = list(training.gradients.tensors().values())
            if self.runtime.rank == 0 and own:
                own[-1].view(-1)[0] = float("nan")
        with_words(model.clip_grad_and_step, NonFiniteLoss, "weights and optimizer are unchanged")
        assert training.optimizer.steps_done == steps
        assert not any(tensor.any() for tensor in training.gradients.tensors().values())
        assert same(everything(model), before)

    def refused(self, model: MegatronModel) -> None:
        training = model.training_state()
        call(model, 12)
        if self.layout.overlaps:
            with_words(lambda: call(model, 13), UserError, "overlap_grad_reduce=true sums gradients over processes")
            with_words(lambda: everything(model), UserError, "an open accumulation window cannot be saved")
        training.window.calls = training.gradient_accumulation_steps - 1
        with_words(lambda: model.clip_grad_norm(1.0, 1), ConfigError, "norm_type=1")
        training.discard_window()
        with_words(lambda: training.add_parameters({}), UserError, "cannot change any more")
        if self.kind.optimizer != "SGD":
            self.incomplete(model)

    def incomplete(self, model: MegatronModel) -> None:
        """A checkpoint in which a tensor is missing that not all processes have."""
        broken = self.out / "broken"
        if self.runtime.is_main:
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(self.expected / f"{self.name}-closed", broken)
            tensors = load_file(broken / "optimizer" / "optimizer.safetensors")
            last = max(name for name in tensors if "layers." in name)
            del tensors[last]
            save_file(tensors, broken / "optimizer" / "optimizer.safetensors")
        self.runtime.barrier()
        before, reader = everything(model), CheckpointReader(broken)
        state = reader.json("trainer_state.json")["model"]
        with_words(lambda: model.load_state(reader, state), CheckpointError, "it was written by another optimizer")
        assert same(everything(model), before)

    def masters(self, model: MegatronModel) -> None:
        """Low-precision weights are their masters, rounded, also after an update; most of these move by less than that."""
        before = everything(model)
        step(model, 5)
        after = everything(model)
        names = [name.removeprefix("model/") for name in after if name.startswith("model/")]
        assert names
        for name in names:
            master = after[f"optimizer/{name}.master"]
            assert torch.equal(after[f"model/{name}"], master.to(torch.bfloat16))
            if "embed" not in name:
                assert (master != before[f"optimizer/{name}.master"]).float().mean() > 0.9
        model.resume_from_checkpoint(self.out / f"{self.name}-closed", resume_only_model=True)
        loaded, steps = everything(model), model.training_state().optimizer.steps_done
        assert steps == 0 and not any(name.endswith("exp_avg") for name in loaded)
        assert all(torch.equal(loaded[f"optimizer/{name}.master"], loaded[f"model/{name}"].float()) for name in names)


def check_adapters(runtime: Runtime, folder: Path, options: dict) -> None:
    """Backward passes, sums and updates of two adapters take turns on the same chunks. One becomes what it is without the
    other."""
    layout = MegatronBackendConfig(**options)
    alone, several = (kind(folder, layout=layout, runtime=runtime) for kind in (MegatronModel, MultiLoraMegatronModel))
    for model, names in ((alone, "a"), (several, "ba")):
        for name in names:
            model.add_adapter_to_model(name, LORA)
            model.set_optimizer("AdamW", adapter_name=name, lr=1e-2)
    for seed in range(2):
        for model in (alone, several):
            call(model, seed, adapter_name="a")
        call(several, 10 + seed, adapter_name="b")
        for model in (alone, several):
            model.clip_grad_and_step(1.0, adapter_name="a")
    several.clip_grad_and_step(1.0, adapter_name="b")
    found = everything(several, "a")
    assert same(found, everything(alone, "a")) and not same(found, everything(several, "b"))
    for model in (alone, several):
        model.close()


def with_words(function, kind: type, words: str) -> None:
    try:
        function()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def check(runtime: Runtime, folders: Path, expected: Path, out: Path, layout: Layout, kind: str) -> dict[str, float]:
    out.mkdir(exist_ok=True)
    checked = Checked(runtime, folders, expected, out, layout, kind)
    model = checked.updates()
    other = checked.other_checkpoints()
    if not layout.short:
        checked.own_checkpoints(model, other)
        checked.not_finite(model)
        checked.refused(model)
    if kind == "bfloat16":
        checked.masters(model)
    checked.close()
    return checked.measured


def main(runtime: Runtime, folders: str, expected: str, out: str, names: str = "") -> None:
    MeshGradients.bucket_elements = 3000  # some: the model has 20 to 50 thousand elements
    for name, layout in LAYOUTS[runtime.world_size].items():
        if names and name not in names.split(","):
            continue
        if name in ("1", "tp2", "dp2-zero"):
            check_adapters(runtime, Path(folders) / "tied", layout.options)
        for kind in layout.kinds:
            found = check(runtime, Path(folders), Path(expected), Path(out) / name, layout, kind)
            if runtime.is_main:
                (Path(out) / f"{name}-{kind}.json").write_text(json.dumps(found))
