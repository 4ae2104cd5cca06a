"""Tensors in files of torch.save, read by torch's restricted unpickler.

This is the only module that calls `torch.load`; a test checks that each call passes
`weights_only=True`.
"""

from __future__ import annotations

import codecs
import io
import os
import zipfile
from collections.abc import Mapping, Sequence
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

__all__ = [
    "RangeFile",
    "TorchSource",
    "load_restricted",
    "read_restricted",
    "refuse_compressed",
    "refuse_repetition",
]

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_READ_AHEAD = 4 * 1024 * 1024
_MAX_REPEATS = 64  # uses of stored bytes, by tied names or in expanded tensors
_PICKLE = b"\x80"  # how a pickle of torch.save begins, in files from before torch 1.6
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
        labels, stored = [file.label for file in files], [_read_state(file) for file in files]
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


def _read_state(file: WeightFile) -> dict[str, torch.Tensor]:
    """Return the state dict in one file; refuse anything but tensors in plain containers."""
    folder = local_folder(file.store)
    path = None if folder is None else os.path.join(folder, file.name)
    with file.open() as reader:
        return _state_dict(read_restricted(reader, file.where, path=path), file.where)


def load_restricted(file: str | os.PathLike[str] | IO[bytes], map_location: Any = None) -> Any:
    """Return what one `torch.save` wrote: tensors, numpy arrays and plain values.

    Args:
        file: path or fsspec URL, or an open file that can seek.
        map_location: as of `torch.load`.

    Raises:
        CorruptCheckpointError: it is damaged, or holds objects of other classes.
    """
    if not isinstance(file, (str, os.PathLike)):
        return _load(file, str(getattr(file, "name", "the open file")), map_location)
    location = os.fspath(file)
    folder, name = split_path(location)
    with WeightFile.at(open_store(folder or "."), name).open() as reader:
        return read_restricted(reader, location, map_location)


def read_restricted(
    reader: RangeReader, location: str, map_location: Any = "cpu", path: str | None = None
) -> Any:
    """Return what one `torch.save` wrote into a stored file, with the same restrictions.

    Args:
        reader: the open file, or a part of one.
        location: of it, for messages.
        map_location: as of `torch.load`; the CPU by default.
        path: of a file on this machine. An archive is mapped into memory then, so that only what is
            used of its tensors is read.
    """
    return _load(io.BufferedReader(RangeFile(reader), _READ_AHEAD), location, map_location, path)


def _load(
    stream: IO[bytes], location: str, map_location: Any = None, path: str | None = None
) -> Any:
    """Call `torch.load` on a stream, or on the path of the same file where it can be mapped."""
    try:
        begin = stream.read(4)
        is_zip = begin == b"PK\x03\x04"
        if is_zip:
            refuse_compressed(stream, location)
        elif not begin.startswith(_PICKLE):
            raise ValueError("it is no file of torch.save")
        stream.seek(0)
        with torch.serialization.safe_globals(_array_parts()):
            if is_zip and path is not None:
                return torch.load(path, map_location=map_location, weights_only=True, mmap=True)
            return torch.load(stream, map_location=map_location, weights_only=True)
    except (OSError, MemoryError, CorruptCheckpointError):
        raise
    except Exception as error:  # torch has many types for damaged input
        raise _refusal(location, error) from error


def _array_parts() -> list[Any]:
    """Return what pickles of numbers of numpy call, by its names there; none of it runs code."""
    makers = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and 2
    named = [(make, f"{module}.{name}") for name, make in makers.items() for module in modules]
    types = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
    return [*named, *types, type(np.dtype(bool)), np.ndarray, np.dtype, codecs.encode]


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
