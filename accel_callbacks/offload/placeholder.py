"""Tensors that stand for weights that are not in memory: they have a shape and never compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

__all__ = ["ON_DISK", "AbsentWeight", "AbsentWeightError", "placeholder", "unwritable"]

ON_DISK = "on disk"


class AbsentWeightError(RuntimeError):
    """A computation, copy or move needs a weight that is not in memory.

    Example:
        >>> from accel_callbacks.offload.placeholder import AbsentWeightError
        >>> issubclass(AbsentWeightError, RuntimeError)
        True
    """


def _getter(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return found


# What is known of a weight without its values.
_KNOWN: frozenset[Callable[..., Any]] = frozenset(
    [
        *(
            _getter(name)
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "names"),
                *("is_meta", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_sparse", "is_quantized"),
                *("is_leaf", "grad", "grad_fn", "requires_grad", "_version", "output_nr"),
                *("is_nested", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
            )
            if hasattr(getattr(torch.Tensor, name, None), "__get__")
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("size", "stride", "numel", "nelement", "dim", "ndimension", "element_size"),
                *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference"),
                *("is_conj", "is_neg", "storage_offset", "__hash__", "__len__", "get_device"),
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
_NOT_SHARED = frozenset([torch.Tensor.is_shared, torch.Tensor.is_pinned])
_DETACHED = frozenset([torch.Tensor.detach, _getter("data")])
_REQUIRES_GRAD = torch.Tensor.requires_grad_
_SET_REQUIRES_GRAD = getattr(torch.Tensor.requires_grad, "__set__")  # noqa: B009
_SET_GRAD = getattr(torch.Tensor.grad, "__set__")  # noqa: B009


class AbsentWeight(torch.Tensor):
    """A weight that is not in memory: a tensor on the meta device that refuses to compute.

    A plain one would not do: on a CPU, products with tensors on the meta device are uninitialized
    memory and no error. Shape, dtype and ``requires_grad`` are known, and freezing it is allowed.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.placeholder import placeholder
        >>> weight = placeholder(torch.empty(2, 3), "0.weight", "on disk")
        >>> tuple(weight.shape), isinstance(weight, torch.nn.Parameter)
        ((2, 3), True)
        >>> torch.ones(3) @ weight.T
        Traceback (most recent call last):
        accel_callbacks.offload.placeholder.AbsentWeightError: 0.weight is on disk, ...
    """

    weight_name: str
    weight_place: str
    is_trained: bool  # requires_grad, without the detour over __torch_function__
    bring: Callable[[], torch.Tensor] | None = None  # fetches the weight, in a backward pass only

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about the tensor; raise for everything that needs its values."""
        if func in _KNOWN or func == _SET_GRAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _NOT_SHARED:
            return False
        if func in _DETACHED:
            return args[0]._detached()
        if func in (_REQUIRES_GRAD, _SET_REQUIRES_GRAD):
            return _set_requires_grad(func, *args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:
            return _recomputed(func, args, kwargs or {})
        raise _error(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise for operators that are called past ``__torch_function__``, as from C++."""
        raise _error(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return name, place, shape and dtype."""
        return (
            f"AbsentWeight({self.weight_name}, {self.weight_place}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        """Return another placeholder of the same weight; tied ones stay tied."""
        if id(self) not in memo:
            memo[id(self)] = _rebuild(*self._parts())
        copied: AbsentWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle name and shape, without values."""
        return _rebuild, self._parts()

    def _detached(self) -> AbsentWeight:
        shape, dtype, _, _, name, place = self._parts()
        made = _rebuild(shape, dtype, False, False, name, place)
        made.bring = self.bring
        return made

    def _parts(self) -> tuple[Any, ...]:
        return (
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            getattr(self, "_is_param", False),
            self.weight_name,
            self.weight_place,
        )


def placeholder(like: torch.Tensor, name: str, place: str) -> AbsentWeight:
    """Return the tensor that stands for a weight while it is not in memory.

    Args:
        like: has its shape, dtype and ``requires_grad``; a parameter gives a parameter.
        name: of the weight, for errors.
        place: where the weight is, for errors: ``"on disk"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.placeholder import placeholder
        >>> placeholder(torch.empty(2), "bias", "on disk").device
        device(type='meta')
    """
    parameter = isinstance(like, torch.nn.Parameter)
    return _rebuild(tuple(like.shape), like.dtype, like.requires_grad, parameter, name, place)


def unwritable(model: torch.nn.Module) -> set[str]:
    """Return the names in a model's state dict of weights that stay in files, and are not written.

    Example:
        >>> import torch
        >>> from accel_callbacks.offload.placeholder import unwritable
        >>> unwritable(torch.nn.Linear(1, 1))
        set()
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        name for name, one in named if isinstance(one, AbsentWeight) and one.weight_place == ON_DISK
    }


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    name: str,
    place: str,
) -> AbsentWeight:
    made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(AbsentWeight)
    made.weight_name, made.weight_place = name, place
    if parameter:
        made._is_param = True  # isinstance(..., torch.nn.Parameter) asks for it
    with torch._C.DisableTorchFunctionSubclass():
        made.requires_grad_(requires_grad)
    made.is_trained = requires_grad
    return made


def _set_requires_grad(func: Callable[..., Any], weight: Any, value: bool = True) -> Any:
    if value and not weight.requires_grad:
        raise AbsentWeightError(
            f"{weight.weight_name} is {weight.weight_place} and cannot be trained, since its "
            "gradient would be lost: keep it resident, by a device for it in the device_map, or "
            "set requires_grad before the model is dispatched."
        )
    weight.is_trained = value
    with torch._C.DisableTorchFunctionSubclass():
        return func(weight, value)


def _error(func: Callable[..., Any], args: Any, kwargs: Any) -> AbsentWeightError:
    absent = next(_absent_in((*args, *(kwargs or {}).values())))
    name, place = absent.weight_name, absent.weight_place
    called = getattr(func, "__name__", str(func))
    if called in {"to", "cuda", "cpu", "half", "float", "bfloat16", "double", "type"}:
        return AbsentWeightError(
            f"{name} is {place}, so the model can neither be moved nor converted by "
            f".{called}(): give the device_map and dtype= to load_checkpoint_and_dispatch, or "
            "take the weights back with accel_callbacks.utils.remove_hook_from_submodules(model)."
        )
    return AbsentWeightError(
        f"{name} is {place}, and only here while its module runs, but {called}() needs it: call "
        "the module, or use `with accel_callbacks.offload.onloaded(module):` around the code."
    )


def _recomputed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute with fetched weights: activation checkpointing runs parts of a unit once more."""
    fetched: dict[int, tuple[AbsentWeight, torch.Tensor]] = {}

    def weight(value: Any) -> Any:
        if isinstance(value, AbsentWeight):
            if value.bring is None or value.is_trained:
                raise _error(func, args, kwargs)
            if id(value) not in fetched:
                fetched[id(value)] = value, value.bring()
            return fetched[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(weight(one) for one in value)
        return value

    new = [weight(one) for one in args]
    options = {name: weight(one) for name, one in kwargs.items()}
    versions = [one._version for _, one in fetched.values()]
    result = func(*new, **options)
    for (absent, one), version in zip(fetched.values(), versions, strict=True):
        if one._version != version:
            raise AbsentWeightError(
                f"{absent.weight_name} is {absent.weight_place} and was changed in place while it "
                "was in memory, and the change would be lost: keep it resident, by a device in "
                "the device_map."
            )
    return result


def _absent_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, AbsentWeight):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _absent_in(value)


def refuse(weight: AbsentWeight, why: str) -> NoReturn:
    """Raise the error for a weight that is needed in memory."""
    raise AbsentWeightError(f"{weight.weight_name} is {weight.weight_place}: {why}")
