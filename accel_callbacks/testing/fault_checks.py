"""Checks that an error, wherever it comes from, leaves nothing of a callback behind."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.testing.leaks import Surroundings
from accel_callbacks.testing.neighbours import Injected, Raises, Witness
from accel_callbacks.testing.state_checks import reference_of
from accel_callbacks.testing.subject import Subject, kept_in_memory, name_of, quietly
from accel_callbacks.testing.training import TinyTraining

__all__ = ["CHECKS"]

_SHORT = {"epochs": 1, "batches": 2, "test": True}
_SAVES = ("on_save_checkpoint", "on_checkpoint_saved", "on_load_checkpoint")
_STAGES = ("train", "validation", "test")
_ERROR_LINE = re.compile(r"^(?!Traceback)[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*", re.M)


def fails_beside(subject: Subject, *, before: bool) -> None:
    """A neighbour raises in each hook, called before the callback or after it."""
    trouble = _Trouble(subject, before=before)
    with kept_in_memory() as root:
        for hook in HOOKS:
            where = f"a neighbour {'before' if before else 'after'} it raised in {hook}"
            trouble.meet(where, partial(_play_to, trouble, hook, root))
            assert trouble.raiser.raised or trouble.training.run.should_stop, f"{hook} never came"
    trouble.check_afterwards()


def fails_in_the_loop(subject: Subject) -> None:
    """The body of the loop raises, in training, in a validation and in a test."""
    trouble = _Trouble(subject, before=False)
    for stage in _STAGES:
        for kind in (Injected, KeyboardInterrupt):
            where = f"the loop raised {kind.__name__} in its {stage} part"
            trouble.meet(where, partial(_play_until, trouble, stage, kind))
    trouble.check_afterwards()


class _Trouble:
    """One training that meets error after error.

    Args:
        subject: whose callback is in it.
        before: the neighbour that raises is called before the callback, not after it.
    """

    def __init__(self, subject: Subject, *, before: bool) -> None:
        self.reference = reference_of(subject, **_SHORT)
        self.made = subject.make()
        callback = self.made[0]
        self.raiser = Raises(callback, "Raises")
        self.witness = Witness(callback)
        self.stage = ""
        self.kind: type[BaseException] = Injected
        first, last = ([self.raiser], []) if before else ([], [self.raiser])
        late = Witness(callback, self.witness)
        self.callback, self.training = subject.training(
            made=self.made, before=[self.witness, *first], after=[late, *last], **_SHORT
        )
        inner = self.training._loss

        def loss(model: Any, batch: Any) -> Any:
            if self.training.accel.loop.phase == self.stage:
                raise self.kind(f"an error in {self.stage}")
            return inner(model, batch)

        self.training._loss = loss

    def meet(self, where: str, play: Callable[[], None]) -> None:
        """Let an error end a run, and look what it has left."""
        model = self.training.accel.unwrap_model(self.training.model)
        self.training.begin_again()
        with quietly() as printed:
            before = Surroundings(model)
            told = self._played(play)
            told += before.changes() + _printed_errors(printed)
        told += [f"weight {name} is not what was trained" for name in self.witness.changed(model)]
        if told:
            raise AssertionError(
                f"{name_of(self.callback)} does not tidy up: after {where}, {'; '.join(told)}. "
                "Put things back in `teardown`, which always comes."
            )

    def _played(self, play: Callable[[], None]) -> list[str]:
        try:
            play()
        except (Injected, KeyboardInterrupt):
            return []
        except SystemExit:
            if self.training.run.preempted:
                return []
            raise
        except Exception as error:
            return [f"it hid the error behind {type(error).__name__}: {error}"]
        return []

    def check_afterwards(self) -> None:
        """After all of them, a run is as if nothing had been."""
        self.raiser.arm("")
        self.stage = ""
        self.training.each_batch = None
        self.training.begin_again().play()
        told = self.reference.compare(self.callback)
        if told:
            raise AssertionError(
                f"{name_of(self.callback)} does not begin anew after runs that ended with an "
                f"error. In the first run of a new one, and in this one: {told}."
            )


def _play_to(trouble: _Trouble, hook: str, root: str) -> None:
    """Play a training in which this hook comes, and the neighbour raises in it."""
    training = trouble.training
    trouble.raiser.arm("")
    training.each_batch = partial(_provoke, hook=hook, path=f"{root}/{hook}")
    if hook == "on_load_checkpoint":
        training.play()
    trouble.raiser.arm(hook)
    training.play(resume=f"{root}/{hook}" if hook == "on_load_checkpoint" else False)


def _provoke(training: TinyTraining, *, hook: str, path: str) -> None:
    """Do in the loop what makes a rare hook come."""
    if training.run.global_step != 1:
        return
    if hook in _SAVES:
        training.accel.save_state(path)
    elif hook == "on_preempt":
        training.run.preempt("a check")
    elif hook == "on_exception":
        raise Injected("an error in the loop")


def _play_until(trouble: _Trouble, stage: str, kind: type[BaseException]) -> None:
    """Play until the loss of a stage is asked for."""
    trouble.stage, trouble.kind = stage, kind
    trouble.training.play()


def _printed_errors(printed: io.StringIO) -> list[str]:
    """Errors of hooks that came while another one unwound: those are shown, not raised."""
    lines = _ERROR_LINE.findall(printed.getvalue())
    return [f"its own hook failed too: {line}" for line in lines if "Injected" not in line]


CHECKS: dict[str, Callable[[Subject], None]] = {
    "error_before": partial(fails_beside, before=True),
    "error_after": partial(fails_beside, before=False),
    "error_in_loop": fails_in_the_loop,
}
