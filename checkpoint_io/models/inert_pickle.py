"""What a pickle says, without doing it: no class is imported and nothing is called.

Classes and calls become plain records, from which a reader takes what it knows. A reader must not
walk, compare, print or hash what may be nested: a few bytes make a value that contains itself, or
one thing 2**60 times.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint_io.errors import CorruptCheckpointError


@dataclass(frozen=True)
class Name:
    """A class or function that is only named."""

    text: str


@dataclass(eq=False, repr=False)
class Record:
    """What would have been made: by what, from what, and the state it would have got.

    Args:
        maker: a :class:`Name` in all that Python writes.
        args: of the call.
        state: what the object was to be filled with.
        items: what was to be put in, in order.
    """

    maker: Any
    args: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Full name of its class."""
        return self.maker.text if isinstance(self.maker, Name) else ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its attributes; empty if it has none."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # a class with slots
        return state if isinstance(state, dict) else {}


def read_inert(document: bytes, where: str) -> Any:
    """Read a pickle as plain values, :class:`Name` and :class:`Record`.

    Raises:
        CorruptCheckpointError: it is damaged, or has what no data of torch has.
    """
    try:
        return _Machine().run(document)
    except Exception as error:  # damaged input fails in many ways
        raise CorruptCheckpointError(
            f"{where}: it cannot be read as the metadata of torch.distributed.checkpoint "
            f"({type(error).__name__}: {error!s:.200}); copy it again"
        ) from error


class _Machine:
    """The stack, the marks and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, document: bytes) -> Any:
        """Go through the document once; references keep the result as small as it is."""
        for code, argument, _ in pickletools.genops(document):
            if code.name == "STOP":
                return self._stack.pop()
            if code.name in _VALUES:
                self._stack.append(argument)
            else:
                _DO[code.name](self, argument)
        raise ValueError("it ends too early")

    def push(self, value: Any) -> None:
        """Put on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take from the stack."""
        return self._stack.pop()

    def mark(self, _: Any) -> None:
        """Begin a list of items."""
        self._marks.append(self._stack)
        self._stack = []

    def items(self) -> list[Any]:
        """Everything since the last mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def put(self, key: int | None) -> None:
        """Remember the top."""
        self._memo[len(self._memo) if key is None else key] = self._stack[-1]

    def get(self, key: int) -> None:
        """Push what was remembered."""
        self._stack.append(self._memo[key])

    def extend(self, items: list[Any]) -> None:
        """Add to the list or the record on top."""
        top = self._stack[-1]
        (top.items if isinstance(top, Record) else top).extend(items)

    def assign(self, pairs: list[Any]) -> None:
        """Set keys and values of the dict or the record on top.

        What is nested, or a number, can be made so that its hash takes for ever.
        """
        top = self._stack[-1]
        if not all(isinstance(key, (str, Name, Record)) for key in pairs[::2]):
            raise ValueError("a key is neither text nor an object")
        if isinstance(top, Record):
            top.items.append(pairs)
        else:
            top.update(zip(pairs[::2], pairs[1::2], strict=True))

    def make(self, count: int) -> None:
        """Note a call, whose function and arguments are on top."""
        parts = [self._stack.pop() for _ in range(count)][::-1]
        self._stack.append(Record(parts[0], tuple(parts[1:]) if count > 2 else parts[1]))

    def build(self, _: Any) -> None:
        """Note the state on top for what is below."""
        state = self._stack.pop()
        self._stack[-1].state = state

    def named(self, _: Any) -> None:
        """Note the name of a class from its two parts."""
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(Name(f"{module}.{name}"))

    def tuple_of(self, count: int) -> None:
        """Make a tuple of what is on top."""
        parts = self._stack[-count:]
        del self._stack[-count:]
        self._stack.append(tuple(parts))


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_DO: Mapping[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "NONE": lambda m, a: m.push(None),
    "NEWTRUE": lambda m, a: m.push(True),
    "NEWFALSE": lambda m, a: m.push(False),
    "MARK": _Machine.mark,
    "POP": lambda m, a: m.pop(),
    "POP_MARK": lambda m, a: m.items(),
    "EMPTY_TUPLE": lambda m, a: m.push(()),
    "EMPTY_LIST": lambda m, a: m.push([]),
    "EMPTY_DICT": lambda m, a: m.push({}),
    "TUPLE": lambda m, a: m.push(tuple(m.items())),
    "TUPLE1": lambda m, a: m.tuple_of(1),
    "TUPLE2": lambda m, a: m.tuple_of(2),
    "TUPLE3": lambda m, a: m.tuple_of(3),
    "LIST": lambda m, a: m.push(m.items()),
    "APPEND": lambda m, a: m.extend([m.pop()]),
    "APPENDS": lambda m, a: m.extend(m.items()),
    "SETITEM": lambda m, a: m.assign([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, a: m.assign(m.items()),
    "GLOBAL": lambda m, a: m.push(Name(a.replace(" ", ".", 1))),
    "STACK_GLOBAL": _Machine.named,
    "REDUCE": lambda m, a: m.make(2),
    "NEWOBJ": lambda m, a: m.make(2),
    "NEWOBJ_EX": lambda m, a: m.make(3),
    "BUILD": _Machine.build,
    "MEMOIZE": _Machine.put,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
}
