"""States of models and optimizers, in and out, as a checkpoint asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.nested import map_tensors
from accel_callbacks.distributed.failures import meet
from accel_callbacks.gradients import parameters_of
from accel_callbacks.placeholder import unwritable
from accel_callbacks.strategy.checks import is_plain
from accel_callbacks.strategy.optimizer_state import (
    named_optimizer_state,
    positional_optimizer_state,
    restore_exactly,
)

__all__ = ["StateAccess", "reshard"]


class StateAccess:
    """The states of one strategy's models and optimizers, whole or by the parts that ranks have.

    An engine overrides what it keeps elsewhere than in parameters and in ``optimizer.state``.

    Args:
        unwrap: returns the model as the user built it, of what the strategy made of it.
        rank: of this process.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> model = torch.nn.Linear(2, 1)
        >>> sorted(Accelerator(cpu=True).strategy.states.local_state_dict(model))
        ['bias', 'weight']
    """

    def __init__(self, unwrap: Callable[[torch.nn.Module], torch.nn.Module], rank: int = 0) -> None:
        self._unwrap = unwrap
        self._rank = rank

    def local_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return this rank's part of a model's state, under the names of the unwrapped one.

        Sharded tensors are DTensors.
        """
        return self._unwrap(model).state_dict()

    def load_model_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Load a state whose tensors are full and the same on all ranks, or sharded alike."""
        local_state = self.local_state_dict(model)
        fitting = {
            name: collectives.shard_like(value, local_state[name])
            if name in local_state and isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }
        inner = self._unwrap(model)
        # Weights of a dispatched model that stay in their files: a load does not write them.
        fixed = unwritable(inner)
        inner.load_state_dict(
            {name: value for name, value in fitting.items() if name not in fixed},
            strict=not fixed,
        )

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether writing into the tensors of :meth:`local_state_dict` loads a model."""
        return is_plain(self._unwrap(model))

    def read_target(
        self,
        owner: torch.nn.Module | torch.optim.Optimizer,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return a new tensor of which this rank reads its part alone, None to read it whole.

        Collective the first time. :meth:`load_model_state_dict` and
        :meth:`load_optimizer_state_dict` take it.

        Args:
            owner: the prepared model, or the optimizer inside of the prepared one.
            shape: of the stored tensor.
            dtype: of the stored tensor.
        """
        return None

    def model_state_dict(
        self,
        model: torch.nn.Module,
        *,
        unwrap: bool = True,
        all_ranks: bool = False,
        debug: bool | None = None,
    ) -> dict[str, Any]:
        """Return the full state of a model.

        Collective if parts of it are sharded: they are gathered in host memory one after the other.

        Args:
            model: what the strategy's ``setup`` returned.
            unwrap: use the names of the unwrapped model.
            all_ranks: return a sharded state on all ranks; else on rank 0, and empty on others.
            debug: compare the calls of the ranks before; read from ``ACCEL_DEBUG`` if ``None``.
        """
        state = self.local_state_dict(model) if unwrap else model.state_dict()
        if not any(map(collectives.is_sharded, state.values())):
            return state
        collectives.begin("get_state_dict", debug, all_ranks=all_ranks)
        meet("get_state_dict")
        return collectives.gather_sharded(state, keep=all_ranks or self._rank == 0)

    def weights_to_write(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state of a model for the rank that writes it; sharded tensors as DTensors."""
        return self.local_state_dict(model)

    def full_parameters(
        self, module: torch.nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which each rank has whole parameters; collective.

        Args:
            module: a prepared model or a part of it, which is not called inside.
            writeback: keep what rank 0 has changed.
        """
        return nullcontext()

    def replicated_parameters(self, model: torch.nn.Module) -> set[str]:
        """Return the names of parameters that training keeps equal on all ranks."""
        return set()

    def stored(self, tree: Any, models: Sequence[torch.nn.Module]) -> Any:
        """Return a part of a checkpoint with tensors that say which ranks have them.

        Args:
            tree: a state with tensors by ``"<number of the model>.<parameter>"``, as averages are.
            models: the prepared models.
        """
        return tree

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients of an open window by the names of the unwrapped model.

        Plain ones are this rank's own, DTensors are averaged over the ranks.
        """
        named = self._unwrap(model).named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Return the state of an optimizer by parameter name, for a checkpoint.

        Args:
            optimizer: the optimizer inside of the prepared one.
            names: from `accel_callbacks.strategy.optimizer_state.parameter_names`.
        """
        return named_optimizer_state(optimizer, names)

    def fit_optimizer_state(
        self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Translate a state by parameter name to what :meth:`load_optimizer_state_dict` takes.

        Raises:
            ResumeError: the optimizer holds other parameters than the saved one.
        """
        return positional_optimizer_state(state, optimizer, names)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load what :meth:`fit_optimizer_state` returned, its tensors filled.

        Full tensors, which a hook may have been given, are sharded as their parameters are.
        """
        parameters = list(parameters_of([optimizer]))
        positions = range(len(parameters))  # other keys are those of the optimizer itself
        sharded = {
            place: map_tensors(entry, partial(_shard_like, parameters[place]))
            if place in positions and collectives.is_sharded(parameters[place])
            else entry
            for place, entry in state["state"].items()
        }
        state = {**state, "state": sharded}
        optimizer.load_state_dict(state)
        restore_exactly(optimizer, state)


def reshard(model: torch.nn.Module) -> None:
    """Register the shards of a model where a forward has left whole parameters."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]


def _shard_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    alike = tensor.shape == parameter.shape
    return collectives.shard_like(tensor, parameter) if alike else tensor
