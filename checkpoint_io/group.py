"""Process groups, the few collectives that saving needs, and steps on whose outcome ranks agree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    LeaseError,
    ManifestVersionError,
    UnsupportedStateError,
)

__all__ = ["ProcessGroupLike", "SingleProcess", "TorchGroup"]

# Seconds that a rank has to report itself after a failed collective. The ranks notice a broken
# connection within about one second of each other.
_REPORT_TIMEOUT = 3.0
_REPORT_POLL = 0.05
# An error travels as text. Types that callers catch separately are rebuilt on the other ranks.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        LeaseError,  # before the kind that it is of
        CheckpointConflictError,
        ManifestVersionError,
        UnsupportedStateError,
    )
}

T = TypeVar("T")


class ProcessGroupLike(Protocol):
    """The process group that `save` needs: rank, world size, all-gather and broadcast.

    The objects passed are plain dicts, lists, strings, ints and bytes. Every rank makes the same
    calls in the same order.

    Example:
        >>> from checkpoint_io import ProcessGroupLike, SingleProcess
        >>> group: ProcessGroupLike = SingleProcess()
        >>> group.all_gather_object("hello")
        ['hello']
    """

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order, on every rank."""

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return on every rank the object that rank `src` passed."""


class SingleProcess:
    """The group of this process alone; `group=None` means this one.

    Example:
        >>> from checkpoint_io import SingleProcess
        >>> SingleProcess().broadcast_object(7)
        7
    """

    rank = 0
    world_size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return a list of this object alone."""
        return [obj]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object itself."""
        return obj


class TorchGroup:
    """A `torch.distributed` process group (the default one for None).

    The ranks wait in a collective while the slowest one writes, so the timeout of the group must
    exceed the duration of a save. A save in the background needs a group of its own: see
    `TorchGroup.dedicated()`.

    Args:
        process_group: a group that this process is a member of; None means the default group.
        names_missing: after a failed collective, ask for up to 3 seconds which ranks are gone, for
            the error; False if the caller finds out by itself.

    Raises:
        RuntimeError: if `torch.distributed` is not initialized.
        ValueError: if this process is not a member of the group.

    Example:
        >>> import torch.distributed as dist
        >>> from checkpoint_io import SingleProcess, TorchGroup
        >>> group = TorchGroup() if dist.is_initialized() else SingleProcess()
        >>> group.world_size
        1
    """

    def __init__(self, process_group: Any = None, *, names_missing: bool = True) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: call init_process_group() first, "
                "or pass group=None to save from one process"
            )
        self._dist = dist
        self._group = process_group
        self._owned = False
        self._names_missing = names_missing
        self._calls = 0
        self.rank: int = dist.get_rank(process_group)
        self.world_size: int = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of the group: let only its members save and load "
                "with it, or pass process_group=None for all processes"
            )

    @classmethod
    def dedicated(cls, timeout: timedelta = timedelta(hours=2)) -> TorchGroup:
        """Create a gloo group of all ranks for saving alone; collective.

        Its collectives run on the CPU, separate from those of training (gloo or NCCL), so that it
        can be used from another thread at the same time.

        Args:
            timeout: how long a rank waits for the others; default 2 hours.

        Raises:
            RuntimeError: if `torch.distributed` is not initialized.
        """
        return cls().beside(timeout)

    def beside(self, timeout: timedelta = timedelta(hours=2)) -> TorchGroup:
        """Create a dedicated group of the ranks of this group; collective among these ranks.

        Args:
            timeout: how long a rank waits for the others; default 2 hours.
        """
        options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        if self._group is not None:
            ranks = self._dist.get_process_group_ranks(self._group)
            # Only members call this, so new_group must not wait for the other ranks.
            options.update(ranks=ranks, use_local_synchronization=True)
        group = TorchGroup(self._dist.new_group(**options))
        group._owned = True
        return group

    def close(self) -> None:
        """Destroy a dedicated group; do nothing for other groups, or if called again."""
        if self._owned and self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)
        self._owned = False

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Gather one small object from every rank of the group."""
        result: list[Any] = [None] * self.world_size
        with self._name_missing_ranks():
            self._dist.all_gather_object(result, obj, group=self._group)
        return result

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Broadcast one small object from the group's rank `src`."""
        # torch expects the global rank here, even for a subgroup.
        source = src if self._group is None else self._dist.get_global_rank(self._group, src)
        box = [obj]
        with self._name_missing_ranks():
            self._dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    @contextmanager
    def _name_missing_ranks(self) -> Iterator[None]:
        """Add the ranks that are gone to the error of a collective that fails in the block."""
        self._calls += 1
        try:
            yield
        except RuntimeError as error:
            if not self._names_missing:
                raise
            core = self._dist.distributed_c10d
            group = self._group or self._dist.group.WORLD
            call = f"checkpoint_io/{getattr(group, 'group_name', '')}/{self._calls}"
            store, ranks = core._get_default_store(), range(self.world_size)
            if missing := _describe_missing(store, call, self.rank, ranks):
                raise self._dist.DistBackendError(f"{missing}: {error}") from error
            raise


def _describe_missing(store: Any, call: str, rank: int, ranks: Sequence[int]) -> str:
    """Describe the ranks that do not report themselves in the store; "" if all of them do.

    Args:
        store: the key-value store of the process group.
        call: the name of the failed collective, the same on all ranks.
        rank: this rank, as counted in `ranks`.
        ranks: all ranks of the group.
    """
    try:
        store.set(f"{call}/{rank}", b"here")
        missing = _within(2 * _REPORT_TIMEOUT, lambda: _wait_for_reports(store, call, ranks))
    except Exception:  # the store lives in rank 0, or in a launcher that exited with it
        return "rank 0 does not answer (the store of the process group is gone)"
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    plural = "s" if len(missing) > 1 else ""
    return f"rank{plural} {names} did not answer within {_REPORT_TIMEOUT:.0f} s"


def _within(seconds: float, ask: Callable[[], list[int]]) -> list[int]:
    """Return what a function returns, or raise if it takes longer.

    A store whose host is stopped or cut off never answers, whatever timeout its client has.
    """
    outcome: Future[list[int]] = Future()

    def run() -> None:
        try:
            outcome.set_result(ask())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)


def _wait_for_reports(store: Any, call: str, ranks: Sequence[int]) -> list[int]:
    """Wait briefly for the ranks to report themselves; return those that do not."""
    until = time.monotonic() + _REPORT_TIMEOUT
    # One question for all ranks at a time: they all ask at once.
    while not store.check([f"{call}/{rank}" for rank in ranks]):
        if time.monotonic() > until:
            return [rank for rank in ranks if not store.check([f"{call}/{rank}"])]
        time.sleep(_REPORT_POLL)
    return []


# --- the outcome of a step ---------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a step on this rank, or its error."""

    value: Any
    error: BaseException | None

    @classmethod
    def of(cls, step: Callable[[], T]) -> Outcome:
        """Run a step and catch any exception."""
        try:
            return cls(step(), None)
        # An interrupt too: the other ranks are about to wait in the collective that follows.
        except BaseException as error:
            return cls(None, error)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for the other ranks."""
        return {
            "value": self.value,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "kind": next((n for n, kind in _KINDS.items() if isinstance(self.error, kind)), ""),
        }


def agree(
    group: ProcessGroupLike,
    outcome: Outcome,
    headline: str,
    *,
    group_headline: str | None = None,
    cleanup: Callable[[bool], None] = lambda gathered: None,
) -> list[Any]:
    """All-gather the outcome of a step; raise on every rank if it failed on any.

    Args:
        group: the ranks that took the step.
        outcome: of this rank; its value must be plain.
        headline: begins the error if the step failed.
        group_headline: begins the CheckpointError for an error of the group itself; None lets that
            error pass as it is.
        cleanup: called before anything is raised; its argument is False if the gather itself
            failed, so that the outcome on the other ranks is unknown.

    Returns:
        The value of every rank, in rank order.
    """
    outcomes: list[Any] | None = None
    try:
        plain = outcome.to_plain()
        outcomes = collective(lambda: group.all_gather_object(plain), group_headline)
    finally:
        if outcomes is None:
            cleanup(False)
    if failed_ranks(outcomes):
        cleanup(True)
        raise_failure(headline, outcomes, outcome)
    return [report["value"] for report in outcomes]


def collective(call: Callable[[], T], headline: str | None) -> T:
    """Make a collective call; raise a CheckpointError, begun by `headline`, if the group fails."""
    try:
        return call()
    except CheckpointError:
        raise
    except Exception as error:
        if headline is None:
            raise
        raise CheckpointError(
            f"{headline}: the process group failed, as it does when a rank dies or takes too long "
            f"({type(error).__name__}: {error})"
        ) from error


def failed_ranks(outcomes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks whose step failed."""
    return [rank for rank, outcome in enumerate(outcomes) if outcome["error"] is not None]


def describe_failures(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return the error of each rank whose step failed, as one line of text."""
    return "; ".join(f"rank {rank}: {outcomes[rank]['error']}" for rank in failed_ranks(outcomes))


def raise_failure(
    headline: str, outcomes: Sequence[Mapping[str, Any]], outcome: Outcome
) -> NoReturn:
    """Raise on this rank for the ranks whose step failed."""
    if outcome.error is not None:
        interrupted = not isinstance(outcome.error, Exception)
        # With one rank there is nothing to add to an error that already names the next step.
        explained = isinstance(outcome.error, (CheckpointError, ImportError, ValueError))
        if interrupted or (explained and len(outcomes) == 1):
            raise outcome.error
    kinds = {outcomes[rank]["kind"] for rank in failed_ranks(outcomes)}
    kind = _KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    raise kind(f"{headline}: {describe_failures(outcomes)}") from outcome.error
