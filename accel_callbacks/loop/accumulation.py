"""Gradient accumulation: the context of one micro-batch, and the decision for no_sync."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from accel_callbacks.loop.loop import Loop
from accel_callbacks.strategies import Strategy

__all__ = ["Accumulate"]


class Accumulate(AbstractContextManager["Accumulate"]):
    """One micro-batch of a gradient window; see ``Accelerator.accumulate``.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> for _ in range(2):
        ...     with accel.accumulate():
        ...         print(accel.sync_gradients)
        False
        True
    """

    _stack: ExitStack | None = None  # of the strategy, in a micro-batch that leaves gradients apart

    def __init__(self, loop: Loop, strategy: Strategy, models: tuple[torch.nn.Module, ...]) -> None:
        self._loop = loop
        self._strategy = strategy
        self._models = models

    def __enter__(self) -> Accumulate:
        loop = self._loop
        if loop.outer is None and not loop.stages:
            loop.own_batches.enter_block()
        # The window before was left early, by an error or at the end of a pass.
        window = loop.window
        if window.dirty:
            loop.drop_gradients()
        if window.num_steps == 1 and window.position == 0:
            # Hot path: a window of one micro-batch ends with it, however many are left.
            window.touched = window.stepped = False
            window.position, window.sync = 1, True
            return self
        window.enter(*loop.progress.remaining(loop.active))
        # The strategy may leave gradients on the rank until the last backward of a window, which
        # averages the sums.
        if not window.sync and self._strategy.has_gradient_sync:
            each = window.plugin.sync_each_batch and not self._strategy.owns_step
            if not each:
                self._stack = ExitStack()
                for model in self._models or loop.models:
                    self._stack.enter_context(self._strategy.accumulate(model))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._stack is not None:
            self._stack.close()
        loop = self._loop
        window = loop.window
        if error is None:
            loop.worked = True
            if loop.own_batches.in_block:
                stepped = window.sync
                window.leave()
                loop.own_batches.leave_block(stepped=stepped)
            elif window.sync:
                window.close()
        else:
            window.abandon()
            if loop.own_batches.in_block:
                loop.drop_own_batch()
