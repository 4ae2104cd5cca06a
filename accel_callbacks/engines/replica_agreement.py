"""Check that the ranks of one replica, which compute the same, do so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.gradients import local_part
from accel_callbacks.terminal_text import listed
from checkpoint_io.warning import warn

__all__ = ["ReplicaAgreement"]

_TIMES = 2
_SHOWN = 4
_LOSS = 1e-4  # relative: whole activations are bitwise equal on all ranks, but for atomic sums
_GRADIENT = 1e-2
_INPUT = 1e-9


class ReplicaAgreement:
    """Compares inputs, losses, and gradients of whole parameters, over ranks of tensor parallelism.

    Only of the first steps; collective.

    Args:
        mesh: the mesh of one dimension of these ranks.

    Warns:
        UserWarning: they differ, so what is trained is not the model of one process.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._inputs = self._losses = self._gradients = _TIMES

    @property
    def done(self) -> bool:
        """True after the first training steps."""
        return not (self._losses or self._gradients)

    def check_inputs(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Compare what a model is given that is only evaluated: a hook before its forward."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._inputs:
            return
        self._inputs -= 1
        summaries = self._of_all(_summary((args, kwargs)))
        if _are_apart(summaries, _INPUT):
            self._inputs = 0
            warn(
                f"the ranks of one tensor-parallel model gave {type(model).__name__} different "
                "inputs, and its outputs are those of none of them: take batches of a loader that "
                "prepare() returned, or divide work by accel.data_parallel_rank, not by rank."
            )

    def check_loss(self, loss: torch.Tensor) -> None:
        """Compare the loss of a backward pass."""
        if not self._losses:
            return
        self._losses -= 1
        losses = self._of_all(float(local_part(loss).detach().double().sum()))
        if _are_apart(losses, _LOSS):
            self._losses = 0
            shown = ", ".join(f"{value:.6g}" for value in losses)
            warn(
                f"the ranks of one tensor-parallel model have different losses ({shown}): they "
                "must get the same batches (those of a loader that prepare() returned), draw the "
                "same random numbers (set_seed), and the plan must end with whole outputs "
                '("rowwise" after "colwise"; "colwise_gather_output" for a head).'
            )

    def check_gradients(self, models: Sequence[torch.nn.Module]) -> None:
        """Compare the gradients of parameters that are not cut by tensor parallelism."""
        if not self._gradients:
            return
        self._gradients -= 1
        named = [
            (name, parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not _is_on(parameter, self._mesh)
        ]
        values = self._all([value for _, parameter in named for value in _marks(parameter.grad)])
        marks = [list(zip(row[::2], row[1::2], strict=True)) for row in values]  # of each rank
        total = math.sqrt(sum(norm**2 for norm, _ in marks[0]))
        wrong = [
            name
            for number, (name, parameter) in enumerate(named)
            if _differ([rank[number] for rank in marks], parameter.numel(), total)
        ]
        if wrong:
            self._gradients = 0
            names = listed(map(repr, wrong), _SHOWN)
            warn(
                f"{names}: parameters that are whole on each rank of tensor parallelism have "
                "different gradients there, and would drift apart. They see activations that are "
                'cut: give their modules the style "replicated_with_grad_allreduce", or '
                '"sequence_parallel" if it is the sequence that is cut. Random numbers that differ '
                "between the ranks have the same effect."
            )

    def _of_all(self, value: float) -> list[float]:
        """Return one value of each rank."""
        return [rank_value for (rank_value,) in self._all([value])]

    def _all(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks."""
        local_values = torch.tensor(values, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(local_values) for _ in range(self._mesh.size())]
        if values:
            dist.all_gather(gathered, local_values, group=self._mesh.get_group())
        return [row.tolist() for row in gathered]

    @property
    def _device(self) -> torch.device:
        kind = self._mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())


def _are_apart(values: Sequence[float], tolerance: float) -> bool:
    """Return whether values differ; not where one is no number, as of a loss that overflows."""
    largest = max(map(abs, values))
    return all(map(math.isfinite, values)) and max(values) - min(values) > tolerance * largest


def _summary(value: Any, place: int = 1) -> float:
    """Return a number that differs where nested inputs do."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(_summary(entry, place + number) for number, entry in enumerate(value))
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_complex():
        return 0.0
    # By place: the plain sum is the same for rows in another order.
    part = local_part(value).detach().double().flatten()
    places = torch.arange(1, part.numel() + 1, dtype=part.dtype, device=part.device)
    return place * (float((part * places.sqrt()).sum()) + part.numel())


def _is_on(parameter: torch.Tensor, mesh: Any) -> bool:
    """Return whether a parameter belongs to the mesh of tensor parallelism, cut or replicated."""
    if not collectives.is_sharded(parameter):
        return False
    parameter_mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    if parameter_mesh == mesh:
        return True
    return bool(set(parameter_mesh.mesh_dim_names or ()) & set(mesh.mesh_dim_names or ()))


def _marks(gradient: torch.Tensor | None) -> tuple[float, float]:
    """Return the norm and the sum of this rank's part; of a missing one, that of zero."""
    if gradient is None or gradient.is_sparse:
        return 0.0, 0.0
    part = local_part(gradient).detach().double()
    return float(part.norm()), float(part.sum())


def _differ(marks: Sequence[Sequence[float]], elements: int, total: float) -> bool:
    norms, sums = [mark[0] for mark in marks], [mark[1] for mark in marks]
    if not all(map(math.isfinite, (*norms, *sums))):
        return False
    allowed = _GRADIENT * max(norms) + 1e-6 * total
    apart = (max(norms) - min(norms), (max(sums) - min(sums)) / math.sqrt(max(elements, 1)))
    return max(apart) > allowed
