"""GradientState: where the gradient window and the loaders of an Accelerator stand, live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_callbacks.accumulation import GradientWindow
    from accel_callbacks.data.loader import DataLoaderShard
    from accel_callbacks.loop import Loop

__all__ = ["GradientState"]


class GradientState:
    """A view of one Accelerator's gradient window and of the loader being iterated.

    Unlike in Accelerate it belongs to its Accelerator: ``accel.gradient_state``.

    Args:
        window: the gradient window.
        loop: knows the loaders.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> loader = accel.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
        >>> state = accel.gradient_state
        >>> for batch in loader:
        ...     with accel.accumulate():
        ...         print(state.sync_gradients, state.end_of_dataloader, state.remainder)
        False False 1
        True True 1
        >>> state.in_dataloader, state.remainder
        (False, -1)
    """

    def __init__(self, window: GradientWindow | None = None, loop: Loop | None = None) -> None:
        if window is None or loop is None:
            raise TypeError(
                "GradientState belongs to an Accelerator: use accel.gradient_state instead."
            )
        self._window = window
        self._loop = loop

    @property
    def sync_gradients(self) -> bool:
        """True where gradients synchronise and the optimizer really steps; may be set."""
        return self._window.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._window.sync = value

    @property
    def num_steps(self) -> int:
        """Micro-batches of a full gradient window."""
        return self._window.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether prepared schedulers move once a window, and not with each micro-batch."""
        return self._window.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a window ends with the loader."""
        return self._window.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of the window by name."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader")
        return {name: getattr(self, name) for name in names}

    @property
    def active_dataloader(self) -> DataLoaderShard | None:
        """The innermost prepared loader that is being iterated."""
        return self._loop.active[-1] if self._loop.active else None

    @property
    def dataloader_references(self) -> list[DataLoaderShard | None]:
        """The loaders being iterated, the innermost last, after a ``None``."""
        return [None, *self._loop.active]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._loop.active)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.on_last

    @property
    def remainder(self) -> int:
        """Samples of the last global batch if it is not a full one; -1 outside of a loader."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder}, "
            f"{self.plugin_kwargs})"
        )
