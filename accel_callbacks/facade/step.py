"""The training step: accumulate, backward, clip."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel_callbacks.errors import refuse_half_loaded
from accel_callbacks.facade.parts import Parts
from accel_callbacks.gradients import has_gradients
from accel_callbacks.loop.contexts import Accumulate
from accel_callbacks.loop.step_boundary import poll_outside
from accel_callbacks.plugins.precision import AutocastKwargs

__all__ = ["StepMethods"]


class StepMethods(Parts):
    """What a training step calls."""

    _one_over: dict[Any, torch.Tensor]

    @property
    def sync_gradients(self) -> bool:
        """True where gradients synchronise and the optimizer really steps."""
        return self.window.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.window.sync = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full gradient window; may be set between windows."""
        return self.window.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.window.resize(value)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16, ``None`` for other precisions."""
        return self.precision.scaler

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

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which the next backward synchronises, though its forwards ran in no_sync.

        For several forward passes of one model and a single backward through all of them.

        Args:
            model: a prepared model.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.no_sync(model):
            ...     loss = model(torch.ones(1, 1)).sum() + model(torch.zeros(1, 1)).sum()
            >>> with accel.trigger_sync_in_backward(model):
            ...     accel.backward(loss)
        """
        return self.strategy.trigger_sync(model)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Context for computation outside of a prepared model, in the chosen precision.

        Args:
            autocast_handler: options instead of the Accelerator's. With
                ``AutocastKwargs(enabled=False)`` it is full precision, in another block too.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accel.autocast():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        if not isinstance(autocast_handler, AutocastKwargs | None):
            raise TypeError(f"autocast_handler={autocast_handler!r} must be an AutocastKwargs.")
        return self.precision.autocast(autocast_handler)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        normalizer: float | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Backward pass of a loss: averaged over the gradient window, scaled for fp16.

        Outside of ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, for
        loops that count micro-batches themselves.

        With ``normalizer``, the loss is a sum over that many units (tokens, say), and the step
        is taken with the gradients of the mean over all units of the window on all processes,
        however they are spread. Gradients have that size from clipping on, or from the step.

        Args:
            loss: scalar tensor (or any tensor, with ``gradient=`` as in ``Tensor.backward``).
            normalizer: units that ``loss`` was summed over; a number, or a tensor with one
                element. All processes give it, or none.
            **kwargs: handed to ``Tensor.backward``.

        Raises:
            ValueError: a second loss with a normalizer in one micro-batch, or losses with and
                without one in a window.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.tensor(2.0, requires_grad=True)
            >>> Accelerator(cpu=True).backward(weight * 3)
            >>> weight.grad
            tensor(3.)

            Two micro-batches of 3 and 1 tokens; each token counts the same.

            >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
            >>> optimizer.zero_grad()
            >>> for tokens in (torch.ones(3), torch.ones(1) * 5):
            ...     with accel.accumulate():
            ...         accel.backward((weight * tokens).sum(), normalizer=tokens.numel())
            ...         optimizer.step()
            >>> weight
            tensor(0., requires_grad=True)
        """
        loop = self.loop
        if loop.half_loaded is not None:
            refuse_half_loaded(loop.half_loaded, "backward")
        if loop.saves.pending:
            poll_outside(loop)
        dispatch = loop.dispatch
        for hook in dispatch.hooks["on_before_backward"]:
            hook(loop.run, loop.model, loss)
        window = self.window
        loop.last_loss = loss.detach() if dispatch.hooks["on_train_batch_end"] else None
        divisor = window.divisor
        if normalizer is not None or window.normalizer.active:
            loss, divisor = self._normalized(loss, normalizer)
        loop.worked = window.touched = True
        if self.precision.scales_loss:
            loss = self.precision.scale(loss if divisor == 1 else loss / divisor)
        elif divisor != 1:
            loss, kwargs = self._divided(loss, divisor, kwargs)
        self.strategy.backward(loss, **kwargs)
        for hook in dispatch.hooks["on_after_backward"]:
            hook(loop.run, loop.model)

    def _normalized(
        self, loss: torch.Tensor, normalizer: float | torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """The loss to call backward on, and what is left to divide it by."""
        window, counts = self.window, self.window.normalizer
        mixed = "a window has losses with a normalizer and without: give it each time, or never."
        if normalizer is None:
            if counts.pending:
                raise ValueError(mixed)
            counts.forget()
            return loss, window.divisor
        if counts.pending and (window.touched or window.position == 0):
            raise ValueError(
                "a second loss with a normalizer, and no step after the first: add the losses of "
                "a micro-batch up, and put each micro-batch inside `with accel.accumulate(model)`."
            )
        inside = window.position > 1 and not counts.pending
        if inside and any(has_gradients(optimizer) for optimizer in self.optimizers):
            raise ValueError(mixed)
        return counts.add(loss, normalizer, expected=window.divisor), 1

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

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients to their true size, once a step: loss scale, and what a window weighs.

        Args:
            optimizer: a prepared optimizer, or several in a list or tuple; all where ``None``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).unscale_gradients()
        """
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for own in self.optimizers:
            if optimizer is None or own in chosen or own.optimizer in chosen:
                own.settle_gradients()

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
