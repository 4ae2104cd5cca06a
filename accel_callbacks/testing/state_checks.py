"""Checks of a callback's state: it is reset, saved and restored."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from accel_callbacks.callbacks.dispatch.registration import overrides
from accel_callbacks.gradients import local_part
from accel_callbacks.testing.run_checks import SavesEachPosition, Subject, memory_folder, name_of
from accel_callbacks.testing.training import FOLDER_PREFIX, TinyTraining

__all__ = ["CHECKS", "differences", "reference_of", "state_of", "unsupported", "volatile"]

_FOLDER = re.compile(rf"[^\s:]*{FOLDER_PREFIX}\w+")
_PLAIN = (bool, int, float, str, type(None))
_SAVE_HOOKS = ("on_save_checkpoint", "on_checkpoint_saved")


def resets_in_second_run(subject: Subject) -> None:
    """Check that a second run with the same callback ends in the state of the first."""
    reference = reference_of(subject)
    callback, training = subject.training()
    training.play()
    training.begin_again().play()
    changed = reference.compare(callback)
    if changed:
        raise AssertionError(
            f"{name_of(callback)} does not reset its state in a second run. After the first and "
            f"after the second: {changed}. Reset it in `setup`, unless run.resumed_from is set."
        )


def saves_and_loads(subject: Subject) -> None:
    """Check that the state is plain, and the same after a load as when it was saved."""
    with memory_folder() as root:
        ignored = reference_of(subject).volatile
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
            require_plain(self.callback, self.state)
            training.accel.save_state(self.path)


def resumes(subject: Subject) -> None:
    """Check that a run resumed after each step and epoch ends like an uninterrupted one."""
    with memory_folder() as root:
        saver = SavesEachPosition(f"{root}/first")
        reference = Reference(subject, after=[saver], batches=2)
        for number, (position, path) in enumerate(saver.paths.items()):
            instances = subject.make()
            # A callback with hooks of saves must see as many of them as in the reference.
            has_save_hooks = any(overrides(instances[0], hook) for hook in _SAVE_HOOKS)
            more = [SavesEachPosition(f"{root}/{number}")] if has_save_hooks else []
            callback, training = subject.training(made=instances, after=more, batches=2)
            training.play(resume=path)
            changed = reference.compare(callback)
            changed = changed or differences(reference.weights, _weights(training))
            if changed:
                raise AssertionError(
                    f"{name_of(callback)} is not the same after a resume. Interrupted at "
                    f"{position}, the uninterrupted run and the resumed one end with: {changed}."
                )


def _weights(training: TinyTraining) -> dict[str, Any]:
    weights = training.accel.unwrap_model(training.model).state_dict()
    return {f"weight {name}": weight.clone() for name, weight in weights.items()}


class Reference:
    """The state after an uninterrupted run, and the paths in it that differ between equal runs.

    Args:
        subject: the checked callback.
        **options: of the training.

    Raises:
        AssertionError: two equal runs end with different states, or the state is not plain.
    """

    def __init__(self, subject: Subject, **options: Any) -> None:
        callback, training = subject.training(**options)
        training.play()
        self.state = state_of(callback)
        require_plain(callback, self.state)
        self.weights = _weights(training)
        other, again = subject.training(**options)
        again.play()
        if other is callback:
            raise AssertionError(
                "the factory returns the same callback twice: it must make a new one."
            )
        state = state_of(other)
        self.volatile = volatile(self.state, state)
        changed = differences(self.state, state, but=self.volatile)
        if changed:
            raise AssertionError(
                f"two equal runs, each with a new {name_of(callback)}, end with different states: "
                f"{changed}. Is state kept on the class, or drawn from a separate random generator?"
            )

    def compare(self, callback: Any) -> str:
        """Describe the differences between this state and that of a callback."""
        return differences(self.state, state_of(callback), but=self.volatile)


def reference_of(subject: Subject, **options: Any) -> Reference:
    """Return the reference of trainings with these options, made once for all checks."""
    key = repr(sorted(options.items()))
    if key not in subject.cache:
        subject.cache[key] = Reference(subject, **options)
    reference: Reference = subject.cache[key]
    return reference


def require_plain(callback: Any, state: Any) -> None:
    """Raise AssertionError if a state cannot be saved."""
    problems = unsupported(state)
    if problems:
        raise AssertionError(
            f"the state of {name_of(callback)} cannot be saved: {problems[0]}. A state consists of "
            "dicts with text as keys, lists, numbers, text, None and tensors, and nothing else."
        )


def state_of(callback: Any) -> Any:
    """Copy a callback's state, with the same name for the folders of all tiny trainings."""
    state_dict = getattr(callback, "state_dict", None)
    return _normalized(deepcopy(state_dict())) if state_dict is not None else {}


def _normalized(state: Any) -> Any:
    if isinstance(state, str):
        return _FOLDER.sub("<folder>", state)
    if type(state) in (list, tuple, dict):
        items = ((k, _normalized(v)) for k, v in state.items()) if isinstance(state, dict) else None
        return type(state)(items if items is not None else map(_normalized, state))
    return state


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


def differences(first: Any, second: Any, *, but: set[str] | frozenset[str] = frozenset()) -> str:
    """Describe the differences of two states, except for some paths; empty if there are none."""
    before, after = leaves(first), leaves(second)
    changed = [
        f"{path}: {_shown(before, path)} and {_shown(after, path)}"
        for path in sorted({*before, *after} - but)
        if path not in before or path not in after or not _same(before[path], after[path])
    ]
    return "; ".join(changed)


def volatile(first: Any, second: Any) -> set[str]:
    """Return paths that differ between equal runs: times and random names."""
    before, after = leaves(first), leaves(second)
    return {
        path
        for path in {*before, *after}
        if isinstance(before.get(path), (float, str))
        and isinstance(after.get(path), (float, str))
        and not _same(before[path], after[path])
    }


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Flatten a state to its leaves, by a path such as ``best/0``; empty containers are leaves."""
    if isinstance(state, Mapping) and state:
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)) and state:
        items = [(str(index), value) for index, value in enumerate(state)]
    else:
        return {path: state}
    by_path: dict[str, Any] = {}
    for key, value in items:
        by_path.update(leaves(value, f"{path}/{key}" if path else key))
    return by_path


def _shown(by_path: dict[str, Any], path: str) -> str:
    return repr(by_path[path]) if path in by_path else "nothing"


def _same(first: Any, other: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        first, other = local_part(first), local_part(other)
        same_kind = first.shape == other.shape and first.dtype == other.dtype
        return same_kind and torch.allclose(first, other.to(first.device), equal_nan=True)
    if isinstance(first, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(first, float) and isinstance(other, float):
        both_nan = math.isnan(first) and math.isnan(other)
        return both_nan or math.isclose(first, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(first) is type(other) and bool(first == other)


CHECKS = {
    "second_run": resets_in_second_run,
    "state": saves_and_loads,
    "resume": resumes,
}
