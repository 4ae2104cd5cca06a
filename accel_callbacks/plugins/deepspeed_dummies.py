"""Stand-ins for an optimizer and a scheduler that DeepSpeed's configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim(torch.optim.Optimizer):
    """A stand-in for the optimizer that DeepSpeed's configuration describes.

    Args:
        params: parameters, or groups of them.
        lr: replaces ``"auto"`` in ``optimizer.params.lr``.
        weight_decay: likewise.
        **kwargs: likewise, such as ``betas``.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import DummyOptim
        >>> DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1).lr
        0.1
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})
        self.params = self.param_groups
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refuse to step: ``prepare`` returns the optimizer.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("DummyOptim takes no steps: use what accel.prepare returned for it.")


class DummyScheduler:
    """A stand-in for the scheduler that DeepSpeed's configuration describes.

    Args:
        optimizer: the optimizer, or its stand-in.
        total_num_steps: optimizer steps in all; replaces ``"auto"``.
        warmup_num_steps: optimizer steps of the warm-up; likewise.
        lr_scheduler_callable: returns a scheduler for an optimizer; instead of the configuration.
        **kwargs: ignored.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import DummyOptim, DummyScheduler
        >>> DummyScheduler(DummyOptim([torch.zeros(1)]), warmup_num_steps=5).warmup_num_steps
        5
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to step: ``prepare`` returns the scheduler.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("DummyScheduler takes no steps: use what accel.prepare returned for it.")

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}
