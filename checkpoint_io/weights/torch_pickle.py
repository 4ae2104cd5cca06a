"""Weights in files of `torch.save`: read by torch's restricted unpickler alone, which runs no code.

The only place that calls `torch.load`; a test checks that each call says `weights_only=True`.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.models.weight_source import Wanted, WeightFile, WeightInfo, landing_for
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.open import RangeReader
from checkpoint_io.weights.source import Rows

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_READ_AHEAD = 4 * 1024 * 1024
_REPEATED = 64  # names for one weight, and more than any model has
_SMALL = 64 * 1024 * 1024


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
