"""Hooks on the steps of all optimizers of this process, which leave it with their owner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import finalize

__all__ = ["attach", "in_prepared_step"]

_dead: list[Any] = []  # hooks that are to be removed


def attach(
    register: Callable[[Callable[..., None]], Any], hook: Callable[..., None], owner: object
) -> Callable[[], Any]:
    """Register a hook; return what removes it, as the end of its owner does.

    Args:
        register: of ``torch.optim.optimizer``.
        hook: refers to its owner weakly, for it belongs to the process.
        owner: has use for it.

    Example:
        >>> import torch
        >>> from torch.optim.optimizer import register_optimizer_step_post_hook
        >>> from accel_callbacks.loop.step_hooks import attach
        >>> class Owner: ...
        >>> owner, steps = Owner(), []
        >>> remove = attach(register_optimizer_step_post_hook, lambda *_: steps.append(1), owner)
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
        >>> optimizer.step()
        >>> _ = remove()
        >>> optimizer.step()
        >>> steps
        [1]
    """
    _remove_dead()
    return finalize(owner, _remove, register(hook))


def in_prepared_step() -> bool:
    """Return whether a prepared optimizer is stepping, also one of another Accelerator."""
    return _is_called_from("accel_callbacks.optimizer", "step")


def _remove(handle: Any) -> None:
    """Remove a hook, later if garbage is collected while torch iterates its hooks."""
    _dead.append(handle)
    if not _is_called_from("torch.optim.optimizer", "wrapper"):
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
