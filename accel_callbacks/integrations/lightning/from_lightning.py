"""A Lightning callback called from a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.integrations.host import Missing
from accel_callbacks.integrations.lightning.checkpoint import CheckpointView
from accel_callbacks.integrations.lightning.module import module_facade
from accel_callbacks.integrations.lightning.packages import LightningPackage, bare
from accel_callbacks.integrations.lightning.trainer import TrainerFacade

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "BeginningAnew",
    "LateEpochEnd",
    "LightningAdapter",
    "from_lightning",
    "refuse_trainer_bound",
]

_REASONS = {
    "BatchSizeFinder": "it drives the Trainer's own loops; use "
    "`accel_callbacks.tuning.find_batch_size` before the run",
    "LearningRateFinder": "it drives the Trainer's own loops; use "
    "`accel_callbacks.tuning.find_learning_rate` before the run",
    "BasePredictionWriter": "it reads the Trainer's prediction loop; write what your loop predicts "
    "where you predict it",
    "StochasticWeightAveraging": "its BatchNorm statistics need another epoch that the Trainer "
    "drives, and would be silently wrong; use "
    "`accel_callbacks.callbacks.WeightAveraging`, and torch.optim.swa_utils.update_bn after it",
}
#: Hooks of which the adapter has its own, around the callback's.
_OWN = ("setup", "teardown", "on_train_epoch_end", "on_exception")
_OWN_STATE = ("on_save_checkpoint", "on_load_checkpoint")
#: Of Lightning's own callbacks only these ask for a stop in the middle of an epoch.
_STOPPERS = ("EarlyStopping", "Timer")
#: Those that are known to meet no other process.
_ALONE = ("LambdaCallback", "LearningRateMonitor", "ModelSummary", "RichModelSummary")


class BeginningAnew:
    """Notes a callback's attributes when its first run begins, and puts them back for the next.

    What the user sets between two runs stays.

    Args:
        callback: any object with a ``__dict__``.

    Example:
        >>> from types import SimpleNamespace
        >>> from accel_callbacks.integrations.lightning.from_lightning import BeginningAnew
        >>> callback = SimpleNamespace(patience=3, waited=0)
        >>> anew = BeginningAnew(callback)
        >>> anew.begin()
        >>> callback.waited = 2  # in the run
        >>> anew.end()
        >>> callback.patience = 5  # after it
        >>> anew.begin()
        >>> callback
        namespace(patience=5, waited=0)
    """

    _PLACE = "_accel_callbacks_anew"

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    @classmethod
    def of(cls, callback: Any) -> BeginningAnew:
        """That of a callback, which keeps it: the next run may have another Accelerator."""
        noted: BeginningAnew = vars(callback).setdefault(cls._PLACE, cls(callback))
        return noted

    def begin(self) -> None:
        """A run begins."""
        now = vars(self._callback)
        if self._first is not None and self._last is not None:
            for name in [name for name in now if name not in {*self._first, self._PLACE}]:
                del now[name]
            for name, value in self._first.items():
                if name in self._last and now.get(name) is self._last[name]:
                    now[name] = _copied(value)
        self._first = {name: _copied(value) for name, value in now.items() if name != self._PLACE}
        self._last = None

    def end(self) -> None:
        """The run is over."""
        self._last = dict(vars(self._callback))


def _copied(value: Any) -> Any:
    """Containers and tensors copied, everything else as it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, set, tuple):
        return type(value)(_copied(one) for one in value)
    return value


class LateEpochEnd:
    """In Lightning an epoch's end comes after its validation.

    Where ``run.epochs`` counts it does here too. In a plain loop the pass over the training data is
    the epoch, and its validation comes later: a callback that watches a metric then meets the
    epoch's end when the metric is logged, or at the latest when the next epoch begins.

    Args:
        callback: has a ``monitor`` if it watches something.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.integrations.lightning.from_lightning import LateEpochEnd
        >>> LateEpochEnd(object()).put_off(Accelerator(cpu=True).current_run)
        False
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._epoch: int | None = None

    def put_off(self, run: TrainingRun) -> bool:
        """Whether this end has to wait."""
        watches = getattr(self._callback, "monitor", None) is not None
        if not watches or run.accelerator.loop.epochs_counted:
            return False
        self._epoch = run.current_epoch
        return True

    def may_end(self, run: TrainingRun, metrics: Mapping[str, Any]) -> bool:
        """Whether what was waited for is there.

        On several processes it waits for the next epoch: not all of them need to log it.
        """
        if self._epoch is None or collectives.world_size() > 1:
            return False
        return self._callback.monitor in metrics

    def take(self) -> int | None:
        """The epoch whose end was put off, once."""
        epoch, self._epoch = self._epoch, None
        return epoch


def refuse_trainer_bound(callback: Any, package: LightningPackage) -> None:
    """Raise TypeError with the reason if a callback, or a parent of it, needs the Trainer."""
    for one in type(callback).__mro__:
        if package.owns(one) and one.__name__ in _REASONS:
            raise TypeError(
                f"{type(callback).__name__} cannot run in a plain loop: {_REASONS[one.__name__]}."
            )


def from_lightning(callback: Any, *, log_every_n_steps: int = 50) -> LightningAdapter:
    """Make a callback of Lightning one of this library; it is not changed, and runs as it is.

    ``Accelerator(callbacks=[...])`` does this by itself for callbacks of ``lightning.pytorch`` and
    ``pytorch_lightning``. The callback gets the run under the names of Lightning's Trainer, and the
    first prepared model as a LightningModule with the same parameters. Its state is saved by
    ``save_state``. ``trainer.save_checkpoint`` writes a checkpoint folder of this library.

    Args:
        callback: an instance of Lightning's ``Callback``.
        log_every_n_steps: how often a callback that asks logs, 50 by default as in Lightning's
            Trainer; 0 for never.

    Raises:
        TypeError: it is no callback of Lightning, or one that cannot work without the Trainer.

    Example:
        >>> from accel_callbacks.callbacks.adapters import from_lightning
        >>> from_lightning("EarlyStopping")
        Traceback (most recent call last):
        TypeError: 'EarlyStopping' is no instance of Lightning's Callback.
    """
    package = LightningPackage.of(callback)
    if package is None:
        raise TypeError(f"{callback!r} is no instance of Lightning's Callback.")
    refuse_trainer_bound(callback, package)
    base = package.get("callbacks.callback", "Callback")
    checkpoint = CheckpointView.needed_by(callback, base, package)
    stateful = checkpoint or _overridden(callback, "state_dict", base)
    kind = StatefulLightningAdapter if stateful else LightningAdapter
    return kind(callback, package, base, log_every_n_steps)


class LightningAdapter:
    """A callback of Lightning as one of ours; made by :func:`from_lightning`.

    Attributes:
        lightning_callback: the callback as the user made it.

    Example:
        >>> from accel_callbacks.integrations.lightning.from_lightning import LightningAdapter
        >>> LightningAdapter.runs_last
        False
    """

    runs_last = False

    def __init__(
        self, callback: Any, package: LightningPackage, base: type, log_every_n_steps: int
    ) -> None:
        self.lightning_callback = callback
        self._package = package
        own = package.owns(type(callback))
        name = type(callback).__name__
        self.state_key = str(callback.state_key)
        self.can_vote = not own or name in _STOPPERS
        self.collective = not own or name not in _ALONE
        # As in Lightning, what saves comes after what changes the state.
        self.runs_last = isinstance(callback, package.get("callbacks.checkpoint", "Checkpoint"))
        self._trainer = TrainerFacade(package, Missing(name), log_every_n_steps)
        self._module: Any = None
        self._anew = BeginningAnew.of(callback)
        self._late = LateEpochEnd(callback)
        self._set_up = self._failed = self._tested = False
        if hasattr(callback, "monitor"):
            self.on_log = self._look_at_log
            self.on_train_epoch_start = self.on_train_end = self._catch_up
        for hook in HOOKS:
            if hook not in (*_OWN, *_OWN_STATE) and _overridden(callback, hook, base):
                setattr(self, hook, self._forwarding(hook))
        self._counted = {stage: _counting_hook(self, stage) for stage in ("validation", "test")}

    def __repr__(self) -> str:
        return f"from_lightning({type(self.lightning_callback).__name__})"

    # --- calling ------------------------------------------------------------------------------

    def _forwarding(self, hook: str) -> Callable[..., None]:
        """A hook that calls the callback's own."""

        def call(run: TrainingRun, model: Any, *args: Any) -> None:
            self._before(run, model, hook)
            self._call(run, model, hook, *args)

        return call

    def _call(self, run: TrainingRun, model: Any, hook: str, *args: Any) -> None:
        """Call a hook of the callback with what Lightning would give it."""
        trainer = self._enter(run, model, hook)
        if hook == "on_before_optimizer_step" or hook == "on_before_zero_grad":
            args = tuple(bare(one) for one in args)
        with self._package.as_rank(run.global_rank):
            getattr(self.lightning_callback, hook)(trainer, self._module, *args)
        if trainer.asked_to_stop:
            trainer.asked_to_stop = False
            reason = self._reason()
            if reason is not None:
                run.stop(reason)

    def _enter(self, run: TrainingRun, model: Any, hook: str) -> TrainerFacade:
        """The trainer and the module show this run, model and hook."""
        trainer = self._trainer
        trainer.show(run, hook)
        if self._module is None or (model is not None and self._module.accel_model is not model):
            self._module = module_facade(self._package, model, trainer)
            trainer.lightning_module = self._module
        return trainer

    def _reason(self) -> str | None:
        """Why it asked for a stop; None where another process had the reason, and asks too."""
        kind = getattr(self.lightning_callback, "stopping_reason", None)
        if getattr(kind, "name", None) == "NOT_STOPPED" and collectives.world_size() > 1:
            return None
        said = getattr(self.lightning_callback, "stopping_reason_message", None)
        name = type(self.lightning_callback).__name__
        return str(said) if said else f"{name} asked for it"

    def _before(self, run: TrainingRun, model: Any, hook: str) -> None:
        """What Lightning's loops do before they call this hook."""
        counts = self._trainer.evaluated
        if hook in self._counted.values():
            counts["current"] += 1
            counts["total"] += 1
        elif hook in ("on_validation_start", "on_test_start"):
            counts["current"] = 0
        elif hook in ("on_validation_epoch_end", "on_test_epoch_end"):
            self._trainer.values.flush(run)
        if hook in ("on_train_epoch_start", "on_train_end"):
            self._catch_up(run, model)
        if hook == "on_test_start" and not self._tested:
            self._tested = True  # the Trainer's test() begins with a setup of its own
            self._enter(run, model, hook)
            self._call_setup(run, model, "test")

    # --- the life of a run --------------------------------------------------------------------

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """The callback begins anew, unless it was set up to be restored."""
        self._failed = self._tested = False
        self._late.take()
        if self._set_up:  # to be restored
            self._set_up = False
            self._enter(run, model, "setup")
            return
        self._anew.begin()
        self._call_setup(run, model, stage)

    def _call_setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        trainer = self._enter(run, model, "on_test_setup" if stage == "test" else "setup")
        with self._package.as_rank(run.global_rank):
            self.lightning_callback.setup(trainer, self._module, stage)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Log what was gathered in the epoch; in a plain loop a watched metric is waited for."""
        self._enter(run, model, "on_train_epoch_end")
        self._trainer.values.flush(run)
        if not self._late.put_off(run):
            self._call(run, model, "on_train_epoch_end")

    def _look_at_log(self, run: TrainingRun, model: Any, metrics: Any, step: int) -> None:
        """The metric that the end of the epoch was waiting for may be there now."""
        if self._late.may_end(run, metrics):
            self._catch_up(run, model)

    def _catch_up(self, run: TrainingRun, model: Any) -> None:
        """The end of the epoch that was put off."""
        epoch = self._late.take()
        if epoch is None:
            return
        self._trainer.epoch = epoch
        try:
            self._call(run, model, "on_train_epoch_end")
        finally:
            self._trainer.epoch = None

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """The run ends with an error."""
        self._failed = True
        self._call(run, model, "on_exception", exception)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """The run is over; after an error Lightning does not tear its callbacks down."""
        if not self._failed:
            self._call(run, model, "teardown", stage)
        self._anew.end()
        self._module = self._trainer.lightning_module = None


class StatefulLightningAdapter(LightningAdapter):
    """One whose callback has something to save.

    Example:
        >>> from accel_callbacks.integrations.lightning.from_lightning import (
        ...     StatefulLightningAdapter,
        ... )
        >>> hasattr(StatefulLightningAdapter, "state_dict")
        True
    """

    def __init__(
        self, callback: Any, package: LightningPackage, base: type, log_every_n_steps: int
    ) -> None:
        super().__init__(callback, package, base, log_every_n_steps)
        self._waiting: dict[str, Any] | None = None
        self._view: CheckpointView | None = None
        if CheckpointView.needed_by(callback, base, package):
            self._view = CheckpointView(callback, base, package, self.state_key)
            self.on_save_checkpoint = self._save
            self.on_load_checkpoint = self._load

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """As without a state; one that was loaded before the run began is given to it now."""
        if self._view is not None and not self._set_up:
            self._view.begin(run)
        super().setup(run, model, stage)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._give(waiting)

    def state_dict(self) -> dict[str, Any]:
        """What the callback saves; a checkpoint says by name what it cannot hold of it."""
        state = self.lightning_callback.state_dict()
        return {"callback": dict(state)} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the callback what it had saved, once it is set up."""
        state = state_dict.get("callback")
        if state is None:
            return
        if self._module is None:
            self._waiting = state
        else:
            self._give(state)

    def _give(self, state: dict[str, Any]) -> None:
        self.lightning_callback.load_state_dict(state)
        if self._view is not None:
            self._view.given()

    def _save(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """``on_save_checkpoint``."""
        assert self._view is not None
        self._view.save(run, checkpoint, partial(self._call, run, model, "on_save_checkpoint"))

    def _load(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """``on_load_checkpoint``; the callback is set up first, as in Lightning."""
        assert self._view is not None
        if self._module is None:
            self._view.begin(run)
            self._anew.begin()
            self._call_setup(run, model, "fit")
            self._set_up = True
        self._view.load(run, checkpoint, partial(self._call, run, model, "on_load_checkpoint"))


def _overridden(callback: Any, hook: str, base: type) -> bool:
    """Whether the callback has a hook of its own."""
    if hook in vars(callback):  # LambdaCallback keeps functions on the instance
        return True
    own = getattr(type(callback), hook, None)
    return own is not None and own is not getattr(base, hook, None)


def _counting_hook(adapter: LightningAdapter, stage: str) -> str:
    """The hook at which a batch of an evaluation is counted: the first that the callback has."""
    start, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
    return start if start in vars(adapter) else end
