"""Small trees of plain values that each rank leaves in memory at each boundary, for other ranks."""

from __future__ import annotations

import json
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["BoundaryRecord", "BoundaryRecords", "RecordTooLargeError", "unpack"]

_HEAD = struct.Struct("<QI")  # length and checksum of what follows
_SLOTS = 2  # a rank may be a step ahead of another one


class RecordTooLargeError(Exception):
    """A tree holds more bytes than a record may have."""


class BoundaryRecord(NamedTuple):
    """What a rank has written at a boundary.

    Attributes:
        attempt: its name.
        rank: of that attempt.
        boundary: its number.
        tree: plain values.
    """

    attempt: str
    rank: int
    boundary: int
    tree: Any


class BoundaryRecords:
    """The newest records of each rank of a machine, which outlive the process that wrote them.

    A record that a kill has cut short, or that is of another attempt, does not count.

    Args:
        folder: in host memory.
        attempt: a name that only the ranks of this attempt know.
        largest: bytes that a record may have.
    """

    def __init__(self, folder: str, attempt: str, largest: int) -> None:
        self._folder = Path(folder)
        self._attempt = attempt
        self._largest = largest
        self._count = 0

    def write(self, rank: int, boundary: int, tree: Any) -> None:
        """Write the record of a boundary, by its number, over that of the one before the last.

        Raises:
            RecordTooLargeError: it is too large.
            checkpoint_io.UnsupportedStateError: a value cannot be stored.
            OSError: such as a full file system.
        """
        from checkpoint_io.format.tree import TreeEncoder

        tensors: list[torch.Tensor] = []

        def store(path: tuple[Any, ...], tensor: torch.Tensor) -> str:
            tensors.append(tensor)
            return str(len(tensors) - 1)

        encoded = TreeEncoder("the state of a boundary", store).encode(tree)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if nbytes > self._largest:
            raise RecordTooLargeError(nbytes)
        shapes = [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors]
        place = {"attempt": self._attempt, "rank": rank, "boundary": boundary}
        head = {**place, "tensors": shapes, "tree": encoded}
        text = json.dumps(head, separators=(",", ":")).encode()
        data = b"\n".join([text, b"".join(map(_bytes_of, tensors))])
        if len(data) > self._largest:
            raise RecordTooLargeError(len(data))
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._path(rank, self._count % _SLOTS), "wb", buffering=0) as file:
            file.write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
        self._count += 1

    def read(self, rank: int, boundary: int) -> Any:
        """Return the tree that a rank has written at a boundary, None without a whole one."""
        for slot in range(_SLOTS):
            with suppress(OSError):
                record = unpack(self._path(rank, slot).read_bytes())
                if record and record[:-1] == (self._attempt, rank, boundary):
                    return record.tree
        return None

    @staticmethod
    def packed(folder: Path) -> list[bytes]:
        """Return what the files of a folder have, also those of earlier attempts."""
        return [path.read_bytes() for path in sorted(folder.glob("rank-*"))]

    def _path(self, rank: int, slot: int) -> Path:
        return self._folder / f"rank-{rank}-{slot}"


def unpack(content: bytes) -> BoundaryRecord | None:
    """Return the record that a file has, None without a whole one."""
    with suppress(ValueError, KeyError, struct.error):
        length, checksum = _HEAD.unpack_from(content)
        data = content[_HEAD.size :]
        if len(data) == length and zlib.crc32(data) == checksum:
            text, _, raw = data.partition(b"\n")
            head = json.loads(text)
            tree = _decoded(head, raw)
            return BoundaryRecord(head["attempt"], head["rank"], head["boundary"], tree)
    return None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def _decoded(head: dict[str, Any], raw: bytes) -> Any:
    from checkpoint_io.format.tree import decode_tree

    tensors, begin = {}, 0
    for number, (name, *shape) in enumerate(head["tensors"]):
        dtype = getattr(torch, name)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        part = torch.frombuffer(bytearray(raw[begin : begin + nbytes] or b"\0"), dtype=torch.uint8)
        tensors[str(number)] = part[:nbytes].view(dtype).reshape(shape)
        begin += nbytes
    return decode_tree(head["tree"], tensors, "the state of a boundary")
