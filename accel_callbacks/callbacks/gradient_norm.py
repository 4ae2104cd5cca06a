"""GradientNorm: log the gradient norm, in total and by layer, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback, require_at_least
from accel_callbacks.callbacks.freeze import Freeze
from accel_callbacks.gradients import combined_norm, total_norm

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["GradientNorm", "total_norm"]

Parameters = list[torch.nn.Parameter]


class GradientNorm(Callback):
    """Log the norm of the gradients used by each optimizer step.

    It is measured as soon as backward has completed the gradients of a step, so before clipping,
    and logged unscaled: over all ranks, and without the loss scale of fp16. Values stay on the
    device. Skipped steps are not logged.

    Args:
        every_n_steps: measure every so many optimizer steps, 1 by default.
        norm_type: the ``p`` of the norm, 2 by default; ``inf`` for the largest element.
        per_layer: also log norms under ``<log_name>/<layer>``. With ``True`` a layer is a module
            with its own parameters; with a number, parameters whose names share that many leading
            parts are one layer (``1`` separates ``encoder`` from ``decoder``). Off by default.
        log_name: name of the total norm. With several optimizers it is ``<log_name>/optimizer0``
            and so on.

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

    collective = True  # the norm of sharded gradients is reduced over the ranks
    name_option = "log_name"
    after = (Freeze,)  # which drops the gradients of frozen parameters
    settable: Mapping[str, str] = {"log_every": "every_n_steps"}

    def __init__(
        self,
        every_n_steps: int = 1,
        norm_type: float = 2.0,
        per_layer: bool | int = False,
        log_name: str = "grad_norm",
    ) -> None:
        require_at_least(1, every_n_steps=every_n_steps)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} must be above 0, such as 2 or inf.")
        if per_layer is not False and per_layer < 1:
            raise ValueError(f"per_layer={per_layer} must be a number of parts, at least 1.")
        self.every_n_steps = every_n_steps
        self.norm_type = float(norm_type)
        self.per_layer = per_layer
        self.log_name = log_name
        self._measured: dict[int, dict[str, torch.Tensor]] = {}  # by optimizer, window not averaged
        self._pending: dict[int, dict[str, torch.Tensor]] = {}  # logged once the step is taken
        self._layer_names: dict[int, str] = {}  # by id of the parameter

    @property
    def state_key(self) -> str:
        """``GradientNorm:<log_name>``."""
        return f"GradientNorm:{self.log_name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Drop the measurements of an earlier run."""
        for measurements in (self._measured, self._pending, self._layer_names):
            measurements.clear()

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Measure completed gradients; of several backwards that complete them, the last counts."""
        # Over a foreign trainer this is unknown; the norm is measured before the step then.
        for optimizer in run.optimizers if run.gradients_complete else ():
            if self._is_due(run, optimizer):
                self._measured[id(optimizer)] = self._measure(run, optimizer)

    def on_before_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Scale the norms as the window scales its gradients before the step."""
        norms = self._measured.pop(id(optimizer), None)
        if norms is not None:
            factor = run.gradient_scale()
            self._pending[id(optimizer)] = {name: norm * factor for name, norm in norms.items()}
        elif self._is_due(run, optimizer):  # backward was not called through the Accelerator
            self._pending[id(optimizer)] = self._measure(run, optimizer, scaled=False)

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the norms of this step."""
        norms = self._pending.pop(id(optimizer), None)
        if norms:
            run.accelerator.log(norms)

    def _is_due(self, run: TrainingRun, optimizer: torch.optim.Optimizer) -> bool:
        return run.next_step(optimizer) % self.every_n_steps == 0

    def _measure(
        self, run: TrainingRun, optimizer: torch.optim.Optimizer, *, scaled: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the norms of an optimizer's current gradients, by the name to log."""
        measure = getattr(optimizer, "gradient_norm", None)  # of an engine that keeps gradients
        whole = None if measure is None else measure(self.norm_type)
        if whole is not None:
            return {self._name(run, optimizer): whole}
        groups = optimizer.param_groups
        with_grad = [p for group in groups for p in group["params"] if p.grad is not None]
        norms: dict[str, torch.Tensor] = {}
        if with_grad and self.per_layer:
            for layer, members in self._layers(run, with_grad).items():
                norms[f"{self.log_name}/{layer}"] = total_norm(members, self.norm_type)
            total = combined_norm(list(norms.values()), self.norm_type)
        elif with_grad:
            total = total_norm(with_grad, self.norm_type)
        if with_grad:
            norms[self._name(run, optimizer)] = total
        norms = run.join_norms(norms, self.norm_type)
        scale = run.loss_scale() if scaled else None
        # Divide now: the next update of the scale changes its tensor in place.
        return norms if scale is None else {name: norm / scale for name, norm in norms.items()}

    def _name(self, run: TrainingRun, optimizer: torch.optim.Optimizer) -> str:
        if len(run.optimizers) == 1:
            return self.log_name
        number = next(i for i, other in enumerate(run.optimizers) if other is optimizer)
        return f"{self.log_name}/optimizer{number}"

    def _layers(self, run: TrainingRun, parameters: Parameters) -> dict[str, Parameters]:
        if not self._layer_names:
            for index, model in enumerate(run.models):
                number = [str(index)] if len(run.models) > 1 else []
                for name, parameter in model.named_parameters():
                    parts = name.split(".")
                    leading = parts[:-1] if self.per_layer is True else parts[: self.per_layer]
                    self._layer_names[id(parameter)] = ".".join([*number, *leading] or parts)
        layers: dict[str, Parameters] = {}
        for parameter in parameters:
            layers.setdefault(self._layer_names.get(id(parameter), "other"), []).append(parameter)
        return layers
