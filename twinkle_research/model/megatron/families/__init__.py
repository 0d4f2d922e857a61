"""Where each tensor of a Hugging Face folder lies in the parameters of this process, read from the table of its family.

Names in memory are Megatron-Core's, with the numbers that layer and expert have in the whole model: different for different
parameters on any two processes, equal for parts of the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from twinkle_research.errors import ConfigError
from twinkle_research.model.megatron.families import (
    deepseek_v2,
    gemma,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from twinkle_research.model.megatron.families.rules import Rule, Table
from twinkle_research.model.megatron.pieces import Piece

if TYPE_CHECKING:
    from torch import Tensor, nn

    from twinkle_research.model.megatron.architecture import Architecture
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh

TABLES: dict[str, Table] = {
    "deepseek_v2": deepseek_v2.TABLE, "gemma": gemma.TABLE, "gemma2": gemma2.TABLE, "gemma3_text": gemma3.TABLE,
    "granite": granite.TABLE, "llama": llama.TABLE, "mistral": mistral.TABLE, "mixtral": mixtral.TABLE, "qwen2": qwen2.TABLE,
    "qwen2_moe": qwen2_moe.TABLE, "qwen3": qwen3.TABLE, "qwen3_moe": qwen3_moe.TABLE,
}  # fmt: skip

ADAPTERS = "adapters"  # what stands before the names that their parameters have in a chunk

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")


def named_parameters(architecture: Architecture, mesh: Mesh, chunks: Iterable[PolicyModel]) -> dict[str, nn.Parameter]:
    """The parameters of this process's chunks by their names in memory, adapters left out."""
    count = architecture.experts.count // mesh.ep.size if architecture.experts else 0
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith(f"{ADAPTERS}."):
                continue
            name = _EXPERT.sub(lambda number: str(int(number[0]) + mesh.ep.rank * count), chunk.global_name(name))
            found[name] = parameter
    return found


def pieces(architecture: Architecture, mesh: Mesh, parameters: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """For each parameter (names in memory) the parts of tensors in it. ConfigError where the family's table has no row."""
    table = TABLES[architecture.family]
    return {name: list(_of_parameter(architecture, mesh, table, name, tuple(p.shape))) for name, p in parameters.items()}


def is_ignored(architecture: Architecture, name: str) -> bool:
    """Whether a folder may hold the tensor ``name`` although the model does not: the output projection of a tied model,
    the frequencies that old versions of transformers stored. As transformers does."""
    return (architecture.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")


def _of_parameter(architecture: Architecture, mesh: Mesh, table: Table, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    layer, number, rule, place = _find(table, name, architecture.family)
    # Experts are cut over processes of their own.
    axis = mesh.tp if number is None else mesh.etp
    for i, part in enumerate(rule.parts(shape, axis.rank, axis.size, architecture)):
        on_disk = part.name if number is None else part.name.replace("{expert}", str(number))
        yield Piece(f"{layer}{on_disk}", part.shape, part.index, part.view, (*place, i))


def _find(table: Table, name: str, family: str) -> tuple[str, int | None, Rule, tuple[int, ...]]:
    """(what stands before the names of its layer, number of its expert, rule, place)."""
    inside = _LAYER.fullmatch(name)
    rest = inside[2] if inside else name
    expert = _EXPERT.search(rest)
    key = _EXPERT.sub("{expert}", rest)
    for block, rows in enumerate((table.before, table.layer, table.after)):
        for row, (pattern, rule) in enumerate(rows):
            if pattern == key and (block == 1) == bool(inside):
                layer = int(inside[1]) if inside else 0
                number = int(expert[0]) if expert else None
                prefix = f"model.layers.{layer}." if inside else ""
                return prefix, number, rule, (block, layer, 0 if number is None else number + 1, row)
    raise ConfigError(f"parameter {name}: the table of model type {family!r} does not say which tensor of the folder it is")
