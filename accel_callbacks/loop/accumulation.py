"""Gradient accumulation: the context of one micro-batch, and the decision for no_sync."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from accel_callbacks.loop.loop import Loop
from accel_callbacks.strategy import Strategy

__all__ = ["Accumulate"]


class Accumulate(AbstractContextManager["Accumulate"]):
    """One micro-batch of a gradient window; see ``Accelerator.accumulate``.

    A block inside of another one is a part of its micro-batch, and adds models to it.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> for _ in range(2):
        ...     with accel.accumulate():
        ...         print(accel.sync_gradients)
        False
        True
    """

    # Of each block of this object that is open: what to close, and whether it is inside of another.
    _open: list[tuple[ExitStack, bool]] | None = None

    def __init__(self, loop: Loop, strategy: Strategy, models: tuple[torch.nn.Module, ...]) -> None:
        self._loop = loop
        self._strategy = strategy
        self._models = models

    def __enter__(self) -> Accumulate:
        loop = self._loop
        if loop.position.outer is None and not loop.position.stages:
            loop.own_batches.enter_block()
        # The window before was left early, by an error or at the end of a pass.
        window = loop.window
        if window.dirty:
            loop.drop_gradients()
        if window.num_steps == 1 and not window.position:
            # Hot path: a window of one micro-batch ends with it, however many are left.
            window.touched = window.stepped = False
            window.position, window.sync = 1, True
            return self
        # A window of one micro-batch is left with its block, so this one is inside of that block.
        alone = window.position == window.divisor == 1 and window.sync
        inside = alone or window.block is not None
        if not inside:
            window.enter(*loop.position.progress.remaining(loop.position.active))
            window.block = []
        self._open = [*(self._open or ()), (self._hold_back(), inside)]
        return self

    def _hold_back(self) -> ExitStack:
        """Let the models leave gradients on the rank until the last backward of the window.

        That one averages the sums over the ranks.
        """
        stack, window = ExitStack(), self._loop.window
        each = window.plugin.sync_each_batch and not self._strategy.owns_step
        if window.block is None or window.sync or each or not self._strategy.has_gradient_sync:
            return stack
        for model in self._models or self._loop.models:
            # A model may be in the block around this one too, which goes on after it.
            if not any(model is held for held in window.block):
                stack.enter_context(self._strategy.gradients.no_sync(model, in_window=True))
                window.block.append(model)
                stack.callback(window.block.remove, model)
        return stack

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._open is not None:
            *outer, (stack, inside) = self._open
            self._open = outer or None
            stack.close()
            if inside:
                return
            self._loop.window.block = None
        loop = self._loop
        window = loop.window
        if error is None:
            loop.step.worked = True
            if loop.own_batches.in_block:
                stepped = window.sync
                window.leave()
                loop.own_batches.leave_block(stepped=stepped)
            elif window.sync:
                window.close()
        else:
            window.abandon()
            if loop.own_batches.in_block:
                # The next batch has the index of this one, if it did no work.
                loop.own_batches.drop()
                loop.run.batch_idx -= not loop.step.worked
