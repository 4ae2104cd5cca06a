"""Fan-out to several trackers that neither blocks the training step nor lets one kill the run."""

from __future__ import annotations

import operator
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from loggers.base import RunInfo, Status, Tracker, check_status
from loggers.config import plain_config
from loggers.guard import GuardedTracker, Row, TrackerReport
from loggers.null import NullTracker
from loggers.registry import TrackerSpec, create
from loggers.values import flatten, to_host


class TrackerHub:
    """Gives what a training loop logs to every tracker, in batches.

    `log` only appends: tensors on an accelerator stay there until a flush, when all of them are
    read with one copy per device. A flush happens in `log` when ``flush_every_s`` have passed or
    ``max_buffer`` rows are held, and in `flush`, `state_dict` and `finish`. An exception in a
    tracker is counted and reported once on the logger "accel_callbacks.trackers"; the other
    trackers and the run go on. Safe to call from several threads and from a signal handler.

    Args:
        trackers: names, classes or instances, each of another name.
        run: what the trackers are told when they start.
        main_process: whether this is the process that logs; on others only trackers whose
            ``main_process_only`` is False are used.
        strict: raise a tracker's exception (after the others have had their turn).
        flush_every_s: seconds between flushes, default 1.0; checked when `log` is called.
        max_buffer: rows held at most, default 256.
        max_failures: failures of one method in a row after which a tracker is disabled, default 5.

    Raises:
        ValueError: two trackers have one name, or a name is unknown.
        TypeError: a tracker is none of the above, or has no name.

    >>> import tempfile
    >>> from loggers import read_jsonl
    >>> folder = tempfile.mkdtemp()
    >>> with TrackerHub(["jsonl"], run=RunInfo("digits", folder, "a1")) as hub:
    ...     hub.log_config({"lr": 0.1})
    ...     hub.log({"train": {"loss": 0.5}, "lr": 0.1}, step=1)
    >>> [row["values"] for row in read_jsonl(f"{folder}/metrics.jsonl")]
    [{'train/loss': 0.5, 'lr': 0.1}]
    """

    def __init__(
        self,
        trackers: Iterable[TrackerSpec],
        *,
        run: RunInfo,
        main_process: bool = True,
        strict: bool = False,
        flush_every_s: float = 1.0,
        max_buffer: int = 256,
        max_failures: int = 5,
    ) -> None:
        self.run = run
        self._all = _by_name(create(spec) for spec in trackers)
        self._active = [
            GuardedTracker(tracker, max_failures, report=not strict)
            for tracker in self._all.values()
            if main_process or not tracker.main_process_only
        ]
        self._strict = strict
        self._flush_every_s = flush_every_s
        self._max_buffer = max_buffer
        self._lock = threading.RLock()  # reentrant: a signal handler may finish during a flush
        self._buffer: list[Row] = []
        self._flushed_at = time.monotonic()
        self._last_step: int | None = None
        self._started = self._finished = False
        self._warned: set[str] = set()

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers that this process uses, in order."""
        return tuple(guarded.tracker for guarded in self._active)

    def start(self) -> None:
        """Start every tracker; a second call does nothing. A tracker that fails is left out."""
        if not self._started:
            self._started, self._flushed_at = True, time.monotonic()
            self._settle([guarded.start(self.run) for guarded in self._active])

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Give the run's settings, nested as they are, to every tracker as plain JSON types.

        Raises:
            RuntimeError: `start` was not called.
            TypeError: ``config`` is no mapping, dataclass or namespace.
        """
        plain = plain_config(config)
        if self._accepting("log_config"):
            self._settle([guarded.call_open("log_config", plain) for guarded in self._active])

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Record values at a step, without waiting for a device.

        Args:
            values: numbers, numpy scalars, 0-d tensors (of any device; a later change in place
                does not show), str; dicts of these become ``"a/b"``; None is left out.
            step: optimizer steps done. Not to go down; a lower one is passed on with a warning.

        Raises:
            TypeError: a value is of another type (the key is named), or ``step`` is no integer.
            ValueError: one name occurs twice.
            RuntimeError: `start` was not called.
        """
        step = operator.index(step)
        left_out: list[str] = []
        flat = flatten(values, left_out.append)
        self._check_none(left_out)
        if not self._accepting("log") or not self._active or not flat:
            return
        with self._lock:
            self._check_order(step)
            self._buffer.append(Row(time.time(), step, flat))
            late = time.monotonic() - self._flushed_at >= self._flush_every_s
            if late or len(self._buffer) >= self._max_buffer:
                self.flush()

    def flush(self) -> None:
        """Deliver what was logged so far. This waits for devices whose values are among it."""
        if not self._started or not self._active:
            return
        with self._lock:
            batch = self._buffer
            errors = to_host([row.values for row in batch])
            for error in errors:
                self._warn_once("device", f"values were lost: their device failed ({error})")
            if self._buffer is batch:  # else a signal handler has flushed it meanwhile
                self._buffer = []
                for guarded in self._active:
                    guarded.pending.extend(row for row in batch if row.values)
            self._flushed_at = time.monotonic()
            for guarded in self._active:
                errors += guarded.deliver()
        self._settle(errors)

    def finish(self, status: Status = "success") -> None:
        """Deliver the rest and finish every tracker; later calls do nothing.

        Args:
            status: "success", "failed" or "interrupted".

        Raises:
            ValueError: ``status`` is something else.
        """
        check_status(status)
        if not self._started:
            return
        try:
            self.flush()
        finally:  # strict mode raises in flush, and trackers must still be closed, once each
            self._finished = True
            self._settle([guarded.finish(status) for guarded in self._active])

    def get(self, name: str) -> Tracker:
        """Return a tracker by name; a `NullTracker` where it is not used or could not start.

        Raises:
            ValueError: no tracker of this name was configured.
        """
        if name not in self._all:
            known = ", ".join(self._all) or "none"
            raise ValueError(f"no tracker {name!r} in this run; configured: {known}")
        for guarded in self._active:
            if guarded.tracker is self._all[name] and not guarded.broken:
                return guarded.tracker
        return NullTracker(name)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Flush, and return the trackers' states by name, as JSON types, for a checkpoint."""
        self.flush()
        states = {g.tracker.name: g.call("state_dict") for g in self._active}
        self._settle(list(states.values()))
        return {name: state for name, state in states.items() if isinstance(state, dict)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each tracker the state that its name had; trackers without one start afresh.

        Raises:
            RuntimeError: `start` was called already.
        """
        if self._started:
            raise RuntimeError("load_state_dict comes before start(): make a new TrackerHub")
        known = [guarded for guarded in self._active if guarded.tracker.name in state]
        self._settle([g.call("load_state_dict", state[g.tracker.name]) for g in known])

    def report(self) -> dict[str, TrackerReport]:
        """Return the rows, failures and fate of each tracker that this process uses, by name."""
        return {guarded.tracker.name: guarded.report() for guarded in self._active}

    def __enter__(self) -> TrackerHub:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish("success")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")

    def _accepting(self, method: str) -> bool:
        """Say whether values can be taken: an error before `start`, a warning after `finish`."""
        if not self._started:
            raise RuntimeError(f"TrackerHub.{method} before start(): call start() first")
        if self._finished:
            self._warn_once("finished", f"{method} after finish() is ignored: the run is over")
        return not self._finished

    def _check_order(self, step: int) -> None:
        if self._last_step is not None and step < self._last_step:
            self._warn_once(
                "order",
                f"step {step} was logged after step {self._last_step}: some tools drop or misdraw "
                "that. Log the number of optimizer steps, in order",
            )
        self._last_step = step

    def _check_none(self, names: list[str]) -> None:
        if names:
            self._warn_once("none", f"log got None for {names[0]!r}; such values are left out")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{text} (said once)", UserWarning, stacklevel=4)

    def _settle(self, results: list[Any]) -> None:
        """In strict mode raise the first exception among what the trackers returned."""
        errors = [result for result in results if isinstance(result, Exception)]
        if self._strict and errors:
            raise errors[0]


def _by_name(trackers: Iterable[Tracker]) -> dict[str, Tracker]:
    """Key trackers by name and refuse two of one name, whose states could not be told apart."""
    named: dict[str, Tracker] = {}
    for tracker in trackers:
        name = getattr(tracker, "name", "")
        if not isinstance(name, str) or not name:
            raise TypeError(f"tracker {tracker!r} has no name: set `name` on its class")
        if name in named:
            raise ValueError(f"two trackers are named {name!r}: set .name on one of them")
        named[name] = tracker
    return named
