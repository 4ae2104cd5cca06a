"""Where each stored chunk of a tensor goes in a target: checked, and complete, before any read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from checkpoint_io.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from checkpoint_io.format.manifest import Chunk, TensorEntry
from checkpoint_io.layout.dtypes import DTYPES, ITEMSIZE
from checkpoint_io.loader.transfer import Want
from checkpoint_io.reading.sinks import Flat, flat_bytes, is_plain_memory, sinks_for
from checkpoint_io.sharding.boxes import Axes, axes_of, overlapping, parts_with, within
from checkpoint_io.sharding.dtensor import check_placements, is_dtensor, local_of

# a subclass may keep its elements elsewhere
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Placement(NamedTuple):
    """A box of one chunk and the memory that it fills."""

    chunk: int
    axes: Axes
    target: torch.Tensor


def dtype_of(entry: TensorEntry, key: str) -> torch.dtype:
    """Return the torch dtype of a stored tensor."""
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"tensor {key}: torch {torch.__version__} has no dtype for {entry.dtype}; "
            "a newer torch has"
        )
    return dtype


def check_target(entry: TensorEntry, key: str, target: torch.Tensor, cast: bool = False) -> None:
    """Refuse a target that the stored tensor does not fit, or that cannot be written."""
    if tuple(target.shape) != entry.shape:
        raise StateMismatchError(
            f"tensor {key} was saved with shape {entry.shape}, the target has "
            f"{tuple(target.shape)}; nothing was changed: build the target as it was saved"
        )
    if not cast and target.dtype != dtype_of(entry, key):
        raise StateMismatchError(
            f"tensor {key} was saved as {dtype_of(entry, key)}, the target is {target.dtype}; "
            "nothing was changed: convert the target first, or pass cast=True"
        )
    if type(target) not in _PLAIN and is_dtensor(target):
        _check_dtensor(key, target)
    if target.layout is not torch.strided or target.is_meta or target.is_quantized:
        kind = "on the meta device" if target.is_meta else f"of layout {target.layout}"
        raise StateMismatchError(
            f"tensor {key}: the target is {kind}, which has no memory to load into; "
            "nothing was changed: make a dense tensor first, for example with torch.empty_like"
        )
    spread = zip(target.shape, target.stride(), strict=True)
    if not target.is_contiguous() and any(n > 1 and stride == 0 for n, stride in spread):
        raise StateMismatchError(
            f"tensor {key}: several elements of the target share one place in memory (it was "
            "expanded); nothing was changed: load into a copy of it"
        )


def _check_dtensor(key: str, target: torch.Tensor) -> None:
    """Refuse a DTensor of which no rank holds a part that could be filled."""
    try:
        check_placements(target, f"tensor {key}: the target")
    except UnsupportedStateError as error:
        raise StateMismatchError(f"{error}; nothing was changed") from None


def wants_for(
    entry: TensorEntry, key: str, target: torch.Tensor, part_size: int, axes: Axes | None = None
) -> Iterator[Want]:
    """Yield what to read so that `target`, already checked, is filled.

    The target has the shape of the stored tensor or, with `axes`, of that box of it.
    """
    dtype, chunks = dtype_of(entry, key), entry.chunks
    placements = _placements(entry, target.detach(), axes)
    _check_coverage(placements, key, target)
    for number, box, memory in placements:
        chunk = chunks[number]
        for piece, sink in sinks_for(chunk.shape, box, dtype, memory):
            parts = parts_with(chunk.shape, piece, part_size // dtype.itemsize)
            yield Want(chunk.file, chunk.begin, chunk.end, chunk.checksums, key, sink, parts)


def flat_want(entry: TensorEntry, key: str, target: torch.Tensor) -> Want | None:
    """Return what to read where bytes go into the target as they are stored: the usual case."""
    if len(entry.chunks) != 1 or type(target) not in _PLAIN:
        return None
    file, _, _, begin, end, checksums = entry.chunks[0]
    fits = target.dtype is DTYPES.get(entry.dtype) and target.is_contiguous()
    if not checksums or not fits or not is_plain_memory(target):
        return None
    return Want(file, begin, end, checksums, key, Flat(flat_bytes(target)))


def _placements(entry: TensorEntry, target: torch.Tensor, axes: Axes | None) -> list[Placement]:
    """Match the chunks of a stored tensor with the memory of the target."""
    if is_dtensor(target):
        return _placements_of_dtensor(entry, target)
    wanted = axes_of((0,) * len(entry.shape), entry.shape) if axes is None else axes
    found = []
    for number, chunk in enumerate(entry.chunks):
        cut = within(wanted, chunk.offsets, chunk.shape) if chunk.checksums else None
        if cut is not None:
            found.append(Placement(number, cut[0], target[cut[1]]))
    return found


def _placements_of_dtensor(entry: TensorEntry, target: torch.Tensor) -> list[Placement]:
    """Match the chunks with the part of a DTensor that this process holds."""
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
            local[_slices(box.target_offsets, box.lengths)],
        )
        for box in boxes
    ]


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Index a box."""
    return tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))


def _check_coverage(placements: Sequence[Placement], key: str, target: torch.Tensor) -> None:
    """Refuse a plan that would leave an element of the target as it was, or fill one twice."""
    local = local_of(target) if is_dtensor(target) else target
    filled = sum(placement.target.numel() for placement in placements)
    if filled != local.numel():
        raise CorruptCheckpointError(
            f"tensor {key}: the stored chunks fill {filled} of the {local.numel()} elements that "
            "are needed; load an older checkpoint"
        )


def same_bytes(entry: TensorEntry, other: TensorEntry) -> bool:
    """Say whether two stored tensors are equal, as far as their checksums tell."""
    return entry[:2] == other[:2] and [_content(c) for c in entry.chunks] == [
        _content(c) for c in other.chunks
    ]


def _content(chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Return what must agree for two chunks to be equal."""
    return chunk.offsets, chunk.shape, tuple(chunk.checksums)


def nbytes_of(entry: TensorEntry) -> int:
    """Return the size of a stored tensor."""
    return math.prod(entry.shape) * ITEMSIZE[entry.dtype]
