"""EMA, WeightAveraging."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from accel_callbacks.callbacks.averaged_weights import Averages, Rule
from accel_callbacks.callbacks.resumable_state import ResumableState
from accel_callbacks.modeling.compile import original

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["EMA", "Averaging", "WeightAveraging"]


class Averaging(ResumableState, ABC):
    """An average of the weights beside the models that have something to train.

    A subclass says when they are taken in, and how.

    Args:
        use_buffers: ``True``, or ``"copy"`` to leave buffers out of the average.
        device: where the average is kept.
        evaluate_with_average: put it into the models for evaluations.
        name: tells several of one class apart.

    Attributes:
        updates: how often the weights were taken in.
    """

    #: Its state is made of weights, so a rollback takes it back together with them.
    rolls_back = True
    saves_alike = True

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
        self._loaded: Mapping[str, Any] | None = None  # for a setup that is still to come
        self._lent = False  # to an evaluation
        self.reset_state()

    def reset_state(self) -> None:
        """Set the state with which a new run starts."""
        self.updates = 0
        self._step = -1  # of the newest update
        self._loaded = None
        if self._averages is not None:
            self._averages.restore()
            self._averages.load({})

    @property
    def state_key(self) -> str:
        """The name of the class, with ``name`` where one was given."""
        kind = type(self).__qualname__
        return kind if self.name is None else f"{kind}:{self.name}"

    def setup(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Reset the average, unless ``load_state`` restored it, and find the trained models."""
        self._give_back()
        known = [] if self._averages is None else self._averages.models  # may be frozen by now
        models = [
            one
            for one in run.models
            if any(one is other for other in known)
            or any(p.requires_grad for p in one.parameters())
        ]
        super().setup(run, model, stage)
        if self._averages is None or self._averages.models != models:
            if self._averages is not None:
                self._loaded = self._loaded or self.state_dict()
            with_buffers = self.use_buffers is True
            self._averages = Averages(models, use_buffers=with_buffers, device=self.device)
        if self._loaded is not None:
            self.load_state_dict(dict(self._loaded))

    # --- taking the weights in ----------------------------------------------------------------

    @abstractmethod
    def _rule(self, before: int) -> Rule:
        """How the average moves when the weights were taken in so often before."""

    def _update(self, run: TrainingRun, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take the weights in; of several optimizers that step in turn, each one's own."""
        if self._averages is None:  # a step that no run is around
            self.setup(run, None, "fit")
        assert self._averages is not None
        first = run.global_step != self._step
        if optimizer is None and not first:  # nothing was trained since
            return
        if first:
            self._step = run.global_step
            self.updates += 1
        self._averages.update(self._rule(self.updates - 1), _share(run, optimizer, first))

    # --- evaluation ---------------------------------------------------------------------------

    def on_validation_start(self, run: TrainingRun, model: Any) -> None:
        """Put the average into the models."""
        self._lend(run)

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Put the weights back."""
        self._take_back(run)

    def on_test_start(self, run: TrainingRun, model: Any) -> None:
        """Put the average into the models."""
        self._lend(run)

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """Put the weights back."""
        self._take_back(run)

    def _lend(self, run: TrainingRun) -> None:
        averages = self._averages
        if not self.evaluate_with_average or averages is None or not averages.begun:
            return
        # Of several, one: they would be taken back in the order in which they were lent.
        others = (one for one in getattr(run, "callbacks", ()) if one is not self)
        if not any(isinstance(one, Averaging) and one._lent for one in others):
            self._lent = self._lent or not averages.applied
            averages.apply()

    def _take_back(self, run: TrainingRun) -> None:
        """Unless this is the end of an evaluation inside of another."""
        if not run.accelerator.loop.evaluating:
            self._give_back()

    def _give_back(self) -> None:
        if self._lent and self._averages is not None:
            self._averages.restore()
        self._lent = False

    # An evaluation that an error ended has no end hook: what comes next puts the weights back.

    def on_train_epoch_start(self, run: TrainingRun, model: Any) -> None:
        """Put back what an evaluation that broke off has left."""
        self._take_back(run)

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Likewise."""
        self._take_back(run)

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Likewise, where no prepared loader told that training goes on."""
        if self._lent and not run.accelerator.loop.evaluating:
            self._give_back()
            warnings.warn(
                "an evaluation broke off with an error, and the forward pass after it has still "
                "used the averaged weights: call zero_grad() and compute this batch again.",
                stacklevel=2,
            )

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Put the weights back, if the error came out of an evaluation."""
        self._give_back()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """The models keep their own weights; ``copy_to`` and ``applied`` still work."""
        self._give_back()

    # --- using it -----------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the prepared models hold the average.

        Raises:
            RuntimeError: there is no average yet.
        """
        averages = self._begun()
        outermost = not averages.applied
        averages.apply()
        try:
            yield
        finally:
            if outermost:
                averages.restore()

    def copy_to(self, model: torch.nn.Module, *, number: int = 0) -> None:
        """Write the average into a model for good: the trained one, or one of the same build.

        Args:
            model: prepared or not.
            number: of several averaged models, which one's average.

        Raises:
            RuntimeError: there is no average yet.
            ValueError: the model is built in another way.
        """
        averages = self._begun()
        self._give_back()
        if not 0 <= number < len(averages.models):
            raise ValueError(f"number={number}: {len(averages.models)} models are averaged.")
        averages.write_to(_bare(model), str(number))

    def _begun(self) -> Averages:
        if self._averages is None or not self._averages.begun:
            raise RuntimeError(
                f"{self.state_key} has no average yet: it begins with the first step that is taken "
                "in, or with a checkpoint that was saved after it."
            )
        return self._averages

    # --- state --------------------------------------------------------------------------------

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """While the models hold the average, their own weights are saved all the same."""
        if self._averages is not None and self._averages.applied:
            _save_displaced(self._averages, run.models, checkpoint["models"])

    def state_dict(self) -> dict[str, Any]:
        """The average, and when it was updated."""
        if self._averages is None:
            return dict(self._loaded or {})
        return {
            "updates": self.updates,
            "step": self._step,
            "average": self._averages.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place; kept for ``setup`` where that is still to come."""
        self.updates, self._step = state_dict["updates"], state_dict["step"]
        self._lent = False
        self._loaded = state_dict if self._averages is None else None
        if self._averages is not None:
            self._averages.load(state_dict["average"])


def _share(
    run: TrainingRun, optimizer: torch.optim.Optimizer | None, first: bool
) -> Callable[[torch.Tensor], bool] | None:
    """Which weights an optimizer's step has changed; the first of a step also has nobody's."""
    others = [one for one in run.optimizers if one is not optimizer]
    if optimizer is None or not others:
        return None
    own = _parameters([optimizer])
    if not first:
        return lambda weight: id(weight) in own
    theirs = _parameters(others) - own
    return lambda weight: id(weight) not in theirs


def _parameters(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}


def _save_displaced(
    averages: Averages, models: list[torch.nn.Module], saved: dict[str, Any]
) -> None:
    """Put the weights that wait beside their models into what is about to be saved of these."""
    for number, model in enumerate(averages.models):
        weights = saved.get(str(next(i for i, one in enumerate(models) if one is model)))
        if weights is not None:
            displaced = averages.weights_of(str(number)).items()
            weights.update({name: held for name, held in displaced if name in weights})


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model as the user built it."""
    inner = original(model)
    return _bare(inner.module) if isinstance(inner, DistributedDataParallel) else inner


class EMA(Averaging):
    """Keeps an exponential moving average of the weights, and evaluates with it.

    After a step the average becomes ``decay * average + (1 - decay) * weights``; it begins as a
    copy of the weights. It is held beside the prepared models that have something to train, costs
    as much memory as their weights, and is saved with every checkpoint. During an evaluation the
    models hold the average and the weights wait beside them; what is saved then are still the
    weights, with the average as the state of this callback.

    Args:
        decay: how much of the average stays in an update, 0.999 by default.
        every_n_steps: update after every so many optimizer steps, 1 by default.
        start_step: the first step whose weights are taken in.
        use_buffers: ``True`` averages floating-point buffers too, such as the statistics of
            BatchNorm; with ``"copy"`` the average has the buffers of the model.
        device: where the average is kept; beside the weights if ``None``. ``"cpu"`` saves memory
            of the device, and costs a copy of the weights in each update.
        evaluate_with_average: use it in ``accel.evaluate``, on by default. Of several callbacks,
            the first that has an average is used; see :meth:`applied` for the others.
        warmup: let the decay begin lower, as ``(1 + updates) / (10 + updates)``, so that early
            weights do not linger.
        name: tells several EMAs of one run apart, in ``state_key``.

    Attributes:
        updates: how often the weights were taken in.

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
        _check_numbers(every_n_steps=every_n_steps, start_step=start_step)
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.warmup = warmup

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take the weights in, if it is time."""
        if _is_due(run.global_step, self.start_step, self.every_n_steps):
            self._update(run, optimizer)

    def _rule(self, before: int) -> Rule:
        decay = min(self.decay, (1 + before) / (10 + before)) if self.warmup else self.decay
        follow = get_ema_multi_avg_fn(decay if before else 0.0)  # type: ignore[no-untyped-call]
        return lambda averaged, current: follow(averaged, current, None)


class WeightAveraging(Averaging):
    """Keeps the mean of the weights of several places of a run, and evaluates with it.

    This is stochastic weight averaging (SWA): from some epoch on, usually with a learning rate
    that stays high, each epoch's last weights count alike. In all else it is as :class:`EMA`.

    Args:
        every_n_steps: take the weights in after every so many optimizer steps.
        every_n_epochs: take them in with the last batch of every so many epochs, before its
            validation; 1 if no interval is given.
        start_step: the first step whose weights are taken in.
        start_epoch: the first epoch whose weights are taken in, from 0.
        use_buffers: ``True`` averages floating-point buffers too; with ``"copy"`` the average has
            the buffers of the model. Neither are the exact statistics of a BatchNorm under the
            averaged weights: ``torch.optim.swa_utils.update_bn`` computes those.
        device: where the average is kept; beside the weights if ``None``.
        evaluate_with_average: use it in ``accel.evaluate``, on by default.
        name: tells several of one run apart, in ``state_key``.

    Attributes:
        updates: how often the weights were taken in.

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
        self._epoch = -1  # of the newest update
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
        _check_numbers(every_n_steps=every_n_steps, start_step=start_step)
        _check_numbers(every_n_epochs=every_n_epochs, start_epoch=start_epoch)
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
        """Take the weights in, if a step interval is over."""
        late = run.current_epoch >= self.start_epoch
        every = self.every_n_steps
        if every is not None and late and _is_due(run.global_step, self.start_step, every):
            self._update(run, optimizer)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the weights in with the last batch of an epoch, before its validation."""
        if self.every_n_epochs is not None and run.is_last_batch:
            self._end_epoch(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """The same for an epoch that the loop ended before its last batch."""
        if self.every_n_epochs is not None and not run.epoch_open:  # else a stop cut it short
            self._end_epoch(run)

    def _end_epoch(self, run: TrainingRun) -> None:
        epoch, every = run.current_epoch, self.every_n_epochs or 1
        if epoch != self._epoch and run.global_step >= self.start_step:
            if epoch >= self.start_epoch and (epoch - self.start_epoch) % every == 0:
                self._update(run)
            self._epoch = epoch

    def _rule(self, before: int) -> Rule:
        follow = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        return lambda averaged, current: follow(averaged, current, before)

    def state_dict(self) -> dict[str, Any]:
        """The average, and when it was updated."""
        state = super().state_dict()
        return {**state, "epoch": self._epoch} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore in place; kept for ``setup`` where that is still to come."""
        super().load_state_dict(state_dict)
        self._epoch = state_dict["epoch"]


def _is_due(step: int, start: int, every: int) -> bool:
    return step >= start and (step - start) % every == 0


def _check_numbers(**numbers: int | None) -> None:
    """Intervals are at least 1, starts at least 0."""
    for name, value in numbers.items():
        least = 0 if name.startswith("start") else 1
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
