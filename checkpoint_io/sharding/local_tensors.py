"""The tensors of the shared state on one rank, and their description for the other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from checkpoint_io.format.safetensors import NAMES
from checkpoint_io.sharding.dtensor import is_dtensor, local_boxes, local_of

# Bytes. Smaller replicated tensors are written by rank 0, to keep the plan of the ranks small.
SPREAD_FROM = 64 * 1024

Replicated = bool | Callable[[str], bool]


class WriteBox(NamedTuple):
    """A box of a tensor that this rank writes; `shape` is that of the whole tensor."""

    key: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, key: str, tensor: torch.Tensor) -> WriteBox:
        """Return the box that is all of a plain tensor."""
        shape = tuple(tensor.shape)
        return cls(key, (0,) * len(shape), tensor, shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.tensor.nbytes

    def dim(self) -> int:
        """Return the number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def whole(self) -> bool:
        """True if this is all of the tensor."""
        return self.tensor.shape == self.shape

    @property
    def place(self) -> tuple[tuple[int, ...], ...]:
        """The offsets and shape of the box; empty if it is all of the tensor."""
        return () if self.whole else (self.offsets, tuple(self.tensor.shape))


class Entry(NamedTuple):
    """A tensor of one rank; `boxes` is None for a plain tensor."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] | None


class LocalTensors:
    """The tensors of the shared state on this rank, plain ones and DTensors."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        tied: Mapping[str, str],
        rank: int,
        replicated: Replicated,
    ) -> None:
        self._tensors = tensors
        self._tied = tied
        self._rank = rank
        self._boxes = {
            key: local_boxes(tensor, f"tensor {key!r}")
            for key, tensor in tensors.items()
            if is_dtensor(tensor)
        }
        self._spread = {
            key
            for key, tensor in tensors.items()
            if key not in self._boxes
            and tensor.nbytes >= SPREAD_FROM
            and (replicated if isinstance(replicated, bool) else replicated(key))
        }

    def to_plain(self) -> dict[str, Any]:
        """Return entries for the other ranks: DTensors, and tensors that any rank may write."""
        entries: dict[str, Any] = {}
        for key, tensor in self._tensors.items():
            if key in self._boxes or key in self._spread:
                boxes = [(b.offsets, b.shape) for b in self._boxes.get(key, ())]
                held = boxes if key in self._boxes else None
                entries[key] = (NAMES[tensor.dtype], tuple(tensor.shape), held)
        # Rank 0 decides which plain tensors are tied; of a DTensor, each rank knows its own part.
        every = self._rank == 0
        tied = {k: first for k, first in self._tied.items() if every or k in self._boxes}
        return {"entries": entries, "tied": tied}

    def rank0_boxes(self, tied: Mapping[str, str]) -> list[WriteBox]:
        """Return the boxes that rank 0 writes without an assignment; none on other ranks."""
        if self._rank:
            return []
        return [
            WriteBox.all_of(key, tensor)
            for key, tensor in self._tensors.items()
            if key not in tied and key not in self._boxes and key not in self._spread
        ]

    def box(self, key: str, offsets: tuple[int, ...]) -> WriteBox:
        """Return one of the boxes on this rank."""
        tensor = self._tensors[key]
        shape = tuple(tensor.shape)
        if key not in self._boxes:
            return WriteBox(key, offsets, tensor, shape)
        if not math.prod(shape):
            nothing = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            return WriteBox(key, offsets, nothing, shape)
        local_box = next(box for box in self._boxes[key] if box.offsets == offsets)
        view = local_of(tensor)
        extents = zip(local_box.local_offsets, local_box.shape, strict=True)
        for dim, (start, length) in enumerate(extents):
            view = view.narrow(dim, start, length)
        return WriteBox(key, offsets, view, shape)

    def in_order(self, boxes: list[WriteBox]) -> list[WriteBox]:
        """Sort boxes by the order of their tensors in the state."""
        order = {key: number for number, key in enumerate(self._tensors)}
        return sorted(boxes, key=lambda box: order[box.key])


def entry_of(plain: Any) -> Entry:
    """Rebuild an entry; a group may have turned its tuples into lists."""
    dtype, shape, boxes = plain
    held = None if boxes is None else [(tuple(offsets), tuple(extent)) for offsets, extent in boxes]
    return Entry(dtype, tuple(shape), held)
