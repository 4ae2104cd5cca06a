"""ForeignHost: another library's trainer as the host of a run, for our callbacks in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "FROM_TRAINER",
    "ForeignHost",
    "ForeignLoop",
    "ForeignRun",
    "Missing",
    "NotInAPlainLoop",
    "Part",
]

_PRECISION = {"16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}


class NotInAPlainLoop(AttributeError):
    """A callback uses an attribute that only its own trainer has.

    A subclass of ``AttributeError``, so that ``hasattr`` and ``getattr`` with a default work.

    Example:
        >>> from accel_callbacks.callbacks.adapters import NotInAPlainLoop
        >>> issubclass(NotInAPlainLoop, AttributeError)
        True
    """


class Missing:
    """Build the error for a missing attribute, with the callback's name and the owner's."""

    def __init__(self, who: str, owner: str = "pl.Trainer") -> None:
        self.who = who
        self.owner = owner

    def __call__(self, attribute: str) -> NotInAPlainLoop:
        """Return the error to raise."""
        return NotInAPlainLoop(f"{self.who} needs {attribute}, which only {self.owner} has")


class Part:
    """A stand-in for a part of the Trainer; an attribute that it lacks raises a named error."""

    def __init__(self, path: str, missing: Missing, **values: Any) -> None:
        vars(self).update(values, _path=path, _missing=missing)

    def __getattr__(self, name: str) -> Any:
        known = vars(self)
        if name.startswith("__") or "_path" not in known:
            raise AttributeError(name)
        raise known["_missing"](f"{known['_path']}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        settable = getattr(type(self), name, None)
        if not (isinstance(settable, property) and settable.fset is not None):
            raise self._missing(f"to set {self._path}.{name}")
        object.__setattr__(self, name, value)


class ForeignLoop:
    """The loop of another library's trainer; see `accel_callbacks.loop.host.HostLoop`.

    The trainer averages and unscales gradients itself: in our hooks they have their true size.

    Args:
        host: the trainer.

    Attributes:
        evaluating: number of open evaluations.
    """

    epochs_counted = True
    iterating = True
    in_window = False
    in_lockstep = True
    # Missing here, as any other name: the run reads the loaders from the trainer.
    train_loader: Any
    validation_loaders: Sequence[Any]
    test_loaders: Sequence[Any]

    def __init__(self, host: ForeignHost) -> None:
        self._host = host
        self.evaluating = 0

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or "_host" not in vars(self):
            raise AttributeError(name)
        raise self._host.missing(f"run.accelerator.loop.{name}")

    @property
    def model(self) -> torch.nn.Module | None:
        """The first model."""
        return next(iter(self._host.bare_models), None)

    @property
    def phase(self) -> str:
        """``"train"`` outside of evaluations, ``"validation"`` inside."""
        return "validation" if self.evaluating else "train"

    @property
    def savers(self) -> list[Any]:
        """Return none: callbacks that save are refused in another trainer."""
        return []

    def gradient_scale(self) -> float:
        """Return 1.0."""
        return 1.0

    def next_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the step after those that the trainer has counted."""
        return self._host.current_run.global_step + 1


class ForeignHost(ABC):
    """A trainer behind the interface of `accel_callbacks.loop.host.Host`; one subclass a library.

    It is ``run.accelerator`` in that trainer; names of the Accelerator that it lacks raise
    :class:`NotInAPlainLoop`.

    Attributes:
        title: the trainer's name, for messages.
        can_save: True if ``save_now`` works.
        current_run: the run over this host.
        missing: builds the error for a missing name.
    """

    title: str
    can_save = False
    current_run: ForeignRun
    missing = Missing("a callback", "accel.run")
    scaler = None
    sync_gradients = False
    # Missing here, as any other name: the trainer has its own epochs, loaders and checkpoints.
    passes: Any
    loaders: Sequence[Any]
    save_state: Callable[[str], str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "current_run":
            raise AttributeError(name)
        raise self.missing(f"run.accelerator.{name}")

    # --- for subclasses to implement ----------------------------------------------------------

    @abstractmethod
    def get(self, name: str) -> Any:
        """Return an attribute of ``TrainingRun``; raise KeyError for an unknown one.

        At least global_step, current_epoch, max_epochs, num_training_batches, num_val_batches,
        num_test_batches, is_last_batch, resumed_from, precision and accumulate_grad_batches.
        """

    @property
    @abstractmethod
    def bare_models(self) -> list[torch.nn.Module]:
        """The models that are trained, as the user built them."""

    @property
    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, without wrappers."""

    @property
    @abstractmethod
    def schedulers(self) -> list[Any]:
        """The learning-rate schedulers."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return the last values by name, in a dict that keeps what is set in it."""

    @abstractmethod
    def write(self, values: dict[str, Any], step: int) -> None:
        """Write values to the trainer's own loggers."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ask the trainer to stop; called on all ranks."""

    @abstractmethod
    def accumulate(self, batches: int) -> None:
        """Set the number of micro-batches of a step."""

    def save_now(self, reason: str) -> None:
        """Ask the trainer to save, if it ``can_save``; called on all ranks."""
        raise NotImplementedError(f"{self.title} cannot be asked to save")

    def settings(self) -> dict[str, Any]:
        """Return what a tracker records of the trainer's settings: nothing, unless overridden."""
        return {}

    def save_last(self) -> None:
        """Ask the trainer to save what a run that is preempted resumes from."""
        self.save_now("preempt")

    # --- the rest of the Host interface -------------------------------------------------------

    @property
    def loop(self) -> ForeignLoop:
        """The state of the trainer's loop."""
        return self.current_run.loop

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that are trained."""
        return self.bare_models

    @property
    def callbacks(self) -> list[Any]:
        """The trainer's callbacks."""
        return list(self.current_run.callbacks)

    @property
    def trackers(self) -> list[Any]:
        """Return none: the trainer has its own loggers."""
        return []

    @property
    def mixed_precision(self) -> str:
        """The precision as the Accelerator names it."""
        return _PRECISION.get(str(self.current_run.precision), "no")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step; settable."""
        return int(self.get("accumulate_grad_batches"))

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulate(value)

    @property
    def project_dir(self) -> str:
        """The trainer's folder."""
        return str(self.current_run.default_root_dir)

    @property
    def logging_dir(self) -> str:
        """The folder of the trainer's loggers."""
        return str(self.current_run.log_dir)

    @property
    def topology(self) -> Topology:
        """The rank and the world size."""
        rank, world = collectives.rank(), collectives.world_size()
        return Topology(self.device, rank=rank, world_size=world)

    @property
    def data_world(self) -> int:
        """Number of ranks that read different data: all of them, as far as is known here."""
        return collectives.world_size()

    @property
    def process_index(self) -> int:
        """The rank."""
        return collectives.rank()

    @property
    def num_processes(self) -> int:
        """The world size."""
        return collectives.world_size()

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return collectives.rank() == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*args, **kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log to the trainer's loggers, its metrics and ``on_log``; see ``Accelerator.log``."""
        from loggers import flatten

        run, flat = self.current_run, dict(flatten(values))
        step = run.global_step if step is None else step
        self.write(flat, step)
        self.metrics().update(flat)
        run.metric_origins.update(dict.fromkeys(flat, "callback"))
        run.logged(flat, step)


class _FromTrainer:
    """An attribute of :class:`TrainingRun` that the trainer has, or that is missing there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: ForeignRun | None, owner: type) -> Any:
        return self if run is None else run.ask_trainer(self._name)

    def __set__(self, run: ForeignRun, value: Any) -> NoReturn:
        raise AttributeError(f"run.{self._name} belongs to the trainer and cannot be set")


#: Attributes of :class:`TrainingRun` that are those of the trainer.
FROM_TRAINER = (
    "callbacks",
    "checkpoint_callback",
    "checkpoint_callbacks",
    "ckpt_path",
    "current_epoch",
    "default_root_dir",
    "early_stopping_callback",
    "early_stopping_callbacks",
    "estimated_stepping_batches",
    "is_last_batch",
    "local_rank",
    "log_dir",
    "max_epochs",
    "max_steps",
    "node_rank",
    "num_devices",
    "num_nodes",
    "num_test_batches",
    "num_training_batches",
    "num_val_batches",
    "precision",
    "predicting",
    "resumed_from",
    "test_dataloaders",
    "testing",
    "train_dataloader",
    "training",
    "val_dataloaders",
    "validating",
)
#: Those that only ``accel.run`` has: to use one is an error that names it.
_ONLY_IN_RUN = (
    "awaits_training",
    "end_epoch",
    "epochs",
    "load_state_dict",
    "save_checkpoint",
    "skip_step",
    "start_over",
    "state_dict",
)


class ForeignRun(TrainingRun):
    """The run of another library's trainer: the public names of :class:`TrainingRun`.

    The position and the metrics are read from the trainer at each access.

    Args:
        host: the trainer.
        who: the callback's name, for errors.
        logged: called with the values that the callback logs, and their step.

    Attributes:
        uncounted_step: overrides ``global_step`` while the trainer has not counted a step yet.
    """

    _host: ForeignHost

    def __init__(
        self, host: ForeignHost, who: str, logged: Callable[[dict[str, Any], int], None]
    ) -> None:
        # Not super().__init__: it assigns the position, which is read-only here.
        vars(self).update(vars(TrainingRun(host)), logged=logged)
        self.begin()
        host.current_run = self
        host.missing = Missing(who, "accel.run")

    def begin(self) -> None:
        """Reset at the start of a training; the id stays."""
        super().start_over()
        self.loop = ForeignLoop(self._host)
        self.uncounted_step: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_host" not in vars(self):
            raise AttributeError(name)
        return self.ask_trainer(name)

    def ask_trainer(self, name: str) -> Any:
        """Return the trainer's attribute of this name.

        Raises:
            NotInAPlainLoop: the trainer has none.
        """
        try:
            return self._host.get(name)
        except KeyError:
            raise self._host.missing(f"run.{name}") from None

    # --- position and metrics -----------------------------------------------------------------

    @property  # type: ignore[misc]
    def global_step(self) -> int:
        """Optimizer steps taken."""
        step = self.uncounted_step
        return int(self.ask_trainer("global_step")) if step is None else step

    @property
    def epochs_done(self) -> int:  # type: ignore[override]
        """Training epochs finished."""
        begun = self.batch_idx >= 0 or self.epoch_open
        return int(self.current_epoch) + int(begun and not self.epoch_open)

    @property
    def callback_metrics(self) -> dict[str, Any]:  # type: ignore[override]
        """The last values by name."""
        return self._host.metrics()

    @property
    def evaluating(self) -> bool:
        """An evaluation is open."""
        return self.open_evaluations > 0

    # --- requests -----------------------------------------------------------------------------

    def stop(self, reason: str = "requested") -> None:
        """Ask the trainer to stop: at once, or with several ranks once they have voted."""
        self._ask_for("stop", reason)

    def save_now(self, reason: str = "requested") -> None:
        """Ask the trainer to save."""
        if not self._host.can_save:
            raise self._host.missing("run.save_now")
        self._ask_for("save", reason)

    def preempt(self, reason: str = "requested") -> None:
        """Ask the trainer to save and stop at the end of a step, where it can save."""
        if not self._host.can_save:
            raise self._host.missing("run.preempt")
        self.votes.ask("preempt", reason)

    def _ask_for(self, kind: str, reason: str) -> None:
        self.votes.ask(kind, reason)
        if collectives.world_size() == 1:
            self.agree()

    def agree(self) -> None:
        """Collective: let the trainers of all ranks do what any rank has asked for."""
        agreed = self.votes.agree()
        if "preempt" in agreed:
            self.preempted = True
            self._host.save_last()
            agreed = {"stop": agreed["preempt"], **agreed}
        if "save" in agreed:
            self._host.save_now(agreed["save"][0])
        if "stop" in agreed:
            reason, rank = agreed["stop"]
            if self.stop_reason is None:
                self._set_stop(reason, rank)
                self.print(f"[accel] stop at step {self.global_step}: {reason}")
            self._host.stop(reason)


for _name in (*FROM_TRAINER, *_ONLY_IN_RUN):
    setattr(ForeignRun, _name, _FromTrainer(_name))
