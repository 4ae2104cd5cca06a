"""Options of the process group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from accel_callbacks.plugins.base import Handlers, KwargsHandler

__all__ = ["InitProcessGroupKwargs", "group_options"]


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the default process group; for the first Accelerator of a process.

    Args:
        backend: of ``torch.distributed``, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; chosen
            by the device if ``None``.
        init_method: the rendezvous URL, such as ``"tcp://10.0.0.1:29500"``; set by the launcher
            if ``None``.
        timeout: how long a collective waits for the other processes, as a ``timedelta`` or in
            seconds; torch's default if ``None``.

    Raises:
        ValueError: ``timeout`` is not above 0.
        TypeError: ``timeout`` is neither a ``timedelta`` nor a number.

    Example:
        >>> from accel_callbacks import Accelerator, InitProcessGroupKwargs
        >>> InitProcessGroupKwargs(timeout=90).timeout
        datetime.timedelta(seconds=90)
        >>> accel = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=90)])
    """

    role: ClassVar[str] = "the process group"

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        timeout: Any = self.timeout
        if timeout is None:
            return
        if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
            object.__setattr__(self, "timeout", timedelta(seconds=timeout))
        elif not isinstance(timeout, timedelta):
            raise TypeError(f"timeout={timeout!r} must be a timedelta or a number of seconds.")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout={timeout!r} must be above 0.")


def group_options(handlers: Handlers, timeout: timedelta | None) -> dict[str, Any]:
    """Return the options of the process group, from the handler and ``Accelerator(timeout=)``.

    Raises:
        ValueError: both set a timeout, or it is not above 0.
        TypeError: ``timeout`` is neither a ``timedelta`` nor a number.
    """
    options = handlers.get(InitProcessGroupKwargs, InitProcessGroupKwargs()).to_kwargs()
    if timeout is not None:
        if "timeout" in options:
            raise ValueError("give timeout= or InitProcessGroupKwargs(timeout=...), not both.")
        options["timeout"] = InitProcessGroupKwargs(timeout=timeout).timeout
    return options
