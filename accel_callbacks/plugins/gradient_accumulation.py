"""Options of gradient accumulation: the length of a window, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["GradientAccumulationPlugin", "chosen_steps"]


@dataclass(frozen=True)
class GradientAccumulationPlugin(KwargsHandler):
    """Options of the gradient window; ``Accelerator(gradient_accumulation_plugin=...)``.

    Args:
        num_steps: micro-batches of a full window, 1 by default.
        adjust_scheduler: step prepared schedulers once a window. If False, each call of ``step``
            counts, so that they step once a micro-batch.
        sync_with_dataloader: end a window with the epoch, averaged by its real length. If False,
            a window that is not full continues with the first batches of the next epoch.
        sync_each_batch: average gradients between processes after each micro-batch instead of once
            a window. It takes more communication, and less memory if gradients are sharded.

    Raises:
        TypeError: ``num_steps`` is no integer.
        ValueError: ``num_steps`` is below 1.

    Example:
        >>> from accel_callbacks import Accelerator, GradientAccumulationPlugin
        >>> plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        >>> Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps
        4
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int):
            raise TypeError(f"num_steps={self.num_steps!r} must be a whole number.")
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1.")


def chosen_steps(steps: int | None, plugin: GradientAccumulationPlugin | None) -> int | None:
    """Return the length of a window, from the option or from the plugin.

    Raises:
        TypeError: ``plugin`` is no :class:`GradientAccumulationPlugin`.
        ValueError: both are given.
    """
    if plugin is None:
        return steps
    if not isinstance(plugin, GradientAccumulationPlugin):
        raise TypeError(
            f"gradient_accumulation_plugin={plugin!r} must be a GradientAccumulationPlugin."
        )
    if steps is not None:
        raise ValueError(
            "give gradient_accumulation_steps= or gradient_accumulation_plugin=, not both."
        )
    return plugin.num_steps
