"""The bytes of a journal: a header, then one row of fixed size for each optimizer step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

__all__ = [
    "FIELDS",
    "HEADER_SIZE",
    "MAGIC",
    "ROUTINE",
    "ROW_SIZE",
    "SKIPPED",
    "UNKNOWN",
    "Header",
    "JournalError",
    "pack_header",
    "pack_row",
    "row_is_whole",
    "unpack_header",
]

MAGIC = b"accelJNL"
VERSION = 1
HEADER = struct.Struct("<8sHHIIId16s")  # the checksum of 4 bytes follows
ROW = struct.Struct("<QIIQ4d4I5fHH")  # likewise
HEADER_SIZE, ROW_SIZE = HEADER.size + 4, ROW.size + 4
UNKNOWN = 2**64 - 1  # a position that no prepared loader counts
#: Kinds of marks of what every run does, which say nothing to a reader.
ROUTINE = frozenset({"start", "train", "pass", "batch", "compile", "commands"})
SKIPPED = 1  # flag: the optimizer's step was left out

#: Names and NumPy types of the fields of a row, in order.
FIELDS = (
    ("step", "<u8"),
    ("epoch", "<u4"),
    ("batch", "<u4"),
    ("position", "<u8"),
    ("loss", "<f8"),
    ("gradient_norm", "<f8"),
    ("learning_rate", "<f8"),
    ("time", "<f8"),
    ("losses", "<u4"),
    ("learning_rates", "<u4"),
    ("generators", "<u4"),
    ("host_generators", "<u4"),
    ("data_s", "<f4"),
    ("save_s", "<f4"),
    ("evaluation_s", "<f4"),
    ("step_s", "<f4"),
    ("forward_s", "<f4"),
    ("micro_batches", "<u2"),
    ("flags", "<u2"),
    ("checksum", "<u4"),
)


class JournalError(ValueError):
    """A journal is missing, damaged, or of a version that is not known here.

    Example:
        >>> from accel_callbacks.journal import Journal
        >>> Journal.read("no such folder")
        Traceback (most recent call last):
        accel_callbacks.addons.journal.format.JournalError: no such folder has no journal. \
It is written by accel.run(...) of an Accelerator(project_dir=...); \
give that folder, or its `journal` folder.
    """


class Header(NamedTuple):
    """The header of a file of rows.

    Args:
        rank: whose rows they are.
        world_size: number of ranks of the attempt.
        attempt: number of the start of the run, from 1.
        time: of the start, in Unix seconds.
        run_id: of the run.
    """

    rank: int
    world_size: int
    attempt: int
    time: float
    run_id: str


def pack_header(header: Header) -> bytes:
    """Return the bytes of a header."""
    run_id = header.run_id.encode("ascii", "replace")
    data = HEADER.pack(
        *(MAGIC, VERSION, ROW_SIZE, header.rank, header.world_size, header.attempt),
        *(header.time, run_id),
    )
    return data + _checksum(data)


def unpack_header(data: bytes, path: str) -> Header:
    """Return the header of a file.

    Args:
        data: the file, or its beginning.
        path: of the file, for errors.

    Raises:
        JournalError: it is no journal, is damaged, or is of another version.
    """
    if not data.startswith(MAGIC):
        raise JournalError(f"{path} is no file of a journal: it does not begin with {MAGIC!r}.")
    if len(data) < HEADER_SIZE or _checksum(data[: HEADER.size]) != data[HEADER.size : HEADER_SIZE]:
        raise JournalError(f"{path}: the header is damaged. Restore the file from a backup.")
    _, version, row_size, rank, world_size, attempt, time, run_id = HEADER.unpack_from(data)
    if (version, row_size) != (VERSION, ROW_SIZE):
        raise JournalError(
            f"{path} is of version {version} with rows of {row_size} bytes, and this one reads "
            f"version {VERSION} with {ROW_SIZE}: install the accel-callbacks that wrote it."
        )
    return Header(rank, world_size, attempt, time, run_id.rstrip(b"\0").decode("ascii"))


def pack_row(values: Sequence[Any]) -> bytes:
    """Return the bytes of a row from the values of its fields but the checksum."""
    data = ROW.pack(*values)
    return data + _checksum(data)


def row_is_whole(data: bytes | memoryview) -> bool:
    """Return whether the checksum of a row is right."""
    return _checksum(data[: ROW.size]) == bytes(data[ROW.size : ROW_SIZE])


def _checksum(data: bytes | memoryview) -> bytes:
    return xxhash.xxh32_intdigest(data).to_bytes(4, "little")
