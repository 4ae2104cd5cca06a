"""WindowRow: the values that the micro-batches of a gradient window log, as one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_callbacks.loop.gradient_window import GradientWindow
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["WindowRow"]

Keywords = Mapping[str, Mapping[str, Any]]


class WindowRow:
    """Holds what is logged inside of a gradient window until its optimizer step.

    The value of a name is its mean over the micro-batches, as the gradient is; of integers and
    texts, the last one. It stays on its device.

    Args:
        window: the gradient window; None holds nothing.

    Attributes:
        values: the means, by name; empty if nothing is held.
        log_kwargs: further keywords for trackers, as last given.
    """

    def __init__(self, window: GradientWindow | None = None) -> None:
        self._window = window
        self.values: dict[str, Any] = {}
        self.log_kwargs: Keywords | None = None
        self._counts: dict[str, int] = {}
        self._run: TrainingRun | None = None
        self._index = self._first_step = 0

    @property
    def is_collecting(self) -> bool:
        """True in a window, up to its optimizer step, if windows have several micro-batches."""
        window = self._window
        if window is None or window.stepped:
            return False
        return window.position > 0 and (window.num_steps > 1 or window.divisor > 1)

    @property
    def is_current(self) -> bool:
        """True if the values are of the window that is open, or was closed last."""
        window = self._window
        if window is None or not self.values:
            return False
        return self._index == (window.index if window.position else window.index - 1)

    @property
    def has_no_step(self) -> bool:
        """True if the window is open before its step, or was abandoned."""
        window = self._window
        if window is None or self._index == window.abandoned:
            return True
        return self.is_current and self.is_collecting

    @property
    def step(self) -> int:
        """Global step after the window's own, if that was taken."""
        assert self._run is not None
        return min(self._first_step + 1, self._run.global_step)

    def add(self, flat: Mapping[str, Any], run: TrainingRun) -> None:
        """Add the flat values of one call to the means."""
        assert self._window is not None
        if not self.values:
            self._run, self._first_step, self._index = run, run.global_step, self._window.index
        for name, value in flat.items():
            self.values[name] = self._mean(name, value)
            self._counts[name] = self._counts.get(name, 0) + 1

    def merged(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat values of the last micro-batch as means; their names are no longer held."""
        means = {name: self._mean(name, value) for name, value in flat.items()}
        for name in flat:
            self.values.pop(name, None)
            self._counts.pop(name, None)
        return means

    def clear(self) -> None:
        """Hold nothing any more."""
        self.values, self.log_kwargs = {}, None
        self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the means on the host, for a checkpoint inside of the window."""
        numbers = {
            n: value.item() if hasattr(value, "item") else value for n, value in self.values.items()
        }
        return {"values": numbers, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any] | None, run: TrainingRun) -> None:
        """Continue the means of a saved window, once the window itself is restored."""
        self.clear()
        if state is not None:
            self.add(state["values"], run)
            self._counts.update(state["counts"])

    def _mean(self, name: str, value: Any) -> Any:
        """Return the mean with one more value."""
        count = self._counts.get(name, 0)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4:
            value = value.float()  # a mean of half precision would lose digits with each value
        before = self.values.get(name)
        if not count or not (_is_real(value) and _is_real(before)):
            return value
        # A running mean, because that of equal values is exactly the value.
        return before + (value - before) / (count + 1)


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, float)
