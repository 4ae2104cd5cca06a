"""Placeholders of weights that are not in memory: tensors with a shape that never compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from accel_callbacks.placeholder import Placeholder

__all__ = [
    "ON_DISK",
    "AbsentWeight",
    "AbsentWeightError",
    "LostGradient",
    "is_absent",
    "on_meta",
    "placeholder",
]

ON_DISK = "on disk"


class AbsentWeightError(RuntimeError):
    """A computation, copy or move needs a weight that is not in memory.

    Example:
        >>> from accel_callbacks.models.offload.placeholder import AbsentWeightError
        >>> issubclass(AbsentWeightError, RuntimeError)
        True
    """


def _getter(name: str) -> Callable[..., Any]:
    getter: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return getter


# What is known of a weight without its values.
_KNOWN: frozenset[Callable[..., Any]] = frozenset(
    [
        *(
            _getter(name)
            for name in (
                *("shape", "dtype", "layout", "ndim", "nbytes", "itemsize", "names"),
                *("is_sparse", "is_quantized"),
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
                *("is_conj", "is_neg", "storage_offset", "__hash__", "__len__"),
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
# As of a tensor where its module runs: adapters are made there, and inputs are sent there.
_OF_DEVICE: dict[Callable[..., Any], Callable[[torch.device], Any]] = {
    _getter("device"): lambda device: device,
    _getter("is_meta"): lambda device: device.type == "meta",
    _getter("is_cpu"): lambda device: device.type == "cpu",
    _getter("is_cuda"): lambda device: device.type == "cuda",
    _getter("is_xpu"): lambda device: device.type == "xpu",
    _getter("is_mps"): lambda device: device.type == "mps",
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
_NOT_SHARED = frozenset([torch.Tensor.is_shared, torch.Tensor.is_pinned])
_DETACHED = frozenset([torch.Tensor.detach, _getter("data")])
_REQUIRES_GRAD = torch.Tensor.requires_grad_
_SET_REQUIRES_GRAD = getattr(torch.Tensor.requires_grad, "__set__")  # noqa: B009
_SET_GRAD = getattr(torch.Tensor.grad, "__set__")  # noqa: B009


class Fetch(Protocol):
    """The weight behind a placeholder."""

    def __call__(self) -> torch.Tensor:
        """Return the weight where its module runs."""
        raise NotImplementedError

    def held(self) -> torch.Tensor | None:
        """Return the tensor in memory that holds it, None if it is in a file."""
        raise NotImplementedError


class AbsentWeight(Placeholder):
    """A weight that is not in memory: a tensor without values, which refuses to compute.

    One on the meta device would not do: on a CPU, products with it are uninitialized memory and no
    error. Shape, dtype and ``requires_grad`` are known, freezing it is allowed, and its device is
    that on which its module runs, since others put there what belongs to it.

    Example:
        >>> import torch
        >>> from accel_callbacks.models.offload.placeholder import placeholder
        >>> weight = placeholder(torch.nn.Linear(3, 2).weight, "0.weight", "on disk")
        >>> tuple(weight.shape), isinstance(weight, torch.nn.Parameter)
        ((2, 3), True)
        >>> torch.ones(3) @ weight.T
        Traceback (most recent call last):
        accel_callbacks.models.offload.placeholder.AbsentWeightError: 0.weight is on disk, ...
    """

    weight_name: str
    weight_place: str
    weight_device: torch.device
    weight_fetch: Fetch | None
    # Without the detours over __torch_function__, and over the metaclass of parameters.
    is_trained: bool  # requires_grad
    is_parameter: bool

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
        if func in _OF_DEVICE:
            return _OF_DEVICE[func](args[0].weight_device)
        if func in _NOT_SHARED:
            return False
        if func in _DETACHED:
            return args[0]._detach()
        if func in (_REQUIRES_GRAD, _SET_REQUIRES_GRAD):
            return _set_requires_grad(func, *args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:  # activations are computed again in backward
            return _recompute(func, args, kwargs or {})
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

    @property
    def stays_in_file(self) -> bool:
        """True if the weight is on disk."""
        return self.weight_place == ON_DISK

    def kept(self) -> torch.Tensor | None:
        """Return the tensor in memory that holds the weight, None if there is none."""
        return None if self.weight_fetch is None else self.weight_fetch.held()

    def filled(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value as the parameter or buffer that this stands for."""
        return torch.nn.Parameter(value, self.is_trained) if self.is_parameter else value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return name, place, shape and dtype."""
        return (
            f"AbsentWeight({self.weight_name}, {self.weight_place}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        """Return another placeholder of the same weight; tied ones stay tied."""
        if id(self) not in memo:
            copied = _rebuild(*self._parts())
            copied.weight_fetch = copy.deepcopy(self.weight_fetch, memo)
            memo[id(self)] = copied
        duplicate: AbsentWeight = memo[id(self)]
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle name and shape, without values."""
        return _rebuild, self._parts()

    def _detach(self) -> AbsentWeight:
        shape, dtype, _, _, *rest = self._parts()
        return _rebuild(shape, dtype, False, False, *rest)

    def _parts(self) -> tuple[Any, ...]:
        return (
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            self.is_parameter,
            self.weight_name,
            self.weight_place,
            self.weight_device,
            self.weight_fetch,
        )


def is_absent(tensor: Any) -> bool:
    """Return whether a tensor has no values: a placeholder, or one on the meta device."""
    return isinstance(tensor, AbsentWeight) or (isinstance(tensor, torch.Tensor) and tensor.is_meta)


def placeholder(
    like: torch.Tensor,
    name: str,
    place: str,
    device: torch.device | str = "meta",
    fetch: Fetch | None = None,
) -> AbsentWeight:
    """Return the tensor that stands for a weight while it is not in memory.

    Args:
        like: has its shape, dtype and ``requires_grad``; a parameter gives a parameter.
        name: of the weight, for errors.
        place: where the weight is, for errors: ``"on disk"``.
        device: where its module runs.
        fetch: gives the weight to code that runs again in the backward pass, outside of its module;
            a picklable object.
    """
    parameter = isinstance(like, torch.nn.Parameter)
    kind = (tuple(like.shape), like.dtype, like.requires_grad, parameter)
    return _rebuild(*kind, name, place, torch.device(device), fetch)


def on_meta(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a plain tensor or parameter with the shape of another one, on the meta device.

    Args:
        like: the other one; a placeholder, too.
        dtype: that of the other one, if ``None``.
    """
    tensor = torch.empty(tuple(like.shape), dtype=dtype or like.dtype, device="meta")
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor


class LostGradient(NamedTuple):
    """A gradient hook that raises, since the gradient of a released weight would be lost.

    Args:
        name: of the weight.
    """

    name: str

    def __call__(self, gradient: torch.Tensor) -> NoReturn:
        """Raise with the name of the weight."""
        raise AbsentWeightError(
            f"{self.name} is offloaded and requires a gradient, which would be lost: freeze it "
            "with requires_grad_(False), or keep it resident by a device in the device_map."
        )


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
    name: str,
    place: str,
    device: torch.device,
    fetch: Fetch | None,
) -> AbsentWeight:
    weight = torch.empty(shape, dtype=dtype, device="meta").as_subclass(AbsentWeight)
    weight.weight_name, weight.weight_place, weight.weight_device = name, place, device
    weight.weight_fetch = fetch
    weight.is_parameter = parameter
    if parameter:
        weight._is_param = True  # isinstance(..., torch.nn.Parameter) asks for it
    with torch._C.DisableTorchFunctionSubclass():
        weight.requires_grad_(requires_grad)
    weight.is_trained = requires_grad
    return weight


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
    if place.startswith("not in "):
        return AbsentWeightError(
            f"{name} is {place}, so it has no values, and {called}() needs them: load it from "
            "elsewhere, or initialize it."
        )
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


def _recompute(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute with fetched weights."""
    fetched: dict[int, tuple[AbsentWeight, torch.Tensor, int]] = {}

    def real(value: Any) -> Any:
        if isinstance(value, AbsentWeight):
            if value.weight_fetch is None or value.is_trained:
                raise _error(func, (value,), None)
            if id(value) not in fetched:
                weight = value.weight_fetch()
                fetched[id(value)] = value, weight, weight._version
            return fetched[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(map(real, value))
        return value

    result = func(*real(tuple(args)), **{name: real(value) for name, value in kwargs.items()})
    for absent, weight, version in fetched.values():
        if weight._version != version:
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
