"""Assign boxes to ranks with the planners of torch.distributed.checkpoint.

No other module uses them; they do not affect the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.safetensors import DTYPES, ITEMSIZE
from checkpoint_io.sharding.dtensor import LocalBox, is_dtensor, local_boxes
from checkpoint_io.sharding.local_tensors import Entry, entry_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
Offer = tuple[str, Entry, Box]


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
    tied = _tied(held, [h["tied"] for h in holdings])
    offers: list[list[Offer]] = [[] for _ in held]
    fixed: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in held]
    for key, entry in held[0].items():
        if key in tied:
            continue
        origin = (0,) * len(entry.shape)
        if entry.boxes is None:
            for rank, other in enumerate(held):
                if other.get(key) == entry:
                    offers[rank].append((key, entry, (origin, entry.shape)))
        elif not math.prod(entry.shape):
            fixed[0].append((key, origin))
        else:
            for rank, other in enumerate(held):
                boxes = other[key].boxes if key in other else None
                offers[rank] += [(key, entry, box) for box in boxes or () if 0 not in box[1]]
    _check_cover({key: entry for key, entry in held[0].items() if key not in tied}, offers)
    return Assignment([a + b for a, b in zip(fixed, _spread(offers), strict=True)], tied)


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


def _tied(
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


def _check_cover(entries: Mapping[str, Entry], offers: Sequence[Sequence[Offer]]) -> None:
    """Raise for a tensor of which some part is on no rank of the group."""
    volumes: dict[str, dict[Box, int]] = {}
    for key, _, box in (offer for of_rank in offers for offer in of_rank):
        volumes.setdefault(key, {})[box] = math.prod(box[1])
    for key, entry in entries.items():
        covered = sum(volumes.get(key, {}).values())
        if covered != math.prod(entry.shape):
            raise CheckpointError(
                f"{key!r} is a DTensor of shape {list(entry.shape)}, of which the ranks that save "
                f"hold {covered} of {math.prod(entry.shape)} elements: all ranks of its mesh must "
                "take part (group=) and pass it"
            )


def _spread(offers: Sequence[Sequence[Offer]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Choose one rank for each box with torch's planner, so that all write about as much."""
    if sum(1 for of_rank in offers if of_rank) < 2:
        return [[(key, box[0]) for key, _, box in of_rank] for of_rank in offers]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
    )
    # Largest first: the planner assigns greedily, and small boxes at the end even out the load.
    plans = [
        SavePlan([_item(o) for o in sorted(of_rank, key=_size, reverse=True)]) for of_rank in offers
    ]
    try:
        chosen, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            f"the shards of some DTensor overlap on different ranks ({error}): make it with "
            "distribute_tensor, or redistribute it to Replicate first"
        ) from error
    return [
        [(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items] for plan in chosen
    ]


def _size(offer: Offer) -> int:
    """Return the bytes of a box."""
    _, entry, (_, extent) = offer
    return math.prod(extent) * ITEMSIZE[entry.dtype]


def _item(offer: Offer) -> Any:
    """Convert an offer to a WriteItem."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    key, entry, (offsets, extent) = offer
    return WriteItem(
        index=MetadataIndex(key, torch.Size(offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(offsets, extent),
            properties=TensorProperties(dtype=DTYPES[entry.dtype]),
            size=torch.Size(entry.shape),
        ),
    )


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
