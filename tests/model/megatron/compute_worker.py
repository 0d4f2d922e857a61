"""What the tests of test_megatron_compute.py compare: losses, scores and gradients of each layout with those of transformers.

Each process of a launch of N (see ranks.py) does all layouts of N processes, one after the other, and leaves the distances
that it measured.
"""

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hf_folders import save_models
from safetensors.torch import load_file, save_file
from tiny_models import make_rows

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.build import build_chunks
from twinkle_research.model.megatron.compute import Compute
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.training import MeshTrainingState
from twinkle_research.model.passes import Trained
from twinkle_research.model.value_head import PREFIX, ValueHead
from twinkle_research.processor.base import InputProcessor

VOCABULARY = 251  # odd: padded where it is cut in two
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
DEEP = {"num_hidden_layers": 4}  # as many as there are virtual stages; two layers take half the time
MODELS = {
    "dense": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "mixture": ("Qwen3Moe", MIXTURE),
    "dense-deep": ("Qwen3", {"tie_word_embeddings": True} | DEEP),
    "untied-deep": ("Llama", {"tie_word_embeddings": False} | DEEP),
    "mixture-deep": ("Qwen3Moe", MIXTURE | DEEP),
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    loss: str
    options: dict = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    rows: int = 5
    filtered: bool = False  # temperature and kept sets
    critic: bool = False


WORK = {
    "cross_entropy": Work("CrossEntropyLoss"),
    "one_row": Work("CrossEntropyLoss", rows=1),  # several shares: not all have one
    "grpo": Work("GRPOLoss", {"beta": 0.1, "entropy_coef": 0.1}, ("advantages", "old_logps", "ref_logps"), filtered=True),
    "gspo": Work("GSPOLoss", {}, ("advantages", "old_logps")),
    "dpo": Work("DPOLoss", {}, ("ref_logps",), rows=6),
    "ppo": Work("PPOLoss", {"value_coef": 0.1}, ("advantages", "old_logps", "old_values", "returns"), critic=True),
}
PROCESSORS = {"padded": InputProcessor("left", micro_batch_size=2), "packed": InputProcessor(packing=True, micro_batch_tokens=28)}


@dataclass(frozen=True)
class Layout:
    model: str = "dense"
    options: dict = field(default_factory=dict)


TP2, PP2, CP2 = {"tensor_parallel": 2, "sequence_parallel": False}, {"pipeline_parallel": 2}, {"context_parallel": 2}
SP2, VPP2, EP2 = {"tensor_parallel": 2}, PP2 | {"virtual_stages": 2}, {"expert_parallel": 2}
FULL, SELECTIVE = {"recompute": Recompute.full}, {"recompute": Recompute.selective}
LAYOUTS = {
    1: {
        "1": Layout(), "1-untied": Layout("untied", FULL), "1-mixture": Layout("mixture", SELECTIVE),
        "1-full": Layout(options=FULL),
    },
    2: {
        "tp2": Layout(options=TP2), "tp2-untied": Layout("untied", TP2 | SELECTIVE), "tp2-sp": Layout(options=SP2 | FULL),
        "pp2": Layout(options=PP2), "pp2-untied": Layout("untied", PP2 | FULL), "vpp2": Layout("dense-deep", VPP2),
        "cp2": Layout(options=CP2 | FULL), "dp2": Layout("untied"), "dp2-overlap": Layout(options={"overlap_grad_reduce": True}),
        "ep2": Layout("mixture", EP2), "pp2-mixture": Layout("mixture", PP2),
    },
    4: {
        "tp2-pp2": Layout(options=SP2 | PP2), "tp2-vpp2": Layout("untied-deep", TP2 | VPP2 | SELECTIVE),
        "tp2-cp2": Layout(options=SP2 | CP2), "tp2-ep2": Layout("mixture", SP2 | EP2 | {"expert_tensor_parallel": 1}),
        "vpp2-ep2": Layout("mixture-deep", VPP2 | EP2 | FULL), "cp2-ep2": Layout("mixture", CP2 | EP2),
    },
}  # fmt: skip


def rows_of(work: Work) -> list[dict]:
    """One trains nothing, where there are several."""
    rows = make_rows(work.rows, seed=4, low=4 if work.rows > 1 else 12, vocabulary=VOCABULARY)
    if work.rows == 5:
        rows[3]["labels"] = [-100] * rows[3]["length"]
    if work.filtered:
        generator = torch.Generator().manual_seed(5)
        for i, row in enumerate(rows):
            row["temperature"] = 0.8 + 0.1 * i
            trained = [label for label in row["labels"] if label != -100]
            kept = torch.randint(0, VOCABULARY, (len(trained), 40), generator=generator).tolist()
            row["kept_ids"] = [sorted({label, *ids}) for label, ids in zip(trained, kept, strict=True)]
    return rows


def loss_inputs(work: Work, rows: list[dict]) -> dict[str, list[list[float]]]:
    generator = torch.Generator().manual_seed(6)
    trained = [sum(label != -100 for label in row["labels"]) for row in rows]

    def draw(name: str) -> list[list[float]]:
        middle = -5.0 if name.endswith("logps") else 0.0
        return [(middle + 0.3 * torch.randn(count, generator=generator)).tolist() for count in trained]

    return {name: draw(name) for name in work.reads}


def set_head(head: ValueHead) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


# --- as transformers computes it ----------------------------------------------------------------------------------------


def reference(folder: Path, work: Work, stem: Path) -> None:
    from twinkle_research.model.transformers import TransformersModel
    from twinkle_research.model.transformers.names import DiskNames

    model = TransformersModel(folder)
    model.set_processor(InputProcessor(micro_batch_size=3 if work.rows % 2 else 2))
    model.set_loss(work.loss, **work.options)
    if work.critic:
        model.add_value_head()
        set_head(model.trained().value_head)
    rows = rows_of(work)
    given = loss_inputs(work, rows)
    plain = model.policy_scores(rows)
    done = model.forward_backward(rows, normalizer=model.count(rows), **given).result
    gradients = model.training_state().gradients.tensors()
    own = {name: g for name, g in gradients.items() if not name.startswith(PREFIX)}
    names = DiskNames(model.module, {name: g.shape for name, g in own.items()})
    found = dict(names.to_disk(own.__getitem__, own)) | {n: g for n, g in gradients.items() if n.startswith(PREFIX)}
    save_file({name: g.contiguous() for name, g in found.items()}, f"{stem}.safetensors")
    metrics = model.calculate_metric(is_training=True).result
    scored = model.forward_only(rows, **given).result
    Path(f"{stem}.json").write_text(json.dumps({"done": done, "metrics": metrics, "scored": scored, "plain": plain}))


def references(folders: Path, out: Path) -> None:
    """Of the work that some layout does on a model."""
    save_models(folders, MODELS, SHAPE, norms=True)
    wanted = {
        (layout.model, kind)
        for size, layouts in LAYOUTS.items()
        for number, layout in enumerate(layouts.values())
        for kind, _ in combinations(size, number)
    }
    for model, kind in sorted(wanted):
        reference(folders / model, WORK[kind], out / f"{model}-{kind}")


# --- as a layout computes it --------------------------------------------------------------------------------------------


class Opened:
    """A model in a layout, its weights loaded, all of them trained."""

    def __init__(self, folder: Path, runtime: Runtime, options: dict) -> None:
        self.mesh = Mesh.open(runtime, MegatronBackendConfig(**options))
        architecture = Architecture.read(folder)
        self.chunks = build_chunks(architecture, self.mesh, torch.float32)
        parameters = families.named_parameters(architecture, self.mesh, self.chunks)
        self.directory = Directory(self.mesh, families.pieces(architecture, self.mesh, parameters))
        self.directory.load(
            TensorFolder(folder, "model"), parameters.__getitem__, is_ignored=lambda n: families.is_ignored(architecture, n)
        )
        self.hidden_size = architecture.hidden_size
        self.trained = Trained("", MeshTrainingState(parameters, self.mesh, self.chunks))
        self.compute = Compute(self.chunks, self.mesh, architecture.vocab_size, activate=lambda trained: None)

    def prepare(self, work: Work, packing: str) -> None:
        """Forgets what was done before."""
        run = self.trained
        run.training.discard_window()
        run.training.meters[True].calculate(self.mesh.shares.gather_objects)
        run.loss, run.processor, run.first_sample = resolve_loss(work.loss, **work.options), PROCESSORS[packing], 0
        if work.critic:
            run.value_head = ValueHead(self.hidden_size, self.mesh.runtime.device)
            set_head(run.value_head)
            if self.mesh.pp.is_last:
                self.chunks[-1].value_head = run.value_head
            run.training.add_parameters(run.value_head.named() if self.mesh.pp.is_last else {})

    def share(self, rows: list) -> list:
        """Every so manieth group of rows that belong together."""
        rank, size = self.mesh.data_parallel
        return [row for i, row in enumerate(rows) if i // self.trained.loss.rows_together % size == rank]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Sums over all processes, whole, under the names of the folder; the value head's on the last stage."""
        state = self.trained.training
        state.gradients.all_reduce(state.runtime)
        sums = state.gradients.tensors()
        found = {name: tensor.clone() for name, tensor in self.directory.stream(sums.__getitem__)}
        return found | {name: tensor for name, tensor in sums.items() if name.startswith(PREFIX)}

    def close(self) -> None:
        self.trained.training.gradients.close()
        self.mesh.close()


def measure(opened: Opened, work: Work, packing: str, expected: Path) -> dict[str, float]:
    """Distances from what transformers found. Those of gradients in parts of the largest one, where that exceeds 1."""
    opened.prepare(work, packing)
    trained, compute, shares = opened.trained, opened.compute, opened.mesh.shares
    rows = rows_of(work)
    own = opened.share(rows)
    given = {key: opened.share(values) for key, values in loss_inputs(work, rows).items()}
    divisor = trained.training.open(shares.all_reduce_sum(trained.loss.count(own)))
    plain = compute.plain_scores(trained, own, nullcontext())
    done = compute.run(trained, own, given, divisor, normalized=True, backward=True, is_training=True).result
    metrics = trained.training.meters[True].calculate(shares.gather_objects)
    scored = compute.run(trained, own, given, 1.0, normalized=False, backward=False, is_training=False).result
    gradients = opened.gradients()

    stored = json.loads(Path(f"{expected}.json").read_text())
    wanted = load_file(f"{expected}.safetensors")
    assert set(gradients) == set(wanted) if opened.mesh.pp.is_last else set(gradients) <= set(wanted)
    assert metrics.keys() == stored["metrics"].keys() and done.keys() == stored["done"].keys()
    assert sum(shares.gather_objects(done["num_tokens"])) == stored["done"]["num_tokens"]
    scale = max(1.0, *(float(tensor.abs().max()) for tensor in wanted.values()))
    found = {
        "loss": abs(sum(shares.gather_objects(done["loss"])) - stored["done"]["loss"]),
        "metrics": max(abs(value - stored["metrics"][key]) / max(1, abs(value)) for key, value in metrics.items()),
        "gradients": max(float((tensor - wanted[key]).abs().max()) for key, tensor in gradients.items()) / scale,
    }
    pairs = ((plain, stored["plain"]), (done, stored["done"]), (scored, stored["scored"]))
    for key in ("logps", "values") if work.critic else ("logps",):
        found[key] = max(gap(one[key], opened.share(other[key])) for one, other in pairs)
    return found


def gap(found: list[list[float]], wanted: list[list[float]]) -> float:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    return max(
        (abs(a - b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)), default=0.0
    )


def combinations(processes: int, number: int) -> list[tuple[str, str]]:
    """Of the layout ``number``: some kinds of work, padded or packed in turn. That with a critic, which stays, is the last."""
    kinds = ("cross_entropy", ("gspo", "dpo")[number % 2], *(("one_row", "grpo") if processes < 4 else ("grpo",)), "ppo")
    return [(kind, ("padded", "packed")[(i + number) % 2]) for i, kind in enumerate(kinds)]


def refused(opened: Opened, packing: str = "padded") -> None:
    """Before anything runs, and on all processes, though only the last stage would know."""
    opened.prepare(WORK["grpo"], packing)
    rows = rows_of(WORK["cross_entropy"])
    for error, given in (("GRPOLoss needs ref_logps", {"advantages": [1.0] * 5}), ("needs advantages and ref_logps", {})):
        try:
            opened.compute.run(opened.trained, rows, given, 1.0, normalized=True, backward=True, is_training=True)
        except UserError as caught:
            assert error in str(caught)
        else:
            raise AssertionError(error)


def different_rows(opened: Opened, rank: int) -> None:
    """Processes that should work on the same rows and do not would wait for each other."""
    rows = rows_of(WORK["cross_entropy"])
    try:
        opened.compute.plain_scores(opened.trained, rows[: 2 + rank % 2], nullcontext())
    except UserError as caught:
        assert "of one data-parallel share were given different rows: all with data_parallel == (0, 1)" in str(caught)
    else:
        raise AssertionError("different rows were taken")


def not_finite(opened: Opened) -> None:
    """All processes of a share learn which rows they are."""
    opened.prepare(Work("GRPOLoss"), "padded")
    training = opened.trained.training
    rows = rows_of(WORK["cross_entropy"])
    given = {"advantages": [1.0, math.nan, 1.0, 1.0, math.inf]}
    opened.compute.run(opened.trained, rows, given, training.open(1.0), normalized=True, backward=True, is_training=True)
    assert training.window.bad_loss and training.window.bad_rows == ["rows.jsonl:2", "rows.jsonl:5"]


def main(runtime: Runtime, folders: str, expected: str, out: str, names: str = "") -> None:
    for number, (name, layout) in enumerate(LAYOUTS[runtime.world_size].items()):
        if names and name not in names.split(","):
            continue
        opened = Opened(Path(folders) / layout.model, runtime, layout.options)
        if opened.mesh.pp.size > 1:
            refused(opened)
            not_finite(opened)
        if opened.mesh.dp.size == 1 and runtime.world_size == 2:
            different_rows(opened, runtime.rank)
        found = {
            f"{kind}-{packing}": measure(opened, WORK[kind], packing, Path(expected) / f"{layout.model}-{kind}")
            for kind, packing in combinations(runtime.world_size, number)
        }
        opened.close()
        Path(out, f"{name}-{runtime.rank}.json").write_text(json.dumps(found))
