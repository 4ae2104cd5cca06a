"""Accelerator: builds the components of a training and delegates to them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_callbacks import collectives, plugins
from accel_callbacks._lazy import foreign_name
from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher, firing_plan
from accel_callbacks.callbacks.dispatch.functions import (
    CallbackHandle,
    Filters,
    FunctionHandle,
    checked_hook,
)
from accel_callbacks.callbacks.dispatch.ledger import CallbackReport
from accel_callbacks.callbacks.dispatch.registration import configured
from accel_callbacks.callbacks.foreign import adapt
from accel_callbacks.callbacks.observer import create_observers, first_answer
from accel_callbacks.checkpoint.folder_leases import FolderLeases
from accel_callbacks.checkpoint.project import ProjectConfiguration, chosen_project
from accel_callbacks.collectives.metrics import (
    gather_counted,
    gather_counted_objects,
    rows_beside_lists,
)
from accel_callbacks.data.config import DataLoaderConfiguration, checked_config, checked_rng_types
from accel_callbacks.data.loader import DataLoaderShard, SkipDataLoader, skip_first_batches
from accel_callbacks.data.prepare import Loaders
from accel_callbacks.distributed.abort import group_is_aborted
from accel_callbacks.distributed.failures import leave
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.distributed.process_control import ProcessControl
from accel_callbacks.distributed.topology import (
    destroy_topology,
    note_copies,
    resolve_topology,
)
from accel_callbacks.distributed.votes import Trigger
from accel_callbacks.engine_options import create_precision, find_device, resolve_engine
from accel_callbacks.errors import unknown_option
from accel_callbacks.loop.accumulation import Accumulate
from accel_callbacks.loop.first_steps import FirstSteps
from accel_callbacks.loop.gradient_window import GradientWindow
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.passes import Passes
from accel_callbacks.loop.prepare import ModelRequest, Preparer, is_scheduler
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.loop.run_identity import RunIdentity, config_fields
from accel_callbacks.loop.step import StepEngine
from accel_callbacks.models.compile import uncompile
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.options import PRECISIONS, resolve_config
from accel_callbacks.plugins.base import KwargsHandler, sort_handlers
from accel_callbacks.plugins.compile import DynamoBackend, TorchDynamoPlugin
from accel_callbacks.plugins.distributed_type import DistributedType
from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin, chosen_steps
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import TorchTensorParallelPlugin
from accel_callbacks.plugins.precision import AutocastKwargs
from accel_callbacks.plugins.process_group import group_options
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.tracking.media import Keywords, MediaLogging
from accel_callbacks.tracking.trackers import Tracking

if TYPE_CHECKING:
    from accel_callbacks.callbacks.observer import CreateObserver
    from accel_callbacks.checkpoint.checkpointer import Checkpointer
    from accel_callbacks.checkpoint.part import RestoreReport
    from accel_callbacks.checkpoint.selection import Only, Rename
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.engines.pipeline.strategy import PipelinedModel
    from accel_callbacks.loop.contexts import Evaluate
    from accel_callbacks.plugins import MegatronLMPlugin
    from accel_callbacks.plugins.deepspeed import DeepSpeedPlugin
    from accel_callbacks.plugins.deepspeed_config import FilledConfig
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel_callbacks.plugins.profiler import ProfileKwargs
    from accel_callbacks.state import AcceleratorState, GradientState

__all__ = ["Accelerator"]

T = TypeVar("T")


class Accelerator(ProcessControl, MediaLogging):
    """Run a plain training loop on any machine, with callbacks, trackers and checkpoints.

    All arguments are keyword-only. An option that is not given comes from ``accel launch``, else
    it has its default; ``accel.config.describe()`` shows where each came from.

    Args:
        mixed_precision: ``"no"`` (default), ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: micro-batches of one optimizer step, 1 by default.
        cpu: compute on the CPU even if an accelerator is available.
        debug: compare the operands of all ranks before each collective method, and raise with a
            table of the ranks that differ instead of hanging; off by default. ``ACCEL_DEBUG=1``
            covers the functions too.
        device_placement: move models, the states of optimizers, and batches to the device, on by
            default.
        log_with: names (``"jsonl"``, ``"tensorboard"``, ``"wandb"``) or instances of trackers.
        project_dir: folder of the run's logs and checkpoints.
        project_config: the same with more options; instead of ``project_dir``.
        journal: note each optimizer step of :meth:`run` in the folder ``journal`` of the project;
            on by default where a project folder is given.
        callbacks: objects with hooks, or a single one; called in this order as far as their
            ``before``, ``after`` and ``runs_last`` allow, which
            :func:`accel_callbacks.callbacks.configured` sets.
        gradient_accumulation_plugin: the same with more options; instead of
            ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: let prepared schedulers step only where the optimizer does,
            on by default. If False, each call of their ``step`` counts.
        scheduler_steps_per_process: let prepared schedulers take as many steps at a time as there
            are ranks, and none beyond the end of a schedule of a fixed length, as Accelerate's do,
            for schedules that were written for it; off by default.
        kwargs_handlers: options of components, at most one of each class:
            :class:`AutocastKwargs`, :class:`DistributedDataParallelKwargs`, ...
        parallelism_config: how the ranks are arranged; data parallelism over all by default.
        fsdp_plugin: shard models (FSDP2), with these options; so does ``dp_shard_size`` of the
            ``parallelism_config``.
        torch_tp_plugin: a ``parallelism_config`` with this ``tp_size`` alone, for scripts that were
            written for Accelerate.
        megatron_lm_plugin: options of Megatron-LM, in place of the two before: they arrange the
            ranks for engines of this library.
        deepspeed_plugin: train with DeepSpeed, with these options; a dict has one for each model,
            by the name with which ``state.select_deepspeed_plugin`` chooses it.
        deepspeed_plugins: the same.
        dynamo_backend: backend of torch.compile for prepared models; none by default.
        dynamo_plugin: the same with more options; instead of ``dynamo_backend``.
        dataloader_config: how prepared loaders shard their data across ranks.
        rng_types: random generators (``"torch"``, ``"cuda"``, ``"generator"``, ...) whose state
            rank 0 broadcasts at the start of each pass over a loader. None by default: the order
            of samples does not need it.
        timeout: how long a collective waits for the other ranks, and a rank may be silent; 30
            minutes if None, on NCCL too (torch's default for a group that also has gloo).
        strict_trackers: let an error of a tracker end the run; off by default.
        tracker_config: options of all trackers (``loggers.TrackerConfig``): policy for NaN,
            timeouts, limit of the buffer.

    Raises:
        ValueError: an option has an unknown value.
        TypeError: a callback has a method that is named like a hook but is none.
        RuntimeError: the launcher's environment variables are incomplete, there are more ranks
            than devices, or another device or backend is in use already.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
        >>> model, optimizer, data = accel.prepare(model, optimizer, data)
        >>> for batch in data:
        ...     accel.backward(model(batch).mean())
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> accel.current_run.global_step
        2
    """

    def __init__(
        self,
        *unnamed: Any,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        debug: bool | None = None,
        device_placement: bool = True,
        log_with: Any = None,
        project_dir: str | PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        journal: bool | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_steps_per_process: bool = False,
        kwargs_handlers: Iterable[KwargsHandler] | None = (),
        parallelism_config: ParallelismConfig | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        dynamo_backend: DynamoBackend | str | Callable[..., Any] | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Iterable[Any] | None = None,
        callbacks: Any = (),
        timeout: timedelta | None = None,
        strict_trackers: bool = False,
        tracker_config: Any = None,
        **unknown: Any,
    ) -> None:
        if unnamed:
            raise TypeError(_refusal_of_unnamed(unnamed[0], type(self)))
        if unknown:
            name = next(iter(unknown))
            parameters = inspect.signature(type(self)).parameters.values()
            known = [option.name for option in parameters if option.kind is option.KEYWORD_ONLY]
            raise TypeError(unknown_option(type(self).__name__, name, known, _instead(name)))
        # Check all options before joining the process group: an invalid one must not cost the
        # other ranks a timeout.
        self.project_configuration = chosen_project(project_dir, project_config)
        config = resolve_config(
            {
                "mixed_precision": mixed_precision,
                "gradient_accumulation_steps": chosen_steps(
                    gradient_accumulation_steps, gradient_accumulation_plugin
                ),
                "cpu": cpu,
                "debug": debug,
                "journal": journal,
                "on_conflict": self.project_configuration.on_conflict,
            },
            os.environ,
        )
        observers, project = create_observers(_add_ons(), self.project_configuration, config)
        rehearses = project is not self.project_configuration
        self.project_configuration = project
        project.on_conflict = config.on_conflict
        self.device_placement = device_placement
        loader_config = checked_config(dataloader_config)
        self.rng_types = checked_rng_types(rng_types)
        dispatch = Dispatcher(_several(callbacks), adapters=(adapt,))
        options = resolve_engine(
            config,
            sort_handlers(kwargs_handlers),
            parallelism_config=parallelism_config,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
        )
        self.config, self.handlers = options.config, options.handlers
        self.dynamo_plugin = options.dynamo
        self.topology = resolve_topology(
            cpu=self.config.cpu,
            anew=True,
            find_device=find_device,
            **group_options(self.handlers, timeout),
        )
        self.strategy = options.create_strategy(self.topology)
        options.warn_of_unread(os.environ, self.strategy)
        note_copies(self.strategy.data.copies)
        _ = self.strategy.data.mesh  # built now: scripts may read it on one rank only
        self.precision = create_precision(
            self.config.mixed_precision,
            self.topology.device,
            self.handlers,
            engine=self.strategy.owns_step,
        )
        self.window = GradientWindow(
            self.config.gradient_accumulation_steps,
            gradient_accumulation_plugin,
            averaged_over=self.strategy.data.averaged_over,
            loss_world=self.strategy.data.losses,
        )
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[DataLoaderShard] = []
        owns_folders = self.is_main_process and not rehearses
        leases = FolderLeases(self.config.on_conflict, is_main_process=owns_folders)
        self.loop = Loop(
            TrainingRun(self),
            dispatch,
            self.window,
            self.models,
            self.optimizers,
            self.loaders,
            self.schedulers,
            leases,
        )
        if collectives.has_peers():
            # Imported here, because one process has nothing to compare.
            from accel_callbacks.loop.pass_ends import PassEnds

            loop, gradients = self.loop, self.strategy.gradients
            loop.pass_ends = PassEnds(
                loop.progress, lambda: gradients.trains_together and loop.in_lockstep
            )
        self.loop.observers = observers
        self.first_steps = FirstSteps(self.loop, self.strategy, self.precision)
        self.passes = Passes(self.loop, self.first_steps, lambda: self.training_state)
        self.tracking = Tracking(
            _several(None if rehearses else log_with),
            self.project_configuration.log_folder,
            leases,
            is_main_process=self.is_main_process,
            strict=strict_trackers,
            config=tracker_config,
            window=self.window,
            local_metrics=self.loop.local_metrics,
        )
        self._step = StepEngine(
            self.strategy.gradients,
            self.precision,
            self.loop,
            self.optimizers,
            self.first_steps,
        )
        self._preparer = Preparer(
            self.strategy,
            self.precision,
            self.dynamo_plugin,
            self.loop,
            self.models,
            self.optimizers,
            self.schedulers,
            self.first_steps,
            scheduler_options={
                "step_with_optimizer": step_scheduler_with_optimizer,
                "steps_at_once": self.strategy.data.world if scheduler_steps_per_process else 1,
                "holds_at_end": scheduler_steps_per_process,
            },
        )
        self._loaders = Loaders(
            loader_config,
            self.rng_types,
            self.strategy.feed,
            ranks=self.strategy.data,
            events=self.passes,
            prepared=self.loaders,
        )
        for observer in observers:
            observer.attach(self)

    def __getattr__(self, name: str) -> Any:
        if not (instead := foreign_name("ATTRIBUTES", name)):
            return object.__getattribute__(self, name)  # raises, also what a property raised
        owner = type(self).__name__
        raise AttributeError(f"{owner!r} object has no attribute {name!r}. {instead}")

    # --- what it is made of -------------------------------------------------------------------

    @cached_property
    def training_state(self) -> TrainingState:
        """The parts whose states make up a checkpoint."""
        # Imported here, because a loop that saves nothing has no use for it.
        from accel_callbacks.checkpoint.parts import register_parts
        from accel_callbacks.checkpoint.training_state import TrainingState

        training = TrainingState(
            self.strategy,
            self.precision,
            self.loop,
            self.tracking,
            self.project_configuration,
            self.models,
            self.optimizers,
            self.schedulers,
            self.loaders,
        )
        register_parts(training)
        return training

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.topology.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.strategy.distributed_type

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How the ranks are arranged, None if nothing was said about it."""
        return self.strategy.data.parallelism

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """How DeepSpeed trains models; of several plugins the selected one; None without it."""
        from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins

        plugins = self.strategy.plugin(DeepSpeedPlugins)
        return None if plugins is None else plugins.active

    def deepspeed_config(self, model: torch.nn.Module) -> FilledConfig:
        """Return what DeepSpeed was given for a prepared model, with the origin of each value.

        ``print(accel.deepspeed_config(model).describe())`` shows a line for each.

        Raises:
            ValueError: DeepSpeed does not train the model.
        """
        from accel_callbacks.plugins.deepspeed import DeepSpeedPlugins

        plugins, inner = self.strategy.plugin(DeepSpeedPlugins), self.strategy.unwrap(model)
        filled = None if plugins is None else plugins.filled.get(inner)
        if filled is None:
            raise ValueError(
                f"DeepSpeed does not train {type(inner).__name__}: pass deepspeed_plugin= to the "
                "Accelerator, and the model with its optimizer to prepare()."
            )
        return filled

    @property
    def torch_device_mesh(self) -> Any:
        """The named mesh of the ranks (a ``DeviceMesh``), None without one."""
        return self.strategy.data.mesh

    @property
    def data_world(self) -> int:
        """Number of ranks that read different data."""
        return self.strategy.data.world

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica of the model; 0 if there is one replica.

        Raises:
            RuntimeError: there is no ``parallelism_config``; likewise for the ranks below.

        Example:
            >>> from accel_callbacks import Accelerator, ParallelismConfig
            >>> accel = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
            >>> accel.data_parallel_rank, accel.data_parallel_shard_rank
            (0, 0)
        """
        return self._index_along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard in its replica; 0 if nothing is sharded."""
        return self._index_along("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank along the axis of tensor parallelism; 0 without it."""
        return self._index_along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank along the axis of context parallelism; 0 without it."""
        return self._index_along("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this rank along the axis of a pipeline; 0 without it."""
        return self._index_along("pp")

    def _index_along(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise RuntimeError(
                f"this Accelerator has no mesh, and so no rank along {axis!r}: pass "
                "parallelism_config=ParallelismConfig(...), or use process_index."
            )
        return self.parallelism_config.coordinate(self.process_index)[axis]

    @property
    def should_save_model(self) -> bool:
        """True on ranks that take part in saving a model; with a mesh, on all."""
        return self.parallelism_config is not None or self.is_local_main_process

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if models are sharded over a mesh; the same as :attr:`is_fsdp2`."""
        return self.is_fsdp2

    @property
    def multi_device(self) -> bool:
        """True with several ranks that replicate a model on devices other than the CPU."""
        return self.distributed_type is DistributedType.MULTI_GPU

    @property
    def debug(self) -> bool:
        """True if ranks compare their operands before each collective method."""
        return self.config.debug

    @property
    def state(self) -> AcceleratorState:
        """The topology as this rank sees it, with the options of this Accelerator."""
        from accel_callbacks.state import AcceleratorState

        return AcceleratorState.of(self.config, self.strategy)

    @property
    def gradient_state(self) -> GradientState:
        """A live view of the gradient window and of the loader being iterated."""
        from accel_callbacks.state import GradientState

        return GradientState(self.window, self.loop)

    @property
    def current_run(self) -> TrainingRun:
        """The run that hooks are called with; never ``None``."""
        return self.loop.run

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return self.training_state.bare_models

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16, ``None`` with another precision."""
        return self.precision.scaler

    @property
    def project_dir(self) -> str:
        """The folder of the run's logs and checkpoints."""
        return self.project_configuration.root

    @property
    def logging_dir(self) -> str:
        """The folder of the trackers' files."""
        return self.project_configuration.log_folder

    # --- prepare ------------------------------------------------------------------------------

    def prepare(
        self,
        *args: Any,
        device_placement: bool | Sequence[bool | None] | None = None,
        forward_methods: Sequence[str] = (),
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers, and return them in the order given.

        Models are moved to the device and wrapped for the strategy and the precision; loaders
        deliver the shard of this rank to the device; optimizers and schedulers follow the gradient
        window. Other objects, and those already prepared, are returned as they are.

        Args:
            *args: models, optimizers, loaders, schedulers, in any order. A scheduler's optimizer
                is prepared before it or with it.
            device_placement: overrides the Accelerator's for this call; a list has an entry for
                each object.
            forward_methods: methods of the models that are called besides the model itself, such
                as ``"encode"`` or ``"training_step"``; none by default. They run in the precision,
                and gradients are averaged after them, as with the forward. Each model takes those
                that it has.

        Returns:
            The prepared objects, as a tuple if there are several.

        Raises:
            ValueError: a loader cannot be sharded, a scheduler's optimizer is not prepared, ranks
                have different callbacks that vote or save, ``device_placement`` does not have one
                entry for each object, or no model has one of the ``forward_methods``.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> class Model(torch.nn.Linear):
            ...     def loss(self, x):
            ...         return self(x).mean()
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(Model(1, 1), forward_methods=["loss"])
            >>> accel.backward(model.loss(torch.ones(2, 1)))
            >>> model.bias.grad
            tensor([1.])
        """
        self.loop.share_identity(self.loop.run)
        self.strategy.data.share_random_state()
        places = device_placement
        if places is None or isinstance(places, bool):
            places = [places] * len(args)
        if len(places) != len(args):
            raise ValueError(f"device_placement has {len(places)} entries for {len(args)} objects.")
        placed = list(zip(args, places, strict=True))
        models = [model for model in args if isinstance(model, torch.nn.Module)]
        parallelism = self.strategy.data.parallelism
        stages = {
            id(model): self.prepare_pipeline(model)
            for model in models
            if parallelism is not None and parallelism.pp_enabled
        }
        ready = self._preparer.prepare(
            [
                ModelRequest(argument, self._placement(place))
                for argument, place in placed
                if isinstance(argument, torch.nn.Module) and id(argument) not in stages
            ],
            [optimizer for optimizer in args if isinstance(optimizer, torch.optim.Optimizer)],
            [scheduler for scheduler in args if _is_scheduler(scheduler)],
            _several(forward_methods),
            left_in_place={
                id(argument) for argument, place in placed if not self._placement(place)
            },
        )
        ready.update(stages)
        for argument, place in placed:
            if isinstance(argument, (DataLoader, SkipDataLoader)):
                ready[id(argument)] = self.prepare_data_loader(argument, place)
        result = tuple(ready.get(id(argument), argument) for argument in args)
        return result[0] if len(result) == 1 else result

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        forward_methods: Sequence[str] = (),
    ) -> torch.nn.Module:
        """Prepare one model, as ``prepare`` does with each.

        Args:
            model: the model.
            device_placement: move it to the device; the Accelerator's setting if ``None``.
            evaluation_mode: the model is not trained, so there are no gradients to average.
            forward_methods: as of :meth:`prepare`.

        Raises:
            ValueError: the model is sharded over devices or ranks, has no weights yet, or lacks
                one of the ``forward_methods``.
        """
        self.strategy.data.share_random_state()
        request = ModelRequest(model, self._placement(device_placement), evaluation_mode)
        ready = self._preparer.prepare([request], forward_methods=_several(forward_methods))
        prepared: torch.nn.Module = ready[id(model)]
        return prepared

    def prepare_pipeline(
        self,
        model: torch.nn.Module,
        split_points: Sequence[str] | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        schedule: str = "1F1B",
        microbatches: int | None = None,
        reduction: str = "mean",
    ) -> PipelinedModel:
        """Cut a model into stages over the ranks of ``pp_size``; collective, on all ranks.

        ``loss = model(*inputs, target=target)`` runs forward and backward of a batch in
        micro-batches, as the schedule says, and ``accel.backward(loss)`` hands the gradients out:
        scaled as the window and what is computed from the loss ask for. So the loop stays as it
        is. The loss and the outputs are the same on all ranks, all of which get the same batches.
        Under ``no_grad`` the call without a target returns the outputs.

        Optimizers are made of ``model.parameters()``, before or after, on all ranks: those of
        other ranks are on the meta device, and get no gradient.

        Args:
            model: a model with weights; those of rank 0 count.
            split_points: names of modules in their order, such as ``"layers.4"``. Each begins a
                stage. What calls them must not depend on the values of what they return. By
                default the blocks of the model are cut where stages have as many parameters.
            loss_fn: called with the outputs and the target of a micro-batch on the last rank.
                Without it a model is trained by the ``loss`` of its outputs, such as those of
                transformers with ``labels=``; in training the other outputs are ``None``.
            schedule: of torch: ``"GPipe"``, ``"1F1B"`` (default), or with several stages on each
                rank ``"Interleaved1F1B"`` or ``"LoopedBFS"``.
            microbatches: at most so many equal parts of a batch, twice the ranks by default. A
                batch that they do not divide is cut into fewer.
            reduction: ``"mean"`` if ``loss_fn`` returns the mean over its rows, ``"sum"`` for
                their sum, as for ``backward(normalizer=)``.

        Raises:
            ValueError: there is no ``pp_size``, the model cannot be cut there, or the loss would
                have to be scaled inside of the schedule (fp16).

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
            >>> Accelerator(cpu=True).prepare_pipeline(model, ["1"], torch.nn.functional.mse_loss)
            Traceback (most recent call last):
            ValueError: prepare_pipeline needs several ranks to put the stages on: pass ...
        """
        if self.precision.name in ("fp16", "fp8"):
            raise ValueError(
                f"mixed_precision={self.precision.name!r} does not go with a pipeline, which runs "
                'backward before the loss can be scaled: use "bf16".'
            )
        self.loop.share_identity(self.loop.run)
        self.strategy.data.share_random_state()
        whole = self.strategy.cut(
            model,
            split_points=split_points,
            loss_fn=loss_fn,
            schedule=schedule,
            microbatches=microbatches,
            reduction=reduction,
        )
        ready = self._preparer.prepare([ModelRequest(whole, False)])
        prepared: PipelinedModel = ready[id(whole)]
        return prepared

    def init_module(self) -> AbstractContextManager[None]:
        """Return a context to build models in.

        Under a strategy that shards, their parameters get no memory before :meth:`prepare`, and
        values after it: from ``load_checkpoint_in_model``, :meth:`load_state` or
        ``initialize_weights``. Else models are built as without it, and these calls work too.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator, initialize_weights
            >>> accel = Accelerator(cpu=True)
            >>> with accel.init_module():
            ...     model = torch.nn.Linear(2, 2)
            >>> model = accel.prepare(model)
            >>> initialize_weights(model)  # on one device it has been
            []
        """
        return self.strategy.init_context()

    def cpu_ram_efficient_loading(self) -> AbstractContextManager[None]:
        """Return a context for ``from_pretrained`` of transformers, on all ranks.

        Under a strategy that shards, only rank 0 loads weights, into host memory, and
        :meth:`prepare` sends the others their parts, block by block. Else nothing changes. To read
        safetensors files on all ranks, each its part, build the model in :meth:`init_module`
        instead, and call ``load_checkpoint_in_model`` after :meth:`prepare`.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> with Accelerator(cpu=True).cpu_ram_efficient_loading():
            ...     pass  # model = AutoModelForCausalLM.from_pretrained(name)
        """
        return self.strategy.init_context(pretrained=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; see :meth:`prepare`.

        Args:
            optimizer: the optimizer.
            device_placement: move its state to where the parameters are; the Accelerator's setting
                if ``None``.
        """
        ready = self._preparer.prepare(
            optimizers=[optimizer],
            left_in_place=() if self._placement(device_placement) else {id(optimizer)},
        )
        prepared: AcceleratedOptimizer = ready[id(optimizer)]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler; see :meth:`prepare`."""
        prepared: AcceleratedScheduler = self._preparer.prepare(schedulers=[scheduler])[
            id(scheduler)
        ]
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any] | SkipDataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader, collectively; see :meth:`prepare`.

        Args:
            data_loader: any torch loader. One that another Accelerator has prepared is prepared
                again from the original loader.
            device_placement: overrides the Accelerator's for this loader.
            slice_fn_for_dispatch: returns one rank's part of a batch, where batches are dispatched.

        Returns:
            A :class:`accel_callbacks.DataLoaderShard`; a view of one if given what
            ``skip_first_batches`` returned.

        Raises:
            ValueError: the loader is sharded already, or cannot be sharded with these options.
        """
        place = self._placement(device_placement)
        return self._loaders.prepare(data_loader, place, slice_fn_for_dispatch)

    def _placement(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def skip_first_batches(
        self, dataloader: DataLoader[Any] | SkipDataLoader, num_batches: int = 0
    ) -> SkipDataLoader:
        """Return a view of a loader that skips the first batches of an epoch.

        See :func:`accel_callbacks.skip_first_batches`.
        """
        return skip_first_batches(dataloader, num_batches)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The options by which prepared loaders shard their data across ranks."""
        return self._loaders.config

    @property
    def split_batches(self) -> bool:
        """True if the batch size of a loader is the total over all ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all ranks; ``None`` means no."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if the last batch is padded with repeated samples; settable, for the next passes.

        Raises:
            ValueError: set to ``False`` while a prepared loader needs it.
        """
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loaders.set_even_batches(even)

    @property
    def use_seedable_sampler(self) -> bool:
        """True if shuffled orders are those of ``SeedableRandomSampler``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """True if copies from pinned memory to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if a stream with a ``state_dict`` is resumed through it."""
        return self.dataloader_config.use_stateful_dataloader

    # --- the step -----------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """True where gradients are synchronized and the optimizer really steps."""
        return self.window.sync

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.window.sync = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full gradient window; may be set between windows."""
        return self.window.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.window.resize(value)
        self.loop.position.progress.clear()  # windows of one micro-batch do not ask it

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if a prepared optimizer skipped its last step because of an fp16 overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> Accumulate:
        """Return the context manager of one micro-batch, around the body of the loop.

        Inside, the prepared optimizer, scheduler and clipping act only at the end of a gradient
        window, the loss is divided by the real number of micro-batches (in the tail of an epoch
        too), and gradients are not synchronized until then. A block inside of another one is a
        part of its micro-batch, as if its models were those of the outer one too.

        Args:
            *models: the prepared models that are trained in the block; all of them if omitted.
        """
        return Accumulate(self.loop, self.strategy, models)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which the ranks along ``cp`` share the sequences of a batch.

        Each rank has a part of the tokens, and attention sees those of all. Forward and backward
        belong into the context. Without context parallelism it does nothing, and says so once.

        Losses are then of each rank's tokens: give their sum to ``backward``, with their number as
        ``normalizer``, where ranks may have different numbers of them. Positions must be among the
        buffers, because a rank has a piece of the start of each sequence and one of its end.

        Args:
            buffers: the tensors that have a dimension of tokens, such as inputs, labels and
                positions. Inside they have this rank's tokens.
            buffer_seq_dims: this dimension in each of them.
            no_restore_buffers: those among them that keep this rank's tokens afterwards.

        Raises:
            ValueError: a length that ranks cannot share, or buffers of several lengths; inside: an
                attention mask, dropout of attention, or a call of a transformers model that would
                be wrong.
            RuntimeError: a ``backward`` after it of a loss from inside, or a context in another.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel, tokens = Accelerator(cpu=True), torch.arange(8).view(1, 8)
            >>> with accel.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...     tokens.shape
            torch.Size([1, 8])
        """
        return self.strategy.sequences.cut(buffers, buffer_seq_dims, no_restore_buffers)

    def gather_sequences(self, tensor: torch.Tensor, seq_dim: int = 1) -> torch.Tensor:
        """Collective: return the outputs of :meth:`maybe_context_parallel` for whole sequences.

        Args:
            tensor: outputs for this rank's tokens, such as predictions.
            seq_dim: the dimension of tokens.

        Returns:
            The outputs for all tokens in their order, without gradients, for
            :meth:`gather_for_metrics`; without context parallelism the tensor as it is.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).gather_sequences(torch.ones(1, 4)).shape
            torch.Size([1, 4])
        """
        return self.strategy.sequences.gather(tensor, seq_dim)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context that computes in the chosen precision, outside of prepared models.

        Args:
            autocast_handler: overrides the Accelerator's options. ``AutocastKwargs(enabled=False)``
                means full precision, also inside of another block.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, mixed_precision="bf16")
            >>> with accel.autocast():
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        if not isinstance(autocast_handler, AutocastKwargs | None):
            raise TypeError(f"autocast_handler={autocast_handler!r} must be an AutocastKwargs.")
        return self.precision.autocast(autocast_handler)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        normalizer: float | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the backward pass of a loss, averaged over the gradient window, scaled for fp16.

        Outside of ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, for
        loops that count micro-batches themselves.

        With ``normalizer``, the loss is a sum over that many units (tokens, for example), and the
        step uses the gradients of the mean over all units of the window on all ranks, however
        they are distributed. Gradients have that size from clipping on, or from the step.

        Args:
            loss: scalar tensor (or any tensor, with ``gradient=`` as in ``Tensor.backward``).
            normalizer: number of units that ``loss`` was summed over, or a tensor with that one
                element. Either all ranks pass it, or none.
            **kwargs: passed to ``Tensor.backward``.

        Raises:
            ValueError: a second loss with a normalizer in one micro-batch, or losses with and
                without one in a window.
            ResumeError: the last ``load_state`` failed midway.
        """
        self._step.backward(loss, normalizer, kwargs)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronize the gradients of ``model``.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.no_sync(model):
            ...     accel.backward(model(torch.ones(1, 1)).sum())
        """
        return self.strategy.gradients.no_sync(model)

    def loss_parallel(self) -> AbstractContextManager[Any]:
        """Return a context for the loss of logits whose vocabulary is cut, and its backward.

        For a head with the style ``"colwise_loss_parallel"`` in the plan of tensor parallelism: no
        rank holds the logits of all words. The loss is ``cross_entropy``, a DTensor, of which
        ``loss.full_tensor()`` is a plain one. Without tensor parallelism it does nothing.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(2, 3))
            >>> with accel.loss_parallel():
            ...     logits = model(torch.ones(1, 2))
            ...     accel.backward(torch.nn.functional.cross_entropy(logits, torch.tensor([1])))
        """
        parallelism = self.strategy.data.parallelism
        if parallelism is None or not parallelism.tp_enabled:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def propose_tp_plan(
        self, model: torch.nn.Module, *, sequence_parallel: bool = False
    ) -> dict[str, str]:
        """Return a plan of tensor parallelism, by the usual names of layers in attention and MLPs.

        To be read before it is passed as ``TorchTensorParallelConfig(plan=...)``: what is not
        recognized is left whole.

        Args:
            model: the model, which is not changed.
            sequence_parallel: cut the sequence between the blocks too, in norms and dropout.

        Raises:
            ValueError: nothing is recognized, a layer packs several (such as ``c_attn``), or the
                sequence cannot be cut by names alone.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> mlp = torch.nn.ModuleDict(
            ...     {"up_proj": torch.nn.Linear(2, 8), "down_proj": torch.nn.Linear(8, 2)}
            ... )
            >>> Accelerator(cpu=True).propose_tp_plan(mlp)
            {'up_proj': 'colwise', 'down_proj': 'rowwise'}
        """
        from accel_callbacks.engines.tensor.plan import propose_plan

        return propose_plan(self.strategy.unwrap(model), sequence_parallel=sequence_parallel)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward synchronizes although its forwards ran in ``no_sync``.

        For several forward passes of one model and a single backward through all of them.

        Args:
            model: a prepared model.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.no_sync(model):
            ...     loss = model(torch.ones(1, 1)).sum() + model(torch.zeros(1, 1)).sum()
            >>> with accel.trigger_sync_in_backward(model):
            ...     accel.backward(loss)
        """
        return self.strategy.gradients.trigger_sync(model)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scale and apply the window's normalizer to gradients, once a step.

        Args:
            optimizer: a prepared optimizer, or several in a list or tuple; all if ``None``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).unscale_gradients()
        """
        self._step.unscale_gradients(optimizer)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm, at the end of a gradient window.

        Returns:
            The total norm before clipping; ``None`` within a window, where nothing is clipped.
        """
        return self._step.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``, at the end of a window."""
        self._step.clip_grad_value_(parameters, clip_value)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which ranks may have unequal numbers of batches without hanging.

        For loaders that the script has sharded itself; prepared loaders have equally many batches
        on all ranks. A rank that has no more batches contributes zeros to the gradient averages of
        the others, so that each sample has the same weight. At the end all ranks have the weights,
        and the state of prepared optimizers and schedulers, of a rank that took all steps. If the
        numbers were unequal, gradients of a window that is still open are dropped. With one rank
        the block just runs.

        Inside, backward must be the only collective: no ``gather`` or ``save_state``, and no
        ``backward(normalizer=...)``.

        Args:
            joinables: the prepared models that are trained in the block.
            even_batches: overrides that of prepared loaders for passes in the block.

        Raises:
            TypeError: an element of ``joinables`` is not a prepared model.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.join_uneven_inputs([model]):
            ...     for batch in torch.utils.data.DataLoader(torch.ones(3, 1)):
            ...         accel.backward(model(batch).sum())
        """
        from accel_callbacks.loop.contexts import join_uneven_inputs

        return join_uneven_inputs(
            joinables,
            even_batches,
            strategy=self.strategy,
            loop=self.loop,
            loaders=self._loaders,
            followers=lambda: [
                *(optimizer.optimizer for optimizer in self.optimizers),
                *self.schedulers,
                self.precision,
            ],
        )

    # --- values of all ranks ------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Concatenate each tensor over all ranks; see :func:`accel_callbacks.gather`.

        A DTensor, such as a sharded parameter, gives the whole tensor. Ranks that share a model
        (``tp_size`` of a ``parallelism_config``) each add what they have of the same batch:
        :meth:`gather_for_metrics` counts it once.
        """
        return collectives.gather(tensor, debug=self.debug)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the samples that were repeated to pad the last batch.

        Call it inside of the loop over a prepared loader: that loader knows how many samples of
        its current batch are real. Outside of any loop it only gathers. Of nested loops the
        innermost counts; of loaders iterated together, as in ``zip``, the one whose batch has the
        size of the input.

        Args:
            input_data: a tensor or numpy array of shape ``(batch, ...)`` or a nested structure of
                them, with lists of samples between them; anything else is gathered as objects.
                Batch sizes may differ between ranks. Of ranks that share a model, and have read
                the same batch, the first one counts.
            use_gather_object: gather objects; lists and tuples become one list in rank order,
                anything else becomes a list with one entry per rank.

        Returns:
            The same structure over the samples of all ranks, each counted once. Tensors without
            an entry for each sample (a mean, for example) are only gathered.

            Lists of objects without tensors, of dicts or dataclasses with the same keys, and of
            tensors with an entry for each sample of the batch become the list of all samples. So
            do tuples of strings, and of such dicts for each sample. A list of tensors that each
            have a row for each entry is structure, as tuples are: ``[logits, labels]`` of a batch
            of two.

        Raises:
            ValueError: on all ranks; see :func:`accel_callbacks.gather`.
            TypeError: on all ranks: beside tensors there is a string or another object, not in a
                list.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> loader = accel.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> [accel.gather_for_metrics(batch).tolist() for batch in loader]
            [[0, 1], [2]]
        """
        structure = () if use_gather_object else input_data
        collectives.begin("gather_for_metrics", self.debug, lambda: rows_beside_lists(structure))
        gather = gather_counted_objects if use_gather_object else gather_counted
        return gather(input_data, self.loop.position.active, self.strategy.data.first_of_each)

    def reduce(
        self,
        tensor: T,
        reduction: str = "sum",
        scale: float = 1.0,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> T:
        """Reduce each tensor over all ranks; see :func:`accel_callbacks.reduce`.

        Ranks that share a model (``tp_size`` of a ``parallelism_config``) each count, though they
        have read the same batch: a mean is right, and a sum is that many times too large.
        """
        return collectives.reduce(tensor, reduction, scale, weight=weight, debug=self.debug)

    def pad_across_processes(
        self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> T:
        """Pad to the largest size of all ranks.

        See :func:`accel_callbacks.pad_across_processes`.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, debug=self.debug)

    def set_trigger(self) -> None:
        """Set a flag that :meth:`check_trigger` reads on all ranks, to stop early for example.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.set_trigger()
            >>> accel.check_trigger()
            True
        """
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Collective: return whether any rank called :meth:`set_trigger` since the last check."""
        return self._trigger.check()

    @cached_property
    def _trigger(self) -> Trigger:
        return Trigger()

    # --- checkpoints --------------------------------------------------------------------------

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """Saves and restores the training state; imported by a run that does."""
        from accel_callbacks.checkpoint.checkpointer import Checkpointer

        return Checkpointer(self.training_state)

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
        async_save: bool = False,
        when_busy: str = "wait",
        trainable_only: bool = False,
    ) -> str:
        """Save the whole training state; collective.

        Models, optimizers, schedulers, the loss scaler, the loaders' positions, the run's
        position, callbacks, trackers, registered objects and the random generators of each rank
        go into one checkpoint. It is complete and verified by its manifest, or it does not exist:
        saving over an older checkpoint leaves that one valid until the new one is committed.

        Args:
            output_dir: folder or fsspec URL. If ``None``,
                ``<project_dir>/checkpoints/step-<global step>``, or a number as
                :class:`ProjectConfiguration` says.
            safe_serialization: always on; accepted because Accelerate has it.
            metadata: JSON values for the manifest, such as metrics.
            storage_options: for the filesystem behind the URL.
            max_shard_size: largest tensor file, such as ``"5GB"``.
            async_save: return once the state is copied to host memory, and write it while training
                continues. ``on_checkpoint_saved`` fires when it is durable; an error is raised on
                all ranks at the end of a later optimizer step, or by :meth:`wait_for_save`.
            when_busy: if an earlier save is pending, ``"wait"`` for it, or ``"skip"`` this one.
            trainable_only: omit frozen parameters, but for those with a state of an optimizer,
                which were trained before. A load keeps the values that they have then, and warns
                if those are others. Of a PEFT model with one adapter, add the files of peft.

        Returns:
            The path of the checkpoint, which is durable unless ``async_save``; an empty string if
            the save was skipped.

        Raises:
            checkpoint_io.CheckpointError: any rank failed to write; nothing was committed. Or the
                pending save in the background has failed.
            ValueError: ``safe_serialization=False``, which means pickle; an unknown ``when_busy``;
                ``save_on_each_node`` of the project on several nodes.
            ResumeError: the last ``load_state`` failed midway.
            RuntimeError: a prepared optimizer trains what the checkpoint would not hold; or, in a
                run, an optimizer has stepped that was not prepared.
            RemoteError: a hook or a callback's ``state_dict`` failed on another rank; likewise.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state().endswith("checkpoints/step-00000000")
            True
        """
        return self.checkpointer.save_state(
            output_dir,
            safe_serialization,
            metadata=metadata,
            storage_options=storage_options,
            max_shard_size=max_shard_size,
            async_save=async_save,
            when_busy=when_busy,
            trainable_only=trainable_only,
        )

    def wait_for_save(self) -> None:
        """Wait until a pending asynchronous save is durable; collective.

        Raises:
            checkpoint_io.CheckpointError: the save failed; nothing was committed.
        """
        self.checkpointer.wait()

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        only: Only | None = None,
        rename: Rename | None = None,
        strict: bool = False,
        verify: str = "parts",
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Restore a state that :meth:`save_state` wrote into the prepared objects; collective.

        Weights and optimizer states are read straight into their present memory, each part of a
        file verified before any of its bytes is used; nothing changes before all names, shapes,
        dtypes and sizes are found to match. If reading fails midway, the next older checkpoint is
        loaded if ``input_dir`` is ``None``; else the error is raised, and ``backward``, ``step``
        and ``save_state`` refuse to run until a checkpoint was loaded. A prepared loader continues
        at the exact sample with its next ``for``.

        Args:
            input_dir: a checkpoint; if ``None`` the newest valid one of the project.
            load_kwargs: must be empty; accepted because Accelerate has it.
            only: a part of the checkpoint: sections (``"models"``, ``"optimizers"``,
                ``"schedulers"``, ``"loaders"``, ``"registered"``, ``"run"``, ...), keys
                (``"models/0"``, ``"registered/ema"``), glob patterns of keys
                (``"models/0/encoder.*"``), several of these, or a function of a key. The rest
                is left unchanged.
            rename: weights whose names have changed: prefixes of saved keys to those of now,
                ``{"models/0/backbone.": "models/0/encoder."}``, or a function of a saved key.
                Optimizer states follow.
            strict: raise if the resume cannot be exact: another number of ranks, a registered
                object without a saved state, other frozen weights than those that the save left
                out, with ``only`` a weight that is missing on either side. Otherwise these are
                warnings.
            verify: ``"full"`` reads and checks all bytes before anything changes, and then reads
                them again; ``"parts"`` checks each part as it is read.
            progress: a bar with bytes per second; ``None`` shows one for long loads on a terminal.
            storage_options: for the filesystem behind the URL.

        Returns:
            The path that was loaded; :attr:`load_report` lists the names that were not restored.

        Raises:
            FileNotFoundError: ``input_dir`` is ``None`` and the project has no valid checkpoint.
            ResumeError: the checkpoint does not fit; nothing was changed.
            TypeError: ``load_kwargs`` are given.
            ValueError: ``verify`` is unknown.
            checkpoint_io.CheckpointError: missing, unfinished or corrupt; nothing was changed
                unless it is a :class:`checkpoint_io.TornLoadError`.
            RemoteError: another rank could not read or restore it.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state() == accel.load_state()
            True
        """
        return self.checkpointer.load_state(
            input_dir,
            load_kwargs,
            only=only,
            rename=rename,
            strict=strict,
            verify=verify,
            progress=progress,
            storage_options=storage_options,
        )

    @property
    def load_report(self) -> RestoreReport | None:
        """The names that the last ``load_state`` did not restore, ``None`` before the first."""
        return self.training_state.load_report

    @property
    def save_iteration(self) -> int:
        """The lowest number that the next automatically named checkpoint can have."""
        return self.project_configuration.iteration

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save and restore objects with the training state.

        Each is saved under its name: the keyword, or that of its class (with a number from the
        second one on). If the class has been renamed since, objects without a keyword get their
        states by position, with a warning. A state for which no object is registered is kept for
        the next save. Register before ``load_state`` and ``run``.

        The state is that of all ranks: ``state_dict()`` is called on each, the one of rank 0 is
        written, and ``load_state_dict`` gets it on each.

        Args:
            *objects: have ``state_dict()`` and ``load_state_dict(state)``; the state is a dict of
                tensors, numpy arrays and plain values, arbitrarily nested.
            **named: the same, by name.

        Raises:
            ValueError: objects lack one of the two methods; all of them are listed. Or a name is
                taken.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
            >>> accel.register_for_checkpointing(ema=average)
            >>> path = accel.save_state()
            >>> _ = average.n_averaged.fill_(5)
            >>> _ = accel.load_state(path)
            >>> average.n_averaged
            tensor(0)
        """
        self.training_state.registered.add(*objects, **named)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in :meth:`save_state`, on all ranks.

        ``models`` are the prepared ones, ``weights`` their state dicts. An entry that the hook
        removes from either list is not saved here: the hook saves it in its own way, into
        ``output_dir`` (an existing folder, or a URL if it is not local). Edited ``weights`` are
        saved as edited; a load leaves tensors unchanged that the hook dropped. Files that the hook
        writes are neither verified nor touched. If a hook raises on any rank, nothing is committed
        and all ranks raise.

        Args:
            hook: called after earlier ones, with the models and weights that they left.

        Returns:
            A handle with ``remove()``, which is also a context manager.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> def as_text(models, weights, output_dir):
            ...     with open(os.path.join(output_dir, "model.txt"), "w") as file:
            ...         file.write(repr(weights.pop()))
            >>> with accel.register_save_state_pre_hook(as_text):
            ...     path = accel.save_state(tempfile.mkdtemp())
            >>> "model.txt" in os.listdir(path)
            True
        """
        return self.training_state.pre_hooks.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` in :meth:`load_state`, on all ranks.

        The hook loads models in its own way, and removes those from ``models``; the others are
        loaded from the checkpoint afterwards.

        Args:
            hook: called after earlier ones, with the models that they left.

        Returns:
            A handle with ``remove()``, which is also a context manager.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> handle = accel.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return self.training_state.pre_hooks.on_load(hook)

    # --- models -------------------------------------------------------------------------------

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        *,
        trainable_only: bool = False,
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the weights as ``model.safetensors``, or as shards with an index; collective.

        safetensors and transformers can read the result. Of a PEFT model only its adapters are
        written, as peft does: ``adapter_model.safetensors`` and ``adapter_config.json``, for each
        adapter not named "default" in a folder of its name. Rank 0 writes, or with
        ``save_on_each_node`` of the project one rank of each node, and the others wait. Sharded
        parameters are gathered one tensor at a time, on the rank that writes them.

        Args:
            model: prepared or not.
            save_directory: folder or fsspec URL.
            max_shard_size: largest file, such as ``"5GB"``.
            safe_serialization: always on; accepted because Accelerate has it.
            trainable_only: omit frozen parameters, but keep buffers.
            progress: a bar with bytes per second; ``None`` shows one for long saves on a terminal.
            storage_options: for the filesystem behind the URL.

        Raises:
            ValueError: ``safe_serialization=False``, which means pickle.
            ResumeError: the last ``load_state`` failed midway.
            RemoteError: the rank that writes failed.
        """
        self.checkpointer.save_model(
            model,
            save_directory,
            max_shard_size,
            safe_serialization,
            trainable_only=trainable_only,
            progress=progress,
            storage_options=storage_options,
        )

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write a flat dict of tensors as one safetensors file, on rank 0.

        With ``save_on_each_node`` of the project, on one rank of each node. The others do not
        wait, so it may be called on all ranks or on rank 0 only; with DTensors it gathers them,
        and all ranks must call it.

        Args:
            obj: names to tensors.
            f: path or fsspec URL of the file; it is replaced atomically.
            safe_serialization: always on; accepted because Accelerate has it.

        Raises:
            TypeError: ``obj`` is not such a dict, or ``f`` is an open file.
            ValueError: ``safe_serialization=False``, which means pickle.
        """
        self.checkpointer.save_tensors(obj, f, safe_serialization)

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the model as it was before ``prepare``.

        It is the model that is trained, not a copy: wrappers that are not kept are removed from
        it, and it is compiled in place. By default its forward still autocasts under mixed
        precision; to compare it with a plain model in full precision, pass
        ``keep_fp32_wrapper=False`` once training has ended.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep the autocast around its forward, and its fp8 layers.
            keep_torch_compile: keep the model and its blocks compiled.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
            >>> accel.unwrap_model(accel.prepare(layer)) is layer
            True
        """
        inner = self.strategy.unwrap(model)
        if not keep_torch_compile:
            uncompile(inner)
        return inner if keep_fp32_wrapper else self.precision.unwrap(inner)

    def full_parameters(
        self, module: torch.nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which each rank has the whole parameters of a sharded model.

        Collective. Parameters of models that are not sharded are whole anyway.

        Args:
            module: a prepared model or a part of it. It cannot be called inside of the block.
            writeback: keep what rank 0 has changed; off by default.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(2, 1))
            >>> with accel.full_parameters(model):
            ...     tuple(model.weight.shape)
            (1, 2)
        """
        return self.strategy.states.full_parameters(module, writeback=writeback)

    def get_state_dict(
        self, model: torch.nn.Module, unwrap: bool = True, *, all_ranks: bool = False
    ) -> dict[str, Any]:
        """Return the full state dict of a prepared model.

        That of a sharded model is gathered in host memory, one tensor after the other, so all ranks
        must call it. :meth:`save_model` writes the same weights without holding them all.

        Args:
            model: a prepared model.
            unwrap: use the names of the unwrapped model; else those of the wrapper, if any.
            all_ranks: return the gathered state on all ranks; by default it is on rank 0, and the
                other ranks get an empty dict.

        Raises:
            RuntimeError: the model is sharded, and a rank did not call it within the timeout.
            DistributedOperationException: likewise in debug mode, if it makes another call instead.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> sorted(accel.get_state_dict(accel.prepare(torch.nn.Linear(1, 1))))
            ['bias', 'weight']
        """
        return self.strategy.states.model_state_dict(
            model, unwrap=unwrap, all_ranks=all_ranks, debug=self.debug
        )

    # --- runs ---------------------------------------------------------------------------------

    def run(
        self,
        name: str = "run",
        config: Any = None,
        *,
        resume: bool | str = True,
        may_change: Iterable[str] = (),
    ) -> AbstractContextManager[TrainingRun]:
        """Return the context manager of a run, around the whole loop.

        Entering it fires ``setup``, restores the newest valid checkpoint of a ``Checkpoint``
        callback, starts the trackers, and fires ``on_fit_start``. Leaving it fires the end hooks
        (or ``on_exception``), and closes the trackers with the right status. Enter it after
        ``prepare``. All ranks leave it together.

        An error on one rank ends the run on all: it is raised there, and the others raise
        :class:`RemoteError` with its traceback. After that, create a new Accelerator on all ranks
        to continue, as a sweep does, or let the script end.

        Args:
            name: of the run (or project), for trackers and messages.
            config: hyperparameters, passed to the trackers: a dict, a dataclass or a namespace.
            resume: ``True`` to resume if a ``Checkpoint`` callback finds a checkpoint of a run
                with this name and config, ``"anyway"`` from one of another run too, ``False`` to
                start from scratch, or the path of a checkpoint, of whatever run.
            may_change: settings of ``config`` that may differ from those of the checkpoint:
                dotted keys such as ``"data.num_workers"``, or glob patterns. The number of epochs
                or steps under its usual names, and flags like ``resume``, always may.

        Raises:
            ResumeError: the newest checkpoint is of a run with another name or config; or it does
                not fit what was prepared, or holds no model. Nothing was loaded.
            RuntimeError: a ``Checkpoint`` callback saves, and would not save all that a prepared
                optimizer trains: pass the model to :meth:`prepare` too.
            TypeError: ``config`` is none of these.
            SystemExit: at the exit, after a preemption for which a callback has set
                ``run.exit_code``; everything is closed by then.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> with Accelerator(cpu=True).run("demo", config={"lr": 0.1}) as run:
            ...     run.name
            'demo'
        """

        # Taken now, because the script may change its config while it trains.
        identity = RunIdentity.of(name, config, may_change)

        def new_run() -> TrainingRun:
            run = TrainingRun(self, name)
            run.config, run.identity = config_fields(config), identity
            return run

        from accel_callbacks.loop.contexts import RunContext

        path = first_answer(self.loop.observers, "resume_path")
        if path is not None:
            resume = path or False
        return RunContext(new_run, self.training_state, resume)

    def evaluate(
        self,
        *models: torch.nn.Module,
        stage: str = "validation",
        checkpoint: str | PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Evaluate:
        """Return the context manager of an evaluation loop, inside of training or not.

        Inside, models are in eval mode and gradients are disabled; at the exit every module
        returns to its previous mode. Loaders iterated inside count as validation, or as test.

        With ``checkpoint`` the models hold its weights inside, or its averages where a callback
        such as ``EMA`` evaluates with the average; the run stays where it is, and at the exit,
        also by an error, parameters and buffers are put back bitwise. Entering it is collective.
        It takes the memory of one more copy of the models. Inside, ``save_model`` writes the
        weights of the checkpoint; ``step``, ``save_state`` and ``load_state`` are refused.

        Args:
            *models: prepared models; all of them if omitted.
            stage: ``"validation"`` (default) or ``"test"``; selects the hooks that fire.
            checkpoint: the path of a checkpoint, or ``"best"`` or ``"last"`` of the ``Checkpoint``
                callbacks: the best of the first one that has a monitor, the newest of all. Before
                anything was trained or loaded, those of the newest run in their folder. The
                current weights if ``None``.
            storage_options: for the filesystem behind the path.

        Raises:
            ValueError: an unknown stage; ``"best"`` or ``"last"``, and no callback that saves it;
                a model is not prepared, and ``checkpoint`` is given.
            FileNotFoundError: ``"best"`` or ``"last"``, and none is saved yet.
            ResumeError: the checkpoint does not fit the models; nothing was changed.
            RuntimeError: ``step``, ``save_state`` or ``load_state`` inside, with ``checkpoint``.
            checkpoint_io.CheckpointError: the checkpoint is missing, unfinished or corrupt.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.evaluate(model):
            ...     model(torch.ones(1, 1)).requires_grad
            False
            >>> path = accel.save_state("memory://doc-evaluate/c")
            >>> _ = torch.nn.init.constant_(model.bias, 7.0)
            >>> with accel.evaluate(model, checkpoint=path):
            ...     model.bias.item() == 7.0
            False
            >>> model.bias.item()
            7.0
        """
        from accel_callbacks.loop.contexts import Evaluate

        return Evaluate(
            self.passes,
            models or tuple(self.models),
            stage,
            self.training_state,
            checkpoint,
            storage_options,
        )

    def end_training(self) -> None:
        """End a loop that does not use :meth:`run`: close trackers and process group; collective.

        The process group is destroyed only if this library created it.

        Raises:
            SystemExit: the loop was preempted, and a callback has set ``run.exit_code``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).end_training()
        """
        error = sys.exc_info()[1]  # in a `finally`, the error that ends the script
        if self.use_distributed and not collectives.has_peers():
            destroy_topology()  # the script has destroyed the group before: each rank ends alone
        self.loop.end_fit(error)
        self.loop.saves.free_memory()
        run = self.loop.run
        broken = "failed" if isinstance(error, Exception) else "interrupted"
        self.tracking.close(run._end_status if error is None else broken)
        self.loop.leases.release()
        # After an error that ended the run, the other ranks still read which one: the store stays.
        if group_is_aborted():
            return
        # After an error of this rank alone, the other ranks may be gone: do not wait for them.
        if error is None:
            collectives.begin("end_training", self.debug)
            leave("end_training")
            if self.loop.local_metrics is not None:
                self.loop.local_metrics.compare()
        destroy_topology()
        if error is None:
            run._leave()

    # --- callbacks ----------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks, in the order in which they were given."""
        return self.loop.dispatch.callbacks

    def add_callback(
        self, callback: Any, *, before: Any = (), after: Any = (), on_error: str | None = None
    ) -> CallbackHandle:
        """Register a callback, at any time.

        During a run, its ``setup`` is called at once, and it gets the state that a resumed
        checkpoint has for it; its other hooks fire as the loop continues. One that votes, saves or
        is collective must be added on all ranks, at the same place.

        Args:
            callback: an object with hooks.
            before: callbacks, classes or state keys that it is called before.
            after: those that it is called after.
            on_error: ``"raise"``, ``"warn"`` or ``"disable"``; the callback's own if ``None``.

        Raises:
            TypeError: a method is named like a hook but is none.
            ValueError: the ``state_key`` is taken, or ``before`` and ``after`` cannot be satisfied.

        Example:
            >>> from accel_callbacks import Accelerator, Callback
            >>> class Hello(Callback):
            ...     def on_log(self, run, model, metrics, step):
            ...         print("hello", metrics)
            >>> accel = Accelerator(cpu=True)
            >>> with accel.add_callback(Hello()):
            ...     accel.log({"loss": 1.0})
            hello {'loss': 1.0}
            >>> accel.log({"loss": 2.0})
        """
        wanted = configured(callback, before=before, after=after, on_error=on_error)
        entry = self.loop.add_callback(wanted)
        return CallbackHandle(entry.callback, self.loop.discard_callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback; it is not called again. During a run, its ``teardown`` is called.

        Args:
            callback: the registered object.

        Raises:
            ValueError: the callback is not registered.

        Example:
            >>> from accel_callbacks import Accelerator, Callback
            >>> callback = Callback()
            >>> accel = Accelerator(cpu=True, callbacks=[callback])
            >>> accel.remove_callback(callback)
            >>> accel.callbacks
            []
        """
        self.loop.remove_callback(callback)

    def on(
        self,
        hook: str,
        *,
        every: int = 1,
        once: bool = False,
        after: int = 0,
        main_process_only: bool = False,
        on_error: str = "raise",
        can_vote: bool = False,
    ) -> Callable[[Callable[..., Any]], FunctionHandle]:
        """Return a decorator that calls a function in a hook, with the arguments that it names.

        A function can name the arguments of the hook, and ``step`` (optimizer steps so far),
        ``epoch`` and ``accelerator``; in hooks with ``outputs``, ``loss`` too. Calls of the hook
        are counted from 1; a resumed run continues the count.

        Args:
            hook: name of the hook, with or without its ``on_``.
            every: call the function on each call of the hook whose number is a multiple of this.
            once: call it on the first of these, then remove it.
            after: number of calls of the hook to skip at the start.
            main_process_only: call it on rank 0 only.
            on_error: ``"raise"`` (default), ``"warn"`` or ``"disable"``.
            can_vote: the function may stop the run (or call ``save_now``, ``preempt``) within an
                epoch of several ranks.

        Returns:
            The decorator; it returns a handle that can be called like the function and removed,
            and is a context manager.

        Raises:
            ValueError: an unknown hook, or an invalid number.
            TypeError: the function names an argument that the hook does not have.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log", every=2)
            ... def show(step, metrics):
            ...     print(step, metrics)
            >>> for step in (1, 2, 3, 4):
            ...     accel.log({"loss": 1 / step}, step=step)
            2 {'loss': 0.5}
            4 {'loss': 0.25}
        """
        name = checked_hook(hook)
        filters = Filters(every, once, after, main_process_only)

        def register(function: Callable[..., Any]) -> FunctionHandle:
            return self.loop.add_function(
                function, name, filters, on_error=on_error, can_vote=can_vote
            )

        return register

    def describe_callbacks(self) -> str:
        """Return the firing plan: callbacks in the order of their calls, and those of each hook.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log", can_vote=True)
            ... def watch(run, metrics):
            ...     if metrics["loss"] > 100:
            ...         run.stop("the loss has exploded")
            >>> print(accel.describe_callbacks())
            callbacks
              1  watch:on_log  votes
            hooks
              on_log  watch:on_log
        """
        return firing_plan(self.loop.dispatch)

    def callback_report(self) -> CallbackReport:
        """Return the time that each hook of each callback took on this rank, the longest first.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> @accel.on("log")
            ... def watch(metrics):
            ...     pass
            >>> accel.log({"loss": 1.0})
            >>> [(row.callback, row.hook, row.calls) for row in accel.callback_report().rows]
            [('watch:on_log', 'on_log', 1)]
        """
        return self.loop.dispatch.ledger.report()

    # --- trackers -----------------------------------------------------------------------------

    @property
    def trackers(self) -> list[Any]:
        """The trackers in use on this rank."""
        return self.tracking.trackers

    @property
    def log_with(self) -> list[Any]:
        """The argument ``log_with``, as a list."""
        return list(self.tracking.log_with)

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Keywords | None = None,
    ) -> None:
        """Start the trackers of a loop that does not use :meth:`run`, before the first ``log``.

        Args:
            project_name: name of the run, for the trackers.
            config: hyperparameters: a dict, a dataclass or a namespace.
            init_kwargs: arguments of the trackers' constructors, by tracker name, such as
                ``{"wandb": {"tags": ["baseline"]}}``.

        Raises:
            ValueError: ``init_kwargs`` names a tracker that ``log_with`` does not have.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).init_trackers("digits", {"lr": 0.1})
        """
        self.tracking.init(self.loop.run, project_name, config_fields(config), init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; one that does nothing on ranks that do not log.

        The tracker's own thread uses it too: calls through it may be out of order with ``log``.

        Args:
            name: such as ``"tensorboard"``.
            unwrap: return the tool's own object instead, such as its ``SummaryWriter``.

        Raises:
            ValueError: ``log_with`` has no tracker of this name.
            RuntimeError: the trackers are not started.

        Example:
            >>> import tempfile
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, log_with="jsonl", project_dir=tempfile.mkdtemp())
            >>> accel.init_trackers("digits")
            >>> accel.get_tracker("jsonl").name
            'jsonl'
            >>> accel.end_training()
        """
        return self.tracking.get(name, unwrap=unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Keywords | None = None,
    ) -> None:
        """Log values to callbacks and trackers, without waiting for the device or the trackers.

        With gradient accumulation, trackers get one row for each optimizer step: the mean of what
        the micro-batches of its window log, or the last one of integers and texts. Callbacks get
        each call.

        Args:
            values: numbers, zero-dimensional tensors or strings, by name; nested dicts are
                flattened with ``/``, ``None`` is left out.
            step: optimizer steps so far; ``run.global_step`` if ``None``. With a step, the row is
                written as it is.
            log_kwargs: further keywords for a tracker's ``log``, by tracker name.

        Raises:
            TypeError: a value is none of these, or ``step`` is not an integer.
            ValueError: ``log_kwargs`` names a tracker that ``log_with`` does not have.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log({"train/loss": 0.5})
            >>> accel.current_run.callback_metrics
            {'train/loss': 0.5}
        """
        if remote_failure.pending is not None:
            remote_failure.raise_in("log")
        loop = self.loop
        flat, step = self.tracking.log(loop.run, values, step, log_kwargs)
        if loop.dispatch.hooks["on_log"]:
            loop.fire("on_log", flat, step)

    # --- memory and profiles ------------------------------------------------------------------

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context manager that records the block with torch's profiler.

        With ``output_trace_dir`` each rank writes its own ``profile_<rank>.json``, without waiting
        for the other ranks.

        Args:
            profile_handler: options; if ``None``, those in ``kwargs_handlers`` of the Accelerator,
                or the defaults.

        Raises:
            TypeError: ``profile_handler`` is not a :class:`ProfileKwargs`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator, ProfileKwargs
            >>> accel = Accelerator(cpu=True)
            >>> with accel.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
            >>> any(event.key == "aten::matmul" for event in profiler.key_averages())
            True
        """
        from accel_callbacks.plugins.profiler import ProfileKwargs, profiling

        handler = profile_handler
        if handler is None:
            handler = self.handlers.get(ProfileKwargs, ProfileKwargs())
        if not isinstance(handler, ProfileKwargs):
            raise TypeError(f"profile() takes a ProfileKwargs, not {handler!r}.")
        return profiling(handler, self.process_index)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared and registered objects and their memory, for another training.

        Callbacks and trackers stay. The position of the run is reset, without any hook: leave
        ``run`` first, if you use it. Workers of loaders end. Then prepare again.

        Args:
            *objects: objects that your own variables still hold; assign the result to these.

        Returns:
            A ``None`` for each object.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> (model,) = accel.free_memory(model)
            >>> model is None, accel.models
            (True, [])
        """
        from accel_callbacks.memory import release_memory

        for optimizer in self.optimizers:
            self.precision.forget(optimizer.optimizer)
        self.first_steps.forget()
        self._loaders.clear()
        for group in (self.models, self.optimizers, self.schedulers):
            group.clear()
        if "training_state" in vars(self):  # it is not made to be cleared
            self.training_state.registered.clear()
        self.loop.saves.free_memory()
        self.loop.forget()
        self.loop.run.start_over()
        if self.loop.pass_ends is not None:
            self.loop.pass_ends.count_from_here()
        return release_memory(*objects)

    clear = free_memory


def _several(given: Any) -> tuple[Any, ...]:
    """Return the parts of an argument that may be one, several or None."""
    if given is None:
        return ()
    is_single = isinstance(given, (str, Callback)) or not isinstance(given, Iterable)
    return (given,) if is_single else tuple(given)


def _add_ons() -> Sequence[CreateObserver]:
    """Return what makes the observers of add-ons; nothing where these are not installed."""
    try:
        from accel_callbacks.addons import OBSERVERS
    except ModuleNotFoundError as error:
        if error.name != "accel_callbacks.addons":
            raise
        return ()
    return OBSERVERS


def _refusal_of_unnamed(value: Any, owner: type[Any]) -> str:
    """Return the error text for an argument without a name, with the name if its value tells."""
    text = f"{owner.__name__}() takes its options by name"
    if isinstance(value, str) and value in PRECISIONS:
        return f"{text}: {owner.__name__}(mixed_precision={value!r})."
    if isinstance(value, Callback):
        return f"{text}: {owner.__name__}(callbacks=[{type(value).__name__}(...)])."
    return f"{text}, and {value!r} has none."


def _is_scheduler(item: Any) -> bool:
    """Return whether an argument of ``prepare`` is a scheduler, and not a look-alike."""
    others = (torch.nn.Module, torch.optim.Optimizer, DataLoader, SkipDataLoader)
    return not isinstance(item, others) and is_scheduler(item)


def _instead(name: str) -> str:
    """Return what to pass in place of an argument that the constructor lacks; empty if unknown."""
    for argument, part in _parts():
        if name in (field.name for field in fields(part)):
            return f"Give {argument.format(f'{part.__name__}({name}=...)')}."
    return foreign_name("OPTIONS", name)


def _parts() -> list[tuple[str, type[Any]]]:
    """Return the arguments that take the options of one part, with the class of the options."""
    from accel_callbacks.checkpoint.project import ProjectConfiguration
    from accel_callbacks.data.config import DataLoaderConfiguration

    arguments = [
        ("dataloader_config={}", DataLoaderConfiguration),
        ("project_config={}", ProjectConfiguration),
        ("gradient_accumulation_plugin={}", plugins.GradientAccumulationPlugin),
        ("dynamo_plugin={}", plugins.TorchDynamoPlugin),
        ("deepspeed_plugin={}", plugins.DeepSpeedPlugin),
    ]
    handlers = (plugins.DistributedDataParallelKwargs, plugins.GradScalerKwargs)
    return arguments + [("kwargs_handlers=[{}]", handler) for handler in handlers]
