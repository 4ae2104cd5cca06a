"""The training step: backward, clipping, and gradients at their true size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import explain
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.loop.first_steps import FirstSteps
from accel_callbacks.loop.loop import Loop
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import Precision
from accel_callbacks.strategy import Gradients

__all__ = ["StepEngine"]


class StepEngine:
    """Runs backward and clips gradients, as the gradient window and the precision ask for.

    Args:
        gradients: knows whether some wait for a step.
        precision: scales losses and unscales gradients.
        loop: has the gradient window and fires the hooks.
        optimizers: the prepared optimizers, a list that grows.
        first_steps: runs backward and clips, and notes that it is the Accelerator's.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> Accelerator(cpu=True).backward(weight * 3)
        >>> weight.grad
        tensor(3.)
    """

    def __init__(
        self,
        gradients: Gradients,
        precision: Precision,
        loop: Loop,
        optimizers: Sequence[AcceleratedOptimizer],
        first_steps: FirstSteps,
    ) -> None:
        self._gradients = gradients
        self._precision = precision
        self._loop = loop
        # Bound here, because backward is the hot path; they stay the same objects.
        self._state, self._position = loop.step, loop.position
        self._window, self._dispatch = loop.window, loop.dispatch
        self._optimizers = optimizers
        self._first_steps = first_steps
        self._seeds: dict[Any, torch.Tensor] = {}

    def backward(
        self, loss: torch.Tensor, normalizer: float | torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        """Run backward, averaged over the gradient window; see ``Accelerator.backward``.

        Example:
            Two micro-batches of 3 and 1 tokens; each token counts the same.

            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.tensor(2.0, requires_grad=True)
            >>> accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
            >>> for tokens in (torch.ones(3), torch.ones(1) * 5):
            ...     with accel.accumulate():
            ...         accel.backward((weight * tokens).sum(), normalizer=tokens.numel())
            ...         optimizer.step()
            >>> weight
            tensor(0., requires_grad=True)
        """
        step = self._state
        if remote_failure.pending is not None:
            remote_failure.raise_in("backward")
        if step.before_work is not None:
            step.before_work("backward")
        if self._position.outer is None and not self._position.stages:
            self._loop.own_batches.before_backward()
        # Of loss_parallel, equal on all ranks. A plain tensor is told by its type.
        if type(loss) is not Tensor and collectives.is_sharded(loss):
            loss = loss.full_tensor()  # type: ignore[attr-defined]
        hooks = self._dispatch.hooks
        for hook in hooks["on_before_backward"]:
            hook(self._loop.run, self._loop.model, loss)
        window = self._window
        # As the user computed it, before any division; kept only for a callback that gets it.
        if self._dispatch.keeps_loss:
            step.last_loss = loss.detach()
        divisor = window.divisor
        if normalizer is not None or window.normalizer.active:
            loss, divisor = self._normalize(loss, normalizer)
        step.worked = window.touched = True
        # GradScaler multiplies the loss itself, so the loss is divided here and not the seed.
        if self._precision.scales_loss:
            loss = self._precision.scale(loss if divisor == 1 else loss / divisor)
        elif divisor != 1:
            loss, kwargs = self._divide(loss, divisor, kwargs)
        run_backward = self._first_steps.run_backward
        try:
            if run_backward is None:
                loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            else:
                run_backward(loss, **kwargs)
        except RuntimeError as error:
            if (cause := explain(error, "backward")) is error:
                raise
            raise cause from error
        for hook in hooks["on_after_backward"]:
            hook(self._loop.run, self._loop.model)

    def _normalize(
        self, loss: torch.Tensor, normalizer: float | torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """Return the loss for backward, and the divisor that is left."""
        window, counts = self._window, self._window.normalizer
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
        inner = (prepared.optimizer for prepared in self._optimizers)
        if inside and any(map(self._gradients.has_gradients, inner)):
            raise ValueError(mixed)
        return counts.add(loss, normalizer, expected=window.divisor), 1

    def _divide(
        self, loss: torch.Tensor, divisor: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Divide the gradients of a loss.

        A scalar is divided by starting backward from 1/divisor instead of 1, which costs no
        operation on the loss.
        """
        if loss.dim() != 0 or "gradient" in kwargs:
            return loss / divisor, kwargs
        key = (divisor, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            seed = torch.tensor(1.0 / divisor, dtype=loss.dtype, device=loss.device)
            self._seeds[key] = seed
        return loss, {**kwargs, "gradient": seed}

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients to their true size; see ``Accelerator.unscale_gradients``."""
        chosen = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for prepared in self._optimizers:
            if optimizer is None or prepared in chosen or prepared.optimizer in chosen:
                prepared.unscale_gradients()

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor | None:
        """Clip by the total norm at the end of a window; see ``Accelerator.clip_grad_norm_``.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> accel = Accelerator(cpu=True)
            >>> accel.backward((weight * 4).sum())
            >>> accel.clip_grad_norm_([weight], 1.0)
            tensor(4.)
        """
        if not self._window.sync:
            return None
        self.unscale_gradients()
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        norm = self._first_steps.clipping.clip_grad_norm_(parameters, max_norm, norm_type)
        if self._state.note_norm is not None:
            self._state.note_norm(norm)
        return norm

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each element at the end of a window; see ``Accelerator.clip_grad_value_``.

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
        if not self._window.sync:
            return
        self.unscale_gradients()
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        self._first_steps.clipping.clip_grad_value_(parameters, clip_value)
