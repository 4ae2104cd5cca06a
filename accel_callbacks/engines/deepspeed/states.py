"""The states of DeepSpeed's models and optimizers: under ZeRO as rows on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import meet
from accel_callbacks.engines.deepspeed.optimizer import EngineOptimizer, carry
from accel_callbacks.engines.deepspeed.zero_state import (
    RowMesh,
    gather_parameter,
    is_zero,
    load_optimizer_state,
    load_parameters,
    optimizer_state,
    state_by_key,
)
from accel_callbacks.gradients import parameters_of
from accel_callbacks.models.compile import original
from accel_callbacks.strategy.checks import is_plain
from accel_callbacks.strategy.optimizer_state import named_optimizer_state
from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["ZeroStates"]


class ZeroStates(StateAccess):
    """States of models and optimizers that engines of DeepSpeed have.

    Args:
        unwrap: as of the base class.
        rank: likewise.
        engines: returns all engines.
        engine_of: returns the engine around a model, None without one.
        rows: cuts tensors over all ranks.
    """

    def __init__(
        self,
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        rank: int,
        engines: Callable[[], list[Any]],
        engine_of: Callable[[torch.nn.Module], Any],
        rows: RowMesh,
    ) -> None:
        super().__init__(unwrap, rank)
        self._engines, self._engine_of = engines, engine_of
        self._rows = rows

    @contextmanager
    def full_parameters(
        self, module: torch.nn.Module, *, writeback: bool = False
    ) -> Iterator[None]:
        """Context manager: each rank has whole parameters; with ``writeback``, rank 0's stay."""
        from deepspeed.runtime.zero import GatheredParameters

        module = original(module)
        sharded = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
        with GatheredParameters(sharded) if sharded else nullcontext():
            yield
            # Copied while they are whole: DeepSpeed releases them at the end of its context.
            values = [
                (parameter, collectives.broadcast(parameter.detach().clone()))
                for parameter in (module.parameters() if writeback else ())
            ]
        for engine in self._engines() if writeback else ():
            engine_parameters = dict.fromkeys(engine.module.parameters())
            load_parameters({p: value for p, value in values if p in engine_parameters})

    def local_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return rows of each parameter in host memory, float32 where the optimizer has it.

        Collective: parameters are gathered one after the other.
        """
        engine = self._engine_of(model)
        inner = self._unwrap(model)
        if engine is None or not is_zero(engine):
            return inner.state_dict()
        meet("the weights under ZeRO")
        named = dict(inner.named_parameters(remove_duplicate=False))
        rows: dict[int, torch.Tensor] = {}
        state: dict[str, Any] = {}
        for name, value in inner.state_dict().items():
            parameter = named.get(name)
            if parameter is None:
                state[name] = value
                continue
            if id(parameter) not in rows:
                rows[id(parameter)] = self._rows.rows(gather_parameter(parameter))
            state[name] = rows[id(parameter)]
        return state

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether the tensors of the state are the model's own, as in stage 0."""
        engine = self._engine_of(model)
        return (engine is None or not is_zero(engine)) and is_plain(self._unwrap(model))

    def read_target(
        self,
        owner: torch.nn.Module | torch.optim.Optimizer,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return rows for a tensor of a model or optimizer under ZeRO, which is gathered later."""
        if isinstance(owner, EngineOptimizer):
            engine = owner.engine
        else:
            engine = self._engine_of(owner) if isinstance(owner, torch.nn.Module) else None
        if engine is None or not is_zero(engine):
            return None
        return self._rows.empty(shape, dtype)

    def load_model_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Load a state whose tensors are whole and the same on all ranks, or rows."""
        engine = self._engine_of(model)
        if engine is None or not is_zero(engine):
            super().load_model_state_dict(model, state)
            return
        inner = self._unwrap(model)
        named = dict(inner.named_parameters(remove_duplicate=False))
        values = {named[name]: value for name, value in state.items() if name in named}
        load_parameters(values)
        buffers = dict(inner.named_buffers())
        for name, value in state.items():
            if name in buffers:
                buffers[name].copy_(collectives.full_tensor(value))

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Return the state by parameter name; collective under ZeRO, as the weights are."""
        if not isinstance(optimizer, EngineOptimizer) or not is_zero(optimizer.engine):
            return named_optimizer_state(getattr(optimizer, "inner", optimizer), names)
        meet("the optimizer under ZeRO")
        return {
            "state": optimizer_state(optimizer.engine.optimizer, names, self._rows),
            **state_by_key(optimizer.engine.optimizer),
            "param_groups": [
                {**group, "params": [names.get(id(p), "parameter") for p in group["params"]]}
                for group in optimizer.param_groups
            ],
        }

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load a state by position, whose tensors are whole and the same on all ranks, or rows."""
        if not isinstance(optimizer, EngineOptimizer):
            super().load_optimizer_state_dict(optimizer, state)
            return
        if is_zero(optimizer.engine):
            parameters = list(parameters_of([optimizer]))
            load_optimizer_state(
                optimizer.engine.optimizer,
                {
                    parameters[key] if isinstance(key, int) else key: kept
                    for key, kept in state["state"].items()
                },
            )
        else:
            super().load_optimizer_state_dict(optimizer.inner, state)
        carry(state["param_groups"], optimizer.param_groups)
        carry(optimizer.param_groups, optimizer.inner.param_groups)
