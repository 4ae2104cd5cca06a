"""The interface of stored weights: names, shapes and dtypes, and reads into targets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format.safetensors import as_bytes
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.sharding.planner import ReadBox, plan_reads
from checkpoint_io.storage.local import LocalStore, local_folder
from checkpoint_io.storage.open import RangeReader, Store

STAGING = 64 * 1024 * 1024  # bytes of host memory for rows that are converted or moved
_MAX_POINTER = 32 * 1024  # bytes; git-annex reads no longer ones, and those of Git LFS have 1024
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}
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
    """A file of weights in a store.

    `label` is its name in an index, and `where` its location for messages: of a link, not those of
    the file that it leads to.
    """

    store: Store
    name: str
    label: str
    where: str

    @classmethod
    def at(cls, store: Store, label: str) -> WeightFile:
        """Return a file of a folder, or of folders in it ("a/b"); a link leads to its target."""
        where = f"{store.url}/{label}"
        *folders, name = PurePosixPath(label).parts
        for folder in folders:
            store = store.child(folder)
        path = os.path.join(local_folder(store) or "", name)
        if local_folder(store) is not None and os.path.islink(path):
            folder, name = os.path.split(os.path.realpath(path))
            store = LocalStore(folder)
        return cls(store, name, label, where)

    @contextmanager
    def open(self) -> Iterator[RangeReader]:
        """Open the file for ranged reads."""
        try:  # of opening alone: a FileNotFoundError of the block is not ours to explain
            manager = self.store.open(self.name)
            reader = manager.__enter__()
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{self.where} {self._absence()}") from None
        try:
            yield reader
        except CorruptCheckpointError as error:
            if (text := _pointer(reader)) is None:
                raise
            raise CorruptCheckpointError(f"{self.where} {text}") from error
        finally:
            manager.__exit__(None, None, None)

    def _absence(self) -> str:
        """Return what is wrong with a file that is not there, and what to do."""
        if not os.path.islink(self.where):
            return "is missing, though it is listed there: copy all files again"
        annexed = os.path.join("annex", "objects") in self.store.url
        fetch = "run `git annex get` there" if annexed else "fetch that file, or copy with `cp -L`"
        return (
            f"is a link to {os.path.join(self.store.url, self.name)}, which is not there: {fetch}"
        )

    def parse(self, parse: Callable[[bytes, str], Any], limit: int) -> Any:
        """Return what a function makes of the content, `limit` bytes at most, and the location."""
        with self.open() as reader:
            return parse(self._content(reader, limit), self.where)

    def read_bytes(self, limit: int) -> bytes:
        """Return the content of a file of `limit` bytes at most."""
        with self.open() as reader:
            return self._content(reader, limit)

    def _content(self, reader: RangeReader, limit: int) -> bytes:
        if reader.size > limit:
            raise CorruptCheckpointError(
                f"{self.where}: {reader.size} bytes is more than such a file has"
            )
        return bytes(reader.read(0, reader.size))

    def require_content(self) -> None:
        """Raise CorruptCheckpointError if the file was not downloaded, and only stands there."""
        with self.open() as reader:
            if (text := _pointer(reader)) is not None:
                raise CorruptCheckpointError(f"{self.where} {text}")


def _pointer(reader: RangeReader) -> str | None:
    """Return what to do if a file stands for one that was not downloaded, else None."""
    length = max(map(len, _POINTERS))
    if not length <= reader.size <= _MAX_POINTER:
        return None
    head = bytes(reader.read(0, length))
    for begin, (system, command) in _POINTERS.items():
        if head.startswith(begin):
            return f"is a pointer of {system} and not the file itself: run `{command}` there"
    return None


def sizes_of(store: Store) -> dict[str, int]:
    """Return the sizes of a folder's files by name, with those that links lead to.

    A link to nothing counts as a file, so that reading it tells what is wrong.
    """
    # Who has put a link into a folder could have put the file there. It is the text of an index
    # that must not lead out of the folder, see find.py.
    sizes = store.sizes()
    if (folder := local_folder(store)) is not None:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if os.path.islink(path) and (os.path.isfile(path) or not os.path.exists(path)):
                sizes[name] = os.path.getsize(path) if os.path.exists(path) else 0
    return sizes


def shard_of_each(
    url: str,
    labels: Sequence[str],
    stored: Sequence[Iterable[str]],
    weight_map: Mapping[str, str] | None,
) -> dict[str, int]:
    """Return the number of the shard that each tensor is taken from.

    The index decides between shards that hold tensors of one name; where it names none of them, the
    last one counts, as in Accelerate.

    Args:
        url: of the shards, for messages.
        labels: their names in the index.
        stored: the names of the tensors in each.
        weight_map: the index.

    Raises:
        CorruptCheckpointError: no shard holds a tensor that the index names.
    """
    named = weight_map or {}
    shards: dict[str, int] = {}
    for number, names in enumerate(stored):
        for name in names:
            if name not in shards or labels[shards[name]] != named.get(name):
                shards[name] = number
    if absent := named.keys() - shards.keys():
        raise CorruptCheckpointError(
            f"{url}: the shards do not hold {', '.join(sorted(absent)[:3])}, though the "
            "index names them; save the model again"
        )
    return shards


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
