"""Checks that run our own callbacks in trainings, beside those that users have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS
from accel_callbacks.callbacks.dispatch.functions import checked_hook
from accel_callbacks.callbacks.dispatch.registration import configured, overrides, saves
from accel_callbacks.testing import checks
from accel_callbacks.testing.checks import Injected, hooks_of, name_of
from accel_callbacks.testing.hooks import arguments_of
from tests.support.contract.host_sync import host_syncs

__all__ = ["CHECKS", "Neighbor", "OurSubject", "Raises", "WeightRecorder"]

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


class OurSubject(checks.Subject):
    """A callback's factory, the options of its trainings, and where it may wait for the device."""

    def __init__(
        self, factory: Callable[[], Any], allow_sync: Sequence[str], options: dict[str, Any]
    ) -> None:
        super().__init__(factory, options)
        self.allow_sync = {checked_hook(hook) for hook in allow_sync}


def takes_arguments(subject: OurSubject) -> None:
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


def policies(subject: OurSubject) -> None:
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


def waits_for_no_device(subject: OurSubject) -> None:
    """Check that hooks of batches and steps do not wait for the device."""
    callback, others = subject.make()
    seen: dict[str, str] = {}
    with host_syncs() as syncs:
        for hook in _HOT_HOOKS:
            if overrides(callback, hook) and hook not in subject.allow_sync:
                replace(callback, hook, _watched(callback, hook, syncs, seen))
        _, training = subject.training(made=(callback, others), window=2, batches=4, test=True)
        training.play()
    if seen:
        listed = "\n  ".join(f"{hook}: {sync}" for hook, sync in seen.items())
        raise AssertionError(
            f"{name_of(callback)} makes the host wait for the device:\n  {listed}\nKeep the tensor "
            "and read it later, in a hook of an epoch or an evaluation; or pass it to accel.log. "
            f"If the hook must wait, allow it: allow_sync=({', '.join(map(repr, seen))},)."
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


def with_other_callbacks(subject: OurSubject) -> None:
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
