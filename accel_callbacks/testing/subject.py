"""What is checked, and the trainings that it is checked in."""

from __future__ import annotations

import contextlib
import io
import logging
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.functions import checked_hook
from accel_callbacks.callbacks.recognising import accepted, overrides
from accel_callbacks.testing.training import TinyTraining

__all__ = ["Subject", "kept_in_memory", "quietly"]


class Subject:
    """A callback's factory, and how its trainings are made.

    Args:
        factory: makes a new callback, or a list of one and those that it cannot do without.
        allow_sync: hooks that may wait for the device.
        options: of the trainings.

    Attributes:
        kept: what several checks need, and one has made.
    """

    def __init__(
        self, factory: Callable[[], Any], allow_sync: Sequence[str], options: dict[str, Any]
    ) -> None:
        self._factory = factory
        self.allow_sync = {checked_hook(hook) for hook in allow_sync}
        self._options = options
        self.kept: dict[str, Any] = {}

    def make(self) -> tuple[Any, list[Any]]:
        """A new callback, as it is registered, and those that come with it."""
        made = self._factory()
        callback, *others = made if isinstance(made, (list, tuple)) else (made,)
        return accepted(callback), others

    def training(
        self,
        *,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        made: tuple[Any, list[Any]] | None = None,
        **options: Any,
    ) -> tuple[Any, TinyTraining]:
        """A callback (a new one unless ``made`` is given), and a training that it is in."""
        callback, others = made or self.make()
        settings = {**options, **self._options}
        return callback, TinyTraining([*before, callback, *others, *after], **settings)


def hooks_of(callback: Any) -> list[str]:
    """The hooks that a callback has."""
    return [hook for hook in HOOKS if overrides(callback, hook)]


def name_of(callback: Any) -> str:
    """What a callback is called in what a check says."""
    return str(getattr(callback, "state_key", None) or type(callback).__qualname__)


@contextmanager
def quietly() -> Iterator[io.StringIO]:
    """What is printed, logged or warned of in the block is not shown; gives what went to stderr."""
    errors, log = io.StringIO(), logging.getLogger("accel_callbacks")
    level = log.level
    with (
        contextlib.ExitStack() as stack,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        log.setLevel(logging.CRITICAL + 1)
        stack.callback(log.setLevel, level)
        yield errors


@contextmanager
def kept_in_memory() -> Iterator[str]:
    """A URL for checkpoints, which are gone after the block."""
    import fsspec

    root = f"accel-testing-{uuid.uuid4().hex}"
    try:
        yield f"memory://{root}"
    finally:
        store = fsspec.filesystem("memory")
        if store.exists(f"/{root}"):
            store.rm(f"/{root}", recursive=True)
