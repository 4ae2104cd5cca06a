"""Errors leave nothing behind."""

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
from accel_callbacks.testing.run_checks import (
    Injected,
    Raises,
    Subject,
    Witness,
    kept_in_memory,
    name_of,
    quietly,
)
from accel_callbacks.testing.state_checks import reference_of
from accel_callbacks.testing.training import TinyTraining

__all__ = ["CHECKS", "Surroundings"]

_PATIENCE = 2.0  # seconds that a thread which is told to end may take
_SHORT = {"epochs": 1, "batches": 2, "test": True}
_SAVES = ("on_save_checkpoint", "on_checkpoint_saved", "on_load_checkpoint")
_STAGES = ("train", "validation", "test")
_ERROR_LINE = re.compile(r"^(?!Traceback)[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*", re.M)


class Surroundings:
    """Threads, signal handlers, modes and hooks as they are now.

    Args:
        model: whose modes and hooks are looked at too.

    Example:
        >>> import torch
        >>> from accel_callbacks.testing.fault_checks import Surroundings
        >>> model = torch.nn.Linear(1, 1)
        >>> before = Surroundings(model)
        >>> _ = model.eval()
        >>> before.changes()
        ['the model is in eval mode instead of training mode']
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._threads = set(threading.enumerate())
        self._children = {child.pid for child in multiprocessing.active_children()}
        self._facts = {name: look(model) for name, (look, _) in _LOOKS.items()}

    def changes(self) -> list[str]:
        """What is not as it was, as sentences."""
        told = []
        for name, (look, tell) in _LOOKS.items():
            before, now = self._facts[name], look(self._model)
            if now != before:
                told.append(tell(before, now))
        told += [f"the thread {thread.name!r} is still running" for thread in self._new_threads()]
        children = {child.pid for child in multiprocessing.active_children()}
        return told + [f"the process {pid} is still running" for pid in children - self._children]

    def _new_threads(self) -> list[threading.Thread]:
        """Threads that have come since, and do not end by themselves soon."""
        end = time.monotonic() + _PATIENCE
        new = [one for one in threading.enumerate() if one not in self._threads]
        for thread in new:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread for thread in new if thread.is_alive()]


def _modes(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _tell_modes(before: dict[str, bool], now: dict[str, bool]) -> str:
    name = next(name for name in before if before[name] != now.get(name))
    kinds = {True: "training mode", False: "eval mode"}
    which = f"the module {name!r}" if name else "the model"
    return f"{which} is in {kinds[not before[name]]} instead of {kinds[before[name]]}"


def _model_hooks(model: torch.nn.Module) -> list[int]:
    """Ids of all hooks on modules and parameters."""
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
    return {one.name: signal.getsignal(one) for one in signal.Signals}


def _tell_handlers(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = ", ".join(name for name in before if before[name] != now[name])
    return f"the handler of {names} is another one"


def _torch_modes(model: torch.nn.Module) -> dict[str, Any]:
    """What is switched on in torch."""
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


def _tell_changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [f"{n}: {now[n]} instead of {before[n]}" for n in before if before[n] != now[n]]
    return ", ".join(changed)


def _streams(model: torch.nn.Module) -> dict[str, Any]:
    names = ("stdout", "stderr", "excepthook")
    return {f"sys.{name}": getattr(sys, name) for name in names}


_Look = Callable[[torch.nn.Module], Any]
_Tell = Callable[[Any, Any], str]
_LOOKS: dict[str, tuple[_Look, _Tell]] = {
    "modes": (_modes, _tell_modes),
    "hooks": (_model_hooks, lambda b, n: f"the model has {len(n)} hooks instead of {len(b)}"),
    "handlers": (_handlers, _tell_handlers),
    "torch": (_torch_modes, _tell_changed),
    "streams": (_streams, _tell_changed),
}


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
