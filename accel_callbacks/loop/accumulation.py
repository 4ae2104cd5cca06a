"""Averaging by a count of the user's own (tokens, say), exact over a window and all processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.gradients import multiply_gradients

__all__ = ["Normalizer"]

Count = float | torch.Tensor


class Normalizer:
    """Counts what the losses of one optimizer step were summed over.

    Each loss is a sum. Its gradients are gathered as they are, but for a power of two that keeps
    them in range (and costs no precision), and multiplied once, before the step, by what makes
    them the gradients of the mean over everything that all processes counted.

    Args:
        averaged_over: processes over which the strategy averages gradients, 1 if it does not.

    Attributes:
        active: the gradients that are there now were summed, by :meth:`add`.
        closed: processes cannot meet to sum their counts now.
        pending: no optimizer has stepped with them yet (others may still, with the same ones).

    Example:
        >>> import torch
        >>> from accel_callbacks.loop.accumulation import Normalizer
        >>> weight, normalizer = torch.tensor(1.0, requires_grad=True), Normalizer()
        >>> for values in (torch.ones(3), torch.ones(1) * 5):
        ...     normalizer.add((weight * values).sum(), values.numel()).backward()
        >>> float(weight.grad * normalizer.factor())
        2.0
    """

    def __init__(self, averaged_over: int = 1) -> None:
        self.active = self.pending = self.closed = False
        self._averaged_over = averaged_over
        self._base: float | None = None
        self._total: Count = 0.0
        self._factor: Count | None = None
        self._settled: set[int] = set()

    def add(self, loss: torch.Tensor, count: Count, *, expected: int = 1) -> torch.Tensor:
        """The loss to call backward on.

        Args:
            loss: the sum over ``count`` units.
            count: of this process and micro-batch; a tensor stays on its device.
            expected: micro-batches of the window, for the size of the gradients on the way.

        Raises:
            ValueError: the count is negative.
            RuntimeError: inside of ``join_uneven_inputs``, where processes that are done would
                be waited for.
        """
        if self.closed:
            raise RuntimeError(
                "backward(normalizer=) cannot be used inside of join_uneven_inputs: divide the "
                "loss yourself, or let prepare() split the data evenly."
            )
        if isinstance(count, torch.Tensor):
            count = count.detach().double() if count.device.type != "mps" else count.detach()
        elif count < 0:
            raise ValueError(f"normalizer={count} must not be negative.")
        if not self.pending:
            self.forget()
            self.active = self.pending = True
        if self._base is None:
            self._base = self._agree_on_base(count, expected)
        self._total = self._total + count
        return loss / self._base

    def _agree_on_base(self, count: Count, expected: int) -> float:
        """A power of two near the mean count of a step, the same on all processes."""
        typical = float(_summed(count)) / collectives.world_size() * expected
        return 2.0 ** round(math.log2(typical)) if typical > 0 else 1.0

    def factor(self) -> Count:
        """Collective, once a step: what gradients must be multiplied by."""
        if self._factor is None:
            total = _summed(self._total)
            wanted = (self._base or 1.0) * self._averaged_over
            if isinstance(total, torch.Tensor):
                self._factor = torch.where(total > 0, wanted / total, 0.0)
            else:
                self._factor = wanted / total if total > 0 else 0.0
        return self._factor

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of this optimizer to their true size, once a step."""
        if id(optimizer) not in self._settled:
            self._settled.add(id(optimizer))
            multiply_gradients(optimizer, self.factor())

    def forget(self) -> None:
        """The gradients were cleared: count from nothing."""
        self.active = self.pending = False
        self._total, self._factor = 0.0, None
        self._settled.clear()

    def state_dict(self) -> dict[str, Any]:
        """The count of an open window."""
        return {"pending": self.pending, "total": float(self._total), "base": self._base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where ``state`` was taken."""
        self.forget()
        self.active = self.pending = state["pending"]
        self._total = state["total"]
        self._base = state["base"]


def _summed(count: Count) -> Count:
    """The sum over all processes; a number stays a number."""
    if collectives.world_size() == 1:
        return count
    if isinstance(count, torch.Tensor):
        return collectives.reduce(count, "sum")
    return float(collectives.reduce(torch.tensor(count, dtype=torch.float64), "sum"))
