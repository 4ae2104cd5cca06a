"""Read pickles without executing them: what they import or call becomes a record of it.

The caller uses the records that it knows. It must not traverse, compare, print or hash values that
may be nested: a few bytes of pickle make a value that contains itself, or one that holds another
2**60 times.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from checkpoint_io.errors import CorruptCheckpointError

__all__ = [
    "Name",
    "PersistentId",
    "Record",
    "describe_entry",
    "entries_of",
    "natural_numbers",
    "read_inert",
]

_MAX_DIMENSIONS = 64  # those that torch allows


class _Dict(dict[Any, Any]):
    """A dict of a pickle, whose keys can be hashed in a moment."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        # The hash of a tuple is that of its items: of nested ones it may never end.
        is_index = isinstance(key, int) and -(2**63) <= key < 2**63
        if not is_index and not isinstance(key, (str, Name, Record)):
            raise ValueError("a key is neither text nor an object")
        super().__setitem__(key, value)


@dataclass(frozen=True)
class Name:
    """The name of a class or function, which is not imported."""

    text: str


@dataclass(eq=False, repr=False)
class PersistentId:
    """A reference to something outside of the pickle, such as the memory of a tensor.

    Args:
        value: says what is referred to.
    """

    value: Any


@dataclass(eq=False, repr=False)
class Record:
    """An object that the pickle describes and that is not created.

    Args:
        maker: the class or function to call, a :class:`Name` in every pickle of Python.
        args: of the call.
        state: passed to the object's `__setstate__`.
        entries: what is assigned to its keys, in order.
    """

    maker: Any
    args: Any
    state: Any = None
    entries: _Dict = field(default_factory=_Dict)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep an entry."""
        self.entries[key] = value

    def append(self, value: Any) -> None:
        """Drop an item: no list of a class of its own is read."""

    @property
    def kind(self) -> str:
        """Full name of the class."""
        return self.maker.text if isinstance(self.maker, Name) else ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Attributes of the object; empty if it has none."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # the state of a class with __slots__
        return state if isinstance(state, dict) else {}


class _Unpickler(pickle._Unpickler):
    """Python's own machine for pickles, with records in place of imports and calls.

    It is the one written in Python, because only that has a table of opcodes that can be changed.
    """

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Name:
        """Return the name of a class or function."""
        return Name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> PersistentId:
        """Return a reference."""
        return PersistentId(pid)

    def record_call(self) -> None:
        """Replace a function and its arguments, on top, by the record of the call."""
        args = self.stack.pop()
        self.stack[-1] = Record(self.stack[-1], args)

    def record_keyword_call(self) -> None:
        """Replace a class and both kinds of arguments, on top, likewise."""
        named = self.stack.pop()
        self.record_call()
        self.stack[-1].args = (self.stack[-1].args, named)

    def record_state(self) -> None:
        """Keep the state on top in the record below."""
        state = self.stack.pop()
        self.stack[-1].state = state

    def begin_dict(self) -> None:
        """Push an empty dict."""
        self.stack.append(_Dict())

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: record_call,
        pickle.NEWOBJ[0]: record_call,
        pickle.NEWOBJ_EX[0]: record_keyword_call,
        pickle.BUILD[0]: record_state,
        pickle.EMPTY_DICT[0]: begin_dict,
    }
    # torch writes none of them. Sets and DICT hash anything, BYTEARRAY8 reserves what it claims to
    # need, INST and OBJ call, and the EXT ones look into a registry of this process.
    for code in (
        *(pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8),
        *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    ):
        del dispatch[code[0]]


def read_inert(
    document: bytes, location: str, kind: str = "the metadata of torch.distributed.checkpoint"
) -> Any:
    """Read a pickle as plain values, :class:`Name`, :class:`Record` and :class:`PersistentId`.

    Args:
        document: the pickle.
        location: of it, for messages.
        kind: what it should be, for messages.

    Raises:
        CorruptCheckpointError: it is damaged, or holds opcodes that torch never writes.
    """
    try:
        return _Unpickler(io.BytesIO(document)).load()
    except Exception as error:  # of many types for damaged input
        raise CorruptCheckpointError(
            f"{location}: it cannot be read as {kind} "
            f"({type(error).__name__}: {error!s:.200}); copy it again"
        ) from error


@contextmanager
def describe_entry(complaint: str) -> Iterator[None]:
    """Raise CorruptCheckpointError, with a complaint, for an entry that is not as it should be."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{complaint} ({type(error).__name__}: {error!s:.100}); copy the folder again"
        ) from error


def natural_numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a shape: a list, a tuple or a `torch.Size` of :func:`read_inert`.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Record):
        (value,) = value.args
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMENSIONS:
        raise ValueError("it has a size that is not a short list of numbers")
    if any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 2**63 for n in value):
        raise ValueError("it has a size that is not a list of natural numbers")
    return tuple(value)


def entries_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dict or an `OrderedDict` of :func:`read_inert` by name.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Record) and value.kind == "collections.OrderedDict":
        value = value.entries
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("it is not a dict with names")
    return value
