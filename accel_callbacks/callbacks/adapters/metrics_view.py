"""The run's last values as Lightning's callbacks read and write them: tensors by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

__all__ = ["MetricsView"]


class MetricsView(dict[str, torch.Tensor]):
    """Tensors for the numbers in a mapping; what is set here is set there too.

    Tensors stay on their device, texts are left out.

    Args:
        metrics: ``run.callback_metrics``.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.adapters.metrics_view import MetricsView
        >>> metrics = {"loss": 0.5, "note": "warm"}
        >>> view = MetricsView(metrics)
        >>> view
        {'loss': tensor(0.5000)}
        >>> view["lr"] = torch.tensor(0.1)
        >>> sorted(metrics)
        ['loss', 'lr', 'note']
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        kinds = (torch.Tensor, int, float)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, kinds)}
        super().__init__({name: _tensor(value) for name, value in numbers.items()})
        self._behind = metrics

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _tensor(value))
        self._behind[name] = value

    def update(self, *args: Any, **values: Any) -> None:
        """Set several."""
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(float(value))
