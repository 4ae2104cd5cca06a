"""The figure that a result is drawn into, where matplotlib is installed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["new_axes"]


def new_axes(instead: str) -> Any:
    """The axes of a new matplotlib figure, which is their ``figure``.

    Args:
        instead: what else to do, for the error.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> from accel_callbacks.tuning.drawing import new_axes
        >>> new_axes("look at the trials").figure  # doctest: +SKIP
        <Figure size 700x400 with 1 Axes>
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            f"plot() draws with matplotlib: pip install matplotlib. Or {instead}."
        ) from None
    return figures.Figure(figsize=(7, 4), layout="constrained").subplots()
