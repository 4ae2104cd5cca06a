"""Map the leaves of nested structures, and rebuild their containers with the same classes.

Containers are lists, deques, tuples, named tuples, mappings of any class and dataclasses.
Everything else is a leaf; leaves that a function does not select (strings, sets, objects) are not
changed.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserList, deque
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

import torch

__all__ = [
    "Leaf",
    "find_batch_size",
    "find_device",
    "is_array",
    "is_container",
    "is_named_tuple",
    "is_number",
    "is_other",
    "is_tensor",
    "is_value",
    "leaves",
    "map_leaves",
    "map_tensors",
    "map_values",
    "refuse_others",
    "tensors_in",
    "type_of",
    "values_in",
]

T = TypeVar("T")
Items = list[tuple[Any, Any]]  # (index, key or field of a child, the child)


class _Kind(NamedTuple):
    """The functions that take one kind of container apart and rebuild it."""

    items: Callable[[Any], Items]
    rebuild: Callable[[Any, Items], Any]
    path: Callable[[Any], str]
    cheap: bool = False  # rebuilt even if no leaf has changed


class Leaf(NamedTuple):
    """A leaf and its path, for example ``['x'][0]``."""

    path: str
    value: Any


def is_tensor(value: Any) -> bool:
    """Return True for a tensor."""
    return isinstance(value, torch.Tensor)


def is_number(value: Any) -> bool:
    """Return True for Python's numbers; members of an enumeration do not count."""
    number = isinstance(value, (bool, int, float, complex)) and not isinstance(value, Enum)
    return number and not is_array(value)  # numpy.float64 is a float


def is_array(value: Any) -> bool:
    """Return True for numpy's arrays and scalars of the dtypes that torch has.

    Subclasses of arrays hold what a tensor would lose, such as a mask.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return False
    whole = type(value) in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)
    if not whole or value.dtype.kind not in "biufc":
        return False
    return isinstance(getattr(torch, value.dtype.name, None), torch.dtype)


def is_value(leaf: Any) -> bool:
    """Return True for what collectives combine as tensors."""
    return is_tensor(leaf) or is_array(leaf)


def is_container(value: Any) -> bool:
    """Return True for the containers that :func:`map_leaves` descends into."""
    return _kind_of(value) is not None


def is_named_tuple(value: Any) -> bool:
    """Return True for instances of ``NamedTuple`` and ``namedtuple`` classes."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def is_other(leaf: Any) -> bool:
    """Return True for what collectives of tensors do not take: strings, sets, objects."""
    taken = leaf is None or is_value(leaf) or is_number(leaf)
    return not taken and not is_container(leaf)


def map_leaves(
    data: T, fn: Callable[[Any], Any], is_leaf: Callable[[Any], bool], *, by_key: bool = False
) -> T:
    """Apply ``fn`` to each leaf that ``is_leaf`` selects, keeping the structure.

    Args:
        data: anything.
        fn: called with the leaves in order.
        is_leaf: also called with containers, which are leaves where it returns True.
        by_key: visit mappings with string keys in sorted order, so that ranks that filled them in
            different orders pair up their collectives.
    """
    if is_leaf(data):
        return cast(T, fn(data))
    kind = _kind_of(data)
    if kind is None:
        return data
    items = kind.items(data)
    mapped: list[Any] = [None] * len(items)
    for place in _order(data, items, by_key):
        mapped[place] = map_leaves(items[place][1], fn, is_leaf, by_key=by_key)
    if not kind.cheap and all(new is old for new, (_, old) in zip(mapped, items, strict=True)):
        return data
    labels = (label for label, _ in items)
    return cast(T, kind.rebuild(data, list(zip(labels, mapped, strict=True))))


def leaves(
    data: Any, is_leaf: Callable[[Any], bool], *, by_key: bool = False, path: str = ""
) -> list[Leaf]:
    """Return the leaves that ``is_leaf`` selects, in the order of :func:`map_leaves`."""
    if is_leaf(data):
        return [Leaf(path, data)]
    kind = _kind_of(data)
    if kind is None:
        return []
    items = kind.items(data)
    selected: list[Leaf] = []
    for place in _order(data, items, by_key):
        label, child = items[place]
        selected += leaves(child, is_leaf, by_key=by_key, path=path + kind.path(label))
    return selected


def map_tensors(data: T, fn: Callable[[torch.Tensor], Any]) -> T:
    """Apply ``fn`` to each tensor of a nested structure, keeping the structure."""
    if isinstance(data, torch.Tensor):
        return cast(T, fn(data))
    kind: Any = type(data)
    if kind is tuple or kind is list:  # hot path: the usual outputs of models
        return cast(T, kind([map_tensors(item, fn) for item in cast(Any, data)]))
    return map_leaves(data, fn, is_tensor, by_key=True)


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested structure, in the order of :func:`map_tensors`."""
    return [leaf.value for leaf in leaves(data, is_tensor, by_key=True)]


def map_values(data: T, fn: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Apply ``fn`` to each tensor, and to each array as a tensor; arrays come back as arrays."""

    def combine(leaf: Any) -> Any:
        if is_tensor(leaf):
            return fn(leaf)
        array = fn(_tensor_of(leaf)).numpy()
        return array if hasattr(leaf, "__setitem__") else array[()]  # a scalar from a scalar

    return map_leaves(data, combine, is_value, by_key=True)


def values_in(data: Any) -> list[torch.Tensor]:
    """Return the tensors, and the arrays as tensors, in the order of :func:`map_values`."""
    values = (leaf.value for leaf in leaves(data, is_value, by_key=True))
    return [value if is_tensor(value) else _tensor_of(value) for value in values]


def _tensor_of(array: Any) -> torch.Tensor:
    """Return a copy of an array: torch takes neither all strides nor all orders of bytes."""
    numpy: Any = sys.modules["numpy"]
    dtype = array.dtype.newbyteorder("=")
    return torch.from_numpy(numpy.array(array, dtype=dtype, order="C"))


def refuse_others(operation: str, data: Any, way: str, path: str = "") -> None:
    """Raise for the first leaf that has a value, and is neither tensor, array nor number.

    Args:
        operation: the collective.
        data: what it is to combine.
        way: the name of the collective for objects.
        path: of ``data``.

    Raises:
        TypeError: there is one.
    """
    others = leaves(data, is_other, by_key=True, path=path)
    if others:
        path, value = others[0]
        raise TypeError(
            f"{operation} cannot combine {path or 'a value'} of type {type_of(value)}: pass "
            f"tensors, numpy arrays and numbers, and all else to {way}."
        )


def type_of(value: Any) -> str:
    """Return the name of a type, and the dtype of an array."""
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + ("" if dtype is None else f" of dtype {dtype}")


def find_batch_size(data: Any) -> int | None:
    """Return the size of dimension 0 of the first tensor that has one; None without any.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import find_batch_size
        >>> find_batch_size({"name": "a", "x": torch.ones(4, 2)})
        4
    """
    tensors = leaves(data, lambda leaf: is_tensor(leaf) and leaf.dim() > 0)
    return int(tensors[0].value.shape[0]) if tensors else None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None without any.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import find_device
        >>> find_device(["a", torch.ones(1)])
        device(type='cpu')
    """
    tensors = leaves(data, is_tensor)
    return tensors[0].value.device if tensors else None


def _order(data: Any, items: Items, by_key: bool) -> list[int]:
    places = list(range(len(items)))
    if by_key and isinstance(data, Mapping) and all(type(key) is str for key, _ in items):
        places.sort(key=lambda place: items[place][0])
    return places


def _kind_of(data: Any) -> _Kind | None:
    if type(data) in _EXACT:
        return _EXACT[type(data)]
    for kind, belongs in _KINDS:
        if belongs(data):
            return kind
    return None


def _copy_of(data: Any, items: Items) -> Any:
    """Return a copy with new entries, and its other attributes (such as a default factory)."""
    new = copy.copy(data)
    for key, value in items:
        new[key] = value
    return new


def _copy_of_mapping(data: Any, items: Items) -> Any:
    return _copy_of(data, items) if isinstance(data, MutableMapping) else type(data)(dict(items))


def _copy_of_dataclass(data: Any, items: Items) -> Any:
    new = copy.copy(data)
    for name, value in items:
        object.__setattr__(new, name, value)  # works for frozen dataclasses too
    return new


def _fields(data: Any) -> Items:
    names = (field.name for field in dataclasses.fields(data))
    return [(name, getattr(data, name)) for name in names if hasattr(data, name)]


def _values(items: Items) -> list[Any]:
    return [value for _, value in items]


def _subscript(key: Any) -> str:
    # The repr of other objects may hold an address, which differs between ranks.
    plain = isinstance(key, (str, int, float, bytes, type(None)))
    return f"[{key!r}]" if plain else f"[{type(key).__name__}]"


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _by_index(data: Any) -> Items:
    return list(enumerate(data))


def _by_key(data: Any) -> Items:
    return list(data.items())


def _by_field(data: Any) -> Items:
    return list(zip(data._fields, data, strict=True))


_LIST = _Kind(_by_index, lambda _, items: _values(items), _subscript, cheap=True)
_TUPLE = _Kind(_by_index, lambda _, items: tuple(_values(items)), _subscript, cheap=True)
_DICT = _Kind(_by_key, lambda _, items: dict(items), _subscript, cheap=True)
_NAMED = _Kind(_by_field, lambda data, items: data._make(_values(items)), lambda name: f".{name}")
_MAPPING = _Kind(_by_key, _copy_of_mapping, _subscript)
_TUPLE_LIKE = _Kind(_by_index, lambda data, items: type(data)(_values(items)), _subscript)
_SEQUENCE = _Kind(_by_index, _copy_of, _subscript)
_DATACLASS = _Kind(_fields, _copy_of_dataclass, lambda name: f".{name}")

_EXACT: dict[type, _Kind | None] = {
    list: _LIST,
    tuple: _TUPLE,
    dict: _DICT,
    str: None,
    torch.Size: None,
}
_KINDS: tuple[tuple[_Kind, Callable[[Any], bool]], ...] = (
    (_MAPPING, lambda data: isinstance(data, Mapping)),
    (_NAMED, is_named_tuple),
    (_TUPLE_LIKE, lambda data: isinstance(data, tuple) and not isinstance(data, torch.Size)),
    (_SEQUENCE, lambda data: isinstance(data, (list, deque, UserList))),
    (_DATACLASS, _is_dataclass),
)
