"""float16 with a loss scaler, which skips steps whose gradients overflowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from accel_callbacks.gradients import has_gradients
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.precision import GradScalerKwargs
from accel_callbacks.precision.amp import Autocast
from accel_callbacks.precision.base import StepFinding

__all__ = ["FP16"]


class _Scaler(torch.amp.GradScaler):
    """torch's scaler, for optimizers that hold shards beside other tensors too."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        # One call for each mesh: the kernel takes DTensors of one mesh or plain tensors, not both.
        by_mesh: dict[Any, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        if len(by_mesh) <= 1:
            return super()._unscale_grads_(optimizer, *args)
        flags: dict[torch.device, torch.Tensor] = {}
        for parameters in by_mesh.values():
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            for device, flag in super()._unscale_grads_(part, *args).items():
                flags[device] = flags[device] + flag if device in flags else flag.clone()
        return flags


class FP16(Autocast):
    """Autocast to float16, with dynamic loss scaling shared by all optimizers.

    Args:
        device: the device that the model computes on.
        handlers: for their :class:`accel_callbacks.GradScalerKwargs` and
            :class:`accel_callbacks.AutocastKwargs`.

    Raises:
        ValueError: the device has no autocast to float16, or this torch cannot unscale there.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import FP16
        >>> FP16(torch.device("cpu")).scale(torch.tensor(1.0)).item()
        65536.0
    """

    name = "fp16"
    dtype = torch.float16
    scaler: torch.amp.GradScaler

    def __init__(self, device: torch.device, handlers: Handlers | None = None) -> None:
        super().__init__(device, handlers)
        options = self.handlers.get(GradScalerKwargs, GradScalerKwargs())
        self.scaler = _Scaler(device.type, **options.to_kwargs())
        if device.type == "mps" and options.enabled:
            _check_scaler(device)
        self.scales_loss = options.enabled
        self._unscaled: set[int] = set()
        self._stepped = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the current scale."""
        self._update()
        return self.scaler.scale(loss)

    def is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether :meth:`unscale` would divide the gradients of this optimizer."""
        return self.scales_loss and id(optimizer) not in self._unscaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, at most once a step.

        Raises:
            RuntimeError: no loss was scaled so far.
        """
        if id(optimizer) not in self._unscaled and has_gradients(optimizer):
            if self.scaler.is_enabled() and self.scaler._scale is None:
                raise RuntimeError(
                    "there are gradients, and no loss was scaled for fp16 yet: call "
                    "accel.backward(loss) in place of loss.backward()."
                )
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool | StepFinding, Any]:
        """Step unless a gradient is infinite or nan.

        A fused optimizer decides that on the device, and the host does not wait for it.

        Raises:
            RuntimeError: a closure is passed; the gradients that it computes would stay scaled.
        """
        if not self.scales_loss:
            return super().step(optimizer, args, kwargs)
        if args or kwargs:
            raise RuntimeError("fp16 cannot step with a closure; use bf16 instead.")
        if not has_gradients(optimizer):  # the scaler raises without any gradient
            return True, optimizer.step()
        self.unscale(optimizer)
        # The gradients of the next backward are scaled again.
        self._unscaled.discard(id(optimizer))
        finding = StepFinding(_sum_flags(self.scaler._found_inf_per_device(optimizer).values()))
        self._stepped = True  # also if it is skipped: the update lowers the scale for that
        on_mps = self.device.type == "mps"
        if on_mps and not finding.stepped:
            # The scaler leaves the skip to a fused optimizer, which does not do it on MPS before
            # pytorch#186360.
            return False, None
        result = self.scaler.step(optimizer)
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not on_mps:
            return finding, result
        return finding.stepped, result  # which the scaler, or this, has read already

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the step; the scale is still updated by overflows in the unused gradients."""
        if id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            self._stepped = True

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the optimizer in the scaler, because its next gradients are scaled again."""
        if id(optimizer) in self._unscaled:  # unscaled to clip, and then cleared without a step
            self._unscaled.discard(id(optimizer))
            self.scaler._per_optimizer_states.pop(id(optimizer), None)

    def state_dict(self) -> dict[str, Any]:
        """Return scale and growth counter."""
        self._update()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore scale and growth counter; an empty state was saved without a scaler."""
        self._update()  # before loading, so that it does not change the loaded scale
        # Gradients that were unscaled to clip, and not stepped with, are gone too.
        self._unscaled.clear()
        self.scaler._per_optimizer_states.clear()
        if state:
            self.scaler.load_state_dict(dict(state))

    def _update(self) -> None:
        # Deferred until the next backward: update() resets which optimizers were unscaled, and a
        # second optimizer may still have to step with the gradients of the same backward.
        if self._stepped:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped = False


def _sum_flags(flags: Collection[torch.Tensor]) -> torch.Tensor:
    """Add up the flags of several devices, on the first one."""
    first, *others = flags
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    return first


def _check_scaler(device: torch.device) -> None:
    """Refuse a torch whose scaler fails in the first step: in 2.6 and 2.7 it needs float64."""
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    weight.grad = torch.zeros(1, device=device)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros(1, device=device))
    try:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    except (TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        raise ValueError(
            f"mixed_precision='fp16' does not work on {device} with torch {torch.__version__}, "
            "which cannot unscale gradients there: use 'bf16', or torch 2.8 or newer."
        ) from error
