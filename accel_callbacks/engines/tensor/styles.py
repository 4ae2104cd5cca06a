"""Parallel styles that torch lacks: of packed layers and Conv1D, and of modules such as experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

__all__ = [
    "DividedInput",
    "LocalColwise",
    "LocalModule",
    "LocalRowwise",
    "RotaryGradient",
    "cut_parameter",
    "local_parameters",
    "outputs_dim",
]


def outputs_dim(module: torch.nn.Module) -> int:
    """Return the dimension of a weight along which its outputs are: 1 for Conv1D, else 0."""
    return int(isinstance(getattr(module, "nf", None), int))


def local_parameters(module: torch.nn.Module, localize: Any) -> None:
    """Let a module compute with plain tensors in place of its DTensors.

    Args:
        module: with DTensors as parameters.
        localize: called with the name of a parameter and the DTensor; returns the plain tensor.
    """
    sharded: dict[str, Any] = {}

    def use_local(module: torch.nn.Module, inputs: Any) -> None:
        sharded.update(module._parameters)
        for name, parameter in sharded.items():
            if parameter is not None:
                module._parameters[name] = localize(name, parameter)

    def put_back(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(sharded)
        sharded.clear()

    module.register_forward_pre_hook(use_local)
    module.register_forward_hook(put_back, always_call=True)


class LocalColwise(ParallelStyle):
    """Give each rank some of the outputs of a layer, from each of its parts.

    The weight is a DTensor in the order of the user, which a checkpoint has too; the bias is whole
    on each rank, which takes its part of it in the forward.

    Args:
        parts: number of layers in one, all of the same size: 3 for queries, keys and values.
        sequence: the input is cut along the sequence.
    """

    def __init__(self, parts: int = 1, *, sequence: bool = False) -> None:
        super().__init__()
        self._parts = parts
        self._input_layout = Shard(1) if sequence else Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        dim = outputs_dim(module)
        # Conv1D gives its output this width.
        if dim == 1:
            module.nf = module.nf // device_mesh.size()
        _cut(module, device_mesh, dim, self._parts)
        rank, ranks, parts, input_layout = (
            device_mesh.get_local_rank(),
            device_mesh.size(),
            self._parts,
            self._input_layout,
        )

        def localize(name: str, parameter: Any) -> torch.Tensor:
            if name == "weight":
                return parameter.to_local()  # type: ignore[no-any-return]
            # Of the whole bias, as many elements as this rank has outputs; its gradient is a part
            # of that of the whole one.
            return _part(parameter.to_local(grad_placements=[Partial()]), 0, parts, rank, ranks)

        # All outputs are made of the whole input, so each rank has a part of its gradient.
        def gather_input(module: torch.nn.Module, inputs: Any) -> Any:
            first = DTensor.from_local(inputs[0], device_mesh, [input_layout], run_check=False)
            first = first.redistribute(placements=[Replicate()])
            return (first.to_local(grad_placements=[Partial()]), *inputs[1:])

        module.register_forward_pre_hook(gather_input)
        local_parameters(module, localize)
        return module


class LocalRowwise(ParallelStyle):
    """Give each rank some of the inputs of a layer; its output is the sum over ranks.

    Args:
        parts: number of layers whose outputs, of the same size, are its input.
        sequence: leave each rank a part of the sequence of the output.
    """

    def __init__(self, parts: int = 1, *, sequence: bool = False) -> None:
        super().__init__()
        self._parts = parts
        self._output_layout = Shard(1) if sequence else Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _cut(module, device_mesh, 1 - outputs_dim(module), self._parts)
        ranks, output_layout = device_mesh.size(), self._output_layout

        def localize(name: str, parameter: Any) -> torch.Tensor:
            if name == "weight":
                return parameter.to_local()  # type: ignore[no-any-return]
            # The sum over ranks has it once.
            local: torch.Tensor = parameter.to_local(grad_placements=[Partial()]) / ranks
            return local

        def sum_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            part = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[output_layout]).to_local()

        local_parameters(module, localize)
        module.register_forward_hook(sum_output)
        return module


class LocalModule(ParallelStyle):
    """Let a module compute with this rank's parts of its own parameters.

    Args:
        sums: the output is the sum over ranks, as that of experts of which each rank has some of
            the features; the gradients of the inputs are sums then, those of routing weights too.
    """

    def __init__(self, *, sums: bool = False) -> None:
        super().__init__()
        self._sums = sums

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        parameters = module._parameters.values()
        if self._sums and any(isinstance(parameter, DTensor) for parameter in parameters):
            # Layers inside of a module without such parameters sum the gradients themselves.
            _map_inputs(module, lambda tensor: _with_summed_gradient(tensor, device_mesh))

        def localize(name: str, parameter: Any) -> Any:
            return parameter.to_local() if isinstance(parameter, DTensor) else parameter

        local_parameters(module, localize)
        if self._sums:

            def sum_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
                return tree_map_only(torch.Tensor, lambda part: _sum(part, device_mesh), output)

            module.register_forward_hook(sum_output)
        return module


class DividedInput(ParallelStyle):
    """Divide the input of a module by the number of ranks, whose equal outputs are then summed."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        _map_inputs(module, lambda tensor: tensor / device_mesh.size())
        return module


class RotaryGradient(ParallelStyle):
    """Sum the gradients of the last features of an output, which each rank uses for its own heads.

    In multi-head latent attention, one layer computes compressed keys and values, which a layer
    takes whose backward sums over ranks, and the rotary features of keys, which all heads share.

    Args:
        width: number of the rotary features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        width = self._width

        def sum_rotary(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            compressed, rotary = torch.split(output, [output.shape[-1] - width, width], -1)
            return torch.cat([compressed, _with_summed_gradient(rotary, device_mesh)], -1)

        module.register_forward_hook(sum_rotary)
        return module


def cut_parameter(
    module: torch.nn.Module, name: str, mesh: Any, dim: int | None, parts: int = 1
) -> None:
    """Replace a parameter by a DTensor of this rank's part of it.

    Args:
        module: that has the parameter, whole on each rank.
        name: of the parameter.
        mesh: of the ranks that share it.
        dim: along which it is cut, None to replicate it.
        parts: number of equal parts along the dimension, each of which is cut.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    value = parameter.detach()
    placement: Placement = Replicate()
    if dim is not None:
        value = _part(value, dim, parts, mesh.get_local_rank(), mesh.size()).contiguous()
        placement = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
    dtensor = DTensor.from_local(
        value if value.is_meta else value.to(mesh.device_type),
        mesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    module._parameters[name] = torch.nn.Parameter(dtensor, parameter.requires_grad)


def _cut(module: torch.nn.Module, mesh: Any, dim: int, parts: int) -> None:
    """Replace the weight by this rank's part, and the bias by a replicated one."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            cut_parameter(module, name, mesh, dim if name == "weight" else None, parts)


def _part(tensor: torch.Tensor, dim: int, parts: int, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank has of each of the equal parts of a tensor."""
    return torch.cat([part.chunk(ranks, dim)[rank] for part in tensor.chunk(parts, dim)], dim)


def _map_inputs(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to the inputs of a module that are numbers with fractions."""

    def map_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            torch.Tensor,
            lambda tensor: function(tensor) if tensor.is_floating_point() else tensor,
            (args, kwargs),
        )

    module.register_forward_pre_hook(map_inputs, with_kwargs=True)


def _with_summed_gradient(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return a tensor that all ranks have, whose gradient is the sum of those of the ranks."""
    if not tensor.requires_grad:
        return tensor
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _sum(part: torch.Tensor, mesh: Any) -> torch.Tensor:
    whole = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()
