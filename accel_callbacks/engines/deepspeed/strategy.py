"""DeepSpeed: an engine around each model and its optimizer, driven by the calls of the loop."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from accel_callbacks.distributed.topology import Topology, is_current
from accel_callbacks.engines.deepspeed.build import check_builds
from accel_callbacks.engines.deepspeed.gradients import EngineGradients
from accel_callbacks.engines.deepspeed.optimizer import EngineOptimizer, carry
from accel_callbacks.engines.deepspeed.zero_agreement import ZeroAgreement
from accel_callbacks.engines.deepspeed.zero_state import (
    RowMesh,
    zero_weight,
)
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.gradients import parameters_of
from accel_callbacks.logging import notice
from accel_callbacks.models.compile import original
from accel_callbacks.models.from_pretrained import ShardedByZero
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin, DeepSpeedPlugins
from accel_callbacks.plugins.deepspeed_config import FilledConfig, HfDeepSpeedConfig, Known
from accel_callbacks.plugins.deepspeed_dummies import DummyOptim, DummyScheduler
from accel_callbacks.plugins.distributed_type import DistributedType
from accel_callbacks.plugins.engine_request import EngineRequest
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.base import SetUp, Strategy

if TYPE_CHECKING:
    from accel_callbacks.engines.deepspeed.states import ZeroStates

__all__ = ["DeepSpeed"]

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKETS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
_WINDOW = Known(1, "the loop's window, which divides losses")
_BATCH_SIZE = Known(1, "placeholder: DeepSpeed counts samples with it, and nothing else")
_TOGETHER = (
    "DeepSpeed sets up a model with its optimizer: pass both to one call, "
    "`model, optimizer = accel.prepare(model, optimizer)`"
)


class DeepSpeed(Strategy):
    """A strategy that trains models with DeepSpeed's engine, ZeRO stages 0 to 3.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged; only data parallelism.
        plugins: the options, one or several.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: an axis of parallelism is not of data.

    Example:
        >>> from accel_callbacks.engines import DeepSpeed
        >>> DeepSpeed.owns_step
        True
    """

    name = "deepspeed"
    has_gradient_sync = True
    owns_step = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
        plugins: DeepSpeedPlugins | None = None,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError(
                "deepspeed_plugin needs DeepSpeed: `pip install 'accel-callbacks[deepspeed]'`."
            )
        if parallelism is not None and (
            parallelism.non_data_parallel_size > 1 or parallelism.dp_shard_enabled
        ):
            raise ValueError(
                "deepspeed_plugin goes with data parallelism alone: leave tp_size, cp_size and "
                "dp_shard_size out, or shard with the fsdp_plugin, which goes with them."
            )
        super().__init__(topology, handlers, parallelism)
        self.plugins = plugins or DeepSpeedPlugins(DeepSpeedPlugin())
        self.engine_plugins = (self.plugins,)
        self.precision = "no"
        self._optimizers: WeakKeyDictionary[torch.nn.Module, EngineOptimizer] = WeakKeyDictionary()
        # Not bound methods, which would keep the strategy, and so transformers' reference, alive.
        strategy = ref(self)
        self._sharded_builds = ShardedByZero(
            lambda: bool(strategy()._builds_sharded()),  # type: ignore[union-attr]
            lambda: strategy()._init_config(),  # type: ignore[union-attr]
        )
        self._untrained: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # engines
        self._rows = RowMesh(topology.world_size)
        common = self.handlers.get(DistributedDataParallelKwargs, DistributedDataParallelKwargs())
        self._buffers = SharedBuffers(lambda buffer: False) if common.broadcast_buffers else None
        self._agreement = ZeroAgreement(fills=common.find_unused_parameters)

    @classmethod
    def for_run(cls, run: EngineRequest) -> DeepSpeed:
        """Return the strategy of a run that asks for no other engine."""
        arranged = run.arranged
        if run.fsdp is not None:
            raise ValueError("deepspeed_plugin and fsdp_plugin are two engines: give one of them.")
        return cls(run.topology, run.handlers, arranged, run.deepspeed)

    @property
    def distributed_type(self) -> DistributedType:
        """``DistributedType.DEEPSPEED``."""
        return DistributedType.DEEPSPEED

    @cached_property
    def gradients(self) -> EngineGradients:
        """The gradients that engines have."""
        return EngineGradients(self._optimizers, self._agreement)

    @cached_property
    def states(self) -> ZeroStates:
        """The states by parameter, under ZeRO as rows on each rank."""
        from accel_callbacks.engines.deepspeed.states import ZeroStates

        return ZeroStates(
            self.unwrap,
            self.topology.rank,
            self._engines,
            self._engine_of,
            self._rows,
        )

    def casts_to(self, precision: str) -> bool:
        """Return True: the engine casts models.

        Raises:
            ValueError: the precision is ``"fp8"``.
        """
        if precision == "fp8":
            raise ValueError(
                "mixed_precision='fp8' does not go with DeepSpeed here: train with 'bf16', or "
                "shard with the fsdp_plugin."
            )
        self.precision = precision
        if any(plugin.zero3_init_flag for plugin in self.plugins.by_name.values()):
            self._sharded_builds.announce()
        return True

    # --- setting up ---------------------------------------------------------------------------

    def init_context(self, *, pretrained: bool = False) -> AbstractContextManager[None]:
        """Return ``deepspeed.zero.Init()`` in stage 3, else a context that does nothing."""
        return self._zero_init() if self._builds_sharded() and not pretrained else nullcontext()

    def _builds_sharded(self) -> bool:
        """Return whether models are built sharded, which ends with the group of the ranks."""
        return bool(self.plugins.active.zero3_init_flag) and is_current(self.topology)

    def _init_config(self) -> dict[str, Any]:
        """Initialize DeepSpeed, and return the configuration of a model that is to be built."""
        self._join()
        return self._fill_config(self.plugins.active, None, None, None).config

    @contextmanager
    def _zero_init(self) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=self._init_config()):
            yield

    def place(self, model: torch.nn.Module, *, trained: bool = True) -> torch.nn.Module:
        """Leave a trained model where it is: the engine moves it, or its shards.

        One that is not trained, and was built sharded, stays so.
        """
        if trained:
            return model
        if any(zero_weight(parameter) is not None for parameter in model.parameters()):
            return self._engine_without_optimizer(model, self.plugins.active)
        return super().place(model, trained=trained)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that is not trained in an engine without an optimizer, in stage 3.

        Raises:
            ValueError: it is another stage, which shards no parameters.
        """
        plugin = self.plugins.active
        if plugin.zero_stage != 3:
            raise ValueError(
                f"{type(model).__name__} has no optimizer in this call. {_TOGETHER}. A model that "
                "is not trained: `accel.prepare_model(model, evaluation_mode=True)`."
            )
        return self._engine_without_optimizer(model, plugin)

    def _engine_without_optimizer(
        self, model: torch.nn.Module, plugin: DeepSpeedPlugin
    ) -> torch.nn.Module:
        """Return an engine that gathers parameters for each forward, and takes no steps."""
        import deepspeed

        engine: torch.nn.Module | None = self._engine_of(model)
        if engine is not None:
            return engine
        filled = self._fill_config(plugin, model, None, None)
        self._join()
        _mark_experts(model, plugin.transformer_moe_cls_names)
        check_builds()
        new_engine: torch.nn.Module = deepspeed.initialize(
            model=model, config=filled.config, dist_init_required=False
        )[0]
        self.plugins.filled[model] = filled
        self._untrained[model] = new_engine
        low = _LOW.get(self.precision)
        if low is not None:
            _cast_around(model, low)
        return new_engine

    def setup(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> SetUp:
        """Make an engine of each model and its optimizer.

        Raises:
            ValueError: a model has no optimizer in this call and is not of stage 3, or several, or
                an optimizer no model.
        """
        pairs = _pairs(models, optimizers)
        engines: list[torch.nn.Module] = []
        ready: dict[int, EngineOptimizer] = {}
        configured: dict[int, Any] = {}
        for model, optimizer in pairs:
            if optimizer is None:
                engines.append(self.wrap(model))
                continue
            dummy = next(
                (
                    scheduler
                    for scheduler in schedulers
                    if isinstance(scheduler, DummyScheduler) and scheduler.optimizer is optimizer
                ),
                None,
            )
            engine, engine_optimizer, scheduler = self._engine(model, optimizer, dummy)
            engines.append(engine)
            ready[id(optimizer)] = engine_optimizer
            if dummy is not None:
                configured[id(dummy)] = scheduler
        for scheduler in schedulers:
            _rebind(configured.get(id(scheduler), scheduler), ready)
        return SetUp(
            engines,
            [ready.get(id(optimizer), optimizer) for optimizer in optimizers],
            [configured.get(id(scheduler), scheduler) for scheduler in schedulers],
        )

    def _engine(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, dummy: Any
    ) -> tuple[Any, EngineOptimizer, Any]:
        import deepspeed

        plugin = self.plugins.active
        filled = self._fill_config(plugin, model, optimizer, dummy)
        self._refuse(filled.config, optimizer, dummy)
        groups = [
            {**group, "params": list(group["params"])}
            for group in optimizer.param_groups
            if group["params"]
        ]
        self._join()
        _mark_experts(model, plugin.transformer_moe_cls_names)
        optimizer_options: dict[str, Any] = (
            {"model_parameters": groups}
            if isinstance(optimizer, DummyOptim)
            else {"optimizer": optimizer}
        )
        check_builds()
        engine, _, _, scheduler = deepspeed.initialize(
            model=model, config=filled.config, dist_init_required=False, **optimizer_options
        )
        engine.lr_scheduler = None  # the prepared scheduler steps where the loop says so
        self._agreement.watch(engine)
        engine_optimizer = EngineOptimizer(
            engine, groups, dict(optimizer.defaults), self._agreement
        )
        carry(engine_optimizer.inner.param_groups, engine_optimizer.param_groups)
        self.plugins.filled[model] = filled
        self._optimizers[model] = engine_optimizer
        engine.register_forward_pre_hook(self.gradients.note_call)
        if self._buffers is not None and any(True for _ in model.buffers()):
            self._buffers.watch(engine)
        low = _LOW.get(self.precision)
        if low is not None:
            _cast_around(model, low)
        if dummy is not None and dummy.lr_scheduler_callable is not None:
            scheduler = dummy.lr_scheduler_callable(engine_optimizer)
        elif dummy is not None:
            scheduler.optimizer = engine_optimizer
        if self.topology.rank == 0:
            notice(
                f"DeepSpeed trains {type(model).__name__} in ZeRO stage "
                f"{plugin.zero_stage}; accel.deepspeed_config(model) shows what it was given"
            )
        return engine, engine_optimizer, scheduler

    def _join(self) -> None:
        """Let DeepSpeed use the process group, making one for a single process."""
        if "LOCAL_RANK" not in os.environ:
            raise RuntimeError(
                "DeepSpeed reads LOCAL_RANK from the environment, which a launcher sets, also for "
                "one process: start the script with `accel launch`."
            )
        if not dist.is_initialized():
            backend = "gloo" if self.topology.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
            )
        import deepspeed

        _forget_destroyed_groups()
        # On a CPU, ranks of one machine reduce through shared memory.
        check_builds(*(["deepspeed_shm_comm"] if self.topology.device.type == "cpu" else []))
        deepspeed.init_distributed(dist_init_required=False, verbose=False)

    def _refuse(self, config: Mapping[str, Any], optimizer: Any, dummy: Any) -> None:
        own_schedule = dummy is not None and dummy.lr_scheduler_callable is not None
        stand_ins = {
            "optimizer": isinstance(optimizer, DummyOptim),
            "scheduler": dummy is not None and not own_schedule,
        }
        for part, is_stand_in in stand_ins.items():
            if is_stand_in != (part in config) and not (part == "scheduler" and own_schedule):
                raise ValueError(
                    f"DeepSpeed's configuration has {'no' if is_stand_in else 'the'} {part!r}: "
                    "pass a DummyOptim or DummyScheduler of accel_callbacks.utils to prepare() "
                    "where the configuration describes one, and else one of torch."
                )
        if self.precision in _LOW and config["zero_optimization"]["stage"] == 0:
            raise ValueError(
                f"mixed_precision={self.precision!r} needs zero_stage=1 or more, where the "
                "optimizer steps with float32: stage 0 trains like DistributedDataParallel "
                "without the deepspeed_plugin."
            )

    def _fill_config(
        self,
        plugin: DeepSpeedPlugin,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        dummy: Any,
    ) -> FilledConfig:
        """Return DeepSpeed's configuration of a model, without ``"auto"``."""
        known = {
            "gradient_clipping": Known(0.0, "clip_grad_norm_ of the loop"),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": Known(
                False, "save_model gathers weights"
            ),
            **{
                f"{name}.enabled": Known(self.precision == name, "mixed_precision") for name in _LOW
            },
            "gradient_accumulation_steps": _WINDOW,
            "train_batch_size": _BATCH_SIZE,
            "train_micro_batch_size_per_gpu": _BATCH_SIZE,
            **_by_hidden_size(model),
            **_of_dummies(optimizer, dummy),
        }
        unread = () if optimizer is not None else ("optimizer", "scheduler")
        if model is None:  # which is not built yet, so its width is not known
            unread = (*unread, *_BUCKETS)
        filled = plugin.filled(known, unread)
        config, origins = HfDeepSpeedConfig(filled.config), filled.origins
        # The loop's window divides losses and says when it ends.
        chosen = {"gradient_accumulation_steps": _WINDOW}
        config.del_config_sub_tree("train_batch_size")
        defaults = {
            "gradient_clipping": known["gradient_clipping"],  # DeepSpeed would clip to 1.0
            "train_micro_batch_size_per_gpu": _BATCH_SIZE,
        }
        if self.precision in _LOW and not config.is_true(f"{self.precision}.enabled"):
            chosen[f"{self.precision}.enabled"] = Known(True, "mixed_precision")
        if self.precision == "bf16" and (config.is_zero2() or config.is_zero3()):
            reason = "bf16, in which sums of a window lose bits"
            defaults["data_types.grad_accum_dtype"] = Known("fp32", reason)
        if optimizer is not None and not isinstance(optimizer, DummyOptim):
            reason = "an optimizer of torch"
            defaults["zero_allow_untested_optimizer"] = Known(True, reason)
            if config.get_value("zero_optimization.offload_optimizer.device") in ("cpu", "nvme"):
                defaults["zero_force_ds_cpu_optimizer"] = Known(False, reason)
        chosen |= {key: kept for key, kept in defaults.items() if config.get_value(key) is None}
        for key, (value, origin) in chosen.items():
            config.set_value(key, value)
            origins[key] = origin
        return FilledConfig(config.config, origins)

    # --- the step -----------------------------------------------------------------------------

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as the user built it."""
        engine = self._engine_of(model)
        return original(model if engine is None else engine.module)

    def _engine_of(self, model: torch.nn.Module) -> Any:
        """Return the engine around a model, given that or the model itself; None without one."""
        inner = original(model)
        for engine in self._engines():
            if inner is engine or inner is original(engine.module):
                return engine
        return None

    def _engines(self) -> list[Any]:
        trained = [optimizer.engine for optimizer in self._optimizers.values()]
        return [*trained, *self._untrained.values()]


# --- helpers of setting up --------------------------------------------------------------------

# Global, as the groups are that DeepSpeed keeps.
_joined: ReferenceType[Any] | None = None


def _forget_destroyed_groups() -> None:
    """Release the groups of DeepSpeed if the process group around them was destroyed."""
    global _joined
    world = dist.group.WORLD
    if _joined is not None and _joined() is not world:
        from deepspeed.utils import groups

        groups._release_process_group_references()
    _joined = ref(world)


def _pairs(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[torch.nn.Module, torch.optim.Optimizer | None]]:
    """Return each model with its optimizer, None if it has none.

    Raises:
        ValueError: one has several, or an optimizer no model.
    """
    new = [optimizer for optimizer in optimizers if not isinstance(optimizer, EngineOptimizer)]
    pairs: list[tuple[torch.nn.Module, torch.optim.Optimizer | None]] = []
    for model in models:
        parameter_ids = {id(parameter) for parameter in model.parameters()}
        model_optimizers = [
            optimizer
            for optimizer in new
            if any(id(parameter) in parameter_ids for parameter in parameters_of([optimizer]))
        ]
        if len(model_optimizers) > 1:
            raise ValueError(
                f"{type(model).__name__} has {len(model_optimizers)} optimizers, and an engine of "
                "DeepSpeed steps one: put their groups into one optimizer."
            )
        pairs.append((model, model_optimizers[0] if model_optimizers else None))
    for optimizer in new:
        if not any(optimizer is paired for _, paired in pairs):
            raise ValueError(
                f"{type(optimizer).__name__} has no parameter of a model in this call. {_TOGETHER}."
            )
    return pairs


def _rebind(scheduler: Any, ready: Mapping[int, EngineOptimizer]) -> None:
    """Let a scheduler, and those inside of it, set the learning rate of the engine's optimizer."""
    for inner in (scheduler, *getattr(scheduler, "_schedulers", ())):
        engine_optimizer = ready.get(id(getattr(inner, "optimizer", None)))
        if engine_optimizer is not None:
            inner.optimizer = engine_optimizer
        elif scheduler is not inner:
            _rebind(inner, ready)


def _mark_experts(model: torch.nn.Module, names: str | None) -> None:
    """Let stage 3 gather expert layers as a whole.

    Raises:
        ValueError: the model has no module of a class.
    """
    if not names:
        return
    from deepspeed.utils import set_z3_leaf_modules

    for name in (name.strip() for name in names.split(",")):
        kinds = {type(module) for module in model.modules() if type(module).__name__ == name}
        if not kinds:
            raise ValueError(
                f"transformer_moe_cls_names: {type(model).__name__} has no module of class "
                f"{name!r}."
            )
        set_z3_leaf_modules(model, list(kinds))


def _cast_around(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast floating inputs of a model to its type, and outputs to float32, as autocast would."""
    from accel_callbacks.collectives.nested import map_tensors

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def upper(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == dtype else tensor

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, lower), map_tensors(kwargs, lower)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(output, upper)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def _by_hidden_size(model: torch.nn.Module | None) -> dict[str, Known]:
    """Return the sizes of buckets that follow from the width of a transformers model."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    width = getattr(config, "hidden_size", None)
    if width is None and getattr(config, "hidden_sizes", None):
        width = max(config.hidden_sizes)  # type: ignore[union-attr]
    if not isinstance(width, int):
        return {}
    origin = f"hidden_size={width} of the model"
    values = (width * width, int(0.9 * width * width), 10 * width)
    return {key: Known(value, origin) for key, value in zip(_BUCKETS, values, strict=True)}


def _of_dummies(optimizer: Any, dummy: Any) -> dict[str, Known]:
    """Return what the stand-ins for an optimizer and a scheduler say."""
    known: dict[str, Known] = {}
    if isinstance(optimizer, DummyOptim):
        for name, value in optimizer.defaults.items():
            known[f"optimizer.params.{name}"] = Known(value, "DummyOptim")
    if dummy is not None:
        rate = dummy.optimizer.defaults.get("lr")
        steps = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": rate,
            "warmup_num_steps": max(1, dummy.warmup_num_steps),
            "total_num_steps": dummy.total_num_steps,
        }
        for name, value in steps.items():
            if value is not None:
                known[f"scheduler.params.{name}"] = Known(value, "DummyScheduler")
    return known
