"""Locate the tensors in a file of `torch.save` without executing its pickle.

The file is a zip archive: a pickle of containers, and the memory of each tensor as an entry of its
own, stored uncompressed. The pickle is read as plain records, and the memory as byte ranges.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.storage.open import RangeReader
from checkpoint_io.weights.foreign.inert_pickle import (
    Name,
    PersistentId,
    Record,
    natural_numbers,
    read_inert,
)
from checkpoint_io.weights.foreign.torch_pickle import RangeFile, refuse_compressed
from checkpoint_io.weights.source import WeightFile

_READ_AHEAD = 64 * 1024
_LOCAL_HEADER = 30  # bytes before the name and the extra field of an entry
_DTYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32},
    **{"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
}


class StoredTensor(NamedTuple):
    """A contiguous tensor in a file, whose bytes begin at `begin`."""

    file: WeightFile
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TorchArchive:
    """One file of `torch.save`, with its pickle as plain values and records.

    Args:
        file: the file; its directory and its pickle are read immediately.

    Attributes:
        content: what was saved, as :func:`read_inert` returns it.

    Raises:
        CorruptCheckpointError: it is no such file, is damaged, or is compressed.
    """

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        with file.open() as reader:
            stream = io.BufferedReader(RangeFile(reader), _READ_AHEAD)
            try:
                refuse_compressed(stream, file.where)
                with zipfile.ZipFile(stream) as archive:
                    self._entries = {info.filename: info for info in archive.infolist()}
            except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
                raise CorruptCheckpointError(
                    f"{file.where} is cut off or damaged, or torch.save has not written it "
                    f"({error!s:.100}); copy it again"
                ) from error
            pickles = [name for name in self._entries if re.fullmatch("[^/]+/data.pkl", name)]
            if len(pickles) != 1:
                raise CorruptCheckpointError(
                    f"{file.where} was refused: it is an archive without one data.pkl, so "
                    "torch.save has not written it"
                )
            self._folder = pickles[0].removesuffix("data.pkl")
            order = self._entries.get(f"{self._folder}byteorder")
            if order is not None and self._read(reader, order) != b"little":
                raise CorruptCheckpointError(
                    f"{file.where} was refused: its numbers are big-endian; save it again on a "
                    "little-endian machine"
                )
            document = self._read(reader, self._entries[pickles[0]])
        self.content = read_inert(document, file.where, "a pickle of torch.save")

    def _begin(self, reader: RangeReader, entry: zipfile.ZipInfo) -> int:
        """Return the first byte of an entry's data, which its local header determines."""
        at = entry.header_offset
        header = bytes(reader.read(at, min(at + _LOCAL_HEADER, reader.size))) if at >= 0 else b""
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise self._damage_error(entry)
        lengths = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        begin = at + _LOCAL_HEADER + sum(lengths)
        if begin + entry.file_size > reader.size:
            raise self._damage_error(entry)
        return begin

    def _damage_error(self, entry: zipfile.ZipInfo) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.file.where}: its entry {entry.filename:.80} is damaged; copy it again"
        )

    def _read(self, reader: RangeReader, entry: zipfile.ZipInfo) -> bytes:
        """Return the content of an entry, compared with its checksum."""
        begin = self._begin(reader, entry)
        data = bytes(reader.read(begin, begin + entry.file_size))
        if self._has_checksums() and zlib.crc32(data) != entry.CRC:
            raise self._damage_error(entry)
        return data

    def _has_checksums(self) -> bool:
        # torch writes zeros where torch.serialization.set_crc32_options has switched them off
        return any(entry.CRC for entry in self._entries.values())

    def tensor(self, value: Any) -> StoredTensor:
        """Locate a tensor of the content.

        Args:
            value: a value in `content`.

        Returns:
            Where its bytes are.

        Raises:
            CorruptCheckpointError: the archive lacks its memory, or a part of it.
            ValueError: it is no tensor, or not a dense contiguous one.
        """
        if isinstance(value, Record) and value.kind == "torch._utils._rebuild_parameter":
            value = value.args[0]
        if isinstance(value, Record) and value.kind == "torch._tensor._rebuild_from_type_v2":
            value = Record(value.args[0], value.args[2])  # a tensor with attributes
        if not isinstance(value, Record) or value.kind != "torch._utils._rebuild_tensor_v2":
            raise ValueError("it is not a dense tensor")
        storage, offset, size, stride = value.args[:4]
        shape, strides = natural_numbers(size), natural_numbers(stride)
        dtype, entry = self._memory(storage)
        (first,) = natural_numbers((offset,))
        numel = math.prod(shape)
        if numel and not _is_contiguous(shape, strides):
            raise ValueError("it is not contiguous")
        if (first + numel) * dtype.itemsize > entry.file_size:
            raise ValueError("it is larger than its memory")
        with self.file.open() as reader:
            begin = self._begin(reader, entry)
        return StoredTensor(self.file, begin + first * dtype.itemsize, dtype, shape)

    def _memory(self, storage: Any) -> tuple[torch.dtype, zipfile.ZipInfo]:
        """Return the dtype and the entry of a tensor's memory."""
        if not isinstance(storage, PersistentId):
            raise ValueError("its memory is not in the file")
        _, kind, key, _, _ = storage.value
        text = kind.text if isinstance(kind, Name) else ""
        name = text.removeprefix("torch.").removesuffix("Storage")
        if not text.startswith("torch.") or name not in _DTYPES:
            raise ValueError(f"its dtype is unknown ({text:.40})")
        if not isinstance(key, str) or f"{self._folder}data/{key}" not in self._entries:
            raise ValueError("its memory is not in the file")
        return _DTYPES[name], self._entries[f"{self._folder}data/{key}"]


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    if len(shape) != len(strides):
        return False
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
