"""Checks that run a callback."""

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
from accel_callbacks.testing.host_syncs import host_syncs
from accel_callbacks.testing.training import TinyTraining

__all__ = [
    "CHECKS",
    "Injected",
    "Neighbour",
    "Raises",
    "SavesEachPlace",
    "Subject",
    "Witness",
    "kept_in_memory",
    "quietly",
]

_AWAY = ("validation", "test", "log", "checkpoint", "exception", "preempt")
#: Hooks in which the models hold the weights that are trained.
_TRAINED = [
    hook for hook in HOOKS if hook not in EXIT_HOOKS and not any(word in hook for word in _AWAY)
]
#: Hooks of each batch and step, which must not wait for the device.
_HOT = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_after_optimizer_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_test_batch_start", "on_test_batch_end", "on_log"),
)


class Injected(Exception):
    """The error that a check injects."""


class Neighbour:
    """Stands where the checked callback does: among the first, or among those that run last.

    Args:
        like: the checked callback.
        name: its state key.
    """

    def __init__(self, like: Any, name: str) -> None:
        self.runs_last = bool(getattr(like, "runs_last", False))
        self.state_key = name


class Raises(Neighbour):
    """Raises in one hook, while it is armed.

    Args:
        like: the checked callback.
        name: its state key.

    Attributes:
        raised: it has, since it was armed.
    """

    def __init__(self, like: Any, name: str) -> None:
        super().__init__(like, name)
        self.hook = ""
        self.raised = False
        for hook in HOOKS:
            setattr(self, hook, self._raiser(hook))

    def _raiser(self, hook: str) -> Callable[..., None]:
        def come(*args: Any) -> None:
            if self.hook == hook and not self.raised:
                self.raised = True
                raise Injected(f"{self.state_key} raises in {hook}")

        return come

    def arm(self, hook: str) -> None:
        """Raise the next time that this hook comes, once."""
        self.hook, self.raised = hook, False


class Witness(Neighbour):
    """Remembers the weights that are trained, wherever no evaluation has borrowed them.

    Args:
        like: the checked callback.
        earlier: the witness that is called before it, which sees what an error hides from this one.
    """

    def __init__(self, like: Any, earlier: Witness | None = None) -> None:
        super().__init__(like, "Witness" if earlier is None else "LateWitness")
        self.runs_last = self.runs_last and earlier is not None
        self.weights: dict[str, torch.Tensor] = {} if earlier is None else earlier.weights
        for hook in _TRAINED:
            setattr(self, hook, self._look)

    def _look(self, run: Any, model: Any, *args: Any) -> None:
        if not run.accelerator.loop.evaluating:
            self.weights.update((n, w.detach().clone()) for n, w in model.state_dict().items())

    def changed(self, model: torch.nn.Module) -> list[str]:
        """Names of the weights that are not those that were seen last."""
        now = model.state_dict()
        return [name for name, weight in self.weights.items() if not weight.equal(now[name])]


class SavesEachPlace:
    """Saves the training state at the end of each batch and each epoch, after everyone else.

    Args:
        root: folder or URL.
    """

    runs_last = True
    state_key = "SavesEachPlace"

    def __init__(self, root: str) -> None:
        self.root = root
        self.places: dict[str, str] = {}

    def on_train_batch_end(self, run: Any, model: Any, *args: Any) -> None:
        """A step is over."""
        self._save(run, f"step {run.global_step}, batch {run.batch_idx}")

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        """An epoch is over."""
        self._save(run, f"the end of epoch {run.current_epoch}")

    def _save(self, run: Any, place: str) -> None:
        if place not in self.places:
            self.places[place] = f"{self.root}/{len(self.places)}"
            run.save_checkpoint(self.places[place])


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


def takes_arguments(subject: Subject) -> None:
    """Each hook takes the arguments that it is called with."""
    callback, _ = subject.make()
    for hook in hooks_of(callback):
        given = arguments_of(hook)
        calls = [["run", "model", *(one for one in given[1:])]]
        if "dataloader_idx" in given:  # which the first loader does not pass
            calls.append(calls[0][:-1])
        for call in calls:
            try:
                inspect.signature(getattr(callback, hook)).bind(*call)
            except ValueError:  # of something built in, which does not tell
                continue
            except TypeError as error:
                listed = ", ".join(call)
                raise AssertionError(
                    f"{name_of(callback)}.{hook} is called with ({listed}), which it does not "
                    f"take: {error}. Give it the arguments of Callback.{hook}."
                ) from error


def whole_runs(subject: Subject) -> None:
    """Every hook: a run with evaluations, a test, a save and a preemption; a resume; an error."""
    with kept_in_memory() as root:
        callback, training = subject.training(test=True, each_batch=_busy(root))
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
        if hook not in called:  # say because the callback has stopped the run before
            fire(callback, hook, run=run)


def _busy(root: str) -> Any:
    """Save in the first batch, and give way in the second epoch."""

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
    """Play; a callback may want the process to end after a preemption."""
    try:
        training.play(**options)
    except SystemExit:
        if not training.run.preempted:
            raise


def windows(subject: Subject) -> None:
    """Gradients of several batches, with a window that is cut short at the end of an epoch."""
    subject.training(window=2, batches=3)[1].play()


def breaks(subject: Subject) -> None:
    """A loop that leaves each epoch with ``break``."""
    subject.training(leave_at=1, batches=3)[1].play()
    subject.training(leave_at=0, batches=3)[1].play()


def policies(subject: Subject) -> None:
    """With ``on_error``, a callback whose hooks all fail does not end the run."""
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
        again = [hook for hook in calls[1:] if hook != "teardown"]  # that closes what it holds
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
    """Put another method in the place of a hook."""
    try:
        setattr(callback, hook, method)
    except AttributeError as error:
        raise AssertionError(
            f"{name_of(callback)} takes no attributes, so its hooks cannot be watched: leave "
            "__slots__ out, or skip this check."
        ) from error


def waits_for_no_device(subject: Subject) -> None:
    """Hooks of batches and steps do not wait for the device."""
    callback, others = subject.make()
    declared = {checked_hook(hook) for hook in getattr(callback, "syncs", ())}
    seen: dict[str, str] = {}
    with host_syncs() as found:
        for hook in _HOT:
            if overrides(callback, hook) and hook not in declared | subject.allow_sync:
                replace(callback, hook, _watched(callback, hook, found, seen))
        _, training = subject.training(made=(callback, others), window=2, batches=4, test=True)
        training.play()
    if seen:
        told = "\n  ".join(f"{hook}: {sync}" for hook, sync in seen.items())
        raise AssertionError(
            f"{name_of(callback)} makes the host wait for the device:\n  {told}\nKeep the tensor "
            "and read it later, in a hook of an epoch or an evaluation; or give it to accel.log. "
            "Where it must be, allow it: syncs = "
            f"({', '.join(repr(hook) for hook in seen)},) in the class, or allow_sync=."
        )


def _watched(callback: Any, hook: str, found: list[Any], seen: dict[str, str]) -> Any:
    method = getattr(callback, hook)

    def call(run: Any, *args: Any) -> None:
        before = len(found)
        method(run, *args)
        loop = run.accelerator.loop
        # What is logged once an epoch may be read; what each batch logs may not.
        hot = hook != "on_log" or (loop.active and not loop.evaluating)
        if hot and len(found) > before:
            seen.setdefault(hook, str(found[before]))

    return call


def beside_others(subject: Subject) -> None:
    """First and last among others."""
    for place in ("before", "after"):
        made = subject.make()
        taken = {name_of(one) for one in (made[0], *made[1])}
        others = [one for one in _others() if name_of(one) not in taken]
        _, training = subject.training(made=made, **{place: others})
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
    "whole_runs": whole_runs,
    "window": windows,
    "break": breaks,
    "on_error": policies,
    "host_sync": waits_for_no_device,
    "order": beside_others,
}
