"""Putting stored rows into a tensor of the caller: of any device, dtype or placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from checkpoint_io.format.safetensors import as_bytes
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.sharding.planner import ReadBox, plan_reads

STAGING = 64 * 1024 * 1024


class Rows(NamedTuple):
    """Indices `first` to `last` (exclusive) of the first dimension; a scalar has one."""

    first: int
    last: int


class Landing:
    """Where one stored tensor goes.

    Args:
        shape: of the stored tensor, and of the target.
        dtype: of the stored tensor.
        target: what to fill; of a DTensor only the local part.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, target: torch.Tensor) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._local = local_of(target) if is_dtensor(target) else target.detach()
        self._boxes = plan_reads(shape, [((0,) * len(shape), self.shape)], target)
        self._boxes = [box for box in self._boxes if 0 not in box.lengths]
        self.row_bytes = math.prod(self.shape[1:]) * dtype.itemsize

    def rows(self) -> Rows:
        """Return the rows that the target needs."""
        if not self._boxes or 0 in self.shape:
            return Rows(0, 0)
        spans = [_rows_of(box) for box in self._boxes]
        return Rows(min(first for first, _ in spans), max(last for _, last in spans))

    def blocks(self) -> Iterator[Rows]:
        """Cut the rows into blocks of limited size (of at least one row)."""
        first, last = self.rows()
        step = max(1, STAGING // max(1, self.row_bytes))
        for start in range(first, last, step):
            yield Rows(start, min(start + step, last))

    def direct(self) -> torch.Tensor | None:
        """Return the target's own memory as bytes, if the rows can be read straight into it."""
        if len(self._boxes) != 1:
            return None
        lengths = self._boxes[0].lengths
        whole = lengths == tuple(self._local.shape) and lengths[1:] == self.shape[1:]
        return plain_bytes(self._local, self.dtype) if whole else None

    def host(self, rows: Rows) -> torch.Tensor:
        """Allocate host memory for some rows."""
        shape = (rows.last - rows.first, *self.shape[1:]) if self.shape else ()
        return torch.empty(shape, dtype=self.dtype, device="cpu")

    def put(self, rows: Rows, values: torch.Tensor) -> None:
        """Copy some rows into the target, as far as it wants them; converts the dtype."""
        for box in self._boxes:
            if not self.shape:
                self._local.copy_(values)
                continue
            low, high = _rows_of(box)
            first, last = max(low, rows.first), min(high, rows.last)
            if first >= last:
                continue
            source = _slices(box.chunk_offsets, box.lengths, first - rows.first, last - first)
            start = box.target_offsets[0] + first - low
            target = _slices(box.target_offsets, box.lengths, start, last - first)
            self._local[target].copy_(values[source])


def plain_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor's memory as bytes, if stored bytes of a dtype can be put there as is."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or is_dtensor(tensor):
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return as_bytes(tensor.detach())


def _rows_of(box: ReadBox) -> Rows:
    """Return the rows of the stored tensor that a box lies in."""
    if not box.lengths:
        return Rows(0, 1)
    return Rows(box.chunk_offsets[0], box.chunk_offsets[0] + box.lengths[0])


def _slices(
    offsets: Sequence[int], lengths: Sequence[int], first: int, count: int
) -> tuple[slice, ...]:
    """Select a box, but other rows of it."""
    rest = zip(offsets[1:], lengths[1:], strict=True)
    return (slice(first, first + count), *(slice(low, low + n) for low, n in rest))
