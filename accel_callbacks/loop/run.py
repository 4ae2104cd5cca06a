"""TrainingRun: position, metrics and stop of a run, also under the names of Lightning's trainer."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.votes import Votes
from accel_callbacks.loop.run_identity import RunIdentity
from accel_callbacks.strategy.base import Strategy

if TYPE_CHECKING:
    from accel_callbacks.data.loader import DataLoaderShard
    from accel_callbacks.loop.host import Host
    from loggers import Tracker

__all__ = ["RunLeft", "TrainerAttributes", "TrainingRun"]

_PRECISION = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
_log = logging.getLogger("accel_callbacks")


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

    _host: Host
    callback_metrics: dict[str, Any]
    max_epochs: int | None
    resumed_from: str | None

    # --- the parts ----------------------------------------------------------------------------

    @property
    def models(self) -> list[torch.nn.Module]:
        """The prepared models as the user built them."""
        return list(self._host.bare_models)

    @property
    def model(self) -> torch.nn.Module | None:
        """The first prepared model that has an optimizer, as the user built it."""
        return self._host.loop.model

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers, in the order of ``prepare``."""
        return list(self._host.optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """The prepared schedulers, in the order of ``prepare``."""
        return list(self._host.schedulers)

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks, in the order in which they were given."""
        return self._host.callbacks

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save."""
        return self._host.loop.savers

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves, ``None`` without one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The ``EarlyStopping`` callbacks."""
        return [
            callback for callback in self.callbacks if getattr(callback, "is_early_stopping", False)
        ]

    @property
    def early_stopping_callback(self) -> Any:
        """The first ``EarlyStopping``, ``None`` without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def loggers(self) -> list[Tracker]:
        """The trackers of this run; empty off the main process."""
        return self._host.trackers

    @property
    def logger(self) -> Tracker | None:
        """The first tracker, if there is one."""
        return self.loggers[0] if self.loggers else None

    # --- the data -----------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> DataLoaderShard | None:
        """The prepared loader that is trained on, or was last; ``None`` before the first pass."""
        loader: DataLoaderShard | None = self._host.loop.train_loader
        return loader

    @property
    def val_dataloaders(self) -> list[DataLoaderShard]:
        """The prepared loaders that validation has iterated, in the order of their first use."""
        return list(self._host.loop.validation_loaders)

    @property
    def test_dataloaders(self) -> list[DataLoaderShard]:
        """The prepared loaders that a test has iterated."""
        return list(self._host.loop.test_loaders)

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
        return self._host.loop.phase == "train"

    @property
    def validating(self) -> bool:
        """A loader that is iterated now would count as validation."""
        return self._host.loop.phase == "validation"

    @property
    def testing(self) -> bool:
        """Inside of ``accel.evaluate(stage="test")``."""
        return self._host.loop.phase == "test"

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

    @property
    def open_evaluations(self) -> int:
        """Number of open evaluations; validation inside of a test counts both."""
        return self._host.loop.evaluating

    @property
    def iterating(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self._host.loop.iterating

    # --- the gradients of the next step ---------------------------------------------------------

    @property
    def in_window(self) -> bool:
        """True between the micro-batches of one gradient window."""
        return self._host.loop.in_window

    @property
    def in_lockstep(self) -> bool:
        """False where ranks take unequal numbers of steps, so that a collective would hang."""
        return self._host.loop.in_lockstep

    @property
    def gradients_complete(self) -> bool:
        """In ``on_after_backward``: no other backward follows before the step."""
        return self._host.sync_gradients

    def gradient_scale(self) -> float | torch.Tensor:
        """Collective: return the factor that brings gradients of this window to their true size."""
        return self._host.loop.gradient_scale()

    def loss_scale(self) -> torch.Tensor | None:
        """Return the loss scale of fp16 as a tensor on the device, None without one."""
        scaler = self._host.scaler
        return scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None

    def join_norms(
        self, norms: Mapping[str, torch.Tensor], norm_type: float
    ) -> dict[str, torch.Tensor]:
        """Return the norms of gradients here, with those of layers that other ranks have.

        Args:
            norms: by name; those of one name are parts of one.
            norm_type: the ``p`` of the norms.
        """
        strategy = getattr(self._host, "strategy", None)
        if isinstance(strategy, Strategy):
            return strategy.gradients.join_norms(norms, norm_type)
        return dict(norms)

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the global step, from 1, that an optimizer takes next."""
        return self._host.loop.next_step(optimizer)

    # --- options and places -------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of one optimizer step; a new number counts from the next window on."""
        return self._host.gradient_accumulation_steps

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._host.gradient_accumulation_steps = value

    @property
    def precision(self) -> str:
        """In Lightning's words: ``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"`` (or ``"fp8"``)."""
        name = self._host.mixed_precision
        return _PRECISION.get(name, name)

    @property
    def default_root_dir(self) -> str:
        """The project folder."""
        return self._host.project_dir

    @property
    def log_dir(self) -> str:
        """The folder of the trackers' files."""
        return self._host.logging_dir

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the run was resumed from."""
        return self.resumed_from

    # --- this process among the others --------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self._host.topology.rank == 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._host.topology.world_size

    @property
    def data_world(self) -> int:
        """Number of ranks that read different data."""
        return self._host.data_world

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        return self._host.topology.rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self._host.topology.local_rank

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
        return self._host.topology.local_world_size

    # --- methods ------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine only."""
        self._host.print(*args, **kwargs)

    def save_checkpoint(self, path: str) -> None:
        """Save the whole training state, as ``accel.save_state`` does; on all processes.

        Args:
            path: folder or fsspec URL.
        """
        self._host.save_state(path)


def length_of(loader: DataLoaderShard) -> int | float:
    """Return the number of batches of a loader, ``inf`` if it is unknown."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")


class _EpochCount:
    """A count of epochs, with a note on the run that it is known."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, run: TrainingRun | None, owner: type[Any] | None = None) -> int:
        if run is None:
            return cast(int, self)
        run.epoch_unknown = False
        return cast(int, vars(run)[self._name])

    def __set__(self, run: TrainingRun, epochs: int) -> None:
        vars(run)[self._name] = epochs


class TrainingRun(TrainerAttributes):
    """The state of one training run; the first argument of every hook.

    Its public attributes carry the names of Lightning's trainer, so that a callback which uses
    only those runs in both worlds.

    Args:
        host: the Accelerator, or what stands for another library's trainer.
        name: of the run.

    Attributes:
        accelerator: the Accelerator; in another library's trainer the host, which has some of its
            names.
        name: the name given to ``Accelerator.run`` (or ``"run"``).
        run_id: random name of this run that survives a resume; owns the run's checkpoints.
        global_step: optimizer steps taken; optimizers that take turns in one batch count as one
            step, and steps that fp16 skipped do not count.
        current_epoch: index of the current pass over the training data, from 0.
        first_epoch: the epoch that the next ``epochs`` begins with.
        epochs_done: training epochs finished, those before a resume included.
        epoch_unknown: a checkpoint was loaded, and none of the three was asked for since: the
            script counts by itself.
        max_epochs: what ``epochs`` was called with, or ``None``.
        batch_idx: index of the current training batch in its epoch, -1 before the first.
        num_training_batches: batches of a training epoch on this process; ``inf`` if unknown.
            Before the first pass, those of the only prepared loader that shuffles, or of the only
            one, among those that no evaluation has used.
        callback_metrics: the last value logged under each name (tensors stay on their device).
        metric_origins: whether the ``"loop"`` or a ``"callback"`` was the first to log each name.
        config: what the run was started with.
        identity: name and config as ``Accelerator.run`` got them, saved to recognize the run's
            checkpoints; ``None`` in a loop without it.
        data_wait_s: seconds that the training loop has waited for its loader, on this process.
        save_s: seconds that the training loop has waited for saves, on this process.
        noted: writes a mark into the journal; None without a journal.
        preempted: the ranks have agreed to be preempted, and the run stops.
        exit_code: set by a callback: after a preemption, the end of ``accel.run`` (or
            ``end_training``) raises ``SystemExit`` with it, once everything is closed.
        interrupted: the run ended with a ``KeyboardInterrupt``.
        votes: the requests of this rank to all ranks.
        settle_steps: counts the steps of which only the device knows whether they were skipped;
            None if there are none.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> with accel.run("demo") as run:
        ...     for epoch in run.epochs(2):
        ...         print(run.current_epoch, run.global_step)
        0 0
        1 0
    """

    current_epoch = _EpochCount()
    first_epoch = _EpochCount()
    epochs_done = _EpochCount()

    def __init__(self, host: Host, name: str = "run") -> None:
        self._host = host
        self.epoch_unknown = False
        self.accelerator: Any = host
        self.name = name
        self.run_id = uuid.uuid4().hex[:12]
        self.config: dict[str, Any] = {}
        self.identity: RunIdentity | None = None
        self._global_step = 0
        self.settle_steps: Callable[[], None] | None = None
        self.current_epoch = 0
        self.epochs_done = 0
        self.epoch_open = False
        self.max_epochs: int | None = None
        self.batch_idx = -1
        self.num_training_batches: int | float = float("inf")
        self.callback_metrics: dict[str, Any] = {}
        self.metric_origins: dict[str, str] = {}
        # Of accel.run: how many objects were prepared when it looked for a checkpoint; else None.
        self.prepared_at_start: int | None = None
        self.in_eval_mode = False  # its models are trained in eval mode
        self.resumed_from: str | None = None
        self.resumed_without_model = False  # the checkpoint holds nothing that was trained
        self.first_epoch = 0
        # The step that load_state restored, until another run takes it over.
        self.loaded_step: int | None = None
        self.data_wait_s = 0.0
        self.save_s = 0.0
        self.noted: Callable[..., None] | None = None
        self.save_began: float | None = None  # start of the newest save, by time.perf_counter()
        self.preempted = self.interrupted = False
        self.exit_code: int | None = None
        self.votes = Votes()
        self.may_skip = False
        self.skip_reason: str | None = None
        self._stop_reason: str | None = None
        self._stop_rank = 0
        self._left = False

    def start_over(self) -> None:
        """Reset the position for another training; name, id and config stay."""
        if self.settle_steps is not None:
            self.settle_steps()
        # In place, because callbacks and the user's `with` block hold this very object.
        names = ("run_id", "config", "identity", "noted")
        kept = {name: getattr(self, name) for name in names}
        vars(self).update({**vars(TrainingRun(self._host, self.name)), **kept})

    @property
    def global_step(self) -> int:
        """Optimizer steps taken; waits for the device where only that knows about the last one."""
        if self.settle_steps is not None:
            self.settle_steps()
        return self._global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        if self.settle_steps is not None:
            self.settle_steps()
        self._global_step = step

    @property
    def starts_fresh(self) -> bool:
        """In ``setup``: True if nothing was loaded and no step taken, so that callbacks reset."""
        return self.resumed_from is None and self.global_step == 0

    begins_anew = starts_fresh  # the name that callbacks written for earlier versions use

    @property
    def awaits_training(self) -> bool:
        """True if a checkpoint was loaded, and no step was taken since."""
        return self.loaded_step == self.global_step

    # --- stopping -----------------------------------------------------------------------------

    def stop(self, reason: str = "requested") -> None:
        """Ask the run to stop, from any process; all processes stop at the same step.

        With one process it takes effect after the batch, or the gradient window that is open.
        With several, the request is put to the vote at the next step boundary (where a callback
        declares ``can_vote``), on which the ranks act one step later, or at the epoch's end.

        Args:
            reason: shown at the end of the run and kept in :attr:`stop_reason`.
        """
        # One rank needs no vote, and a stop must work where no callback may vote.
        if collectives.world_size() == 1:
            self._set_stop(reason, 0)
        else:
            self.votes.ask("stop", reason)

    def save_now(self, reason: str = "requested") -> None:
        """Ask for a checkpoint at the next step boundary, from any process.

        Every callback that saves does so, on all processes at the same step; with several
        processes, as for :meth:`stop`, where a callback declares ``can_vote``, or at the end of
        the epoch. Without such a callback there is a warning.

        Args:
            reason: given to the callbacks that save.
        """
        self.votes.ask("save", reason)

    def preempt(self, reason: str = "requested") -> None:
        """Ask all ranks to be preempted: ``on_preempt`` fires on all of them, then the run stops.

        It takes effect where :meth:`save_now` does. May be called in a signal handler.

        Args:
            reason: given to ``on_preempt``, and the :attr:`stop_reason`.
        """
        self.votes.ask("preempt", reason)

    def _set_stop(self, reason: str, rank: int) -> None:
        """Stop, as all ranks have agreed; the first reason is kept."""
        if self._stop_reason is None:
            self._stop_reason, self._stop_rank = reason, rank

    @property
    def should_stop(self) -> bool:
        """True once all processes agreed to stop. Assigning ``True`` is a request to stop."""
        return self._stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop()
        else:
            self.votes.withdraw("stop")
            self._stop_reason = None

    @property
    def stop_reason(self) -> str | None:
        """Why the run stopped early, ``None`` while it has not."""
        return self._stop_reason

    @property
    def stop_rank(self) -> int:
        """The process that asked for the stop."""
        return self._stop_rank

    def note(self, kind: str, **facts: Any) -> None:
        """Write a mark into the journal of the run, on rank 0; without a journal, do nothing.

        Args:
            kind: of the mark, such as ``"rollback"``.
            facts: JSON values.
        """
        if self.noted is not None:
            self.noted(kind, **facts)

    def end_epoch(self, reason: str = "requested") -> None:
        """Ask to leave out the rest of this epoch's training data; its validation follows.

        With one process, in ``on_train_batch_start``, the batch is left out already. Otherwise the
        epoch ends at the next step boundary; with several processes it is put to the vote there,
        as for :meth:`stop`.

        Args:
            reason: written to the log ``"accel_callbacks"``.
        """
        _log.info("epoch %s is to end: %s", self.current_epoch, reason)
        self.votes.ask("end_epoch", reason)

    def skip_step(self, reason: str = "requested") -> None:
        """Leave this optimizer step out; inside of ``on_before_optimizer_step``, on all processes.

        The gradients stay until ``zero_grad``; the optimizer's ``step_was_skipped`` is True,
        ``global_step`` does not count it, and its scheduler does not move.

        Args:
            reason: written to the log ``"accel_callbacks"``.

        Raises:
            RuntimeError: no optimizer is about to step.
        """
        if not self.may_skip:
            raise RuntimeError("run.skip_step: call it in the hook on_before_optimizer_step.")
        if self.skip_reason is None:
            self.skip_reason = reason
            _log.warning("the step after step %s is left out: %s", self.global_step, reason)

    @property
    def _end_status(self) -> str:
        """The status for trackers of a run that ends without an error."""
        return "interrupted" if self.preempted else "success"

    def _leave(self) -> None:
        """End the script after a preemption, with the exit code that a callback has set."""
        if self.preempted and self.exit_code is not None and not self._left:
            self._left = True
            raise SystemExit(self.exit_code)

    # --- epochs and state ---------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs up to ``total``; resumes at the right one, ends early on a stop.

        Args:
            total: number of epochs of the whole run, those before a resume included.

        Yields:
            The index of the epoch, from 0.
        """
        return self._host.passes.epochs(total)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for a resume."""
        known: dict[str, Any] = (
            {} if self.identity is None else {"identity": self.identity.state_dict()}
        )
        if self.in_eval_mode:
            known["in_eval_mode"] = True
        unknown = self.epoch_unknown
        state = {
            **known,
            "name": self.name,
            "run_id": self.run_id,
            "global_step": self.global_step,
            "current_epoch": self.current_epoch,
            "epochs_done": self.epochs_done,
            "epoch_open": self.epoch_open,
            "batch_idx": self.batch_idx,
            "metrics": {
                name: value.item() if isinstance(value, torch.Tensor) else value
                for name, value in self.callback_metrics.items()
            },
        }
        self.epoch_unknown = unknown  # a save does not tell the script
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved position."""
        self.run_id = state["run_id"]
        self.global_step = state["global_step"]
        self.current_epoch = state["current_epoch"]
        self.epochs_done = self.first_epoch = state["epochs_done"]
        self.epoch_open = state["epoch_open"]
        self.batch_idx = state["batch_idx"]
        self.callback_metrics.update(state["metrics"])
        self.in_eval_mode = state.get("in_eval_mode", False)
        self.loaded_step = self.global_step


class RunLeft(SystemExit):
    """Unwinds the script to the end of ``accel.run``, which ends it as preempted.

    A SystemExit, so that no handler of errors in the script takes it for one.

    Args:
        reason: of the preemption.
        rank: the one that asked for it.
        go_back: called once the script is unwound, to return to the state that is saved.
    """

    def __init__(self, reason: str, rank: int, go_back: Callable[[], None]) -> None:
        super().__init__(reason)
        self.reason, self.rank, self.go_back = reason, rank, go_back
