"""Base classes and helpers of trackers that resume a run, and of those in front of a package."""

from __future__ import annotations

import importlib
import math
import os
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from checkpoint_io.local_files import local_path
from checkpoint_io.warning import warn
from loggers.base import RunInfo, Scalar, Status, Tracker, check_status
from loggers.multimedia.encode import figure_image, gif, named_images, wav
from loggers.multimedia.files import Scratch
from loggers.trackers.line_file import LineFile, open_lines

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ContinuingTracker",
    "ItemTracker",
    "LineTracker",
    "Recorded",
    "ToolTracker",
    "as_float",
    "local_folder",
    "preserve_random_state",
    "require_open",
    "run_name",
    "tool_of",
]

_TOOLS = frozenset(("clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb"))

T = TypeVar("T")


class Recorded:
    """Counts what a run had recorded at its last step before a resume, so that it is not repeated.

    A script that is started again after its end logs its last results once more; what has the same
    name, step and value is dropped once for each time that it is there. Another value is a new
    result, and is recorded.

    >>> recorded = Recorded()
    >>> recorded.add(3, "loss", "0.5")
    >>> [recorded.take(3, "loss", "0.5") for _ in range(2)]
    [True, False]
    """

    def __init__(self) -> None:
        self._left: Counter[tuple[int, str, str]] = Counter()
        self._steps: set[int] = set()

    def add(self, step: int, name: str, value: str) -> None:
        """Add a value that is there, as text."""
        self._left[step, name, value] += 1
        self._steps.add(step)

    def has(self, step: int) -> bool:
        """Return whether there are values at a step."""
        return step in self._steps

    def take(self, step: int, name: str, value: str) -> bool:
        """Return whether a value is there, and count it as repeated."""
        repeated = self._left[step, name, value] > 0
        if repeated:
            self._left[step, name, value] -= 1
        return repeated


class ContinuingTracker(Tracker):
    """A tracker that continues its run after a resume, and can be reused for several runs in turn.

    Its state is the id of its run and the last step that it logged.

    Args:
        all_ranks: log on every rank, not only on the main one.
    """

    def __init__(self, *, all_ranks: bool = False) -> None:
        self.main_process_only = not all_ranks
        self._run_id: str | None = None
        self._last_step: int | None = None
        self._loaded = False
        self._recorded = Recorded()

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the last step that was logged."""
        return {"run_id": self._run_id, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run in ``state`` at the next `start`."""
        self._run_id = state.get("run_id")
        self._last_step = state.get("last_step")
        self._loaded = True

    def _begin(self, run: RunInfo) -> int | None:
        """Set the id of the run; return the last step to keep, None for a new run.

        Steps in the checkpoint are kept in any unit: if the user logs samples, they are far above
        the optimizer steps of ``resumed_step``.
        """
        if not self._loaded:
            self._run_id, self._last_step = None, None
        self._run_id = self._run_id or run.run_id
        self._recorded = Recorded()
        if run.resumed_step is None:
            return None
        return max(run.resumed_step, -1 if self._last_step is None else self._last_step)

    def _drop_recorded(
        self, scalars: Mapping[str, Scalar], step: int, as_text: Callable[[Scalar], str]
    ) -> dict[str, Scalar]:
        """Return the values that the run had not recorded at this step before a resume."""
        if not self._recorded.has(step):
            return dict(scalars)
        take = self._recorded.take
        return {n: value for n, value in scalars.items() if not take(step, n, as_text(value))}

    def _note_step(self, step: int) -> None:
        """Update the last step."""
        self._last_step = step if self._last_step is None else max(step, self._last_step)

    def _end(self, status: Status) -> None:
        """Check the status; the next start begins another run unless a state is loaded."""
        check_status(status)
        self._loaded = False


def require_open(part: T | None, tracker: str) -> T:
    """Return an object that exists between ``start`` and ``finish``.

    Raises:
        RuntimeError: it is None, so the tracker is not open.
    """
    if part is None:
        raise RuntimeError(f"the {tracker} tracker is not open: call start(run) before logging")
    return part


class LineTracker(ContinuingTracker):
    """A tracker that writes one file of lines in ``logging_dir``, or an object in a store.

    Args:
        filename: name of the file; ranks above 0 add ``-rank<r>``.
        all_ranks: log on every rank, not only on the main one.
    """

    lossless = owns_files = True
    _private = False  # whether the file is for its user alone

    def __init__(self, filename: str, *, all_ranks: bool = False) -> None:
        super().__init__(all_ranks=all_ranks)
        self._filename = filename
        self._file: LineFile | None = None
        self.path: str | None = None
        """Path or URL of the file, set by `start`."""

    def _open_lines(self, run: RunInfo) -> tuple[LineFile, str]:
        """Open the file of this rank; return it, and its name without the suffix."""
        stem, suffix = os.path.splitext(self._filename)
        stem += f"-rank{run.rank}" if run.rank else ""
        file = open_lines(run.logging_dir, stem + suffix, private=self._private)
        self.path = file.path
        return file, stem

    @property
    def raw(self) -> Any:
        """The file's writer, with its ``path``, or None before `start` and after `finish`."""
        return self._file

    def flush(self) -> None:
        """Append what is pending; after an error, the unwritten rest stays pending."""
        self._write(self._target())

    def state_dict(self) -> dict[str, Any]:
        """Write what is pending, also to a store, and return the run id and the last step."""
        if self._file is not None:
            self._write(self._file, force=True)
        return super().state_dict()

    @property
    def unflushed(self) -> bool:
        """Whether something waits for an upload to a store."""
        return self._file is not None and self._file.is_dirty

    def _write(self, file: LineFile, force: bool = False) -> None:
        """Write what is pending; to a store if an upload is due, or with ``force``."""
        file.flush(force)

    def _close(self) -> None:
        """Sync the file to disk and close it, even if writing the rest fails."""
        file, self._file = self._target(), None
        file.close()

    def _target(self) -> LineFile:
        """Return the file; raise RuntimeError if the tracker is not open."""
        return require_open(self._file, self.name)


class ToolTracker(ContinuingTracker):
    """A tracker in front of a package, the first in ``requires``, and of one object of it.

    A subclass opens and closes that object; `start` and `finish` do the rest.

    Args:
        all_ranks: log on every rank, not only on the main one.
        **options: arguments of the tool, which override the tracker's own.
    """

    install = ""
    """Arguments of ``pip install``."""
    derives_ids = False
    """Whether the id of a rank's run is `run_name`, so that other ranks know theirs on a resume."""

    def __init__(self, *, all_ranks: bool = False, **options: Any) -> None:
        super().__init__(all_ranks=all_ranks)
        self._options = options
        self._package: Any = None
        self._tool: Any = None
        self._borrowed = False  # the tool's object is one that the script has opened
        self._scratch = Scratch()
        self._rank = 0
        self._warned: set[str] = set()

    def start(self, run: RunInfo) -> None:
        """Import the tool, and open a run of it, or use the one that the script has opened."""
        self._package = self._import(self.requires[0])
        resumed = self._id_to_resume(run)
        running = self._tool_of_script()
        self._borrowed = running is not None
        if running is None:
            with preserve_random_state():
                running = self._open(run, resumed)
        self._tool = running
        self._run_id = self._id()

    def finish(self, status: Status = "success") -> None:
        """Close the tool's object with a status; leave one that the script has opened open."""
        self._end(status)
        tool, self._tool = self._tool, None
        if tool is not None:
            try:
                self._close(tool, status)
            finally:
                self._scratch.close()

    @abstractmethod
    def _open(self, run: RunInfo, resumed: str | None) -> Any:
        """Return a new object of the tool, for a run or for the one with the id ``resumed``."""

    @abstractmethod
    def _close(self, tool: Any, status: Status) -> None:
        """Record the status, and end the run unless it is ``_borrowed``."""

    def _tool_of_script(self) -> Any:
        """Return the tool's object if the script has opened one, else None."""
        return None

    def _id(self) -> str:
        """Return the id of the tool's run, under which a resume continues."""
        return str(self._tool.id)

    @property
    def raw(self) -> Any:
        """The tool's own object, or None before `start` and after `finish`."""
        return self._tool

    def state_dict(self) -> dict[str, Any]:
        """Return the run id, the last step that was logged, and the rank that logged it."""
        return {**super().state_dict(), "rank": self._rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run in ``state`` at the next `start`."""
        super().load_state_dict(state)
        self._rank = state.get("rank", 0)

    def _id_to_resume(self, run: RunInfo) -> str | None:
        """Return the id of the run to continue; None if a new one is to be created.

        A checkpoint has the state of the main process. Other ranks can derive their run's id from
        it only if the tracker ``derives_ids``; otherwise they create a new run.
        """
        resumed = self._run_id if self._loaded else None
        rank, self._rank = self._rank, run.rank
        self._begin(run)
        if resumed is None or rank == run.rank:
            return resumed
        return f"{resumed}-rank{run.rank}" if self.derives_ids else None

    def _target(self) -> Any:
        """Return the tool's object; raise RuntimeError if the tracker is not open."""
        return require_open(self._tool, self.name)

    def _import(self, module: str) -> Any:
        """Import the tool; by absolute name, because a module here has the same one."""
        try:
            with preserve_random_state():
                return importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"the {self.name} tracker needs {self.install} ({error}): "
                f"pip install {self.install}"
            ) from error

    def _create(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Return a new object of a class of the package."""
        self._target()
        return getattr(self._package, kind)(*args, **kwargs)

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{self.name}: {text} (warned once)")


class ItemTracker(ToolTracker):
    """A tool that records one image, text, ... in one call.

    A tool that cannot record audio or video restores the methods of `Tracker`.
    """

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record images; several of one name get ``/0``, ``/1``, ... Needs Pillow."""
        self._target()
        for name, image, caption in named_images(images, captions):
            self._image(name, image, step, caption)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts."""
        self._target()
        for name, text in texts.items():
            self._text(name, text, step)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Record audio as 16-bit WAV."""
        self._target()
        for name, samples in audio.items():
            self._audio(name, wav(samples, sample_rate), step, sample_rate)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Record videos as GIF. Needs Pillow."""
        self._target()
        for name, frames in videos.items():
            self._video(name, gif(frames, fps), step)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Record matplotlib figures as images. Needs Pillow."""
        self._target()
        for name, figure in figures.items():
            self._image(name, figure_image(figure), step)

    @abstractmethod
    def _image(self, name: str, image: Any, step: int, caption: str | None = None) -> None:
        """Record a PIL image."""

    @abstractmethod
    def _text(self, name: str, text: str, step: int) -> None:
        """Record a text."""

    def _audio(self, name: str, data: bytes, step: int, sample_rate: int) -> None:
        """Record a WAV file."""
        raise NotImplementedError

    def _video(self, name: str, data: bytes, step: int) -> None:
        """Record a GIF file."""
        raise NotImplementedError


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of ``random`` afterwards.

    Tools draw run names and colors from it, which must not change the training.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def run_name(run: RunInfo) -> str:
    """Return the name of this rank's run: the run id, with a suffix for ranks above 0."""
    return f"{run.run_id}-rank{run.rank}" if run.rank else run.run_id


def tool_of(value: Any) -> str | None:
    """Return the package of a tool whose object this is, or an item of this list; None for others.

    >>> tool_of([1, 2]) is None
    True
    """
    if isinstance(value, list | tuple):
        return next(filter(None, map(tool_of, value)), None)
    package = type(value).__module__.partition(".")[0]
    return package if package in _TOOLS else None


def as_float(value: float | int) -> float:
    """Return a number as a float; integers out of range become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def local_folder(run: RunInfo, subdir: str, advice: str) -> str:
    """Return the absolute path of ``<logging_dir>/<subdir>``, which need not exist yet.

    Args:
        run: the run; ranks above 0 get ``rank<r>`` below the folder.
        subdir: name of the folder.
        advice: an alternative for the error.

    Raises:
        ValueError: ``logging_dir`` is a remote URL.
    """
    folder = local_path(run.logging_dir)
    if folder is None:
        raise ValueError(
            f"logging_dir is {run.logging_dir!r}, and this tool writes to local folders only: "
            f"use a local logging_dir, or {advice}"
        )
    rank = (f"rank{run.rank}",) if run.rank else ()
    return os.path.join(os.path.abspath(folder), subdir, *rank)
