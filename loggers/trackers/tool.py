"""What trackers of other tools share."""

from __future__ import annotations

import importlib
import math
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from loggers.base import RunInfo, Status, Tracker, check_status
from loggers.trackers.line_file import is_remote, local_path

__all__ = [
    "ContinuingTracker",
    "ToolTracker",
    "as_float",
    "local_folder",
    "name_of_run",
    "opened",
    "same_random_numbers",
]

T = TypeVar("T")


class ContinuingTracker(Tracker):
    """A tracker that goes on with its run after a resume, and may be used for one after the other.

    Its state is the id of its run and the last step that it logged.

    Args:
        all_ranks: log on every process rather than on the main one only.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        self.main_process_only = not all_ranks
        self._run_id: str | None = None
        self._last_step: int | None = None
        self._loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the last step that was logged."""
        return {"run_id": self._run_id, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        self._run_id = state.get("run_id")
        self._last_step = state.get("last_step")
        self._loaded = True

    def _begin(self, run: RunInfo) -> int | None:
        """Settle the id of the run; return the last step to keep, None for a fresh run.

        Steps that the checkpoint has seen are kept whatever their unit is: those of somebody who
        counts samples are far above the optimizer steps of ``resumed_step``.
        """
        if not self._loaded:
            self._run_id, self._last_step = None, None
        self._run_id = self._run_id or run.run_id
        if run.resumed_step is None:
            return None
        return max(run.resumed_step, -1 if self._last_step is None else self._last_step)

    def _seen(self, step: int) -> None:
        """Note a step that was logged."""
        self._last_step = step if self._last_step is None else max(step, self._last_step)

    def _end(self, status: Status) -> None:
        """Check the status; a start after this one is of another run, unless a state is loaded."""
        check_status(status)
        self._loaded = False


def opened(part: T | None, tracker: str) -> T:
    """Return what a tracker holds since ``start``; RuntimeError where it holds nothing."""
    if part is None:
        raise RuntimeError(f"the {tracker} tracker is not open: call start(run) before logging")
    return part


class ToolTracker(ContinuingTracker):
    """A tracker in front of a package that is imported in `start`, with one object that is open.

    Args:
        all_ranks: log on every process rather than on the main one only.
    """

    install = ""
    """What to tell ``pip install``."""

    def __init__(self, *, all_ranks: bool = False) -> None:
        super().__init__(all_ranks=all_ranks)
        self._tool: Any = None
        self._rank = 0
        self._warned: set[str] = set()

    @property
    def raw(self) -> Any:
        """The tool's own object, or None before `start` and after `finish`."""
        return self._tool

    def state_dict(self) -> dict[str, Any]:
        """Return the run id, the last step that was logged, and the rank whose they are."""
        return {**super().state_dict(), "rank": self._rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run that ``state`` names."""
        super().load_state_dict(state)
        self._rank = state.get("rank", 0)

    def _resumed(self, run: RunInfo, *, named: bool = False) -> str | None:
        """Return the id of the run to go on with; None where a new one is to be made.

        A checkpoint has the state of the main process. Other ranks know their run from it only
        if runs are ``named`` by `name_of_run`, and begin a new one otherwise.
        """
        resumed = self._run_id if self._loaded else None
        rank, self._rank = self._rank, run.rank
        self._begin(run)
        if resumed is None or rank == run.rank:
            return resumed
        return f"{resumed}-rank{run.rank}" if named else None

    def _opened(self) -> Any:
        """Return the tool's object, or say that there is none."""
        return opened(self._tool, self.name)

    def _closed(self) -> Any:
        """Forget the tool's object and return it, so that it is closed once."""
        tool, self._tool = self._tool, None
        return tool

    def _import(self, module: str) -> Any:
        """Import the tool; absolutely, for this package has a module of the same name."""
        try:
            with same_random_numbers():
                return importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"the {self.name} tracker needs {self.install} ({error}): "
                f"pip install {self.install}"
            ) from error

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn the first time that something of a kind happens."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{self.name}: {text} (said once)", UserWarning, stacklevel=4)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Undo what a block draws from ``random``: names and colours must not change a training."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def name_of_run(run: RunInfo) -> str:
    """Return what this process's run is called: the id, and the rank where it is not 0."""
    return f"{run.run_id}-rank{run.rank}" if run.rank else run.run_id


def as_float(value: float | int) -> float:
    """Return a number as a float; integers that are too large become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def local_folder(run: RunInfo, subdir: str, advice: str) -> str:
    """Return the absolute path of ``<logging_dir>/<subdir>``, which need not exist yet.

    Args:
        run: whose ``logging_dir`` it is; ranks above 0 get ``rank<r>`` below the folder.
        subdir: name of the folder.
        advice: what else the user may do.

    Raises:
        ValueError: ``logging_dir`` is a remote URL.
    """
    if is_remote(run.logging_dir):
        raise ValueError(
            f"logging_dir is {run.logging_dir!r}, and this tool writes to local folders only: "
            f"use a local logging_dir, or {advice}"
        )
    rank = (f"rank{run.rank}",) if run.rank else ()
    return os.path.join(os.path.abspath(local_path(run.logging_dir)), subdir, *rank)
