"""What Lightning's trainer shows of itself, under the same names, for callbacks of both worlds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from accel_callbacks.data.loader import DataLoaderShard
    from loggers import Tracker

__all__ = ["TrainerAttributes"]

_PRECISION = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}


class TrainerAttributes:
    """The public attributes of Lightning's trainer that mean something in a plain loop.

    Attributes:
        sanity_checking: always False: there is no trial validation before training.
        predicting: always False.
        fast_dev_run: always False.
        max_steps: always -1, which is Lightning's "no limit".

    Example:
        >>> from accel_callbacks import Accelerator
        >>> run = Accelerator(cpu=True, mixed_precision="bf16").current_run
        >>> run.precision, run.world_size, run.is_global_zero
        ('bf16-mixed', 1, True)
    """

    sanity_checking = False
    predicting = False
    fast_dev_run = False
    max_steps = -1

    accelerator: Accelerator
    callback_metrics: dict[str, Any]
    max_epochs: int | None
    resumed_from: str | None

    # --- the parts ----------------------------------------------------------------------------

    @property
    def models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return self.accelerator.bare_models

    @property
    def model(self) -> torch.nn.Module | None:
        """The first prepared model as the user built it."""
        return self.accelerator.loop.model

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers, in the order of ``prepare``."""
        return list(self.accelerator.optimizers)

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks, in the order in which they were given."""
        return self.accelerator.callbacks

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save."""
        return self.accelerator.loop.dispatch.savers

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves, ``None`` without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The ``EarlyStopping`` callbacks."""
        from accel_callbacks.callbacks.early_stopping import EarlyStopping

        return [one for one in self.callbacks if isinstance(one, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first ``EarlyStopping``, ``None`` without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def loggers(self) -> list[Tracker]:
        """The trackers of this run; empty off the main process."""
        return self.accelerator.trackers

    @property
    def logger(self) -> Tracker | None:
        """The first tracker, if there is one."""
        return self.loggers[0] if self.loggers else None

    # --- the data -----------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> DataLoaderShard | None:
        """The prepared loader that is trained on, or was last; ``None`` before the first pass."""
        return self.accelerator.loop.loaders_seen.training

    @property
    def val_dataloaders(self) -> list[DataLoaderShard]:
        """The prepared loaders that validation has iterated, in the order of their first use."""
        return list(self.accelerator.loop.loaders_seen.validation)

    @property
    def test_dataloaders(self) -> list[DataLoaderShard]:
        """The prepared loaders that a test has iterated."""
        return list(self.accelerator.loop.loaders_seen.test)

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each of the ``val_dataloaders`` on this process; ``inf`` where unknown."""
        return [length_of(loader) for loader in self.val_dataloaders]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each of the ``test_dataloaders`` on this process; ``inf`` where unknown."""
        return [length_of(loader) for loader in self.test_dataloaders]

    @property
    def is_last_batch(self) -> bool:
        """The current training batch is the last of its epoch."""
        loader = self.train_dataloader
        return loader is not None and bool(loader.on_last)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; ``inf`` where epochs or batches are not known yet."""
        loader = self.train_dataloader
        if self.max_epochs is None or loader is None:
            return float("inf")
        batches = length_of(loader)
        if math.isinf(batches):
            return batches
        return math.ceil(batches / self.accumulate_grad_batches) * self.max_epochs

    # --- what is going on ---------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """A loader that is iterated now would be trained on."""
        return self.accelerator.loop.phase == "train"

    @property
    def validating(self) -> bool:
        """A loader that is iterated now would count as validation."""
        return self.accelerator.loop.phase == "validation"

    @property
    def testing(self) -> bool:
        """Inside of ``accel.evaluate(stage="test")``."""
        return self.accelerator.loop.phase == "test"

    @property
    def evaluating(self) -> bool:
        """``validating`` or ``testing``."""
        return not self.training

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The same as ``callback_metrics``; Lightning's other name for it."""
        return self.callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The numbers among ``callback_metrics``, on the host; this waits for the device."""
        numbers = (torch.Tensor, int, float)
        return {
            name: float(value)
            for name, value in self.callback_metrics.items()
            if isinstance(value, numbers)
        }

    # --- options and places -------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of one optimizer step; a new number counts from the next window on."""
        return self.accelerator.gradient_accumulation_steps

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.accelerator.gradient_accumulation_steps = value

    @property
    def precision(self) -> str:
        """In Lightning's words: ``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"`` (or ``"fp8"``)."""
        name = self.accelerator.mixed_precision
        return _PRECISION.get(name, name)

    @property
    def default_root_dir(self) -> str:
        """The project folder."""
        return self.accelerator.project_dir

    @property
    def log_dir(self) -> str:
        """The folder of the trackers' files."""
        return self.accelerator.project_configuration.log_folder

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the run was resumed from."""
        return self.resumed_from

    # --- this process among the others --------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.accelerator.is_main_process

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.topology.world_size

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        return self.accelerator.topology.rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self.accelerator.topology.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self.global_rank // self.num_devices

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return math.ceil(self.world_size / self.num_devices)

    @property
    def num_devices(self) -> int:
        """Processes on this machine."""
        return self.accelerator.topology.local_world_size

    # --- methods ------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine only."""
        self.accelerator.print(*args, **kwargs)

    def save_checkpoint(self, path: str) -> None:
        """Save the whole training state, as ``accel.save_state`` does; on all processes.

        Args:
            path: folder or fsspec URL.
        """
        self.accelerator.save_state(path)


def length_of(loader: DataLoaderShard) -> int | float:
    """Its batches, ``inf`` if it does not know."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
