"""The interface of stored weights: names, shapes and dtypes, and reads into targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.safetensors import as_bytes
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.sharding.planner import ReadBox, plan_reads
from checkpoint_io.storage.open import RangeReader, Store

STAGING = 64 * 1024 * 1024  # bytes of host memory for rows that are converted or moved
Wanted = Sequence[tuple[str, torch.Tensor]]


class WeightInfo(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """Stored weights whose names and shapes are known, and whose data are read on request."""

    @property
    def where(self) -> str:
        """The location, for messages."""

    @property
    def infos(self) -> Mapping[str, WeightInfo]:
        """The stored tensors by name."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Further names of stored tensors, mapped to the names under which they are stored."""

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Read stored tensors into targets of the same shapes; convert dtypes."""


@dataclass(frozen=True)
class WeightFile:
    """A file of weights; `label` is its name in messages and in an index."""

    store: Store
    name: str
    label: str

    @property
    def where(self) -> str:
        """The location, for messages."""
        return f"{self.store.url}/{self.label}"

    @contextmanager
    def open(self) -> Iterator[RangeReader]:
        """Open the file for ranged reads."""
        try:  # of opening alone: a FileNotFoundError of the block is not ours to explain
            manager = self.store.open(self.name)
            reader = manager.__enter__()
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{self.where} is missing, though it is listed there: copy all files again"
            ) from None
        try:
            yield reader
        finally:
            manager.__exit__(None, None, None)

    def read_json(self, limit: int) -> Any:
        """Return the content of a file of strict JSON, of `limit` bytes at most."""
        return jsonio.loads(self.read_bytes(limit), self.where)

    def read_bytes(self, limit: int) -> bytes:
        """Return the content of a file of `limit` bytes at most."""
        with self.open() as reader:
            if reader.size > limit:
                raise CorruptCheckpointError(
                    f"{self.where}: {reader.size} bytes is more than such a file has"
                )
            return bytes(reader.read(0, reader.size))


def check_weight_map(url: str, weight_map: Mapping[str, str] | None, stored: Set[str]) -> None:
    """Raise CorruptCheckpointError if the shards lack a tensor that the index names."""
    if absent := (weight_map or {}).keys() - stored:
        raise CorruptCheckpointError(
            f"{url}: the shards do not hold {', '.join(sorted(absent)[:3])}, though the "
            "index names them; save the model again"
        )


class Rows(NamedTuple):
    """Indices `first` to `last` (exclusive) of the first dimension; a scalar has one row."""

    first: int
    last: int


class Destination:
    """The target of one stored tensor, filled by rows.

    Args:
        info: of the stored tensor; the target has the same shape.
        target: the tensor to fill; of a DTensor only the local part.
    """

    def __init__(self, info: WeightInfo, target: torch.Tensor) -> None:
        self.shape, self.dtype = info.shape, info.dtype
        self._local = local_of(target) if is_dtensor(target) else target.detach()
        boxes = plan_reads(self.shape, [((0,) * len(self.shape), self.shape)], target)
        self._boxes = [box for box in boxes if 0 not in box.lengths]
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self) -> Rows:
        """Return the rows that the target needs."""
        if not self._boxes or 0 in self.shape:
            return Rows(0, 0)
        spans = [_rows_of(box) for box in self._boxes]
        return Rows(min(first for first, _ in spans), max(last for _, last in spans))

    def blocks(self) -> Iterator[Rows]:
        """Cut the rows into blocks of limited size (at least one row each)."""
        first, last = self.rows()
        step = max(1, STAGING // max(1, self.row_bytes))
        for start in range(first, last, step):
            yield Rows(start, min(start + step, last))

    def direct(self) -> torch.Tensor | None:
        """Return the target's memory as bytes if the rows can be read directly into it."""
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
        """Copy those of some rows that the target needs; convert the dtype."""
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
    """Return a tensor's memory as bytes if it takes stored bytes of a dtype unchanged."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or is_dtensor(tensor):
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return as_bytes(tensor.detach())


def _rows_of(box: ReadBox) -> Rows:
    """Return the rows of the stored tensor that a box covers."""
    if not box.lengths:
        return Rows(0, 1)
    return Rows(box.chunk_offsets[0], box.chunk_offsets[0] + box.lengths[0])


def _slices(
    offsets: Sequence[int], lengths: Sequence[int], first: int, count: int
) -> tuple[slice, ...]:
    """Return the index of a box with its rows replaced by `count` rows from `first` on."""
    rest = zip(offsets[1:], lengths[1:], strict=True)
    return (slice(first, first + count), *(slice(low, low + n) for low, n in rest))
