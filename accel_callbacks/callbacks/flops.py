"""FLOPs: count those of a step, and look up the peak of a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from checkpoint_io.warning import warn

__all__ = ["FlopCounter", "matmul_precision", "peak_flops_of"]

_TERA = 1e12
_HOPPER = {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9}
_HOPPER_NVL = {"bf16": 835.5, "fp16": 835.5, "fp8": 1671.0, "tf32": 417.7, "fp32": 60.0}
_AMPERE = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}
_BLACKWELL = {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "tf32": 1125.0, "fp32": 75.0}
_GRACE_BLACKWELL = {"bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0, "tf32": 1250.0, "fp32": 80.0}
_CDNA3 = {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "tf32": 653.7, "fp32": 163.4}

# TFLOP/s of matrix products without sparsity, accumulated in fp32, from the vendors' data sheets.
# A key matches a device if all of its words are in the device's name. The first match counts, so
# specific keys come before general ones; an empty one is a device whose figures are not known.
# Absent: the RTX 3080, because two cards of that name differ.
_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("gb300", _GRACE_BLACKWELL),
    ("gb200", _GRACE_BLACKWELL),
    ("b300", _BLACKWELL),
    ("b200", _BLACKWELL),
    ("b100", {"bf16": 1750.0, "fp16": 1750.0, "fp8": 3500.0, "tf32": 875.0, "fp32": 60.0}),
    ("gh200", _HOPPER),
    ("h200 nvl", _HOPPER_NVL),
    ("h200", _HOPPER),
    ("h100 nvl", _HOPPER_NVL),
    ("h100 pcie", {"bf16": 756.0, "fp16": 756.0, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.2}),
    ("h100", _HOPPER),
    ("h800 pcie", {"bf16": 756.0, "fp16": 756.0, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.2}),
    ("h800", _HOPPER),
    ("h20", {"bf16": 148.0, "fp16": 148.0, "fp8": 296.0, "tf32": 74.0, "fp32": 44.0}),
    ("a100", _AMPERE),
    ("a800", _AMPERE),
    ("a30", {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3}),
    ("a40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("a10g", {"bf16": 70.0, "fp16": 70.0, "tf32": 35.0, "fp32": 35.0}),
    ("a10", {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    ("l40s", {"bf16": 362.0, "fp16": 362.0, "fp8": 733.0, "tf32": 183.0, "fp32": 91.6}),
    ("l40", {"bf16": 181.0, "fp16": 181.0, "fp8": 362.0, "tf32": 90.5, "fp32": 90.5}),
    ("l4", {"bf16": 121.0, "fp16": 121.0, "fp8": 242.5, "tf32": 60.0, "fp32": 30.3}),
    ("rtx 5090", {"bf16": 209.5, "fp16": 209.5, "fp8": 419.0, "tf32": 104.8, "fp32": 104.8}),
    (
        "rtx pro 6000 blackwell workstation",
        {"bf16": 503.8, "fp16": 503.8, "fp8": 1007.6, "tf32": 251.9, "fp32": 126.0},
    ),
    ("rtx 6000 ada", {"bf16": 364.2, "fp16": 364.2, "fp8": 728.5, "tf32": 182.1, "fp32": 91.1}),
    ("rtx 4090", {"bf16": 165.2, "fp16": 165.2, "fp8": 330.3, "tf32": 82.6, "fp32": 82.6}),
    ("rtx 4080 super", {}),
    ("rtx 4080", {"bf16": 97.5, "fp16": 97.5, "fp8": 194.9, "tf32": 48.7, "fp32": 48.7}),
    ("rtx 3090 ti", {}),
    ("rtx 3090", {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}),
    ("rtx a6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    ("rtx a5000", {"bf16": 111.1, "fp16": 111.1, "tf32": 55.6, "fp32": 27.8}),
    ("v100 sxm2", {"fp16": 125.0, "fp32": 15.7}),
    ("v100 sxm3", {"fp16": 125.0, "fp32": 15.7}),
    ("v100", {"fp16": 112.0, "fp32": 14.0}),
    ("t4", {"fp16": 65.0, "fp32": 8.1}),
    ("mi355x", {"bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2, "fp32": 157.3}),
    ("mi350x", {"bf16": 2306.9, "fp16": 2306.9, "fp8": 4613.7, "fp32": 144.2}),
    ("mi325x", _CDNA3),
    ("mi300x", _CDNA3),
    ("mi300a", {"bf16": 980.6, "fp16": 980.6, "fp8": 1961.2, "tf32": 490.3, "fp32": 122.6}),
    # torch lists each of the two dies of a card as a device.
    ("mi250x", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),
    ("mi250", {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3}),
    ("mi210", {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3}),
)

# Words of a partial device, or of a slower one with the same name.
_SLOWER_VARIANTS = {"mig", "laptop", "d", "max"}


def peak_flops_of(device_name: str, precision: str) -> float | None:
    """Return a device's peak FLOP/s of dense matrix products, ``None`` if unknown.

    Args:
        device_name: as :func:`torch.cuda.get_device_name` returns it.
        precision: ``"fp8"``, ``"fp16"``, ``"bf16"``, ``"tf32"`` or ``"fp32"``.

    Example:
        >>> from accel_callbacks.callbacks.flops import peak_flops_of
        >>> peak_flops_of("NVIDIA A100-SXM4-80GB", "bf16") / 1e12
        312.0
        >>> peak_flops_of("NVIDIA H100 PCIe", "bf16") / 1e12
        756.0
        >>> peak_flops_of("Some CPU", "bf16") is None
        True
    """
    text = device_name.lower().replace("-", " ").replace("_", " ").replace("/", " ")
    words = set(text.split())
    if words & _SLOWER_VARIANTS:
        return None
    for key, peaks in _PEAKS:
        if words.issuperset(key.split()):
            peak = peaks.get(precision)
            return None if peak is None else peak * _TERA
    return None


def matmul_precision(mixed_precision: str, model: torch.nn.Module | None) -> str | None:
    """Return the precision of matrix products, as :func:`peak_flops_of` names it.

    ``None`` if torch cannot tell it.

    Args:
        mixed_precision: that of the Accelerator.
        model: with ``"no"``, the dtype of its parameters counts.
    """
    if mixed_precision != "no":
        return mixed_precision
    first = next(iter(model.parameters()), None) if model is not None else None
    named = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if first is not None and first.dtype in named:
        return named[first.dtype]
    try:
        return "tf32" if _multiplies_in_tf32() else "fp32"
    except (AttributeError, RuntimeError):
        return None


def _multiplies_in_tf32() -> bool:
    # torch.get_float32_matmul_precision raises once a script has used these newer settings. "none"
    # is what the setting above it says.
    matmul: Any = torch.backends.cuda.matmul
    for owner in (matmul, torch.backends):
        precision = getattr(owner, "fp32_precision", "none")
        if precision != "none":
            return bool(precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"


class _NoModuleTracker:
    """Replace torch's module tracker, which registers hooks on every module."""

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModuleTracker:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class FlopCounter(FlopCounterMode):
    """Count the floating-point operations of matrix products, convolutions and attention.

    All else (elementwise operations, norms, the optimizer, custom kernels) is comparatively small
    and not counted. Work that activation checkpointing repeats counts twice.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
        self.uncounted: set[str] = set()

    @property
    def total(self) -> int:
        """FLOPs so far; a multiply-add counts as two."""
        return int(self.get_total_flops())

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self.uncounted:
            warn(
                f"FLOPs of {sorted(self.uncounted)} could not be counted; the sum is too low.",
            )

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """Count one operation; a formula that fails must not end the training."""
        try:
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        except Exception:  # formulas registered by other packages may raise anything
            self.uncounted.add(str(func_packet))
            return out
