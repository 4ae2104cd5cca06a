"""Checks of how workers and ranks divide a stream, in the first batches of a pass.

Each loader worker may read the whole stream, and each rank may read a part that ``prepare`` then
divides once more. Neither can be seen in advance, so the first batches are compared: those of the
workers in this process, and over the ranks their checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from accel_callbacks import collectives
from checkpoint_io.warning import warn

__all__ = [
    "checksum",
    "compare_over_ranks",
    "compare_over_workers",
    "may_divide",
]

# Who divides needs both; the rank alone may seed a noise, or choose who prints.
_RANK = {"RANK", "get_rank", "rank", "_rank", "global_rank", "process_index", "data_rank"}
_WORLD = {
    *("WORLD_SIZE", "get_world_size", "world_size", "_world_size", "world", "num_replicas"),
    *("num_processes", "data_world"),
}
# What draws values, and not an order or places in a buffer.
_DRAWN = {"rand", "randn", "rand_like", "randn_like", "normal", "normal_", "standard_normal"}
# They read ranks in each dataset, and what is divided already is refused by prepare().
_KNOWN = {"torch", "datasets", "typing", "builtins"}


# --- the ranks ------------------------------------------------------------------------------


def may_divide(dataset: Any) -> bool:
    """Return whether the code of a dataset's class names both its rank and the number of ranks.

    One that draws its samples, and holds nothing to read from, has no part to take.

    Example:
        >>> from accel_callbacks.data.stream_checks import may_divide
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
    held = getattr(dataset, "__dict__", {}).values()
    drawn = names & _DRAWN and not any(map(_may_hold_samples, held))
    return bool(names & _RANK and names & _WORLD and not drawn)


def _may_hold_samples(value: Any) -> bool:
    """Return whether samples may come from a value, which for a number or a shape they do not."""
    plain = (bool, int, float, torch.dtype, torch.device, torch.Generator, type(None))
    if isinstance(value, tuple):
        return any(map(_may_hold_samples, value))
    return not isinstance(value, plain)


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
        >>> from accel_callbacks.data.stream_checks import checksum
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
        for entry in value:
            yield from _leaves(entry)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        # From all of it: the beginning may be padding.
        yield repr(flat[:: flat.numel() // 1024 + 1].tolist()).encode()
    elif callable(getattr(value, "tobytes", None)):  # an array, an image
        yield value.tobytes()
    elif isinstance(value, (str, bytes, bool, int, float)):
        yield repr(value).encode()


def compare_over_ranks(pieces: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the pieces of a pass; warn if the ranks began with different samples.

    Args:
        pieces: what the loader reads, a :data:`accel_callbacks.data.iterable.Piece` each.
        name: class of the dataset, for the message.
    """
    posted = None
    for piece in pieces:
        if posted is None:
            posted = collectives.Posted(f"stream of {name}", str(piece[1].checksum))
        elif _warn_of_division(posted, name):
            yield piece
            break
        yield piece
    else:
        if posted is not None:
            _warn_of_division(posted, name)
    yield from pieces


def _warn_of_division(posted: collectives.Posted, name: str) -> bool:
    """Warn if the checksums differ; return False until all ranks have posted theirs."""
    # Posted to the store, and not gathered: a rank may have left its first pass already.
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


# --- the workers of one rank ----------------------------------------------------------------


def compare_over_workers(pieces: Iterator[Any], workers: int, name: str) -> Iterator[Any]:
    """Yield the pieces of a pass; warn if the first one of each worker has the same samples.

    Nobody is warned if the second piece of a worker is like the first: then it is the data that
    repeats.

    Args:
        pieces: what the loader reads, a :data:`accel_callbacks.data.iterable.Piece` each.
        workers: number of worker processes.
        name: class of the dataset, for the message.

    Example:
        >>> import warnings
        >>> from accel_callbacks.data.iterable import Part
        >>> from accel_callbacks.data.stream_checks import compare_over_workers
        >>> pieces = [([sample], Part(1, 1, worker)) for sample in (1, 2) for worker in (0, 1)]
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     [batch for batch, _ in compare_over_workers(iter(pieces), 2, "Lines")]
        [[1], [1], [2], [2]]
        >>> len(caught)
        1
    """
    before, alike = None, 0
    for piece in pieces:
        batch, part = piece
        # Each is compared with one that the loop has not got yet, and so cannot have changed.
        equal = alike == 0 or _same(before, batch)
        if alike == workers or not equal or part.worker != alike:
            if alike == workers and not equal:
                _warn_of_copies(workers, name)
            yield piece
            break
        before, alike = batch, alike + 1
        yield piece
    else:
        if alike == workers:
            _warn_of_copies(workers, name)
    yield from pieces


def _warn_of_copies(workers: int, name: str) -> None:
    warn(
        f"each of the {workers} loader workers reads all samples of {name}, so that a pass has "
        f"every sample {workers} times: let __iter__ read a part, such as "
        "islice(samples, info.id, None, info.num_workers) with info = "
        "torch.utils.data.get_worker_info(), or give the DataLoader num_workers=1."
    )


def _same(batch: Any, other: Any) -> bool:
    """Return whether two batches have equal content; False where that is not known."""
    if type(batch) is not type(other):
        return False
    if isinstance(batch, torch.Tensor):
        return torch.equal(batch, other)
    if isinstance(batch, Mapping):
        return batch.keys() == other.keys() and all(_same(batch[key], other[key]) for key in batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return len(batch) == len(other) and all(map(_same, batch, other))
    try:
        return bool((batch == other) is True or (batch == other).all())
    except Exception:
        return False
