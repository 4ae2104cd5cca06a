"""The trackers of a run: open late, close with a status."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from enum import Enum
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.dispatch.dispatcher import in_hook
from accel_callbacks.errors import nearest
from accel_callbacks.logging import notice
from accel_callbacks.tracking.general_tracker import (
    GeneralTracker,
    LoggerType,
    is_general,
    on_main_process,
)
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.folder_leases import Folder, FolderLeases
    from accel_callbacks.loop.gradient_window import GradientWindow
    from accel_callbacks.loop.local_metrics import LocalMetrics
    from accel_callbacks.loop.run import TrainingRun
    from loggers import TrackerConfig, TrackerHub

__all__ = [
    "EndOnSigterm",
    "GeneralTracker",
    "LoggerType",
    "Tracking",
    "WindowRow",
    "on_main_process",
]

_EXIT_CODE = 128 + signal.SIGTERM
InitKwargs = Mapping[str, Mapping[str, Any]]
_OTHER_NAMES = {"comet_ml": "comet"}  # Accelerate's, and ours


class EndOnSigterm(AbstractContextManager["EndOnSigterm"]):
    """Turn SIGTERM into ``SystemExit(143)`` in the main thread, where nobody else handles it.

    A handler that the script or a callback has set, before or afterwards, is left alone. A forked
    process that inherits this one ends as if it were not there.

    Attributes:
        received: a SIGTERM has come.

    Example:
        >>> import os, signal
        >>> from accel_callbacks.tracking.trackers import EndOnSigterm
        >>> try:
        ...     with EndOnSigterm():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ... except SystemExit as end:
        ...     print(end.code)
        143
    """

    def __init__(self) -> None:
        self.received = False
        self._active = False
        self._before: Any = signal.SIG_DFL
        self._pid = 0

    def __enter__(self) -> EndOnSigterm:
        before = signal.getsignal(signal.SIGTERM)
        free = before is signal.SIG_DFL or _owner(before) is not None
        if free and threading.current_thread() is threading.main_thread():
            self._active, self._before, self._pid = True, before, os.getpid()
            signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        """Put back what was there, unless another handler has come since."""
        self._active = False
        mine = _owner(signal.getsignal(signal.SIGTERM)) is self
        if mine and threading.current_thread() is threading.main_thread():
            before = self._before
            while (owner := _owner(before)) is not None and not owner._active:
                before = owner._before
            signal.signal(signal.SIGTERM, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = True
        raise SystemExit(_EXIT_CODE)


def _owner(handler: Any) -> EndOnSigterm | None:
    """Return the object that owns a handler; None if it is not one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, EndOnSigterm) else None


class Tracking:
    """Holds the requested trackers, and opens them once the identity of the run is known.

    Args:
        log_with: names, classes or instances of trackers.
        logging_dir: folder of their files.
        leases: of the folders that the run writes to.
        is_main_process: whether this process logs.
        strict: let a tracker's error end the run.
        config: further options of the hub; the defaults if None.
        window: the gradient window, whose micro-batches log one row together.
        local_metrics: told of names that are logged for the first time.

    Attributes:
        row: what the micro-batches of the open window have logged.

    Example:
        >>> from accel_callbacks.tracking.trackers import Tracking
        >>> from accel_callbacks.checkpoint.folder_leases import FolderLeases
        >>> Tracking([], "runs", FolderLeases("refuse"), is_main_process=True).trackers
        []
    """

    def __init__(
        self,
        log_with: Sequence[Any],
        logging_dir: str,
        leases: FolderLeases,
        *,
        is_main_process: bool,
        strict: bool = False,
        config: TrackerConfig | None = None,
        window: GradientWindow | None = None,
        local_metrics: LocalMetrics | None = None,
    ) -> None:
        self.local_metrics = local_metrics
        self.log_with = list(log_with)
        for spec in self.log_with:
            if isinstance(spec, str) and spec != "all":
                with suppress(ImportError):  # a missing package is an error when it is used
                    _loggers().check_name(_OTHER_NAMES.get(spec, spec))
        self._logging_dir = logging_dir
        self._leases = leases
        self._is_main_process = is_main_process
        self._strict = strict
        self._config = config
        self._init_kwargs: InitKwargs = {}
        self._hub: TrackerHub | None = None
        self.row = WindowRow(window)
        self._loaded: dict[str, Any] = {}
        self._closed_run: str | None = None
        self._awaited: int | None = None  # the step of a checkpoint that is about to be restored
        self._secondary: set[str] = set()  # shared with the trackers: names that callbacks log
        self._handed_out = False  # True once the user may hold a tracker of this hub
        self._sigterm = EndOnSigterm()

    @property
    def is_open(self) -> bool:
        """True between :meth:`open` and :meth:`close`."""
        return self._hub is not None

    @property
    def hub(self) -> TrackerHub | None:
        """The hub of the trackers, None while they are closed."""
        return self._hub

    @property
    def trackers(self) -> list[Any]:
        """The trackers in use on this process."""
        if self._hub is None:
            return []
        self.hand_out()
        return [_unwrap(tracker) for tracker in self._hub.trackers]

    def hand_out(self) -> None:
        """Note that the user may hold a tracker of this run."""
        self._handed_out = self.is_open

    def folders(self) -> list[Folder]:
        """Return the folder of the trackers' files, if they have some that two runs would mix."""
        specs = chosen_trackers(self.log_with, self._init_kwargs)
        return [(self._logging_dir, None)] if any(spec.owns_files for spec in specs) else []

    def configure(self, init_kwargs: InitKwargs | None) -> None:
        """Set keywords for the constructors of trackers, by name."""
        self._init_kwargs = dict(init_kwargs or {})
        chosen_trackers(self.log_with, self._init_kwargs)  # raises for an unknown name

    def open(self, run: TrainingRun) -> None:
        """Start all trackers with the run's name, id and configuration."""
        if self._hub is not None or not self.log_with:
            return
        loggers = _loggers()
        # A run that was closed and logs again continues, as a resumed one does.
        continues = run.resumed_from is not None or run.run_id == self._closed_run
        resumed = run.global_step if continues else None
        info = loggers.RunInfo(
            name=run.name,
            logging_dir=self._logging_dir,
            run_id=run.run_id,
            resumed_step=resumed if self._awaited is None else self._awaited,
            rank=run.global_rank,
            secondary=self._secondary,
        )
        options = asdict(self._config or loggers.TrackerConfig())
        options["strict"] = options["strict"] or self._strict
        specs = chosen_trackers(self.log_with, self._init_kwargs)
        self._leases.hold(self.folders(), run)
        hub = loggers.TrackerHub(
            specs,
            run=info,
            main_process=self._is_main_process,
            before_write=self._leases.check_recent,
            **options,
        )
        try:
            if self._loaded and info.resumed_step is not None:
                hub.load_state_dict(self._loaded)
            hub.start()
            if run.config:
                hub.log_config(run.config)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                hub.finish("failed")
            raise
        self._hub = hub
        atexit.register(_close_at_exit, weakref.ref(self))
        self._collected = weakref.finalize(self, _finish_apart, hub, self._leases)
        self._collected.atexit = False
        if hub.trackers:
            self._sigterm = EndOnSigterm().__enter__()

    def init(
        self,
        run: TrainingRun,
        name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: InitKwargs | None,
    ) -> None:
        """Name the run and open the trackers; see ``Accelerator.init_trackers``."""
        hub = self._hub
        self.configure(init_kwargs)
        run.name = name
        run.config = dict(config or {})
        if hub is None:
            self.open(run)
            return
        warn(
            "init_trackers after the trackers were started: only the config is recorded. Call it "
            "before the first log.",
        )
        hub.log_config(run.config)

    def log(
        self,
        run: TrainingRun,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: InitKwargs | None = None,
    ) -> tuple[dict[str, Any], int]:
        """Hand values to the trackers and to the run; return them flat, and their step."""
        hub = self._hub
        flat = self.flat(values) if hub is None else hub.flat(values)
        if not flat.keys() <= run.metric_origins.keys():
            self._note_origin(run, flat)
            if self.local_metrics is not None:
                self.local_metrics.note(flat)
        if hub is None:
            self.open(run)
            hub = self._hub
        if step is None:
            step = run.global_step
            if self.row.values or self.row.is_collecting:
                self._put_in_window(run, flat, log_kwargs)
            elif hub is not None:
                hub.put(dict(flat), step, log_kwargs)
        else:
            self.put(flat, step, log_kwargs)
        run.callback_metrics.update(flat)
        return flat, step

    def _note_origin(self, run: TrainingRun, names: Iterable[str]) -> None:
        """Note of new names whether the loop logs them, or a callback."""
        origin = "callback" if in_hook() else "loop"
        for name in names:
            if run.metric_origins.setdefault(name, origin) == "callback":
                self._secondary.add(name)

    def _put_in_window(
        self, run: TrainingRun, flat: dict[str, Any], log_kwargs: InitKwargs | None
    ) -> None:
        """Queue values of this step; those of micro-batches wait for the end of their window."""
        row = self.row
        if row.values and not row.is_current:
            self._put_row()
        if row.is_collecting and self._hub is not None and self._hub.trackers:
            row.add(flat, run)
            row.log_kwargs = log_kwargs or row.log_kwargs
        elif row.values:
            self.put(_readable(row.merged(flat)), run.global_step, log_kwargs or row.log_kwargs)
        else:
            self.put(flat, run.global_step, log_kwargs)

    def _put_row(self) -> None:
        """Queue what is left of a window as a row of its step; drop it if there is no such step."""
        row = self.row
        if row.values and not row.has_no_step:
            self.put(_readable(row.values), row.step, row.log_kwargs)
        row.clear()

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flatten values to ``{"a/b": number, text or tensor on its device}``."""
        if self._hub is not None:
            return self._hub.flat(values)
        return dict(_loggers().flatten(values))

    def put(self, flat: Mapping[str, Any], step: int, log_kwargs: InitKwargs | None = None) -> None:
        """Queue flat values for all trackers; wait neither for the device nor for a tracker."""
        if self._hub is not None:
            self._hub.put(dict(flat), step, log_kwargs)

    def get(self, name: str, *, unwrap: bool = False) -> Any:
        """Return the tracker of a name; one that does nothing on a rank that does not log."""
        if self._hub is None:
            raise RuntimeError(
                f"tracker {name!r} is not started: enter `accel.run(...)`, call "
                "`accel.init_trackers(...)`, or log something first."
            )
        tracker, self._handed_out = self._hub.get(name), True
        return tracker.raw if unwrap else _unwrap(tracker)

    def close(self, status: Any) -> None:
        """Flush and finish all trackers, within a time limit; print what they have lost."""
        self._put_row()
        hub, self._hub, self._awaited = self._hub, None, None
        if hub is None:
            return
        self._collected.detach()
        self._closed_run, self._handed_out = hub.run.run_id, False
        try:
            hub.finish(status)
        finally:
            _print_losses(hub)
            self._loaded = {**self._loaded, **hub.state_dict()}
            self._sigterm.__exit__()

    def close_at_exit(self) -> None:
        """Close at the end of a script that did not, with the status that the script ends with."""
        # The interpreter stores an uncaught error in sys.last_value before it runs exit handlers.
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close("interrupted" if self._sigterm.received else "success")
        else:
            self.close("failed" if isinstance(error, Exception) else "interrupted")

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume the trackers' run with; entries of other trackers are kept."""
        if not (self.row.is_collecting and self.row.is_current):
            self._put_row()  # a resume keeps the rows up to here
        states = self._hub.state_dict() if self._hub is not None else {}
        return {**self._loaded, **states}

    def resume_run(self, state: Mapping[str, Any], run: TrainingRun) -> None:
        """Continue the run of a checkpoint, also in trackers that were started before the load.

        Such trackers have started a run of their own. It ends here if nothing was logged to it and
        no tracker was requested; else it is kept, with a warning.
        """
        hub = self._hub
        continues = hub is None or hub.run.run_id == run.run_id
        if continues or self._handed_out or (hub is not None and not hub.is_unused):
            self.load_state_dict(state)
            if not continues:
                warn(
                    "load_state after the trackers were used: they stay with the run that they "
                    "have begun. Load before the first log and get_tracker to go on with the "
                    "checkpoint's run.",
                )
            return
        self.close("success")
        self.load_state_dict(state)
        self.open(run)

    def await_resume(self, state: Mapping[str, Any], step: int) -> None:
        """Keep the state of a checkpoint that is about to be restored, for what ``setup`` logs."""
        self._loaded, self._awaited = dict(state), step

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state for the next :meth:`open`."""
        self._loaded, self._awaited = dict(state), None


def chosen_trackers(log_with: Sequence[Any], init_kwargs: InitKwargs) -> list[Any]:
    """Return the tracker specifications of a hub from ``log_with`` and ``init_kwargs``.

    Raises:
        ValueError: ``init_kwargs`` has a name that ``log_with`` has not.
    """
    left = {str(name): dict(options) for name, options in init_kwargs.items()}
    specs = [spec.value if isinstance(spec, Enum) else spec for spec in log_with]
    if "all" in specs:
        objects = [spec for spec in specs if not isinstance(spec, str)]
        specs = objects + _loggers().installed_trackers()
    unique = [spec for index, spec in enumerate(specs) if spec not in specs[:index]]
    result = [_with_options(spec, left) for spec in unique]
    if left:
        name = next(iter(left))
        known = [_name_of(spec) for spec in unique]
        raise ValueError(
            f"init_kwargs has {name!r}, which log_with has not: it has {', '.join(known)}."
            f"{nearest(name, known)}"
        )
    return result


def _with_options(spec: Any, init_kwargs: dict[str, dict[str, Any]]) -> Any:
    """Return one tracker with its filters and the options for its name."""
    from accel_callbacks.tracking.adapted_tracker import AdaptedTracker

    choice = spec
    if not isinstance(spec, _loggers().ConfiguredTracker):
        known = isinstance(spec, str) and spec in _OTHER_NAMES
        named = {"label": spec} if known else {}
        choice = _loggers().configured_tracker(_OTHER_NAMES[spec] if known else spec, **named)
    options = {**choice.options, **init_kwargs.pop(_name_of(spec), {})}
    if is_general(choice.tracker):
        return replace(choice, tracker=AdaptedTracker(choice.tracker, options), options={})
    return replace(choice, options=options)


def _name_of(spec: Any) -> str:
    """Return the name of a tracker."""
    if isinstance(spec, _loggers().ConfiguredTracker):
        return str(spec.label or _name_of(spec.tracker))
    return spec if isinstance(spec, str) else str(getattr(spec, "name", spec))


def _unwrap(tracker: Any) -> Any:
    """Return the user's own object if it was written for Accelerate."""
    from accel_callbacks.tracking.adapted_tracker import AdaptedTracker

    return tracker.wrapped if isinstance(tracker, AdaptedTracker) else tracker


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    """Order means that were computed on a device before the reads of the hub's thread."""
    for device in {value.device for value in values.values() if hasattr(value, "device")}:
        if device.type == "cuda":
            _loggers().values.order_before_reads(device)
    return values


def _print_losses(hub: TrackerHub) -> None:
    """Print one line for each tracker that did not record all that was logged."""
    for name, report in hub.report().items():
        rows, media = report.lost_rows, report.dropped - report.lost_rows
        lost = [f"{rows} of {rows + report.rows} rows"] if rows else []
        lost += [f"{media} other record{'s' * (media > 1)}"] if media else []
        if lost:
            notice(f"tracker {name!r} lost {' and '.join(lost)}")


@functools.cache
def _loggers() -> ModuleType:
    """Return the package `loggers`, which a run without trackers does not import."""
    import loggers

    return loggers


def _finish_apart(hub: TrackerHub, leases: FolderLeases) -> None:
    """Finish the trackers of an Accelerator that was collected: its last rows are not written."""

    def finish() -> None:
        try:
            hub.finish()
        finally:
            leases.release()

    # In a thread that the interpreter waits for: the collector may run in a thread of the hub.
    threading.Thread(target=finish, name="trackers' end").start()


def _close_at_exit(tracking: weakref.ref[Tracking]) -> None:
    owner = tracking()
    if owner is not None:
        owner.close_at_exit()


# --- windowRow: the values that the micro-batches of a gradient window log, as one row -----------

Keywords = Mapping[str, Mapping[str, Any]]


class WindowRow:
    """Holds what is logged inside of a gradient window until its optimizer step.

    The value of a name is its mean over the micro-batches, as the gradient is; of integers and
    texts, the last one. It stays on its device.

    Args:
        window: the gradient window; None holds nothing.

    Attributes:
        values: the means, by name; empty if nothing is held.
        log_kwargs: further keywords for trackers, as last given.
    """

    def __init__(self, window: GradientWindow | None = None) -> None:
        self._window = window
        self.values: dict[str, Any] = {}
        self.log_kwargs: Keywords | None = None
        self._counts: dict[str, int] = {}
        self._run: TrainingRun | None = None
        self._index = self._first_step = 0

    @property
    def is_collecting(self) -> bool:
        """True in a window, up to its optimizer step, if windows have several micro-batches."""
        window = self._window
        if window is None or window.stepped:
            return False
        return window.position > 0 and (window.num_steps > 1 or window.divisor > 1)

    @property
    def is_current(self) -> bool:
        """True if the values are of the window that is open, or was closed last."""
        window = self._window
        if window is None or not self.values:
            return False
        return self._index == (window.index if window.position else window.index - 1)

    @property
    def has_no_step(self) -> bool:
        """True if the window is open before its step, or was abandoned."""
        window = self._window
        if window is None or self._index == window.abandoned:
            return True
        return self.is_current and self.is_collecting

    @property
    def step(self) -> int:
        """Global step after the window's own, if that was taken."""
        assert self._run is not None
        return min(self._first_step + 1, self._run.global_step)

    def add(self, flat: Mapping[str, Any], run: TrainingRun) -> None:
        """Add the flat values of one call to the means."""
        assert self._window is not None
        if not self.values:
            self._run, self._first_step, self._index = run, run.global_step, self._window.index
        for name, value in flat.items():
            self.values[name] = self._mean(name, value)
            self._counts[name] = self._counts.get(name, 0) + 1

    def merged(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat values of the last micro-batch as means; their names are no longer held."""
        means = {name: self._mean(name, value) for name, value in flat.items()}
        for name in flat:
            self.values.pop(name, None)
            self._counts.pop(name, None)
        return means

    def clear(self) -> None:
        """Hold nothing any more."""
        self.values, self.log_kwargs = {}, None
        self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the means on the host, for a checkpoint inside of the window."""
        numbers = {
            n: value.item() if hasattr(value, "item") else value for n, value in self.values.items()
        }
        return {"values": numbers, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any] | None, run: TrainingRun) -> None:
        """Continue the means of a saved window, once the window itself is restored."""
        self.clear()
        if state is not None:
            self.add(state["values"], run)
            self._counts.update(state["counts"])

    def _mean(self, name: str, value: Any) -> Any:
        """Return the mean with one more value."""
        count = self._counts.get(name, 0)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4:
            value = value.float()  # a mean of half precision would lose digits with each value
        before = self.values.get(name)
        if not count or not (_is_real(value) and _is_real(before)):
            return value
        # A running mean, because that of equal values is exactly the value.
        return before + (value - before) / (count + 1)


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, float)
