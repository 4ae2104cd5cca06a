"""What a callback may leave behind in its process, before and after a run."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Surroundings"]

_PATIENCE = 2.0  # seconds that a thread which is told to end may take


class Surroundings:
    """Threads, signal handlers, modes and hooks as they are now.

    Args:
        model: whose modes and hooks are looked at too.

    Example:
        >>> import torch
        >>> from accel_callbacks.testing.leaks import Surroundings
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
