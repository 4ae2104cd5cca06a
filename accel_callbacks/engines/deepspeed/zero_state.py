"""The states of a model and an optimizer under ZeRO, by parameter, as rows on each rank.

DeepSpeed keeps pieces of a flat vector of all parameters. A checkpoint holds parameters by name, so
each is gathered, one at a time, and a rank keeps its rows of it in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.errors import ResumeError
from accel_callbacks.models.compile import original
from accel_callbacks.strategy.optimizer_state import STATE_BY_KEY

__all__ = [
    "RowMesh",
    "RowsOfModel",
    "ZeroWeight",
    "gather_parameter",
    "gradient_parts",
    "is_under_zero",
    "is_zero",
    "load_optimizer_state",
    "load_parameters",
    "optimizer_state",
    "protect_from_step",
    "state_by_key",
    "without_engine",
    "zero_weight",
]


class RowMesh:
    """Cuts tensors by their rows over all ranks, in host memory.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._mesh: Any = None

    def rows(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of a whole tensor as a DTensor in host memory; collective the first time.

        A tensor without rows stays whole, and so does any on one rank.
        """
        copy = self.empty(full.shape, full.dtype)
        if full.dim() == 0 or self._world_size == 1:
            return copy.copy_(full.detach())
        local_rows = copy.to_local()  # type: ignore[attr-defined]
        # As DTensor cuts them: the last ranks have fewer rows, or none.
        first = -(-full.shape[0] // self._world_size) * self._mesh.get_local_rank()
        local_rows.copy_(full.detach()[first : first + len(local_rows)])
        return copy

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new DTensor of a shape, to be read into; collective the first time.

        Args:
            shape: of the whole tensor; one without rows is plain, and so is any on one rank.
            dtype: its dtype.
        """
        if not shape or self._world_size == 1:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        # Imported here, because importing it takes a second.
        from torch.distributed import tensor as dtensors
        from torch.distributed.device_mesh import init_device_mesh

        if self._mesh is None:
            self._mesh = init_device_mesh("cpu", (self._world_size,), mesh_dim_names=("zero",))
        return dtensors.empty(
            tuple(shape), dtype=dtype, device_mesh=self._mesh, placements=[dtensors.Shard(0)]
        )


class ZeroWeight:
    """A parameter of stage 3, by the part of it that this rank keeps.

    The part is flat and padded; of a trained parameter it is the float32 one of the optimizer.

    Args:
        parameter: the parameter, which is empty outside of a forward.

    Attributes:
        shape: of the whole parameter.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.shape = torch.Size(parameter.ds_shape)

    @property
    def _is_trained(self) -> bool:
        return self._parameter.requires_grad and hasattr(self._parameter, "_z3_optimizer")

    def part(self) -> torch.Tensor:
        """Return the part, in the engine's own memory."""
        from deepspeed.utils import safe_get_local_fp32_param

        part: torch.Tensor = self._parameter.ds_tensor
        if self._is_trained:
            part = safe_get_local_fp32_param(self._parameter)
        return part.detach()

    def write(self, part: torch.Tensor) -> None:
        """Set the part, for the optimizer and for the next forward."""
        from deepspeed.utils import safe_set_local_fp32_param

        parameter = self._parameter
        if self._is_trained:
            safe_set_local_fp32_param(parameter, part)
        parameter.ds_tensor.data.copy_(part)
        if parameter.numel() == parameter.ds_numel:
            parameter.partition()  # small ones stay gathered: the next forward gathers them anew

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole value, padded as DeepSpeed pads it."""
        size = self._parameter.ds_tensor.numel()
        group_rank = torch.distributed.get_rank(self._parameter.ds_process_group)
        piece = whole.flatten()[size * group_rank : size * (group_rank + 1)]
        return torch.nn.functional.pad(piece, (0, size - piece.numel()))

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Collective: return the whole value, of which each rank passes its part."""
        parameter = self._parameter
        local = part.to(parameter.ds_tensor.device)
        parts = [torch.empty_like(local) for _ in range(parameter.ds_process_group.size())]
        torch.distributed.all_gather(parts, local.contiguous(), group=parameter.ds_process_group)
        return torch.cat(parts)[: self.shape.numel()].view(self.shape)


def zero_weight(tensor: torch.Tensor) -> ZeroWeight | None:
    """Return a parameter by this rank's part of it, None unless stage 3 shards it."""
    return ZeroWeight(tensor) if hasattr(tensor, "ds_id") else None


def is_zero(engine: Any) -> bool:
    """Return whether an engine shards optimizer states, so that the stage is 1, 2 or 3."""
    return bool(engine.zero_optimization()) and engine.optimizer is not None


def gather_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Collective: return a whole parameter, in float32 if the optimizer steps with that."""
    if (weight := zero_weight(parameter)) is not None:
        return weight.whole(weight.part())
    if parameter.dtype == torch.float32 or not parameter.requires_grad:
        return parameter.detach()
    from deepspeed.utils import safe_get_full_fp32_param

    full = safe_get_full_fp32_param(parameter)
    return parameter.detach() if full is None else full.detach()


@torch.no_grad()
def load_parameters(values: Mapping[Any, torch.Tensor]) -> None:
    """Collective: set whole parameters, the same on all ranks.

    Args:
        values: whole values by parameter; DTensors are gathered one after the other.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    for parameter, value in values.items():
        full = collectives.full_tensor(value).to(parameter.device)
        if (weight := zero_weight(parameter)) is not None:
            weight.write(weight.part_of(full))
            continue
        parameter.data.copy_(full)
        if hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, full)


def without_engine(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of an engine of DeepSpeed; any other model as it is."""
    engine = original(model)
    if hasattr(engine, "zero_optimization_stage"):
        inner: torch.nn.Module = engine.module  # type: ignore[assignment]
        return inner
    return model


def is_under_zero(model: torch.nn.Module) -> bool:
    """Return whether ZeRO keeps parts of a model's parameters; it is without its engine."""
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters())


class RowsOfModel(torch.nn.Module):
    """Stands in for a model under ZeRO in a load: its parameters are rows, to be read into.

    Args:
        model: the model, without its engine; its buffers are those of the stand-in.

    Attributes:
        rows: the rows of each parameter.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        mesh = RowMesh(torch.distributed.get_world_size())
        self.rows: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        places: list[tuple[str, str, Any]] = []
        saved = model.state_dict(keep_vars=True)
        for name, tensor in saved.items():
            if isinstance(tensor, torch.nn.Parameter) and tensor not in self.rows:
                shape = getattr(tensor, "ds_shape", tensor.shape)
                dtype = torch.float32 if tensor.requires_grad else tensor.dtype
                self.rows[tensor] = torch.nn.Parameter(mesh.empty(shape, dtype), False)
            path, _, attribute = name.rpartition(".")
            places.append((path, attribute, tensor))
        for path, attribute, tensor in places:
            module = self._module(path)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(attribute, self.rows[tensor])
            elif isinstance(tensor, torch.Tensor):
                module.register_buffer(attribute, tensor)

    def _module(self, path: str) -> torch.nn.Module:
        """Return the module at a path, created if it is missing."""
        module: torch.nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, torch.nn.Module())
            module = module.get_submodule(name)
        return module

    def put(self, missing: Iterable[str]) -> None:
        """Collective: set the parameters of the model, but for those that were not read.

        Args:
            missing: names of these.
        """
        missing = set(missing)
        read_ids = {
            id(parameter)
            for name, parameter in self.named_parameters(remove_duplicate=False)
            if name not in missing
        }
        load_parameters(
            {parameter: rows for parameter, rows in self.rows.items() if id(rows) in read_ids}
        )


def _flat_groups(optimizer: Any) -> Iterator[tuple[torch.Tensor, list[torch.nn.Parameter]]]:
    """Yield each flat vector that the optimizer steps with, and the parameters in it."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    else:
        yield from zip(
            optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True
        )


def _is_elementwise(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == flat.shape


def optimizer_state(
    optimizer: Any, names: Mapping[int, str], mesh: RowMesh
) -> dict[str, dict[str, Any]]:
    """Collective: return the state of each parameter by its name.

    Args:
        optimizer: DeepSpeed's, around the one that steps.
        names: of the parameters, by their ``id``.
        mesh: cuts the tensors.

    Raises:
        RuntimeError: a state is not elementwise, so that it belongs to this layout alone.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    states: dict[str, dict[str, Any]] = {}
    for flat, parameters in _flat_groups(optimizer):
        state = optimizer.optimizer.state.get(flat, {})
        if state:
            # DeepSpeed does it after the first group's step, when others have no state yet.
            _link(optimizer, flat, parameters)
        for parameter in parameters:
            parameter_state: dict[str, Any] = {}
            for key, value in state.items():
                if _is_elementwise(value, flat):
                    full = safe_get_full_optimizer_state(parameter, key)
                    parameter_state[key] = mesh.rows(full)
                elif isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise RuntimeError(
                        f"{type(optimizer.optimizer).__name__} keeps {key!r} with shape "
                        f"{list(value.shape)}, which is not one value for each element: under ZeRO "
                        "it cannot be saved by parameter. Choose an elementwise optimizer."
                    )
                else:
                    parameter_state[key] = (
                        value.clone() if isinstance(value, torch.Tensor) else value
                    )
            if parameter_state:
                states[names.get(id(parameter), f"parameter.{len(states)}")] = parameter_state
    return states


def state_by_key(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer that steps keeps under other keys than parameters, if anything."""
    state = optimizer.optimizer.state
    by_key = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    return {STATE_BY_KEY: by_key} if by_key else {}


@torch.no_grad()
def load_optimizer_state(optimizer: Any, states: Mapping[Any, Any]) -> None:
    """Collective: set the states of parameters, whole and the same on all ranks.

    Args:
        optimizer: DeepSpeed's, around the one that steps.
        states: by parameter, and by other keys that the optimizer has; a parameter without one had
            no step yet.

    Raises:
        ResumeError: parameters that DeepSpeed steps with as one vector have different counts.
    """
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    inner = optimizer.optimizer
    inner.state.update({key: s for key, s in states.items() if not isinstance(key, torch.Tensor)})
    for flat, parameters in _flat_groups(optimizer):
        pairs = [
            (parameter, states[parameter]) for parameter in parameters if states.get(parameter)
        ]
        inner.state.pop(flat, None)
        if not pairs:
            continue
        shared, elementwise = _split_state(pairs)
        inner.state[flat] = {
            **{key: torch.zeros_like(flat) for key in elementwise},
            **shared,
        }
        _link(optimizer, flat, parameters)
        for parameter, state in pairs:
            for key in elementwise:
                full = collectives.full_tensor(state[key]).to(flat.device, flat.dtype)
                if (weight := zero_weight(parameter)) is not None:
                    safe_set_local_optimizer_state(parameter, weight.part_of(full), key)
                else:
                    safe_set_full_optimizer_state(parameter, full, key)


def _split_state(
    pairs: Sequence[tuple[torch.Tensor, Mapping[str, Any]]],
) -> tuple[dict[str, Any], list[str]]:
    """Return what is one value for all parameters of a vector, and the names of the others."""
    first, state = pairs[0]
    shape = getattr(first, "ds_shape", first.shape)
    elementwise = [
        key
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim()
    ]
    shared: dict[str, Any] = {}
    for key, value in state.items():
        if key in elementwise:
            continue
        values = {float(entry[key]) for _, entry in pairs if entry.get(key) is not None}
        if len(values) > 1:
            raise ResumeError(
                f"the optimizer's {key!r} differs between parameters ({sorted(values)}), and ZeRO "
                "steps with all of a group at once: load it under DDP or FSDP, or give parameters "
                "that began later a group of their own."
            )
        shared[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return shared, elementwise


def _link(optimizer: Any, flat: torch.Tensor, parameters: Iterable[Any]) -> None:
    """Let the parameters of stages 1 and 2 find their pieces of new states."""
    state = optimizer.optimizer.state[flat]
    for parameter in parameters:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            mapping.set_optim_state_fragment(flat, state)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = True


@contextmanager
def protect_from_step(engine: Any, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Context manager: a step leaves parameters and their states as they are.

    The optimizer steps with all of a flat vector, where a missing gradient is zero, which weight
    decay and momentum turn into a step.
    """
    if not parameters:
        yield
        return
    optimizer = engine.optimizer
    wanted = set(map(id, parameters))
    saved = []
    for flat, group in _flat_groups(optimizer):
        for parameter in group:
            place = _place(optimizer, parameter) if id(parameter) in wanted else None
            if place is not None and sum(place) <= flat.numel():  # else it is on NVMe
                pieces = _pieces(optimizer, flat, *place)
                saved.append((flat, place, {key: piece.clone() for key, piece in pieces.items()}))

    @torch.no_grad()
    def restore(*_: Any) -> None:
        for flat, place, before in saved:
            for key, piece in _pieces(optimizer, flat, *place).items():
                piece.copy_(before[key]) if key in before else piece.zero_()

    handle = optimizer.optimizer.register_step_post_hook(restore)
    try:
        yield
    finally:
        handle.remove()


def _place(optimizer: Any, parameter: Any) -> tuple[int, int] | None:
    """Return where a parameter's elements begin in this rank's flat vector, and how many."""
    if hasattr(parameter, "ds_id"):
        _, first, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return int(first), int(count)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:  # on other ranks
        return None
    return mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel


def _pieces(optimizer: Any, flat: torch.Tensor, first: int, count: int) -> dict[str, torch.Tensor]:
    """Return the elements of a place in the weights, and in each state that has them."""
    state = optimizer.optimizer.state.get(flat, {})
    vectors = {
        "": flat,
        **{key: vector for key, vector in state.items() if _is_elementwise(vector, flat)},
    }
    return {key: vector.detach().narrow(0, first, count) for key, vector in vectors.items()}


def gradient_parts(engine: Any) -> list[torch.Tensor]:
    """Return this rank's parts of the reduced gradients, between backward and step."""
    if not is_zero(engine):
        gradients = (parameter.grad for parameter in engine.module.parameters())
        return [gradient for gradient in gradients if gradient is not None]
    parts = [
        part
        for group in engine.optimizer.averaged_gradients.values()
        for part in (group or ())
        if isinstance(part, torch.Tensor)
    ]
    if parts:
        return parts
    # Offloaded ones are where the optimizer steps.
    flats = (flat for flat, _ in _flat_groups(engine.optimizer))
    return [flat.grad for flat in flats if flat.grad is not None]
