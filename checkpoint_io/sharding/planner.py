"""Assign boxes to ranks: which rank writes which, and which stored chunks a target needs.

No other module does; the assignment does not affect the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.safetensors import ITEMSIZE
from checkpoint_io.sharding.boxes import cover_fault
from checkpoint_io.sharding.dtensor import LocalBox, is_dtensor, local_boxes
from checkpoint_io.sharding.local_tensors import Entry, entry_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Assignment(NamedTuple):
    """The boxes that each rank writes, by key and offsets, and the tied keys."""

    ranks: list[list[tuple[str, tuple[int, ...]]]]
    tied: dict[str, str]


class ReadBox(NamedTuple):
    """A box to copy from a stored chunk into the target, or into its local tensor."""

    chunk: int
    chunk_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def plan_writes(holdings: Sequence[Mapping[str, Any]]) -> Assignment:
    """Assign every box of the ranks' tensors (`LocalTensors.to_plain` of each) to one rank.

    Tensors that only rank 0 can write are not included. Raises CheckpointError for a DTensor of
    which the ranks together do not hold every element.
    """
    # A pure function of what was gathered: every rank computes the same assignment, so that none
    # has to be broadcast.
    held = [{k: entry_of(e) for k, e in h["entries"].items()} for h in holdings]
    _refuse_unknown(held)
    tied = _find_ties(held, [h["tied"] for h in holdings])
    offers: dict[str, dict[Box, list[int]]] = {}  # by key: each box, with the ranks that hold it
    fixed: list[tuple[str, tuple[int, ...]]] = []
    wanted = {key: entry for key, entry in held[0].items() if key not in tied}
    for key, entry in wanted.items():
        holders = offers[key] = {}
        origin = (0,) * len(entry.shape)
        if entry.boxes is None:
            alike = [rank for rank, other in enumerate(held) if other.get(key) == entry]
            holders[origin, entry.shape] = alike
        elif not math.prod(entry.shape):
            fixed.append((key, origin))
        else:
            for rank, other in enumerate(held):
                for box in (other[key].boxes if key in other else None) or ():
                    if 0 not in box[1]:
                        holders.setdefault(box, []).append(rank)
    _check_cover(wanted, offers)
    ranks = _spread(wanted, offers, len(held))
    return Assignment([fixed + ranks[0], *ranks[1:]], tied)


def _refuse_unknown(held: Sequence[Mapping[str, Entry]]) -> None:
    """Raise for a DTensor that rank 0, whose state tree is saved, does not have."""
    for rank, entries in enumerate(held):
        for key, entry in entries.items():
            first = held[0].get(key)
            if entry.boxes is None or (first is not None and first[:2] == entry[:2]):
                continue
            other = "none" if first is None else f"{first.dtype} {list(first.shape)}"
            raise CheckpointError(
                f"rank {rank} has a DTensor at {key!r}, {entry.dtype} {list(entry.shape)}, and "
                f"rank 0 has {other} there: pass the same state on rank 0 as on the ranks of a mesh"
            )


def _find_ties(
    held: Sequence[Mapping[str, Entry]], claims: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return the tensors that are tied on all ranks; for plain tensors rank 0 decides.

    One rank is not enough for a DTensor: where its local part is empty, others may appear tied.
    """
    tied: dict[str, str] = {}
    firsts: dict[Any, str] = {}
    for key in (*claims[0].values(), *claims[0]):
        entry = held[0].get(key)
        if entry is None or entry.boxes is None:
            mark: Any = claims[0].get(key, key)
        else:
            mark = tuple(
                claim.get(key, key) if key in entries else None
                for claim, entries in zip(claims, held, strict=True)
            )
        first = firsts.setdefault(mark, key)
        if first != key:
            tied[key] = first
    return tied


def _check_cover(entries: Mapping[str, Entry], offers: Mapping[str, Mapping[Box, Any]]) -> None:
    """Raise unless the boxes that the ranks hold of each tensor cover it exactly once."""
    for key, entry in entries.items():
        fault = cover_fault(entry.shape, list(offers.get(key, ())))
        if fault is not None:
            raise CheckpointError(
                f"{key!r} is a DTensor of shape {list(entry.shape)}, which the shards of the ranks "
                f"that save do not cover exactly once: {fault}. All ranks of its mesh must take "
                "part (group=) and pass it; distribute_tensor makes shards that fit"
            )


def _spread(
    entries: Mapping[str, Entry], offers: Mapping[str, Mapping[Box, Sequence[int]]], ranks: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Choose one of its holders for each box, so that all ranks write about as much."""
    chosen: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    shared = []
    for key, boxes in offers.items():
        itemsize = ITEMSIZE[entries[key].dtype]
        for (offsets, extent), holders in boxes.items():
            size = math.prod(extent) * itemsize
            if len(holders) == 1:
                chosen[holders[0]].append((key, offsets))
                load[holders[0]] += size
            else:
                shared.append((size, key, offsets, holders))
    # Largest first: small boxes at the end even out the load. The sort is stable, and the order of
    # the keys that of rank 0, so every rank chooses alike.
    for size, key, offsets, holders in sorted(shared, key=lambda box: -box[0]):
        lightest = min(holders, key=load.__getitem__)
        chosen[lightest].append((key, offsets))
        load[lightest] += size
    return chosen


def _chunk(offsets: Sequence[int], extent: Sequence[int]) -> Any:
    """Convert a box to ChunkStorageMetadata."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent))


def plan_reads(shape: Sequence[int], chunks: Sequence[Box], target: torch.Tensor) -> list[ReadBox]:
    """Return the boxes of the stored chunks that the target needs.

    `chunks` are (offsets, shape) in a tensor of `shape`. The target is a plain tensor of that
    shape, or a DTensor, of which only the local part is read; `target_offsets` count from the start
    of the local part. An empty target, or a rank outside of the mesh, needs no boxes.
    """
    if tuple(shape) != tuple(target.shape):
        raise ValueError(f"a tensor of shape {list(shape)} cannot fill {list(target.shape)}")
    if is_dtensor(target):
        return _reads_of_boxes(shape, chunks, local_boxes(target, "the target"))
    origin = (0,) * len(shape)
    return [
        ReadBox(number, origin, tuple(offsets), tuple(extent))
        for number, (offsets, extent) in enumerate(chunks)
        if 0 not in extent
    ]


def _reads_of_boxes(
    shape: Sequence[int], chunks: Sequence[Box], boxes: Sequence[LocalBox]
) -> list[ReadBox]:
    """Intersect stored chunks with local boxes, with torch's resharding."""
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    # An empty chunk has nothing to read, but torch would let it overlap the box around it.
    numbers = [n for n, (_, extent) in enumerate(chunks) if 0 not in extent]
    stored = TensorStorageMetadata(
        TensorProperties(), torch.Size(shape), [_chunk(*chunks[n]) for n in numbers]
    )
    wanted = [_chunk(box.offsets, box.shape) for box in boxes]
    reads = []
    for item in create_read_items_for_chunk_list("", stored, wanted):
        local, source = item.dest_index.index, item.storage_index.index
        assert local is not None
        assert source is not None
        into = zip(boxes[local].local_offsets, item.dest_offsets, strict=True)
        reads.append(
            ReadBox(
                numbers[source],
                tuple(item.storage_offsets),
                tuple(start + more for start, more in into),
                tuple(item.lengths),
            )
        )
    return reads
