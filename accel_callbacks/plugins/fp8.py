"""Options of fp8 training with torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel_callbacks.plugins.base import KwargsHandler

if TYPE_CHECKING:
    import torch

__all__ = ["AORecipeKwargs"]


@dataclass(frozen=True)
class AORecipeKwargs(KwargsHandler):
    """How ``mixed_precision="fp8"`` computes with torchao (``pip install torchao``).

    Args:
        config: a ``torchao.float8.Float8LinearConfig``; torchao's default with
            ``pad_inner_dim=True`` if ``None``. ``Float8LinearConfig(emulate=True)`` computes the
            same on devices that have no fp8, slowly.
        module_filter_func: called with each ``torch.nn.Linear`` and its name; True converts it.
            By default all but the first and the last of a model are, if both of their sizes are
            multiples of 16.
        pad_inner_dim: overrides that of ``config``: pad inputs to a multiple of 16.

    Raises:
        TypeError: ``module_filter_func`` cannot be called.

    Example:
        >>> from accel_callbacks import AORecipeKwargs
        >>> AORecipeKwargs(module_filter_func=lambda module, name: "head" not in name).config
    """

    role: ClassVar[str] = "fp8 training"

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None

    def __post_init__(self) -> None:
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise TypeError(f"module_filter_func={self.module_filter_func!r} cannot be called.")
