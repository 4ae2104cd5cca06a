"""Telling every rank what happened on the others, interrupts included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    ManifestVersionError,
    UnsupportedStateError,
)

T = TypeVar("T")

# What callers tell apart stays apart on the ranks that only hear of it.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (CheckpointConflictError, ManifestVersionError, UnsupportedStateError)
}


@dataclass(frozen=True)
class Outcome:
    """What a step gave on this rank, or how it failed."""

    value: Any
    error: BaseException | None

    @classmethod
    def of(cls, step: Callable[[], T]) -> Outcome:
        """Run a step; even an interrupt is kept, because the other ranks are waiting for us."""
        try:
            return cls(step(), None)
        except BaseException as error:
            return cls(None, error)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for the other ranks."""
        return {
            "value": self.value,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "kind": next((n for n, kind in _KINDS.items() if isinstance(self.error, kind)), ""),
        }


def failed_ranks(outcomes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks whose step failed."""
    return [rank for rank, outcome in enumerate(outcomes) if outcome["error"] is not None]


def raise_failure(headline: str, outcomes: Sequence[Mapping[str, Any]], own: Outcome) -> NoReturn:
    """Raise on this rank for what failed on any."""
    if own.error is not None:
        interrupted = not isinstance(own.error, Exception)
        # outside a group there is nothing to add to an error that already says what to do
        telling = isinstance(own.error, (CheckpointError, ImportError, ValueError))
        if interrupted or (telling and len(outcomes) == 1):
            raise own.error
    failed = failed_ranks(outcomes)
    text = "; ".join(f"rank {rank}: {outcomes[rank]['error']}" for rank in failed)
    kinds = {outcomes[rank]["kind"] for rank in failed}
    kind = _KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    raise kind(f"{headline}: {text}") from own.error
