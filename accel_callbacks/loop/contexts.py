"""The context managers of a step: accumulate and evaluate."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from accel_callbacks.errors import nearest
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.passes import begin_evaluation, end_evaluation
from accel_callbacks.strategies import Strategy

__all__ = ["Accumulate", "Evaluate"]

_STAGES = ("validation", "test")


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

    __slots__ = ("_loop", "_models", "_stack", "_strategy")

    def __init__(self, loop: Loop, strategy: Strategy, models: tuple[torch.nn.Module, ...]) -> None:
        self._loop = loop
        self._strategy = strategy
        self._models = models
        self._stack: ExitStack | None = None

    def __enter__(self) -> Accumulate:
        loop = self._loop
        if loop.window.dirty:
            loop.drop_gradients()
        remaining, last = loop.deliveries.remaining(loop.active[-1] if loop.active else None)
        loop.window.enter(remaining, last)
        window = loop.window
        local = not window.sync and not window.plugin.sync_each_batch
        if local and self._strategy.has_gradient_sync:
            self._stack = ExitStack()
            for model in self._models:
                self._stack.enter_context(self._strategy.no_sync(model))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._stack is not None:
            self._stack.close()
        if error is None:
            self._loop.worked = True
            self._loop.window.leave()
        else:
            self._loop.window.abandon()


class Evaluate(AbstractContextManager["Evaluate"]):
    """An evaluation; see ``Accelerator.evaluate``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = accel.prepare(torch.nn.Dropout(0.5))
        >>> with accel.evaluate(model):
        ...     print(model.training, torch.is_grad_enabled())
        False False
        >>> model.training
        True
    """

    def __init__(
        self, loop: Loop, models: tuple[torch.nn.Module, ...], stage: str = "validation"
    ) -> None:
        if stage not in _STAGES:
            hint = nearest(str(stage), _STAGES)
            raise ValueError(f"stage={stage!r} is neither 'validation' nor 'test'.{hint}")
        self._loop = loop
        self._models = models
        self._stage = stage
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._grad = torch.no_grad()

    def __enter__(self) -> Evaluate:
        begin_evaluation(self._loop, self._stage)
        # Every module's own mode, so that frozen parts kept in eval mode stay so afterwards.
        self._modes = [(m, m.training) for model in self._models for m in model.modules()]
        for model in self._models:
            model.eval()
        self._grad.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._grad.__exit__(kind, error, trace)
        for module, mode in self._modes:
            module.training = mode
        end_evaluation(self._loop, self._stage, failed=error is not None)
