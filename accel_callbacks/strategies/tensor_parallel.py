"""Tensor parallelism: layers of one replica are cut over the ranks of an axis."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.modeling.initial_weights import InitialWeights
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategies.checks import is_plain
from accel_callbacks.strategies.sharding import Sharding
from accel_callbacks.strategies.tensor_plan import matched_styles, plan_of, propose_plan

__all__ = ["TensorParallel", "parallelize", "required_plan"]


class TensorParallel(Sharding):
    """A strategy that cuts layers over the ranks of one replica, without data parallelism.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged.

    Example:
        >>> from accel_callbacks.strategies.tensor_parallel import TensorParallel
        >>> TensorParallel.has_gradient_sync
        False
    """

    name = "tensor_parallel"

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        self._plain: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    @property
    def _models(self) -> list[torch.nn.Module]:
        return list(self._plain)

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model without a plan, before it is changed."""
        self._refuse_shared(model)
        if not _is_cut(model):
            required_plan(model, self.parallelism)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Leave the model where it is: nowhere is all of it on one device."""
        return model

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cut the layers of the model."""
        parallelism = self.parallelism
        assert parallelism is not None
        mesh = self.device_mesh["tp"]
        if _is_cut(model):
            self._plain[model] = is_plain(model)
            return model.to(self.topology.device)
        weights = InitialWeights(model, self.topology.device)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._plain[model] = is_plain(model)
        parallelize(model, required_plan(model, parallelism), mesh)
        weights.fill()
        self._replace(before, model)
        return model

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether the model was plain before it was cut."""
        return self._plain.get(model, is_plain(model))


def required_plan(
    model: torch.nn.Module, parallelism: ParallelismConfig | None
) -> Mapping[str, Any]:
    """Return the plan that was given, or that the model brings along.

    Raises:
        ValueError: there is none; the message has a proposal if there is one.
    """
    handler = None if parallelism is None else parallelism.tp_handler
    plan = (handler.plan if handler is not None else None) or plan_of(model)
    if plan:
        return plan
    try:
        proposal = f"accel.propose_tp_plan(model) proposes {propose_plan(model)}; read it, and pass"
    except ValueError as error:
        proposal = f"{error} Pass"
    raise ValueError(
        f"{type(model).__name__} has no plan of tensor parallelism. {proposal} it as "
        "ParallelismConfig(tp_size=..., tp_handler=TorchTensorParallelConfig(plan=...))."
    )


def _is_cut(model: torch.nn.Module) -> bool:
    return any(map(collectives.is_sharded, model.parameters()))


def parallelize(model: torch.nn.Module, plan: Mapping[str, Any], mesh: Any) -> None:
    """Collective: cut the layers of a model that a plan names; tied weights stay tied.

    Args:
        model: the model, whole on each rank of the mesh; values are those of its first rank.
        plan: see :func:`accel_callbacks.strategies.tensor_plan.matched_styles`.
        mesh: of one dimension.

    Raises:
        ValueError: the plan does not fit the model, or the sizes of a layer cannot be divided.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    # All ranks have the same values, or get them afterwards.
    known = inspect.signature(parallelize_module).parameters
    options: dict[str, Any] = {"src_data_rank": None} if "src_data_rank" in known else {}
    ties = _ties(model)
    chosen = list(matched_styles(model, plan))
    for name, module, style in chosen:
        _check_sizes(name, module, style, mesh.size())
    for _, module, style in chosen:
        made = _style(style)
        if made is not None:
            parallelize_module(module, mesh, made, **options)
    _tie_again(model, ties)


def _style(style: Any) -> Any:
    """Return torch's style for a name."""
    if not isinstance(style, str):
        return style
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if style == "colwise":
        return ColwiseParallel()
    if style == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise":
        return RowwiseParallel()
    if style == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if style == "sequence_parallel":
        return SequenceParallel()
    return None


def _check_sizes(name: str, module: torch.nn.Module, style: Any, ranks: int) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(style, str) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return
    cut = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "embedding_rowwise": 0}
    dimension = cut.get(style)
    if dimension is not None and weight.shape[dimension] % ranks:
        raise ValueError(
            f"{name}.weight has {weight.shape[dimension]} "
            f"{'columns' if dimension else 'rows'}, which {ranks} ranks of tensor parallelism "
            "cannot share: choose a tp_size that divides it, or leave the layer out of the plan."
        )


_Slots = list[tuple[torch.nn.Module, str]]


def _ties(model: torch.nn.Module) -> list[_Slots]:
    """Return the places of each parameter that has several."""
    places: dict[int, _Slots] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key))
    return [slots for slots in places.values() if len(slots) > 1]


def _tie_again(model: torch.nn.Module, ties: list[_Slots]) -> None:
    for slots in ties:
        found = [module._parameters[key] for module, key in slots]
        kinds = {getattr(one, "placements", None) for one in found}
        if len(kinds) > 1:
            names = {id(module): name for name, module in model.named_modules()}
            shown = " and ".join(f"{names[id(module)]}.{key}" for module, key in slots)
            raise ValueError(
                f"{shown} are one tensor, and the plan of tensor parallelism cuts them in "
                "different ways: give both the same (for an embedding and its head: "
                '"embedding_rowwise" and "colwise_gather_output").'
            )
        for module, key in slots[1:]:
            module._parameters[key] = found[0]
