"""Accelerator: a thin facade over the parts that do the work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.accumulation import GradientWindow
from accel_callbacks.callbacks.dispatch import Dispatcher
from accel_callbacks.config import ProjectConfiguration, resolve_config
from accel_callbacks.data.device import device_mover
from accel_callbacks.data.loader import DataLoaderShard, loader_seed, prepare_loader
from accel_callbacks.data.order import mix_seed
from accel_callbacks.facade.gathering import GatherMethods
from accel_callbacks.facade.running import RunningMethods
from accel_callbacks.facade.saving import SavingMethods
from accel_callbacks.facade.step import StepMethods
from accel_callbacks.loop import Loop
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import create_precision
from accel_callbacks.run import TrainingRun
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.state import DistributedType, resolve_topology
from accel_callbacks.strategies import create_strategy
from accel_callbacks.tracking import Tracking

__all__ = ["Accelerator"]


class Accelerator(StepMethods, GatherMethods, SavingMethods, RunningMethods):
    """Runs a plain training loop on any machine, with callbacks, trackers and checkpoints.

    All arguments are keywords. Options that are not given are taken from what ``accel launch``
    was told, and then from the defaults; ``accel.config.describe()`` says which.

    Args:
        mixed_precision: ``"no"`` (default), ``"fp16"`` or ``"bf16"``.
        gradient_accumulation_steps: micro-batches of one optimizer step, 1 by default.
        cpu: compute on the CPU even where an accelerator is there.
        device_placement: move models and batches to the device, on by default.
        log_with: names (``"jsonl"``, ``"tensorboard"``, ``"wandb"``) or instances of trackers.
        project_dir: folder of the run's logs and checkpoints.
        project_config: the same with more options; instead of ``project_dir``.
        callbacks: objects with hooks, called in this order.
        timeout: how long a collective waits for the other processes; torch's default if None.
        strict_trackers: let an error of a tracker end the run; off by default.

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
        device_placement: bool = True,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        callbacks: Iterable[Any] = (),
        timeout: timedelta | None = None,
        strict_trackers: bool = False,
    ) -> None:
        if project_config is not None and project_dir is not None:
            raise ValueError("give project_dir= or project_config=, not both.")
        explicit = {
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "cpu": cpu,
        }
        self.config = resolve_config(explicit, os.environ)
        self.project_configuration = project_config or ProjectConfiguration(project_dir)
        self.device_placement = device_placement
        self.window = GradientWindow(self.config.gradient_accumulation_steps)
        self._dispatch = Dispatcher(callbacks)
        self.topology = resolve_topology(cpu=self.config.cpu, timeout=timeout)
        self.strategy = create_strategy(self.topology)
        self.precision = create_precision(self.config.mixed_precision, self.topology.device)
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.loaders: list[DataLoaderShard] = []
        self._raw_loaders: list[DataLoader[Any]] = []
        self._one_over: dict[Any, torch.Tensor] = {}
        self.loop = Loop(
            TrainingRun(self), self._dispatch, self.window, self.models, self.optimizers
        )
        self.tracking = Tracking(
            _as_list(log_with),
            self.project_configuration.log_folder,
            is_main_process=self.is_main_process,
            strict=strict_trackers,
        )

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks, in order."""
        return list(self._dispatch.callbacks)

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.topology.distributed_type

    @property
    def project_dir(self) -> str:
        """The folder of the run's logs and checkpoints."""
        return self.project_configuration.root

    def prepare(self, *args: Any, device_placement: bool | None = None) -> Any:
        """Make objects ready for this machine, and return them in the order given.

        Models are moved to the device and wrapped for the strategy and the precision; loaders
        deliver this process's share to the device; optimizers and schedulers follow the gradient
        window. Other objects come back as they are, and so do prepared ones.

        Args:
            *args: models, optimizers, loaders, schedulers, in any order. A scheduler's optimizer
                is prepared before it or with it.
            device_placement: overrides the Accelerator's for this call.

        Returns:
            The prepared objects, as a tuple if there are several.

        Raises:
            ValueError: a loader cannot be sharded, a scheduler's optimizer is not prepared, or the
                processes were given different callbacks that vote or save.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> model = torch.nn.Linear(1, 1)
            >>> Accelerator(cpu=True).prepare(model, "anything")[1]
            'anything'
        """
        self._meet(self.loop.run)
        place = self.device_placement if device_placement is None else device_placement
        ready: dict[int, Any] = {}
        kinds: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (torch.nn.Module, lambda model: self.prepare_model(model, device_placement=place)),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, lambda loader: self.prepare_data_loader(loader, device_placement=place)),
        )
        # Optimizers and schedulers refer to what is prepared before them.
        for kind, prepare_one in kinds:
            for item in args:
                if isinstance(item, kind):
                    ready[id(item)] = prepare_one(item)
        for item in args:
            if id(item) not in ready:
                ready[id(item)] = self.prepare_scheduler(item) if _is_scheduler(item) else item
        result = tuple(ready[id(item)] for item in args)
        return result[0] if len(result) == 1 else result

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool = True
    ) -> torch.nn.Module:
        """Prepare one model; see :meth:`prepare`."""
        for known in self.models:
            if model is known or model is self.strategy.unwrap(known):
                return known
        if device_placement:
            model = model.to(self.device)
        # The precision is the model's own; a strategy's wrapper that is there already stays.
        inner = self.strategy.unwrap(model)
        ready = self.precision.wrap(inner)
        wrapped = self.strategy.wrap(ready) if model is inner else model
        self.models.append(wrapped)
        if self.loop.model is None:
            self.loop.model = self.strategy.unwrap(wrapped)
        return wrapped

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        """Prepare one optimizer; see :meth:`prepare`."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        prepared = AcceleratedOptimizer(optimizer, self.loop, self.precision)
        self.optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], *, device_placement: bool = True
    ) -> DataLoaderShard:
        """Prepare one loader; see :meth:`prepare`. With several processes, all must call it."""
        if isinstance(data_loader, DataLoaderShard):
            return data_loader
        for raw, known in zip(self._raw_loaders, self.loaders, strict=True):
            if raw is data_loader:
                return known
        # A generator may be seeded otherwise on each process; the order must be the same on all.
        seed = collectives.broadcast_object(loader_seed(data_loader))
        prepared = prepare_loader(
            data_loader,
            topology=self.topology,
            events=self.loop,
            move=device_mover(self.device) if device_placement else None,
            seed=mix_seed(seed, len(self.loaders)),
        )
        self._raw_loaders.append(data_loader)
        self.loaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one scheduler; see :meth:`prepare`."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for known in self.schedulers:
            if known.scheduler is scheduler:
                return known
        own = [
            optimizer
            for optimizer in self.optimizers
            if scheduler.optimizer in (optimizer, optimizer.optimizer)
        ]
        if not own:
            raise ValueError(
                f"the optimizer of {type(scheduler).__name__} is not prepared: pass it to "
                "prepare() before the scheduler, or together with it."
            )
        prepared = AcceleratedScheduler(scheduler, own, self.loop)
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
