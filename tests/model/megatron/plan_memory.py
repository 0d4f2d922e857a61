"""Bytes that autograd keeps, and that are in use at the worst moment, of one pass in this process."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def held(model: Any) -> list[Tensor]:
    """What is there before a pass: parameters, buffers, gradient sums."""
    modules = model.chunks if hasattr(model, "chunks") else [model.module]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return tensors + list(model.training_state().gradients.tensors().values())


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Each storage once, those of ``known`` tensors not at all."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.kept: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in self.known:
            self.kept.setdefault(place, tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


class Live(TorchDispatchMode):
    """``peak``: bytes of all storages that operators have made, at the worst moment."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        self.now -= self._sizes.pop(place)
