"""What the tests of test_megatron_lora.py compare: adapters in each layout with those that PEFT trains on transformers.

Each process of a launch of N (see ranks.py) does all layouts of N processes, one after the other, and leaves the distances
that it measured.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compute_worker import CP2, DEEP, EP2, FULL, MODELS, PP2, SELECTIVE, SHAPE, SP2, TP2, VOCABULARY, VPP2, gap
from hf_folders import save_models
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import make_rows
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError
from twinkle_research.model.lora_config import config_json
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.build import build_chunks
from twinkle_research.model.megatron.compute import Compute
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.lora import Adapters
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.training import MeshTrainingState
from twinkle_research.model.optimizer import optimizer_spec
from twinkle_research.model.passes import Trained
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.processor.base import InputProcessor

SEED = 3
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.4},
    # Of fused matrices only a part, in some layers; ranks and scales that differ within one.
    "parts": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "o_proj"], "layers_to_transform": [1, 2],
        "rank_pattern": {"v_proj": 2, r"layers\.2\.self_attn\.q_proj": 3}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True,
        "lora_dropout": 0.2,
    },
    "mlp": {"r": 3, "lora_alpha": 9, "target_modules": ["up_proj", "down_proj"], "exclude_modules": r".*layers\.3.*"},
    "last": {"r": 4, "lora_alpha": 16, "target_modules": r".*layers\.3\.self_attn\.(k|q)_proj"},  # one stage has nothing
}  # fmt: skip
# Of float32; gradients and weights relative to the largest element. A change of all weights by a unit in the last place
# moves single elements of these gradients by up to 5e-5.
BOUNDS = {
    "initial": 0.0, "loaded": 0.0, "merged": 0.0, "scores": 5e-6, "loss": 5e-6, "logps": 5e-6, "norm": 2e-5, "gradients": 1e-4,
    "stepped": 2e-5,
}  # fmt: skip
PROCESSORS = (InputProcessor("left", micro_batch_size=2), InputProcessor(packing=True, micro_batch_tokens=28))


@dataclass(frozen=True)
class Layout:
    adapters: tuple[str, ...]
    model: str = "dense"
    options: dict = field(default_factory=dict)


SPLIT = {"distributed_optimizer": True, "overlap_grad_reduce": True}
ALL, ALL_LAST, ALL_PARTS = ("all",), ("all", "last"), ("all", "parts")
LAYOUTS = {
    1: {
        "1": Layout(tuple(ADAPTERS)), "1-full": Layout(ALL_LAST, "untied", FULL), "1-mixture": Layout(ALL_PARTS, "mixture"),
    },
    2: {
        "tp2": Layout(ALL_PARTS, options=TP2), "tp2-full": Layout(("mlp",), "untied", TP2 | FULL),
        "sp2": Layout(("all", "parts", "mlp"), options=SP2), "sp2-full": Layout(ALL_PARTS, "mixture", SP2 | FULL),
        "pp2": Layout(ALL_LAST, options=PP2 | SELECTIVE), "pp2-full": Layout(("last",), "untied", PP2 | FULL),
        "vpp2": Layout(ALL, options=VPP2), "cp2": Layout(ALL, options=CP2 | FULL), "dp2": Layout(ALL_LAST, options=SPLIT),
        "ep2": Layout(ALL, "mixture", EP2),
    },
    4: {
        "tp2-pp2": Layout(ALL_PARTS, options=TP2 | PP2), "sp2-pp2": Layout(ALL_LAST, "untied", SP2 | PP2 | FULL),
        "sp2-vpp2": Layout(("all", "mlp"), options=SP2 | VPP2 | SELECTIVE), "sp2-cp2": Layout(ALL, options=SP2 | CP2),
    },
}  # fmt: skip
TOGETHER = {1: ("1", "1-full"), 2: ("sp2", "pp2", "dp2"), 4: ("sp2-vpp2",)}


def lora(name: str) -> LoraConfig:
    return LoraConfig(**ADAPTERS[name])


def rows() -> list[dict]:
    """One trains nothing. Their order and numbers differ."""
    made = make_rows(6, seed=4, vocabulary=VOCABULARY)
    made[3]["labels"] = [-100] * made[3]["length"]
    return [row | {"sample_index": 5 - i} for i, row in enumerate(made)]


def b_values(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """B would be 0 at first, which hides a lot."""
    generator = torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(shapes[name], generator=generator) for name in sorted(shapes) if ".lora_B." in name}


# --- as PEFT does it ----------------------------------------------------------------------------------------------------


def reference(folder: Path, name: str, stem: Path) -> None:
    model = TransformersModel(folder, seed=SEED)
    model.add_adapter_to_model("default", lora(name))
    parameters = model.training_state().parameters
    tensors = {f"{n}.initial": p.detach().clone() for n, p in parameters.items()}
    with torch.no_grad():
        for n, value in b_values({n: tuple(p.shape) for n, p in parameters.items()}).items():
            parameters[n].copy_(value)
    loaded = {n: p.detach().clone() for n, p in parameters.items()}
    tensors |= {f"{n}.loaded": t for n, t in loaded.items()} | {f"{n}.merged": t.clone() for n, t in model.disk_weights()}
    base, scored = (model.forward_only(rows(), disable_lora=off).result["logps"] for off in (True, False))
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    done = model.forward_backward(rows(), normalizer=model.count(rows())).result
    tensors |= {f"{n}.gradient": g.clone() for n, g in model.training_state().gradients.tensors().items()}
    norm = model.clip_grad_norm(0.5)
    model.step()
    tensors |= {f"{n}.stepped": p.detach().clone() for n, p in parameters.items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, f"{stem}.safetensors")
    (stem.parent / f"{stem.name}-folder").mkdir()
    save_file(loaded, stem.parent / f"{stem.name}-folder" / "adapter_model.safetensors")
    facts = {
        "base": base,
        "scored": scored,
        "done": done,
        "norm": norm,
        "config": config_json(model.module.peft_config["default"]),
    }
    Path(f"{stem}.json").write_text(json.dumps(facts))


def references(folders: Path, out: Path) -> None:
    models = {name: MODELS[name] for name in ("dense", "untied", "mixture")}
    save_models(folders, models, SHAPE | DEEP, norms=True)
    for model in models:
        of_model = [layout for layouts in LAYOUTS.values() for layout in layouts.values() if layout.model == model]
        for name in {"all"} | {name for layout in of_model for name in layout.adapters}:
            reference(folders / model, name, out / f"{model}-{name}")


# --- as a layout does it ------------------------------------------------------------------------------------------------


class Opened:
    """A model in a layout, its weights loaded, with adapters on it."""

    def __init__(self, folder: Path, runtime: Runtime, options: dict) -> None:
        self.mesh = Mesh.open(runtime, MegatronBackendConfig(**options))
        self.architecture = Architecture.read(folder)
        self.chunks = build_chunks(self.architecture, self.mesh, torch.float32)
        self.base = families.named_parameters(self.architecture, self.mesh, self.chunks)
        self.directory = Directory(self.mesh, families.pieces(self.architecture, self.mesh, self.base))
        self.directory.load(
            TensorFolder(folder, "model"), self.base.__getitem__,
            is_ignored=lambda n: families.is_ignored(self.architecture, n),
        )  # fmt: skip
        self.trained: dict[str, Trained] = {}
        self.adapters = Adapters(self.chunks, self.mesh, self.architecture, SEED)
        self.compute = Compute(
            self.chunks, self.mesh, self.architecture.vocab_size, activate=lambda trained: self.adapters.activate(trained.name)
        )

    def train(self, name: str) -> Trained:
        self.adapters.activate(name)
        return Trained(name, MeshTrainingState(self.adapters[name].parameters, self.mesh, self.chunks))

    def share(self, of_rows: list) -> list:
        rank, size = self.mesh.data_parallel
        return of_rows[rank::size]

    def whole(self, name: str, of: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under the names on disk, on every rank."""
        return {n: tensor.detach().clone() for n, tensor in self.adapters[name].directory.stream(of.__getitem__)}

    def scores(self, trained: Trained) -> list[list[float]]:
        self.mode(training=False)
        scored = self.compute.plain_scores(trained, self.share(rows()), nullcontext())
        self.mode(training=True)
        return scored["logps"]

    def mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def close(self) -> None:
        for trained in self.trained.values():
            trained.training.gradients.close()
        self.mesh.close()


@dataclass
class Expected:
    """What PEFT found with one adapter."""

    stem: Path

    def __post_init__(self) -> None:
        self.facts: dict[str, Any] = json.loads(Path(f"{self.stem}.json").read_text())
        self.tensors = load_file(f"{self.stem}.safetensors")
        self.folder = self.stem.parent / f"{self.stem.name}-folder"

    def distance(self, found: dict[str, Tensor], kind: str) -> float:
        """Relative to the largest element of all. 0 only where all are equal bit for bit."""
        wanted = {name.removesuffix(f".{kind}"): t for name, t in self.tensors.items() if name.endswith(f".{kind}")}
        assert found.keys() == wanted.keys()
        largest = max(float(tensor.abs().max()) for tensor in wanted.values())
        return max(float((tensor - wanted[name]).abs().max()) for name, tensor in found.items()) / largest


def measure(opened: Opened, name: str, expected: Expected, packing: bool, spoil: Callable[[Opened], None] | None = None) -> dict:
    """One update of one adapter, through every call: distances from what PEFT found."""
    adapter, shares = opened.adapters.add(name, lora(name)), opened.mesh.shares
    found = {"initial": expected.distance(opened.whole(name, adapter.parameters), "initial")}
    adapter.directory.load(TensorFolder(expected.folder, "adapter_model"), adapter.parameters.__getitem__)
    trained = opened.train(name)
    training = trained.training
    assert config_json(adapter.config) == expected.facts["config"]
    trained.processor = PROCESSORS[packing]
    own = opened.share(rows())
    found["loaded"] = expected.distance(opened.whole(name, adapter.parameters), "loaded")
    merged = opened.directory.stream(lambda memory: adapter.effective(memory, opened.base[memory].detach()))
    found["merged"] = expected.distance({n: t.clone() for n, t in merged}, "merged")
    found["scores"] = gap(opened.scores(trained), opened.share(expected.facts["scored"]))
    if spoil is not None:
        spoil(opened)
    training.set_optimizer(optimizer_spec("AdamW", lr=1e-2, eps=1e-3))
    divisor = training.open(shares.all_reduce_sum(trained.loss.count(own)))
    done = opened.compute.run(trained, own, {}, divisor, normalized=True, backward=True, is_training=True).result
    found["loss"] = abs(sum(shares.gather_objects(done["loss"])) - expected.facts["done"]["loss"])
    found["logps"] = gap(done["logps"], opened.share(expected.facts["done"]["logps"]))
    found["norm"] = abs(training.clip_grad_norm(None) / expected.facts["norm"] - 1)
    if not opened.mesh.layout.distributed_optimizer:  # which has the sums of a part only
        found["gradients"] = expected.distance(opened.whole(name, training.gradients.tensors()), "gradient")
    training.clip_grad_norm(0.5)
    training.step()
    found["stepped"] = expected.distance(opened.whole(name, adapter.parameters), "stepped")
    opened.trained[name] = trained
    return found


def together(opened: Opened, base: list[list[float]]) -> dict[str, float]:
    """All adapters are there and trained. Each is as it was when it was alone, and so is the base."""
    before = {name: opened.scores(trained) for name, trained in opened.trained.items()}
    with opened.adapters.disabled():
        found = {"base": max(gap(opened.scores(trained), base) for trained in opened.trained.values())}
    first, *others = opened.trained
    opened.trained.pop(first).training.gradients.close()
    opened.adapters.remove(first)
    assert opened.adapters.active != first and list(opened.adapters) == others
    assert not any(n.startswith(f"adapters.{first}.") for chunk in opened.chunks for n, _ in chunk.named_parameters())
    found["others"] = max(gap(opened.scores(opened.trained[name]), before[name]) for name in others)
    found["different"] = min(gap(before[first], before[name]) for name in others)
    return found


# --- guards taken away: what must then be seen --------------------------------------------------------------------------


def untag(opened: Opened) -> None:
    """Nobody sums what each rank found in its part of the sequence."""
    for parameter in opened.adapters["all"].parameters.values():
        parameter.sequence_parallel = False


def unmark(opened: Opened) -> None:
    """Factors that are whole on each rank look like parts."""
    for parameter in opened.adapters["all"].parameters.values():
        parameter.tensor_model_parallel = True


def cut_graph(opened: Opened) -> None:
    """The output of the frozen embedding needs no gradient."""
    for chunk in opened.chunks:
        if chunk.pre_process:
            chunk.embedding._forward_hooks.clear()


# layout -> (guard, measure that must show that it is gone)
SPOILT = {"sp2": (untag, "gradients"), "tp2": (unmark, "norm"), "tp2-full": (cut_graph, "norm")}


def refused(runtime: Runtime, out: Path) -> None:
    """One key-value head on two processes, which would have a part of it each."""
    from transformers import LlamaConfig

    LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}).save_pretrained(out / f"narrow-{runtime.rank}")
    mesh = Mesh.open(runtime, MegatronBackendConfig(tensor_parallel=2))
    architecture = Architecture.read(out / f"narrow-{runtime.rank}")
    adapters = Adapters(build_chunks(architecture, mesh, torch.float32), mesh, architecture, SEED)
    try:
        adapters.add("all", lora("all"))
    except ConfigError as error:
        (out / f"refused-{runtime.rank}").write_text(str(error))
    mesh.close()


def main(runtime: Runtime, folders: str, expected: str, out: str, names: str = "") -> None:
    if runtime.world_size == 2:
        refused(runtime, Path(out))
    for name, layout in LAYOUTS[runtime.world_size].items():
        if names and name not in names.split(","):
            continue
        opened = Opened(Path(folders) / layout.model, runtime, layout.options)
        found = {}
        for i, adapter in enumerate(layout.adapters):
            stored = Expected(Path(expected) / f"{layout.model}-{adapter}")
            found[adapter] = measure(opened, adapter, stored, packing=bool(i % 2))
        if name in TOGETHER[runtime.world_size]:
            found["together"] = together(opened, opened.share(stored.facts["base"]))
        opened.close()
        if name in SPOILT:
            guard, shows = SPOILT[name]
            opened = Opened(Path(folders) / layout.model, runtime, layout.options)
            spoilt = measure(opened, "all", Expected(Path(expected) / f"{layout.model}-all"), packing=True, spoil=guard)
            found["spoilt"] = {shows: spoilt[shows]}
            opened.close()
        Path(out, f"{name}-{runtime.rank}.json").write_text(json.dumps(found))
