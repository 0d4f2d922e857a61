"""What the tests of test_megatron_pieces.py compare: folders in every layout, and back (see ranks.py)."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from hf_folders import MODELS, bits, random_bits
from safetensors.torch import save_file
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.build import build_chunks
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.pieces import Piece

MIXTURES = [name for name in MODELS if "moe" in name or name == "mixtral" or name.startswith("deepseek")]
DENSE = [name for name in MODELS if name not in MIXTURES]
EVERY = list(MODELS)


@dataclass(frozen=True)
class Layout:
    models: tuple[str, ...] | list[str]
    options: dict = field(default_factory=dict)

    def config(self) -> MegatronBackendConfig:
        return MegatronBackendConfig(**self.options)


TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
VPP2 = PP2 | {"virtual_stages": 2}
LAYOUTS = {
    1: {"1": Layout(EVERY)},
    2: {
        "tp2": Layout(DENSE, TP2),
        "tp2-etp1": Layout(MIXTURES, TP2 | {"expert_tensor_parallel": 1, "expert_parallel": 2}),
        "etp2": Layout(MIXTURES, TP2 | {"expert_tensor_parallel": 2}),
        "pp2": Layout(EVERY, PP2),
        "vpp2": Layout(EVERY, VPP2),
        "ep2": Layout(MIXTURES, {"expert_parallel": 2}),
        "dp2": Layout(["llama_tied", "qwen3_moe_mixed"]),
    },
    4: {
        "tp4": Layout(EVERY, {"tensor_parallel": 4}),
        "tp2-dp2": Layout(["llama_tied", "qwen2_untied"], TP2),
        "tp2-pp2": Layout(EVERY, TP2 | PP2),
        "tp2-vpp2": Layout(["llama_tied", "qwen3_untied"], TP2 | VPP2),
        "tp2-ep2": Layout(MIXTURES, TP2 | {"expert_parallel": 2}),
        "tp2-ep2-etp1": Layout(MIXTURES, TP2 | {"expert_parallel": 2, "expert_tensor_parallel": 1}),
        "pp2-ep2": Layout(MIXTURES, PP2 | {"expert_parallel": 2}),
        "cp2-tp2": Layout(["qwen3_tied"], TP2 | {"context_parallel": 2}),
    },
}


class Opened:
    """A model in a layout, its weights loaded."""

    def __init__(self, folder: Path, mesh: Mesh, dtype: torch.dtype, bucket_bytes: int = 20_000) -> None:
        self.mesh = mesh
        self.files = TensorFolder(folder, "model")
        self.architecture = Architecture.read(folder)
        self.chunks = build_chunks(self.architecture, mesh, dtype)
        self.parameters = families.named_parameters(self.architecture, mesh, self.chunks)
        self.directory = Directory(mesh, families.pieces(self.architecture, mesh, self.parameters), bucket_bytes)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.fill_(7.0)  # what is not loaded shows

    def load(self) -> None:
        self.directory.load(self.files, self.parameters.__getitem__)


# --- where each number must be, worked out the other way round: whole matrices put together, then cut ---------------------


def cut(tensor: Tensor, dim: int, axis) -> Tensor:
    return tensor.chunk(axis.size, dim)[axis.rank]


def padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def joined(model: Opened, layer: str, kind: str) -> Tensor:
    """[q of the first group, its k, its v, q of the second group, ...]"""
    groups = model.architecture.num_kv_heads
    parts = [model.files[f"{layer}self_attn.{x}_proj.{kind}"].unflatten(0, (groups, -1)) for x in "qkv"]
    return torch.cat(parts, dim=1).flatten(0, 1)


def expected(model: Opened, name: str) -> Tensor:
    """The local tensor of the parameter ``name``, out of whole ones."""
    mesh, files, tied = model.mesh, model.files, model.architecture.tied
    vocabulary = model.architecture.padded_vocab(mesh.tp.size)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        source = "model.embed_tokens.weight" if tied or name.startswith("embedding") else "lm_head.weight"
        return cut(padded(files[source], vocabulary), 0, mesh.tp)
    if name == "decoder.final_layernorm.weight":
        return files["model.norm.weight"]
    number, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name).groups()
    layer = f"model.layers.{number}."
    simple = {
        "input_layernorm.weight": "input_layernorm.weight", "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias", "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    }  # fmt: skip
    if model.architecture.family in ("gemma2", "gemma3_text"):
        simple |= {
            "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
            "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
        }
    if model.architecture.family == "deepseek_v2":
        simple |= {
            "self_attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
            "self_attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        }
        rows = {"q": "q_proj", "q_down": "q_a_proj", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj"}
        if found := re.fullmatch(r"self_attention\.linear_((?:q|kv)\w*)\.weight", rest):
            return cut(files[f"{layer}self_attn.{rows[found[1]]}.weight"], 0, mesh.tp)
    if rest == "mlp.shared_experts.gate.weight":
        return files[f"{layer}mlp.shared_expert_gate.weight"]
    if rest in simple:
        return files[layer + simple[rest]]
    if rest.startswith("self_attention.linear_qkv."):
        return cut(joined(model, layer, rest.rpartition(".")[2]), 0, mesh.tp)
    if rest == "self_attention.linear_proj.weight":
        return cut(files[f"{layer}self_attn.o_proj.weight"], 1, mesh.tp)
    mixtral = model.architecture.family == "mixtral"
    if rest == "mlp.router.weight":
        return files[f"{layer}{'block_sparse_moe' if mixtral else 'mlp'}.gate.weight"]
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    axis, block = mesh.tp, f"{layer}mlp."
    if rest.startswith("mlp.shared_experts."):
        block += "shared_experts." if model.architecture.family == "deepseek_v2" else "shared_expert."
    if expert := re.match(r"mlp\.experts\.local_experts\.(\d+)\.", rest):
        axis, block = mesh.etp, f"{layer}{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert[1]}."
    if ".linear_fc1." in rest:
        kind = rest.rpartition(".")[2]
        return torch.cat([cut(files[f"{block}{x}.{kind}"], 0, axis) for x in (gate, up)])
    assert rest.endswith("linear_fc2.weight")
    return cut(files[f"{block}{down}.weight"], 1, axis)


# --- the checks ---------------------------------------------------------------------------------------------------------


def check_everything(model: Opened) -> None:
    """Loaded, every local number is where it must be; streamed, every tensor is as it is in the folder, on every rank."""
    model.load()
    for name, parameter in model.parameters.items():
        assert torch.equal(bits(parameter.detach()), bits(expected(model, name))), name
    found = []
    for name, tensor in model.directory.stream(model.parameters.__getitem__):
        found.append(name)
        assert str(tensor.dtype) == f"torch.{model.files.spec(name).dtype}"
        assert torch.equal(bits(tensor), bits(model.files[name])), name
        del tensor
    assert sorted(found) == sorted(model.files)
    assert found == list(model.directory.shapes) == in_order(found)


def in_order(names: list[str]) -> list[str]:
    """Embedding, layers, norm, head; experts behind the rest of their layer."""

    def key(name: str) -> tuple[int, ...]:
        outside = {"model.embed_tokens.weight": 0, "model.norm.weight": 2, "lm_head.weight": 3}
        if name in outside:
            return (outside[name],)
        layer = int(name.split(".")[2])
        expert = re.search(r"experts\.(\d+)", name)
        return (1, layer, int(expert[1]) + 1 if expert else 0)

    return sorted(names, key=key)


def check_slots(model: Opened, out: Path) -> None:
    """Another tensor of each parameter's shape goes the same way, under another name and in another dtype; some of them."""
    moments = {n: random_bits(s, torch.float32, i) for i, (n, s) in enumerate(model.directory.shapes.items())}
    if model.mesh.runtime.is_main:
        save_file({f"{name}.exp_avg": tensor for name, tensor in moments.items()}, out / "optimizer.safetensors")
    model.mesh.runtime.barrier()
    local = {name: torch.full(p.shape, 7.0) for name, p in model.parameters.items()}
    calls = []
    replicas = None if model.architecture.experts else model.mesh.dp.group  # experts have others
    model.directory.load(TensorFolder(out, "optimizer"), local.__getitem__, suffix=".exp_avg")

    def asked(name: str) -> Tensor:
        calls.append(name)
        if replicas is not None:
            dist.barrier(group=replicas)  # what is asked for may have to be put together first
        return local[name]

    dtypes = model.directory.dtypes(local.__getitem__)
    assert set(dtypes.values()) == {torch.float32}
    specs = model.directory.specs(dtypes, ".exp_avg")
    for (name, tensor), spec in zip(model.directory.stream(asked, dtypes=dtypes), specs, strict=True):
        assert (f"{name}.exp_avg", tuple(tensor.shape)) == (spec.name, spec.shape)
        assert torch.equal(bits(tensor), bits(moments[name]))
    held = [name for name in local if model.directory.tensors_of(name)]
    assert sorted(calls) == sorted(held)  # each once, on every rank that holds it
    some = [name for name in model.directory.shapes if ".layers.1." in name]
    assert [name for name, _ in model.directory.stream(local.__getitem__, some)] == some


def check_mixed_dtypes(model: Opened) -> None:
    """Routers and norms in float32, say, others in bfloat16."""
    local = {n: p.detach().to(torch.float32 if "norm" in n else torch.bfloat16) for n, p in model.parameters.items()}
    for name, tensor in model.directory.stream(local.__getitem__):
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(bits(tensor), bits(model.files[name].to(tensor.dtype)))


def check_disagreement(mesh: Mesh) -> None:
    """Parts that do not make up a tensor are refused on every rank alike."""
    rank = mesh.runtime.rank
    halves = {"overlap": slice(rank, rank + 3), "all together hold 2 of its 4 elements": slice(rank, rank + 1)}
    for words, rows in halves.items():
        try:
            Directory(mesh, {"w": [Piece("w", (4,), (rows,))]})
        except ConfigError as error:
            assert words in str(error) and "tensor w" in str(error)
        else:
            raise AssertionError(words)


def main(runtime: Runtime, folders: str, out: str) -> None:
    for name, layout in LAYOUTS[runtime.world_size].items():
        mesh = Mesh.open(runtime, layout.config())
        for i, model in enumerate(layout.models):
            # Buckets of some tensors, and of less than one.
            opened = Opened(Path(folders) / model, mesh, MODELS[model][2], bucket_bytes=(20_000, 2_000)[i % 2])
            check_everything(opened)
        if name in ("tp2", "ep2", "tp2-pp2", "tp2-dp2"):
            check_slots(opened, Path(out))
            check_mixed_dtypes(opened)
        if name == "tp2":
            check_disagreement(mesh)
        mesh.close()
        if runtime.is_main:
            (Path(out) / f"{runtime.world_size}-{name}").touch()
        runtime.barrier()
