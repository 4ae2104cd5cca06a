"""The gradient window: the micro-batches of one optimizer step, and their normalizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.gradients import multiply_gradients
from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin

if TYPE_CHECKING:
    from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["GradientWindow", "Normalizer"]

Count = float | torch.Tensor


class Normalizer:
    """Counts the units (tokens, say) that the losses of one optimizer step were summed over.

    Each loss is a sum. Its gradients accumulate as they are, but for a power of two that keeps
    them in range (and costs no precision). Before the step they are multiplied once, by the factor
    that makes them the gradients of the mean over all units of all ranks.

    Args:
        averaged_over: number of ranks over which the strategy averages gradients, 1 if it does not.
        loss_world: number of ranks whose losses are of different units; the world size if None.

    Attributes:
        active: the current gradients come from losses given to :meth:`add`.
        closed: counts cannot be summed now, because ranks take unequal numbers of steps.
        pending: no optimizer has stepped with the gradients yet.

    Example:
        >>> import torch
        >>> from accel_callbacks.loop.gradient_window import Normalizer
        >>> weight, normalizer = torch.tensor(1.0, requires_grad=True), Normalizer()
        >>> for values in (torch.ones(3), torch.ones(1) * 5):
        ...     normalizer.add((weight * values).sum(), values.numel()).backward()
        >>> float(weight.grad * normalizer.factor())
        2.0
    """

    def __init__(self, averaged_over: int = 1, loss_world: int | None = None) -> None:
        self.active = self.pending = self.closed = False
        self._averaged_over = averaged_over
        self._loss_world = loss_world
        self._base: float | None = None
        self._total: Count = 0.0
        self._factor: Count | None = None
        self._settled: set[int] = set()

    def add(self, loss: torch.Tensor, count: Count, *, expected: int = 1) -> torch.Tensor:
        """Return the loss to call backward on.

        Args:
            loss: the sum over ``count`` units.
            count: units of this rank and micro-batch; a tensor stays on its device.
            expected: micro-batches of the window, for the range of intermediate gradients.

        Raises:
            ValueError: the count is negative.
            RuntimeError: inside of ``join_uneven_inputs``, where the sum over ranks would wait for
                ranks that are done.
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
            # About the count of one rank in a whole window: divided by it, gradients stay in the
            # range of fp16, and a power of two loses no bit. It is agreed on once, and kept.
            typical = float(_sum_over_ranks(count)) / collectives.world_size() * expected
            self._base = 2.0 ** round(math.log2(typical)) if typical > 0 else 1.0
        self._total = self._total + count
        return loss / self._base

    def factor(self) -> Count:
        """Collective, once a step: return the factor for the gradients."""
        if self._factor is None:
            # The sum of counts stays on its device: reading it would wait for the backward pass.
            total = self._over_different_losses(_sum_over_ranks(self._total))
            wanted = (self._base or 1.0) * self._averaged_over
            if isinstance(total, torch.Tensor):
                self._factor = torch.where(total > 0, wanted / total, 0.0)
            else:
                self._factor = wanted / total if total > 0 else 0.0
        return self._factor

    def _over_different_losses(self, total: Count) -> Count:
        """Return the part of a sum over all ranks that counts each unit once."""
        world = collectives.world_size()
        if self._loss_world is None or self._loss_world == world:
            return total
        return total * self._loss_world / world

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the gradients of this optimizer by the factor, once a step."""
        # Clipping settles before the step does, and must not scale twice.
        if id(optimizer) not in self._settled:
            self._settled.add(id(optimizer))
            multiply_gradients(optimizer, self.factor())

    def forget(self) -> None:
        """Reset the count, because the gradients were cleared."""
        self.active = self.pending = False
        self._total, self._factor = 0.0, None
        self._settled.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the count of an open window."""
        return {"pending": self.pending, "total": float(self._total), "base": self._base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count of a saved window."""
        self.forget()
        self.active = self.pending = state["pending"]
        self._total = state["total"]
        self._base = state["base"]


def _sum_over_ranks(count: Count) -> Count:
    """Sum over all ranks; a number stays a number."""
    if collectives.world_size() == 1:
        return count
    if isinstance(count, torch.Tensor):
        return collectives.reduce(count, "sum")
    return float(collectives.reduce(torch.tensor(count, dtype=torch.float64, device="cpu"), "sum"))


class GradientWindow:
    """Counts the micro-batches of one optimizer step.

    A window is ``num_steps`` long. At the end of an epoch it is as long as what is left, and the
    loss is divided by that number, so that all windows weigh the same.

    Args:
        num_steps: micro-batches of a full window, at least 1.
        plugin: more options; its own number of steps does not count.
        averaged_over: number of ranks over which the strategy averages gradients, 1 if it does not.
        loss_world: number of ranks whose losses are of different units; the world size if None.

    Attributes:
        sync: True in the last micro-batch of a window, and outside of ``accumulate``: gradients
            synchronize and the optimizer really steps.
        divisor: the number that a loss is divided by in this window.
        index: number of windows closed so far.
        touched: True once the current micro-batch has added gradients.
        stepped: True once an optimizer has stepped in the current micro-batch, or tried to.
        dirty: True if a window was abandoned, and its gradients are not cleared yet.
        abandoned: index of the window that was abandoned last, -1 before the first.
        block: in an ``accumulate`` block of a longer window, the models that leave their gradients
            on the rank; else None.
        normalizer: counts the units given to ``backward(normalizer=...)``.

    Raises:
        ValueError: ``num_steps`` is below 1.

    Example:
        Six micro-batches with a window of four: four, then two.

        >>> from accel_callbacks.loop.gradient_window import GradientWindow
        >>> window = GradientWindow(4)
        >>> for left in (6, 5, 4, 3, 2, 1):
        ...     window.enter(left)
        ...     print(window.divisor, window.sync, end="; ")
        ...     window.leave()
        4 False; 4 False; 4 False; 4 True; 2 False; 2 True;
    """

    __slots__ = (
        "abandoned",
        "block",
        "dirty",
        "divisor",
        "index",
        "normalizer",
        "num_steps",
        "plugin",
        "position",
        "stepped",
        "sync",
        "touched",
    )

    def __init__(
        self,
        num_steps: int = 1,
        plugin: GradientAccumulationPlugin | None = None,
        averaged_over: int = 1,
        loss_world: int | None = None,
    ) -> None:
        self.normalizer = Normalizer(averaged_over, loss_world)
        # An engine's own configuration may have said another number of steps than the plugin.
        self.plugin = replace(plugin or GradientAccumulationPlugin(), num_steps=num_steps)
        self.position = 0
        self.resize(num_steps)
        self.sync = True
        self.index = 0
        self.touched = self.stepped = False
        self.dirty = False
        self.abandoned = -1
        self.block: list[torch.nn.Module] | None = None

    def resize(self, num_steps: int) -> None:
        """Set the length of windows, from the next one on.

        Raises:
            ValueError: ``num_steps`` is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={num_steps} must be at least 1.")
        self.num_steps = num_steps
        # Losses of an open window were divided by its own length.
        if self.position == 0:
            self.divisor = num_steps

    def enter(self, remaining: int | None, unsized: Sequence[DataLoaderShard] = ()) -> None:
        """Start a micro-batch.

        Args:
            remaining: micro-batches left in the epoch, this one included; ``None`` if unknown.
            unsized: loaders that do not know how many are left. They are asked whether this is the
                last only within a window, for a stream reads ahead to answer.
        """
        self.touched = self.stepped = False
        if not self.plugin.sync_with_dataloader:
            remaining, unsized = None, ()
        # The length is fixed at the first micro-batch, because its loss is divided already.
        if self.position == 0:
            known = remaining is not None and remaining < self.num_steps
            self.divisor = remaining if known and remaining else self.num_steps
        self.position += 1
        full = self.position >= self.divisor or remaining == 1
        self.sync = full or any(loader.on_last for loader in unsized)

    def leave(self) -> None:
        """End the micro-batch, and the window with it if it was the last."""
        if self.sync:
            self.close()

    def leave_loader(self) -> None:
        """Abandon an open window at the end of a pass, unless windows span passes."""
        if self.is_open and self.plugin.sync_with_dataloader:
            self.abandon()

    def close(self) -> None:
        """End the window, also before it is full."""
        if self.position:
            self.index += 1
        self.position = 0
        self.divisor = self.num_steps
        self.sync = True

    def abandon(self) -> None:
        """Leave the window early; its gradients must not reach the next one."""
        if self.position > 0:
            self.dirty, self.abandoned = True, self.index
        self.close()

    @property
    def is_open(self) -> bool:
        """True between the micro-batches of one window."""
        return self.position > 0 and not self.sync

    @property
    def correction(self) -> float:
        """The factor for gradients of a window that ended earlier than planned, else 1.

        This happens only for loaders that do not know their length.
        """
        if self.position == 0 or self.position == self.divisor or not self.sync:
            return 1.0
        return self.divisor / self.position
