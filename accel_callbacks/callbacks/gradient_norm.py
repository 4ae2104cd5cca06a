"""The norm of the gradients, of all and by layer, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.freeze import Freeze

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["GradientNorm", "total_norm"]

Parameters = list[torch.nn.Parameter]


class GradientNorm(Callback):
    """Logs the norm of the gradients that each optimizer step is taken with.

    It is measured as soon as backward has completed the gradients of a step, so before they are
    clipped, and logged at their true size: over all processes, and without the loss scale of fp16.
    Values stay on the device. Steps that were left out are not logged.

    Args:
        every_n_steps: measure every so many optimizer steps, 1 by default.
        norm_type: the ``p`` of the norm, 2 by default; ``inf`` for the largest element.
        per_layer: also log norms under ``<log_name>/<layer>``: of each module's own parameters if
            ``True``, or of all whose names begin with the same so many parts if a number
            (``1`` tells ``encoder`` from ``decoder``). Off by default.
        log_name: under which the norm of all is logged. With several optimizers it is
            ``<log_name>/optimizer0`` and so on.

    Raises:
        ValueError: ``every_n_steps`` or ``per_layer`` is below 1, or ``norm_type`` is not above 0.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import GradientNorm
        >>> accel = Accelerator(cpu=True, callbacks=[GradientNorm()])
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accel.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        >>> _ = accel.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> float(accel.current_run.callback_metrics["grad_norm"])
        5.0
    """

    collective = True  # spread gradients are summed over the processes
    after = (Freeze,)  # which drops gradients that no step is taken with

    def __init__(
        self,
        every_n_steps: int = 1,
        norm_type: float = 2.0,
        per_layer: bool | int = False,
        log_name: str = "grad_norm",
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1.")
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} must be above 0, such as 2 or inf.")
        if per_layer is not False and per_layer < 1:
            raise ValueError(f"per_layer={per_layer} must be a number of parts, at least 1.")
        self.every_n_steps = every_n_steps
        self.norm_type = float(norm_type)
        self.per_layer = per_layer
        self.log_name = log_name
        self._measured: dict[int, dict[str, torch.Tensor]] = {}  # by optimizer, not yet true size
        self._found: dict[int, dict[str, torch.Tensor]] = {}  # to be logged once the step is taken
        self._names: dict[int, str] = {}  # the layers of parameters

    @property
    def state_key(self) -> str:
        """``GradientNorm`` with the name that is logged."""
        return f"GradientNorm:{self.log_name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Begin anew."""
        for kept in (self._measured, self._found, self._names):
            kept.clear()

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Measure what backward has completed; where several do for one step, the last counts."""
        # Another trainer does not say: then norms are measured before the step.
        for optimizer in run.optimizers if run.gradients_complete else ():
            if self._is_due(run, optimizer):
                self._measured[id(optimizer)] = self._measure(run, optimizer)

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Bring the norms to the true size of the gradients."""
        norms = self._measured.pop(id(optimizer), None)
        if norms is not None:
            factor = run.gradient_scale()
            self._found[id(optimizer)] = {name: norm * factor for name, norm in norms.items()}
        elif self._is_due(run, optimizer):  # backward was not called through the Accelerator
            self._found[id(optimizer)] = self._measure(run, optimizer, scaled=False)

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the norms of the step that was taken."""
        norms = self._found.pop(id(optimizer), None)
        if norms:
            run.accelerator.log(norms)

    def _is_due(self, run: TrainingRun, optimizer: torch.optim.Optimizer) -> bool:
        return run.next_step(optimizer) % self.every_n_steps == 0

    def _measure(
        self, run: TrainingRun, optimizer: torch.optim.Optimizer, *, scaled: bool = True
    ) -> dict[str, torch.Tensor]:
        """The norms of an optimizer's gradients as they are now, by the name to log."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        given = [p for p in held if p.grad is not None]
        if not given:
            return {}
        norms: dict[str, torch.Tensor] = {}
        if self.per_layer:
            for layer, parameters in self._layers(run, given).items():
                norms[f"{self.log_name}/{layer}"] = total_norm(parameters, self.norm_type)
            whole = _joined(list(norms.values()), self.norm_type)
        else:
            whole = total_norm(given, self.norm_type)
        norms[self._name(run, optimizer)] = whole
        scale = run.loss_scale() if scaled else None
        # Now, because the next update of the scale changes it in place.
        return norms if scale is None else {name: norm / scale for name, norm in norms.items()}

    def _name(self, run: TrainingRun, optimizer: torch.optim.Optimizer) -> str:
        if len(run.optimizers) == 1:
            return self.log_name
        number = next(i for i, one in enumerate(run.optimizers) if one is optimizer)
        return f"{self.log_name}/optimizer{number}"

    def _layers(self, run: TrainingRun, given: Parameters) -> dict[str, Parameters]:
        """The parameters by layer."""
        if not self._names:
            for index, model in enumerate(run.models):
                number = [str(index)] if len(run.models) > 1 else []
                for name, parameter in model.named_parameters():
                    parts = name.split(".")
                    kept = parts[:-1] if self.per_layer is True else parts[: self.per_layer]
                    self._names[id(parameter)] = ".".join([*number, *kept] or parts)
        layers: dict[str, Parameters] = {}
        for parameter in given:
            layers.setdefault(self._names.get(id(parameter), "other"), []).append(parameter)
        return layers


def total_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients together, as a tensor on their device; 0 without any.

    Of gradients that are spread over processes it is that of the whole; all processes call it.

    Args:
        parameters: those without a gradient do not count.
        norm_type: the ``p`` of the norm.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.gradient_norm import total_norm
        >>> weight = torch.ones(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> total_norm([weight])
        tensor(5.)
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None and p.grad.numel()):
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        spread = (getattr(dense, "device_mesh", None), getattr(dense, "placements", None))
        kinds.setdefault(spread, []).append(dense.detach())
    if not kinds:
        return torch.tensor(0.0)
    return _joined([_whole_norm(same, norm_type) for same in kinds.values()], norm_type)


def _whole_norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients that are spread alike."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    gather: Any = getattr(norm, "full_tensor", None)  # of a DTensor
    whole: torch.Tensor = norm if gather is None else gather()
    return whole


def _joined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all from the norms of parts."""
    if len(norms) == 1:
        return norms[0]
    parts = torch.stack([norm.to(norms[0].device).float() for norm in norms])
    whole: torch.Tensor = torch.linalg.vector_norm(parts, norm_type)
    return whole
