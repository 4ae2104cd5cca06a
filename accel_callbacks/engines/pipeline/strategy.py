"""Pipeline parallelism: each rank of a replica has some layers, and micro-batches pass through."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import is_of_transformers, refuse_distributed
from accel_callbacks.engines.checks import refuse_spread as _refuse_spread
from accel_callbacks.engines.fsdp.unit_agreement import UnitAgreement
from accel_callbacks.engines.fsdp.units import find_units
from accel_callbacks.engines.pipeline.gradients import StageGradients
from accel_callbacks.engines.pipeline.rehearsal import Rehearsal
from accel_callbacks.engines.pipeline.runner import (
    PipelineOptions,
    PipelineRunner,
    StageReplicas,
)
from accel_callbacks.engines.pipeline.stages import (
    Stage,
    StagePlan,
    calls_answered,
    parameter_slots,
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
from accel_callbacks.models.compile import refuse_scripted
from accel_callbacks.models.initial_weights import whole_parameters_freed
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.checks import is_plain, refuse_empty

if TYPE_CHECKING:
    from accel_callbacks.engines.pipeline.states import StageStates

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
            slot: parameter for slot, _, parameter in parameter_slots(model) if parameter.is_meta
        }
        # Models look for their device at the first parameter, which other stages do not have.
        placeholders = {
            slot: torch.empty(0, dtype=parameter.dtype, device=self._device)
            for slot, parameter in absent.items()
        }

        def answer(name: str, args: Any, kwargs: Any) -> Any:
            # Without the placeholders: what is lent is found by the shape of the parameter.
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
        if fsdp is not None:
            _refuse_options(fsdp)
        elif parallelism.fsdp_dim_names:
            fsdp = FullyShardedDataParallelPlugin()
        self._fsdp = fsdp
        #: By which stages are sharded.
        self.engine_plugins = () if self._fsdp is None else (self._fsdp,)
        self._ranks = parallelism.sizes["pp"]
        self._index = parallelism.coordinate(topology.rank)["pp"]
        # By model, the pipeline around it, which the script keeps.
        self._pipelines: WeakKeyDictionary[torch.nn.Module, ref[PipelinedModel]] = (
            WeakKeyDictionary()
        )
        self._owners: WeakKeyDictionary[torch.nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[torch.nn.Module, StagePlan] = WeakKeyDictionary()

    @classmethod
    def for_run(cls, run: EngineRequest) -> PipelineParallel:
        """Return the strategy of a run."""
        arranged = run.arranged
        assert arranged is not None
        return cls(run.topology, run.handlers, arranged, run.fsdp)

    @cached_property
    def gradients(self) -> StageGradients:
        """The gradients of all stages."""
        return StageGradients(lambda: self._models, self._shard_of, self.data, self._plainer)

    @cached_property
    def states(self) -> StageStates:
        """The states of all stages."""
        from accel_callbacks.engines.pipeline.states import StageStates

        return StageStates(self.unwrap, self.topology.rank, self.data, self._owners, self._plans)

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

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse a model that was not cut into stages."""
        if not isinstance(model, PipelinedModel) and model not in self._owners:
            raise ValueError(
                f"{type(model).__name__}: with pp_size={self._ranks} a model is cut into stages, "
                "by accel.prepare(model) at its blocks, or by accel.prepare_pipeline(model, "
                "split_points=[...], loss_fn=...)."
            )

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Return a model that is trained unchanged: no device holds all of it."""
        return model if trained else super().place(model, trained=trained)

    def checkpoint_activations(self, model: torch.nn.Module) -> None:
        """Compute blocks again in backward, once: before FSDP gives those of a stage new classes.

        After it, the blocks of other ranks would be of another class, and so none be repeated.
        """
        if model not in self._owners:
            super().checkpoint_activations(model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the pipeline that was made of the model.

        Raises:
            ValueError: the script has dropped it.
        """
        pipeline = self._pipelines[model]()
        if pipeline is None:
            raise ValueError(
                f"{type(model).__name__} is cut into stages already, and the pipeline that "
                "prepare() returned for it is gone: keep that, and use it in its place."
            )
        return pipeline

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside of a pipeline."""
        model = super().unwrap(model)
        return self.unwrap(model.module) if isinstance(model, PipelinedModel) else model

    def cut(
        self,
        model: torch.nn.Module,
        **options: Any,
    ) -> torch.nn.Module:
        """Collective: cut a model into stages, and keep those of this rank."""
        asked = PipelineOptions(**options)
        if isinstance(model, PipelinedModel) or model in self._owners:
            if asked != PipelineOptions():
                raise ValueError(
                    f"{type(model).__name__} is cut into stages already: options of "
                    "prepare_pipeline count at its first call, before prepare()."
                )
            return model if isinstance(model, PipelinedModel) else self.wrap(model)
        chosen = asked.resolve(self._ranks, model)
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
        plan = StagePlan(model, chosen.split_points or [])
        # In this order: the rehearsal and the stages note shapes of whole parameters, and rank 0
        # sends them; then each rank drops those of other stages, tensor parallelism cuts what is
        # left, and FSDP shards the parts.
        rehearsal = Rehearsal(plan, model, self.topology.device)
        self.checkpoint_activations(model)
        stages = {
            n: Stage(plan, model, n, self.topology.device)
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
            # What another stage lends is not sharded here: the runner puts it whole into the slot,
            # and sends its gradient to the owner, whose shards are in no collective of this stage.
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
        shared = self.sequences.shared
        runner = PipelineRunner(
            plan,
            stages,
            rehearsal,
            chosen,
            model,
            self._group,
            self.topology.device,
            replicas,
            self.sequences.checked_call if shared and is_of_transformers(model) else None,
        )
        pipeline = PipelinedModel(model, runner, self.topology.device)
        self._pipelines[model] = ref(pipeline)
        return pipeline

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


def _refuse_options(options: FullyShardedDataParallelPlugin) -> None:
    """Refuse options of FSDP that would change what is trained, and have no effect on stages."""
    names = ("mixed_precision_policy", "ignored_modules", "param_init_fn")
    given = [name for name in names if getattr(options, name)]
    given += ["cpu_offload"] if options.offloads else []
    if given:
        raise ValueError(
            f"{given[0]} of the fsdp_plugin does not go with a pipeline: leave it out."
        )


def _shard(
    stage: torch.nn.Module,
    options: FullyShardedDataParallelPlugin,
    mesh: Any,
    model: torch.nn.Module,
) -> None:
    """Shard the units of a stage, and then what is left of it."""
    # Imported here, because pipelines without it do not need it.
    from torch.distributed.fsdp import fully_shard

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
