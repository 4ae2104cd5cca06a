"""Options of the loss scaler of fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["GradScalerKwargs"]


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, which only ``mixed_precision="fp16"`` has.

    Args:
        init_scale: what the loss is first multiplied by.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: what the scale is multiplied by after an overflow.
        growth_interval: optimizer steps without an overflow before the scale grows.
        enabled: scale at all. If False, no loss is scaled and no step is skipped.

    Raises:
        ValueError: a number with which the scale cannot move as it should.

    Example:
        >>> from accel_callbacks import Accelerator, GradScalerKwargs
        >>> options = GradScalerKwargs(init_scale=1024.0)
        >>> accel = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[options])
        >>> accel.scaler.get_scale()
        1024.0
    """

    role: ClassVar[str] = "the loss scaler"

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        rules = (
            ("init_scale", self.init_scale > 0, "above 0"),
            ("growth_factor", self.growth_factor > 1, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        )
        for name, fits, allowed in rules:
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {allowed}.")
