"""The boxes of a DTensor that this rank holds, and their place in the local tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CheckpointError, UnsupportedStateError

Run = tuple[int, int]


class LocalBox(NamedTuple):
    """A box of the full tensor, and its start in the local tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    local_offsets: tuple[int, ...]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    # Not imported yet: then there is no DTensor. The import is slow.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, which shares its memory."""
    # Without detach(), which makes a new local tensor on ranks outside of the mesh: what is tied
    # could not be told there.
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor: its collective may be pending
    return wait() if callable(wait) else local


def in_mesh(tensor: Any) -> bool:
    """Return whether this rank is in the mesh of a DTensor."""
    return tensor.device_mesh.get_coordinate() is not None


def check_placements(tensor: Any, label: str) -> None:
    """Raise UnsupportedStateError unless every placement of a DTensor is Shard or Replicate."""
    for placement in tensor.placements:
        if placement.is_partial():
            raise UnsupportedStateError(
                f"{label} is a DTensor with the placement {placement}: its local values are "
                "partial results; reduce it first, with redistribute(placements=[Replicate()])"
            )
        if type(placement).__name__ not in ("Replicate", "Shard", "_StridedShard"):
            raise UnsupportedStateError(
                f"{label} is a DTensor with the placement {placement}, which a checkpoint does not "
                "support: redistribute it to Shard or Replicate first"
            )


def local_boxes(tensor: Any, label: str) -> list[LocalBox]:
    """Return the boxes that this rank holds; none if it is not in the mesh or its part is empty.

    Raises UnsupportedStateError for a placement that cannot be stored.
    """
    check_placements(tensor, label)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    mesh = tensor.device_mesh.shape
    # Per dimension, runs (start, length) of indices: with strided sharding (FSDP over tensor
    # parallelism) a rank may hold several of one dimension.
    runs = [[(0, size)] if size else [] for size in tensor.shape]
    for dim_of_mesh, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            split = int(getattr(placement, "split_factor", 1))
            at, parts = coordinate[dim_of_mesh], mesh[dim_of_mesh]
            runs[placement.dim] = _part(runs[placement.dim], parts, at, split)
    held = tuple(sum(length for _, length in of_dim) for of_dim in runs)
    actual = tuple(local_of(tensor).shape)
    # The rules of sharding are torch's, and restated here: never trust them blindly.
    if held != actual:
        raise CheckpointError(
            f"{label} is a DTensor whose local part has shape {list(actual)}; its placements "
            f"{list(tensor.placements)} imply {list(held)}: redistribute it to Shard or Replicate"
        )
    return [
        LocalBox(
            tuple(start for (start, _), _ in box),
            tuple(length for (_, length), _ in box),
            tuple(local for _, local in box),
        )
        for box in product(*(list(_local_starts(of_dim)) for of_dim in runs))
    ]


def _local_starts(runs: list[Run]) -> Iterator[tuple[Run, int]]:
    """Yield each run of indices with its start in the local tensor."""
    position = 0
    for run in runs:
        yield run, position
        position += run[1]


def _part(runs: list[Run], parts: int, at: int, split: int) -> list[Run]:
    """Return part `at` of `parts`, cut from each of `split` pieces; adjacent runs are joined."""
    pieces = [piece for first in _chunk(runs, split) for piece in _chunk(first, parts)[at]]
    joined: list[Run] = []
    for start, length in pieces:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _chunk(runs: list[Run], parts: int) -> list[list[Run]]:
    """Split indices as torch.chunk does: equal parts, the last ones smaller or empty."""
    total = sum(length for _, length in runs)
    size = -(-total // parts)
    return [_cut(runs, n * size, min((n + 1) * size, total)) for n in range(parts)]


def _cut(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Return the runs between two positions."""
    cut = []
    position = 0
    for start, length in runs:
        low, high = max(begin, position), min(end, position + length)
        if low < high:
            cut.append((start + low - position, high - low))
        position += length
    return cut
