"""LearningRateMonitor: log learning rates, and optionally momentum and weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.interval import Cadence, Interval

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Log each learning rate with ``accel.log``, at the step that used it.

    The name is ``lr-AdamW`` for an optimizer with one group, ``lr-AdamW/group1``,
    ``lr-AdamW/group2`` (or the group's ``"name"``) for several groups, and ``lr-AdamW-1`` for the
    second optimizer of a class. The suffix ``-momentum`` marks ``momentum`` or the first of
    ``betas``, ``-weight_decay`` the decay. Rates that are tensors are logged without a device sync.

    Args:
        interval: ``"step"`` (the default), ``"epoch"``, or ``"50 steps"``, ``"2 epochs"``.
        log_momentum: log momentum too.
        log_weight_decay: log weight decay too.

    Attributes:
        last: the values logged last, by name.

    Raises:
        ValueError: the interval is not in steps or epochs.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import LearningRateMonitor
        >>> accel = Accelerator(cpu=True, callbacks=[LearningRateMonitor()])
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> accel.backward(model(torch.ones(1, 1)).sum())
        >>> optimizer.step()
        >>> accel.current_run.callback_metrics
        {'lr-SGD': 0.5}
    """

    def __init__(
        self,
        interval: str | Interval = "step",
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self._cadence = Cadence(interval)
        if self._cadence.interval.unit not in ("steps", "epochs"):
            raise ValueError(f"interval={interval!r}: use steps or epochs, such as '50 steps'.")
        self._by_steps = self._cadence.interval.unit == "steps"
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.last: dict[str, Any] = {}

    def on_after_optimizer_step(
        self, run: TrainingRun, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the rates of this optimizer, before the scheduler changes them."""
        if self._by_steps and self._cadence.is_due(run):
            self._log(run, [optimizer])

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Log the rates of all optimizers."""
        if not self._by_steps and not run.epoch_open and self._cadence.take(run):
            self._log(run, run.optimizers)

    def _log(self, run: TrainingRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = _names(run.optimizers)
        values = dict(
            entry
            for index, optimizer in enumerate(run.optimizers)
            if any(optimizer is other for other in optimizers)
            for entry in self._entries(names[index], optimizer.param_groups)
        )
        if values:
            self.last = values
            run.accelerator.log(values)

    def _entries(self, name: str, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of one optimizer."""
        for full, group in zip(_group_names(name, groups), groups, strict=True):
            yield full, _copy_tensor(group["lr"])
            if self.log_momentum:
                betas = group.get("betas")
                yield (
                    f"{full}-momentum",
                    _copy_tensor(betas[0] if betas else group.get("momentum", 0.0)),
                )
            if self.log_weight_decay:
                yield f"{full}-weight_decay", _copy_tensor(group.get("weight_decay", 0.0))


def _names(optimizers: Sequence[Any]) -> list[str]:
    """Return ``lr-<class>`` for each, numbered from the second of a class on."""
    seen: Counter[str] = Counter()
    names = []
    for optimizer in optimizers:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        names.append(f"lr-{kind}-{seen[kind]}" if seen[kind] else f"lr-{kind}")
        seen[kind] += 1
    return names


def _group_names(name: str, groups: Sequence[dict[str, Any]]) -> list[str]:
    """Return the optimizer's name for each group, with that of the group if there are several."""
    if len(groups) == 1 and "name" not in groups[0]:
        return [name]
    parts = [str(group.get("name", f"group{n}")) for n, group in enumerate(groups, start=1)]
    # Groups with the same name would be logged as one curve.
    repeated = {part for part, count in Counter(parts).items() if count > 1}
    return [
        f"{name}/{part}{n}" if part in repeated else f"{name}/{part}"
        for n, part in enumerate(parts, start=1)
    ]


def _copy_tensor(value: Any) -> Any:
    """Copy a tensor, which trackers read later and a scheduler may change in place before."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
