"""Options of mixed precision: autocast, the loss scaler, and fp8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel_callbacks.plugins.base import KwargsHandler, Launch
from accel_callbacks.plugins.option import Block, launched

if TYPE_CHECKING:
    import torch

__all__ = ["AORecipeKwargs", "AutocastKwargs", "GradScalerKwargs"]


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Options of autocast; for ``Accelerator(kwargs_handlers=[...])`` and ``accel.autocast(...)``.

    Args:
        enabled: run in low precision. If False, operations run in full precision.
        cache_enabled: cache the low-precision copies of weights inside of a block; the setting
            outside of the block if ``None`` (torch's default is True).
        upcast_outputs: cast the outputs of prepared models to fp32 (default). If False, they stay
            in low precision. It has no effect on ``accel.autocast(...)``.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, AutocastKwargs
        >>> options = AutocastKwargs(upcast_outputs=False)
        >>> accel = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[options])
        >>> accel.prepare(torch.nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.bfloat16
        >>> with accel.autocast(AutocastKwargs(enabled=False)):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """

    role: ClassVar[str] = "autocast"

    enabled: bool = True
    cache_enabled: bool | None = None
    upcast_outputs: bool = True


@dataclass(frozen=True)
class AORecipeKwargs(KwargsHandler):
    """Options of ``mixed_precision="fp8"`` with torchao (``pip install torchao``).

    Args:
        config: a ``torchao.float8.Float8LinearConfig``; torchao's default with
            ``pad_inner_dim=True`` if ``None``. ``Float8LinearConfig(emulate=True)`` gives the same
            results on devices without fp8, slowly.
        module_filter_func: called with each ``torch.nn.Linear`` and its name; True converts it.
            By default all but the first and the last of a model are converted, if both of their
            sizes are multiples of 16.
        pad_inner_dim: overrides that of ``config``: pad inputs to a multiple of 16.
        enable_fsdp_float8_all_gather: overrides that of ``config``: gather the weights of converted
            layers in fp8 where FSDP shards them, with the same results. Without a ``config`` it is
            on.

    Raises:
        TypeError: ``module_filter_func`` cannot be called.

    Example:
        >>> from accel_callbacks import AORecipeKwargs
        >>> AORecipeKwargs(module_filter_func=lambda module, name: "head" not in name).config
    """

    role: ClassVar[str] = "fp8 training"
    block: ClassVar = Block("fp8_config", "fp8 training", flags="fp8_", variables="ACCEL_FP8_")

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = launched(None, "pad inputs to the sizes of fp8 (AO)", valued=True)
    enable_fsdp_float8_all_gather: bool | None = launched(
        None, "gather weights in fp8 (AO, FSDP)", valued=True
    )

    @classmethod
    def from_launch(cls, given: Any, launch: Launch) -> Any:
        """Return the script's recipe with what the launch adds; one with a ``config`` is whole."""
        options = launch.launched.get(cls.block.group)
        if not options or launch.mixed_precision != "fp8":
            return given
        recipe = given or cls()
        return recipe if recipe.config is not None else recipe.with_launch(options)

    def __post_init__(self) -> None:
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise TypeError(f"module_filter_func={self.module_filter_func!r} cannot be called.")


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, which only ``mixed_precision="fp16"`` uses.

    Args:
        init_scale: initial factor on the loss.
        growth_factor: factor on the scale after ``growth_interval`` steps without an overflow.
        backoff_factor: factor on the scale after an overflow.
        growth_interval: optimizer steps without an overflow before the scale grows.
        enabled: If False, no loss is scaled and no step is skipped.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> from accel_callbacks import Accelerator, GradScalerKwargs
        >>> options = GradScalerKwargs(init_scale=1024.0)
        >>> accel = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[options])
        >>> accel.scaler.get_scale()
        1024.0
    """

    role: ClassVar[str] = "the loss scaler"

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        rules = (
            ("init_scale", self.init_scale > 0, "above 0"),
            ("growth_factor", self.growth_factor > 1, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        )
        for name, fits, allowed in rules:
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {allowed}.")
