"""Query installed packages, and devices and precisions that this machine supports."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable
from typing import Any

__all__ = [
    "compare_versions",
    "is_bf16_available",
    "is_cuda_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_mps_available",
    "is_package_available",
    "is_torch_version",
    "is_xpu_available",
]

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def is_package_available(name: str) -> bool:
    """Return whether a package can be imported, without importing it.

    Example:
        >>> from accel_callbacks.compat.packages import is_package_available
        >>> is_package_available("torch"), is_package_available("no_such_package")
        (True, False)
    """
    return importlib.util.find_spec(name) is not None


def available_check(name: str, package: str) -> Callable[..., bool]:
    """Return the function ``is_<short>_available`` of this name.

    It takes ``min_version`` of the package; ``check_device``, ``check_is_tpu`` and
    ``check_is_gpu``, for which torch must see such a device; and ``init_hccl``, without effect.

    Args:
        name: of the function.
        package: that it looks for.
    """
    device = name.removeprefix("is_").removesuffix("_available")
    return functools.partial(_is_available, package, device)


def _is_available(
    package: str,
    device: str,
    min_version: str | None = None,
    *,
    check_device: bool = False,
    check_is_tpu: bool = False,
    check_is_gpu: bool = False,
    init_hccl: bool = False,
) -> bool:
    if not is_package_available(package):
        return False
    if check_is_tpu or check_is_gpu:
        torch_xla: Any = importlib.import_module(package)
        kinds = ("TPU",) if check_is_tpu else ("GPU", "CUDA")
        return torch_xla.runtime.device_type() in kinds
    if check_device:
        importlib.import_module(package)  # which adds its device to torch
        import torch

        module = getattr(torch, device, None)
        return module is not None and bool(module.is_available())
    return min_version is None or compare_versions(package, ">=", min_version)


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package with a required one.

    Args:
        library_or_version: name of the package, or a parsed version.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: the other version, such as ``"2.6"``.

    Raises:
        ValueError: ``operation`` is unknown.

    Example:
        >>> from accel_callbacks.utils import compare_versions
        >>> compare_versions("torch", ">=", "2.0")
        True
    """
    from packaging import version

    if operation not in _OPERATIONS:
        raise ValueError(f"operation={operation!r} is unknown; use one of {list(_OPERATIONS)}.")
    installed = library_or_version
    if isinstance(installed, str):
        installed = version.parse(importlib.metadata.version(installed))
    return _OPERATIONS[operation](installed, version.parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch, as in ``is_torch_version(">=", "2.6")``.

    Example:
        >>> from accel_callbacks.utils import is_torch_version
        >>> is_torch_version("<", "1.0")
        False
    """
    return compare_versions("torch", operation, version)


def is_cuda_available() -> bool:
    """Return whether torch sees a CUDA (or ROCm) device.

    Example:
        >>> from accel_callbacks.utils import is_cuda_available
        >>> is_cuda_available() in (True, False)
        True
    """
    import torch

    return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch sees an Apple GPU.

    Example:
        >>> from accel_callbacks.utils import is_mps_available
        >>> is_mps_available() in (True, False)
        True
    """
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether torch sees an Intel GPU, which is checked in any case.

    Example:
        >>> from accel_callbacks.utils import is_xpu_available
        >>> is_xpu_available() in (True, False)
        True
    """
    import torch

    return torch.xpu.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether ``mixed_precision="bf16"`` works on the accelerator, or else the CPU.

    Args:
        ignore_tpu: without effect, since each TPU has it.

    Example:
        >>> from accel_callbacks.utils import is_bf16_available
        >>> is_bf16_available() in (True, False)
        True
    """
    return _works("bf16")


def is_fp16_available() -> bool:
    """Return whether ``mixed_precision="fp16"`` works on the accelerator, or else the CPU.

    Example:
        >>> from accel_callbacks.utils import is_fp16_available
        >>> is_fp16_available() in (True, False)
        True
    """
    return _works("fp16")


def is_fp8_available() -> bool:
    """Return whether ``mixed_precision="fp8"`` works on the accelerator, or else the CPU.

    Example:
        >>> from accel_callbacks.utils import is_fp8_available
        >>> is_fp8_available() in (True, False)
        True
    """
    return _works("fp8")


def _works(precision: str) -> bool:
    import torch

    from accel_callbacks.distributed.topology import own_accelerator
    from accel_callbacks.engine_options import create_precision

    try:
        create_precision(precision, own_accelerator() or torch.device("cpu"))
    except (ImportError, RuntimeError, ValueError):
        return False
    return True
