"""Options of mixed precision: what runs under autocast, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["AutocastKwargs"]


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Options of autocast; for ``Accelerator(kwargs_handlers=[...])`` and ``accel.autocast(...)``.

    Args:
        enabled: run in low precision. If False, what is inside stays in full precision.
        cache_enabled: keep the low-precision copies of weights inside of a block; as it is
            outside of the block if ``None`` (torch's default is True).
        upcast_outputs: the outputs of prepared models come back in fp32 (default). If False, they
            stay in low precision. It says nothing about ``accel.autocast(...)``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, AutocastKwargs
        >>> options = AutocastKwargs(upcast_outputs=False)
        >>> accel = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[options])
        >>> accel.prepare(torch.nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.bfloat16
        >>> with accel.autocast(AutocastKwargs(enabled=False)):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """

    role: ClassVar[str] = "autocast"

    enabled: bool = True
    cache_enabled: bool | None = None
    upcast_outputs: bool = True
