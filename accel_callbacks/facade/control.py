"""What surrounds trainings: memory, profiles, and a flag that any process may raise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.registered import Registered
from accel_callbacks.data.loader import stop_workers
from accel_callbacks.facade.parts import Parts
from accel_callbacks.memory import release_memory
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.profiler import ProfileKwargs, profiling

__all__ = ["ControlMethods", "Trigger"]


class Trigger:
    """A flag that any process may raise, and all processes read together.

    Example:
        >>> from accel_callbacks.facade.control import Trigger
        >>> trigger = Trigger()
        >>> trigger.set()
        >>> trigger.check(), trigger.check()
        (True, False)
    """

    def __init__(self) -> None:
        self._raised = False

    def set(self) -> None:
        """Raise the flag of this process."""
        self._raised = True

    def check(self) -> bool:
        """Collective: whether a process has raised it; it is down on all afterwards."""
        raised = collectives.any_process(self._raised)
        self._raised = False
        return raised


class ControlMethods(Parts):
    """What a script calls around its loops."""

    handlers: Handlers
    registered: Registered

    @cached_property
    def _trigger(self) -> Trigger:
        return Trigger()

    @property
    def logging_dir(self) -> str:
        """The folder that trackers write to."""
        return self.project_configuration.log_folder

    @property
    def multi_device(self) -> bool:
        """True with several processes that each compute on a device of their own, not the CPU."""
        return self.use_distributed and self.device.type != "cpu"

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
        """Collective: True on all processes if one has called :meth:`set_trigger` since the last.

        Example:
            >>> from accel_callbacks import Accelerator
            >>> Accelerator(cpu=True).check_trigger()
            False
        """
        return self._trigger.check()

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
        for loader in self.loaders:
            stop_workers(loader)
        for group in (self.models, self.optimizers, self.schedulers, self.loaders):
            group.clear()
        self.registered.clear()
        self.loop.saves.free_memory()
        self.loop.forget()
        self.loop.run.start_over()
        return release_memory(*objects)

    clear = free_memory
