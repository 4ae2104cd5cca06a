"""The layout of a unit's memory, and how it is filled: read, converted, copied."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from accel_callbacks.models.offload.device_copies import DeviceCopies, PinnedBuffers
from accel_callbacks.models.offload.source import (
    Reader,
    Reads,
    StoredWeights,
    aligned_up,
    plan_reads,
)

__all__ = ["Contents", "Filler", "Weight", "host_memory", "lay_out"]


class Weight(NamedTuple):
    """A weight in the memory of a unit.

    Args:
        offset: in bytes.
        dtype: of the model.
        shape: of the model.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the weight as a view of the memory."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if nbytes:
            part = memory[self.offset : self.offset + nbytes]
            return part.view(self.dtype).view(self.shape)
        return torch.empty(self.shape, dtype=self.dtype, device=memory.device)


@dataclass(frozen=True)
class Contents:
    """The layout of a unit's memory: weights that are read, then converted, then held ones.

    Args:
        nbytes: of the memory.
        from_files: of the part that is read and converted.
        weights: by name.
        reads: of stored weights that are read to their places.
        converted: reads of stored weights of another dtype, to memory of their own.
    """

    nbytes: int
    from_files: int
    weights: Mapping[str, Weight]
    reads: Reads | None
    converted: Reads | None

    @property
    def stored_bytes(self) -> int:
        """Bytes in files."""
        return sum(
            reads.stored_bytes for reads in (self.reads, self.converted) if reads is not None
        )


def lay_out(
    wanted: Mapping[str, torch.Tensor],
    held: Collection[str],
    stored: StoredWeights,
    direct: bool,
) -> Contents:
    """Return the layout of the weights of a unit in its memory.

    Args:
        wanted: have the shapes and dtypes of the model.
        held: the names of those that are in host memory.
        stored: where the others are.
        direct: read past the page cache.

    Raises:
        ValueError: a weight is not stored, or has another shape.
    """
    on_disk = {}
    for name, tensor in wanted.items():
        if name in held:
            continue
        entry = stored.tensors.get(name)
        if entry is None:
            raise ValueError(f"{name} is to be offloaded to disk and is not in the checkpoint.")
        if entry.shape != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the model and {entry.shape} in "
                f"{entry.path}."
            )
        on_disk[name] = entry
    same = {name: entry for name, entry in on_disk.items() if entry.dtype == wanted[name].dtype}
    rest = {name: entry for name, entry in on_disk.items() if name not in same}
    reads = plan_reads(same, direct) if same else None
    converted = plan_reads(rest, direct) if rest else None
    weights: dict[str, Weight] = {}
    position = from_files = 0 if reads is None else aligned_up(reads.nbytes)
    for name in [*same, *rest, *(name for name in wanted if name not in on_disk)]:
        weight = Weight(position, wanted[name].dtype, tuple(wanted[name].shape))
        if reads is not None and name in reads.places:
            weights[name] = weight._replace(offset=reads.places[name])
            continue
        weights[name] = weight
        position = aligned_up(position + weight.nbytes)
        if name in on_disk:
            from_files = position
    return Contents(position, from_files, weights, reads, converted)


def host_memory(nbytes: int) -> torch.Tensor:
    """Return page-aligned host memory, which direct reads need."""
    from checkpoint_io.storage.buffers import aligned

    return torch.frombuffer(aligned(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class _Desk(threading.local):
    """The state of a reader thread: one that hangs shares nothing with its successor."""

    reader: Reader | None = None
    raw: torch.Tensor | None = None
    pinned: PinnedBuffers | None = None


class Filler:
    """Fill the memory of units, on the thread of the window.

    It knows no modules: the thread keeps it alive.

    Args:
        contents: of each unit.
        stored: where weights are in files.
        held: weights in host memory, by name.
        progress: called with the number of bytes after each read.
        copies: to the device of the memory, if it has streams.
    """

    def __init__(
        self,
        contents: Sequence[Contents],
        stored: StoredWeights,
        held: Mapping[str, torch.Tensor],
        progress: Callable[[int], None],
        copies: DeviceCopies | None = None,
    ) -> None:
        self._contents = contents
        self._stored = stored
        self._held = held
        self._progress = progress
        self._copies = copies
        self._desk = _Desk()
        self._reader: Reader | None = None  # the last one, for the message of one who waits
        self._raw_bytes = max((c.converted.nbytes for c in contents if c.converted), default=0)
        self._pinned_bytes = max((c.from_files for c in contents), default=0)
        self.staging_bytes = 0

    def __call__(self, unit: int, memory: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        """Fill the memory of a unit.

        Args:
            unit: its number.
            memory: of its size.
            after: events that come before.

        Returns:
            The event of a copy that is still on its way, else None.
        """
        contents = self._contents[unit]
        pairs = list(self._from_host(contents, memory))
        if contents.from_files and memory.device.type == "cpu" and self._copies is None:
            self._from_files(contents, memory)
        elif contents.from_files:
            return self._fill_device(contents, memory, pairs, after)
        return self._copy(pairs, after)

    def _fill_device(
        self,
        contents: Contents,
        memory: torch.Tensor,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Any],
    ) -> Any:
        """Fill memory of a device with what is in files and in host memory."""
        if self._desk.pinned is None:
            self._desk.pinned = PinnedBuffers(self._pinned_bytes)
        host, copied = self._desk.pinned.next(), None
        try:
            part = host[: contents.from_files]
            self._from_files(contents, part)
            copied = self._copy([(memory[: contents.from_files], part), *pairs], after)
        finally:
            # With the event of the copy, before which the buffer is not written to again.
            self._desk.pinned.give(host, copied)
            self._count()
        return copied

    def _copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Any]
    ) -> Any:
        if self._copies is not None:
            return self._copies.copy(pairs, after)
        for target, source in pairs:
            target.copy_(source)
        return None

    def _from_files(self, contents: Contents, memory: torch.Tensor) -> None:
        """Read and convert what is in files into host memory."""
        if self._desk.reader is None:
            self._desk.reader = Reader(self._stored, self._progress)
        self._reader = reader = self._desk.reader
        if contents.reads is not None:
            reader.fill(contents.reads, memory)
        if contents.converted is not None:
            raw = self._raw(self._raw_bytes)
            reader.fill(contents.converted, raw)
            for name, at in contents.converted.places.items():
                stored = self._stored.tensors[name]
                source = Weight(at, stored.dtype, stored.shape).of(raw)
                contents.weights[name].of(memory).copy_(source)

    def _raw(self, nbytes: int) -> torch.Tensor:
        """Return host memory of this thread, the same each time."""
        if self._desk.raw is None or self._desk.raw.numel() < nbytes:
            self._desk.raw = host_memory(nbytes)
            self._count()
        return self._desk.raw

    def _count(self) -> None:
        raw, pinned = self._desk.raw, self._desk.pinned
        self.staging_bytes = sum(
            (
                0 if raw is None else raw.untyped_storage().nbytes(),
                0 if pinned is None else pinned.nbytes,
            )
        )

    def _from_host(
        self, contents: Contents, memory: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, weight in contents.weights.items():
            held = self._held.get(name)
            if held is not None:
                self._progress(held.nbytes)
                yield weight.of(memory), held

    def describe(self, unit: int) -> str:
        """Return the names of a unit's weights, for errors."""
        names = list(self._contents[unit].weights)
        return ", ".join(names[:3]) + ", ..." * (len(names) > 3)

    def reading(self) -> str:
        """Return the file that is being read, for errors."""
        return (self._reader and self._reader.reading) or "memory"
