"""HostedTracker: one of our trackers as a callback, for what another library's trainer logs."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.tracking.trackers import chosen_trackers
from checkpoint_io.local_files import base_name
from loggers import RunInfo, TrackerHub

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["HostedTracker"]


class HostedTracker(Callback):
    """Hand a tracker what the trainer logs; a resumed run goes on in its rows.

    Args:
        tracker: a name, a class, an instance, or what ``configured_tracker`` returned.
        logging_dir: folder of its files, that of the trainer if None.
    """

    def __init__(self, tracker: Any, logging_dir: str | None = None) -> None:
        self._specs = chosen_trackers([tracker], {})
        self._logging_dir = logging_dir
        self._hub: TrackerHub | None = None
        self._loaded: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """The name of the tracker."""
        tracker = self._specs[0].tracker
        return f"tracker-{tracker if isinstance(tracker, str) else tracker.name}"

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Start the tracker, once the state of a checkpoint is there."""
        resumed = None if run.resumed_from is None else run.global_step
        folder = str(self._logging_dir or run.log_dir)
        run_id = str(self._loaded.get("run_id", run.run_id))
        info = RunInfo(base_name(folder), folder, run_id, resumed, run.global_rank)
        self._hub = hub = TrackerHub(self._specs, run=info, main_process=run.is_global_zero)
        if self._loaded:
            hub.load_state_dict(self._loaded["tracker"])
        hub.start()
        hub.log_config(run.accelerator.settings())
        atexit.register(self._finish, "failed")

    def on_log(self, run: TrainingRun, model: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Hand the values over."""
        if self._hub is not None:
            self._hub.log(metrics, step)

    def on_fit_end(self, run: TrainingRun, model: Any) -> None:
        """Finish the tracker."""
        self._finish("interrupted" if run.preempted else "success")
        atexit.unregister(self._finish)

    def _finish(self, status: Any) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.finish(status)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run, and what the tracker needs to go on."""
        if self._hub is None:
            return self._loaded
        return {"run_id": self._hub.run.run_id, "tracker": self._hub.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state for the start."""
        self._loaded = dict(state)
