"""host_syncs: find calls that make the host wait for the device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostSync", "host_syncs"]

_ROOT = Path(__file__).resolve().parents[3]
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
#: Files that may read tensors: they read later, on another thread, or from the host.
_ALLOWED_FILES = tuple(
    str(_ROOT / path)
    for path in (
        "loggers",
        "accel_callbacks/tracking/trackers.py",
        "accel_callbacks/distributed/rng.py",
    )
)
#: Tensor methods that need its values on the host, or a size that depends on them.
_METHODS = {
    *("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"),
    *("__complex__", "__array__", "__contains__", "__format__", "__repr__", "__reduce_ex__"),
    *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "equal", "allclose"),
    *("is_nonzero", "nonzero_static", "bincount"),
}
#: The same for the operations that torch dispatches.
_OPERATIONS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2"),
    *("unique_dim", "unique_consecutive", "unique_dim_consecutive", "is_nonzero", "bincount"),
}
_SYNCHRONIZE_OWNERS: tuple[Callable[[], Any], ...] = (
    lambda: torch.cuda,
    lambda: torch.cuda.Event,
    lambda: torch.cuda.Stream,
    lambda: torch.accelerator,
    lambda: torch.xpu,
    lambda: torch.mps,
)


@dataclass(frozen=True)
class HostSync:
    """One call that would make the host wait for the device.

    Args:
        what: the call, such as ``Tensor.item``.
        where: file and line of the innermost frame outside of torch.
        code: the source line.

    Example:
        >>> from tests.support.contract import HostSync
        >>> print(HostSync("Tensor.item", "mine.py:12", "total += loss.item()"))
        Tensor.item at mine.py:12: total += loss.item()
    """

    what: str
    where: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" + (f": {self.code}" if self.code else "")


@contextmanager
def host_syncs() -> Iterator[list[HostSync]]:
    """Context that lists the calls in it that would make the host wait for the device.

    It detects ``.item()``, ``float(tensor)``, ``if tensor:``, ``.tolist()``, ``.numpy()``,
    ``.cpu()``, ``.to("cpu")``, printing a tensor, ``nonzero``, indexing with a mask and similar
    calls, and ``synchronize``. It works without a GPU: tensors on the CPU are treated as if they
    were on a device. Calls inside ``accel.log`` are not listed, because trackers read its values
    later. On a GPU it also enables ``torch.cuda.set_sync_debug_mode``, which detects the rest.

    Returns:
        A list of :class:`HostSync`, which grows in the block.

    Example:
        >>> import torch
        >>> from tests.support.contract import host_syncs
        >>> loss = torch.tensor(0.5)
        >>> with host_syncs() as found:
        ...     total = loss.detach() + 1
        ...     text = f"{float(loss):.2f}"
        >>> [sync.what for sync in found]
        ['Tensor.__float__']
    """
    syncs: list[HostSync] = []
    with ExitStack() as stack:
        _patch_synchronize(stack, syncs)
        stack.enter_context(_cuda_sync_warnings(syncs))
        stack.enter_context(_Operations(syncs))
        stack.enter_context(_Functions(syncs))
        yield syncs


class _Functions(TorchFunctionMode):
    """Intercept the torch functions that the code calls."""

    def __init__(self, syncs: list[HostSync]) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        known = name in _METHODS or (name == "to" and _to_host(args, kwargs or {}))
        if not known and not (name == "where" and len(args) == 1):
            return func(*args, **(kwargs or {}))
        _record(self._syncs, resolve_name(func) or name)
        count = len(self._syncs)
        result = func(*args, **(kwargs or {}))
        del self._syncs[count:]  # nested calls are part of this one
        return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercept the operations that torch dispatches, such as indexing with a mask."""

    def __init__(self, syncs: list[HostSync]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._syncs = syncs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATIONS or (name in ("index", "index_put_") and _has_mask(args)):
            _record(self._syncs, f"aten.{name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def _cuda_sync_warnings(syncs: list[HostSync]) -> Iterator[None]:
    """Record the warnings of torch's own detector on a GPU, without repeating a line."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        line_of_code = f"{filename}:{lineno}"
        if "synchroniz" in str(message) and (not syncs or syncs[-1].where != line_of_code):
            syncs.append(HostSync("a CUDA operation", line_of_code))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _patch_synchronize(stack: ExitStack, syncs: list[HostSync]) -> None:
    """Record calls of ``synchronize``, which no mode intercepts."""
    for get_owner in _SYNCHRONIZE_OWNERS:
        owner = get_owner()
        original = vars(owner).get("synchronize")
        if original is not None:
            call = f"{owner.__name__}.synchronize"
            owner.synchronize = _recording(original, call, syncs)
            stack.callback(setattr, owner, "synchronize", original)


def _recording(original: Callable[..., Any], call: str, syncs: list[HostSync]) -> Any:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        _record(syncs, call)
        return original(*args, **kwargs)

    return synchronize


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``tensor.to("cpu")`` blocks; with a ``torch.device`` it may be a no-op."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(target, str) and target == "cpu" and not kwargs.get("non_blocking", False)


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Return whether an index is a mask, whose number of True values must be known."""
    indices = args[1] if len(args) > 1 else ()
    masks = (torch.bool, torch.uint8)
    return any(isinstance(index, torch.Tensor) and index.dtype in masks for index in indices)


def _record(syncs: list[HostSync], call: str) -> None:
    """Record the caller, unless its file is allowed to wait."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_ALLOWED_FILES):
            return
        if not frame.filename.startswith((_TORCH, _HERE)):
            break
    call = call.removeprefix("torch.")
    syncs.append(HostSync(call, f"{frame.filename}:{frame.lineno}", frame.line or ""))
