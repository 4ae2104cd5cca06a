"""The gradient window: when gradients synchronise, and what one micro-batch counts."""

from __future__ import annotations

from accel_callbacks.loop.accumulation import Normalizer
from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin

__all__ = ["GradientWindow"]


class GradientWindow:
    """Counts the micro-batches of one optimizer step and knows how many there really are.

    A window is normally ``num_steps`` long; at the end of an epoch it is as long as what is
    left, and the loss is divided by that number, so that no window weighs less than another.

    Args:
        num_steps: micro-batches of a full window, at least 1.
        plugin: the same with more options; instead of ``num_steps``.
        averaged_over: processes over which the strategy averages gradients, 1 if it does not.

    Attributes:
        sync: true when the current micro-batch is the last of its window (and outside of
            ``accumulate``): gradients synchronise and the optimizer really steps.
        divisor: what a loss is divided by in this window.
        index: number of windows closed so far.
        touched: gradients of the current micro-batch are there.
        dirty: a window was left before its end, and its gradients are still there.
        normalizer: counts what ``backward(normalizer=...)`` was told.

    Raises:
        ValueError: ``num_steps`` is below 1.

    Example:
        Six micro-batches with a window of four: four, then two.

        >>> from accel_callbacks.accumulation import GradientWindow
        >>> window = GradientWindow(4)
        >>> for left in (6, 5, 4, 3, 2, 1):
        ...     window.enter(left, last=left == 1)
        ...     print(window.divisor, window.sync, end="; ")
        ...     window.leave()
        4 False; 4 False; 4 False; 4 True; 2 False; 2 True;
    """

    __slots__ = (
        "dirty",
        "divisor",
        "index",
        "normalizer",
        "num_steps",
        "plugin",
        "position",
        "sync",
        "touched",
    )

    def __init__(
        self,
        num_steps: int = 1,
        plugin: GradientAccumulationPlugin | None = None,
        averaged_over: int = 1,
    ) -> None:
        self.normalizer = Normalizer(averaged_over)
        self.plugin = plugin or GradientAccumulationPlugin(num_steps)
        self.position = 0
        self.resize(self.plugin.num_steps)
        self.sync = True
        self.index = 0
        self.touched = False
        self.dirty = False

    def resize(self, num_steps: int) -> None:
        """Make windows this long, from the next one on.

        Raises:
            ValueError: ``num_steps`` is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={num_steps} must be at least 1.")
        self.num_steps = num_steps
        if self.position == 0:
            self.divisor = num_steps

    def enter(self, remaining: int | None, last: bool) -> None:
        """Begin a micro-batch; ``remaining`` counts it and those after it in the loader.

        Args:
            remaining: micro-batches left in the epoch, this one included; ``None`` if unknown.
            last: this is the last one of the epoch.
        """
        if not self.plugin.sync_with_dataloader:
            remaining, last = None, False
        if self.position == 0:
            known = remaining is not None and remaining < self.num_steps
            self.divisor = remaining if known and remaining else self.num_steps
        self.position += 1
        self.touched = False
        self.sync = last or self.position >= self.divisor

    def leave(self) -> None:
        """End the micro-batch, and the window with it if it was the last."""
        if self.sync:
            self.close()

    def leave_loader(self) -> None:
        """The pass over the training data is over: a window does not outlive it, unless told to."""
        if self.is_open and self.plugin.sync_with_dataloader:
            self.abandon()

    def close(self) -> None:
        """End the window here, whatever its length."""
        if self.position:
            self.index += 1
        self.position = 0
        self.divisor = self.num_steps
        self.sync = True

    def abandon(self) -> None:
        """Leave the window before its end; what it gathered must not reach the next one."""
        self.dirty = self.dirty or self.position > 0
        self.close()

    @property
    def may_clear(self) -> bool:
        """Whether ``zero_grad`` clears: not what earlier micro-batches of this window gathered."""
        return self.sync if self.touched else self.position <= 1

    @property
    def is_open(self) -> bool:
        """True between the micro-batches of one window."""
        return self.position > 0 and not self.sync

    @property
    def correction(self) -> float:
        """What gradients must be multiplied by where the window ended earlier than planned.

        This happens only for loaders that do not know their length.
        """
        if self.position == 0 or self.position == self.divisor or not self.sync:
            return 1.0
        return self.divisor / self.position
