"""The trackers of an Accelerator: configured once, opened late, closed with a status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from accel_callbacks._neighbours import require_neighbour

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun
    from loggers import Tracker, TrackerHub

__all__ = ["Tracking"]


class Tracking:
    """Holds the requested trackers and opens them when the run's identity is settled.

    Args:
        log_with: names, classes or instances of trackers.
        logging_dir: folder of their files.
        is_main_process: whether this process logs.
        strict: let a tracker's error end the run.

    Example:
        >>> from accel_callbacks.tracking import Tracking
        >>> Tracking([], "runs", is_main_process=True).trackers
        []
    """

    def __init__(
        self,
        log_with: Sequence[Any],
        logging_dir: str,
        *,
        is_main_process: bool,
        strict: bool = False,
    ) -> None:
        self._log_with = list(log_with)
        self._logging_dir = logging_dir
        self._is_main_process = is_main_process
        self._strict = strict
        self._hub: TrackerHub | None = None
        self._loaded: dict[str, Any] = {}
        self._closed_run: str | None = None

    @property
    def is_open(self) -> bool:
        """True between :meth:`open` and :meth:`close`."""
        return self._hub is not None

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers in use on this process."""
        return list(self._hub.trackers) if self._hub is not None else []

    def open(self, run: TrainingRun) -> None:
        """Start all trackers with the run's name, id and configuration."""
        if self._hub is not None or not self._log_with:
            return
        require_neighbour("loggers")
        from loggers import RunInfo, TrackerHub

        # A run that was closed and logs again goes on where it was, as a resumed one does.
        goes_on = run.resumed_from is not None or run.run_id == self._closed_run
        info = RunInfo(
            name=run.name,
            logging_dir=self._logging_dir,
            run_id=run.run_id,
            resumed_step=run.global_step if goes_on else None,
            rank=run.accelerator.process_index,
        )
        hub = TrackerHub(
            self._log_with, run=info, main_process=self._is_main_process, strict=self._strict
        )
        try:
            if self._loaded and goes_on:
                hub.load_state_dict(self._loaded)
            hub.start()
            if run.config:
                hub.log_config(run.config)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                hub.finish("failed")
            raise
        self._hub = hub

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values as ``{"a/b": number, text or tensor on an accelerator}``, for the callbacks."""
        require_neighbour("loggers")
        from loggers import flatten

        return dict(flatten(values))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Hand values to all trackers; does not wait for the device."""
        if self._hub is not None:
            self._hub.log(values, step)

    def get(self, name: str) -> Tracker:
        """The tracker of this name; one that does nothing where this process does not log."""
        if self._hub is None:
            raise RuntimeError(
                f"tracker {name!r} is not started: enter `accel.run(...)`, call "
                "`accel.init_trackers(...)`, or log something first."
            )
        return self._hub.get(name)

    def close(self, status: Any) -> None:
        """Flush and finish all trackers; they are closed even if one raises, in strict mode."""
        hub, self._hub = self._hub, None
        if hub is None:
            return
        self._closed_run = hub.run.run_id
        try:
            self._loaded = hub.state_dict()
        finally:
            hub.finish(status)

    def state_dict(self) -> dict[str, Any]:
        """What the trackers need to go on with the same run."""
        return dict(self._hub.state_dict()) if self._hub is not None else dict(self._loaded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Kept for the next :meth:`open`."""
        self._loaded = dict(state)
