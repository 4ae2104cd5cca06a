"""EMA and WeightAveraging: average the weights during training, and evaluate with the average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from accel_callbacks.callbacks.averaged_weights import Averages, Rule
from accel_callbacks.callbacks.base import ResumableState, require_at_least
from accel_callbacks.logging import notice
from accel_callbacks.models.compile import original
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["EMA", "Averaging", "WeightAveraging"]


class Averaging(ResumableState, ABC):
    """Base class of callbacks that keep an average of the weights of the trained models.

    A subclass decides when and how it is updated.

    Args:
        use_buffers: ``True``, or ``"copy"`` to leave buffers out of the average.
        device: of the average.
        evaluate_with_average: put the average into the models for evaluations.
        name: distinguishes several of one class.

    Attributes:
        updates: number of updates.
    """

    rolls_back = True  # the state is derived from weights, so a rollback restores it with them
    saves_alike = True
    name_option = "name"

    def __init__(
        self,
        *,
        use_buffers: bool | str,
        device: torch.device | str | None,
        evaluate_with_average: bool,
        name: str | None,
    ) -> None:
        if use_buffers not in (True, "copy"):
            raise ValueError(f"use_buffers={use_buffers!r} is unknown; use True or 'copy'.")
        self.use_buffers = use_buffers
        self.device = device
        self.evaluate_with_average = evaluate_with_average
        self.name = name
        self._averages: Averages | None = None
        self._loaded: Mapping[str, Any] | None = None  # until setup knows the models
        self._swapped_in = False  # the models hold the average, for an evaluation
        self._set_aside = False  # the models hold the weights of a checkpoint, for an evaluation
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.updates = 0
        self._step = -1  # of the last update
        self._loaded = None
        if self._averages is not None:
            self._averages.restore()
            self._averages.load({})

    @property
    def state_key(self) -> str:
        """The name of the class, or ``<class>:<name>`` if a name was given."""
        kind = type(self).__qualname__
        return kind if self.name is None else f"{kind}:{self.name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the average, unless ``load_state`` restored it, and find the trained models."""
        self._swap_out()
        known = [] if self._averages is None else self._averages.models  # may be frozen by now
        models = [
            candidate
            for candidate in run.models
            if _is_trained(candidate) or any(candidate is averaged for averaged in known)
        ]
        super().setup(run, model, stage)
        if self._averages is None or self._averages.models != models:
            if self._averages is not None:
                self._loaded = self._loaded or self.state_dict()
            with_buffers = self.use_buffers is True
            self._averages = Averages(models, use_buffers=with_buffers, device=self.device)
        if self._loaded is not None:
            self.load_state_dict(dict(self._loaded))

    # --- updates ------------------------------------------------------------------------------

    @abstractmethod
    def _rule(self, updates: int) -> Rule:
        """Return the rule of the next update, after this number of updates."""

    def _update(self, run: TrainingRun, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Update the average; after the step of one of several optimizers, of its weights only."""
        if self._averages is None:  # a step outside of a run, where setup is not fired
            self.setup(run, None, "fit")
        assert self._averages is not None
        first = run.global_step != self._step
        if optimizer is None and not first:  # already updated after this step
            return
        if first:
            self._step = run.global_step
            self.updates += 1
        self._averages.update(self._rule(self.updates - 1), _weights_of(run, optimizer, first))

    # --- evaluation ---------------------------------------------------------------------------

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Put the average into the models."""
        averages = self._averages
        if self._set_aside or averages is None or not averages.available:
            return
        if not self.evaluate_with_average:
            return
        # Only one of several: they would be restored in the order in which they were swapped in,
        # and the second would keep the first one's average as the weights.
        others = (callback for callback in getattr(run, "callbacks", ()) if callback is not self)
        if not any(isinstance(callback, Averaging) and callback._swapped_in for callback in others):
            self._swapped_in = self._swapped_in or not averages.applied
            averages.apply()

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Restore the weights, unless this evaluation is nested in another one."""
        if not run.open_evaluations:
            self._swap_out()

    on_test_start, on_test_end = on_validation_start, on_validation_end
    # An evaluation that raised fires no end hook: the next hook of training restores the weights.
    on_train_epoch_start = on_validation_end

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore the weights after an evaluation that raised."""
        # Without a loader and `accumulate`, a batch begins with its backward, after the forward.
        if run.iterating or run.accelerator.loop.own_batches.in_block:
            self.on_validation_end(run, model)

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Restore the weights after an evaluation that raised in the middle of a batch."""
        if self._swapped_in and not run.open_evaluations:
            self._swap_out()
            warn(
                "an evaluation raised an error, and the forward pass after it still used the "
                "averaged weights: call zero_grad() and compute this batch again.",
            )

    def _swap_out(self) -> None:
        if self._swapped_in and self._averages is not None:
            self._averages.restore()
        self._swapped_in = False

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restore the weights; ``copy_to`` and ``applied`` still work afterwards."""
        self._swap_out()

    # --- results ------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the prepared models hold the average.

        Raises:
            RuntimeError: there is no average yet.
        """
        averages = self._require_average()
        outermost = not averages.applied
        averages.apply()
        try:
            yield
        finally:
            if outermost:
                averages.restore()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context in which the models hold their weights, and evaluations do not swap them."""
        averages, before = self._averages, (self._swapped_in, self._set_aside)
        applied = averages is not None and averages.applied
        if averages is not None:
            averages.restore()
        self._swapped_in, self._set_aside = False, True
        try:
            yield
        finally:
            self._swapped_in, self._set_aside = before
            if averages is not None and applied:
                averages.apply()

    def saved_averages(
        self, state: Mapping[str, Any], models: Sequence[torch.nn.Module]
    ) -> dict[int, dict[str, Any]]:
        """Return the averages with which a checkpoint is evaluated, by index of the model and name.

        Args:
            state: of this callback, in the checkpoint; its tensors may be views.
            models: as the user built them.

        Returns:
            An empty dict if evaluations use the weights, or there was no average yet.

        Raises:
            ResumeError: they are averages of other weights.
        """
        if not self.evaluate_with_average or not state.get("average"):
            return {}
        averages = self._averages_of(models)
        return {
            place: averages.of_model(number, state["average"])
            for number, averaged in enumerate(averages.models)
            for place, model in enumerate(models)
            if model is averaged
        }

    def parts_to_read(
        self, state: Mapping[str, Any], models: Sequence[torch.nn.Module]
    ) -> dict[str, torch.Tensor]:
        """Return sharded tensors, by name, into which the averages of a checkpoint can be read.

        Each rank then reads its part of them, in place of whole averages. :meth:`load_state_dict`
        takes them, and whole ones.

        Args:
            state: of this callback, in the checkpoint; its tensors are views.
            models: as the user built them, with their shards.

        Returns:
            An empty dict if no weights are sharded.
        """
        return self._averages_of(models).parts(state.get("average") or {})

    def _averages_of(self, models: Sequence[torch.nn.Module]) -> Averages:
        """Return the averages of this callback, or those that ``setup`` will make."""
        return self._averages or Averages(
            [loaded for loaded in models if _is_trained(loaded)],
            use_buffers=self.use_buffers is True,
            device=self.device,
        )

    def copy_to(self, model: torch.nn.Module, *, number: int = 0) -> None:
        """Copy the average into a model: the trained one, or one of the same architecture.

        Args:
            model: prepared or not.
            number: index of the averaged model, if there are several.

        Raises:
            RuntimeError: there is no average yet.
            ValueError: the model has another architecture.
        """
        averages = self._require_average()
        self._swap_out()
        if not 0 <= number < len(averages.models):
            raise ValueError(f"number={number}: {len(averages.models)} models are averaged.")
        averages.copy_to(_unwrap(model), str(number))

    def _require_average(self) -> Averages:
        if self._averages is None or not self._averages.available:
            raise RuntimeError(
                f"{self.state_key} has no average yet: it starts with the first averaged step, or "
                "with a checkpoint saved after it."
            )
        return self._averages

    # --- state --------------------------------------------------------------------------------

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Save the weights of the models even while they hold the average."""
        averages = self._averages
        if averages is None or not averages.applied:
            return
        for number, averaged in enumerate(averages.models):
            index = next(i for i, prepared in enumerate(run.models) if prepared is averaged)
            weights = checkpoint["models"].get(str(index))
            if weights is not None:
                displaced = averages.displaced_weights(str(number)).items()
                weights.update({name: tensor for name, tensor in displaced if name in weights})

    def state_dict(self) -> dict[str, Any]:
        """Return the average, the number of updates and the step of the last one."""
        if self._averages is None:
            return dict(self._loaded or {})
        return {
            "updates": self.updates,
            "step": self._step,
            "average": self._averages.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place, or in ``setup`` if the models are not known yet."""
        self.updates, self._step = state_dict["updates"], state_dict["step"]
        self._swapped_in = False
        self._loaded = state_dict if self._averages is None else None
        if self._averages is not None:
            self._averages.load(state_dict["average"])


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _weights_of(
    run: TrainingRun, optimizer: torch.optim.Optimizer | None, first: bool
) -> Callable[[torch.Tensor], bool] | None:
    """Return a filter for the weights of one optimizer; None for all weights.

    The first optimizer of a step also gets those that no optimizer has, such as buffers.
    """
    others = [other for other in run.optimizers if other is not optimizer]
    if optimizer is None or not others:
        return None
    stepped = _parameter_ids([optimizer])
    if not first:
        return lambda weight: id(weight) in stepped
    of_others = _parameter_ids(others) - stepped
    return lambda weight: id(weight) not in of_others


def _parameter_ids(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    return {
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model as the user built it."""
    inner = original(model)
    return _unwrap(inner.module) if isinstance(inner, DistributedDataParallel) else inner


class EMA(Averaging):
    """Keep an exponential moving average of the weights, and evaluate with it.

    After a step the average becomes ``decay * average + (1 - decay) * weights``; it starts as a
    copy of the weights. It covers the prepared models with trainable parameters, takes as much
    memory as their weights, and is saved with every checkpoint. During an evaluation the models
    hold the average; a checkpoint saved then still contains the weights, and the average as the
    state of this callback.

    Args:
        decay: fraction of the average kept by an update, 0.999 by default.
        every_n_steps: update after every so many optimizer steps, 1 by default.
        start_step: the first step whose weights are averaged.
        use_buffers: ``True`` averages floating-point buffers too, such as the statistics of
            BatchNorm; with ``"copy"`` the average has the buffers of the model.
        device: of the average; that of the weights if ``None``. ``"cpu"`` saves device memory, and
            costs a copy of the weights in each update.
        evaluate_with_average: use it in ``accel.evaluate``, on by default. Of several callbacks,
            the first that has an average is used; see :meth:`applied` for the others.
        warmup: start with a lower decay, ``(1 + updates) / (10 + updates)``, so that early weights
            have less influence.
        name: distinguishes several EMAs of one run, in ``state_key``.

    Attributes:
        updates: number of updates.

    Raises:
        ValueError: ``decay`` is not in [0, 1], an interval is below 1, ``start_step`` is negative,
            or ``use_buffers`` is unknown.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import EMA
        >>> ema = EMA(decay=0.5)
        >>> accel = Accelerator(cpu=True, callbacks=[ema])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> _ = torch.nn.init.constant_(model.weight, 5.0)
        >>> with accel.run("demo"):
        ...     for _ in range(2):
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> model.weight.item()
        3.0
        >>> with ema.applied():
        ...     model.weight.item()
        3.5
    """

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        start_step: int = 0,
        use_buffers: bool | str = True,
        device: torch.device | str | None = None,
        evaluate_with_average: bool = True,
        *,
        warmup: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            use_buffers=use_buffers,
            device=device,
            evaluate_with_average=evaluate_with_average,
            name=name,
        )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} must be between 0 and 1.")
        require_at_least(1, every_n_steps=every_n_steps)
        require_at_least(0, start_step=start_step)
        self._lag_checked = False
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.warmup = warmup

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Update the average every ``every_n_steps`` steps."""
        if _is_due(run.global_step, self.start_step, self.every_n_steps):
            self._update(run, optimizer)

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Put the average into the models; note, once, that it is mostly the initial weights."""
        super().on_validation_start(run, model)
        if self._lag_checked or not self._swapped_in:
            return
        self._lag_checked = True
        callbacks = getattr(run, "callbacks", ())
        watcher = next((c for c in callbacks if getattr(c, "monitor", None) is not None), None)
        initial = self.decay**self.updates
        if watcher is None or self.warmup or self.start_step or initial < 0.5 or self.decay == 1:
            return
        reach = round(self.every_n_steps / (1 - self.decay))
        notice(
            f"{type(watcher).__name__} sees evaluations of the EMA, whose decay={self.decay:g} "
            f"reaches back {reach} steps: after {run.global_step}, {initial:.0%} of it are the "
            "initial weights. To follow training, pass a smaller decay, warmup=True, or "
            "evaluate_with_average=False"
        )

    def _rule(self, updates: int) -> Rule:
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        ema_update = get_ema_multi_avg_fn(decay if updates else 0.0)  # type: ignore[no-untyped-call]
        return lambda averaged, current: ema_update(averaged, current, None)


class WeightAveraging(Averaging):
    """Keep the mean of the weights at several points of a run, and evaluate with it.

    This is stochastic weight averaging (SWA): from some epoch on, usually with a learning rate
    that stays high, the weights at the end of each epoch are averaged equally. All else is as in
    :class:`EMA`.

    Args:
        every_n_steps: update after every so many optimizer steps.
        every_n_epochs: update with the last batch of every so many epochs, before the validation;
            1 if no interval is given.
        start_step: the first step whose weights are averaged.
        start_epoch: the first epoch whose weights are averaged, from 0.
        use_buffers: ``True`` averages floating-point buffers too; with ``"copy"`` the average has
            the buffers of the model. Neither gives the exact statistics of a BatchNorm under the
            averaged weights: ``torch.optim.swa_utils.update_bn`` computes those.
        device: of the average; that of the weights if ``None``.
        evaluate_with_average: use it in ``accel.evaluate``, on by default.
        name: distinguishes several of one run, in ``state_key``.

    Attributes:
        updates: number of updates.

    Raises:
        ValueError: both intervals are given, one is below 1, a start is negative, or
            ``use_buffers`` is unknown.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import WeightAveraging
        >>> swa = WeightAveraging(every_n_steps=1, start_step=2)
        >>> accel = Accelerator(cpu=True, callbacks=[swa])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> _ = torch.nn.init.constant_(model.weight, 5.0)
        >>> with accel.run("demo"):
        ...     for _ in range(3):
        ...         accel.backward(model(torch.ones(1, 1)).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> swa.copy_to(model)
        >>> model.weight.item()
        2.5
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        start_step: int = 0,
        start_epoch: int = 0,
        use_buffers: bool | str = True,
        device: torch.device | str | None = None,
        evaluate_with_average: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        self._epoch = -1  # the last one that was handled
        super().__init__(
            use_buffers=use_buffers,
            device=device,
            evaluate_with_average=evaluate_with_average,
            name=name,
        )
        if every_n_steps is not None and every_n_epochs is not None:
            raise ValueError("every_n_steps and every_n_epochs: give one of the two.")
        if every_n_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        require_at_least(1, every_n_steps=every_n_steps, every_n_epochs=every_n_epochs)
        require_at_least(0, start_step=start_step, start_epoch=start_epoch)
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.start_step = start_step
        self.start_epoch = start_epoch

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        super().reset_state()
        self._epoch = -1

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Update the average, if a step interval ends here."""
        late = run.current_epoch >= self.start_epoch
        every = self.every_n_steps
        if every is not None and late and _is_due(run.global_step, self.start_step, every):
            self._update(run, optimizer)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average with the last batch of an epoch, before its validation."""
        if self.every_n_epochs is not None and run.is_last_batch:
            self._end_epoch(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Update the average after an epoch that the loop left before its last batch."""
        if self.every_n_epochs is not None and not run.epoch_open:  # it is open if a stop cut it
            self._end_epoch(run)

    def _end_epoch(self, run: TrainingRun) -> None:
        epoch, every = run.current_epoch, self.every_n_epochs or 1
        if epoch != self._epoch and run.global_step >= self.start_step:
            if epoch >= self.start_epoch and (epoch - self.start_epoch) % every == 0:
                self._update(run)
            self._epoch = epoch

    def _rule(self, updates: int) -> Rule:
        swa_update = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        return lambda averaged, current: swa_update(averaged, current, updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the average, the number of updates, and the position of the last one."""
        state = super().state_dict()
        return {**state, "epoch": self._epoch} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place, or in ``setup`` if the models are not known yet."""
        super().load_state_dict(state_dict)
        self._epoch = state_dict["epoch"]


def _is_due(step: int, start: int, every: int) -> bool:
    return step >= start and (step - start) % every == 0
