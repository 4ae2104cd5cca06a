"""Accelerator: builds the components of a training, and delegates to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from os import PathLike
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accel_callbacks import collectives
from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher, firing_plan
from accel_callbacks.callbacks.dispatch.functions import (
    CallbackHandle,
    Filters,
    FunctionHandle,
    checked_hook,
)
from accel_callbacks.callbacks.dispatch.ledger import CallbackReport
from accel_callbacks.callbacks.dispatch.registration import configured
from accel_callbacks.checkpoint.checkpointer import Checkpointer
from accel_callbacks.checkpoint.project import ProjectConfiguration, chosen_project
from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.checkpoint.selection import Only, Rename
from accel_callbacks.checkpoint.training_state import RestoreReport, TrainingState
from accel_callbacks.collectives.metrics import gather_counted, gather_counted_objects
from accel_callbacks.config import launched_handlers, launched_plugin, resolve_config
from accel_callbacks.data.config import (
    DataLoaderConfiguration,
    checked_config,
    checked_rng_types,
)
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.loaders import Loaders
from accel_callbacks.data.skip import SkipDataLoader, skip_first_batches
from accel_callbacks.distributed.abort import group_is_aborted
from accel_callbacks.distributed.process_control import ProcessControl
from accel_callbacks.distributed.topology import (
    DistributedType,
    destroy_topology,
    resolve_topology,
)
from accel_callbacks.distributed.trigger import Trigger
from accel_callbacks.integrations.adapt import adapt
from accel_callbacks.loop.accumulation import GradientWindow
from accel_callbacks.loop.contexts import Accumulate, Evaluate, RunContext, join_uneven_inputs
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.passes import Passes
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.loop.step import StepEngine
from accel_callbacks.memory import release_memory
from accel_callbacks.modeling.compile import uncompile
from accel_callbacks.modeling.prepare import ModelRequest, Preparer, is_scheduler
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.plugins.base import KwargsHandler, sort_handlers
from accel_callbacks.plugins.compile import DynamoBackend, TorchDynamoPlugin
from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin, chosen_steps
from accel_callbacks.plugins.precision import AutocastKwargs
from accel_callbacks.plugins.process_group import group_options
from accel_callbacks.plugins.unknown import unknown_option
from accel_callbacks.precision import create_precision
from accel_callbacks.profiler import ProfileKwargs, profiling
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.state import AcceleratorState, GradientState
from accel_callbacks.strategies import create_strategy
from accel_callbacks.tracking.media import Keywords, MediaLogging
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["Accelerator"]

T = TypeVar("T")


class Accelerator(ProcessControl, MediaLogging):
    """Runs a plain training loop on any machine, with callbacks, trackers and checkpoints.

    All arguments are keywords. Options that are not given are taken from what ``accel launch``
    was told, and then from the defaults; ``accel.config.describe()`` says which.

    Args:
        mixed_precision: ``"no"`` (default), ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: micro-batches of one optimizer step, 1 by default.
        cpu: compute on the CPU even where an accelerator is there.
        debug: let the processes compare what they hold before each collective method, and raise
            with a table of who differs instead of hanging; off by default. ``ACCEL_DEBUG=1``
            is for the functions too.
        device_placement: move models and batches to the device, on by default.
        log_with: names (``"jsonl"``, ``"tensorboard"``, ``"wandb"``) or instances of trackers.
        project_dir: folder of the run's logs and checkpoints.
        project_config: the same with more options; instead of ``project_dir``.
        callbacks: objects with hooks, called in this order as far as their ``before``, ``after``
            and ``runs_last`` allow; :func:`accel_callbacks.callbacks.configured` sets these.
        gradient_accumulation_plugin: the window with more options; instead of
            ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: prepared schedulers move with optimizer steps, on by
            default. If False, each call of their ``step`` counts.
        scheduler_steps_per_process: prepared schedulers move once for each process at a time, as
            Accelerate's do, for schedules that were written for it; off by default.
        kwargs_handlers: options of parts, one of a class: :class:`AutocastKwargs`,
            :class:`DistributedDataParallelKwargs`, ...
        dynamo_backend: backend of torch.compile for prepared models; none by default.
        dynamo_plugin: the same with more options; instead of ``dynamo_backend``.
        dataloader_config: how prepared loaders share their data among the processes.
        rng_types: random generators (``"torch"``, ``"cuda"``, ``"generator"``, ...) that all
            processes take over from the main one at the start of each pass over a loader. None
            by default: the order of samples does not need it.
        timeout: how long a collective waits for the other processes; torch's default if None.
        strict_trackers: let an error of a tracker end the run; off by default.
        tracker_config: how trackers are treated (``loggers.TrackerConfig``): policy for NaN,
            limits of time and of what waits.

    Raises:
        ValueError: an option has a value that does not exist.
        TypeError: a callback has a method that looks like a hook and is none.
        RuntimeError: the processes were not started by a launcher that can be understood.

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
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        debug: bool | None = None,
        device_placement: bool = True,
        log_with: Any = None,
        project_dir: str | PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        scheduler_steps_per_process: bool = False,
        kwargs_handlers: Iterable[KwargsHandler] | None = (),
        dynamo_backend: DynamoBackend | str | Callable[..., Any] | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Iterable[Any] | None = None,
        callbacks: Iterable[Any] = (),
        timeout: timedelta | None = None,
        strict_trackers: bool = False,
        tracker_config: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(unknown_option(next(iter(unknown)), type(self)))
        # Check all options before the process group is joined: a wrong one must not cost a timeout.
        self.project_configuration = chosen_project(project_dir, project_config)
        explicit = {
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": chosen_steps(
                gradient_accumulation_steps, gradient_accumulation_plugin
            ),
            "cpu": cpu,
            "debug": debug,
        }
        self.config = resolve_config(explicit, os.environ)
        self.device_placement = device_placement
        loader_config = checked_config(dataloader_config)
        self.rng_types = checked_rng_types(rng_types)
        dispatch = Dispatcher(callbacks, adapters=(adapt,))
        self.handlers = launched_handlers(sort_handlers(kwargs_handlers), self.config)
        self.dynamo_plugin = launched_plugin(dynamo_backend, dynamo_plugin, self.config)
        group = group_options(self.handlers, timeout)
        self.topology = resolve_topology(cpu=self.config.cpu, anew=True, **group)
        self.strategy = create_strategy(self.topology, self.handlers)
        self.precision = create_precision(
            self.config.mixed_precision, self.topology.device, self.handlers
        )
        self.window = GradientWindow(
            self.config.gradient_accumulation_steps,
            gradient_accumulation_plugin,
            averaged_over=self.strategy.averaged_over,
        )
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[DataLoaderShard] = []
        self.loop = Loop(
            TrainingRun(self), dispatch, self.window, self.models, self.optimizers, self.loaders
        )
        self.passes = Passes(self.loop)
        self.tracking = Tracking(
            _as_list(log_with),
            self.project_configuration.log_folder,
            is_main_process=self.is_main_process,
            strict=strict_trackers,
            config=tracker_config,
        )
        self.training_state = TrainingState(
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
        self.checkpointer = Checkpointer(self.training_state)
        self._step = StepEngine(
            self.strategy,
            self.precision,
            self.loop,
            self.passes.boundary,
            self.models,
            self.optimizers,
        )
        self._preparer = Preparer(
            self.strategy,
            self.precision,
            self.dynamo_plugin,
            self.loop,
            self.models,
            self.optimizers,
            self.schedulers,
            device_placement=device_placement,
            scheduler_options={
                "step_with_optimizer": step_scheduler_with_optimizer,
                "steps_at_once": self.strategy.data_world if scheduler_steps_per_process else 1,
            },
        )
        self._loaders = Loaders(
            loader_config,
            self.rng_types,
            self.topology.device,
            device_placement=device_placement,
            data_rank=self.strategy.data_rank,
            data_world=self.strategy.data_world,
            events=self.passes,
            prepared=self.loaders,
        )

    # --- what it is made of -------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.topology.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.topology.distributed_type

    @property
    def data_world(self) -> int:
        """Number of ranks that read different data."""
        return self.strategy.data_world

    @property
    def multi_device(self) -> bool:
        """True with several processes that each compute on a device of their own, not the CPU."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def debug(self) -> bool:
        """Whether the processes compare what they hold before each collective method."""
        return self.config.debug

    @property
    def state(self) -> AcceleratorState:
        """Where this process stands, with the options of this Accelerator."""
        return AcceleratorState.of(self.config)

    @property
    def gradient_state(self) -> GradientState:
        """A live view of the gradient window and of the loader being iterated."""
        return GradientState(self.window, self.loop)

    @property
    def current_run(self) -> TrainingRun:
        """The run that hooks are called with; there always is one."""
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
        """The loss scaler of fp16, ``None`` for other precisions."""
        return self.precision.scaler

    @property
    def project_dir(self) -> str:
        """The folder of the run's logs and checkpoints."""
        return self.project_configuration.root

    @property
    def logging_dir(self) -> str:
        """The folder that trackers write to."""
        return self.project_configuration.log_folder

    # --- prepare ------------------------------------------------------------------------------

    def prepare(
        self, *args: Any, device_placement: bool | Sequence[bool | None] | None = None
    ) -> Any:
        """Make objects ready for this machine, and return them in the order given.

        Models are moved to the device and wrapped for the strategy and the precision; loaders
        deliver this process's share to the device; optimizers and schedulers follow the gradient
        window. Other objects come back as they are, and so do prepared ones.

        Args:
            *args: models, optimizers, loaders, schedulers, in any order. A scheduler's optimizer
                is prepared before it or with it.
            device_placement: overrides the Accelerator's for this call; a list has an entry for
                each object.

        Returns:
            The prepared objects, as a tuple if there are several.

        Raises:
            ValueError: a loader cannot be sharded, a scheduler's optimizer is not prepared, the
                processes were given different callbacks that vote or save, or
                ``device_placement`` has not one entry for each object.
        """
        self.loop.share_identity(self.loop.run)
        places = device_placement
        if places is None or isinstance(places, bool):
            places = [places] * len(args)
        if len(places) != len(args):
            raise ValueError(f"device_placement has {len(places)} entries for {len(args)} objects.")
        placed = list(zip(args, places, strict=True))
        ready = self._preparer.prepare(
            [ModelRequest(one, place) for one, place in placed if isinstance(one, torch.nn.Module)],
            [one for one in args if isinstance(one, torch.optim.Optimizer)],
            [one for one in args if _is_scheduler(one)],
        )
        for one, place in placed:
            if isinstance(one, (DataLoader, SkipDataLoader)):
                ready[id(one)] = self.prepare_data_loader(one, place)
        result = tuple(ready.get(id(one), one) for one in args)
        return result[0] if len(result) == 1 else result

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model, as ``prepare`` does with each.

        Args:
            model: what to prepare.
            device_placement: move it to the device; as the Accelerator does if ``None``.
            evaluation_mode: it is not trained, so processes have no gradients of it to average.

        Raises:
            ValueError: the model is spread over devices or processes, or has no weights yet.
        """
        request = ModelRequest(model, device_placement, evaluation_mode)
        prepared: torch.nn.Module = self._preparer.prepare([request])[id(model)]
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; see :meth:`prepare`. Its state goes where the parameters are."""
        prepared: AcceleratedOptimizer = self._preparer.prepare(optimizers=[optimizer])[
            id(optimizer)
        ]
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
        """Prepare one loader; see ``prepare``. With several processes, all must call it.

        Args:
            data_loader: any torch loader. One that another Accelerator has prepared is prepared
                anew, from the loader that it was made of.
            device_placement: overrides the Accelerator's for this loader.
            slice_fn_for_dispatch: takes a process's part of a batch, where batches are dispatched.

        Returns:
            A :class:`accel_callbacks.DataLoaderShard`; of a view by ``skip_first_batches``, a view.

        Raises:
            ValueError: it shards already, or cannot be sharded as the options say.
        """
        return self._loaders.prepare(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(
        self, dataloader: DataLoader[Any] | SkipDataLoader, num_batches: int = 0
    ) -> SkipDataLoader:
        """A view of a loader that leaves the first batches of an epoch out.

        See :func:`accel_callbacks.skip_first_batches`.
        """
        return skip_first_batches(dataloader, num_batches)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How prepared loaders share their data among the ranks."""
        return self._loaders.config

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; ``None`` is no."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batch is filled up with repetitions; may be set, for the next passes.

        Raises:
            ValueError: set to ``False``, and a prepared loader cannot do without.
        """
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loaders.set_even_batches(even)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffled orders are those of ``SeedableRandomSampler``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies from pinned memory to the device are not waited for."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether a stream that has a state of its own is resumed through it."""
        return self.dataloader_config.use_stateful_dataloader

    # --- the step -----------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """True where gradients synchronise and the optimizer really steps."""
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

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if a prepared optimizer left its last step out because of an fp16 overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> Accumulate:
        """Context manager around the body of the loop: one micro-batch of a gradient window.

        Inside, the prepared optimizer, scheduler and clipping act only at the end of a window,
        the loss is divided by the real number of micro-batches (the tail of an epoch included),
        and gradients stay on their process until then.

        Args:
            *models: the prepared models that are trained in the block; all of them if none.
        """
        return self._step.accumulate(*models)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Context for computation outside of a prepared model, in the chosen precision.

        Args:
            autocast_handler: options instead of the Accelerator's. With
                ``AutocastKwargs(enabled=False)`` it is full precision, in another block too.

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
        """Backward pass of a loss: averaged over the gradient window, scaled for fp16.

        Outside of ``accumulate`` the loss is divided by ``gradient_accumulation_steps``, for
        loops that count micro-batches themselves.

        With ``normalizer``, the loss is a sum over that many units (tokens, say), and the step
        is taken with the gradients of the mean over all units of the window on all processes,
        however they are spread. Gradients have that size from clipping on, or from the step.

        Args:
            loss: scalar tensor (or any tensor, with ``gradient=`` as in ``Tensor.backward``).
            normalizer: units that ``loss`` was summed over; a number, or a tensor with one
                element. All processes give it, or none.
            **kwargs: handed to ``Tensor.backward``.

        Raises:
            ValueError: a second loss with a normalizer in one micro-batch, or losses with and
                without one in a window.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.
        """
        self._step.backward(loss, normalizer, kwargs)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward leaves the gradients of ``model`` on this process.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.no_sync(model):
            ...     accel.backward(model(torch.ones(1, 1)).sum())
        """
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which the next backward synchronises, though its forwards ran in no_sync.

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
        return self.strategy.trigger_sync(model)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients to their true size, once a step: loss scale, and what a window weighs.

        Args:
            optimizer: a prepared optimizer, or several in a list or tuple; all where ``None``.

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
            The total norm before clipping, or ``None`` inside of a window, where nothing is done.
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
        """A block in which processes may have unequal numbers of batches, and none hangs.

        For loaders that the script has split itself; prepared loaders give all processes equal
        numbers. A process that is done takes part in the gradient averages of the others with
        zeros, so that each sample counts alike. At the end all processes have the weights, and
        the state of prepared optimizers and schedulers, of one that took all steps. Gradients of
        a gradient window that is open then are dropped, where the numbers were unequal. On one
        process the block just runs.

        Inside, only backward may meet the other processes: no ``gather`` or ``save_state``, and
        no ``backward(normalizer=...)``.

        Args:
            joinables: the prepared models that are trained in the block.
            even_batches: overrides that of prepared loaders for the passes in the block.

        Raises:
            TypeError: something in ``joinables`` is no prepared model.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.join_uneven_inputs([model]):
            ...     for batch in torch.utils.data.DataLoader(torch.ones(3, 1)):
            ...         accel.backward(model(batch).sum())
        """
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
        """Concatenate each tensor over all processes; see :func:`accel_callbacks.gather`."""
        return collectives.gather(tensor, debug=self.debug)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop what was read twice to fill up the last batch.

        Call it inside of the loop over a prepared loader: that loader knows how many samples of
        its current batch are real. Outside of any loop it only gathers. Of loops inside of each
        other the innermost counts; of loaders side by side, as in ``zip``, the one whose batch
        has the size of what is gathered.

        Args:
            input_data: a tensor of shape ``(batch, ...)`` or a nested structure of them, with
                lists of other objects between them; anything else is gathered as objects. Batches
                may have another size on each process.
            use_gather_object: gather objects; lists and tuples become one list in rank order,
                and of anything else there is a list with what each process has.

        Returns:
            The same structure over the samples of all processes, each counted once. Tensors that
            have no entry for each sample (a mean, say) are only gathered.

        Raises:
            ValueError: on all processes; see :func:`accel_callbacks.gather`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> loader = accel.prepare(torch.utils.data.DataLoader(range(3), batch_size=2))
            >>> [accel.gather_for_metrics(batch).tolist() for batch in loader]
            [[0, 1], [2]]
        """
        tensors = () if use_gather_object else input_data
        collectives.begin("gather_for_metrics", self.debug, lambda: collectives.rows_held(tensors))
        gather = gather_counted_objects if use_gather_object else gather_counted
        return gather(input_data, self.loop.active)

    def reduce(
        self,
        tensor: T,
        reduction: str = "sum",
        scale: float = 1.0,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> T:
        """Combine each tensor over all processes; see :func:`accel_callbacks.reduce`."""
        return collectives.reduce(tensor, reduction, scale, weight=weight, debug=self.debug)

    def pad_across_processes(
        self, tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> T:
        """Pad to the largest size of all processes.

        See :func:`accel_callbacks.pad_across_processes`.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, debug=self.debug)

    def set_trigger(self) -> None:
        """Raise a flag that all processes see in :meth:`check_trigger`, to stop early, say.

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
        """Save the whole training state; all processes must call it.

        Models, optimizers, schedulers, the loss scaler, the loaders' positions, the run's
        position, callbacks, trackers, registered objects and the random generators of each
        process go into one checkpoint. It is complete and verified by its manifest, or it does
        not exist: saving over an older checkpoint leaves that one valid until the new one is.

        Args:
            output_dir: folder or fsspec URL; ``<project_dir>/checkpoints/step-<global step>``
                where ``None``, or a number as :class:`ProjectConfiguration` says.
            safe_serialization: there is no other way; here because Accelerate has it.
            metadata: JSON values to find in the manifest, such as metrics.
            storage_options: for the filesystem behind the URL.
            max_shard_size: largest tensor file, such as ``"5GB"``.
            async_save: return once the state is copied to host memory, and write it while training
                goes on. ``on_checkpoint_saved`` tells when it is durable, and an error is raised on
                all processes at the end of a later optimizer step, or by :meth:`wait_for_save`.
            when_busy: if an earlier save is under way, ``"wait"`` for it, or ``"skip"`` this one.
            trainable_only: leave frozen parameters out; a load keeps those that are there.

        Returns:
            The path of the checkpoint, which is durable unless ``async_save``; an empty string if
            it was skipped.

        Raises:
            checkpoint_io.CheckpointError: a process could not write; nothing was committed. Or the
                save before, in the background, had failed.
            ValueError: ``safe_serialization=False``, which means pickle; an unknown ``when_busy``;
                ``save_on_each_node`` of the project on several nodes.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.
            RemoteError: a hook or a callback's ``state_dict`` failed on another process; likewise.

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
        """Wait until the save in the background, if there is one, is durable; all must call it.

        Raises:
            checkpoint_io.CheckpointError: it failed; nothing was committed.
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
        """Restore what :meth:`save_state` saved, into the prepared objects, on all processes.

        Weights and optimizer states are read straight into the memory that they have here, each
        part of a file verified before one of its bytes is used; nothing changes before all names,
        shapes, dtypes and sizes were found to fit. Where reading breaks off half-way, the newest
        older checkpoint is taken if ``input_dir`` is ``None``; else the error is raised, and
        ``backward``, ``step`` and ``save_state`` refuse to go on until a checkpoint was loaded. A
        prepared loader continues at the exact sample with its next ``for``.

        Args:
            input_dir: a checkpoint; the newest valid one of the project where ``None``.
            load_kwargs: nothing is left to choose; here because Accelerate has it.
            only: a part of the checkpoint: sections (``"models"``, ``"optimizers"``,
                ``"schedulers"``, ``"loaders"``, ``"registered"``, ``"run"``, ...), keys
                (``"models/0"``, ``"registered/ema"``), glob patterns of keys
                (``"models/0/encoder.*"``), several of these, or a function of a key. The rest
                stays as it is here.
            rename: weights that have other names here: beginnings of saved keys to what they are
                now, ``{"models/0/backbone.": "models/0/encoder."}``, or a function of such a key.
                States of optimizers follow.
            strict: raise where the resume cannot be exact: another number of processes, a
                registered object without a state of its own, with ``only`` a weight that is not
                on both sides. Else these are warnings.
            verify: ``"full"`` reads and checks all bytes before anything changes, and then reads
                them again; ``"parts"`` checks each part on its way.
            progress: a bar with bytes per second; ``None`` shows one for long loads on a terminal.
            storage_options: for the filesystem behind the URL.

        Returns:
            The path that was loaded; :attr:`load_report` lists the names that were not.

        Raises:
            FileNotFoundError: ``input_dir`` is ``None`` and the project has no valid checkpoint.
            ResumeError: the checkpoint does not fit; nothing was changed.
            TypeError: ``load_kwargs`` are given.
            ValueError: ``verify`` is something else.
            checkpoint_io.CheckpointError: missing, unfinished or corrupt; nothing was changed
                unless it is a :class:`checkpoint_io.TornLoadError`.
            RemoteError: another process could not read or restore it.

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
        """The names that the last ``load_state`` did not restore, None before the first."""
        return self.training_state.load_report

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically, at least."""
        return self.project_configuration.iteration

    @property
    def registered(self) -> Registered:
        """The registered objects."""
        return self.training_state.registered

    @property
    def pre_hooks(self) -> PreHooks:
        """The hooks before ``save_state`` and ``load_state``."""
        return self.training_state.pre_hooks

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save objects with the training state, and restore them with it.

        Each is kept apart by its name: the keyword, or that of its class (with a number from the
        second one on). Where the class has been renamed since, objects without a name of their
        own get their states by position, with a warning. A state for which no object is
        registered is kept for the next save. Register before ``load_state`` and ``run``.

        The state belongs to all processes: ``state_dict()`` is called on each, that of the main
        process is written, and ``load_state_dict`` gets it on each.

        Args:
            *objects: with ``state_dict()`` and ``load_state_dict(state)``; the state is a dict of
                tensors, numpy arrays and plain values, nested as you like.
            **named: the same, by name.

        Raises:
            ValueError: some lack one of the two methods; all of them are listed. Or a name is
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
        self.registered.add(*objects, **named)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` in :meth:`save_state`, on all processes.

        ``models`` are the prepared ones, ``weights`` their state dicts. What the hook takes out
        of either list is not saved here: the hook saves it in its own way, into ``output_dir``
        (a folder that is there, or the URL where it is not local). What it edits in ``weights``
        is saved as edited; tensors that it drops stay as they are in a load. Files of the hook
        are its own: they are left alone, and are not verified. If a hook raises on any process,
        nothing is committed and all processes raise.

        Args:
            hook: called after those registered before it, with what they left.

        Returns:
            A handle with ``remove()``, which is a context manager too.

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
        return self.pre_hooks.on_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` in :meth:`load_state`, on all processes.

        The hook loads models in its own way, and takes those out of ``models``; the others are
        loaded from the checkpoint afterwards.

        Args:
            hook: called after those registered before it, with the models that they left.

        Returns:
            A handle with ``remove()``, which is a context manager too.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> handle = accel.register_load_state_pre_hook(lambda models, input_dir: None)
            >>> handle.remove()
        """
        return self.pre_hooks.on_load(hook)

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
        """Write the weights as ``model.safetensors``, or as shards with an index.

        Stock safetensors and transformers read the result. All processes must call it; the main
        one writes, or with ``save_on_each_node`` of the project one of each node, and the others
        wait. Of a model whose parameters are spread over processes, one tensor after the other is
        gathered where it is written.

        Args:
            model: prepared or not.
            save_directory: folder or fsspec URL.
            max_shard_size: largest file, such as ``"5GB"``.
            safe_serialization: there is no other way; here because Accelerate has it.
            trainable_only: leave frozen parameters out, and keep buffers.
            progress: a bar with bytes per second; ``None`` shows one for long saves on a terminal.
            storage_options: for the filesystem behind the URL.

        Raises:
            ValueError: ``safe_serialization=False``, which means pickle.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.
            RemoteError: the process that writes could not.
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
        """Write a flat dict of tensors as one safetensors file, on the main process.

        With ``save_on_each_node`` of the project it is the main one of each node. The others do
        not wait, so it may be called on all processes or on the main one only.

        Args:
            obj: names to tensors.
            f: path or fsspec URL of the file; it is replaced in one step.
            safe_serialization: there is no other way; here because Accelerate has it.

        Raises:
            TypeError: ``obj`` is something else, or ``f`` is an open file.
            ValueError: ``safe_serialization=False``, which means pickle.
        """
        self.checkpointer.save_tensors(obj, f, safe_serialization)

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """The model as it was before ``prepare``.

        It is the model that is trained, not a copy: what is not kept is gone from it, and what
        is compiled is compiled in place.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: leave the autocast around its forward, and its fp8 layers, in place.
            keep_torch_compile: leave the model and its blocks compiled.

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

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state of a prepared model.

        Args:
            model: a prepared model.
            unwrap: under the names of the unwrapped model; else those of the wrapper, if there
                is one.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> sorted(accel.get_state_dict(accel.prepare(torch.nn.Linear(1, 1))))
            ['bias', 'weight']
        """
        return self.strategy.model_state_dict(model) if unwrap else model.state_dict()

    # --- runs ---------------------------------------------------------------------------------

    def run(
        self,
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        *,
        resume: bool | str = True,
    ) -> AbstractContextManager[TrainingRun]:
        """Context manager around the whole loop: resume, stop, and a tidy end.

        Entering it fires ``setup``, restores the newest valid checkpoint that a callback knows
        of, starts the trackers, and fires ``on_fit_start``. Leaving it fires the end hooks (or
        ``on_exception``), and closes the trackers with the right status. Enter it after
        ``prepare``. All processes leave it together.

        An error on one process ends the run on all: it is raised there, and the others raise
        :class:`RemoteError` with its traceback. After that, make a new Accelerator on all
        processes to go on, as a sweep does, or let the script end.

        Args:
            name: of the run (or project), for trackers and messages.
            config: hyperparameters; given to the trackers.
            resume: ``True`` to resume where a ``Checkpoint`` callback finds something, ``False``
                to start afresh, or the path of a checkpoint.

        Raises:
            SystemExit: on leaving it, after a preemption for which a callback has set
                ``run.exit_code``; everything is closed then.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> with Accelerator(cpu=True).run("demo", config={"lr": 0.1}) as run:
            ...     run.name
            'demo'
        """

        def new_run() -> TrainingRun:
            run = TrainingRun(self, name)
            run.config = dict(config or {})
            return run

        return RunContext(new_run, self.loop, self.checkpointer, self.tracking, resume)

    def evaluate(self, *models: torch.nn.Module, stage: str = "validation") -> Evaluate:
        """Context manager around an evaluation loop, inside of training or not.

        Models are in eval mode and gradients are off inside; afterwards every module is in the
        mode that it was in. Loaders iterated inside count as validation, or as test.

        Args:
            *models: prepared models; all of them if none.
            stage: ``"validation"`` (default) or ``"test"``: which hooks fire.

        Raises:
            ValueError: another stage.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> with accel.evaluate(model):
            ...     model(torch.ones(1, 1)).requires_grad
            False
        """
        return Evaluate(self.passes, models or tuple(self.models), stage)

    def end_training(self) -> None:
        """End a loop that does without :meth:`run`, close the trackers, leave the group.

        All processes must call it. The process group is left only if this library joined it.

        Raises:
            SystemExit: the loop was preempted, and a callback has set ``run.exit_code``.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).end_training()
        """
        error = sys.exc_info()[1]  # in a `finally`, the error that ends the script
        self.loop.end_fit(error)
        self.loop.saves.free_memory()
        run = self.loop.run
        broken = "failed" if isinstance(error, Exception) else "interrupted"
        self.tracking.close(run._ending if error is None else broken)
        # After an error that ended the run, the other ranks still read which one: the store stays.
        if group_is_aborted():
            return
        # After an error of this rank alone, the other ranks may be gone: do not wait for them.
        if error is None:
            self.wait_for_everyone()
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

        While a run is on, its ``setup`` is called at once, and it is given the state that a
        resumed checkpoint has for it; its other hooks come as the loop goes on. One that votes,
        saves or is collective must be added on all processes, at the same place.

        Args:
            callback: an object with hooks.
            before: callbacks, their classes or state keys, that it is called before.
            after: those that it is called after.
            on_error: ``"raise"``, ``"warn"`` or ``"disable"``; the callback's own where ``None``.

        Raises:
            TypeError: a method looks like a hook and is none.
            ValueError: the ``state_key`` of another, or constraints that cannot be met.

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
        """Take a callback out; it is not called again. While a run is on, it is torn down.

        Args:
            callback: the object that was registered.

        Raises:
            ValueError: it is not registered.

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
        """Decorator: call a function in a hook, with the arguments that it names.

        A function can ask for the arguments of the hook, and for ``step`` (optimizer steps so
        far), ``epoch`` and ``accelerator``; where there are ``outputs``, for ``loss`` too. Calls
        of the hook are counted from 1, and go on to be counted in a resumed run.

        Args:
            hook: with or without its ``on_``.
            every: call the function on each call of the hook whose number is a multiple of this.
            once: call it on the first of these, and take it out.
            after: not on the first so many calls.
            main_process_only: call it on the main process only.
            on_error: ``"raise"`` (default), ``"warn"`` or ``"disable"``.
            can_vote: the function may stop the run (or call ``save_now``, ``preempt``) in the
                middle of an epoch of several processes.

        Returns:
            The decorator; it gives a handle that is called like the function, can be removed, and
            is a context manager.

        Raises:
            ValueError: no such hook, or a number that makes no sense.
            TypeError: the function wants an argument that the hook has not.

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
        """The firing plan: the callbacks in the order of their calls, and who has which hook.

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
        """What each hook of each callback has cost on this process, the costliest first.

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
        """The trackers in use on this process."""
        return self.tracking.trackers

    @property
    def log_with(self) -> list[Any]:
        """What was given as ``log_with``, as a list."""
        return list(self.tracking.log_with)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Keywords | None = None,
    ) -> None:
        """Start the trackers of a loop that does without :meth:`run`, before the first ``log``.

        Args:
            project_name: of the run, for the trackers.
            config: hyperparameters.
            init_kwargs: arguments of the trackers' constructors, by their names, such as
                ``{"wandb": {"tags": ["baseline"]}}``.

        Raises:
            ValueError: ``init_kwargs`` has a tracker that ``log_with`` has not.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).init_trackers("digits", {"lr": 0.1})
        """
        self.tracking.init(self.loop.run, project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; one that does nothing where this process does not log.

        The trackers' own threads use it too: what you write through it may be out of order.

        Args:
            name: such as ``"tensorboard"``.
            unwrap: the tool's own object instead, such as its ``SummaryWriter``.

        Raises:
            ValueError: no tracker of this name was asked for.
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
        """Give values to the callbacks and the trackers; waits neither for the device nor for them.

        Args:
            values: numbers, zero-dimensional tensors or strings, by name; nested dicts are
                flattened with ``/``, None is left out.
            step: optimizer steps so far; ``run.global_step`` where ``None``.
            log_kwargs: further keywords for a tracker's ``log``, by its name.

        Raises:
            TypeError: a value is none of these, or ``step`` is no integer.
            ValueError: ``log_kwargs`` has a tracker that ``log_with`` has not.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> accel.log({"train/loss": 0.5})
            >>> accel.current_run.callback_metrics
            {'train/loss': 0.5}
        """
        flat, step = self.tracking.log(self.loop.run, values, step, log_kwargs)
        self.loop.fire("on_log", flat, step)

    # --- memory and profiles ------------------------------------------------------------------

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Context manager that records the block with torch's profiler.

        With ``output_trace_dir`` each process writes its own ``profile_<rank>.json``; nobody waits
        for the others' files.

        Args:
            profile_handler: options; those in ``kwargs_handlers`` of the Accelerator if ``None``,
                else the defaults.

        Raises:
            TypeError: something else than :class:`ProfileKwargs`.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator, ProfileKwargs
            >>> accel = Accelerator(cpu=True)
            >>> with accel.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
            >>> any(event.key == "aten::matmul" for event in profiler.key_averages())
            True
        """
        handler = profile_handler
        if handler is None:
            handler = self.handlers.get(ProfileKwargs, ProfileKwargs())
        if not isinstance(handler, ProfileKwargs):
            raise TypeError(f"profile() takes a ProfileKwargs, not {handler!r}.")
        return profiling(handler, self.process_index)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all that was prepared and registered, and free its memory, for another training.

        Callbacks and trackers stay. The position of the run goes back to the start, without any
        hook: leave ``run`` first, if you use it. Workers of loaders end. Then prepare anew.

        Args:
            *objects: what your own names still hold; assign the result to these names.

        Returns:
            A None for each object.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> (model,) = accel.free_memory(model)
            >>> model is None, accel.models
            (True, [])
        """
        for optimizer in self.optimizers:
            self.precision.forget(optimizer.optimizer)
        self._loaders.clear()
        for group in (self.models, self.optimizers, self.schedulers):
            group.clear()
        self.registered.clear()
        self.loop.saves.free_memory()
        self.loop.forget()
        self.loop.run.start_over()
        return release_memory(*objects)

    clear = free_memory


def _as_list(log_with: Any) -> list[Any]:
    if log_with is None:
        return []
    return list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]


def _is_scheduler(item: Any) -> bool:
    """Return whether an argument of ``prepare`` is a scheduler, and nothing that it looks like."""
    others = (torch.nn.Module, torch.optim.Optimizer, DataLoader, SkipDataLoader)
    return not isinstance(item, others) and is_scheduler(item)
