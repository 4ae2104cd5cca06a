"""Checks of a callback's state: in a second run, in a checkpoint, and after a resume."""

from __future__ import annotations

from typing import Any

from accel_callbacks.callbacks.recognising import overrides
from accel_callbacks.testing.neighbours import SavesEachPlace
from accel_callbacks.testing.states import differences, foreign, state_of, volatile
from accel_callbacks.testing.subject import Subject, kept_in_memory, name_of
from accel_callbacks.testing.training import TinyTraining

__all__ = ["CHECKS", "reference_of"]


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
