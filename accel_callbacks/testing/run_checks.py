"""Checks that run a callback in trainings, and what all checks share."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS
from accel_callbacks.callbacks.dispatch.functions import checked_hook
from accel_callbacks.callbacks.dispatch.registration import accepted, configured, overrides, saves
from accel_callbacks.testing.hooks import arguments_of, fire
from accel_callbacks.testing.host_sync import host_syncs
from accel_callbacks.testing.training import TinyTraining

__all__ = [
    "CHECKS",
    "Injected",
    "Neighbor",
    "Raises",
    "SavesEachPosition",
    "Subject",
    "WeightRecorder",
    "captured_output",
    "memory_folder",
]

_NOT_TRAINING = ("validation", "test", "log", "checkpoint", "exception", "preempt")
#: Hooks in which the models hold the trained weights.
_TRAINING_HOOKS = [
    hook
    for hook in HOOKS
    if hook not in EXIT_HOOKS and not any(word in hook for word in _NOT_TRAINING)
]
#: Hooks of each batch and step, which must not wait for the device.
_HOT_HOOKS = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_after_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_test_batch_start", "on_test_batch_end", "on_log"),
)


class Subject:
    """A callback's factory, and the options of its trainings.

    Args:
        factory: makes a new callback, or a list of one and those that it depends on.
        allow_sync: hooks that may wait for the device.
        options: of the trainings.

    Attributes:
        cache: results that several checks share.
    """

    def __init__(
        self, factory: Callable[[], Any], allow_sync: Sequence[str], options: dict[str, Any]
    ) -> None:
        self._factory = factory
        self.allow_sync = {checked_hook(hook) for hook in allow_sync}
        self._options = options
        self.cache: dict[str, Any] = {}

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


class Injected(Exception):
    """The error that a check injects."""


def takes_arguments(subject: Subject) -> None:
    """Check that each hook takes the arguments that it is called with."""
    callback, _ = subject.make()
    for hook in hooks_of(callback):
        names = arguments_of(hook)
        calls = [["run", "model", *names[1:]]]
        if "dataloader_idx" in names:  # not passed for the first loader
            calls.append(calls[0][:-1])
        for call in calls:
            try:
                inspect.signature(getattr(callback, hook)).bind(*call)
            except ValueError:  # built-in functions may have no signature
                continue
            except TypeError as error:
                listed = ", ".join(call)
                raise AssertionError(
                    f"{name_of(callback)}.{hook} is called with ({listed}), which it does not "
                    f"take: {error}. Give it the arguments of Callback.{hook}."
                ) from error


def complete_runs(subject: Subject) -> None:
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


def _save_and_preempt(root: str) -> Any:
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


def windows(subject: Subject) -> None:
    """Check a run that accumulates gradients, with a shorter window at the end of each epoch."""
    subject.training(window=2, batches=3)[1].play()


def breaks(subject: Subject) -> None:
    """Check a loop that leaves each epoch with ``break``."""
    subject.training(leave_at=1, batches=3)[1].play()
    subject.training(leave_at=0, batches=3)[1].play()


def policies(subject: Subject) -> None:
    """Check that with ``on_error``, a callback whose hooks all fail does not end the run."""
    callback, _ = subject.make()
    if saves(callback) or getattr(callback, "collective", False):
        return
    for policy in ("warn", "disable"):
        callback, others = subject.make()
        calls: list[str] = []
        for hook in hooks_of(callback):
            replace(callback, hook, _failing(hook, calls))
        options = configured(callback, on_error=policy)
        _, training = subject.training(made=(options, others), epochs=1)
        training.play()
        again = [hook for hook in calls[1:] if hook != "teardown"]  # which releases its resources
        if policy == "disable" and again:
            raise AssertionError(
                f"{name_of(callback)} with on_error={policy!r} was called again after its error, "
                f"in {again[0]}."
            )


def _failing(hook: str, calls: list[str]) -> Any:
    def fail(*args: Any) -> None:
        calls.append(hook)
        raise Injected(f"an error in {hook}")

    return fail


def replace(callback: Any, hook: str, method: Any) -> None:
    """Replace a hook by another method."""
    try:
        setattr(callback, hook, method)
    except AttributeError as error:
        raise AssertionError(
            f"{name_of(callback)} has no writable attributes, so its hooks cannot be watched: "
            "remove __slots__, or skip this check."
        ) from error


def waits_for_no_device(subject: Subject) -> None:
    """Check that hooks of batches and steps do not wait for the device."""
    callback, others = subject.make()
    declared = {checked_hook(hook) for hook in getattr(callback, "syncs", ())}
    seen: dict[str, str] = {}
    with host_syncs() as syncs:
        for hook in _HOT_HOOKS:
            if overrides(callback, hook) and hook not in declared | subject.allow_sync:
                replace(callback, hook, _watched(callback, hook, syncs, seen))
        _, training = subject.training(made=(callback, others), window=2, batches=4, test=True)
        training.play()
    if seen:
        listed = "\n  ".join(f"{hook}: {sync}" for hook, sync in seen.items())
        raise AssertionError(
            f"{name_of(callback)} makes the host wait for the device:\n  {listed}\nKeep the tensor "
            "and read it later, in a hook of an epoch or an evaluation; or pass it to accel.log. "
            "If the hook must wait, allow it: syncs = "
            f"({', '.join(repr(hook) for hook in seen)},) in the class, or allow_sync=."
        )


def _watched(callback: Any, hook: str, syncs: list[Any], seen: dict[str, str]) -> Any:
    method = getattr(callback, hook)

    def call(run: Any, *args: Any) -> None:
        before = len(syncs)
        method(run, *args)
        loop = run.accelerator.loop
        # Metrics logged once an epoch may be read in on_log; those of each batch may not.
        hot = hook != "on_log" or (loop.iterating and not loop.evaluating)
        if hot and len(syncs) > before:
            seen.setdefault(hook, str(syncs[before]))

    return call


def with_other_callbacks(subject: Subject) -> None:
    """Check the callback as the first and as the last of several."""
    for place in ("before", "after"):
        instances = subject.make()
        names = {name_of(callback) for callback in (instances[0], *instances[1])}
        others = [neighbor for neighbor in _others() if name_of(neighbor) not in names]
        _, training = subject.training(made=instances, **{place: others})
        training.play()


def _others() -> list[Any]:
    from accel_callbacks import callbacks

    return [
        callbacks.ProgressBar(),
        callbacks.LearningRateMonitor(),
        callbacks.GradientNorm(),
        callbacks.EarlyStopping("val/loss"),
        callbacks.EMA(0.5, name="beside"),
        callbacks.Timer(interval="epoch"),
    ]


CHECKS = {
    "arguments": takes_arguments,
    "whole_runs": complete_runs,
    "window": windows,
    "break": breaks,
    "on_error": policies,
    "host_sync": waits_for_no_device,
    "order": with_other_callbacks,
}


class Neighbor:
    """A callback that is called next to the checked one, also if that has ``runs_last``.

    Args:
        like: the checked callback.
        name: the state key of this one.
    """

    def __init__(self, like: Any, name: str) -> None:
        self.runs_last = bool(getattr(like, "runs_last", False))
        self.state_key = name


class Raises(Neighbor):
    """Raise in one hook, once after it was armed.

    Args:
        like: the checked callback.
        name: the state key of this one.

    Attributes:
        raised: it has raised since it was armed.
    """

    def __init__(self, like: Any, name: str) -> None:
        super().__init__(like, name)
        self.hook = ""
        self.raised = False
        for hook in HOOKS:
            setattr(self, hook, self._raiser(hook))

    def _raiser(self, hook: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.hook == hook and not self.raised:
                self.raised = True
                raise Injected(f"{self.state_key} raises in {hook}")

        return call

    def arm(self, hook: str) -> None:
        """Raise in the next call of this hook, once."""
        self.hook, self.raised = hook, False


class WeightRecorder(Neighbor):
    """Record the trained weights, whenever no evaluation may have replaced them.

    Args:
        like: the checked callback.
        earlier: the recorder called before the checked callback; both share the weights, because an
            error may prevent the call of this one.
    """

    def __init__(self, like: Any, earlier: WeightRecorder | None = None) -> None:
        super().__init__(like, "WeightRecorder" if earlier is None else "LateWeightRecorder")
        self.runs_last = self.runs_last and earlier is not None
        self.weights: dict[str, torch.Tensor] = {} if earlier is None else earlier.weights
        for hook in _TRAINING_HOOKS:
            setattr(self, hook, self._record)

    def _record(self, run: Any, model: Any, *args: Any) -> None:
        if not run.accelerator.loop.evaluating:
            self.weights.update((n, w.detach().clone()) for n, w in model.state_dict().items())

    def changed(self, model: torch.nn.Module) -> list[str]:
        """Return the names of weights that differ from the recorded ones."""
        now = model.state_dict()
        return [name for name, weight in self.weights.items() if not weight.equal(now[name])]


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
