"""Fall back to the newest checkpoint that works on all ranks; warn why newer ones did not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from checkpoint_io.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    TornLoadError,
)
from checkpoint_io.folder.discovery import FolderEntry, age_order
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.outcome import Outcome, describe_failures

T = TypeVar("T")


def warn(text: str) -> None:
    """Warn about a skipped checkpoint, with the line that called into the folder."""
    warnings.warn(text, CheckpointWarning, stacklevel=4)


class Fallback(Generic[T]):
    """Tries checkpoints from the newest to the oldest until one works on every rank.

    Args:
        url: the folder, for messages.
        survey: scans the folder; called on rank 0 only.
        group: the ranks that must agree.
        in_place: attempts write into the caller's tensors.
        covers_all: each such attempt writes all of them, which repairs what a failed one left.
    """

    def __init__(
        self,
        url: str,
        survey: Callable[[], Sequence[FolderEntry]],
        group: ProcessGroupLike,
        in_place: bool = False,
        covers_all: bool = True,
    ) -> None:
        self._url = url
        self._survey = survey
        self._group = group
        self._in_place = in_place
        self._covers_all = covers_all
        self._warned: set[str] = set()
        self._broken: list[str] = []
        self._touched = False

    def run(self, attempt: Callable[[str], T], skip: Collection[str] = ()) -> T:
        """Return the result of the first attempt that worked everywhere.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are some, and none of them works.
        """
        tried: list[str] = []
        while (found := self._next(tried, skip)) is not None:
            tried.append(found)
            done, value = self._try(found, attempt)
            if done:
                return value  # type: ignore[return-value]
        if self._touched:
            raise TornLoadError(
                f"no checkpoint in {self._url} could be loaded, and an attempt had already written "
                "to the targets: they hold a mixture, load something else into them"
            )
        # not the same as having no checkpoint: a run must not silently restart from scratch
        if tried or self._broken:
            raise CorruptCheckpointError(
                f"no valid checkpoint in {self._url}: all are damaged; the warnings say how"
            )
        raise CheckpointNotFoundError(
            f"no valid checkpoint in {self._url}: check the path, or start from scratch"
        )

    def _next(self, tried: Collection[str], skip: Collection[str]) -> str | None:
        """Return the newest checkpoint not yet tried; rank 0 scans, so that all try the same."""
        # scanned again for every attempt, since a prune may remove checkpoints meanwhile
        group = self._group
        looked = Outcome.of(lambda: self._candidates() if group.rank == 0 else ([], []))
        report = looked.to_plain()
        answer = group.broadcast_object((report["value"], report["error"]))
        if answer[1] is not None:
            if looked.error is not None and not isinstance(looked.error, Exception):
                raise looked.error
            raise CheckpointError(f"could not list {self._url}: {answer[1]}") from looked.error
        paths, self._broken = answer[0]
        left = [path for path in paths if path not in tried and path not in skip]
        return left[-1] if left else None

    def _candidates(self) -> tuple[list[str], list[str]]:
        """Return the paths of valid checkpoints, oldest first, and of the broken ones."""
        entries = self._survey()
        for entry in entries:
            if entry.status in ("broken", "unfinished") and entry.path not in self._warned:
                self._warned.add(entry.path)
                warn(f"skipped {entry.name}: {entry.reason}")
        valid = sorted((e.info for e in entries if e.status == "valid"), key=age_order)
        return [info.path for info in valid], [e.path for e in entries if e.status == "broken"]

    def _try(self, path: str, attempt: Callable[[str], T]) -> tuple[bool, T | None]:
        """Make an attempt on all ranks; return (False, None) on all if one finds it damaged."""
        mine = Outcome.of(lambda: attempt(path))
        damaged = isinstance(mine.error, (CorruptCheckpointError, CheckpointNotFoundError))
        torn = mine.error is None or isinstance(mine.error, TornLoadError)
        report = {**mine.to_plain(), "value": None, "damaged": damaged, "torn": torn}
        outcomes: Sequence[Mapping[str, Any]] = self._group.all_gather_object(report)
        bad = describe_failures(outcomes)
        if not bad:
            return True, mine.value
        self._touched |= self._in_place and any(o["torn"] for o in outcomes)
        if any(o["error"] and not o["damaged"] for o in outcomes):
            # not damage but, for example, a network failure: falling back would lose progress
            self._raise_other(path, bad, mine.error, damaged)
        if self._touched and not self._covers_all:
            raise TornLoadError(f"loading {path} failed midway: {bad}")
        warn(f"passed over {path}: {bad}")
        return False, None

    def _raise_other(
        self, path: str, why: str, error: BaseException | None, damaged: bool
    ) -> NoReturn:
        """Raise for an attempt that failed on some rank for a reason other than damage."""
        if error is not None and not isinstance(error, Exception):
            raise error
        if self._touched:  # by this attempt or an earlier one, here or on another rank
            raise TornLoadError(
                f"loading {path} failed after the targets had been written to on some rank: they "
                f"hold a mixture, load something else into them ({why})"
            ) from error
        if error is not None and not damaged:
            raise error
        raise CheckpointError(f"loading {path} failed: {why}") from error
