"""One opened checkpoint: check targets, and read stored chunks into them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from checkpoint_io.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StateMismatchError,
    TornLoadError,
    UnsupportedStateError,
)
from checkpoint_io.format.manifest import Chunk, Manifest, TensorEntry
from checkpoint_io.format.safetensors import DTYPES, ITEMSIZE, dtype_of
from checkpoint_io.loader.files import manifest_of
from checkpoint_io.loader.transfer import (
    Flat,
    Transfer,
    Want,
    flat_bytes,
    is_plain_memory,
    sinks_for,
)
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.boxes import Axes, axes_of, overlapping, parts_with, within
from checkpoint_io.sharding.dtensor import check_placements, in_mesh, is_dtensor, local_of
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other subclasses may store elements elsewhere


class Source:
    """An opened checkpoint, whose tensors are read by key."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def stored(self, key: str) -> str:
        """Return the key under which a tensor's bytes are stored (its own, unless it is tied)."""
        return self.manifest.aliases.get(key, key)

    def entry(self, key: str) -> TensorEntry:
        """Return the manifest's entry of a tensor."""
        return self.manifest.tensors[self.stored(key)]

    def where(self, name: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.store.url}/{name}"

    def replaced(self) -> bool:
        """Return whether another save has replaced this checkpoint since it was opened."""
        try:
            return manifest_of(self.store, tensors=False).id != self.manifest.id
        except CheckpointError:
            return False

    def read_into(
        self,
        pairs: Sequence[tuple[str, torch.Tensor]],
        *,
        fresh: Iterable[tuple[str, torch.Tensor]] = (),
        check: bool = True,
        progress: bool | None = False,
    ) -> None:
        """Read stored tensors into targets that the caller owns, and into fresh ones.

        Check the targets with `check_targets` first; create the fresh ones with `new_tensors`.
        """
        self.plan_read(pairs, fresh=fresh, check=check).run(progress)

    def plan_read(
        self,
        pairs: Sequence[tuple[str, torch.Tensor]],
        *,
        fresh: Iterable[tuple[str, torch.Tensor]] = (),
        check: bool = True,
    ) -> PlannedRead:
        """Return a `read_into` that is yet to be run; nothing has been read."""
        with collector_paused():
            targets, memories = self._without_repeats(pairs)
            wants = [*self._wants(targets), *self._new_wants(fresh)]
            transfer = Transfer(self.store, self.manifest, wants, check)
        return PlannedRead(self, transfer, bool(pairs), memories)

    def ranges_of(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[int, int, int]]:
        """Return what a read into some targets would fetch: file, first and last byte."""
        with collector_paused():
            return Transfer(self.store, self.manifest, self._wants(pairs)).ranges()

    def new_tensors(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return uninitialized CPU tensors of the saved dtypes and shapes, by stored key."""
        tensors: dict[str, torch.Tensor] = {}
        aliases, entries = self.manifest.aliases, self.manifest.tensors
        for key in keys:
            stored = aliases.get(key, key)
            if stored not in tensors:
                name, shape, _ = entries[stored]
                dtype = DTYPES.get(name) or dtype_of(name, key)
                tensors[stored] = torch.empty(shape, dtype=dtype, device="cpu")
        return tensors

    def check_targets(self, pairs: Iterable[tuple[str, torch.Tensor]], cast: bool = False) -> None:
        """Raise StateMismatchError for a target that does not fit or cannot be written."""
        for key, target in pairs:
            check_target(self.entry(key), key, target, cast)

    def _wants(self, targets: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Want]:
        """Yield the reads for some targets."""
        tensors, aliases = self.manifest.tensors, self.manifest.aliases
        for key, target in targets:
            entry = tensors[aliases.get(key, key)]
            want = flat_want(entry, key, target)
            if want is not None:
                yield want
            else:
                yield from wants_for(entry, key, target, self.manifest.part_size)

    def _new_wants(self, targets: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Want]:
        """Yield the reads for tensors of `new_tensors`, which need no checks."""
        tensors = self.manifest.tensors
        for key, target in targets:
            entry = tensors[key]
            if len(entry.chunks) > 1:
                yield from wants_for(entry, key, target, self.manifest.part_size)
                continue
            file, _, _, begin, end, checksums = entry.chunks[0]
            if checksums:  # else it is empty
                yield Want(file, begin, end, checksums, key, Flat(flat_bytes(target)))

    def _without_repeats(
        self, pairs: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
        """Drop repeated (tied) targets; return what to read into, and the memory of each.

        StateMismatchError if two different saved tensors would be read into one target.
        """
        kept: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
        memories = []
        for key, target in pairs:
            memory = local_of(target) if is_dtensor(target) else target
            if memory.numel() == 0:
                continue
            place = memory.data_ptr() or id(memory)  # tensors of XLA have no address
            mark = (memory.device, place, memory.shape, memory.stride(), memory.dtype)
            if mark not in kept:
                kept[mark] = (key, target)
                memories.append(memory)
                continue
            first, _ = kept[mark]
            if self.stored(first) != self.stored(key) and not same_bytes(
                self.entry(first), self.entry(key)
            ):
                raise StateMismatchError(
                    f"{first} and {key} are one tensor in the targets (tied), but two different "
                    "ones were saved; nothing was changed: untie them, or load only one of them"
                )
        return list(kept.values()), memories

    def transfer(
        self,
        wants: Iterable[Want],
        *,
        progress: bool | None = False,
        label: str = "loading",
    ) -> None:
        """Read into memory that is not in use yet, or only verify."""
        with collector_paused():
            transfer = Transfer(self.store, self.manifest, wants)
        self.run(transfer, False, progress, label)

    def run(self, transfer: Transfer, live: bool, progress: bool | None, label: str) -> None:
        """Run a transfer; with `live`, its targets are the caller's: a failure leaves a mixture."""
        try:
            with TransferProgress(label, transfer.nbytes, progress) as bar:
                transfer.run(bar)
        except Exception as error:
            if live and transfer.touched:
                raise TornLoadError(
                    f"loading {self.store.url} failed after the first write: the targets hold a "
                    f"mixture, load a good checkpoint into them before going on ({error})"
                ) from error
            if isinstance(error, CorruptCheckpointError) and self.replaced():
                raise CorruptCheckpointError(
                    f"{error}; a newer save has replaced this checkpoint meanwhile: open it again"
                ) from error
            raise


class PlannedRead:
    """A read into tensors that is planned and not begun, from `Source.plan_read`.

    Attributes:
        transfer: the parts to be read.
    """

    def __init__(
        self, source: Source, transfer: Transfer, live: bool, memories: Sequence[torch.Tensor]
    ) -> None:
        self.transfer = transfer
        self._source, self._live, self._memories = source, live, memories

    def run(self, progress: bool | None = False) -> None:
        """Read, each part verified before it is copied."""
        self._source.run(self.transfer, self._live, progress, "loading")
        for memory in self._memories:
            if not memory.is_inference():
                # numpy wrote the bytes: autograd must notice that saved tensors have changed
                torch.autograd.graph.increment_version(memory)


def nbytes_of(entry: TensorEntry) -> int:
    """Return the size of a stored tensor in bytes."""
    return math.prod(entry.shape) * ITEMSIZE[entry.dtype]


def check_target(entry: TensorEntry, key: str, target: torch.Tensor, cast: bool = False) -> None:
    """Raise StateMismatchError if a stored tensor does not fit a target or cannot be written."""
    if tuple(target.shape) != entry.shape:
        raise StateMismatchError(
            f"tensor {key} was saved with shape {entry.shape}, the target has "
            f"{tuple(target.shape)}; nothing was changed: build the target as it was saved"
        )
    if not cast and target.dtype != (dtype := dtype_of(entry.dtype, key)):
        raise StateMismatchError(
            f"tensor {key} was saved as {dtype}, the target is {target.dtype}; "
            "nothing was changed: convert the target first, or pass cast=True"
        )
    if type(target) not in _PLAIN and is_dtensor(target):
        try:
            check_placements(target, f"tensor {key}: the target")
        except UnsupportedStateError as error:
            raise StateMismatchError(f"{error}; nothing was changed") from None
    if target.layout is not torch.strided or target.is_meta or target.is_quantized:
        kind = "on the meta device" if target.is_meta else f"of layout {target.layout}"
        raise StateMismatchError(
            f"tensor {key}: the target is {kind}, which has no memory to load into; "
            "nothing was changed: make a dense tensor first, for example with torch.empty_like"
        )
    spread = zip(target.shape, target.stride(), strict=True)
    if not target.is_contiguous() and any(n > 1 and stride == 0 for n, stride in spread):
        raise StateMismatchError(
            f"tensor {key}: several elements of the target share memory (it was expanded); "
            "nothing was changed: load into a copy of it"
        )


def wants_for(
    entry: TensorEntry, key: str, target: torch.Tensor, part_size: int, axes: Axes | None = None
) -> Iterator[Want]:
    """Yield the reads that fill `target`, which has been checked.

    The target has the shape of the stored tensor or, with `axes`, of that box of it.
    """
    dtype, chunks = dtype_of(entry.dtype, key), entry.chunks
    placements = _placements(entry, target.detach(), axes)
    _check_coverage(placements, key, target)
    for number, box, memory in placements:
        chunk = chunks[number]
        for piece, sink in sinks_for(chunk.shape, box, dtype, memory):
            parts = parts_with(chunk.shape, piece, part_size // dtype.itemsize)
            yield Want(chunk.file, chunk.begin, chunk.end, chunk.checksums, key, sink, parts)


def flat_want(entry: TensorEntry, key: str, target: torch.Tensor) -> Want | None:
    """Return the single read of a target that takes the stored bytes unchanged, else None."""
    # the usual case, and a fast path: nothing about boxes is computed
    if len(entry.chunks) != 1 or type(target) not in _PLAIN:
        return None
    file, _, _, begin, end, checksums = entry.chunks[0]
    fits = target.dtype is DTYPES.get(entry.dtype) and target.is_contiguous()
    if not checksums or not fits or not is_plain_memory(target):
        return None
    return Want(file, begin, end, checksums, key, Flat(flat_bytes(target)))


class Placement(NamedTuple):
    """A box of one chunk, and the memory that it fills."""

    chunk: int
    axes: Axes
    target: torch.Tensor


def _placements(entry: TensorEntry, target: torch.Tensor, axes: Axes | None) -> list[Placement]:
    """Return the part of the target's memory that each chunk of a stored tensor fills."""
    if is_dtensor(target):
        return _placements_of_dtensor(entry, target)
    wanted = axes_of((0,) * len(entry.shape), entry.shape) if axes is None else axes
    placements = []
    for number, chunk in enumerate(entry.chunks):
        cut = within(wanted, chunk.offsets, chunk.shape) if chunk.checksums else None
        if cut is not None:
            placements.append(Placement(number, cut[0], target[cut[1]]))
    return placements


def _placements_of_dtensor(entry: TensorEntry, target: torch.Tensor) -> list[Placement]:
    """Return the part of this rank's shard of a DTensor that each chunk fills."""
    from checkpoint_io.sharding.planner import plan_reads

    local = local_of(target)
    chunks = [(chunk.offsets, chunk.shape) for chunk in entry.chunks]
    boxes = plan_reads(entry.shape, chunks, target)
    if overlapping([(box.target_offsets, box.lengths) for box in boxes]):
        raise CheckpointError("two stored chunks would fill the same elements of a DTensor")
    return [
        Placement(
            box.chunk,
            axes_of(box.chunk_offsets, box.lengths),
            local[box_slices(box.target_offsets, box.lengths)],
        )
        for box in boxes
    ]


def box_slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))


def _check_coverage(placements: Sequence[Placement], key: str, target: torch.Tensor) -> None:
    """Raise CorruptCheckpointError if the chunks do not fill every element exactly once."""
    if is_dtensor(target) and not in_mesh(target):  # its local part is a dummy
        return
    local = local_of(target) if is_dtensor(target) else target
    filled = sum(placement.target.numel() for placement in placements)
    if filled != local.numel():
        raise CorruptCheckpointError(
            f"tensor {key}: the stored chunks fill {filled} of the {local.numel()} elements that "
            "are needed; load an older checkpoint"
        )


def same_bytes(entry: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two stored tensors are equal by their checksums."""
    return entry[:2] == other[:2] and [_content(c) for c in entry.chunks] == [
        _content(c) for c in other.chunks
    ]


def _content(chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Return the properties that are the same in equal chunks."""
    return chunk.offsets, chunk.shape, tuple(chunk.checksums)
