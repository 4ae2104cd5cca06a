"""Checks of saved state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from accel_callbacks.callbacks.dispatch.registration import overrides
from accel_callbacks.testing.run_checks import SavesEachPlace, Subject, kept_in_memory, name_of
from accel_callbacks.testing.training import FOLDER_PREFIX, TinyTraining

__all__ = ["CHECKS", "differences", "foreign", "reference_of", "state_of", "volatile"]

_FOLDER = re.compile(rf"[^\s:]*{FOLDER_PREFIX}\w+")
_PLAIN = (bool, int, float, str, type(None))


def state_of(callback: Any) -> Any:
    """A copy of a callback's state, in which the folders of tiny trainings have one name."""
    give = getattr(callback, "state_dict", None)
    return _moved(deepcopy(give())) if give is not None else {}


def _moved(state: Any) -> Any:
    if isinstance(state, str):
        return _FOLDER.sub("<folder>", state)
    if type(state) in (list, tuple, dict):
        items = ((k, _moved(v)) for k, v in state.items()) if isinstance(state, dict) else None
        return type(state)(items if items is not None else map(_moved, state))
    return state


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """What a state holds, by a path such as ``best/0``; a container without content is a leaf."""
    if isinstance(state, Mapping) and state:
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)) and state:
        items = [(str(index), value) for index, value in enumerate(state)]
    else:
        return {path: state}
    found: dict[str, Any] = {}
    for key, value in items:
        found.update(leaves(value, f"{path}/{key}" if path else key))
    return found


def foreign(state: Any, path: str = "state_dict()") -> list[str]:
    """What must not be in a state: keys that are no text, objects that are no plain values."""
    if isinstance(state, Mapping):
        wrong = [f"a key of {path} is {key!r}" for key in state if not isinstance(key, str)]
        return wrong + [w for key, one in state.items() for w in foreign(one, f"{path}[{key!r}]")]
    if isinstance(state, (list, tuple)):
        return [wrong for i, one in enumerate(state) for wrong in foreign(one, f"{path}[{i}]")]
    if isinstance(state, (*_PLAIN, torch.Tensor)):
        return []
    return [f"{path} is a {type(state).__qualname__}"]


def differences(first: Any, second: Any, *, but: set[str] | frozenset[str] = frozenset()) -> str:
    """What two states do not have in common, as text; empty if they are the same."""
    one, other = leaves(first), leaves(second)
    told = [
        f"{path}: {_shown(one, path)} and {_shown(other, path)}"
        for path in sorted({*one, *other} - but)
        if path not in one or path not in other or not _same(one[path], other[path])
    ]
    return "; ".join(told)


def volatile(first: Any, second: Any) -> set[str]:
    """What differs between two runs that did the same because it is of a clock or a random name."""
    one, other = leaves(first), leaves(second)
    return {
        path
        for path in {*one, *other}
        if isinstance(one.get(path), (float, str))
        and isinstance(other.get(path), (float, str))
        and not _same(one[path], other[path])
    }


def _shown(found: dict[str, Any], path: str) -> str:
    return repr(found[path]) if path in found else "nothing"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other.to(one.device), equal_nan=True)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)
    return type(one) is type(other) and bool(one == other)


class Reference:
    """The state after an undisturbed run, and what of it no two runs have in common.

    Args:
        subject: whose.
        **options: of the training.

    Raises:
        AssertionError: two equal runs end differently, or the state is not plain.
    """

    def __init__(self, subject: Subject, **options: Any) -> None:
        callback, training = subject.training(**options)
        training.play()
        self.state = state_of(callback)
        refuse_foreign(callback, self.state)
        self.weights = _weights(training)
        other, again = subject.training(**options)
        again.play()
        if other is callback:
            raise AssertionError("the factory gives the same callback twice: it must make one.")
        state = state_of(other)
        self.volatile = volatile(self.state, state)
        told = differences(self.state, state, but=self.volatile)
        if told:
            raise AssertionError(
                f"two equal runs, each with a new {name_of(callback)}, end with different states: "
                f"{told}. Is something kept on the class, or drawn from a generator of its own?"
            )

    def compare(self, callback: Any) -> str:
        """What another state has not in common with it."""
        return differences(self.state, state_of(callback), but=self.volatile)


def reference_of(subject: Subject, **options: Any) -> Reference:
    """The reference of trainings with these options, made once for all checks of a subject."""
    key = repr(sorted(options.items()))
    if key not in subject.kept:
        subject.kept[key] = Reference(subject, **options)
    found: Reference = subject.kept[key]
    return found


def refuse_foreign(callback: Any, state: Any) -> None:
    """Say what in a state cannot be saved."""
    wrong = foreign(state)
    if wrong:
        raise AssertionError(
            f"{name_of(callback)} cannot be saved so: {wrong[0]}. A state holds dicts with text "
            "as keys, lists, numbers, text, None and tensors, and nothing else."
        )


def begins_anew(subject: Subject) -> None:
    """A second run with the same callback is like the first."""
    reference = reference_of(subject)
    callback, training = subject.training()
    training.play()
    training.begin_again().play()
    told = reference.compare(callback)
    if told:
        raise AssertionError(
            f"{name_of(callback)} does not begin anew in a second run. After the first and after "
            f"the second: {told}. Reset it in `setup`, unless run.resumed_from is set."
        )


def goes_through_a_checkpoint(subject: Subject) -> None:
    """The state is plain, and after a load the same as when it was saved."""
    with kept_in_memory() as root:
        clocks = reference_of(subject).volatile
        saves = _SavesOnce(f"{root}/saved")
        callback, training = subject.training(each_batch=saves)
        saves.callback = callback
        training.play()
        fresh, other = subject.training()
        for one, owner, kind in ((callback, training, "used"), (fresh, other, "new")):
            with owner.begin_again().accel.run("restored", resume=f"{root}/saved"):
                told = differences(saves.state, state_of(one), but=clocks)
            if told:
                raise AssertionError(
                    f"{name_of(one)} is not restored by a resume. When it was saved, and in a "
                    f"{kind} one after that: {told}."
                )
            if not any(known is one for known in owner.accel.callbacks):
                raise AssertionError(f"{name_of(one)} is another object after a resume.")


class _SavesOnce:
    """Saves in the second epoch, and keeps what was saved.

    Args:
        path: where.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.callback: Any = None
        self.state: Any = None

    def __call__(self, training: TinyTraining) -> None:
        if training.run.current_epoch == 1 and self.state is None:
            self.state = state_of(self.callback)
            refuse_foreign(self.callback, self.state)
            training.accel.save_state(self.path)


def resumes(subject: Subject) -> None:
    """Interrupted after each step and each epoch, a resumed run ends like an undisturbed one."""
    with kept_in_memory() as root:
        saver = SavesEachPlace(f"{root}/first")
        reference = Reference(subject, after=[saver], batches=2)
        for number, (place, path) in enumerate(saver.places.items()):
            made = subject.make()
            watched = any(overrides(made[0], hook) for hook in _OF_SAVES)
            more = [SavesEachPlace(f"{root}/{number}")] if watched else []
            callback, training = subject.training(made=made, after=more, batches=2)
            training.play(resume=path)
            told = reference.compare(callback)
            told = told or differences(reference.weights, _weights(training))
            if told:
                raise AssertionError(
                    f"{name_of(callback)} is not the same after a resume. Interrupted at {place}, "
                    f"the undisturbed run and the resumed one end with: {told}."
                )


_OF_SAVES = ("on_save_checkpoint", "on_checkpoint_saved")


def _weights(training: TinyTraining) -> dict[str, Any]:
    weights = training.accel.unwrap_model(training.model).state_dict()
    return {f"weight {name}": weight.clone() for name, weight in weights.items()}


CHECKS = {
    "second_run": begins_anew,
    "state": goes_through_a_checkpoint,
    "resume": resumes,
}
