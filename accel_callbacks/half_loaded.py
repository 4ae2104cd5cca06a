"""What may not go on after a load that broke off half-way."""

from __future__ import annotations

from typing import NoReturn

from accel_callbacks.errors import ResumeError

__all__ = ["refuse_half_loaded"]


def refuse_half_loaded(path: str, action: str) -> NoReturn:
    """Say why nothing may be computed with, or saved of, what is here.

    Args:
        path: the checkpoint whose loading broke off.
        action: what is refused.

    Raises:
        ResumeError: always.

    Example:
        >>> from accel_callbacks.half_loaded import refuse_half_loaded
        >>> refuse_half_loaded("runs/step-1", "backward")
        Traceback (most recent call last):
        accel_callbacks.errors.ResumeError: backward: loading runs/step-1 broke off half-way, and \
models and optimizers hold a mixture of it and of what was there before. Load a checkpoint first: \
load_state() takes the newest that is whole.
    """
    raise ResumeError(
        f"{action}: loading {path} broke off half-way, and models and optimizers hold a mixture of "
        "it and of what was there before. Load a checkpoint first: load_state() takes the newest "
        "that is whole."
    )
