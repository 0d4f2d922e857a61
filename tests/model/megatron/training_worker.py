"""What the tests of test_megatron_training.py do in each layout: updates, checkpoints, refusals (see ranks.py).

A transformers model has made the same updates in one process, and has left its checkpoints. A process that finds a difference
fails; what is measured rather than exact is left in a file.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import make_rows

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.stream import TensorSpec
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.gradients import MeshGradients
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.saving import SavingMixin

VOCABULARY = 251  # odd: padded where it is cut in two
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
MODELS = {
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "mixture": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}),
}  # fmt: skip
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none")
ONE_LAYER = LoraConfig(r=4, lora_alpha=8, target_modules=["layers.0.self_attn.q_proj"], bias="none")  # on one pipeline stage
PLAIN = {"lr": 3e-3, "weight_decay": 0.3}


@dataclass(frozen=True)
class Kind:
    """What is trained, and how. Epsilon is large: else a moment near 0 makes much of what rounding left of a gradient."""

    model: str = "tied"
    dtype: str = "float32"
    optimizer: str = "AdamW"
    options: dict = field(default_factory=lambda: PLAIN | {"eps": 1e-3})
    lora: LoraConfig | None = None
    companions: bool = False  # a value head, and a reference


KINDS = {
    "tied": Kind(),
    "untied": Kind("untied"),
    "mixture": Kind("mixture"),
    "bfloat16": Kind("untied", "bfloat16"),
    "adam": Kind(optimizer="Adam"),
    "sgd": Kind(optimizer="SGD", options=PLAIN | {"momentum": 0.9}),
    "plain_sgd": Kind(optimizer="SGD", options=PLAIN),
    "lora": Kind(lora=LORA),
    "one_layer": Kind(lora=ONE_LAYER),
    "companions": Kind(dtype="bfloat16", lora=LORA, companions=True),
}


@dataclass(frozen=True)
class Layout:
    kinds: tuple[str, ...]
    options: dict = field(default_factory=dict)
    short: bool = False  # updates, and checkpoints of others

    @property
    def overlaps(self) -> bool:
        return "overlap_grad_reduce" in self.options


TP2, PP2, CP2, EP2 = ({f"{name}_parallel": 2} for name in ("tensor", "pipeline", "context", "expert"))
ZERO, OVERLAP = {"distributed_optimizer": True}, {"overlap_grad_reduce": True}
LAYOUTS = {
    1: {"1": Layout(("tied",)), "1-others": Layout(("adam", "sgd", "plain_sgd"), short=True)},
    2: {
        "tp2": Layout(("tied", "lora"), TP2),
        "tp2-whole": Layout(("tied",), TP2 | {"sequence_parallel": False}, short=True),
        "pp2": Layout(("tied", "one_layer", "companions"), PP2),
        "vpp2-overlaps": Layout(("untied",), PP2 | {"virtual_stages": 2} | OVERLAP),
        "cp2": Layout(("tied",), CP2, short=True),
        "dp2": Layout(("tied",)),
        "dp2-zero": Layout(("tied", "companions"), ZERO),
        "dp2-overlaps": Layout(("bfloat16",), ZERO | OVERLAP | {"overlap_param_gather": True}),
        "ep2": Layout(("mixture",), EP2),
    },
    4: {
        "pp2-zero": Layout(("tied",), PP2 | ZERO, short=True),
        "tp2-ep2-zero": Layout(("mixture",), TP2 | EP2 | ZERO | {"expert_tensor_parallel": 1}, short=True),
    },
}


# --- the same on both backends ------------------------------------------------------------------------------------------


def set_up(model: SavingMixin, kind: Kind, accumulation: int) -> SavingMixin:
    if kind.lora is None:
        model.start_training(accumulation)
    else:
        model.add_adapter_to_model("default", kind.lora, gradient_accumulation_steps=accumulation)
    if kind.companions:
        model.add_value_head()
        model.set_reference("refreshed")
        model.set_loss("PPOLoss", value_coef=0.5)
    model.set_processor("InputProcessor", micro_batch_size=3)
    model.set_optimizer(kind.optimizer, **kind.options)
    model.set_lr_scheduler("cosine", total_steps=9, warmup_steps=1)
    return model


def share(model: SavingMixin, rows: list) -> list:
    rank, size = model.data_parallel
    return rows[rank::size]


def call(model: SavingMixin, *seeds: int) -> None:
    rows = share(model, [row for seed in seeds for row in make_rows(5, seed=seed)])
    given = {}
    if model.trained().value_head is not None:
        counts = [sum(label != -100 for label in row["labels"]) for row in rows]
        values = {"advantages": 0.5, "old_logps": -5.0, "old_values": 0.0, "returns": 1.0}
        given = {name: [[value] * count for count in counts] for name, value in values.items()}
    model.forward_backward(rows, **given)


def step(model: SavingMixin, number: int) -> float:
    """A window of two calls, in one where only that is possible; the gradient norm. It is clipped in every second one."""
    seeds, clip = (2 * number, 2 * number + 1), (0.5 if number % 2 else None)
    if model.training_state().gradient_accumulation_steps == 1:
        call(model, *seeds)
        model.clip_grad_and_step(clip)
    else:
        for seed in seeds:
            call(model, seed)
            model.clip_grad_and_step(clip)
    if model.trained().reference is not None:
        model.refresh_reference(0.5)
    return model.calculate_metric(is_training=True).result["grad_norm"]


class Collected:
    """In place of a CheckpointWriter: keeps what would be written."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add_tensors(self, folder: str, specs: list[TensorSpec], tensors, **options) -> None:
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            assert TensorSpec.of(name, tensor) == spec
            self.tensors[f"{folder}/{name}"] = tensor.clone()

    def add_json(self, name: str, value: dict) -> None:
        assert json.dumps(value, allow_nan=False)

    def add_files(self, folder: str, write) -> None: ...


def everything(model: SavingMixin) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold, by folder and name in it. Collective."""
    collected = Collected()
    model.save_state(collected)
    return collected.tensors


def stored(where: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(where.rglob("*.safetensors")):
        found |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def reference(model: SavingMixin, name: str, out: Path) -> None:
    """Three updates, a checkpoint; a call, a checkpoint inside the window; the end of that window, a checkpoint."""
    norms = [step(model, number) for number in range(3)]
    model.save(f"{name}-closed", str(out), save_optimizer=True)
    call(model, 6)
    model.clip_grad_and_step(None)
    model.save(f"{name}-open", str(out), save_optimizer=True)
    call(model, 7)
    model.clip_grad_and_step(None)
    model.save(f"{name}-end", str(out), save_optimizer=True)
    (out / f"{name}.json").write_text(json.dumps(norms))


# --- what is checked ----------------------------------------------------------------------------------------------------


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
            model.training_state().gradients.close()
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
        for kind in layout.kinds:
            found = check(runtime, Path(folders), Path(expected), Path(out) / name, layout, kind)
            if runtime.is_main:
                (Path(out) / f"{name}-{kind}.json").write_text(json.dumps(found))
