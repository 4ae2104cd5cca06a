"""Streams that read a part for each rank by themselves, noticed in their first batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.warning import warn

__all__ = ["checksum", "may_divide", "told_of_division"]

# Who divides needs both; the rank alone may seed a noise, or choose who prints.
_RANK = {"RANK", "get_rank", "rank", "_rank", "global_rank", "process_index", "data_rank"}
_WORLD = {
    *("WORLD_SIZE", "get_world_size", "world_size", "_world_size", "world", "num_replicas"),
    *("num_processes", "data_world"),
}
# They read ranks in each dataset, and what is divided already is refused by prepare().
_KNOWN = {"torch", "datasets", "typing", "builtins"}


def may_divide(dataset: Any) -> bool:
    """Return whether the code of a dataset's class names both its rank and the number of ranks.

    Example:
        >>> from accel_callbacks.data.own_division import may_divide
        >>> class Lines:
        ...     def __iter__(self):
        ...         return iter(range(torch.distributed.get_rank(), 8, self.world_size))
        >>> may_divide(Lines()), may_divide([0, 1])
        (True, False)
    """
    names: set[str] = set()
    for kind in type(dataset).__mro__:
        if kind.__module__.partition(".")[0] not in _KNOWN:
            for member in vars(kind).values():
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                names |= set() if code is None else _names_in(code)
    return bool(names & _RANK and names & _WORLD)


def _names_in(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def checksum(samples: Any) -> int:
    """Return a checksum of nested samples; objects of unknown content are left out.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.own_division import checksum
        >>> checksum([{"x": torch.ones(2)}]) == checksum([{"x": torch.ones(2)}])
        True
        >>> checksum(["a", 1]) == checksum(["a", 2])
        False
    """
    total = 0
    for value in _leaves(samples):
        total = zlib.crc32(value, total)
    return total


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        # From all of it: the beginning may be padding.
        yield repr(flat[:: flat.numel() // 1024 + 1].tolist()).encode()
    elif callable(getattr(value, "tobytes", None)):  # an array, an image
        yield value.tobytes()
    elif isinstance(value, (str, bytes, bool, int, float)):
        yield repr(value).encode()


def told_of_division(pieces: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the pieces of a pass; warn if the ranks began with different samples.

    Args:
        pieces: what the loader reads, a :data:`accel_callbacks.data.iterable.Piece` each.
        name: class of the dataset, for the message.
    """
    posted = None
    for piece in pieces:
        if posted is None:
            posted = collectives.Posted(f"stream of {name}", str(piece[1].checksum))
        elif _compared(posted, name):
            yield piece
            break
        yield piece
    else:
        if posted is not None:
            _compared(posted, name)
    yield from pieces


def _compared(posted: collectives.Posted, name: str) -> bool:
    """Warn if the checksums differ; return False until all ranks have posted theirs."""
    checksums = posted.values()
    if checksums is None:
        return False
    if len(set(checksums)) > 1:
        warn(
            f"{name} reads other samples on each process, and prepare() divides them once more, "
            "so that most are never seen: let its __iter__ yield the samples of all processes, or "
            "(to read only a part) give it num_shards and shard(num_shards=, index=), which "
            "prepare() then calls."
        )
    return True
