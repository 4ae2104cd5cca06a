"""check_callback: check that a callback works whatever a loop does."""

from __future__ import annotations

import contextlib
import io
import logging
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.dispatch.registration import accepted, overrides
from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.errors import nearest
from accel_callbacks.testing.hooks import fire
from accel_callbacks.testing.states import differences, state_of, volatile
from accel_callbacks.testing.training import TinyTraining, seeded_rng

__all__ = [
    "CHECKS",
    "Check",
    "Injected",
    "Reference",
    "SavesEachPosition",
    "Subject",
    "callback_checks",
    "captured_output",
    "check_callback",
    "hooks_of",
    "isolated",
    "memory_folder",
    "name_of",
]

_SAVE_HOOKS = ("on_save_checkpoint", "on_checkpoint_saved")


@dataclass(frozen=True)
class Check:
    """One check of one callback; call it without arguments.

    Args:
        name: such as ``"resume"``.
        run: the function to call.

    Raises:
        AssertionError: when called, if the callback violates the contract.

    Example:
        >>> from accel_callbacks.callbacks import LearningRateMonitor
        >>> from accel_callbacks.testing import callback_checks
        >>> check = callback_checks(LearningRateMonitor)[0]
        >>> print(check)
        whole_runs
        >>> check()
    """

    name: str
    run: Callable[[], None] = field(repr=False)

    def __call__(self) -> None:
        """Run the check."""
        self.run()

    def __str__(self) -> str:
        return self.name


def callback_checks(
    factory: Callable[[], Any], *, skip: Sequence[str] = (), **training: Any
) -> list[Check]:
    """Return the checks of a callback one by one, to parametrize a test.

    Args:
        factory: makes a new callback: its class, or a function. If the callback depends on others,
            the function returns a list of it and these.
        skip: names of checks to skip.
        **training: options of :class:`TinyTraining`, such as ``model`` and ``data``, if the
            callback needs certain ones.

    Raises:
        ValueError: ``skip`` names an unknown check.

    Example:
        >>> from accel_callbacks.callbacks import Timer
        >>> from accel_callbacks.testing import callback_checks
        >>> ", ".join(map(str, callback_checks(Timer, skip=["break"])))
        'whole_runs, window, second_run, resume'
    """
    for name in skip:
        if name not in CHECKS:
            raise ValueError(f"skip: {name!r} is no check.{nearest(name, CHECKS)}")
    subject = Subject(factory, training)
    return [
        Check(name, isolated(check, subject)) for name, check in CHECKS.items() if name not in skip
    ]


def check_callback(
    factory: Callable[[], Any], *, skip: Sequence[str] = (), **training: Any
) -> None:
    """Run all checks on a callback; the arguments are those of :func:`callback_checks`.

    Raises:
        AssertionError: the callback violates the contract. The message says what to change.
        ValueError: as for :func:`callback_checks`.

    Example:
        >>> from accel_callbacks import Callback
        >>> from accel_callbacks.testing import check_callback
        >>> class Steps(Callback):
        ...     steps = 0
        ...
        ...     def on_after_optimizer_step(self, run, model, optimizer):
        ...         self.steps += 1
        ...
        ...     def state_dict(self):
        ...         return {"steps": self.steps}
        >>> check_callback(Steps)
        Traceback (most recent call last):
        AssertionError: Steps does not reset its state in a second run. After the first and after \
the second: steps: 6 and 12. Reset it in `setup`, unless run.resumed_from is set.
    """
    for check in callback_checks(factory, skip=skip, **training):
        check()


def isolated(check: Callable[[Any], None], subject: Any) -> Callable[[], None]:
    """Wrap a check so that it prints nothing and restores the state of the process."""

    def run() -> None:
        was_initialized = is_initialized()
        try:
            with captured_output(), seeded_rng(torch.device("cpu")):
                check(subject)
        finally:
            if not was_initialized:
                destroy_topology()

    return run


@contextmanager
def captured_output() -> Iterator[io.StringIO]:
    """Suppress prints, logs and warnings in the block; yields the output to stderr."""
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


class Subject:
    """A callback's factory, and the options of its trainings.

    Args:
        factory: makes a new callback, or a list of one and those that it depends on.
        options: of the trainings.
    """

    def __init__(self, factory: Callable[[], Any], options: dict[str, Any]) -> None:
        self._factory = factory
        self._options = options

    def make(self) -> tuple[Any, list[Any]]:
        """Return a new callback as it is registered, and those that it depends on."""
        callbacks = self._factory()
        callback, *others = callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,)
        return accepted(callback), others

    def training(
        self,
        *,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        made: tuple[Any, list[Any]] | None = None,
        **options: Any,
    ) -> tuple[Any, TinyTraining]:
        """Return a callback (a new one unless ``made`` is given), and a training with it."""
        callback, others = made or self.make()
        settings = {**options, **self._options}
        return callback, TinyTraining([*before, callback, *others, *after], **settings)


def hooks_of(callback: Any) -> list[str]:
    """Return the hooks that a callback has."""
    return [hook for hook in HOOKS if overrides(callback, hook)]


def name_of(callback: Any) -> str:
    """Return the name of a callback for messages."""
    return str(getattr(callback, "state_key", None) or type(callback).__qualname__)


@contextmanager
def memory_folder() -> Iterator[str]:
    """Yield the URL of a folder in memory that is removed after the block."""
    import fsspec

    root = f"accel-testing-{uuid.uuid4().hex}"
    try:
        yield f"memory://{root}"
    finally:
        store = fsspec.filesystem("memory")
        if store.exists(f"/{root}"):
            store.rm(f"/{root}", recursive=True)


# --- the checks -------------------------------------------------------------------------------


class Injected(Exception):
    """The error that a check injects."""


def _check_whole_runs(subject: Subject) -> None:
    """Check every hook in a run with evaluations, a save and a preemption, a resume, an error."""
    with memory_folder() as root:
        callback, training = subject.training(test=True, each_batch=_save_and_preempt(root))
        _play(training)
        training.each_batch = _raise
        try:
            training.begin_again()
            _play(training, resume=f"{root}/saved")
        except Injected:
            pass
        called = {row.hook for row in training.accel.callback_report().rows if row.calls}
        run = training.run
    for hook in hooks_of(callback):
        if hook not in called:  # for example because the callback stopped the run before
            fire(callback, hook, run=run)


def _save_and_preempt(root: str) -> Callable[[TinyTraining], None]:
    """Return an ``each_batch`` that saves in the first batch, and preempts in the second epoch."""

    def each_batch(training: TinyTraining) -> None:
        run = training.run
        if (run.current_epoch, run.batch_idx) == (0, 0):
            training.accel.save_state(f"{root}/saved")
            run.save_now("a check")
        if (run.current_epoch, run.batch_idx) == (1, 0):
            run.preempt("a check")

    return each_batch


def _raise(training: TinyTraining) -> None:
    raise Injected("an error in the loop")


def _play(training: TinyTraining, **options: Any) -> None:
    """Play, and ignore a ``SystemExit`` after a preemption."""
    try:
        training.play(**options)
    except SystemExit:
        if not training.run.preempted:
            raise


def _check_windows(subject: Subject) -> None:
    """Check a run that accumulates gradients, with a shorter window at the end of each epoch."""
    subject.training(window=2, batches=3)[1].play()


def _check_breaks(subject: Subject) -> None:
    """Check a loop that leaves each epoch with ``break``."""
    for index in (0, 1):
        subject.training(leave_at=index, batches=3)[1].play()


def _check_second_run(subject: Subject) -> None:
    """Check that a second run with the same callback ends in the state of the first."""
    reference = Reference(subject)
    callback, training = subject.training()
    training.play()
    training.begin_again().play()
    changed = reference.compare(callback)
    if changed:
        raise AssertionError(
            f"{name_of(callback)} does not reset its state in a second run. After the first and "
            f"after the second: {changed}. Reset it in `setup`, unless run.resumed_from is set."
        )


def _check_resume(subject: Subject) -> None:
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
            changed = reference.compare(callback, training)
            if changed:
                raise AssertionError(
                    f"{name_of(callback)} is not the same after a resume. Interrupted at "
                    f"{position}, the uninterrupted run and the resumed one end with: {changed}."
                )


class Reference:
    """The ends of two equal runs, and the paths of the state in which these differ.

    Args:
        subject: the checked callback.
        **options: of the trainings.

    Raises:
        AssertionError: the runs end with different states.
    """

    def __init__(self, subject: Subject, **options: Any) -> None:
        callback, training = subject.training(**options)
        training.play()
        self._state, self._weights = state_of(callback), _weights(training)
        other, again = subject.training(**options)
        again.play()
        if other is callback:
            raise AssertionError(
                "the factory returns the same callback twice: it must make a new one."
            )
        self.volatile = volatile(self._state, state_of(other))
        changed = self.compare(other)
        if changed:
            raise AssertionError(
                f"two equal runs, each with a new {name_of(callback)}, end with different states: "
                f"{changed}. Is state kept on the class, or drawn from a separate random generator?"
            )

    def compare(self, callback: Any, training: TinyTraining | None = None) -> str:
        """Describe how a callback, and what was trained, differ from the end of these runs."""
        changed = differences(self._state, state_of(callback), but=self.volatile)
        if changed or training is None:
            return changed
        return differences(self._weights, _weights(training))


def _weights(training: TinyTraining) -> dict[str, Any]:
    weights = training.accel.unwrap_model(training.model).state_dict()
    return {f"weight {name}": weight.clone() for name, weight in weights.items()}


class SavesEachPosition:
    """Save the training state at the end of each batch and each epoch, after other callbacks.

    Args:
        root: folder or URL.

    Attributes:
        paths: the checkpoints, by a description of their position.
    """

    runs_last = True
    state_key = "SavesEachPosition"

    def __init__(self, root: str) -> None:
        self.root = root
        self.paths: dict[str, str] = {}

    def on_train_batch_end(self, run: Any, model: Any, *args: Any) -> None:
        """Save the end of a batch."""
        self._save(run, f"step {run.global_step}, batch {run.batch_idx}")

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        """Save the end of an epoch."""
        self._save(run, f"the end of epoch {run.current_epoch + 1}")

    def _save(self, run: Any, position: str) -> None:
        if position not in self.paths:
            self.paths[position] = f"{self.root}/{len(self.paths)}"
            run.save_checkpoint(self.paths[position])


CHECKS: dict[str, Callable[[Subject], None]] = {
    "whole_runs": _check_whole_runs,
    "window": _check_windows,
    "break": _check_breaks,
    "second_run": _check_second_run,
    "resume": _check_resume,
}
