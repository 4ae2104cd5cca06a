"""The states of a pipeline: those of each stage, as tensors that say which ranks have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import meet
from accel_callbacks.engines.pipeline.stages import StagePlan
from accel_callbacks.gradients import local_part, parameters_of
from accel_callbacks.strategy.data_ranks import DataRanks
from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["StageStates"]


class StageStates(StateAccess):
    """States of models of which each rank has some stages.

    Args:
        unwrap: as of the base class.
        rank: likewise.
        data: the mesh, and how the ranks are arranged.
        owners: by model, the stage rank that has each tensor, by its name.
        plans: how each model is cut.
    """

    def __init__(
        self,
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        rank: int,
        data: DataRanks,
        owners: Mapping[torch.nn.Module, Mapping[str, int]],
        plans: Mapping[torch.nn.Module, StagePlan],
    ) -> None:
        super().__init__(unwrap, rank)
        assert data.parallelism is not None
        self._data, self._arrangement = data, data.parallelism
        self._index = data.parallelism.coordinate(rank)["pp"]
        self._owners, self._plans = owners, plans
        self._meshes: dict[tuple[str, int], Any] = {}

    @property
    def _group(self) -> Any:
        return self._data.mesh["pp"].get_group()

    def full_parameters(
        self, module: torch.nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[None]:
        """Refuse: this rank does not have the layers of others.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "full_parameters: each rank of a pipeline has its own layers; "
            "get_state_dict(model) returns the weights of all."
        )

    def weights_to_write(self, model: torch.nn.Module) -> dict[str, Any]:
        """Collective: return the weights of all ranks on the first, in host memory."""
        return self.model_state_dict(model, debug=False)

    def model_state_dict(
        self,
        model: torch.nn.Module,
        *,
        unwrap: bool = True,
        all_ranks: bool = False,
        debug: bool | None = None,
    ) -> dict[str, Any]:
        """Collective: return the full state of a model, in host memory."""
        inner = self._unwrap(model)
        if inner not in self._owners:
            return super().model_state_dict(model, unwrap=unwrap, all_ranks=all_ranks, debug=debug)
        collectives.begin("get_state_dict", debug, all_ranks=all_ranks)
        meet("get_state_dict")
        # One after the other, so that a device holds one whole tensor at a time.
        keep = all_ranks or self._rank == 0
        prefix = "" if unwrap else "module."
        owners, gathered = self._owners[inner], {}
        for name, tensor in inner.state_dict().items():
            if owners[name] != self._index:
                full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._data.device)
            else:
                full = collectives.full_tensor(tensor)
            source = int(self._mesh_of(owners[name], self._data.device.type).mesh[0])
            full = collectives.broadcast(full, source)
            if keep:
                gathered[prefix + name] = full.to("cpu", copy=True)
        return gathered

    def local_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state under the names of the whole model: of other ranks, where it is."""
        inner = self._unwrap(model)
        owners, canonical = self._owners[inner], self._plans[inner].canonical
        placed: dict[str, torch.Tensor] = {}  # one for the names of tied tensors, on all ranks
        state = inner.state_dict()
        for name, tensor in state.items():
            first = canonical[name]
            if first not in placed:
                local = tensor if owners[name] == self._index else None
                placed[first] = self._place(owners[name], local, tensor)
        return {name: placed[canonical[name]] for name in state}

    def stored(self, tree: Any, models: Sequence[torch.nn.Module]) -> Any:
        """Return a state in which tensors by the names of parameters are where their stages are."""
        owners = {
            f"{number}.{name}": owner
            for number, model in enumerate(map(self._unwrap, models))
            for name, owner in self._owners.get(model, {}).items()
        }

        def place(value: Any, name: Any = None) -> Any:
            if isinstance(value, Mapping):
                return {key: place(entry, key) for key, entry in value.items()}
            if isinstance(value, torch.Tensor) and name in owners:
                local = value if owners[name] == self._index else None
                return self._place(owners[name], local, value)
            return value

        return place(tree)

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return False for a model of whose buffers several stages have copies."""
        return not self._buffer_copies(self._unwrap(model))

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Collective: return the gradients of an open window, those of all ranks by their place."""
        inner = self._unwrap(model)
        named = dict(inner.named_parameters())
        local_names = [name for name, parameter in named.items() if parameter.grad is not None]
        known = set().union(*self._from_stages(local_names))
        owners = self._owners[inner]
        return {
            name: self._place(owners[name], parameter.grad, parameter)
            for name, parameter in named.items()
            if name in known
        }

    @torch.no_grad()
    def load_model_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Collective: load the stages of this rank from a full state, or from one placed alike."""
        inner = self._unwrap(model)
        owners = self._owners[inner]
        for name, tensor in inner.state_dict().items():
            if owners[name] == self._index and name in state:
                value = state[name]
                if not collectives.is_sharded(tensor) and collectives.is_sharded(value):
                    value = local_part(value)
                if collectives.is_sharded(value):
                    local_part(tensor).copy_(local_part(value))
                else:
                    collectives.copy_part(tensor, value)
        self._share_copies(inner)

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Collective: return the state of an optimizer, of the parameters of all ranks."""
        named = super().optimizer_state_dict(optimizer, names)
        known = self._owners_by_name(names)
        # Adam's step counts and moments are made at the first step, with shapes of its own choice:
        # other ranks learn from their owners which there are.
        local_state = {name: entry for name, entry in named["state"].items() if name in known}
        outlines: dict[str, Any] = {}
        for of_stage in self._from_stages(_pytree.tree_map(_without_values, local_state)):
            outlines.update(of_stage)
        state: dict[str, Any] = {}
        for name in [n for group in named["param_groups"] for n in group["params"]]:
            if name in outlines:
                leaves, structure = _pytree.tree_flatten(outlines[name])
                local = _pytree.tree_leaves(local_state[name]) if name in local_state else None
                placed = [
                    self._place(known[name], None if local is None else local[place], leaf)
                    if isinstance(leaf, torch.Tensor)
                    else leaf
                    for place, leaf in enumerate(leaves)
                ]
                state[name] = _pytree.tree_unflatten(placed, structure)
            elif name in named["state"]:
                state[name] = named["state"][name]
        return {**named, "state": state}

    def fit_optimizer_state(
        self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Translate a state by name, without that of parameters of other ranks."""
        fitted = super().fit_optimizer_state(state, optimizer, names)
        parameters = list(parameters_of([optimizer]))
        local_state = {
            place: entry
            for place, entry in fitted["state"].items()
            if place not in range(len(parameters)) or not parameters[place].is_meta
        }
        return {**fitted, "state": local_state}

    def _mesh_of(self, owner: int, device_type: str) -> Any:
        """Return a mesh of the ranks that have the stages of a rank, only to say where they are."""
        known = self._meshes.get((device_type, owner))
        if known is None:
            from torch.distributed.device_mesh import DeviceMesh

            arrangement = self._arrangement
            ranks = [
                rank
                for rank in range(arrangement.total_size)
                if arrangement.coordinate(rank)["pp"] == owner
            ]
            known = DeviceMesh(device_type, ranks, _init_backend=False)
            self._meshes[device_type, owner] = known
        return known

    def _place(self, owner: int, local: torch.Tensor | None, outline: torch.Tensor) -> torch.Tensor:
        """Return a DTensor that is whole on the ranks of its owner, and on no others.

        Args:
            owner: the index of these ranks in a pipeline.
            local: its value, None on other ranks.
            outline: a tensor of its shape and dtype, of any value.
        """
        from torch.distributed.tensor import DTensor, Replicate

        if local is not None and collectives.is_sharded(local):
            return local
        shape = tuple(outline.shape)
        if local is None:  # from_local takes no shape without dimensions
            part = torch.empty(0 if shape else (), dtype=outline.dtype, device="cpu")
        else:
            part = local.detach()
        mesh = self._mesh_of(owner, part.device.type)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, mesh, [Replicate()], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _share_copies(self, model: torch.nn.Module) -> None:
        """Give buffers that several stages have to those that do not save them."""
        for name in self._buffer_copies(model):
            buffer = model.get_buffer(name)
            source = dist.get_global_rank(self._group, self._owners[model][name])
            value = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._data.device)
            if not buffer.is_meta:
                value.copy_(buffer)
            dist.broadcast(value, src=source, group=self._group)
            if not buffer.is_meta:
                buffer.copy_(value)

    def _buffer_copies(self, model: torch.nn.Module) -> list[str]:
        """Return the saved buffers that several stages have."""
        plan, saved = self._plans[model], model.state_dict().keys()

        def copies(name: str) -> int:
            return sum(plan.keeps(name, n, is_parameter=False) for n in range(plan.count))

        return [name for name, _ in model.named_buffers() if name in saved and copies(name) > 1]

    def _from_stages(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._arrangement.sizes["pp"]
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _owners_by_name(self, names: Mapping[int, str]) -> dict[str, int]:
        """Return the owner of each parameter of pipelines, by its name in a checkpoint."""
        return {
            names[id(parameter)]: owners[name]
            for model, owners in self._owners.items()
            for name, parameter in model.named_parameters()
            if id(parameter) in names
        }


def _without_values(value: Any) -> Any:
    """Return a tensor of the same shape and type without memory; other values as they are."""
    if isinstance(value, torch.Tensor):
        return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
    return value
