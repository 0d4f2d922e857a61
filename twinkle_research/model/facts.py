"""What a model is, read without torch: from config.json and the JSON headers of its safetensors files.

The run plan and the second stage of validation stand on this: parameter counts, dimensions, module names. Only
header bytes are read, and no file outside the folder.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from twinkle_research.checkpoint.names import PARTS
from twinkle_research.errors import ConfigError, nearest
from twinkle_research.model.config import ArchitectureConfig
from twinkle_research.model.headers import read_safetensors_header

ALL_LINEAR = "all-linear"
_SHIPPED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")  # whose tensors are known from their dimensions
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "tok_embeddings", "position_embeddings")
_HEADS = ("lm_head", "embed_out", "output_layer")
_ROUTERS = ("gate", "router")  # what chooses the experts of a token: no linear module in memory, nor are experts
# Parts of multimodal and multi-token-prediction checkpoints that a causal language model does not load.
_OTHER_PARTS = {"visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "mtp"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_SHARED = re.compile(r"\.mlp\.shared_experts?\.up_proj\.weight$")
_COMPRESSED = ("q_a_proj", "kv_a_proj_with_mqa")
# What tensor parallelism cuts: along the outputs, with biases, and along the inputs.
COLUMN = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
)  # fmt: skip
ROW = ("o_proj", "down_proj")
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LayerParameters:
    """Numbers of a layer: what each tensor-parallel process has whole, what they share, and the experts."""

    whole: int
    cut: int
    experts: int


@dataclass(frozen=True)
class LatentWidths:
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): of the narrow vectors that queries (0: they are not
    compressed) and keys with values come out of, and of a head's query or key without and with rotation, and of its value."""

    query_rank: int
    rank: int
    content: int
    rotated: int
    value: int


@dataclass(frozen=True)
class Facts:
    """Facts about the language model in a folder (or shipped, see ArchitectureConfig).

    ``parameters`` counts a tied embedding once; ``embedding_parameters`` are those of token embedding and, where it
    is not tied, output head. ``modules`` are all modules that own a weight, under their on-disk names, head included;
    ``linear_modules`` the last name parts of those that ``all-linear`` stands for. ``weight_bytes`` is the size on disk.
    Of a mixture of experts: ``num_experts`` in a layer, ``experts_per_token``, ``expert_intermediate_size`` of one expert's
    MLP, and the parameters of them all; ``has_dense_layers`` where there are also layers with an ordinary MLP. ``tensors``: all
    outside of experts, with their shapes; ``layer_experts``: the parameters of each layer's experts.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied_embeddings: bool
    parameters: int
    embedding_parameters: int
    linear_shapes: tuple[tuple[int, int], ...]  # of every linear module that all-linear stands for
    linear_modules: tuple[str, ...]
    modules: tuple[str, ...]
    weight_bytes: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_parameters: int = 0
    has_dense_layers: bool = True
    shared_expert_size: int = 0  # columns of the expert that every token sees
    compressed: tuple[tuple[str, int], ...] = ()  # of latent attention: matrix, width of what it gives
    latent: LatentWidths | None = None
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layer_experts: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Of a few of them: what is reckoned from facts is kept, and reckoned for very many layouts."""
        return hash((self.model_type, self.parameters, self.num_layers, self.hidden_size))

    def unknown_modules(self, targets: Iterable[str]) -> list[str]:
        """Those of ``targets`` that name no module. A target names a whole module path or the end of one (PEFT's rule)."""
        return [t for t in targets if t != ALL_LINEAR and not self.matching(t)]

    def matching(self, target: str) -> list[str]:
        return [name for name in self.modules if name == target or name.endswith("." + target)]

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Last name of a module outside of experts -> how many there are of it. Experts are no linear modules in memory."""
        names = {_module(name)[0] for name, _ in self.tensors} | ({"lm_head"} if self.tied_embeddings else set())
        return Counter(name.rpartition(".")[2] for name in names)

    @cached_property
    def layers(self) -> tuple[LayerParameters, ...]:
        whole, cut = [0] * self.num_layers, [0] * self.num_layers
        for name, shape in self.tensors:
            number, last = int(layer_of(name) or self.num_layers), _module(name)[1]
            if number < self.num_layers:
                is_cut = last in COLUMN or (last in ROW and len(shape) == 2)
                (cut if is_cut else whole)[number] += math.prod(shape)
        return tuple(map(LayerParameters, whole, cut, self.layer_experts))

    @cached_property
    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """Module outside of experts -> (outputs, inputs) of its matrix. A tied head has the embedding's."""
        found = {_module(name)[0]: shape for name, shape in self.tensors if len(shape) == 2 and name.endswith(".weight")}
        embedding = next((shape for name, shape in found.items() if is_embedding(name)), None)
        return found | ({"lm_head": embedding} if self.tied_embeddings and embedding else {})

    def hint(self, target: str) -> str:
        """The nearest valid name for an unknown target."""
        return nearest(target, sorted({name.rsplit(".", 1)[-1] for name in self.modules} | {ALL_LINEAR}))


def read_facts(source: str | Path | ArchitectureConfig) -> Facts:
    """Facts of a Hugging Face folder or of a shipped architecture. Raises ConfigError naming the file that is wrong."""
    if isinstance(source, ArchitectureConfig):
        return _facts_of_architecture(source)
    folder = Path(source)
    config = read_json(folder / "config.json")
    headers = _read_headers(folder)
    return _facts_of_folder(config, headers)


def layer_of(name: str) -> str | None:
    """The number of the layer that a tensor or module is in."""
    found = _LAYER.search(name)
    return found[0] if found else None


def is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _EMBEDDINGS


def is_vocabulary_module(name: str) -> bool:
    """Whether a module's name is that of a token embedding or an output head."""
    return name.rpartition(".")[2] in _EMBEDDINGS + _HEADS


def linear_module_names(source: str | Path | ArchitectureConfig) -> tuple[str, ...]:
    """Names that ``all-linear`` stands for, e.g. ("down_proj", ..., "v_proj"); the output head is not among them."""
    return read_facts(source).linear_modules


# --- shipped architectures ------------------------------------------------------------------------------------------


def tensor_shapes(arch: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face parameter names and shapes of a Llama, Mistral, Qwen2 or Qwen3 model, or a mixture of those families, in the
    order of the layers."""
    if arch.model_type not in _SHIPPED:
        raise ConfigError(f"model.architecture.model_type={arch.model_type!r}: {nearest(arch.model_type, _SHIPPED)}")
    hidden, heads, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (rows, hidden)
            if arch.model_type == "qwen2":
                shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads)
        if arch.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (arch.head_dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= (
            _mixture_shapes(arch, prefix) if arch.num_experts else _mlp_shapes(f"{prefix}.mlp", arch.intermediate_size, hidden)
        )
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tied_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def _mlp_shapes(name: str, width: int, hidden: int, parts: tuple[str, ...] = _MLP) -> Shapes:
    """``parts``: the names of the matrices in, beside it, and out."""
    gate, up, down = (f"{name}.{part}.weight" for part in parts)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def _mixture_shapes(arch: ArchitectureConfig, prefix: str) -> Shapes:
    mixtral = arch.model_type == "mixtral"
    name, parts = (f"{prefix}.block_sparse_moe", ("w1", "w3", "w2")) if mixtral else (f"{prefix}.mlp", _MLP)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.gate.weight": (arch.num_experts, arch.hidden_size)}
    for expert in range(arch.num_experts):
        shapes |= _mlp_shapes(f"{name}.experts.{expert}", arch.expert_intermediate_size, arch.hidden_size, parts)
    return shapes


def _facts_of_architecture(arch: ArchitectureConfig) -> Facts:
    return _facts_of_dimensions(*astuple(arch))


@cache
def _facts_of_dimensions(*dimensions: Any) -> Facts:
    """Cached, and counted from one layer: a large mixture has tens of thousands of tensors, and its layers are alike."""
    arch = ArchitectureConfig(*dimensions)
    shapes = tensor_shapes(replace(arch, num_layers=1))
    return Facts(
        model_type=arch.model_type, vocab_size=arch.vocab_size, hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size, num_layers=arch.num_layers, num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads, head_dim=arch.head_dim, max_positions=arch.max_positions,
        tied_embeddings=arch.tied_embeddings, weight_bytes=0, num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token, expert_intermediate_size=arch.expert_intermediate_size,
        has_dense_layers=not arch.num_experts, **_repeated(_count(shapes, 1, arch.tied_embeddings), arch.num_layers),
    )  # fmt: skip


def _repeated(counts: dict[str, Any], layers: int) -> dict[str, Any]:
    """What ``_count`` gives for ``layers`` layers, out of that for one."""
    inside = counts["expert_parameters"] + sum(math.prod(shape) for name, shape in counts["tensors"] if layer_of(name))

    def of_all(names: Iterable[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            before, layer, after = name.partition(".layers.0.")
            for number in range(layers if layer else 1):
                yield name, f"{before}.layers.{number}.{after}" if layer else name

    shapes = dict(counts["tensors"])
    return counts | {
        "parameters": counts["parameters"] + (layers - 1) * inside, "expert_parameters": counts["expert_parameters"] * layers,
        "linear_shapes": tuple(shape for shape in counts["linear_shapes"] for _ in range(layers)),
        "modules": tuple(sorted(name for _, name in of_all(counts["modules"]))),
        "tensors": tuple(sorted((name, shapes[own]) for own, name in of_all(shapes))),
        "layer_experts": counts["layer_experts"] * layers,
    }  # fmt: skip


# --- folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Headers:
    shapes: dict[str, tuple[int, ...]]
    bytes: int


def _facts_of_folder(config: dict[str, Any], headers: _Headers) -> Facts:
    text = config.get("text_config") or config  # multimodal models nest the language model's settings
    shapes = {name: shape for name, shape in headers.shapes.items() if not _OTHER_PARTS & set(name.split("."))}
    flag = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    tied = bool(flag) if flag is not None else not any(_module(name)[1] in _HEADS for name in shapes)

    def number(*names: str, default: int = 0) -> int:
        return next((int(text[name]) for name in names if isinstance(text.get(name), int)), default)

    hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head")
    width = number("intermediate_size", "n_inner", "ffn_dim")
    experts, layers = number("num_local_experts", "num_experts", "n_routed_experts"), number("num_hidden_layers", "n_layer")
    widths = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Facts(
        model_type=str(config.get("model_type", "unknown")),
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads if heads else 0),
        max_positions=number("max_position_embeddings", "n_positions"),
        tied_embeddings=tied,
        weight_bytes=headers.bytes,
        num_experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        expert_intermediate_size=number("moe_intermediate_size", default=width) if experts else 0,
        has_dense_layers=not experts or any(_module(name)[0].endswith(".mlp.up_proj") for name in shapes),
        shared_expert_size=next((shape[0] for name, shape in shapes.items() if _SHARED.search(name)), 0),
        compressed=tuple(sorted({(_module(n)[1], shape[0]) for n, shape in shapes.items() if _module(n)[1] in _COMPRESSED})),
        latent=LatentWidths(*map(number, widths)) if number("kv_lora_rank") else None,
        **_count(shapes, layers, tied, peft_takes_experts=config.get("model_type") != "qwen2_moe"),
    )


def _module(tensor: str) -> tuple[str, str]:
    """(module path, its last part) that owns a tensor."""
    path = tensor.rsplit(".", 1)[0]
    return path, path.rsplit(".", 1)[-1]


def _count(shapes: Shapes, layers: int, tied: bool, peft_takes_experts: bool = True) -> dict[str, Any]:
    """Parameter counts and module names out of tensor names and shapes."""
    modules, linear, of_experts, tensors, in_layer = [], [], set(), [], [0] * layers
    parameters = embedding = experts = 0
    for tensor, shape in shapes.items():
        path, last = _module(tensor)
        if tied and last in _HEADS:
            continue  # some checkpoints hold the tied matrix twice
        modules.append(path)
        parameters += math.prod(shape)
        if "experts" in path.split("."):
            experts += math.prod(shape)
            of_experts.add(last)
            number = int(layer_of(tensor) or 0)
            if number < layers:  # others are of parts that are not loaded
                in_layer[number] += math.prod(shape)
            continue
        tensors.append((tensor, tuple(shape)))
        if last in _EMBEDDINGS or last in _HEADS:
            embedding += math.prod(shape)
        elif last not in _ROUTERS and len(shape) == 2 and tensor.endswith(".weight"):
            linear.append((last, (shape[0], shape[1])))
    if tied:
        modules.append("lm_head")
    if peft_takes_experts:  # these names, wherever they stand (see lora_config.py)
        linear = [(last, shape) for last, shape in linear if last not in of_experts]
    return {
        "parameters": parameters, "embedding_parameters": embedding, "expert_parameters": experts,
        "linear_shapes": tuple(sorted(shape for _, shape in linear)),
        "linear_modules": tuple(sorted({last for last, _ in linear})), "modules": tuple(sorted(set(modules))),
        "tensors": tuple(sorted(tensors)), "layer_experts": tuple(in_layer),
    }  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; a model folder needs config.json and safetensors weights") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: model.safetensors, or those of the index. A name that leaves the folder is refused."""
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if (folder / f"model{PARTS}").exists():
            raise ConfigError(
                f"{folder} holds the parts of tensors that checkpoint.format=sharded writes. Make whole ones: "
                "python -m twinkle_research.checkpoint convert <checkpoint or run folder> -o <new folder>"
            )
        others = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth", ".gguf")]
        found = f"; {others[0]} is not read (weights must be safetensors)" if others else ""
        raise ConfigError(f"{folder}: no model.safetensors and no model.safetensors.index.json{found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: 'weight_map' is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return sorted(set(weight_map.values()))


def _read_headers(folder: Path) -> _Headers:
    shapes: dict[str, tuple[int, ...]] = {}
    size = 0
    for name in weight_files(folder):
        path = folder / name
        header = read_safetensors_header(path)
        size += path.stat().st_size
        shapes.update({tensor: tuple(entry["shape"]) for tensor, entry in header.items()})
    return _Headers(shapes, size)
