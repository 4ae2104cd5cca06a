"""The tensor that stands for an absent weight."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["AbsentWeightError", "is_placeholder", "placeholder"]


class AbsentWeightError(RuntimeError):
    """A computation asked for a weight that is not in memory now; the message has its name.

    Example:
        >>> from accel_callbacks.offload.placeholder import AbsentWeightError
        >>> issubclass(AbsentWeightError, RuntimeError)
        True
    """


#: Functions of torch that read no values.
_WITHOUT_VALUES = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "data_ptr", "__len__"),
    *("requires_grad_", "detach", "detach_", "register_hook", "untyped_storage", "__hash__"),
    *("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "_has_compatible_shallow_copy_type"),
    *("is_shared", "is_pinned", "type", "is_same_size", "backward", "get_device"),
}
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


class _Placeholder(torch.Tensor):
    """A tensor on the meta device that has no values and raises where they are asked for."""

    _name: str
    _where: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            attribute = func.__self__.__name__
            allowed = attribute not in _VIEWS and (name == "__get__" or attribute != "data")
        elif name == "to":
            target = args[1] if len(args) > 1 else (kwargs or {}).get("device")
            allowed = str(target) == "meta"
        else:
            allowed = name in _WITHOUT_VALUES
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return _like(result, args[0]) if name in ("detach", "to") else result
        absent = next(one for one in _flat(args, kwargs) if isinstance(one, _Placeholder))
        raise AbsentWeightError(
            f"{absent._name} is {absent._where}: {name or func} needs its values"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _remake(*self._parts())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remake, self._parts()

    def _parts(self) -> tuple[Any, ...]:
        is_param = bool(vars(self).get("_is_param"))
        return tuple(self.shape), self.dtype, self.requires_grad, is_param, self._name, self._where

    def __repr__(self, **options: Any) -> Any:  # type: ignore[override]
        return f"placeholder({self._name!r}, {self._where!r}, shape={tuple(self.shape)})"


def _flat(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for one in [*args, *(kwargs or {}).values()]:
        found += one if isinstance(one, (list, tuple)) else [one]
    return found


def _remake(
    shape: tuple[int, ...], dtype: torch.dtype, grad: bool, is_param: bool, name: str, where: str
) -> torch.Tensor:
    data = torch.empty(shape, dtype=dtype, device="meta")
    new: _Placeholder = torch.Tensor._make_subclass(_Placeholder, data, grad)
    new._name, new._where = name, where
    if is_param:
        vars(new)["_is_param"] = True
    return new


def _like(result: Any, old: Any) -> Any:
    return _remake(
        tuple(result.shape), result.dtype, result.requires_grad, False, old._name, old._where
    )


def placeholder(tensor_like: torch.Tensor, name: str, where: str) -> torch.Tensor:
    """Return a tensor without values that raises AbsentWeightError where they are asked for.

    Args:
        tensor_like: of which it has shape, dtype and ``requires_grad``; of a parameter it is one.
        name: the name in the message.
        where: the rest of the message, such as ``"on disk"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.placeholder import placeholder
        >>> weight = placeholder(torch.nn.Linear(2, 1).weight, "head.weight", "on disk")
        >>> weight.shape, weight.device.type
        (torch.Size([1, 2]), 'meta')
        >>> torch.ones(1, 2) @ weight.T
        Traceback (most recent call last):
        accel_callbacks.offload.placeholder.AbsentWeightError: head.weight is on disk: ...
    """
    is_param = isinstance(tensor_like, torch.nn.Parameter)
    return _remake(
        tuple(tensor_like.shape),
        tensor_like.dtype,
        tensor_like.requires_grad,
        is_param,
        name,
        where,
    )


def is_placeholder(tensor: Any) -> bool:
    """Return whether a tensor stands for an absent weight.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.placeholder import is_placeholder
        >>> is_placeholder(torch.ones(1))
        False
    """
    return isinstance(tensor, _Placeholder)
