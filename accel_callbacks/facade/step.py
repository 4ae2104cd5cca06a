"""The training step: accumulate, backward, clip."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks.contexts import Accumulate
from accel_callbacks.facade.parts import Parts

__all__ = ["StepMethods"]


class StepMethods(Parts):
    """What a training step calls."""

    _one_over: dict[Any, torch.Tensor]

    @property
    def sync_gradients(self) -> bool:
        """True where gradients synchronise and the optimizer really steps."""
        return self.window.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full gradient window; may be set between windows."""
        return self.window.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.window.resize(value)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return self.precision.name

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if a prepared optimizer left its last step out because of an fp16 overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> Accumulate:
        """Context manager around the body of the loop: one micro-batch of a gradient window.

        Inside, the prepared optimizer, scheduler and clipping act only at the end of a window,
        the loss is divided by the real number of micro-batches (the tail of an epoch included),
        and gradients stay on their process until then.

        Args:
            *models: the prepared models that are trained in the block; all of them if none.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
            >>> for value in (1.0, 3.0):
            ...     with accel.accumulate(model):
            ...         accel.backward(model(torch.tensor([[value]])).sum())
            >>> model.weight.grad
            tensor([[2.]])
        """
        return Accumulate(self.loop, self.strategy, models or tuple(self.models))

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward leaves the gradients of ``model`` on this process.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.no_sync(model):
            ...     accel.backward(model(torch.ones(1, 1)).sum())
        """
        return self.strategy.no_sync(model)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for computation outside of a prepared model, in the chosen precision.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accel.autocast():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        return self.precision.autocast()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass of a loss: averaged over the gradient window, scaled for fp16.

        Outside of ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, for
        loops that count micro-batches themselves.

        Args:
            loss: scalar tensor (or any tensor, with ``gradient=`` as in ``Tensor.backward``).
            **kwargs: handed to ``Tensor.backward``.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.tensor(2.0, requires_grad=True)
            >>> Accelerator(cpu=True).backward(weight * 3)
            >>> weight.grad
            tensor(3.)
        """
        loop = self.loop
        dispatch = loop.dispatch
        for hook in dispatch["on_before_backward"]:
            hook(loop.run, loop.model, loss)
        loop.worked = self.window.touched = True
        loop.last_loss = loss.detach() if dispatch["on_train_batch_end"] else None
        divisor = self.window.divisor
        if self.precision.scales_loss:
            loss = self.precision.scale(loss if divisor == 1 else loss / divisor)
        elif divisor != 1:
            loss, kwargs = self._divided(loss, divisor, kwargs)
        self.strategy.backward(loss, **kwargs)
        for hook in dispatch["on_after_backward"]:
            hook(loop.run, loop.model)

    def _divided(
        self, loss: torch.Tensor, divisor: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Divide by starting backward from 1/divisor, which costs no operation on the loss."""
        if loss.dim() != 0 or "gradient" in kwargs:
            return loss / divisor, kwargs
        key = (divisor, loss.dtype, loss.device)
        seed = self._one_over.get(key)
        if seed is None:
            seed = torch.tensor(1.0 / divisor, dtype=loss.dtype, device=loss.device)
            self._one_over[key] = seed
        return loss, {**kwargs, "gradient": seed}

    def unscale_gradients(self) -> None:
        """Bring the gradients of all prepared optimizers to their true size, once a step.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).unscale_gradients()
        """
        for optimizer in self.optimizers:
            optimizer.settle_gradients()

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm, at the end of a gradient window.

        Returns:
            The total norm before clipping, or ``None`` inside of a window, where nothing is done.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> accel = Accelerator(cpu=True)
            >>> accel.backward((weight * 4).sum())
            >>> accel.clip_grad_norm_([weight], 1.0)
            tensor(4.)
        """
        if not self.window.sync:
            return None
        self.unscale_gradients()
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``, at the end of a window.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> accel = Accelerator(cpu=True)
            >>> accel.backward((weight * 4).sum())
            >>> accel.clip_grad_value_([weight], 0.5)
            >>> weight.grad
            tensor([0.5000])
        """
        if not self.window.sync:
            return
        self.unscale_gradients()
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        self.strategy.clip_grad_value_(parameters, clip_value)
