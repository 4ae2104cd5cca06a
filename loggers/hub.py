"""TrackerHub: fan-out without waiting; media taken on the training thread."""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from loggers.base import RunInfo, Status, Tracker, check_status
from loggers.config import NanPolicy, TrackerConfig
from loggers.multimedia.convert import (
    Channels,
    as_audio,
    as_numbers,
    as_pictures,
    as_table,
    check_shape,
    held,
    size_of,
)
from loggers.queue import Pump
from loggers.registry import ConfiguredTracker, TrackerSpec, chosen
from loggers.shutdown import HubParts, answers, by_name, close_all
from loggers.trackers.null import NullTracker
from loggers.values import flatten, plain_config
from loggers.worker import Media, Pending, Reply, Row, TrackerReport

__all__ = ["MediaMethods", "TrackerHub"]


class MediaMethods(HubParts):
    """The ``log_...`` methods of a hub beside `log`.

    A call copies what it is given, on its device, and returns. Trackers without that kind of media
    are left out, with one warning a kind that names them.
    """

    def log_images(
        self,
        images: Mapping[str, Any],
        step: int,
        *,
        captions: Mapping[str, Sequence[str] | str] | None = None,
        channels: Channels | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record pictures.

        Args:
            images: by name, tensors or arrays of shape (H, W), (H, W, C) or (N, H, W, C), or PIL
                images, or lists of these; floats in [0, 1] or integers in [0, 255].
            step: optimizer steps done.
            captions: under the same names, a text for each picture.
            channels: "first" or "last"; first in tensors, last in arrays if None.
            log_kwargs: further keywords of a tracker's ``log_images``, by the tracker's name.

        Raises:
            TypeError: a value is no picture.
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

        def convert(kept: dict[str, Any]) -> tuple[Any, ...]:
            return ({name: as_pictures(value, channels) for name, value in kept.items()},)

        self._take("images", step, images, convert, kwargs, log_kwargs)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record a table; what is no number, bool, str or None is written as its text.

        Raises:
            ValueError: a row is not as long as ``columns``.
        """
        heads = [str(column) for column in columns]
        for row in rows:
            if len(row) != len(heads):
                raise ValueError(
                    f"table {name!r} has {len(heads)} columns and a row of {len(row)} cells"
                )
        kept = [held(list(row)) for row in rows]

        def convert(cells: list[list[Any]]) -> tuple[Any, ...]:
            return name, heads, as_table(cells)

        self._take("table", step, kept, convert, {}, log_kwargs)

    def log_histogram(self, histograms: Mapping[str, Any], step: int) -> None:
        """Record distributions: by name tensors, arrays or lists of numbers; finite ones count."""
        self._take("histogram", step, histograms, _converter(as_numbers), {})

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name."""
        self._take("text", step, texts, _converter(str), {})

    def log_audio(self, audio: Mapping[str, Any], step: int, *, sample_rate: int) -> None:
        """Record sounds.

        Args:
            audio: by name, tensors of shape (samples,) or (channels, samples), or arrays of shape
                (samples,) or (samples, channels); floats in [-1, 1], or integers.
            step: optimizer steps done.
            sample_rate: samples a second.
        """
        kwargs = {"sample_rate": operator.index(sample_rate)}
        self._take("audio", step, audio, _converter(as_audio), kwargs)

    def log_video(
        self,
        videos: Mapping[str, Any],
        step: int,
        *,
        fps: int = 4,
        channels: Channels | None = None,
    ) -> None:
        """Record films: by name tensors (T, C, H, W) or arrays (T, H, W, C), as pictures are."""
        for name, value in videos.items():
            check_shape(name, value, channels, film=True)
        convert = _converter(lambda value: as_pictures(value, channels))
        self._take("video", step, videos, convert, {"fps": operator.index(fps)})

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures by name; leave them as they are afterwards."""
        self._take("figure", step, figures, lambda kept: (kept,), {}, copy=False)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None = None, kind: str = "file"
    ) -> None:
        """Record a file or folder; it has to stay where it is until the trackers have it."""
        place = os.fspath(path)
        kwargs = {"name": name, "kind": kind}
        self._take("artifact", None, place, lambda kept: (kept,), kwargs, copy=False)

    def log_graph(self, model: Any, inputs: Any = None, *, timeout: float = 30.0) -> None:
        """Record a model's graph. This waits for the trackers: the model must not change meanwhile.

        The model is in eval mode during that, and gradients are off.

        Args:
            model: an ``nn.Module``, not wrapped for several processes.
            inputs: what it is called with, where the tool needs that.
            timeout: seconds to wait at most; trackers that are not there by then leave it out.
        """
        if not self._wants("graph"):
            return
        deadline = time.monotonic() + timeout
        with _still(model):
            for writer in self._writers:  # one after the other, because there is one model
                if "graph" in writer.guard.kinds:
                    reply, in_time = Reply(), [True]
                    writer.ask_graph(reply, in_time, model, inputs)
                    in_time[0] = bool(answers(reply, 1, deadline))

    def _wants(self, kind: str) -> bool:
        """Say whether a tracker has this kind; warn once of those that have not."""
        if not self._accepting(f"log_{kind}"):
            return False
        lacking = [repr(w.name) for w in self._writers if kind not in w.guard.kinds]
        if len(lacking) == 1:
            text = f"tracker {lacking[0]} does not record {kind}: it is left out"
            self._warn_once(f"media {kind}", text)
        elif lacking:
            text = f"trackers {', '.join(lacking)} do not record {kind}: they are left out"
            self._warn_once(f"media {kind}", text)
        return len(lacking) < len(self._writers)

    def _take(
        self,
        kind: str,
        step: int | None,
        value: Any,
        convert: Callable[[Any], tuple[Any, ...]],
        kwargs: dict[str, Any],
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        copy: bool = True,
    ) -> None:
        """Copy what was given, and let the hub's thread convert it."""
        step = None if step is None else operator.index(step)
        if log_kwargs:
            self._check_keywords(log_kwargs, f"log_{kind}")
        if not self._wants(kind):
            return
        if isinstance(value, Mapping):
            kept: Any = {str(name): held(one) if copy else one for name, one in value.items()}
        else:
            kept = value
        extra = {name: dict(keywords) for name, keywords in (log_kwargs or {}).items()}

        size = size_of(kept)

        def converted() -> Media:
            return Media(kind, step, convert(kept), kwargs, kind != "artifact", extra, size)

        self._pump.put_media(Pending(size, converted))


def _converter(one: Callable[[Any], Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what converts each value of a mapping."""
    return lambda kept: ({name: one(value) for name, value in kept.items()},)


@contextmanager
def _still(model: Any) -> Iterator[None]:
    """Have a module in eval mode, and each part of it as it was afterwards."""
    modules = list(model.modules()) if callable(getattr(model, "modules", None)) else []
    modes = [module.training for module in modules]
    if modules:
        model.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


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
