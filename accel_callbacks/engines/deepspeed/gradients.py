"""Gradients that engines of DeepSpeed reduce, and keep until the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from accel_callbacks.engines.deepspeed.optimizer import EngineOptimizer, engine_norm
from accel_callbacks.engines.deepspeed.zero_agreement import ZeroAgreement
from accel_callbacks.engines.deepspeed.zero_state import gradient_parts, is_zero
from accel_callbacks.gradients import clip_norm, has_gradients, parameters_of
from accel_callbacks.strategy.gradients import Gradients

__all__ = ["EngineGradients"]


class EngineGradients(Gradients):
    """Gradients of models that engines train.

    Args:
        optimizers: by model, those of the engines.
        agreement: compares what the ranks reduce.
    """

    def __init__(
        self,
        optimizers: Mapping[torch.nn.Module, EngineOptimizer],
        agreement: ZeroAgreement,
    ) -> None:
        self._optimizers = optimizers
        self._agreement = agreement
        self._called: list[Any] = []  # engines since the last backward
        self._boundary = True  # the next backward is the last one of a window

    @property
    def keeps_gradients_apart(self) -> bool:
        """True under ZeRO, which reduces and partitions gradients within a window."""
        return any(is_zero(optimizer.engine) for optimizer in self._optimizers.values())

    def note_call(self, engine: Any, inputs: Any) -> None:
        """Note that an engine is called: a hook before its forward."""
        if torch.is_grad_enabled() and engine not in self._called:
            self._called.append(engine)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of the engine whose model was called.

        Raises:
            RuntimeError: several models were called since the last backward; or the window is full,
                and there was no step.
        """
        seed = kwargs.pop("gradient", None)
        if seed is not None:
            loss = loss * seed if loss.dim() == 0 else (loss * seed).sum()
        called, self._called = self._called, []
        if not called:
            called = [optimizer.engine for optimizer in self._optimizers.values()]
        if len(called) != 1:
            raise RuntimeError(
                f"backward: {len(called)} models were called since the last backward, and "
                "DeepSpeed runs it for one: call backward for the loss of each, or put the "
                "models into one module."
            )
        engine = called[0]
        optimizer = next(
            optimizer for optimizer in self._optimizers.values() if optimizer.engine is engine
        )
        if optimizer.closed:
            raise RuntimeError(
                "backward: the gradients of a full window wait for a step, and DeepSpeed has "
                "averaged them already: put the body of the loop into "
                "`with accel.accumulate(model):`, or call optimizer.step() after each backward."
            )
        # Before backward: in it ZeRO decides whether gradients are averaged for the step.
        engine.set_gradient_accumulation_boundary(self._boundary)
        optimizer.micro_batches += 1
        optimizer.closed = self._boundary
        self._agreement.start_backward(engine)
        engine.backward(loss, **kwargs)
        self._agreement.finish_backward(engine, self._boundary)

    def averages(self, model: torch.nn.Module) -> bool:
        """Return False: the engine averages gradients wherever they come from."""
        return False

    @contextmanager
    def no_sync(self, model: torch.nn.Module, *, in_window: bool = False) -> Iterator[None]:
        """Context manager: backward is not the last one of a window.

        ZeRO may reduce gradients all the same.
        """
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    @contextmanager
    def trigger_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Context manager: backward is the last one of a window."""
        before, self._boundary = self._boundary, True
        try:
            yield
        finally:
            self._boundary = before

    def join(
        self, models: Sequence[Any], follow: Callable[[Callable[[Any], Any]], None]
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs.

        Raises:
            ValueError: always: a rank without a batch could not do its part of the step.
        """
        raise ValueError(
            "join_uneven_inputs does not work with DeepSpeed: let prepare() split the data evenly."
        )

    def mark_unsynced(self, model: torch.nn.Module) -> None:
        """Refuse to train ranks apart.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "LocalSGD does not work with DeepSpeed: use gradient_accumulation_steps to communicate "
            "less, or train without the deepspeed_plugin."
        )

    def has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the engine holds gradients."""
        if isinstance(optimizer, EngineOptimizer):
            return optimizer.micro_batches > 0
        return has_gradients(optimizer)

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients that the engine has reduced in an open window."""
        if isinstance(optimizer, EngineOptimizer) and optimizer.micro_batches:
            optimizer.zero_grad()

    def _optimizers_of(self, parameters: Iterable[torch.Tensor]) -> list[EngineOptimizer]:
        """Return the optimizers of the engines that parameters belong to.

        Raises:
            ValueError: some parameters of an engine are left out.
        """
        ids = {id(parameter) for parameter in parameters}
        optimizers = []
        for optimizer in self._optimizers.values():
            trained = {id(p) for p in parameters_of([optimizer]) if p.requires_grad}
            if not trained & ids:
                continue
            if missing := trained - ids:
                raise ValueError(
                    f"clipping: {len(missing)} of {len(trained)} trained parameters were left out, "
                    "and DeepSpeed clips all of a model: pass model.parameters()."
                )
            optimizers.append(optimizer)
        return optimizers

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Let the next step clip by the total norm, and return that norm.

        Raises:
            ValueError: DeepSpeed's configuration clips to another norm, or the norm is not 2.
        """
        parameters = list(parameters)
        norms = []
        for optimizer in self._optimizers_of(parameters):
            if optimizer.clipping and optimizer.clipping != max_norm:
                raise ValueError(
                    f"clip_grad_norm_(max_norm={max_norm}) contradicts gradient_clipping="
                    f"{optimizer.clipping} of DeepSpeed's configuration: make it 'auto' there, or "
                    "leave the call out."
                )
            if not is_zero(optimizer.engine):  # the engine averaged parameter.grad in backward
                norms.append(clip_norm(parameters, max_norm, norm_type))
                continue
            if norm_type != 2.0:
                raise ValueError(f"norm_type={norm_type}: ZeRO clips by the 2-norm alone.")
            optimizer.set_clipping(float(max_norm))
            norms.append(engine_norm(optimizer.engine))
        if not norms:
            return clip_norm(parameters, max_norm, norm_type)
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        for optimizer in self._optimizers_of(parameters):
            # Under fp16 they stay multiplied by the scale of the loss until the step.
            scale = float(getattr(optimizer.engine.optimizer, "loss_scale", 1.0))
            for part in gradient_parts(optimizer.engine):
                part.clamp_(-clip_value * scale, clip_value * scale)
