"""Read pickles without executing them: files of torch.save, and other metadata as plain records.

This is the only module that calls `torch.load`; a test checks that each call passes
`weights_only=True`.

`read_inert` turns classes and calls of a pickle into records, of which the caller uses those that
it knows. The caller must not traverse, compare, print or hash values that may be nested: a few
bytes of pickle make a value that contains itself, or one that holds another 2**60 times.
"""

from __future__ import annotations

import codecs
import io
import os
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.local_files import split_path
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import RangeReader, open_store
from checkpoint_io.weights.source import (
    Destination,
    Rows,
    Wanted,
    WeightFile,
    WeightInfo,
    shard_of_each,
)

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_READ_AHEAD = 4 * 1024 * 1024
_MAX_DIMENSIONS = 64  # those that torch allows
_MAX_REPEATS = 64  # uses of stored bytes, by tied names or in expanded tensors
_SMALL = 64 * 1024 * 1024  # bytes that tensors may take in any case


class TorchSource:
    """The tensors of some files of `torch.save`.

    Args:
        url: of the files, for messages.
        files: the files; they are read immediately (mapped into memory if they are local).
        weight_map: names to labels of files, from an index.

    Raises:
        CorruptCheckpointError: a file is damaged or holds more than tensors, or none has a tensor
            that the index names.
    """

    def __init__(
        self, url: str, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.where, self.files = url, files
        self.tied: dict[str, str] = {}
        self._state: dict[str, torch.Tensor] = {}
        labels, stored = [file.label for file in files], [read_torch_file(file) for file in files]
        for key, number in shard_of_each(url, labels, stored, weight_map).items():
            self._state[key] = stored[number][key]
        storages = [tensor.untyped_storage() for tensor in self._state.values()]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        wanted = sum(tensor.nbytes for tensor in self._state.values())
        refuse_repetition(wanted, sum(held.values()), url)
        self.infos = {key: WeightInfo(t.dtype, tuple(t.shape)) for key, t in self._state.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a stored tensor without a copy; tied ones share memory."""
        return self._state[name]

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Copy tensors into their targets."""
        for key, target in wanted:
            tensor = self._state[key]
            rows = Rows(0, tensor.shape[0] if tensor.dim() else 1)
            Destination(self.infos[key], target).put(rows, tensor)
            progress.add(tensor.nbytes)


def read_torch_file(file: WeightFile) -> dict[str, torch.Tensor]:
    """Return the state dict in one file; refuse anything but tensors in plain containers."""
    with file.open() as reader, _refusals(file.where):
        stream: IO[bytes] = io.BufferedReader(RangeFile(reader), _READ_AHEAD)
        is_zip = _check_archive(stream, file.where)
        folder = local_folder(file.store)
        if is_zip and folder is not None:  # mapped, so that only the copied tensors are read
            path = os.path.join(folder, file.name)
            document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            document = torch.load(stream, map_location="cpu", weights_only=True)
    return _state_dict(document, file.where)


def read_restricted(reader: RangeReader, location: str) -> Any:
    """Return what one `torch.save` wrote into a part of a file, with the same restrictions."""
    stream = io.BufferedReader(RangeFile(reader), _READ_AHEAD)
    with _refusals(location):
        refuse_compressed(stream, location)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)


def load_restricted(file: str | os.PathLike[str] | IO[bytes], map_location: Any = None) -> Any:
    """Return what one `torch.save` wrote: tensors, numpy arrays and plain values.

    Args:
        file: path or fsspec URL, or an open file that can seek.
        map_location: as of `torch.load`.

    Raises:
        CorruptCheckpointError: it is damaged, or holds objects of other classes.
    """
    with ExitStack() as stack:
        if isinstance(file, (str, os.PathLike)):
            location = os.fspath(file)
            folder, name = split_path(location)
            store = open_store(folder or ".")
            reader = stack.enter_context(WeightFile.at(store, name).open())
            stream: IO[bytes] = io.BufferedReader(RangeFile(reader), _READ_AHEAD)
        else:
            stream, location = file, str(getattr(file, "name", "the open file"))
        with _refusals(location), torch.serialization.safe_globals(_array_parts()):
            _check_archive(stream, location)
            return torch.load(stream, map_location=map_location, weights_only=True)


def _array_parts() -> list[Any]:
    """Return what pickles of numbers of numpy call, by its names there; none of it runs code."""
    makers = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and 2
    named = [(make, f"{module}.{name}") for name, make in makers.items() for module in modules]
    types = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
    return [*named, *types, type(np.dtype(bool)), np.ndarray, np.dtype, codecs.encode]


def _check_archive(stream: IO[bytes], location: str) -> bool:
    """Return whether a file is a zip archive, refused if compressed; it is at its start again."""
    is_zip = stream.read(4) == b"PK\x03\x04"
    if is_zip:
        refuse_compressed(stream, location)
    stream.seek(0)
    return is_zip


def refuse_compressed(stream: IO[bytes], location: str) -> None:
    """Refuse compressed archives, which torch.save never writes."""
    # a small one could expand until it fills the memory
    with zipfile.ZipFile(stream) as archive:
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise CorruptCheckpointError(
                f"{location} was refused: it is a compressed archive, which torch.save does not "
                "write; save its weights again with save_model"
            )


def refuse_repetition(wanted: int, held: int, location: str) -> None:
    """Raise CorruptCheckpointError if a few stored bytes would fill the memory.

    Args:
        wanted: bytes of all tensors.
        held: bytes that are stored.
        location: of the files, for messages.
    """
    if wanted > _MAX_REPEATS * held + _SMALL:
        raise CorruptCheckpointError(
            f"{location} was refused: its tensors would take {wanted} bytes, and it stores {held} "
            "of them (expanded tensors); save contiguous ones"
        )


@contextmanager
def _refusals(location: str) -> Iterator[None]:
    """Raise CorruptCheckpointError for any error of torch: it has many types for damaged input."""
    try:
        yield
    except (OSError, MemoryError, CorruptCheckpointError):
        raise
    except Exception as error:
        raise _refusal(location, error) from error


def _refusal(location: str, error: Exception) -> CorruptCheckpointError:
    """Return the error that explains why a file was not read."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if type(error).__name__ == "UnpicklingError":
        return CorruptCheckpointError(
            f"{location} was refused: it is damaged, or holds Python objects that only full "
            f"unpickling can create, which may run code ({error!s:.300}). Only tensors in plain "
            "containers are read; if you trust the file, save its weights again with save_model or "
            "torch.save(model.state_dict())"
        )
    return CorruptCheckpointError(
        f"{location}: torch cannot read it ({type(error).__name__}: {reason:.300}); copy it again"
    )


def _state_dict(document: Any, location: str) -> dict[str, torch.Tensor]:
    """Return the state dict in the content of a file."""
    if isinstance(document, Mapping):
        inner = [document[key] for key in _WRAPPERS if isinstance(document.get(key), Mapping)]
        for candidate in (document, *inner):
            if candidate and all(_is_weight(k, v) for k, v in candidate.items()):
                return dict(candidate)
    keys = [str(key) for key in document][:5] if isinstance(document, Mapping) else []
    held = f"a dict with {', '.join(keys)}" if keys else f"a {type(document).__name__}"
    raise CorruptCheckpointError(
        f"{location} holds {held}, not a dict of names to tensors (nor one under "
        f"{', '.join(_WRAPPERS)}): save model.state_dict() alone"
    )


def _is_weight(key: object, value: object) -> bool:
    """Return whether an entry is a name with a dense CPU tensor."""
    return (
        isinstance(key, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


class RangeFile(io.RawIOBase):
    """A stored file as a seekable Python file.

    Args:
        reader: the open file.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no position {base + offset} in a file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as fit the buffer."""
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._reader.size)
        count = max(0, end - self._at)
        if count:
            view[:count] = self._reader.read(self._at, end)
            self._at = end
        return count


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
        return _Machine().run(document)
    except Exception as error:  # pickletools raises errors of many types for damaged input
        raise CorruptCheckpointError(
            f"{location}: it cannot be read as {kind} "
            f"({type(error).__name__}: {error!s:.200}); copy it again"
        ) from error


@contextmanager
def described(complaint: str) -> Iterator[None]:
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
        items: appended or assigned to the object, in order.
    """

    maker: Any
    args: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)

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


class _Machine:
    """A pickle machine without calls: the stack, the marks and the memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, document: bytes) -> Any:
        """Return the value that a document describes."""
        # linear in the length of the document: what is referred to repeatedly is not copied
        for code, argument, _ in pickletools.genops(document):
            if code.name == "STOP":
                return self._stack.pop()
            if code.name in _VALUES:
                self._stack.append(argument)
            else:
                _DO[code.name](self, argument)
        raise ValueError("it ends too early")

    def push(self, value: Any) -> None:
        """Push onto the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Pop from the stack."""
        return self._stack.pop()

    def mark(self, _: Any) -> None:
        """Start a list of items."""
        self._marks.append(self._stack)
        self._stack = []

    def items(self) -> list[Any]:
        """Pop everything above the last mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def put(self, key: int | None) -> None:
        """Store the top in the memo."""
        self._memo[len(self._memo) if key is None else key] = self._stack[-1]

    def get(self, key: int) -> None:
        """Push from the memo."""
        self._stack.append(self._memo[key])

    def extend(self, items: list[Any]) -> None:
        """Append to the list or the record on top."""
        top = self._stack[-1]
        (top.items if isinstance(top, Record) else top).extend(items)

    def assign(self, pairs: list[Any]) -> None:
        """Set keys and values of the dict or the record on top."""
        top = self._stack[-1]
        # no tuples or huge numbers as keys: they can be made so that hashing never ends
        if not all(isinstance(key, (str, Name, Record)) or _is_index(key) for key in pairs[::2]):
            raise ValueError("a key is neither text nor an object")
        if isinstance(top, Record):
            top.items.append(pairs)
        else:
            top.update(zip(pairs[::2], pairs[1::2], strict=True))

    def make(self, count: int) -> None:
        """Replace a function and its arguments, on top, by the record of their call."""
        parts = [self._stack.pop() for _ in range(count)][::-1]
        self._stack.append(Record(parts[0], tuple(parts[1:]) if count > 2 else parts[1]))

    def refer(self, _: Any) -> None:
        """Replace an id, on top, by what refers to it."""
        self._stack.append(PersistentId(self._stack.pop()))

    def build(self, _: Any) -> None:
        """Pop a state and keep it in the record below."""
        state = self._stack.pop()
        self._stack[-1].state = state

    def named(self, _: Any) -> None:
        """Replace module and name, on top, by a `Name`."""
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(Name(f"{module}.{name}"))

    def tuple_of(self, count: int) -> None:
        """Replace items on top by a tuple of them."""
        parts = self._stack[-count:]
        del self._stack[-count:]
        self._stack.append(tuple(parts))


def _is_index(key: Any) -> bool:
    return isinstance(key, int) and -(2**63) <= key < 2**63


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
    "BINPERSID": _Machine.refer,
    "MEMOIZE": _Machine.put,
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
}
