"""TrackerHub: send what a training loop logs to every tracker, without blocking the loop."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from queue import Empty, SimpleQueue
from typing import Any

from checkpoint_io.local_files import absolute
from checkpoint_io.warning import warn
from loggers.base import NullTracker, RunInfo, Status, Tracker, check_status
from loggers.config import TrackerConfig
from loggers.multimedia.convert import (
    Channels,
    as_audio,
    as_images,
    as_numbers,
    as_table,
    check_shape,
    size_of,
    snapshot,
)
from loggers.queue import Pump
from loggers.registry import ConfiguredTracker, TrackerSpec
from loggers.values import flatten, order_before_reads, plain_config
from loggers.worker import (
    Guard,
    Media,
    Pending,
    Permission,
    Reply,
    Row,
    TrackerReport,
    Writer,
)

__all__ = ["TrackerHub", "close_all", "wait_for_replies"]

_GRACE = 5.0  # seconds that the trackers still get when closing them is interrupted
_DELIVERY_SHARE = 0.8  # of the time in which rows are delivered; the rest is for closing


class TrackerHub:
    """Sends what a training loop logs to every tracker, on threads of its own.

    `log` only appends to a queue; tensors on an accelerator stay there. A thread reads them about
    twice a second, with one copy per device, and hands the rows to one thread per tracker. A
    tracker that raises is retried, then disabled; one that is slow or hangs loses its oldest
    rows when ``max_buffer`` of them wait. For a ``lossless`` one (JSONL, CSV) `log` waits then,
    unless it hangs. Losses are counted (`report`) and logged once on the logger
    "accel_callbacks.trackers"; the other trackers and the run continue. Safe to call from several
    threads and from a signal handler; does nothing in a forked process.

    The media methods (`log_images` and so on) copy their arguments on their device and return.
    Trackers that do not record that kind of media are skipped, with one warning per kind.

    Args:
        trackers: names, classes, instances, or results of `configured_tracker`, each with a unique
            name.
        run: passed to the trackers when they start.
        main_process: whether this is the process that logs; on others only trackers whose
            ``main_process_only`` is False are used.
        before_write: called on the trackers' threads before they are given anything, and about
            twice a second. Once it raises, nothing more is written: what is left is lost, the next
            `log` raises the error, and trackers that own files are not finished.
        **options: those of `TrackerConfig`.

    Raises:
        ValueError: two trackers have the same name, a name is unknown, or an option is invalid.
        TypeError: a tracker is none of the above, or has no name.

    Example:
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
        before_write: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self.run = run
        self.config = TrackerConfig(**options)
        # Errors of the threads that the training thread is to raise.
        self._errors: deque[BaseException] = deque()
        self._permission = Permission(before_write, self._errors.append)
        self._all = _create_all(trackers)
        self._writers = [
            self._writer(tracker, choice)
            for tracker, choice in self._all.values()
            if main_process or not tracker.main_process_only
        ]
        self._pump = Pump(self._writers, self.config, self._keep_error, self._permission)
        self._put = self._pump.put
        self._last_step: int | None = None
        self._started = self._finished = False
        self._pid = os.getpid()
        self._writing_in: int | None = None  # this process, from start to finish
        self._warned: set[str] = set()

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers that this process uses, in order."""
        return tuple(writer.guard.tracker for writer in self._writers)

    @property
    def configured(self) -> dict[str, Tracker]:
        """All trackers by name, those that this process does not use too."""
        return {name: tracker for name, (tracker, _) in self._all.items()}

    @property
    def is_unused(self) -> bool:
        """True until values or media are logged; `log_config` does not count."""
        return self._last_step is None and not self._pump.has_media

    def start(self) -> None:
        """Start every tracker; a second call does nothing. A tracker that fails is skipped.

        All start concurrently. One that takes longer than ``start_timeout_s`` keeps starting in the
        background, and its rows wait.

        Raises:
            RuntimeError: this process may start no more threads.
        """
        if self._started:
            return
        self._started, self._pid = True, os.getpid()
        self._writing_in = self._pid if self._writers else None
        if not self._writers:
            return
        reply = Reply()
        try:
            self._pump.begin()
            for writer in self._writers:
                writer.begin(reply)
        except RuntimeError as error:
            self._finished, self._writing_in = True, None
            raise RuntimeError(
                f"no thread can start for the trackers ({error}): raise the limit of processes "
                "(`ulimit -u`, or that of the container), or start fewer loader workers"
            ) from error
        limit = self.config.start_timeout_s
        ready = wait_for_replies(reply, len(self._writers), time.monotonic() + limit)
        for writer in self._writers:
            if writer.name not in ready:
                writer.guard.timed_out(f"has not started within {limit:g} s", 0, "Its rows wait.")
        self._raise_kept()

    def log_config(self, config: Mapping[str, Any], only: str | None = None) -> None:
        """Send the run's settings to every tracker, as nested plain JSON types.

        Args:
            config: the settings.
            only: name of the one tracker that gets them; all if None.

        Raises:
            RuntimeError: `start` was not called.
            TypeError: ``config`` is no mapping, dataclass or namespace.
        """
        plain = plain_config(config)
        if self._accepts("log_config"):
            for writer in self._writers_of(only):
                writer.request_call("log_config", SimpleQueue(), plain)

    # --- values ---------------------------------------------------------------------------------

    def log(
        self,
        values: Mapping[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values at a step; wait only while a ``lossless`` tracker is far behind.

        Args:
            values: numbers, numpy scalars, 0-d tensors (on any device; later in-place changes are
                not seen), str; dicts of these become ``"a/b"``; None is dropped.
            step: optimizer steps so far. Must not decrease: a lower step is passed on with a
                warning, and replaced by the last step for trackers that would drop it.
            log_kwargs: extra keywords of a tracker's ``log``, by tracker name.

        Raises:
            TypeError: a value is of another type (the key is named), ``step`` is no integer, or a
                tracker does not take a keyword.
            ValueError: one name occurs twice, or ``log_kwargs`` has an unknown tracker.
            RuntimeError: `start` was not called.
        """
        self.put(self.flat(values), step, log_kwargs)

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flatten and check values for `put`; takes and raises the same as `log`.

        >>> TrackerHub([], run=RunInfo("digits", "runs", "a1")).flat({"a": {"b": 1.0}})
        {'a/b': 1.0}
        """
        return flatten(values, self._warn_of_none)

    def put(
        self,
        flat: dict[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        only: str | None = None,
    ) -> None:
        """Record the result of `flat`, of one tracker with ``only``; do not change it afterwards.

        >>> with TrackerHub([], run=RunInfo("digits", "runs", "a1")) as hub:
        ...     hub.put(hub.flat({"loss": 0.5}), step=1)
        """
        step = index(step)  # numpy integers are not JSON serializable
        if log_kwargs:
            self._check_keywords(log_kwargs)
        if (os.getpid() != self._writing_in or self._errors) and not (
            self._accepts("log") and self._writers
        ):
            return
        if not flat:
            return
        last = self._last_step
        if last is not None and step < last:
            self._warn_once(
                "order",
                f"step {step} was logged after step {last}: tools that drop such values get them "
                "at the last step, others draw backwards. Log the number of optimizer steps",
            )
        self._last_step = step
        self._put(Row(time.time(), step, flat, log_kwargs, only))

    # --- media ----------------------------------------------------------------------------------

    def log_images(
        self,
        images: Mapping[str, Any],
        step: int,
        *,
        captions: Mapping[str, Sequence[str] | str] | None = None,
        channels: Channels | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        only: str | None = None,
    ) -> None:
        """Record images.

        Args:
            images: by name, tensors of shape (H, W), (C, H, W) or (N, C, H, W), arrays with
                channels last, PIL images, or lists of these; floats in [0, 1] or integers in
                [0, 255].
            step: optimizer steps so far.
            captions: one text per image, under the same names.
            channels: "first" or "last"; by default first for tensors and last for arrays.
            log_kwargs: extra keywords of a tracker's ``log_images``, by tracker name.
            only: name of the one tracker that gets them; all if None.

        Raises:
            TypeError: a value is not an image.
            ValueError: a shape is none of these.

        >>> import numpy as np
        >>> from loggers import RunInfo, TrackerHub
        >>> with TrackerHub([], run=RunInfo("digits", "runs", "a1")) as hub:
        ...     hub.log_images({"digit": np.zeros((8, 8))}, step=1, captions={"digit": "zero"})
        """
        for name, value in images.items():
            check_shape(name, value, channels)
        texts = {
            name: [text] if isinstance(text, str) else list(text)
            for name, text in (captions or {}).items()
        }
        kwargs: dict[str, Any] = {"captions": texts} if texts else {}
        convert = _convert_each(lambda value: as_images(value, channels))
        self._put_media("images", step, images, convert, kwargs, log_kwargs, only=only)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        only: str | None = None,
    ) -> None:
        """Record a table; cells other than numbers, bool, str and None are converted with ``str``.

        Args:
            name: name of the table.
            columns: names of the columns.
            rows: the cells.
            step: optimizer steps so far.
            log_kwargs: extra keywords of a tracker's ``log_table``, by tracker name.
            only: name of the one tracker that gets it; all if None.

        Raises:
            ValueError: a row is not as long as ``columns``.
        """
        header = [str(column) for column in columns]
        for row in rows:
            if len(row) != len(header):
                raise ValueError(
                    f"table {name!r} has {len(header)} columns and a row of {len(row)} cells"
                )
        copied = [snapshot(list(row)) for row in rows]

        def convert(cells: list[list[Any]]) -> tuple[Any, ...]:
            return name, header, as_table(cells)

        self._put_media("table", step, copied, convert, {}, log_kwargs, only=only)

    def log_histogram(self, histograms: Mapping[str, Any], step: int) -> None:
        """Record histograms of tensors, arrays or lists of numbers, by name; finite values only."""
        self._put_media("histogram", step, histograms, _convert_each(as_numbers), {})

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name."""
        self._put_media("text", step, texts, _convert_each(str), {})

    def log_audio(self, audio: Mapping[str, Any], step: int, *, sample_rate: int) -> None:
        """Record audio clips.

        Args:
            audio: by name, tensors of shape (samples,) or (channels, samples), or arrays of shape
                (samples,) or (samples, channels); floats in [-1, 1], or integers.
            step: optimizer steps so far.
            sample_rate: samples per second.
        """
        kwargs = {"sample_rate": index(sample_rate)}
        self._put_media("audio", step, audio, _convert_each(as_audio), kwargs)

    def log_video(
        self,
        videos: Mapping[str, Any],
        step: int,
        *,
        fps: int = 4,
        channels: Channels | None = None,
    ) -> None:
        """Record videos: by name tensors (T, C, H, W) or arrays (T, H, W, C), see `log_images`."""
        for name, value in videos.items():
            check_shape(name, value, channels, video=True)
        convert = _convert_each(lambda value: as_images(value, channels))
        self._put_media("video", step, videos, convert, {"fps": index(fps)})

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures by name; do not change or close them afterwards."""
        self._put_media("figure", step, figures, lambda value: (value,), {}, copy=False)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None = None, kind: str = "file"
    ) -> None:
        """Record a file or folder; it must not move until the trackers have read it."""
        kwargs = {"name": name, "kind": kind}
        value = absolute(path)  # now: the trackers read it on their own threads
        self._put_media("artifact", None, value, lambda value: (value,), kwargs, copy=False)

    def log_objects(
        self,
        objects: Mapping[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        only: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Record what only a tool's own call takes, such as a ``wandb.Table``, with its tracker.

        Blocks until the trackers have the objects, which may be changed or closed afterwards. Those
        that cannot record one are skipped, with one warning per name.

        Args:
            objects: by name.
            step: optimizer steps so far.
            log_kwargs: extra keywords of a tracker's ``log_objects``, by tracker name.
            only: name of the one tracker that gets them; all if None.
            timeout: maximum seconds to wait.

        >>> with TrackerHub([], run=RunInfo("digits", "runs", "a1")) as hub:
        ...     hub.log_objects({"counts": [1, 2]}, step=1)
        """
        step = index(step)
        if log_kwargs:
            self._check_keywords(log_kwargs, "log_objects")
        if not self._accepts("log_objects"):
            return
        reply, writers = Reply(), self._writers_of(only)
        taken = {
            writer: {n: v for n, v in objects.items() if writer.guard.tracker.takes_object(v)}
            for writer in writers
        }
        for name, value in objects.items():
            lacking = [repr(writer.name) for writer in writers if name not in taken[writer]]
            if lacking:
                kind, names = type(value).__name__, ", ".join(lacking)
                text = (
                    f"{name!r} is of type {kind}, which {names} cannot record: it is skipped there"
                )
                self._warn_once(f"object {name}", text)
        ready = [writer for writer in writers if taken[writer]]
        for value in objects.values():
            if getattr(value, "is_cuda", False):
                order_before_reads(value.device)

        def request_each() -> None:
            for writer in ready:
                extra = (log_kwargs or {}).get(writer.name, {})
                writer.request_call("log_objects", reply, taken[writer], step, **extra)

        if ready:
            self._pump.submit(request_each)
            wait_for_replies(reply, len(ready), time.monotonic() + timeout)

    def log_graph(self, model: Any, inputs: Any = None, *, timeout: float = 30.0) -> None:
        """Record a model's graph. Blocks until the trackers are done with the model.

        The model is in eval mode meanwhile, with gradients disabled.

        Args:
            model: an ``nn.Module``, not wrapped for several processes.
            inputs: example inputs, where the tool needs them.
            timeout: maximum seconds to wait; trackers that have not started by then skip the graph.
        """
        if not self._records("graph"):
            return
        deadline = time.monotonic() + timeout
        with _eval_mode(model):
            for writer in self._writers:  # one at a time: the trackers share the model
                if "graph" in writer.guard.kinds:
                    reply, in_time = Reply(), [True]
                    writer.request_graph(reply, in_time, model, inputs)
                    in_time[0] = bool(wait_for_replies(reply, 1, deadline))

    # --- flush, state and end -------------------------------------------------------------------

    def flush(self, timeout: float = 30.0) -> bool:
        """Deliver what was logged so far and flush the trackers.

        Args:
            timeout: maximum seconds to wait; a slower tracker finishes in the background.

        Returns:
            Whether all trackers were done in time.
        """
        done = self._request_all(lambda writer, reply: writer.request_flush(reply), timeout)
        self._raise_kept()
        return done

    def finish(self, status: Status = "success", timeout: float | None = None) -> None:
        """Deliver the rest and finish every tracker, all concurrently.

        Rows that are left when most of the time is over are dropped, so that each tool is closed;
        a tracker that does not return is reported and abandoned. Later calls do nothing.

        Args:
            status: "success", "failed" or "interrupted".
            timeout: maximum seconds to take; ``finish_timeout_s`` if None.

        Raises:
            ValueError: ``status`` is something else.
        """
        check_status(status)
        if not self._started or self._finished or self._is_forked():
            return
        self._finished, self._writing_in = True, None
        if not self._writers:
            return
        seconds = self.config.finish_timeout_s if timeout is None else timeout
        close_all(self._pump, self._writers, status, seconds)
        if status == "success":  # otherwise the run's own error is propagating: do not mask it
            self._raise_kept()

    def get(self, name: str) -> Tracker:
        """Return a tracker by name; a `NullTracker` if it is not used here or failed to start.

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

        What was logged before is then in the trackers' files. For a tracker that is not done within
        ``timeout`` seconds, its last known state is returned.
        """
        self._request_all(lambda writer, reply: writer.request_state(reply), timeout)
        self._raise_kept()
        return {w.name: dict(w.state) for w in self._writers if w.state is not None}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load each tracker's state by name; trackers without an entry start a new run.

        Raises:
            RuntimeError: `start` was called already.
        """
        if self._started:
            raise RuntimeError("load_state_dict comes before start(): make a new TrackerHub")
        for writer in self._writers:
            if writer.name in state:
                writer.load_state(state[writer.name])
        self._raise_kept()

    def report(self) -> dict[str, TrackerReport]:
        """Return the counts and status of each tracker that this process uses, by name."""
        reports = {writer.name: writer.report() for writer in self._writers}
        lost = self._pump.lost
        return {
            name: replace(
                report,
                dropped=report.dropped + lost.rows + lost.media,
                lost_rows=report.lost_rows + lost.rows,
            )
            for name, report in reports.items()
        }

    def __enter__(self) -> TrackerHub:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.finish("success")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")

    # --- parts ----------------------------------------------------------------------------------

    def _writer(self, tracker: Tracker, choice: ConfiguredTracker) -> Writer:
        """Return the worker of a tracker, with its guard and filter."""
        config = self.config
        guard = Guard(tracker, config.max_failures, self._keep_error, report=not config.strict)
        takes = choice.takes if choice.include or choice.exclude else None
        return Writer(guard, takes, self.run, config.max_buffer, self._permission)

    def _keep_error(self, error: BaseException) -> None:
        """Keep an error if the options request that the training thread raises it."""
        requested = isinstance(error, FloatingPointError) and self.config.nan_policy == "raise"
        if self.config.strict or requested:
            self._errors.append(error)

    def _raise_kept(self) -> None:
        """Raise the first kept error and discard the others, which follow from it."""
        if self._errors:
            first = self._errors[0]
            self._errors.clear()
            raise first

    def _warn_of_none(self, name: str) -> None:
        self._warn_once("none", f"log got None for {name!r}; None values are dropped")

    def _accepts(self, method: str) -> bool:
        """Return whether values are accepted; raise before `start`, warn after `finish`."""
        if not self._started:
            raise RuntimeError(f"TrackerHub.{method} before start(): call start() first")
        if self._is_forked():
            return False
        if self._finished:
            self._warn_once("finished", f"{method} after finish() is ignored: the run is over")
            return False
        self._raise_kept()
        return True

    def _is_forked(self) -> bool:
        """Return whether this is a forked child, where the hub's threads do not exist."""
        return os.getpid() != self._pid

    def _writers_of(self, only: str | None) -> list[Writer]:
        """Return the workers of all trackers, or that of one, if this process uses it."""
        return [writer for writer in self._writers if only in (None, writer.name)]

    def _records(self, kind: str, only: str | None = None) -> bool:
        """Return whether any tracker records this kind; warn once about those that do not."""
        if not self._accepts(f"log_{kind}"):
            return False
        chosen = self._writers_of(only)
        lacking = [repr(w.name) for w in chosen if kind not in w.guard.kinds]
        if len(lacking) == 1:
            text = f"tracker {lacking[0]} does not record {kind} and is skipped"
            self._warn_once(f"media {kind}", text)
        elif lacking:
            text = f"trackers {', '.join(lacking)} do not record {kind} and are skipped"
            self._warn_once(f"media {kind}", text)
        return len(lacking) < len(chosen)

    def _put_media(
        self,
        kind: str,
        step: int | None,
        value: Any,
        convert: Callable[[Any], tuple[Any, ...]],
        kwargs: dict[str, Any],
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        copy: bool = True,
        only: str | None = None,
    ) -> None:
        """Copy the value, and queue it to be converted on the hub's thread."""
        step = None if step is None else index(step)
        if log_kwargs:
            self._check_keywords(log_kwargs, f"log_{kind}")
        if not self._records(kind, only):
            return
        if isinstance(value, Mapping):
            value = {str(name): snapshot(v) if copy else v for name, v in value.items()}
        extra = {name: dict(keywords) for name, keywords in (log_kwargs or {}).items()}
        size = size_of(value)

        def converted() -> Media:
            by_name = kind != "artifact"
            return Media(kind, step, convert(value), kwargs, by_name, extra, size, only)

        self._pump.put_media(Pending(size, converted))

    def _request_all(self, request: Callable[[Writer, Reply], None], timeout: float) -> bool:
        """Send a request to every tracker after what was logged; return whether all replied."""
        if not self._started or self._finished or not self._writers or self._is_forked():
            return True
        reply = Reply()
        # A tracker stuck in one call for longer than this was waited for by an earlier request.
        ready = [writer for writer in self._writers if not writer.guard.is_busy_for(timeout)]

        def request_each() -> None:
            for writer in ready:
                request(writer, reply)

        self._pump.submit(request_each)
        replies = wait_for_replies(reply, len(ready), time.monotonic() + timeout)
        return len(replies) == len(self._writers)

    def _check_keywords(
        self, log_kwargs: Mapping[str, Mapping[str, object]], method: str = "log"
    ) -> None:
        """Raise for an unknown tracker, and for a keyword that its method does not take."""
        for name, keywords in log_kwargs.items():
            if name not in self._all:
                known = ", ".join(self._all) or "none"
                raise ValueError(f"log_kwargs for {name!r}, which is no tracker here: {known}")
            for writer in self._writers:
                if writer.name != name:
                    continue
                unknown = writer.guard.unknown_keywords(method, keywords)
                if unknown:
                    raise TypeError(f"{method} of tracker {name!r} takes no keyword {unknown[0]!r}")

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn once per kind, at the line of the script that called the hub or an Accelerator."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        warn(f"{text} (warned once)")


def _create_all(
    specs: Iterable[TrackerSpec | ConfiguredTracker],
) -> dict[str, tuple[Tracker, ConfiguredTracker]]:
    """Create the trackers, by name; names must be unique, as checkpoints key states by them."""
    named: dict[str, tuple[Tracker, ConfiguredTracker]] = {}
    choices = [s if isinstance(s, ConfiguredTracker) else ConfiguredTracker(s) for s in specs]
    for tracker, choice in [(choice.create(), choice) for choice in choices]:
        name = getattr(tracker, "name", "")
        if not isinstance(name, str) or not name:
            raise TypeError(f"tracker {tracker!r} has no name: set `name` on its class")
        if name in named:
            raise ValueError(
                f"two trackers are named {name!r}: set .name on one of them, or give it a label "
                "with configured_tracker(..., label=...)"
            )
        named[name] = (tracker, choice)
    return named


def _convert_each(convert: Callable[[Any], Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return a function that converts each value of a mapping."""
    return lambda values: ({name: convert(value) for name, value in values.items()},)


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    """Set a module to eval mode, and restore the mode of each submodule afterwards."""
    modules = list(model.modules()) if callable(getattr(model, "modules", None)) else []
    modes = [module.training for module in modules]
    if modules:
        model.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def close_all(pump: Pump, writers: Sequence[Writer], status: Status, seconds: float) -> None:
    """Deliver what is left and finish every tracker, all concurrently.

    Rows that are left when most of the time is over are dropped, so that the tool is still closed.
    A tracker that does not return is left to its daemon thread. An interrupt (Ctrl-C) shortens the
    wait, and is raised after it.
    """
    begin, reply = time.monotonic(), Reply()
    try:
        pump.submit(lambda: _request_finish(writers, status, reply, pump.lost.rows))
        pump.end()
        late = _wait(writers, status, reply, begin, seconds)
    except BaseException:
        now = time.monotonic()
        left = min(_GRACE, max(begin + seconds - now, 0.0))
        _report(_wait(writers, status, reply, now, left), left)
        raise
    _report(late, seconds)


def wait_for_replies(reply: Reply, count: int, deadline: float) -> dict[str, Any]:
    """Collect the replies of ``count`` trackers by name, until a time of ``time.monotonic``."""
    got: dict[str, Any] = {}
    while len(got) < count:
        try:
            name, result = reply.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        got[name] = result
    return got


def _request_finish(writers: Sequence[Writer], status: Status, reply: Reply, lost: int) -> None:
    for writer in writers:
        writer.finish(status, reply, lost)


def _wait(
    writers: Sequence[Writer], status: Status, reply: Reply, begin: float, seconds: float
) -> list[Writer]:
    """Return the writers that did not finish in time."""
    deadline = begin + _DELIVERY_SHARE * seconds
    # One by one: after an interrupt, replies of writers that have finished may still be queued.
    while not all(writer.finished for writer in writers):
        if not wait_for_replies(reply, 1, deadline):
            break
    late = [writer for writer in writers if not writer.finished]
    for writer in late:
        writer.abandon()
        # Requested again: if a device blocks the pump, its request never reached the writer.
        writer.finish(status, SimpleQueue())
    deadline = begin + seconds
    for writer in late:
        writer.join(max(0.0, deadline - time.monotonic()))
    return [writer for writer in late if not writer.finished]


def _report(late: Sequence[Writer], seconds: float) -> None:
    for writer in late:
        writer.report_unfinished(seconds)
