"""What an Accelerator is made of; the facade's mixins see it through this class."""

from __future__ import annotations

from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.project import ProjectConfiguration
from accel_callbacks.config import AcceleratorConfig
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.distributed.process_control import ProcessControl
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.loop.accumulation import GradientWindow
from accel_callbacks.loop.loop import Loop
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.optimizer import AcceleratedOptimizer
from accel_callbacks.precision import Precision
from accel_callbacks.scheduler import AcceleratedScheduler
from accel_callbacks.state import AcceleratorState, GradientState
from accel_callbacks.strategies import Strategy
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["Parts"]


class Parts(ProcessControl):
    """The parts that the facade holds; set once by ``Accelerator.__init__``."""

    config: AcceleratorConfig
    project_configuration: ProjectConfiguration
    topology: Topology
    strategy: Strategy
    precision: Precision
    window: GradientWindow
    loop: Loop
    tracking: Tracking
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[DataLoaderShard]

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.topology.device

    @property
    def current_run(self) -> TrainingRun:
        """The run that hooks are called with; there always is one."""
        return self.loop.run

    @property
    def state(self) -> AcceleratorState:
        """Where this process stands, with the options of this Accelerator."""
        return AcceleratorState.of(self.config)

    @property
    def gradient_state(self) -> GradientState:
        """A live view of the gradient window and of the loader being iterated."""
        return GradientState(self.window, self.loop)

    @property
    def bare_models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return [self.strategy.unwrap(model) for model in self.models]

    def _meet(self, run: TrainingRun) -> None:
        """Collective: one id for the run (each process has drawn one), and callbacks alike."""
        run.run_id = collectives.broadcast_object(run.run_id)
        self.loop.dispatch.check_alike()

    def _notice(self, text: str) -> None:
        """One line for the user, on the main process, beside the output of the script."""
        import sys

        if self.is_main_process:
            print(f"[accel] {text}", file=sys.stderr, flush=True)

    def _in_project(self, *names: Any) -> str:
        """A path (or URL) inside the project's folder."""
        root = self.project_configuration.root
        if not root.endswith("://"):  # "memory://" is a root, whose slashes belong to it
            root = root.rstrip("/") + "/"
        return root + "/".join(map(str, names))
