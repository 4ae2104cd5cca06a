"""Loader workers that each read the whole of a stream, noticed in its first batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from accel_callbacks.warning import warn

__all__ = ["WorkerQuestions", "told_of_copies"]

_TELLING = {"id", "num_workers", "seed"}


class WorkerQuestions:
    """Notes whether the dataset of a worker process asks which worker it is in.

    Attributes:
        asked: True once it has asked, and where that cannot be noticed.

    Example:
        >>> from accel_callbacks.data.worker_copies import WorkerQuestions
        >>> WorkerQuestions().asked  # in no worker
        False
    """

    def __init__(self) -> None:
        self.asked = False
        info = get_worker_info()
        if info is None:
            return
        try:
            # The object that every get_worker_info() in this process returns.
            object.__setattr__(info, "__class__", _noting(type(info), self))
        except TypeError:
            self.asked = True


def _noting(kind: type, questions: WorkerQuestions) -> type:
    """Return a subclass that notes when the id, the number or the seed of a worker is read."""

    def read(info: Any, name: str) -> Any:
        if name in _TELLING:
            questions.asked = True
        return object.__getattribute__(info, name)

    base = getattr(kind, "_noted_kind", kind)
    return type(
        base.__name__, (base,), {"__slots__": (), "__getattribute__": read, "_noted_kind": base}
    )


def told_of_copies(pieces: Iterator[Any], workers: int, name: str) -> Iterator[Any]:
    """Yield the pieces of a pass; warn if the first one of each worker has the same samples.

    Nobody is warned if a worker asked which it is, and neither if the second piece of a worker is
    like the first: then it is the data that repeats.

    Args:
        pieces: what the loader reads, a :data:`accel_callbacks.data.iterable.Piece` each.
        workers: number of worker processes.
        name: class of the dataset, for the message.

    Example:
        >>> import warnings
        >>> from accel_callbacks.data.iterable import Part
        >>> from accel_callbacks.data.worker_copies import told_of_copies
        >>> pieces = [([sample], Part(1, 1, worker)) for sample in (1, 2) for worker in (0, 1)]
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     [batch for batch, _ in told_of_copies(iter(pieces), 2, "Lines")]
        [[1], [1], [2], [2]]
        >>> len(caught)
        1
    """
    before, alike = None, 0
    for piece in pieces:
        batch, part = piece
        # Each is compared with one that the loop has not got yet, and so cannot have changed.
        equal = not part.asked and (alike == 0 or _same(before, batch))
        if alike == workers or not equal or part.worker != alike:
            if alike == workers and not equal and not part.asked:
                _warn(workers, name)
            yield piece
            break
        before, alike = batch, alike + 1
        yield piece
    else:
        if alike == workers:
            _warn(workers, name)
    yield from pieces


def _warn(workers: int, name: str) -> None:
    warn(
        f"each of the {workers} loader workers reads all samples of {name}, so that a pass has "
        f"every sample {workers} times: let __iter__ read a part, such as "
        "islice(samples, info.id, None, info.num_workers) with info = "
        "torch.utils.data.get_worker_info(), or give the DataLoader num_workers=1."
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two batches have equal content; False where that is not known."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool((one == other) is True or (one == other).all())
    except Exception:
        return False
