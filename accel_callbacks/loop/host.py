"""Host: the interface between a run and the trainer that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from accel_callbacks.distributed.topology import Topology

__all__ = ["Host", "HostLoop", "HostPasses"]


class HostLoop(Protocol):
    """The loop of a host: which loaders are in use, and where it is between two steps.

    `accel_callbacks.loop.loop.Loop` is the one of the Accelerator.
    """

    @property
    def model(self) -> torch.nn.Module | None:
        """The first model as the user built it."""

    @property
    def phase(self) -> str:
        """``"train"``, ``"validation"`` or ``"test"``."""

    @property
    def evaluating(self) -> int:
        """Number of open evaluations."""

    @property
    def epochs_counted(self) -> bool:
        """True inside of ``run.epochs``."""

    @property
    def iterating(self) -> bool:
        """True while a prepared loader is being iterated."""

    @property
    def in_window(self) -> bool:
        """True between the micro-batches of one gradient window."""

    @property
    def in_lockstep(self) -> bool:
        """False in a block of ``join_uneven_inputs``, where ranks take unequal numbers of steps."""

    @property
    def train_loader(self) -> Any:
        """The loader that training has used last, None before."""

    @property
    def validation_loaders(self) -> Sequence[Any]:
        """The loaders that validations have used."""

    @property
    def test_loaders(self) -> Sequence[Any]:
        """The loaders that tests have used."""

    @property
    def savers(self) -> list[Any]:
        """The callbacks that save."""

    def gradient_scale(self) -> float | torch.Tensor:
        """Collective: the factor that brings the gradients of this window to their true size."""

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """The global step, from 1, that this optimizer takes next."""


class HostPasses(Protocol):
    """The epochs of a host; `accel_callbacks.loop.passes.Passes` are those of the Accelerator."""

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs up to ``total``."""


class Host(Protocol):
    """The trainer of a `TrainingRun`, under the names that the Accelerator gives to its parts.

    The Accelerator is one. Another library's trainer is one through
    `accel_callbacks.addons.hosts.host.ForeignHost`.
    """

    gradient_accumulation_steps: int

    @property
    def loop(self) -> HostLoop:
        """The loop that fires the hooks."""

    @property
    def passes(self) -> HostPasses:
        """The epochs."""

    @property
    def bare_models(self) -> Sequence[torch.nn.Module]:
        """The models as the user built them."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that step."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """The learning-rate schedulers."""

    @property
    def loaders(self) -> Sequence[Any]:
        """The prepared loaders."""

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks."""

    @property
    def trackers(self) -> list[Any]:
        """The trackers in use on this rank."""

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16."""

    @property
    def sync_gradients(self) -> bool:
        """True where backward completes the gradients of a step, as far as the host knows."""

    @property
    def project_dir(self) -> str:
        """The folder of the run's logs and checkpoints."""

    @property
    def logging_dir(self) -> str:
        """The folder of the trackers' files."""

    @property
    def topology(self) -> Topology:
        """The place of this rank among the others."""

    @property
    def data_world(self) -> int:
        """Number of ranks that read different data."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on one rank of each machine."""

    def save_state(self, output_dir: str) -> str:
        """Save the whole training state."""
