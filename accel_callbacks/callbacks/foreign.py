"""Adapt callbacks of other libraries when they are registered with the Accelerator."""

from __future__ import annotations

from typing import Any

__all__ = ["adapt"]

_LIGHTNING = ("lightning", "pytorch_lightning")


def adapt(callback: Any) -> Any:
    """Return the adapter of a Lightning callback, and any other callback unchanged.

    Detection by class name imports neither library.

    Raises:
        TypeError: the callback is one for the Trainer of transformers.
    """
    if _is_a(callback, "TrainerCallback", ("transformers",)):
        raise TypeError(
            f"{type(callback).__qualname__} is a callback for the Trainer of transformers, whose "
            "hooks take other arguments: write its work as a Callback (run and model instead of "
            "args, state and control)."
        )
    if _is_a(callback, "Callback", _LIGHTNING):
        from accel_callbacks.addons.lightning.from_lightning import from_lightning

        return from_lightning(callback)
    return callback


def _is_a(callback: Any, name: str, roots: tuple[str, ...]) -> bool:
    """Return whether one of the bases has this name and is from one of these packages."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in roots
        for kind in type(callback).__mro__
    )
