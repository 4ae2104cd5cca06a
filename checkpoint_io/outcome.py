"""Agree on the outcome of a step: if it failed on one rank, every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    LeaseError,
    ManifestVersionError,
    UnsupportedStateError,
)
from checkpoint_io.group import ProcessGroupLike

T = TypeVar("T")

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
