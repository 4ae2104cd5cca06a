"""The tracker protocol: what a tracker must do, and what it is told about the run."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np

Scalar = float | int | str
"""One logged value, as a tracker receives it: never a tensor, never None."""

Status = Literal["success", "failed", "interrupted"]
"""How a run ended."""

STATUSES: tuple[str, ...] = get_args(Status)

MEDIA = ("images", "table", "histogram", "text", "audio", "video", "figure", "artifact", "graph")
"""The kinds of media; ``log_<kind>`` is the method of a tracker that records one."""


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
    `log`, media and `flush`, `state_dict` at each checkpoint, `finish`. A hub makes all of them on
    one thread of this tracker's own, which is not the main thread, one at a time.

    Attributes:
        name: what ``get`` and ``state_dict`` go by.
        main_process_only: whether only the main process uses it, True by default.
        needs_rising_steps: the tool drops a step below the last one; the hub then gives such
            values with the last step. False by default.
        requires: modules that `start` imports; ``log_with="all"`` leaves the tracker out where
            one is not installed. None by default.

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
    requires: tuple[str, ...] = ()

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the tool. The first moment at which files, threads or the network may be used."""

    @abstractmethod
    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Record flat ``{"train/loss": 0.5}`` values at an optimizer step.

        An override may take a further keyword, ``time: float | None = None``. A hub, which delivers
        rows later than they were logged, then passes the Unix seconds of the user's call. Other
        keywords are those that users may give in ``log_kwargs``. A call that raises may be made
        again with the same row.
        """

    @abstractmethod
    def finish(self, status: Status = "success") -> None:
        """Write what is still held and close the tool; a second call does nothing."""

    # Optional methods do nothing by default, so that a tracker is three methods long.
    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Record the run's settings, a nested mapping."""

    # Media: a tracker has the kinds whose method it overrides (see `media`).
    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record pictures: by name uint8 of shape (N, H, W, C), C one of 1, 3, 4.

        ``captions`` has N texts under the name of each array that has any.
        """
        self._lacks("images")

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table: rows of numbers, bool, str and None, as long as ``columns``."""
        self._lacks("table")

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Record distributions: by name the values themselves, float or int of shape (N,)."""
        self._lacks("histogram")

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name."""
        self._lacks("text")

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record sounds: by name float32 in [-1, 1] of shape (samples,) or (samples, channels)."""
        self._lacks("audio")

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record films: by name uint8 of shape (T, H, W, C), C one of 1, 3, 4."""
        self._lacks("video")

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures by name; not to be closed or changed here."""
        self._lacks("figure")

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Record a file or a folder of this machine; ``name`` is that of the path if None."""
        self._lacks("artifact")

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Record a model's graph. The hub has it in eval mode, without gradients."""
        self._lacks("graph")

    def _lacks(self, kind: str) -> None:
        """Say that there is no place for this kind; a hub does not even call."""
        warnings.warn(f"tracker {self.name!r} does not record {kind}", UserWarning, stacklevel=3)

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

    @property
    def tracker(self) -> Any:
        """The same as `raw`; Accelerate's name for it."""
        return self.raw


def media(tracker: Tracker) -> frozenset[str]:
    """Return the kinds of media that a tracker records: those whose method it has of its own.

    >>> class Texts(Tracker):
    ...     def log_text(self, texts, step):
    ...         print(texts)
    ...
    ...     start = log = finish = None
    >>> sorted(media(Texts()))
    ['text']
    """
    had = {
        kind
        for kind in MEDIA
        if getattr(getattr(tracker, f"log_{kind}"), "__func__", None)
        is not getattr(Tracker, f"log_{kind}")
    }
    return frozenset(had)


def check_status(status: str) -> None:
    """Raise ValueError unless ``status`` is one of the three a run can end with."""
    if status not in STATUSES:
        raise ValueError(f"finish status {status!r} is unknown: use one of {', '.join(STATUSES)}")
