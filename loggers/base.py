"""The tracker protocol: what a tracker must do, and what it is told about the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Scalar = float | int | str
"""One logged value, as a tracker receives it: never a tensor, never None."""

Status = Literal["success", "failed", "interrupted"]
"""How a run ended."""

STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True)
class RunInfo:
    """What every tracker is told when it starts.

    Args:
        name: project or run name, shown by the tools.
        logging_dir: a local path or an fsspec URL; trackers write beneath it.
        run_id: identifier of this run, unique within ``name``.
        resumed_step: last step that the restored checkpoint contains, or None for a fresh run.
            The next logged step is ``resumed_step + 1``.
        rank: index of this process, 0 on the main one.

    >>> RunInfo(name="digits", logging_dir="runs", run_id="a1").resumed_step is None
    True
    """

    name: str
    logging_dir: str
    run_id: str
    resumed_step: int | None = None
    rank: int = 0


class Tracker(ABC):
    """Where scalars go. Subclass it, give it a ``name``, write `start`, `log` and `finish`.

    A subclass imports its tool in `start`, not at module level, and keeps its options in its
    constructor. Methods may raise: `TrackerHub` isolates the run from it.

    Order of calls: `load_state_dict` (only on a resume), `start`, `log_config`, any number of
    `log` and `flush`, `finish`.

    >>> class Print(Tracker):
    ...     name = "print"
    ...
    ...     def start(self, run):
    ...         print("run", run.name)
    ...
    ...     def log(self, scalars, step):
    ...         print(step, dict(scalars))
    ...
    ...     def finish(self, status="success"):
    ...         print(status)
    >>> tracker = Print()
    >>> tracker.start(RunInfo("digits", "runs", "a1"))
    run digits
    >>> tracker.log({"loss": 0.5}, step=3)
    3 {'loss': 0.5}
    """

    name: str
    main_process_only: bool = True

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the tool. The first moment at which files, threads or the network may be used."""

    @abstractmethod
    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record flat ``{"train/loss": 0.5}`` values at an optimizer step.

        An override may take a further keyword, ``time: float | None = None``. A hub, which delivers
        rows later than they were logged, then passes the Unix seconds of the user's call.
        """

    @abstractmethod
    def finish(self, status: Status = "success") -> None:
        """Write what is still held and close the tool; a second call does nothing."""

    # Optional methods do nothing by default, so that a tracker is three methods long.
    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Record the run's settings, a nested mapping."""

    def flush(self) -> None:  # noqa: B027
        """Make what was logged so far visible to readers."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on with the same run later, as JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned; called before `start`."""

    @property
    def raw(self) -> Any:
        """The tool's own object (a ``SummaryWriter``, a W&B run), or None before `start`."""
        return None


def check_status(status: str) -> None:
    """Raise ValueError unless ``status`` is one of the three a run can end with."""
    if status not in STATUSES:
        raise ValueError(f"finish status {status!r} is unknown: use one of {', '.join(STATUSES)}")
