"""Averages of the weights over training: exponential, or of equal parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from accel_callbacks.callbacks.averaged_weights import Rule
from accel_callbacks.callbacks.averaging import Averaging

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["EMA", "WeightAveraging"]


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

    def _forget(self) -> None:
        super()._forget()
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
