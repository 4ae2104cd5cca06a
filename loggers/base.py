"""The tracker protocol: the base class, and the description of a run that trackers receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from checkpoint_io.local_files import absolute
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    import numpy as np

Scalar = float | int | str
"""One logged value, as a tracker receives it: never a tensor, never None."""

Status = Literal["success", "failed", "interrupted"]
"""The outcome of a run."""

STATUSES: tuple[str, ...] = get_args(Status)

MEDIA = ("images", "table", "histogram", "text", "audio", "video", "figure", "artifact", "graph")
"""The kinds of media; ``log_<kind>`` is the method of a tracker that records one."""


@dataclass(frozen=True)
class RunInfo:
    """The run that a tracker records, passed to its ``start``.

    Args:
        name: project or run name, shown by the tools.
        logging_dir: a local path or an fsspec URL; trackers write below it, wherever the script
            goes by ``os.chdir``.
        run_id: identifier of this run, unique within ``name``.
        resumed_step: last step that the restored checkpoint contains, or None for a new run.
            The next logged step is ``resumed_step + 1``.
        rank: rank of this process, 0 on the main one.
        secondary: names that a tracker without room for all leaves out first; it may grow.

    Example:
        >>> RunInfo(name="digits", logging_dir="runs", run_id="a1").resumed_step is None
        True
    """

    name: str
    logging_dir: str
    run_id: str
    resumed_step: int | None = None
    rank: int = 0
    secondary: Collection[str] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logging_dir", absolute(self.logging_dir))


class Tracker(ABC):
    """Base class of trackers. Subclasses set ``name`` and implement `start`, `log` and `finish`.

    A subclass stores its options in its constructor and imports its tool in `start`, not at module
    level. Methods may raise: `TrackerHub` isolates the run from their errors.

    Order of calls: `load_state_dict` (only on a resume), `start`, `log_config`, any number of
    `log`, media and `flush`, `state_dict` at each checkpoint, `finish`. A hub makes all calls, one
    at a time, on one thread per tracker, which is not the main thread.

    Attributes:
        name: key of the tracker in ``get`` and ``state_dict``.
        main_process_only: whether only the main process uses it, True by default.
        needs_rising_steps: the tool drops a step below the last one; the hub then passes such
            values with the last step. False by default.
        lossless: a hub waits for the tracker rather than drop its rows. For tools that never wait
            for a network; False by default.
        owns_files: it writes files in ``logging_dir`` that another run would write too, such as
            JSONL, CSV and TensorBoard; False by default. A hub whose ``before_write`` has raised
            does not call its `finish`.
        requires: modules that `start` imports; ``log_with="all"`` skips the tracker if one is not
            installed. None by default.

    Example:
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
    needs_rising_steps: bool = False
    lossless: bool = False
    owns_files: bool = False
    requires: tuple[str, ...] = ()

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the tool. Files, threads and the network may be used from here on, not earlier."""

    @abstractmethod
    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record flat ``{"train/loss": 0.5}`` values at an optimizer step.

        An override may take an extra keyword, ``time: float | None = None``. A hub, which delivers
        rows later than they were logged, then passes the Unix time of the user's call. Other
        keywords are those that users may pass in ``log_kwargs``. A call that raises may be retried
        with the same row.
        """

    @abstractmethod
    def finish(self, status: Status = "success") -> None:
        """Write what is pending and close the tool; a second call does nothing."""

    # Optional methods do nothing by default, so that a tracker is three methods long.
    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Record the run's settings, a nested mapping."""

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> None:
        """Record several rows of (scalars, step, Unix time), which must not be changed.

        A hub calls it in place of `log` where it is overridden, and `log` is not overridden later.
        An override records all rows or raises: the hub then logs them one by one.
        """
        for scalars, step, _ in rows:
            self.log(scalars, step)

    # Media: a tracker has the kinds whose method it overrides (see `media`).
    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record images: by name uint8 of shape (N, H, W, C), C one of 1, 3, 4.

        ``captions`` has N texts under the name of each array with captions.
        """
        self._warn_unsupported("images")

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table: rows of numbers, bool, str and None, each as long as ``columns``."""
        self._warn_unsupported("table")

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record histograms: by name the values themselves, float or int of shape (N,)."""
        self._warn_unsupported("histogram")

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name."""
        self._warn_unsupported("text")

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio: by name float32 in [-1, 1] of shape (samples,) or (samples, channels)."""
        self._warn_unsupported("audio")

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record videos: by name uint8 of shape (T, H, W, C), C one of 1, 3, 4."""
        self._warn_unsupported("video")

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures by name, without closing or changing them."""
        self._warn_unsupported("figure")

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Record a local file or folder; ``name`` is the last part of the path if None."""
        self._warn_unsupported("artifact")

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Record a model's graph. A hub calls this in eval mode, with gradients disabled."""
        self._warn_unsupported("graph")

    def takes_object(self, value: Any) -> bool:
        """Return whether `log_objects` records a value; False by default."""
        return False

    def log_objects(self, objects: Mapping[str, Any], step: int) -> None:
        """Record what the tool's own call takes, such as a ``wandb.Table``, by name.

        A hub calls this with values that `takes_object` accepts.
        """
        self._warn_unsupported("objects")

    def _warn_unsupported(self, kind: str) -> None:
        """Warn that this kind is not recorded; a hub does not make such calls."""
        warn(f"tracker {self.name!r} does not record {kind}")

    def flush(self) -> None:  # noqa: B027
        """Make what was logged so far visible to readers of the files or the server."""

    @property
    def unflushed(self) -> bool:
        """Whether rows wait for a later `flush`; a hub then calls it though nothing more is logged.

        False by default.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the same run later, as JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Load what `state_dict` returned; called before `start`."""

    @property
    def raw(self) -> Any:
        """The tool's own object (a ``SummaryWriter``, a W&B run), or None before `start`."""
        return None

    @property
    def tracker(self) -> Any:
        """The same as `raw`; Accelerate's name for it."""
        return self.raw


def media(tracker: Tracker) -> frozenset[str]:
    """Return the kinds of media that a tracker records: those whose method it overrides.

    Example:
        >>> class Texts(Tracker):
        ...     def log_text(self, texts, step):
        ...         print(texts)
        ...
        ...     start = log = finish = None
        >>> sorted(media(Texts()))
        ['text']
    """
    return frozenset(
        kind
        for kind in MEDIA
        if getattr(getattr(tracker, f"log_{kind}"), "__func__", None)
        is not getattr(Tracker, f"log_{kind}")
    )


def takes_batches(tracker: Tracker) -> bool:
    """Return whether ``log_rows`` replaces ``log``: it is overridden, and ``log`` not after it.

    >>> class Lines(Tracker):
    ...     def log_rows(self, rows):
    ...         print(len(rows))
    ...
    ...     start = log = finish = None
    >>> class Shouts(Lines):
    ...     def log(self, scalars, step):
    ...         print("!")
    >>> takes_batches(Lines()), takes_batches(Shouts())
    (True, False)
    """
    if "log" in vars(tracker):
        return False
    first = next(cls for cls in type(tracker).__mro__ if {"log", "log_rows"} & vars(cls).keys())
    return first is not Tracker and "log_rows" in vars(first)


def check_status(status: str) -> None:
    """Raise ValueError unless ``status`` is a `Status`."""
    if status not in STATUSES:
        raise ValueError(f"finish status {status!r} is unknown: use one of {', '.join(STATUSES)}")


class _Nothing:
    """Stand-in for a tool's object: attributes, calls, items and ``with`` all do nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):  # copy, pickle and others must not find their protocols
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<nothing: this process does not track>"


class NullTracker(Tracker):
    """Accepts every call, including any tracker's own methods, and does nothing.

    `TrackerHub.get` returns it on processes that do not log, so that code that uses a tool directly
    needs no ``if``. Its `raw` accepts every call too, and is false in a condition.

    Args:
        name: its name, default "null".

    Example:
        >>> tracker = NullTracker()
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.raw.add_histogram("weights", [1.0, 2.0])
        <nothing: this process does not track>
    """

    name = "null"
    main_process_only = False

    def __init__(self, name: str = "null") -> None:
        self.name = name

    def start(self, run: RunInfo) -> None:
        """Do nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; so do the media methods."""

    log_images = log_table = log_histogram = log_text = log_audio = log
    log_video = log_figure = log_artifact = log_graph = log

    def finish(self, status: Status = "success") -> None:
        """Do nothing."""

    @property
    def raw(self) -> Any:
        """An object whose attributes and calls all do nothing."""
        return _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()
