"""Features as a caller hands them in: brought to plain lists; what is missing, or would be ignored, is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.errors import DataError

_KEYS = tuple(InputFeature.__annotations__)
_SHIFTED = (
    f"labels are shifted already: labels[t] is what is to come after input_ids[t], {IGNORE_INDEX} where nothing is trained "
    "(of Hugging Face's labels: labels[1:] + [-100])"
)
_ALIKE = 0.8  # from which an unknown key counts as a misspelling


def as_features(inputs: Any) -> list[InputFeature]:
    """One feature or several, as dicts of lists, each with a name (``row``) for errors. Tensors and arrays of one dimension
    become lists.

    Raises DataError naming the row where it has no ``input_ids`` or ``labels``, a key that is nearly one of a feature's, or
    an ``attention_mask`` that hides a token.
    """
    rows = [inputs] if isinstance(inputs, Mapping) else inputs
    if not isinstance(rows, Iterable):
        raise DataError(f"expected features, got {type(inputs).__name__}")
    return [_feature(row, i) for i, row in enumerate(rows)]


def _feature(row: Any, number: int) -> InputFeature:
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        raise DataError(f"row {number} is of type {kind}, expected a feature: a dict with input_ids and labels, lists of numbers")
    name = row.get("row") or f"row {number}"
    for key in row:
        if key not in _KEYS and (close := difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=_ALIKE)):
            raise DataError(f"{name}: unknown key {key!r}; did you mean {close[0]!r}?")
    for key in ("input_ids", "labels"):
        if row.get(key) is None:
            raise DataError(f"{name}: no {key!r}" + (f". {_SHIFTED}" if key == "labels" else ""))
    feature = {key: _as_list(value, f"{name}: {key}") for key, value in row.items()}
    mask = feature.get("attention_mask")
    if mask is not None and 0 in mask:
        raise DataError(f"{name}: attention_mask is 0 at position {mask.index(0)}: give rows without padding")
    return {**feature, "row": name}


def _as_list(value: Any, where: str) -> Any:
    if not isinstance(value, Tensor | np.ndarray) or value.ndim == 0:
        return value
    if value.ndim > 1:
        raise DataError(f"{where} has the shape {tuple(value.shape)}; a feature is one row, so expected one dimension")
    return value.tolist()


def check_shifted(input_ids: Tensor, labels: Tensor, name: str) -> None:
    """Raises DataError for a row, [T] each, whose labels are its own ids, not those that come next: training on it would teach
    to repeat the input. Only rows where both readings differ can be told apart."""
    trained = labels != IGNORE_INDEX
    own = labels == input_ids
    follows = labels[:-1] == input_ids[1:]
    if bool(trained[:-1].any()) and bool(own[trained].all()) and not bool(torch.all(follows | ~trained[:-1])):
        raise DataError(f"{name}: each label is the token at its own position. {_SHIFTED}")
