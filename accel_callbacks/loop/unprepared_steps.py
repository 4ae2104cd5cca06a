"""The optimizers that step without being prepared, noted in the first steps of a training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any
from weakref import WeakMethod, WeakSet, finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["UnpreparedSteps", "attach", "in_prepared_step"]

_STEPS = 3
_dead: list[Any] = []  # hooks that are to be removed


class UnpreparedSteps:
    """Notes which optimizers step outside of the ``step`` of a prepared one, while it watches.

    Steps within backward are those of optimizers that a user hooks to gradients: they cannot be
    prepared, and are counted (:mod:`accel_callbacks.loop.bare_steps`), as are those of a part of
    a prepared optimizer. An optimizer is kept weakly: one that is made anew for each task, as for
    the inner loop of meta-learning, has nothing to be saved.

    Args:
        optimizers: the prepared optimizers, a list that grows.

    Attributes:
        hooked: those that have stepped within backward.
        count_unseen: counts a step of no prepared optimizer; returns whether it is to be counted.

    Example:
        >>> import torch
        >>> from accel_callbacks.loop.unprepared_steps import UnpreparedSteps
        >>> steps, weight = UnpreparedSteps([]), torch.ones(1, requires_grad=True)
        >>> steps.watch()
        >>> optimizer = torch.optim.SGD([weight], 0.1)
        >>> optimizer.step()
        >>> steps.stop()
        >>> steps.unprepared == [optimizer], steps.bypassed
        (True, [])
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._noted: list[tuple[ref[torch.optim.Optimizer], bool]] = []
        self.hooked: WeakSet[torch.optim.Optimizer] = WeakSet()  # that stepped within backward
        self.count_unseen: Callable[[torch.optim.Optimizer], bool] = lambda optimizer: False
        self._counts = False  # then each step is told, and not only the first ones
        self._left = 0
        self._remove: Callable[[], Any] | None = None

    @property
    def unprepared(self) -> list[torch.optim.Optimizer]:
        """Those that were not prepared, and are not now."""
        alive = self._alive()
        return [optimizer for optimizer, known in alive if not known and not self._has(optimizer)]

    @property
    def bypassed(self) -> list[torch.optim.Optimizer]:
        """Those inside of a prepared one, which have stepped past it."""
        return [optimizer for optimizer, prepared in self._alive() if prepared]

    def begin(self) -> None:
        """Forget what stepped before a run, which may have no prepared optimizer to watch for."""
        self._noted.clear()
        if not self._optimizers:
            self.watch()

    def watch(self) -> None:
        """Note the next steps of all optimizers of this process."""
        self._left = _STEPS
        if self._remove is None:
            self._remove = attach(register_optimizer_step_post_hook, self._note)

    def stop(self) -> None:
        """Remove the hook from torch's optimizers; what was noted stays."""
        if self._remove is not None and not self._counts:
            self._remove()
            self._remove = None

    def forget(self) -> None:
        """Forget what was noted."""
        self._noted.clear()
        self.hooked.clear()
        self._counts = False

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step, unless enough were noted, or it belongs to that of a prepared optimizer."""
        if self._left <= 0 and not self._counts:
            return
        prepared = self._has(optimizer)
        hooked = torch._C._current_graph_task_id() != -1
        outside = not in_prepared_step() and not hooked
        if (hooked or outside) and not prepared and self.count_unseen(optimizer):
            self._counts = True
            if hooked:
                self.hooked.add(optimizer)
        if self._left <= 0:
            return
        if outside and not any(known is optimizer for known, _ in self._alive()):
            self._noted.append((ref(optimizer), prepared))
        # Not removed here: torch is iterating its hooks.
        if outside or not prepared:
            self._left -= 1

    def _has(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(prepared.optimizer is optimizer for prepared in self._optimizers)

    def _alive(self) -> list[tuple[torch.optim.Optimizer, bool]]:
        noted = ((known(), prepared) for known, prepared in self._noted)
        return [(optimizer, prepared) for optimizer, prepared in noted if optimizer is not None]


# --- hooks on the steps of all optimizers of this process -------------------------------------


def attach(
    register: Callable[[Callable[..., None]], Any],
    method: Callable[[torch.optim.Optimizer], None],
) -> Callable[[], Any]:
    """Call a method at each step of any optimizer; return what ends that, as its owner's end does.

    Args:
        register: of ``torch.optim.optimizer``.
        method: referred to weakly, for the hook belongs to the process.
    """
    _remove_dead()
    weak_method = WeakMethod(method)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # nothing of this belongs into a graph
            return
        alive = weak_method()
        if alive is not None:
            alive(optimizer)

    handle, thread = register(hook), threading.get_ident()
    return finalize(method.__self__, _remove, handle, thread)  # type: ignore[attr-defined]


def in_prepared_step() -> bool:
    """Return whether a prepared optimizer is stepping, also one of another Accelerator."""
    return _is_called_from("accel_callbacks.optimizer", "step")


def _remove(handle: Any, thread: int) -> None:
    """Remove a hook, later if garbage is collected while torch may iterate its hooks."""
    _dead.append(handle)
    # Another thread, such as that of a save, collects garbage while this one takes a step.
    on_thread = threading.get_ident() == thread
    if on_thread and not _is_called_from("torch.optim.optimizer", "wrapper"):
        _remove_dead()


def _remove_dead() -> None:
    while _dead:
        _dead.pop().remove()


def _is_called_from(module: str, function: str) -> bool:
    """Return whether a function is running, of which this is a part."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
