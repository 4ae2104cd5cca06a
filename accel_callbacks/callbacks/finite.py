"""Whether the loss and the gradients of a step are finite: found on the device, read later."""

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
    "Finding",
    "GradientLook",
    "look_at",
    "may_overflow",
    "names_of",
    "parameters_of",
]

_NAMED = 3  # parameters that a text names
_COPIES_ALONE = ("cuda", "xpu")  # devices that copy to pinned memory while the host goes on


@dataclass
class GradientLook:
    """A size of each gradient, on the device, that tells whether it is finite.

    Args:
        parameters: whose gradients they are, by device and dtype.
        sizes: one number each; infinite or not a number where an element is.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.finite import look_at
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (weight * torch.tensor([1.0, torch.inf])).sum().backward()
        >>> look_at([weight]).names({id(weight): "weight"})
        ['weight']
    """

    parameters: list[list[torch.Tensor]] = field(default_factory=list)
    sizes: list[torch.Tensor] = field(default_factory=list)

    def is_bad(self, device: torch.device) -> torch.Tensor:
        """Whether some gradient is not finite, as a tensor there."""
        if not self.sizes:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([(~one.isfinite()).any().to(device) for one in self.sizes]).any()

    def names(self, known: Mapping[int, str]) -> list[str]:
        """The parameters whose gradients are not finite, in the order of ``known``; waits."""
        bad = {
            id(parameter)
            for parameters, sizes in zip(self.parameters, self.sizes, strict=True)
            for parameter, fine in zip(parameters, sizes.isfinite().tolist(), strict=True)
            if not fine
        }
        named = [name for key, name in known.items() if key in bad]
        return named + ["a parameter of no prepared model"] * (len(bad) - len(named))


@torch.no_grad()
def look_at(parameters: Sequence[torch.Tensor]) -> GradientLook:
    """Look at the gradients of these parameters, as far as they are on this process."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        dense = parameter.grad
        part = dense.coalesce().values() if dense.is_sparse else local_part(dense)
        if part.numel():
            own, parts = groups.setdefault((part.device, part.dtype), ([], []))
            own.append(parameter)
            parts.append(part)
    look = GradientLook()
    for own, parts in groups.values():
        look.parameters.append(own)
        look.sizes.append(_sizes(parts))
    return look


def _sizes(parts: list[torch.Tensor]) -> torch.Tensor:
    """One number for each tensor that is finite if all of its elements are."""
    if parts[0].device.type == "cpu":
        # Ten times faster there; only huge elements, whose squares overflow, need a second look.
        sizes = torch.stack(torch._foreach_norm(parts, 2.0))
        if bool(sizes.isfinite().all()):
            return sizes
    return torch.stack(torch._foreach_norm(parts, torch.inf))


class Finding:
    """What one step's loss and gradients are like; agreed between the processes, read late.

    Args:
        step: the step that is about to be taken, from 1.
        loss: the losses of the step added up, or ``None``.
        gradients: what was seen of them, or ``None``.
        overflow: on the device, whether gradients that are not finite are the loss scaler's
            business; ``None`` without one.
        meets: agree with the other processes, which are here too.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.finite import Finding
        >>> finding = Finding(3, torch.tensor(torch.nan), None)
        >>> finding.is_bad()
        True
        >>> finding.tell({})
        'step 3: the loss is nan'
    """

    def __init__(
        self,
        step: int,
        loss: torch.Tensor | None,
        gradients: GradientLook | None,
        *,
        overflow: torch.Tensor | None = None,
        meets: bool = True,
    ) -> None:
        self.step = step
        self._loss, self._gradients, self._overflow = loss, gradients, overflow
        self._device = device = _device_of(loss, gradients)
        self._event: Any = None
        self._flags = torch.stack([self._loss_flag(device), self._gradient_flag(device)]).int()
        if meets and collectives.world_size() > 1:
            self._flags = collectives.reduce(self._flags, "max")
        if self._flags.device.type in _COPIES_ALONE:
            self._send()

    @property
    def waits(self) -> bool:
        """Whether reading it now would hold the device up."""
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

    def _send(self) -> None:
        """Begin the copy to the host, which nobody waits for until it is read."""
        host = torch.empty(self._flags.shape, dtype=self._flags.dtype, pin_memory=True)
        host.copy_(self._flags, non_blocking=True)
        self._event = torch.Event(self._flags.device)
        self._event.record()
        self._flags = host

    def is_bad(self) -> bool:
        """Whether the loss or a gradient is not finite on some process; waits for the device."""
        return any(self._read())

    def _read(self) -> list[bool]:
        if self._event is not None:
            self._event.synchronize()
        return [bool(flag) for flag in self._flags.tolist()]

    def tell(self, known: Mapping[int, str]) -> str:
        """What is bad, with the names of the first parameters; ``known`` by ``id``."""
        loss_bad, gradients_bad = self._read()
        parts = []
        if loss_bad:
            value = float("nan") if self._loss is None else float(self._loss)
            here = not torch.isfinite(torch.tensor(value)) and self._loss is not None
            parts.append(f"the loss is {value}" if here else "the loss of another process is bad")
        if gradients_bad:
            names = [] if self._gradients is None else self._gradients.names(known)
            parts.append(_gradients_text(names))
        return f"step {self.step}: {', and '.join(parts)}"


def _gradients_text(names: list[str]) -> str:
    if not names:
        return "gradients of another process are not finite"
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"the gradients of {shown}{more} are not finite"


def _device_of(loss: torch.Tensor | None, gradients: GradientLook | None) -> torch.device:
    if loss is not None:
        return loss.device
    found = gradients.sizes if gradients is not None else []
    return found[0].device if found else torch.device("cpu")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def names_of(run: TrainingRun) -> dict[int, str]:
    """What parameters are called, the model's number in front where there are several."""
    models = list(run.models)
    return {
        id(parameter): f"{index}.{name}" if len(models) > 1 else name
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def may_overflow(run: TrainingRun) -> torch.Tensor | None:
    """On the device: whether fp16's scale is so high that the scaler can help by lowering it."""
    scale = run.loss_scale()
    return None if scale is None else scale > 1
