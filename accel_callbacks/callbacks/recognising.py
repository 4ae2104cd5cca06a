"""What may be registered as a callback: its hooks are looked at, and whose class it is."""

from __future__ import annotations

from typing import Any

from accel_callbacks.callbacks.base import HOOKS, Callback
from accel_callbacks.errors import nearest

__all__ = ["accepted", "overrides", "saves"]

_PREDICT = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
#: Hooks of Lightning that only its Trainer fires.
_TRAINER_ONLY = {
    "on_sanity_check_start",
    "on_sanity_check_end",
    *(f"on_predict_{edge}" for edge in _PREDICT),
}
_LIGHTNING = ("lightning", "pytorch_lightning")


def accepted(callback: Any) -> Any:
    """The callback, or what stands for it where it is one of Lightning's.

    Raises:
        TypeError: a class, a callback for the Trainer of transformers, or a method that looks
            like a hook and is none.
    """
    if isinstance(callback, type):
        raise TypeError(f"{callback.__name__} is a class: pass an instance, {callback.__name__}().")
    if _is_a(callback, "TrainerCallback", ("transformers",)):
        raise TypeError(
            f"{type(callback).__qualname__} is a callback for the Trainer of transformers, whose "
            "hooks take other arguments: write its work as a Callback (run and model instead of "
            "args, state and control)."
        )
    if _is_a(callback, "Callback", _LIGHTNING):
        from accel_callbacks.callbacks.adapters import from_lightning

        callback = from_lightning(callback)
    _check_hooks(callback)
    return callback


def _is_a(callback: Any, name: str, roots: tuple[str, ...]) -> bool:
    """Whether a class of this name in these packages is among its classes; imports nothing."""
    return any(
        one.__name__ == name and one.__module__.partition(".")[0] in roots
        for one in type(callback).__mro__
    )


def _check_hooks(callback: Any) -> None:
    owner = type(callback).__qualname__
    for name in dir(callback):
        if not name.startswith("on_") or name in HOOKS or name == "on_error":
            continue
        if name in _TRAINER_ONLY:
            raise TypeError(
                f"{owner}.{name} would never be called: only the Trainer of Lightning fires it. "
                "Take the method out, or give it another name."
            )
        raise TypeError(f"{owner}.{name} is no hook.{nearest(name, HOOKS)}")


def overrides(callback: Any, hook: str) -> bool:
    """Whether the callback has this hook, of its own and not from the base class."""
    if hook in getattr(callback, "__dict__", {}):
        return True
    own = getattr(type(callback), hook, None)
    return own is not None and own is not getattr(Callback, hook, None)


def saves(callback: Any) -> bool:
    """Whether it saves checkpoints, and knows where a run can be resumed from."""
    return callable(getattr(callback, "resume_root", None))
