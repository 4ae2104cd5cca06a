"""What ``pl_module.log`` means: at each step, or as one value of the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["LoggedValues"]

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class _Pending(NamedTuple):
    """An epoch's value so far; ``weight`` is the number of samples where it is a mean."""

    total: Any
    weight: float
    reduction: str
    forked: bool  # logged at each step too, so that the names must differ


class LoggedValues:
    """Gives values to ``accel.log``; those of an epoch when its end is announced.

    Tensors stay on their device. A metric of torchmetrics is computed and reset at the end.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks.adapters.logged_values import LoggedValues
        >>> run = Accelerator(cpu=True).current_run
        >>> values = LoggedValues()
        >>> for value in (1.0, 2.0):
        ...     values.log(run, "on_validation_batch_end", "loss", value)
        >>> run.callback_metrics
        {}
        >>> values.flush(run)
        >>> float(run.callback_metrics["loss"])
        1.5
    """

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def log(
        self,
        run: TrainingRun,
        hook: str,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool = False,
    ) -> None:
        """Log now, keep for the epoch, or both; which by default depends on the hook.

        Raises:
            ValueError: ``reduce_fx`` is not mean, sum, min or max.
        """
        in_batch = "batch" in hook or "backward" in hook or "optimizer" in hook or "grad" in hook
        training = in_batch and "validation" not in hook and "test" not in hook
        on_step = training if on_step is None else on_step
        on_epoch = not training if on_epoch is None else on_epoch
        reduction = _reduction(reduce_fx)
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if sync_dist and not _is_metric(value):
            value = run.accelerator.reduce(torch.as_tensor(value), reduction)
        if on_step or (on_epoch and not in_batch and not _is_metric(value)):
            forked = on_step and on_epoch and in_batch
            now = value._forward_cache if _is_metric(value) else value
            run.accelerator.log({f"{name}_step" if forked else name: now})
        if on_epoch and (in_batch or _is_metric(value)):
            self._add(name, value, reduction, batch_size or 1, forked=on_step)

    def _add(self, name: str, value: Any, reduction: str, batch_size: int, *, forked: bool) -> None:
        before = self._pending.get(name)
        if _is_metric(value):
            self._pending[name] = _Pending(value, 1, "metric", forked)
            return
        weight = batch_size if reduction == "mean" else 1
        total = torch.as_tensor(value, dtype=torch.get_default_dtype()) * weight
        if before is not None:
            total = _REDUCTIONS[reduction](before.total, total.to(before.total.device))
            weight += before.weight  # type: ignore[assignment]
        self._pending[name] = _Pending(total, weight, reduction, forked)

    def flush(self, run: TrainingRun) -> None:
        """The epoch is over: log what it came to."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        values = {name: _result(one) for name, one in pending.items()}
        run.accelerator.log(
            {f"{name}_epoch" if pending[name].forked else name: v for name, v in values.items()}
        )
        run.callback_metrics.update(values)


def _result(one: _Pending) -> Any:
    if one.reduction == "metric":
        value = one.total.compute()
        one.total.reset()
        return value
    return one.total / one.weight if one.reduction == "mean" else one.total


def _is_metric(value: Any) -> bool:
    """Whether it is one of torchmetrics, by what it can do."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"amin": "min", "amax": "max", "avg": "mean"}.get(name, name)
    if name not in _REDUCTIONS:
        raise ValueError(f"reduce_fx={reduce_fx!r}: use 'mean', 'sum', 'min' or 'max'.")
    return name
