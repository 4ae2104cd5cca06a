"""FiniteCheck: check on the device whether loss and gradients are finite, and read it later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.averaged_weights import local_part

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "FiniteCheck",
    "GradientNorms",
    "measure_gradients",
    "parameter_names",
    "parameters_of",
    "scaler_handles_overflow",
]

_MAX_NAMES = 3  # parameters named in a message
_ASYNC_COPIES = ("cuda", "xpu")  # devices that copy to pinned memory without blocking the host


@dataclass
class GradientNorms:
    """A norm of each gradient, on the device; it is finite if the gradient is.

    Args:
        parameters: whose gradients they are, grouped by device and dtype.
        norms: a tensor for each group, with one number for each parameter.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.finite import measure_gradients
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (weight * torch.tensor([1.0, torch.inf])).sum().backward()
        >>> measure_gradients([weight]).bad_names({id(weight): "weight"})
        ['weight']
    """

    parameters: list[list[torch.Tensor]] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)

    def is_bad(self, device: torch.device) -> torch.Tensor:
        """Return whether any gradient is not finite, as a tensor on a device."""
        if not self.norms:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([(~one.isfinite()).any().to(device) for one in self.norms]).any()

    def bad_names(self, known: Mapping[int, str]) -> list[str]:
        """Return the names of gradients that are not finite; waits for the device.

        Args:
            known: names by ``id`` of the parameter; the result has their order.
        """
        bad = {
            id(parameter)
            for parameters, norms in zip(self.parameters, self.norms, strict=True)
            for parameter, finite in zip(parameters, norms.isfinite().tolist(), strict=True)
            if not finite
        }
        named = [name for key, name in known.items() if key in bad]
        return named + ["a parameter of no prepared model"] * (len(bad) - len(named))


@torch.no_grad()
def measure_gradients(parameters: Sequence[torch.Tensor]) -> GradientNorms:
    """Measure the gradients of parameters; of sharded ones, this rank's part."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        dense = parameter.grad
        part = dense.coalesce().values() if dense.is_sparse else local_part(dense)
        if part.numel():
            members, parts = groups.setdefault((part.device, part.dtype), ([], []))
            members.append(parameter)
            parts.append(part)
    measured = GradientNorms()
    for members, parts in groups.values():
        measured.parameters.append(members)
        measured.norms.append(_norms(parts))
    return measured


def _norms(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return one number for each tensor, finite if all of its elements are."""
    if parts[0].device.type == "cpu":
        # The 2-norm is ten times faster on the CPU; it overflows for huge finite elements, so a
        # result that is not finite is checked again with the infinity norm.
        norms = torch.stack(torch._foreach_norm(parts, 2.0))
        if bool(norms.isfinite().all()):
            return norms
    return torch.stack(torch._foreach_norm(parts, torch.inf))


class FiniteCheck:
    """A check of one step's loss and gradients, reduced over the ranks and read later.

    Args:
        step: the step about to be taken, from 1.
        loss: the sum of the losses of the step, or ``None``.
        gradients: their norms, or ``None``.
        overflow: on the device, whether the loss scaler handles gradients that are not finite;
            ``None`` without a scaler.
        collective: reduce over the ranks, all of which must make the check.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.finite import FiniteCheck
        >>> check = FiniteCheck(3, torch.tensor(torch.nan), None)
        >>> check.is_bad()
        True
        >>> check.describe({})
        'step 3: the loss is nan'
    """

    def __init__(
        self,
        step: int,
        loss: torch.Tensor | None,
        gradients: GradientNorms | None,
        *,
        overflow: torch.Tensor | None = None,
        collective: bool = True,
    ) -> None:
        self.step = step
        self._loss, self._gradients, self._overflow = loss, gradients, overflow
        self._device = device = _device_of(loss, gradients)
        self._event: Any = None
        self._flags = torch.stack([self._loss_flag(device), self._gradient_flag(device)]).int()
        if collective and collectives.world_size() > 1:
            self._flags = collectives.reduce(self._flags, "max")
        if self._flags.device.type in _ASYNC_COPIES:
            self._start_copy()

    @property
    def waits(self) -> bool:
        """True if reading the result now would block on the device."""
        return self._device.type != "cpu"

    def _loss_flag(self, device: torch.device) -> torch.Tensor:
        if self._loss is None:
            return torch.zeros((), dtype=torch.bool, device=device)
        return ~self._loss.isfinite()

    def _gradient_flag(self, device: torch.device) -> torch.Tensor:
        if self._gradients is None:
            return torch.zeros((), dtype=torch.bool, device=device)
        bad = self._gradients.is_bad(device)
        return bad if self._overflow is None else bad & ~self._overflow.to(device)

    def _start_copy(self) -> None:
        """Start the copy to the host; only reading the result waits for it."""
        host = torch.empty(
            self._flags.shape, dtype=self._flags.dtype, device="cpu", pin_memory=True
        )
        host.copy_(self._flags, non_blocking=True)
        self._event = torch.Event(self._flags.device)
        self._event.record()
        self._flags = host

    def is_bad(self) -> bool:
        """Return whether loss or gradients are not finite on any rank; waits for the device."""
        return any(self._read())

    def _read(self) -> list[bool]:
        if self._event is not None:
            self._event.synchronize()
        return [bool(flag) for flag in self._flags.tolist()]

    def describe(self, known: Mapping[int, str]) -> str:
        """Describe the values that are not finite.

        Args:
            known: names of parameters by their ``id``; the first few are in the text.
        """
        loss_bad, gradients_bad = self._read()
        parts = []
        if loss_bad:
            value = float("nan") if self._loss is None else float(self._loss)
            here = not torch.isfinite(torch.tensor(value, device="cpu")) and self._loss is not None
            parts.append(f"the loss is {value}" if here else "the loss of another rank is bad")
        if gradients_bad:
            names = [] if self._gradients is None else self._gradients.bad_names(known)
            parts.append(_gradients_text(names))
        return f"step {self.step}: {', and '.join(parts)}"


def _gradients_text(names: list[str]) -> str:
    if not names:
        return "gradients of another rank are not finite"
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"the gradients of {shown}{more} are not finite"


def _device_of(loss: torch.Tensor | None, gradients: GradientNorms | None) -> torch.device:
    if loss is not None:
        return loss.device
    norms = gradients.norms if gradients is not None else []
    return norms[0].device if norms else torch.device("cpu")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameter_names(run: TrainingRun) -> dict[int, str]:
    """Return the names of parameters by ``id``, prefixed by the model's index if several."""
    models = list(run.models)
    return {
        id(parameter): f"{index}.{name}" if len(models) > 1 else name
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def scaler_handles_overflow(run: TrainingRun) -> torch.Tensor | None:
    """Return, on the device, whether the loss scale of fp16 can still be lowered."""
    scale = run.loss_scale()
    return None if scale is None else scale > 1
