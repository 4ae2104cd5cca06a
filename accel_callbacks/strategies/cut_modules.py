"""Modules that compute with parts of their own parameters, and layers whose gradients are parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only

from accel_callbacks.strategies.packed_layers import local_parameters

__all__ = ["DividedInput", "LocalModule", "RotaryGradient"]


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

            def summed(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
                return tree_map_only(torch.Tensor, lambda part: _sum(part, device_mesh), output)

            module.register_forward_hook(summed)
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

        def joined(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            compressed, rotary = torch.split(output, [output.shape[-1] - width, width], -1)
            return torch.cat([compressed, _with_summed_gradient(rotary, device_mesh)], -1)

        module.register_forward_hook(joined)
        return module


def _map_inputs(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to the inputs of a module that are numbers with fractions."""

    def mapped(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(
            torch.Tensor,
            lambda tensor: function(tensor) if tensor.is_floating_point() else tensor,
            (args, kwargs),
        )

    module.register_forward_pre_hook(mapped, with_kwargs=True)


def _with_summed_gradient(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return a tensor that all ranks have, whose gradient is the sum of those of the ranks."""
    if not tensor.requires_grad:
        return tensor
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _sum(part: torch.Tensor, mesh: Any) -> torch.Tensor:
    whole = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()
