"""Checks that a callback cleans up after errors."""

from __future__ import annotations

import io
import multiprocessing
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.testing import checks
from accel_callbacks.testing.checks import Injected, Reference, Subject, captured_output, name_of
from accel_callbacks.testing.training import TinyTraining
from tests.support.contract.run_checks import Raises, WeightRecorder

__all__ = ["CHECKS", "Surroundings"]

_THREAD_TIMEOUT = 2.0  # seconds in which a stopped thread must end
_SHORT = {"epochs": 1, "batches": 2, "test": True}  # options of the trainings
_CHECKPOINT_HOOKS = ("on_save_checkpoint", "on_checkpoint_saved", "on_load_checkpoint")
_STAGES = ("train", "validation", "test")
_ERROR_LINE = re.compile(r"^(?!Traceback)[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*", re.M)


def neighbor_raises(subject: Subject, *, before: bool) -> None:
    """Check the callback after errors of another one, called before or after it, in each hook."""
    faulty = _FaultyTraining(subject, before=before)
    with checks.memory_folder() as root:
        for hook in HOOKS:
            cause = f"a neighbor {'before' if before else 'after'} it raised in {hook}"
            faulty.check(cause, partial(_play_to_hook, faulty, hook, root))
            assert faulty.raiser.raised or faulty.training.run.should_stop, f"{hook} never came"
    faulty.check_afterwards()


def loop_raises(subject: Subject) -> None:
    """Check the callback after errors in the loop body, in training, validation and test."""
    faulty = _FaultyTraining(subject, before=False)
    for stage in _STAGES:
        for kind in (Injected, KeyboardInterrupt):
            cause = f"the loop raised {kind.__name__} in its {stage} part"
            faulty.check(cause, partial(_play_to_stage, faulty, stage, kind))
    faulty.check_afterwards()


class _FaultyTraining:
    """A training that is ended by one error after another.

    Args:
        subject: makes the checked callback.
        before: whether the neighbor that raises is called before the callback, or after it.
    """

    def __init__(self, subject: Subject, *, before: bool) -> None:
        self.reference = Reference(subject, **_SHORT)
        self.made = subject.make()
        callback = self.made[0]
        self.raiser = Raises(callback, "Raises")
        self.weights = WeightRecorder(callback)
        self.stage = ""
        self.kind: type[BaseException] = Injected
        first, last = ([self.raiser], []) if before else ([], [self.raiser])
        late = WeightRecorder(callback, self.weights)
        self.callback, self.training = subject.training(
            made=self.made, before=[self.weights, *first], after=[late, *last], **_SHORT
        )
        inner = self.training._loss

        def loss(model: Any, batch: Any) -> Any:
            if self.training.accel.loop.phase == self.stage:
                raise self.kind(f"an error in {self.stage}")
            return inner(model, batch)

        self.training._loss = loss

    def check(self, cause: str, play: Callable[[], None]) -> None:
        """Play a run that an error ends, and check that the callback has cleaned up."""
        model = self.training.accel.unwrap_model(self.training.model)
        self.training.begin_again()
        with captured_output() as printed:
            before = Surroundings(model)
            problems = self._play(play)
            problems += before.changes() + _printed_errors(printed)
        problems += [
            f"weight {name} is not the trained one" for name in self.weights.changed(model)
        ]
        if problems:
            raise AssertionError(
                f"{name_of(self.callback)} does not clean up: after {cause}, "
                f"{'; '.join(problems)}. Restore everything in `teardown`, which is always called."
            )

    def _play(self, play: Callable[[], None]) -> list[str]:
        """Play, and describe an unexpected error."""
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
        """Check that a run after all the errors ends like the first run of a new callback."""
        self.raiser.arm("")
        self.stage = ""
        self.training.each_batch = None
        self.training.begin_again().play()
        differences = self.reference.compare(self.callback)
        if differences:
            raise AssertionError(
                f"{name_of(self.callback)} does not reset its state after runs that ended with an "
                f"error. After the first run of a new one, and after this one: {differences}."
            )


def _play_to_hook(faulty: _FaultyTraining, hook: str, root: str) -> None:
    """Play a training that fires this hook, in which the neighbor raises."""
    training = faulty.training
    faulty.raiser.arm("")
    training.each_batch = partial(_provoke, hook=hook, path=f"{root}/{hook}")
    if hook == "on_load_checkpoint":
        training.play()
    faulty.raiser.arm(hook)
    training.play(resume=f"{root}/{hook}" if hook == "on_load_checkpoint" else False)


def _provoke(training: TinyTraining, *, hook: str, path: str) -> None:
    """Cause a rare hook to fire, in the loop body."""
    if training.run.global_step != 1:
        return
    if hook in _CHECKPOINT_HOOKS:
        training.accel.save_state(path)
    elif hook == "on_preempt":
        training.run.preempt("a check")
    elif hook == "on_exception":
        raise Injected("an error in the loop")


def _play_to_stage(faulty: _FaultyTraining, stage: str, kind: type[BaseException]) -> None:
    """Play until the loss of a stage is computed, which raises."""
    faulty.stage, faulty.kind = stage, kind
    faulty.training.play()


def _printed_errors(printed: io.StringIO) -> list[str]:
    """Describe errors of hooks during another error, which are printed and not raised."""
    lines = _ERROR_LINE.findall(printed.getvalue())
    return [f"its own hook failed too: {line}" for line in lines if "Injected" not in line]


class Surroundings:
    """A snapshot of threads, processes, signal handlers, modes and hooks.

    Args:
        model: whose modes and hooks are included.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._threads = set(threading.enumerate())
        self._children = {child.pid for child in multiprocessing.active_children()}
        self._values = {name: read(model) for name, (read, _) in _ASPECTS.items()}

    def changes(self) -> list[str]:
        """Describe the differences between now and the snapshot, as clauses."""
        changes = []
        for name, (read, describe) in _ASPECTS.items():
            before, now = self._values[name], read(self._model)
            if now != before:
                changes.append(describe(before, now))
        changes += [
            f"the thread {thread.name!r} is still running" for thread in self._new_threads()
        ]
        children = {child.pid for child in multiprocessing.active_children()}
        return changes + [
            f"the process {pid} is still running" for pid in children - self._children
        ]

    def _new_threads(self) -> list[threading.Thread]:
        """Return the threads started since the snapshot that do not end in time."""
        end = time.monotonic() + _THREAD_TIMEOUT
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        # The thread that saves in the background is the Accelerator's, which keeps it.
        new = [thread for thread in new if thread.name != "checkpoint_io save"]
        for thread in new:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread for thread in new if thread.is_alive()]


def _modes(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _describe_modes(before: dict[str, bool], now: dict[str, bool]) -> str:
    name = next(name for name in before if before[name] != now.get(name))
    kinds = {True: "training mode", False: "eval mode"}
    subject = f"the module {name!r}" if name else "the model"
    return f"{subject} is in {kinds[not before[name]]} instead of {kinds[before[name]]}"


def _model_hooks(model: torch.nn.Module) -> list[int]:
    """Return the ids of all hooks on modules and parameters."""
    kinds = [name for name in vars(model) if name.endswith("_hooks")]
    on_modules = [
        id(hook)
        for module in model.modules()
        for kind in kinds
        for hook in getattr(module, kind, {}).values()
    ]
    on_parameters = [
        id(hook) for p in model.parameters() for hook in (p._backward_hooks or {}).values()
    ]
    return on_modules + on_parameters


def _handlers(model: torch.nn.Module) -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in signal.Signals}


def _describe_handlers(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = ", ".join(name for name in before if before[name] != now[name])
    return f"the handler of {names} is another one"


def _torch_modes(model: torch.nn.Module) -> dict[str, Any]:
    """Return the global modes of torch."""
    core: Any = torch._C
    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "dispatch modes": core._len_torch_dispatch_stack(),
        "function modes": core._len_torch_function_stack(),
        "the profiler": core._autograd._profiler_enabled(),
    }


def _streams(model: torch.nn.Module) -> dict[str, Any]:
    names = ("stdout", "stderr", "excepthook")
    return {f"sys.{name}": getattr(sys, name) for name in names}


def _describe_values(before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [f"{n}: {now[n]} instead of {before[n]}" for n in before if before[n] != now[n]]
    return ", ".join(changed)


_Read = Callable[[torch.nn.Module], Any]


_Describe = Callable[[Any, Any], str]


_ASPECTS: dict[str, tuple[_Read, _Describe]] = {
    "modes": (_modes, _describe_modes),
    "hooks": (_model_hooks, lambda b, n: f"the model has {len(n)} hooks instead of {len(b)}"),
    "handlers": (_handlers, _describe_handlers),
    "torch": (_torch_modes, _describe_values),
    "streams": (_streams, _describe_values),
}


CHECKS: dict[str, Callable[[Subject], None]] = {
    "error_before": partial(neighbor_raises, before=True),
    "error_after": partial(neighbor_raises, before=False),
    "error_in_loop": loop_raises,
}
