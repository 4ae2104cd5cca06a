"""Torch.save files, restricted; inert pickles.

The only place that calls `torch.load`; a test checks that each call says `weights_only=True`.

Classes and calls become plain records, from which a reader takes what it knows. A reader must not
walk, compare, print or hash what may be nested: a few bytes make a value that contains itself, or
one thing 2**60 times.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.open import RangeReader
from checkpoint_io.weights.source import Rows, Wanted, WeightFile, WeightInfo, landing_for

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_READ_AHEAD = 4 * 1024 * 1024
_REPEATED = 64  # names for one weight, and more than any model has
_SMALL = 64 * 1024 * 1024


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


class TorchSource:
    """The tensors of some files of `torch.save`.

    Args:
        where: what to call all of it in messages.
        files: the files; they are read at once (mapped into memory where they are local).
        weight_map: names to labels of files, if an index says so.

    Raises:
        CorruptCheckpointError: a file is damaged, holds more than tensors, or not what the index
            says.
    """

    def __init__(
        self, where: str, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.where = where
        self.tied: dict[str, str] = {}
        self._state: dict[str, torch.Tensor] = {}
        for file in files:
            for key, tensor in read_torch_file(file).items():
                if weight_map is None or weight_map.get(key) == file.label:
                    self._state[key] = tensor
        if absent := (weight_map or {}).keys() - self._state.keys():
            raise CorruptCheckpointError(
                f"{where}: the shards do not hold {', '.join(sorted(absent)[:3])}, though the "
                "index says so; save the model again"
            )
        _refuse_repetition(self._state, where)
        self.infos = {key: WeightInfo(t.dtype, tuple(t.shape)) for key, t in self._state.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a stored tensor itself; tied ones share their memory."""
        return self._state[name]

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Copy tensors into their targets."""
        for key, target in wanted:
            tensor = self._state[key]
            rows = Rows(0, tensor.shape[0] if tensor.dim() else 1)
            landing_for(self.infos[key], target).put(rows, tensor)
            progress.add(tensor.nbytes)


def read_torch_file(file: WeightFile) -> dict[str, torch.Tensor]:
    """Read the state dict in one file; anything but tensors in plain containers is refused."""
    with file.open() as reader:
        is_zip = reader.size >= 4 and bytes(reader.read(0, 4)) == b"PK\x03\x04"
        try:
            document = _unpickle(file, reader, is_zip)
        except (OSError, MemoryError, CorruptCheckpointError):
            raise
        except Exception as error:  # damaged input takes torch in many ways
            raise _refusal(file.where, error) from error
    return _state_dict(document, file.where)


def read_restricted(reader: RangeReader, where: str) -> Any:
    """Read what one `torch.save` wrote into a part of a file; as restricted as all of this."""
    stream = io.BufferedReader(_RangeFile(reader), _READ_AHEAD)
    try:
        _refuse_compressed(stream, where)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except (OSError, MemoryError, CorruptCheckpointError):
        raise
    except Exception as error:  # damaged input takes torch in many ways
        raise _refusal(where, error) from error


def _unpickle(file: WeightFile, reader: RangeReader, is_zip: bool) -> Any:
    """Let torch read a file; a local one is mapped, so that only what is copied is read."""
    stream = io.BufferedReader(_RangeFile(reader), _READ_AHEAD)
    if is_zip:
        _refuse_compressed(stream, file.where)
        stream.seek(0)
    if is_zip and isinstance(file.store, LocalStore):
        path = os.path.join(file.store.url, file.name)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _refuse_compressed(stream: IO[bytes], where: str) -> None:
    """Refuse what torch.save never writes, and what could make a small file fill the memory."""
    with zipfile.ZipFile(stream) as archive:
        if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise CorruptCheckpointError(
                f"{where} was refused: it is a compressed archive, which torch.save does not "
                "write; save its weights again with save_model"
            )


def _refuse_repetition(state: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse tensors that repeat a few stored bytes until they fill the memory."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state.values()}
    held = sum(storage.nbytes() for storage in storages.values())
    wanted = sum(tensor.nbytes for tensor in state.values())
    if wanted > _REPEATED * held + _SMALL:
        raise CorruptCheckpointError(
            f"{where} was refused: its tensors would take {wanted} bytes, and it stores {held} of "
            "them (expanded tensors); save contiguous ones"
        )


def _refusal(where: str, error: Exception) -> CorruptCheckpointError:
    """Explain why a file was not read."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if type(error).__name__ == "UnpicklingError":
        return CorruptCheckpointError(
            f"{where} was refused: it is damaged, or holds Python objects that only unpickling "
            f"could make, which may run code ({error!s:.300}). Only tensors in plain containers "
            "are read; if you trust the file, save its weights again with save_model or "
            "torch.save(model.state_dict())"
        )
    return CorruptCheckpointError(
        f"{where}: torch cannot read it ({type(error).__name__}: {reason:.300}); copy it again"
    )


def _state_dict(document: Any, where: str) -> dict[str, torch.Tensor]:
    """Find the state dict in what a file holds."""
    if isinstance(document, Mapping):
        inner = [document[key] for key in _WRAPPERS if isinstance(document.get(key), Mapping)]
        for candidate in (document, *inner):
            if candidate and all(_is_weight(k, v) for k, v in candidate.items()):
                return dict(candidate)
    keys = [str(key) for key in document][:5] if isinstance(document, Mapping) else []
    held = f"a dict with {', '.join(keys)}" if keys else f"a {type(document).__name__}"
    raise CorruptCheckpointError(
        f"{where} holds {held}, not a dict of names to tensors (nor one under "
        f"{', '.join(_WRAPPERS)}): save model.state_dict() alone"
    )


def _is_weight(key: object, value: object) -> bool:
    """Say whether an entry is a name with a dense tensor."""
    return (
        isinstance(key, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


class _RangeFile(io.RawIOBase):
    """A stored file as a Python file that can be read and sought in."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
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
        """Read what fits the buffer."""
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._reader.size)
        count = max(0, end - self._at)
        if count:
            view[:count] = self._reader.read(self._at, end)
            self._at = end
        return count
