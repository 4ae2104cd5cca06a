"""Pipeline parallelism: each rank of a replica has some layers, and micro-batches pass through."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils import _pytree

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.distributed.failures import meet
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import (
    is_of_transformers,
    is_plain,
    refuse_distributed,
    refuse_empty,
)
from accel_callbacks.engines.checks import refuse_spread as _refuse_spread
from accel_callbacks.engines.fsdp.unit_agreement import UnitAgreement
from accel_callbacks.engines.fsdp.units import find_units
from accel_callbacks.engines.pipeline.rehearsal import Rehearsal
from accel_callbacks.engines.pipeline.runner import (
    PipelineOptions,
    PipelineRunner,
    StageReplicas,
)
from accel_callbacks.engines.pipeline.stages import (
    Slot,
    Stage,
    StagePlan,
    calls_answered,
    slots_filled,
)
from accel_callbacks.engines.sharding import Sharding
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.engines.tensor.strategy import (
    parallelize,
    reduce_partial_gradients,
    required_plan,
    separate_dropout,
)
from accel_callbacks.gradients import (
    combined_norm,
    local_part,
    parameters_of,
    scale_gradients,
    total_norm,
)
from accel_callbacks.models.compile import refuse_scripted
from accel_callbacks.models.initial_weights import whole_parameters_freed
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig

__all__ = ["PipelineParallel", "PipelinedModel"]


class PipelinedModel(torch.nn.Module):
    """A model of which each rank has some stages: its call runs forward and backward of a batch.

    With gradients enabled, ``model(*inputs, target=target)`` is the loss over the batch, on all
    ranks; its backward hands out the gradients that the schedule has computed. Without a
    ``loss_fn`` it is what the model returns, of which the loss alone is there. Under ``no_grad`` it
    is the loss too, and without a target what the model returns.

    Attributes:
        module: the model as the user built it; parameters of other ranks are on the meta device.

    Example:
        >>> from accel_callbacks.engines.pipeline.strategy import PipelinedModel
        >>> issubclass(PipelinedModel, torch.nn.Module)
        True
    """

    def __init__(
        self, module: torch.nn.Module, runner: Callable[..., Any], device: torch.device
    ) -> None:
        super().__init__()
        self.module = module
        self._runner, self._device = runner, device

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Return the loss, or under ``no_grad`` without a target the outputs, on all ranks."""
        with collectives.explained(f"the forward of {class_of(self.module).__name__}"):
            return self._runner(args, kwargs, target)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` of the model, all forwards of which run through the stages.

        Without a cache, so that each new token costs a forward of all before it: for samples
        beside a training. On all ranks, which return the same.

        Args:
            *args: of the model's own ``generate``.
            **kwargs: of it.

        Raises:
            ValueError: the model calls its encoder alone.
        """
        model: Any = self.module
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"generate: {class_of(model).__name__} calls its encoder alone, which no stage "
                "does. Load the weights of save_model() into a model of one process for that."
            )
        absent = {
            Slot(module, key): parameter
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        }
        # Models look for their device at the first parameter, which other stages do not have.
        placeholders = {
            slot: torch.empty(0, dtype=parameter.dtype, device=self._device)
            for slot, parameter in absent.items()
        }

        def answer(name: str, args: Any, kwargs: Any) -> Any:
            with slots_filled(absent):
                return self(*args, **{**kwargs, "use_cache": False})

        with calls_answered({"": model}, answer), slots_filled(placeholders):
            return model.generate(*args, **{**kwargs, "use_cache": False})


class PipelineParallel(Sharding):
    """A strategy whose ranks each have some layers, sharded by FSDP2 or cut too.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged.
        fsdp: how stages are sharded, over the ranks of ``dp_shard_size`` and those that share
            sequences.

    Example:
        >>> from accel_callbacks.engines.pipeline.strategy import PipelineParallel
        >>> PipelineParallel.name
        'pipeline_parallel'
    """

    name = "pipeline_parallel"
    has_gradient_sync = True  # by FSDP, of a stage
    _plainer = "train without pp_size"

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None,
        parallelism: ParallelismConfig,
        fsdp: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        self._fsdp = fsdp
        if parallelism.fsdp_dim_names and fsdp is None:
            self._fsdp = FullyShardedDataParallelPlugin()
        self._ranks = parallelism.sizes["pp"]
        self._index = parallelism.coordinate(topology.rank)["pp"]
        self._wrappers: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        self._owners: WeakKeyDictionary[torch.nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[torch.nn.Module, StagePlan] = WeakKeyDictionary()
        self._meshes: dict[tuple[str, int], Any] = {}

    @property
    def engine_plugins(self) -> tuple[Any, ...]:
        """The options by which stages are sharded; none if they are not."""
        return () if self._fsdp is None else (self._fsdp,)

    # --- cutting --------------------------------------------------------------------------------

    @property
    def _models(self) -> list[torch.nn.Module]:
        return list(self._owners)

    @property
    def _group(self) -> Any:
        return self.data.mesh["pp"].get_group()

    @cached_property
    def _data_mesh(self) -> Any:
        """Collective: return the mesh over which FSDP replicates and shards a stage."""
        assert self.parallelism is not None
        names, device = self.parallelism.fsdp_dim_names, self.topology.device.type
        if names != ["dp_replicate"]:
            return self.parallelism.get_submesh(names, device)
        # Imported here, because most pipelines are sharded or alone.
        from torch.distributed.device_mesh import init_device_mesh

        # FSDP takes a single dimension for that of the shards, so there is one of a size of 1.
        sizes = self.parallelism.sizes
        axes = [axis for axis in sizes if sizes[axis] > 1 or axis == "dp_shard"]
        mesh = init_device_mesh(
            device, tuple(sizes[axis] for axis in axes), mesh_dim_names=tuple(axes)
        )
        return mesh["dp_replicate", "dp_shard"]

    @property
    def _data_group(self) -> Any:
        """The ranks that have the same stage, and other samples or tokens."""
        assert self.parallelism is not None
        shared = "sp" if self.parallelism.sp_enabled else "cp"
        sizes = self.parallelism.sizes
        axes = [axis for axis in ("dp_replicate", "dp_shard", shared) if sizes[axis] > 1]
        joined = f"dp_{shared}" if sizes[shared] > 1 else "dp"
        name = axes[0] if len(axes) == 1 else joined
        return self.parallelism.get_submesh([name], self.topology.device.type).get_group()

    def cuts(self, model: torch.nn.Module) -> bool:
        """Return True for a model that is not cut into stages yet."""
        return not isinstance(model, PipelinedModel) and model not in self._owners

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model that was not cut into stages."""
        if self.cuts(model):
            raise ValueError(
                f"{type(model).__name__}: with pp_size={self._ranks} a model is cut into stages, "
                "by accel.prepare(model) at its blocks, or by accel.prepare_pipeline(model, "
                "split_points=[...], loss_fn=...)."
            )

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model unchanged: no device holds all of it."""
        return model

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the pipeline that was made of the model."""
        wrapper: torch.nn.Module = self._wrappers[model]()
        return wrapper

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside of a pipeline."""
        model = super().unwrap(model)
        return self.unwrap(model.module) if isinstance(model, PipelinedModel) else model

    def pipeline(
        self,
        model: torch.nn.Module,
        options: PipelineOptions,
        wrap_stage: Callable[[torch.nn.Module], torch.nn.Module],
    ) -> torch.nn.Module:
        """Collective: cut a model into stages, and keep those of this rank."""
        if model in self._owners:
            raise ValueError(f"{type(model).__name__} is cut into stages already.")
        options = options.checked(self._ranks, model)
        refuse_scripted(model.modules(), "a pipeline")
        self._refuse_shared(model)
        _refuse_spread(model)
        refuse_distributed(model)
        refuse_empty(model)
        if not is_plain(model):
            raise ValueError(
                f"{type(model).__name__} customizes how its state is saved, of which each rank "
                "would have a part: a pipeline needs models whose state is their tensors."
            )
        layers = self._plan_of_layers(model)
        plan = StagePlan(model, options.split_points or [])
        rehearsal = Rehearsal(plan, model, self.topology.device)
        stages = {
            n: wrap_stage(Stage(plan, model, n, self.topology.device))
            for n in range(self._index, plan.count, self._ranks)
        }
        self._send_weights(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._plans[model] = plan
        self._owners[model] = {name: n % self._ranks for name, n in plan.owner.items()}
        self._drop_others(model, plan, stages)
        if layers:
            mesh = self.data.mesh["tp"]
            with whole_parameters_freed(model):
                parallelize(model, layers, mesh)
            reduce_partial_gradients(model)
            separate_dropout(model, self.parallelism, mesh, self.topology.device)
        replicas = None
        if self._fsdp is not None:
            replicas = self._stage_replicas()
            # What another stage lends is not sharded here; see the runner.
            lent = [
                (name, slot)
                for name, stages_lent in plan.shared.items()
                for slots in stages_lent.values()
                for slot in slots
            ]
            for _, slot in lent:
                del slot.module._parameters[slot.key]
            for stage in stages.values():
                _shard(stage, self._fsdp, self._data_mesh, model)
                replicas.units.watch(stage)
            for name, slot in lent:
                slot.module._parameters[slot.key] = model.get_parameter(name)
        self._replace(before, model)
        for optimizer in self._optimizers:
            self._bind(optimizer)
        runner = PipelineRunner(
            plan,
            stages,
            (rehearsal, wrap_stage(rehearsal)),
            options,
            model,
            self._group,
            self.topology.device,
            replicas,
            self._context.checked_call if self._context and is_of_transformers(model) else None,
        )
        return PipelinedModel(model, runner, self.topology.device)

    def _plan_of_layers(self, model: torch.nn.Module) -> Mapping[str, Any]:
        """Return the plan of tensor parallelism, empty without it."""
        if self.parallelism is None or not self.parallelism.tp_enabled:
            return {}
        plan = required_plan(model, self.parallelism)
        for name, style in plan.items():
            if "sequence" in str(style) or str(style).endswith("loss_parallel"):
                raise ValueError(
                    f"{name}: the style {style!r} of tensor parallelism leaves activations cut "
                    "between the layers, and stages of a pipeline pass on whole ones: use "
                    '"colwise", "rowwise", "embedding_rowwise" and "colwise_gather_output".'
                )
        return plan

    def _stage_replicas(self) -> StageReplicas:
        options = self.handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        group = self._data_group
        units = UnitAgreement(fills=options.find_unused_parameters, group=group)
        shared = options.broadcast_buffers
        return StageReplicas(units, SharedBuffers(lambda _: False, group) if shared else None)

    @torch.no_grad()
    def _send_weights(self, model: torch.nn.Module) -> None:
        """Let all ranks begin with the weights of rank 0, on the device."""
        for tensor in (*model.parameters(), *model.buffers()):
            sent = collectives.broadcast(tensor.detach().to(self.topology.device))
            tensor.data = sent.to(tensor.dtype)

    def _drop_others(
        self, model: torch.nn.Module, plan: StagePlan, own_stages: Collection[int]
    ) -> None:
        """Replace the tensors of other ranks by empty ones."""
        empty: dict[int, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is None:
                        continue
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    if any(plan.keeps(name, n, is_parameter=is_parameter) for n in own_stages):
                        continue
                    if id(tensor) not in empty:
                        meta = torch.empty_like(tensor, device="meta")
                        empty[id(tensor)] = (
                            torch.nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                        )
                        if is_parameter:  # an optimizer of the user holds it
                            tensor.data = tensor.data.new_empty(0)
                    slots[key] = empty[id(tensor)]

    # --- training -------------------------------------------------------------------------------

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer holds no parameter of a pipeline, and no gradient."""
        optimizer_ids = set(map(id, parameters_of([optimizer])))
        known = {id(p) for model in self._models for p in model.parameters()}
        if not optimizer_ids & known:
            super().check_step(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm over all stages."""
        parameters = [self._shard_of(parameter) for parameter in parameters]
        of_stages = {id(p) for model in self._models for p in model.parameters()}
        stage_parameters = [parameter for parameter in parameters if id(parameter) in of_stages]
        rest = [parameter for parameter in parameters if id(parameter) not in of_stages]
        norm = self._over_stages(total_norm(stage_parameters, norm_type), norm_type)
        if rest:  # the same on all stages
            norm = combined_norm([norm, total_norm(rest, norm_type)], norm_type)
        scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        total = norm.to(self.topology.device).double()
        if norm_type == float("inf"):
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._group)
            return total.to(norm.dtype)
        total = total.pow(norm_type)
        dist.all_reduce(total, group=self._group)
        return total.pow(1.0 / norm_type).to(norm.dtype)

    def join_norms(
        self, norms: Mapping[str, torch.Tensor], norm_type: float
    ) -> dict[str, torch.Tensor]:
        """Collective: return norms of the gradients of all stages; of one name, the total."""
        gathered: list[Any] = [None] * self._ranks
        local_norms = {name: float(norm) for name, norm in norms.items()}
        dist.all_gather_object(gathered, local_norms, group=self._group)
        parts: dict[str, list[torch.Tensor]] = {}
        for stage_norms in gathered:
            for name, norm in stage_norms.items():
                parts.setdefault(name, []).append(torch.tensor(norm, device=self.topology.device))
        return {name: combined_norm(several, norm_type) for name, several in parts.items()}

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

    # --- states ---------------------------------------------------------------------------------

    def _mesh_of(self, owner: int, device_type: str) -> Any:
        """Return a mesh of the ranks that have the stages of a rank, only to say where they are."""
        known = self._meshes.get((device_type, owner))
        if known is None:
            from torch.distributed.device_mesh import DeviceMesh

            assert self.parallelism is not None
            arrangement = self.parallelism
            ranks = [
                rank
                for rank in range(self.topology.world_size)
                if arrangement.coordinate(rank)["pp"] == owner
            ]
            known = DeviceMesh(device_type, ranks, _init_backend=False)
            self._meshes[device_type, owner] = known
        return known

    def _placed(
        self, owner: int, local: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a DTensor that is whole on the ranks of its owner, and on no others."""
        from torch.distributed.tensor import DTensor, Replicate

        if local is not None and collectives.is_sharded(local):
            return local
        if local is None:  # from_local takes no shape without dimensions
            part = torch.empty(0 if shape else (), dtype=dtype, device="cpu")
        else:
            part = local.detach()
        whole = torch.empty(tuple(shape), device="meta")
        return DTensor.from_local(
            part,
            self._mesh_of(owner, part.device.type),
            [Replicate()],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def local_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state under the names of the whole model: of other ranks, where it is."""
        inner = self.unwrap(model)
        owners, canonical = self._owners[inner], self._plans[inner].canonical
        placed: dict[str, torch.Tensor] = {}  # one for the names of tied tensors, on all ranks
        state = inner.state_dict()
        for name, tensor in state.items():
            first = canonical[name]
            if first not in placed:
                local = tensor if owners[name] == self._index else None
                placed[first] = self._placed(owners[name], local, tuple(tensor.shape), tensor.dtype)
        return {name: placed[canonical[name]] for name in state}

    def stored(self, tree: Any, models: Sequence[torch.nn.Module]) -> Any:
        """Return a state in which tensors by the names of parameters are where their stages are."""
        owners = {
            f"{number}.{name}": owner
            for number, model in enumerate(map(self.unwrap, models))
            for name, owner in self._owners.get(model, {}).items()
        }

        def placed(value: Any, name: Any = None) -> Any:
            if isinstance(value, Mapping):
                return {key: placed(entry, key) for key, entry in value.items()}
            if isinstance(value, torch.Tensor) and name in owners:
                local = value if owners[name] == self._index else None
                return self._placed(owners[name], local, tuple(value.shape), value.dtype)
            return value

        return placed(tree)

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return False for a model of whose buffers several stages have copies."""
        return not self._copied(self.unwrap(model))

    def model_state_dict(
        self,
        model: torch.nn.Module,
        *,
        unwrap: bool = True,
        all_ranks: bool = False,
        debug: bool | None = None,
    ) -> dict[str, Any]:
        """Collective: return the full state of a model, in host memory."""
        inner = self.unwrap(model)
        if inner not in self._owners:
            return super().model_state_dict(model, unwrap=unwrap, all_ranks=all_ranks, debug=debug)
        collectives.begin("get_state_dict", debug, all_ranks=all_ranks)
        meet("get_state_dict")
        keep = all_ranks or self.topology.rank == 0
        prefix = "" if unwrap else "module."
        owners, gathered = self._owners[inner], {}
        for name, tensor in inner.state_dict().items():
            if owners[name] != self._index:
                full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.topology.device)
            else:
                full = collectives.full_tensor(tensor)
            source = int(self._mesh_of(owners[name], self.topology.device.type).mesh[0])
            full = collectives.broadcast(full, source)
            if keep:
                gathered[prefix + name] = full.to("cpu", copy=True)
        return gathered

    def weights_to_write(self, model: torch.nn.Module) -> dict[str, Any]:
        """Collective: return the weights of all ranks on the first, in host memory."""
        return self.model_state_dict(model, debug=False)

    @torch.no_grad()
    def load_model_state_dict(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Collective: load the stages of this rank from a full state, or from one placed alike."""
        inner = self.unwrap(model)
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

    def _share_copies(self, model: torch.nn.Module) -> None:
        """Give buffers that several stages have to those that do not save them."""
        for name in self._copied(model):
            buffer = model.get_buffer(name)
            source = dist.get_global_rank(self._group, self._owners[model][name])
            value = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.topology.device)
            if not buffer.is_meta:
                value.copy_(buffer)
            dist.broadcast(value, src=source, group=self._group)
            if not buffer.is_meta:
                buffer.copy_(value)

    def _copied(self, model: torch.nn.Module) -> list[str]:
        """Return the saved buffers that several stages have."""
        plan, saved = self._plans[model], model.state_dict().keys()

        def copies(name: str) -> int:
            return sum(plan.keeps(name, n, is_parameter=False) for n in range(plan.count))

        return [name for name, _ in model.named_buffers() if name in saved and copies(name) > 1]

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Collective: return the gradients of an open window, those of all ranks by their place."""
        inner = self.unwrap(model)
        named = dict(inner.named_parameters())
        local_names = [name for name, parameter in named.items() if parameter.grad is not None]
        known = set().union(*self._from_stages(local_names))
        owners = self._owners[inner]
        return {
            name: self._placed(
                owners[name], parameter.grad, tuple(parameter.shape), parameter.dtype
            )
            for name, parameter in named.items()
            if name in known
        }

    def _from_stages(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Collective: return the state of an optimizer, of the parameters of all ranks."""
        named = super().optimizer_state_dict(optimizer, names)
        known = self._owners_by_name(names)
        local_state = {name: entry for name, entry in named["state"].items() if name in known}
        all_outlines: dict[str, Any] = {}
        for outlines in self._from_stages(_pytree.tree_map(_Outline.of, local_state)):
            all_outlines.update(outlines)
        state: dict[str, Any] = {}
        for name in [n for group in named["param_groups"] for n in group["params"]]:
            if name in local_state:
                state[name] = _pytree.tree_map(
                    lambda value, owner=known[name]: (
                        self._placed(owner, value, tuple(value.shape), value.dtype)
                        if isinstance(value, torch.Tensor)
                        else value
                    ),
                    local_state[name],
                )
            elif name in all_outlines:
                state[name] = _pytree.tree_map(
                    lambda value, owner=known[name]: (
                        self._placed(owner, None, value.shape, value.dtype)
                        if isinstance(value, _Outline)
                        else value
                    ),
                    all_outlines[name],
                )
            elif name in named["state"]:
                state[name] = named["state"][name]
        return {**named, "state": state}

    def _owners_by_name(self, names: Mapping[int, str]) -> dict[str, int]:
        """Return the owner of each parameter of pipelines, by its name in a checkpoint."""
        return {
            names[id(parameter)]: owners[name]
            for model, owners in self._owners.items()
            for name, parameter in model.named_parameters()
            if id(parameter) in names
        }

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


@dataclass(frozen=True)
class _Outline:
    """The shape and type of a tensor of another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Outline(tuple(value.shape), value.dtype)
        return value


def _shard(
    stage: torch.nn.Module,
    options: FullyShardedDataParallelPlugin,
    mesh: Any,
    model: torch.nn.Module,
) -> None:
    """Shard the units of a stage, and then what is left of it."""
    # Imported here, because pipelines without it do not need it.
    from torch.distributed.fsdp import fully_shard

    if options.offloads:
        raise ValueError(
            "cpu_offload of the fsdp_plugin does not go with a pipeline: leave it out."
        )
    # A runner sends it or takes its loss, and writes into neither.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPStage\) returned a view")
    with whole_parameters_freed(stage):
        for unit in find_units(stage, options):
            # Gathered once for all micro-batches, which follow one another.
            fully_shard(list(unit.modules), mesh=mesh, reshard_after_forward=False)
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    for name, shard in stage.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = shard
