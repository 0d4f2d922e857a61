"""Between parameters in memory and tensors in a Hugging Face folder.

For most models the names are the same. transformers renames some while loading, and stacks, splits or transposes
others (the experts of a mixture, say); what it did is undone here, for weights and for optimizer moments alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DiskNames:
    """``shapes``: name in memory -> shape of everything that is to be stored.

    ``model=None``: the names in memory are those on disk already (an adapter); so are those of ``others``.
    """

    def __init__(
        self, model: PreTrainedModel | None, shapes: Mapping[str, torch.Size], others: Mapping[str, torch.Size] | None = None
    ) -> None:
        self._model = model
        self._shapes = dict(shapes)
        metas = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        if model is None:
            self._groups = [[name] for name in shapes]
            self._disk = [{name: metas[name]} for name in shapes]
        else:
            self._groups = self._find_groups(metas)
            self._disk = [self._revert({name: metas[name] for name in group}) for group in self._groups]
        for name, shape in (others or {}).items():
            self._groups.append([name])
            self._disk.append({name: torch.empty(shape, device="meta")})
            self._shapes[name] = shape
        self._group_of = {name: i for i, group in enumerate(self._groups) for name in group}
        # In memory and on disk the same tensor under another name: nothing to compute.
        self._is_rename = [
            len(group) == 1 and len(disk) == 1 and next(iter(disk.values())) is metas.get(group[0], next(iter(disk.values())))
            for group, disk in zip(self._groups, self._disk, strict=True)
        ]

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, dict(tensors)))

    def _find_groups(self, metas: dict[str, Tensor]) -> list[list[str]]:
        """Single tensors where each converts alone, else all of them together."""
        whole = {name: tensor.shape for name, tensor in self._revert(metas).items()}
        alone: dict[str, torch.Size] = {}
        for name, tensor in metas.items():
            alone |= {on_disk: t.shape for on_disk, t in self._revert({name: tensor}).items()}
        return [[name] for name in metas] if alone == whole else [list(metas)]

    @property
    def disk_names(self) -> list[str]:
        return [name for disk in self._disk for name in disk]

    def of(self, name: str) -> list[str]:
        """The tensors on disk that hold ``name``."""
        return list(self._disk[self._group_of[name]])

    def specs(self, dtypes: Mapping[str, torch.dtype], suffix: str = "") -> list[TensorSpec]:
        """What is on disk for the tensors that ``dtypes`` names (whole groups), in the order of ``to_disk``."""
        return [
            TensorSpec(on_disk + suffix, str(dtypes[group[0]]).removeprefix("torch."), tuple(tensor.shape))
            for group, disk in zip(self._groups, self._disk, strict=True)
            if group[0] in dtypes
            for on_disk, tensor in disk.items()
        ]

    def to_disk(self, tensor: Callable[[str], Tensor], wanted: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
        """(name on disk, tensor) for the tensors in memory that ``wanted`` names, one group at a time."""
        for group, disk, is_rename in zip(self._groups, self._disk, self._is_rename, strict=True):
            if group[0] not in wanted:
                continue
            if is_rename:
                yield next(iter(disk)), tensor(group[0]).detach()
            else:
                reverted = self._revert({name: tensor(name).detach() for name in group})
                for on_disk in disk:
                    yield on_disk, reverted[on_disk]

    def convert(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name on disk, tensor) of all tensors in memory, in whatever order they come; a group is held until it is whole."""
        waiting: dict[int, dict[str, Tensor]] = {}
        for name, tensor in named:
            group = self._group_of[name]
            if self._is_rename[group]:
                yield next(iter(self._disk[group])), tensor
                continue
            held = waiting.setdefault(group, {})
            held[name] = tensor
            if len(held) == len(self._groups[group]):
                yield from self._revert(waiting.pop(group)).items()

    def check(self, folder: TensorFolder, wanted: Mapping[str, object], suffix: str = "") -> None:
        """Raises CheckpointError where a tensor that ``parts_from_disk`` would read is missing or has another shape."""
        for group, disk in zip(self._groups, self._disk, strict=True):
            for on_disk, meta in disk.items() if group[0] in wanted else ():
                found = folder.spec(on_disk + suffix).shape
                if found != tuple(meta.shape):
                    raise CheckpointError(
                        f"tensor {on_disk}{suffix} has shape {found} in {folder.path}, {tuple(meta.shape)} in the model"
                    )

    def parts_from_disk(
        self, folder: TensorFolder, wanted: Mapping[str, object], rows: Callable[[str], slice], suffix: str = ""
    ) -> Iterator[tuple[str, Tensor]]:
        """(name in memory, ``rows(name)`` of its tensor), inverse of ``to_disk``, for the tensors that ``wanted`` names; on
        disk ``suffix`` stands behind each name. At most one whole group is held. Raises as ``check``, before the first."""
        self.check(folder, wanted, suffix)
        for group, disk, is_rename in zip(self._groups, self._disk, self._is_rename, strict=True):
            if group[0] not in wanted:
                continue
            if is_rename:
                yield group[0], folder.part(next(iter(disk)) + suffix, rows(group[0]))
            else:
                for name, tensor in self._assemble(group, {on_disk: folder[on_disk + suffix] for on_disk in disk}):
                    yield name, tensor[rows(name)]

    def _assemble(self, group: list[str], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Undoes a conversion that moves elements, whatever it is: numbers the elements in memory and looks where they go."""
        start = 0
        numbers = {}
        for name in group:
            count = self._shapes[name].numel()
            numbers[name] = torch.arange(start, start + count).view(self._shapes[name])
            start += count
        places = self._revert(numbers)
        first = next(iter(tensors.values()))
        flat = torch.empty(start, dtype=first.dtype)
        for on_disk, tensor in tensors.items():
            flat[places[on_disk].reshape(-1)] = tensor.reshape(-1)
        for name in group:
            begin = int(numbers[name].reshape(-1)[0])
            yield name, flat[begin : begin + numbers[name].numel()].view(self._shapes[name])
