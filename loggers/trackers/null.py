"""NullTracker: accepts every call and does nothing, for processes that do not log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loggers.base import RunInfo, Status, Tracker


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
