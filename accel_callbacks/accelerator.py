"""Accelerator: a thin facade over the parts that do the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
from accel_callbacks.checkpoint.project import ProjectConfiguration, chosen_project
from accel_callbacks.checkpoint.registered import PreHooks, Registered
from accel_callbacks.config import launched_handlers, launched_plugin, resolve_config
from accel_callbacks.data.config import (
    DataLoaderConfiguration,
    checked_config,
    checked_rng_types,
)
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.skip import SkipDataLoader
from accel_callbacks.distributed.topology import DistributedType, resolve_topology
from accel_callbacks.facade.calling import CallingMethods
from accel_callbacks.facade.control import ControlMethods
from accel_callbacks.facade.gathering import GatherMethods
from accel_callbacks.facade.loading import LoadingMethods
from accel_callbacks.facade.models import ModelMethods
from accel_callbacks.facade.registering import RegisteringMethods
from accel_callbacks.facade.resuming import ResumingMethods
from accel_callbacks.facade.running import RunningMethods
from accel_callbacks.facade.saving import SavingMethods
from accel_callbacks.facade.step import StepMethods
from accel_callbacks.facade.tracking import TrackingMethods
from accel_callbacks.facade.uneven import UnevenMethods
from accel_callbacks.loop.accumulation import GradientWindow
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.plugins.base import KwargsHandler, sort_handlers
from accel_callbacks.plugins.compile import DynamoBackend, TorchDynamoPlugin
from accel_callbacks.plugins.gradient_accumulation import GradientAccumulationPlugin, chosen_steps
from accel_callbacks.plugins.process_group import group_options
from accel_callbacks.plugins.unknown import unknown_option
from accel_callbacks.precision import create_precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.strategies import create_strategy
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["Accelerator"]


class Accelerator(
    ModelMethods,
    UnevenMethods,
    LoadingMethods,
    StepMethods,
    GatherMethods,
    SavingMethods,
    ResumingMethods,
    RegisteringMethods,
    ControlMethods,
    TrackingMethods,
    CallingMethods,
    RunningMethods,
):
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
        project_dir: str | os.PathLike[str] | None = None,
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
        self.dataloader_config = checked_config(dataloader_config)
        self.rng_types = checked_rng_types(rng_types)
        self._dispatch = Dispatcher(callbacks)
        self.handlers = launched_handlers(sort_handlers(kwargs_handlers), self.config)
        self.dynamo_plugin = launched_plugin(dynamo_backend, dynamo_plugin, self.config)
        group = group_options(self.handlers, timeout)
        self.topology = resolve_topology(cpu=self.config.cpu, anew=True, **group)
        self._scheduler_options: dict[str, Any] = {
            "step_with_optimizer": step_scheduler_with_optimizer,
            "steps_at_once": self.topology.world_size if scheduler_steps_per_process else 1,
        }
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
        self._one_over: dict[Any, torch.Tensor] = {}
        self.registered = Registered()
        self.pre_hooks = PreHooks()
        self.loop = Loop(
            TrainingRun(self), self._dispatch, self.window, self.models, self.optimizers
        )
        self.tracking = Tracking(
            _as_list(log_with),
            self.project_configuration.log_folder,
            is_main_process=self.is_main_process,
            strict=strict_trackers,
            config=tracker_config,
        )

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks, in the order in which they were given."""
        return self._dispatch.callbacks

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.topology.distributed_type

    @property
    def project_dir(self) -> str:
        """The folder of the run's logs and checkpoints."""
        return self.project_configuration.root

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

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> model = torch.nn.Linear(1, 1)
            >>> Accelerator(cpu=True).prepare(model, "anything")[1]
            'anything'
        """
        self._meet(self.loop.run)
        places = device_placement
        if places is None or isinstance(places, bool):
            places = [places] * len(args)
        if len(places) != len(args):
            raise ValueError(f"device_placement has {len(places)} entries for {len(args)} objects.")
        ready: dict[int, Any] = {}
        kinds: tuple[tuple[type, Callable[[Any, bool | None], Any]], ...] = (
            (torch.nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
            (SkipDataLoader, self.prepare_data_loader),
        )
        # Optimizers and schedulers refer to what is prepared before them.
        for kind, prepare_one in kinds:
            for item, place in zip(args, places, strict=True):
                if isinstance(item, kind):
                    ready[id(item)] = prepare_one(item, place)
        for item in args:
            if id(item) not in ready:
                ready[id(item)] = self.prepare_scheduler(item) if _is_scheduler(item) else item
        result = tuple(ready[id(item)] for item in args)
        return result[0] if len(result) == 1 else result

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; see :meth:`prepare`. Its state goes where the parameters are."""
        if isinstance(optimizer, AcceleratedOptimizer):  # another Accelerator's is prepared anew
            optimizer = optimizer.optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        prepared = AcceleratedOptimizer(optimizer, self.loop, self.precision)
        self.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler; see :meth:`prepare`."""
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
        for known in self.schedulers:
            if known.scheduler is scheduler:
                return known
        inner = scheduler.optimizer
        if isinstance(inner, AcceleratedOptimizer):
            inner = inner.optimizer
        own = [optimizer for optimizer in self.optimizers if inner is optimizer.optimizer]
        if not own:
            raise ValueError(
                f"the optimizer of {type(scheduler).__name__} is not prepared: pass it to "
                "prepare() before the scheduler, or together with it."
            )
        prepared = AcceleratedScheduler(scheduler, own, self.loop, **self._scheduler_options)
        self.schedulers.append(prepared)
        return prepared


def _as_list(log_with: Any) -> list[Any]:
    if log_with is None:
        return []
    return list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]


def _is_scheduler(item: Any) -> bool:
    if isinstance(item, AcceleratedScheduler):
        return True
    return all(hasattr(item, name) for name in ("optimizer", "step", "state_dict"))
