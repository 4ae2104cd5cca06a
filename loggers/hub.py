"""Fan-out to several trackers: the training thread only appends, threads do the rest."""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from loggers.base import RunInfo, Status, Tracker, check_status
from loggers.choosing import ConfiguredTracker, chosen
from loggers.closing import answers, close_all
from loggers.config import NanPolicy, TrackerConfig
from loggers.config_before import plain_config
from loggers.guard import TrackerReport
from loggers.hub_media import MediaMethods
from loggers.items import Reply, Row
from loggers.queue import Pump
from loggers.registry import TrackerSpec
from loggers.shutdown import by_name
from loggers.trackers.null import NullTracker
from loggers.values import flatten

__all__ = ["TrackerHub"]


class TrackerHub(MediaMethods):
    """Gives what a training loop logs to every tracker, without waiting for any of them.

    `log` only appends to a queue; tensors on an accelerator stay there. A thread reads them about
    once a second, with one copy per device, and hands the rows to one thread per tracker. A
    tracker that raises is tried again, then disabled; one that is slow or hangs loses its oldest
    rows when ``max_buffer`` of them wait. Both are counted (`report`) and said once on the logger
    "accel_callbacks.trackers"; the other trackers and the run go on. Safe to call from several
    threads and from a signal handler; does nothing in a forked process.

    Args:
        trackers: names, classes, instances, or what `configured_tracker` made, each of another
            name.
        run: what the trackers are told when they start.
        main_process: whether this is the process that logs; on others only trackers whose
            ``main_process_only`` is False are used.
        strict, nan_policy, flush_every_s, max_buffer, max_failures, start_timeout_s,
            finish_timeout_s: see `TrackerConfig`.

    Raises:
        ValueError: two trackers have one name, a name is unknown, or an option makes no sense.
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
        trackers: Iterable[TrackerSpec | ConfiguredTracker],
        *,
        run: RunInfo,
        main_process: bool = True,
        strict: bool = False,
        nan_policy: NanPolicy = "keep",
        flush_every_s: float = 1.0,
        max_buffer: int = 10_000,
        max_failures: int = 5,
        start_timeout_s: float = 60.0,
        finish_timeout_s: float = 30.0,
    ) -> None:
        self.run = run
        self.config = TrackerConfig(
            strict=strict,
            nan_policy=nan_policy,
            flush_every_s=flush_every_s,
            max_buffer=max_buffer,
            max_failures=max_failures,
            start_timeout_s=start_timeout_s,
            finish_timeout_s=finish_timeout_s,
        )
        self._errors: deque[BaseException] = deque()
        choices = [chosen(spec) for spec in trackers]
        self._all = by_name([(choice.create(), choice) for choice in choices])
        self._writers = [
            self._writer(tracker, choice)
            for tracker, choice in self._all.values()
            if main_process or not tracker.main_process_only
        ]
        self._pump = Pump(self._writers, self.config, self._note)
        self._last_step: int | None = None
        self._started = self._finished = False
        self._pid = os.getpid()
        self._warned: set[str] = set()

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers that this process uses, in order."""
        return tuple(writer.guard.tracker for writer in self._writers)

    @property
    def is_unused(self) -> bool:
        """Whether nothing was logged yet, beside the settings."""
        return self._last_step is None and not self._pump.has_media

    def start(self) -> None:
        """Start every tracker; a second call does nothing. A tracker that fails is left out.

        All start at the same time. One that takes longer than ``start_timeout_s`` goes on
        starting, and its rows wait.
        """
        if self._started:
            return
        self._started, self._pid = True, os.getpid()
        if not self._writers:
            return
        reply = Reply()
        for writer in self._writers:
            writer.begin(reply)
        self._pump.begin()
        limit = self.config.start_timeout_s
        ready = answers(reply, len(self._writers), time.monotonic() + limit)
        for writer in self._writers:
            if writer.name not in ready:
                writer.guard.gave_up(f"has not started within {limit:g} s", 0, "Its rows wait.")
        self._settle()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Give the run's settings, nested as they are, to every tracker as plain JSON types.

        Raises:
            RuntimeError: `start` was not called.
            TypeError: ``config`` is no mapping, dataclass or namespace.
        """
        plain = plain_config(config)
        if self._accepting("log_config"):
            for writer in self._writers:
                writer.ask("log_config", SimpleQueue(), plain)

    def log(
        self,
        values: Mapping[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values at a step, without waiting for a device or a tracker.

        Args:
            values: numbers, numpy scalars, 0-d tensors (of any device; a later change in place
                does not show), str; dicts of these become ``"a/b"``; None is left out.
            step: optimizer steps done. Not to go down: a lower one is passed on with a warning,
                and given as the last step to trackers that would drop it.
            log_kwargs: further keywords of a tracker's ``log``, by the tracker's name.

        Raises:
            TypeError: a value is of another type (the key is named), ``step`` is no integer, or a
                tracker does not take a keyword.
            ValueError: one name occurs twice, or ``log_kwargs`` has an unknown tracker.
            RuntimeError: `start` was not called.
        """
        self.put(self.flat(values), step, log_kwargs)

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as `log` takes them, for `put`; the arguments and errors of `log`.

        >>> TrackerHub([], run=RunInfo("digits", "runs", "a1")).flat({"a": {"b": 1.0}})
        {'a/b': 1.0}
        """
        left_out: list[str] = []
        flat = flatten(values, left_out.append)
        if left_out:
            self._warn_once("none", f"log got None for {left_out[0]!r}; such values are left out")
        return flat

    def put(
        self,
        flat: dict[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record what `flat` has returned; it is the hub's from then on.

        >>> with TrackerHub([], run=RunInfo("digits", "runs", "a1")) as hub:
        ...     hub.put(hub.flat({"loss": 0.5}), step=1)
        """
        step = operator.index(step)  # numpy's integers are not those of JSON
        if log_kwargs:
            self._check_keywords(log_kwargs)
        if not self._accepting("log") or not self._writers or not flat:
            return
        last = self._last_step
        if last is not None and step < last:
            self._warn_once(
                "order",
                f"step {step} was logged after step {last}: tools that drop such values get them "
                "at the last step, others draw backwards. Log the number of optimizer steps",
            )
        self._last_step = step
        self._pump.put(Row(time.time(), step, flat, log_kwargs))

    def flush(self, timeout: float = 30.0) -> bool:
        """Deliver what was logged so far and let the trackers make it visible.

        Args:
            timeout: seconds to wait at most; a tracker that is slower goes on by itself.

        Returns:
            Whether all trackers were done in time.
        """
        done = self._ask_all(lambda writer, reply: writer.ask_flush(reply), timeout)
        self._settle()
        return done

    def finish(self, status: Status = "success", timeout: float | None = None) -> None:
        """Deliver the rest and finish every tracker, all at the same time.

        Rows that are left when most of the time is over are dropped, so that each tool is closed;
        a tracker that does not come back is reported and left behind. Later calls do nothing.

        Args:
            status: "success", "failed" or "interrupted".
            timeout: seconds that this may take; ``finish_timeout_s`` if None.

        Raises:
            ValueError: ``status`` is something else.
        """
        check_status(status)
        if not self._started or self._finished or self._is_forked():
            return
        self._finished = True
        if not self._writers:
            return
        seconds = self.config.finish_timeout_s if timeout is None else timeout
        close_all(self._pump, self._writers, status, seconds)
        if status == "success":  # else another error is on its way, which this must not hide
            self._settle()

    def get(self, name: str) -> Tracker:
        """Return a tracker by name; a `NullTracker` where it is not used or could not start.

        Raises:
            ValueError: no tracker of this name was configured.
        """
        if name not in self._all:
            known = ", ".join(self._all) or "none"
            raise ValueError(f"no tracker {name!r} in this run; configured: {known}")
        for writer in self._writers:
            if writer.name == name and not writer.guard.broken:
                return writer.guard.tracker
        return NullTracker(name)

    def state_dict(self, timeout: float = 5.0) -> dict[str, dict[str, Any]]:
        """Flush, and return the trackers' states by name, as JSON types, for a checkpoint.

        What was logged before is then in the trackers' files. A tracker that is not done within
        ``timeout`` seconds gives its last known state.
        """
        self._ask_all(lambda writer, reply: writer.ask_state(reply), timeout)
        self._settle()
        return {w.name: dict(w.state) for w in self._writers if w.state is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each tracker the state that its name had; trackers without one start afresh.

        Raises:
            RuntimeError: `start` was called already.
        """
        if self._started:
            raise RuntimeError("load_state_dict comes before start(): make a new TrackerHub")
        for writer in self._writers:
            if writer.name in state:
                writer.take_state(state[writer.name])
        self._settle()

    def report(self) -> dict[str, TrackerReport]:
        """Return the rows, failures and fate of each tracker that this process uses, by name."""
        reports = {writer.name: writer.report() for writer in self._writers}
        lost = self._pump.lost  # before any tracker could have it
        return {name: replace(one, dropped=one.dropped + lost) for name, one in reports.items()}

    def __enter__(self) -> TrackerHub:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish("success")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")
