"""from_lightning: a callback of Lightning as one of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.hosts.host import Missing
from accel_callbacks.addons.lightning.checkpoint import CheckpointView
from accel_callbacks.addons.lightning.module import module_facade
from accel_callbacks.addons.lightning.packages import LightningPackage, unwrap_optimizer
from accel_callbacks.addons.lightning.trainer import TrainerFacade
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.dispatch.registration import overrides

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["AttributeReset", "DeferredEpochEnd", "LightningAdapter", "from_lightning"]

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
#: Hooks for which the adapter has methods of its own, around the callback's.
_OWN = ("setup", "teardown", "on_train_epoch_end", "on_exception")
_OWN_STATE = ("on_save_checkpoint", "on_load_checkpoint")
#: Of Lightning's own callbacks only these request a stop within an epoch.
_STOPPERS = ("EarlyStopping", "Timer")
#: Lightning's own callbacks that are known to use no collective.
_NOT_COLLECTIVE = ("LambdaCallback", "LearningRateMonitor", "ModelSummary", "RichModelSummary")


def from_lightning(callback: Any, *, log_every_n_steps: int = 50) -> LightningAdapter:
    """Wrap an unmodified callback of Lightning as one of this library.

    ``Accelerator(callbacks=[...])`` does this for callbacks of ``lightning.pytorch`` and
    ``pytorch_lightning``. The callback gets the run under the names of Lightning's Trainer, and the
    first model with an optimizer as a LightningModule with the same parameters. Its state is saved
    by ``save_state``. ``trainer.save_checkpoint`` writes a checkpoint folder of this library.

    Args:
        callback: an instance of Lightning's ``Callback``.
        log_every_n_steps: the Trainer's argument of this name, which some callbacks read, 50 by
            default as in Lightning; 0 for never.

    Raises:
        TypeError: it is not a callback of Lightning, or one that cannot run without the Trainer.

    Example:
        >>> from accel_callbacks.callbacks.adapters import from_lightning
        >>> from_lightning("EarlyStopping")
        Traceback (most recent call last):
        TypeError: 'EarlyStopping' is not an instance of Lightning's Callback.
    """
    package = LightningPackage.of(callback)
    if package is None:
        raise TypeError(f"{callback!r} is not an instance of Lightning's Callback.")
    for kind in type(callback).__mro__:
        if package.owns(kind) and kind.__name__ in _REASONS:
            raise TypeError(
                f"{type(callback).__name__} cannot run in a plain loop: {_REASONS[kind.__name__]}."
            )
    base = package.get("callbacks.callback", "Callback")
    checkpoint = CheckpointView.needed_by(callback, base, package)
    stateful = checkpoint or overrides(callback, "state_dict", base)
    adapter = StatefulLightningAdapter if stateful else LightningAdapter
    return adapter(callback, package, base, log_every_n_steps)


class LightningAdapter:
    """A callback of Lightning as one of ours; created by :func:`from_lightning`.

    Attributes:
        lightning_callback: the callback as the user created it.
    """

    runs_last = False

    def __init__(
        self, callback: Any, package: LightningPackage, base: type, log_every_n_steps: int
    ) -> None:
        self.lightning_callback = callback
        self._package = package
        written_by_user = not package.owns(type(callback))
        name = type(callback).__name__
        self.state_key = str(callback.state_key)
        self.can_vote = written_by_user or name in _STOPPERS
        self.collective = written_by_user or name not in _NOT_COLLECTIVE
        # As in Lightning, callbacks that save come after those that change the state.
        self.runs_last = isinstance(callback, package.get("callbacks.checkpoint", "Checkpoint"))
        self._trainer = TrainerFacade(package, Missing(name), log_every_n_steps)
        self._module: Any = None
        self._reset = AttributeReset.of(callback)
        self._epoch_end = DeferredEpochEnd(callback)
        self._loaded_before_setup = self._failed = self._tested = False
        # Hooks are instance attributes: one that the callback lacks must not be called at all.
        if hasattr(callback, "monitor"):
            self.on_log = self._fire_epoch_end_if_due
            self.on_train_epoch_start = self.on_train_end = self._fire_deferred_epoch_end
        for hook in HOOKS:
            if hook not in (*_OWN, *_OWN_STATE) and overrides(callback, hook, base):
                setattr(self, hook, self._hook_of(hook))
        self._counted = [self._hook_to_count(stage) for stage in ("validation", "test")]

    def __repr__(self) -> str:
        return f"from_lightning({type(self.lightning_callback).__name__})"

    # --- calling ------------------------------------------------------------------------------

    def _hook_of(self, hook: str) -> Callable[..., None]:
        """Return a hook that calls the callback's own."""

        def call(run: TrainingRun, model: Any, *args: Any) -> None:
            self._prepare(run, model, hook)
            self._call(run, model, hook, *args)

        return call

    def _call(self, run: TrainingRun, model: Any, hook: str, *args: Any) -> None:
        """Call a hook of the callback with the arguments that Lightning passes."""
        trainer = self._bind(run, model, hook)
        if hook == "on_before_optimizer_step" or hook == "on_before_zero_grad":
            args = tuple(map(unwrap_optimizer, args))
        with self._package.as_rank(run.global_rank):
            response = getattr(self.lightning_callback, hook)(trainer, self._module, *args)
        if response == -1 and hook == "on_train_batch_start":  # as of a LightningModule's own hook
            run.end_epoch(f"{type(self.lightning_callback).__name__} returned -1")
        if trainer.stop_requested:
            trainer.stop_requested = False
            reason = self._stop_reason()
            if reason is not None:
                run.stop(reason)

    def _bind(self, run: TrainingRun, model: Any, hook: str) -> TrainerFacade:
        """Return the trainer over this run and hook, with a module over this model."""
        trainer = self._trainer
        trainer.bind(run, hook)
        if self._module is None or (model is not None and self._module.accel_model is not model):
            self._module = module_facade(self._package, model, trainer)
            trainer.lightning_module = self._module
        return trainer

    def _stop_reason(self) -> str | None:
        """Return the callback's reason to stop; None if another rank has it, and requests too."""
        kind = getattr(self.lightning_callback, "stopping_reason", None)
        if getattr(kind, "name", None) == "NOT_STOPPED" and collectives.world_size() > 1:
            return None
        message = getattr(self.lightning_callback, "stopping_reason_message", None)
        name = type(self.lightning_callback).__name__
        return str(message) if message else f"{name} asked for it"

    def _prepare(self, run: TrainingRun, model: Any, hook: str) -> None:
        """Do the work of Lightning's loops before they call this hook."""
        counts = self._trainer.evaluated
        if hook in self._counted:
            counts["current"] += 1
            counts["total"] += 1
        elif hook in ("on_validation_start", "on_test_start"):
            counts["current"] = 0
        elif hook in ("on_validation_epoch_end", "on_test_epoch_end"):
            self._trainer.values.flush(run)
        if hook in ("on_train_epoch_start", "on_train_end"):
            self._fire_deferred_epoch_end(run, model)
        if hook == "on_test_start" and not self._tested:
            self._tested = True  # Trainer.test() calls setup("test") first
            self._bind(run, model, hook)
            self._call_setup(run, model, "test")

    def _hook_to_count(self, stage: str) -> str:
        """Return the hook that counts the batches of an evaluation: the first that there is."""
        start, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        return start if start in vars(self) else end

    # --- hooks with work of their own ---------------------------------------------------------

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the callback and call its ``setup``, unless a load before the run did both."""
        self._failed = self._tested = False
        self._epoch_end.pop()
        if self._loaded_before_setup:
            self._loaded_before_setup = False
            self._bind(run, model, "setup")
            return
        self._reset.start_run()
        self._call_setup(run, model, stage)

    def _call_setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        # The hook's name decides trainer.testing.
        trainer = self._bind(run, model, "on_test_setup" if stage == "test" else "setup")
        with self._package.as_rank(run.global_rank):
            self.lightning_callback.setup(trainer, self._module, stage)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Log the values of the epoch, and end it unless its validation is still to come."""
        self._bind(run, model, "on_train_epoch_end")
        self._trainer.values.flush(run)
        if not self._epoch_end.defer(run):
            self._call(run, model, "on_train_epoch_end")

    def _fire_epoch_end_if_due(self, run: TrainingRun, model: Any, metrics: Any, step: int) -> None:
        """Fire the deferred end of the epoch if the monitored metric is among these."""
        if self._epoch_end.is_due(metrics):
            self._fire_deferred_epoch_end(run, model)

    def _fire_deferred_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Fire the deferred end of an epoch, if there is one."""
        epoch = self._epoch_end.pop()
        if epoch is None:
            return
        self._trainer.epoch = epoch
        try:
            self._call(run, model, "on_train_epoch_end")
        finally:
            self._trainer.epoch = None

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Call the callback's hook, after which there is no ``teardown``."""
        self._failed = True
        self._call(run, model, "on_exception", exception)

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Call the callback's hook, except after an error, as in Lightning."""
        if not self._failed:
            self._call(run, model, "teardown", stage)
        self._reset.end_run()
        self._module = self._trainer.lightning_module = None


class StatefulLightningAdapter(LightningAdapter):
    """An adapter whose callback has a state, or edits checkpoints."""

    def __init__(
        self, callback: Any, package: LightningPackage, base: type, log_every_n_steps: int
    ) -> None:
        super().__init__(callback, package, base, log_every_n_steps)
        self._pending_state: dict[str, Any] | None = None
        self._checkpoint: CheckpointView | None = None
        if CheckpointView.needed_by(callback, base, package):
            self._checkpoint = CheckpointView(callback, base, package, self.state_key)
            self.on_save_checkpoint = self._save
            self.on_load_checkpoint = self._load

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Set the callback up, then load the state that was loaded before the run."""
        if self._checkpoint is not None and not self._loaded_before_setup:
            self._checkpoint.start_run(run)
        super().setup(run, model, stage)
        pending, self._pending_state = self._pending_state, None
        if pending is not None:
            self._load_state(pending)

    def use_state_key(self, key: str) -> None:
        """Save under another key than the callback's own, which several callbacks may have."""
        self.state_key = key
        if self._checkpoint is not None:
            self._checkpoint.key = key

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state; a save raises an error that names values it cannot hold."""
        state = self.lightning_callback.state_dict()
        return {"callback": dict(state)} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the callback's state, at once or after ``setup``."""
        state = state_dict.get("callback")
        if state is None:
            return
        if self._module is None:
            self._pending_state = state
        else:
            self._load_state(state)

    def _load_state(self, state: dict[str, Any]) -> None:
        self.lightning_callback.load_state_dict(state)
        if self._checkpoint is not None:
            self._checkpoint.state_loaded()

    def _save(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Fire ``on_save_checkpoint``."""
        assert self._checkpoint is not None
        self._checkpoint.save(
            run, checkpoint, partial(self._call, run, model, "on_save_checkpoint")
        )

    def _load(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Fire ``on_load_checkpoint``, after ``setup`` as in Lightning."""
        assert self._checkpoint is not None
        if self._module is None:
            self._checkpoint.start_run(run)
            self._reset.start_run()
            self._call_setup(run, model, "fit")
            self._loaded_before_setup = True
        self._checkpoint.load(
            run, checkpoint, partial(self._call, run, model, "on_load_checkpoint")
        )


class DeferredEpochEnd:
    """Defers the end of an epoch until its validation, which Lightning puts before it.

    With ``run.epochs`` the order is the same here. In a plain loop the epoch is the pass over the
    training data, and its validation follows: a callback that monitors a metric then gets the
    epoch's end when the metric is logged, or at the latest when the next epoch starts.

    Args:
        callback: has a ``monitor`` if it monitors a metric.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._epoch: int | None = None

    def defer(self, run: TrainingRun) -> bool:
        """Return whether the end of the current epoch is deferred."""
        monitors = getattr(self._callback, "monitor", None) is not None
        if not monitors or run.accelerator.loop.epochs_counted:
            return False
        self._epoch = run.current_epoch
        return True

    def is_due(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether these metrics have the monitored one, so that the epoch may end.

        Never with several ranks, which wait for the next epoch: not all of them need to log it.
        """
        if self._epoch is None or collectives.world_size() > 1:
            return False
        return self._callback.monitor in metrics

    def pop(self) -> int | None:
        """Return the epoch whose end is deferred, if any, and clear it."""
        epoch, self._epoch = self._epoch, None
        return epoch


class AttributeReset:
    """Restores a callback's attributes at the start of each further run.

    Lightning's callbacks are made for one ``fit``, so they do not reset themselves. Attributes that
    the user sets between two runs are kept.

    Args:
        callback: any object with a ``__dict__``.

    Example:
        >>> from types import SimpleNamespace
        >>> from accel_callbacks.addons.lightning.from_lightning import AttributeReset
        >>> callback = SimpleNamespace(patience=3, waited=0)
        >>> reset = AttributeReset(callback)
        >>> reset.start_run()
        >>> callback.waited = 2  # in the run
        >>> reset.end_run()
        >>> callback.patience = 5  # after it
        >>> reset.start_run()
        >>> callback
        namespace(patience=5, waited=0)
    """

    _KEY = "_accel_callbacks_reset"

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._at_start: dict[str, Any] | None = None
        self._at_end: dict[str, Any] | None = None

    @classmethod
    def of(cls, callback: Any) -> AttributeReset:
        """Return the one of a callback; the callback holds it for runs of other Accelerators."""
        reset: AttributeReset = vars(callback).setdefault(cls._KEY, cls(callback))
        return reset

    def start_run(self) -> None:
        """Restore attributes that the last run has changed, and record them for the next."""
        now = vars(self._callback)
        if self._at_start is not None and self._at_end is not None:
            for name in [name for name in now if name not in {*self._at_start, self._KEY}]:
                del now[name]
            for name, value in self._at_start.items():
                # Another object than at the end of the run was set by the user.
                if name in self._at_end and now.get(name) is self._at_end[name]:
                    now[name] = _copy(value)
        self._at_start = {name: _copy(value) for name, value in now.items() if name != self._KEY}
        self._at_end = None

    def end_run(self) -> None:
        """Record the attributes at the end of the run."""
        self._at_end = dict(vars(self._callback))


def _copy(value: Any) -> Any:
    """Return a copy of containers and tensors, and anything else as it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.clone()
    if type(value) is dict:
        return {key: _copy(entry) for key, entry in value.items()}
    if type(value) in (list, set, tuple):
        return type(value)(map(_copy, value))
    return value
