"""A callback that writes every hook down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accel_callbacks.callbacks.base import HOOKS, Callback
from accel_callbacks.callbacks.functions import checked_hook

__all__ = ["Recorder", "record"]


class Recorder(Callback):
    """Writes down each hook that is called, in a line of its own.

    A line is the hook without its ``on_``, and what tells this call from others: of a batch its
    number, of an epoch its number, of an optimizer step the steps so far, of a log its names and
    its step.

    Args:
        name: the ``state_key``, so that several can be there.
        only: hooks to write down; all if ``None``. Their ``on_`` may be left out.

    Attributes:
        trace: the lines.

    Raises:
        ValueError: ``only`` names what is no hook.

    Example:
        >>> from accel_callbacks.testing import Recorder, tiny_training
        >>> recorder = Recorder(only=["train_epoch_start", "train_epoch_end"])
        >>> _ = tiny_training([recorder], epochs=2)
        >>> recorder.trace
        ['train_epoch_start 0', 'train_epoch_end 0', 'train_epoch_start 1', 'train_epoch_end 1']
    """

    def __init__(self, name: str = "Recorder", *, only: Iterable[str] | None = None) -> None:
        self.name = name
        self.trace: list[str] = []
        for hook in HOOKS if only is None else map(checked_hook, only):
            setattr(self, hook, self._writer(hook))

    @property
    def state_key(self) -> str:
        """The name that it was given."""
        return self.name

    def _writer(self, hook: str) -> Callable[..., None]:
        return lambda run, model, *args: self.trace.append(line_of(hook, run, args))

    def take(self) -> list[str]:
        """The lines that were written since the last call."""
        taken, self.trace[:] = list(self.trace), []
        return taken

    def assert_order(self, *expected: str) -> None:
        """The lines come in this order; others may come between them.

        Args:
            *expected: a whole line, or a hook for the next line of it.

        Raises:
            AssertionError: they do not. It shows what came, and which one is missing.

        Example:
            >>> from accel_callbacks.testing import tiny_training
            >>> done = tiny_training(epochs=1)
            >>> done.recorder.assert_order("train_batch_start 1", "after_backward", "train_end")
        """
        rest = iter(self.trace)
        for number, one in enumerate(expected):
            wanted = one.removeprefix("on_")
            if not _reaches(rest, wanted):
                before = f" after {expected[number - 1]!r}" if number else ""
                seen = "\n  ".join(self.trace) or "nothing"
                raise AssertionError(f"{wanted!r} did not come{before}. This did:\n  {seen}")

    def __str__(self) -> str:
        return "\n".join(self.trace)


def record(*only: str) -> Recorder:
    """A callback that writes down each hook, or those that are named.

    Raises:
        ValueError: what is named is no hook.

    Example:
        >>> from accel_callbacks.testing import record, tiny_training
        >>> steps = record("after_optimizer_step")
        >>> _ = tiny_training([steps], epochs=1, batches=2)
        >>> steps.trace
        ['after_optimizer_step 1', 'after_optimizer_step 2']
    """
    return Recorder(only=only or None)


def _reaches(lines: Iterator[str], wanted: str) -> bool:
    """Read on until the line is there, whole or by its hook."""
    return any(wanted in (line, line.partition(" ")[0]) for line in lines)


def line_of(hook: str, run: Any, args: tuple[Any, ...]) -> str:
    """One call as a line."""
    facts = _FACTS.get(hook)
    told = facts(run, args) if facts is not None else ()
    return " ".join([hook.removeprefix("on_"), *map(str, told)])


def _epoch(run: Any, args: tuple[Any, ...]) -> Iterable[Any]:
    return (run.current_epoch,)


def _given(first: int) -> Callable[[Any, tuple[Any, ...]], Iterable[Any]]:
    return lambda run, args: args[first:]


_FACTS: dict[str, Callable[[Any, tuple[Any, ...]], Iterable[Any]]] = {
    "setup": _given(0),
    "teardown": _given(0),
    "on_preempt": _given(0),
    "on_train_epoch_start": _epoch,
    "on_train_epoch_end": _epoch,
    **{f"on_{stage}_batch_start": _given(1) for stage in ("train", "validation", "test")},
    **{f"on_{stage}_batch_end": _given(2) for stage in ("train", "validation", "test")},
    "on_after_optimizer_step": lambda run, args: (run.global_step,),
    "on_log": lambda run, args: (*args[0], args[1]),
    "on_exception": lambda run, args: (type(args[0]).__name__,),
}
