"""What a foreign trainer must tell and do; our run over it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.votes import Votes

__all__ = ["Host", "Missing", "NotInAPlainLoop", "Part", "RunView"]

_FP = {"16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}


class Host(ABC):
    """One trainer, as :class:`RunView` asks it; a subclass for each library.

    Example:
        >>> from accel_callbacks.integrations.host import Host
        >>> "stop" in Host.__abstractmethods__
        True
    """

    #: What an error calls the trainer.
    title: str
    #: Whether the trainer can be asked to save.
    can_save = False

    @abstractmethod
    def get(self, name: str) -> Any:
        """An attribute of ``TrainingRun`` that tells where it stands; KeyError for others.

        At least global_step, current_epoch, max_epochs, num_training_batches, num_val_batches,
        num_test_batches, is_last_batch, resumed_from, precision and accumulate_grad_batches.
        """

    @abstractmethod
    def models(self) -> list[torch.nn.Module]:
        """The models that are trained, as the user built them."""

    @abstractmethod
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, without wrappers."""

    @abstractmethod
    def schedulers(self) -> list[Any]:
        """The schedulers of the learning rate."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """The last values by name; what is set in it stays."""

    @abstractmethod
    def device(self) -> torch.device:
        """Where this process computes."""

    @abstractmethod
    def log(self, values: dict[str, Any], step: int) -> None:
        """To the trackers that the trainer has."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Ask the trainer to stop; called on all processes."""

    def save_now(self, reason: str) -> None:
        """Ask the trainer to save, where it ``can_save``; called on all processes."""
        raise NotImplementedError(f"{self.title} cannot be asked to save")

    @abstractmethod
    def accumulate(self, batches: int) -> None:
        """Set the micro-batches of a step."""


class NotInAPlainLoop(AttributeError):
    """A callback asks for something that only the Trainer of its own world has.

    It is an ``AttributeError`` too, so that ``hasattr`` and ``getattr`` with a default work.

    Example:
        >>> from accel_callbacks.callbacks.adapters import NotInAPlainLoop
        >>> issubclass(NotInAPlainLoop, AttributeError)
        True
    """


class Missing:
    """Says who asks for what: the callback's name, and how the error ends.

    Example:
        >>> from accel_callbacks.integrations.host import Missing
        >>> str(Missing("Mine")("trainer.fit_loop.x"))
        'Mine needs trainer.fit_loop.x, which only pl.Trainer has'
    """

    def __init__(self, who: str, owner: str = "pl.Trainer") -> None:
        self.who = who
        self.owner = owner

    def __call__(self, what: str) -> NotInAPlainLoop:
        """The error to raise."""
        return NotInAPlainLoop(f"{self.who} needs {what}, which only {self.owner} has")


class Part:
    """A stand-in for a part of the Trainer: what it does not have is an error that names it.

    Example:
        >>> from accel_callbacks.integrations.host import Missing, Part
        >>> part = Part("trainer.fit_loop", Missing("Mine"), max_epochs=3)
        >>> part.max_epochs, hasattr(part, "restarting")
        (3, False)
    """

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


class RunView:
    """The public names of :class:`TrainingRun` over a :class:`Host`; the rest is a named error.

    Args:
        host: the trainer.
        who: the callback's name, for errors.
        logged: called with what the callback logs, for its ``on_log``.

    Attributes:
        name: ``"run"``.
        run_id: a random name.
        epoch_open: an epoch has begun and not ended.
        batch_idx: index of the training batch in its epoch, -1 before the first.
        step: overrides ``global_step`` while the trainer has not counted a step yet.
        evaluating: evaluations that are open.
        votes: what this process has asked for, and not all have agreed on yet.

    Example:
        >>> from accel_callbacks.integrations.host import RunView
        >>> RunView.data_wait_s, RunView.preempted
        (0.0, False)
    """

    name = "run"
    data_wait_s = 0.0
    exit_code = None
    interrupted = False
    preempted = False
    sanity_checking = False
    fast_dev_run = False

    def __init__(self, host: Host, who: str, logged: Callable[[dict[str, Any], int], None]) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.config: dict[str, Any] = {}
        self.host = host
        self.step: int | None = None
        self.begin()
        self._logged = logged
        self._missing = Missing(who, "accel.run")
        self.accelerator = _accelerator(self, self._missing)

    def begin(self) -> None:
        """A run begins: nothing of an earlier one is left."""
        self.epoch_open = False
        self.batch_idx = -1
        self.evaluating = 0
        self.stop_reason: str | None = None
        self.votes = Votes()

    def __getattr__(self, name: str) -> Any:
        known = vars(self)
        if name.startswith("__") or "accelerator" not in known:
            raise AttributeError(name)
        try:
            return known["host"].get(name)
        except KeyError:
            raise known["_missing"](f"run.{name}") from None

    # --- where it stands ----------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return int(self.host.get("global_step")) if self.step is None else self.step

    @property
    def begins_anew(self) -> bool:
        """In ``setup``: nothing was loaded and nothing trained."""
        return self.resumed_from is None and self.global_step == 0

    @property
    def epochs_done(self) -> int:
        """Training epochs finished."""
        begun = self.batch_idx >= 0 or self.epoch_open
        epoch = int(self.host.get("current_epoch"))
        return epoch + int(begun and not self.epoch_open)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The last values by name."""
        return self.host.metrics()

    logged_metrics = callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The numbers among them, on the host."""
        kinds = (torch.Tensor, int, float)
        return {n: float(v) for n, v in self.callback_metrics.items() if isinstance(v, kinds)}

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step; settable."""
        return int(self.host.get("accumulate_grad_batches"))

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.host.accumulate(value)

    # --- the parts ----------------------------------------------------------------------------

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that are trained."""
        return self.host.models()

    @property
    def model(self) -> torch.nn.Module | None:
        """The first of them."""
        return next(iter(self.models), None)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return self.host.optimizers()

    @property
    def loggers(self) -> list[Any]:
        """No trackers of ours."""
        return []

    @property
    def logger(self) -> None:
        """No tracker of ours."""
        return None

    # --- the processes ------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return collectives.world_size()

    @property
    def global_rank(self) -> int:
        """Index of this process."""
        return collectives.rank()

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return collectives.rank() == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the main process."""
        if self.is_global_zero:
            print(*args, **kwargs)

    # --- asking -------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """All processes stop; set it to True to ask for it."""
        return self.stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop()

    def stop(self, reason: str = "requested") -> None:
        """Ask the trainer to stop: at once, or with several processes once they have voted."""
        self._ask("stop", reason)

    def save_now(self, reason: str = "requested") -> None:
        """Ask the trainer to save."""
        if not self.host.can_save:
            raise self._missing("run.save_now")
        self._ask("save", reason)

    def _ask(self, kind: str, reason: str) -> None:
        self.votes.ask(kind, reason)
        if collectives.world_size() == 1:
            self.agree()

    def agree(self) -> None:
        """Collective: the trainers of all processes do what any process asked for."""
        agreed = {kind: reason for kind, (reason, _) in self.votes.agree().items()}
        if "save" in agreed:
            self.host.save_now(agreed["save"])
        if "stop" in agreed:
            if self.stop_reason is None:
                self.stop_reason = agreed["stop"]
                self.print(f"[accel] stop at step {self.global_step}: {self.stop_reason}")
            self.host.stop(agreed["stop"])

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """``accel.log``: to the trainer's trackers, its metrics and ``on_log``."""
        from loggers import flatten

        flat = dict(flatten(values))
        step = self.global_step if step is None else step
        self.host.log(flat, step)
        self.host.metrics().update(flat)
        self._logged(flat, step)


class _Accelerator(Part):
    """What callbacks ask of ``run.accelerator`` and is not the Accelerator's own business."""

    _run: RunView

    @property
    def device(self) -> torch.device:
        return self._run.host.device()

    @property
    def is_main_process(self) -> bool:
        return self._run.is_global_zero

    @property
    def process_index(self) -> int:
        return self._run.global_rank

    @property
    def num_processes(self) -> int:
        return self._run.world_size

    @property
    def mixed_precision(self) -> str:
        return _FP.get(str(self._run.precision), "no")

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._run.accumulate_grad_batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._run.accumulate_grad_batches = value

    @property
    def models(self) -> list[torch.nn.Module]:
        return self._run.models

    bare_models = models

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._run.optimizers

    @property
    def schedulers(self) -> list[Any]:
        return self._run.host.schedulers()

    @property
    def current_run(self) -> RunView:
        return self._run

    @property
    def loop(self) -> Part:
        return Part(
            "run.accelerator.loop",
            self._missing,
            evaluating=self._run.evaluating,
            epochs_counted=True,
            active=(self._run.host,),
        )

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._run.log(values, step)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._run.print(*args, **kwargs)


def _accelerator(run: RunView, missing: Missing) -> Any:
    """The view; gradients are those of the trainer, which scales and averages them itself."""
    path = "run.accelerator"
    normalizer = Part(f"{path}.window.normalizer", missing, active=False)
    window = Part(f"{path}.window", missing, correction=1.0, is_open=False, normalizer=normalizer)
    return _Accelerator(
        path, missing, _run=run, window=window, sync_gradients=False, trackers=[], scaler=None
    )
