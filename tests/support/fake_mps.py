"""A device of type ``mps`` on any machine, as strict as the real one.

Tensors on it compute on the host. What MPS lacks is an error, as there: float64, pinned memory. And
so is a copy that is not waited for, whose result on MPS is whatever the memory holds by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

MPS = torch.device("mps", 0)
_READS = {"item", "tolist", "__float__", "__int__", "__bool__"}


class MpsTensor(torch.Tensor):
    """A tensor that says it is on MPS, and holds its values on the host."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> MpsTensor:
        if host.dtype in (torch.float64, torch.complex128):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as MPS has no float64")
        made: MpsTensor = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, dtype=host.dtype, device=MPS, requires_grad=host.requires_grad
        )
        made.host = host.detach()
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"MpsTensor({self.host})"

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        _refuse_unordered_copies(given)
        name = function.overloadpacket.__name__
        if name == "copy_" and len(args) > 2 and args[2]:
            raise AssertionError("copy_(non_blocking=True) between the host and MPS")
        to_host = torch.device(given.get("device") or MPS).type == "cpu"
        if not to_host and "device" in given:
            given["device"] = torch.device("cpu")
        hosts, given = tree_map_only(cls, lambda one: one.host, (args, given))
        found = function(*hosts, **given)
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], cls):
            return args[0]
        return found if to_host else tree_map_only(torch.Tensor, cls, found)


class FakeMps(TorchFunctionMode):
    """Make tensors on ``mps`` within the block; `copies` counts those that came from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.Tensor.to and _is_mps(args[1:2] or (given.get("device"),)):
            if isinstance(args[0], MpsTensor):
                return args[0]
            _refuse_unordered_copies(given)
            self.copies += 1
            return MpsTensor(args[0])
        if function is torch.Tensor.pin_memory:
            raise AssertionError("pinned memory is for CUDA")
        if _is_mps((given.get("device"),)):
            return MpsTensor(function(*args, **{**given, "device": "cpu"}))
        if getattr(function, "__name__", "") in _READS and isinstance(args[0], MpsTensor):
            return function(args[0].host)
        return function(*args, **given)


def _is_mps(places: Sequence[Any]) -> bool:
    return any(isinstance(one, str | torch.device) and str(one).startswith("mps") for one in places)


def _refuse_unordered_copies(given: Mapping[str, Any]) -> None:
    if given.get("non_blocking"):
        raise AssertionError("a copy with non_blocking=True, which MPS does not order")
