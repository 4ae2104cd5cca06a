"""Check that the state of our own callbacks is plain, and restored by a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_callbacks.testing import checks
from accel_callbacks.testing.checks import Reference, Subject, name_of
from accel_callbacks.testing.states import differences, state_of
from accel_callbacks.testing.training import TinyTraining

__all__ = ["CHECKS"]

_PLAIN = (bool, int, float, str, type(None))


def saves_and_loads(subject: Subject) -> None:
    """Check that the state is plain, and the same after a load as when it was saved."""
    with checks.memory_folder() as root:
        ignored = Reference(subject).volatile
        saver = _SavesOnce(f"{root}/saved")
        callback, training = subject.training(each_batch=saver)
        saver.callback = callback
        training.play()
        fresh, other = subject.training()
        for checked, owner, kind in ((callback, training, "used"), (fresh, other, "new")):
            with owner.begin_again().accel.run("restored", resume=f"{root}/saved"):
                changed = differences(saver.state, state_of(checked), but=ignored)
            if changed:
                raise AssertionError(
                    f"{name_of(checked)} is not restored by a resume. When it was saved, and in a "
                    f"{kind} one after that: {changed}."
                )
            if not any(known is checked for known in owner.accel.callbacks):
                raise AssertionError(f"{name_of(checked)} is another object after a resume.")


class _SavesOnce:
    """An ``each_batch`` that saves in the second epoch, and copies the callback's state.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.callback: Any = None
        self.state: Any = None

    def __call__(self, training: TinyTraining) -> None:
        if training.run.current_epoch == 1 and self.state is None:
            self.state = state_of(self.callback)
            require_plain(self.callback)
            training.accel.save_state(self.path)


def require_plain(callback: Any) -> None:
    """Raise AssertionError if a state cannot be saved."""
    problems = unsupported(getattr(callback, "state_dict", dict)())
    if problems:
        raise AssertionError(
            f"the state of {name_of(callback)} cannot be saved: {problems[0]}. A state consists of "
            "dicts with text as keys, lists, numbers, text, None and tensors, and nothing else."
        )


def unsupported(state: Any, path: str = "state_dict()") -> list[str]:
    """Describe unsupported parts of a state: keys that are not text, values that are not plain."""
    if isinstance(state, Mapping):
        keys = [f"a key of {path} is {key!r}" for key in state if not isinstance(key, str)]
        items = [(f"{path}[{key!r}]", value) for key, value in state.items()]
        return keys + [problem for inner, value in items for problem in unsupported(value, inner)]
    if isinstance(state, (list, tuple)):
        return [
            problem
            for i, value in enumerate(state)
            for problem in unsupported(value, f"{path}[{i}]")
        ]
    if isinstance(state, (*_PLAIN, torch.Tensor)):
        return []
    return [f"{path} is a {type(state).__qualname__}"]


CHECKS: dict[str, Callable[[Any], None]] = {"state": saves_and_loads}
