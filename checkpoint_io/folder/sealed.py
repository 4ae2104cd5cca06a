"""Folders that other programs have written, sealed: the seal names each file with its checksum."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import xxhash

from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import digest_matches
from checkpoint_io.format.manifest import seal as with_digest
from checkpoint_io.local_files import replace, sync_folder, sync_path
from checkpoint_io.threads import mapped

__all__ = ["SEAL", "check_seal", "seal_folder"]

SEAL = "seal.json"
_FORMAT = "accel-callbacks-seal"
_VERSION = 1
_BUFFER = 4 << 20
_THREADS = 4


def seal_folder(folder: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
    """Make the files of a local folder durable, and write the seal that names them, last.

    Args:
        folder: what is in it and below it is sealed.
        metadata: plain values to keep in the seal.
    """
    place = os.fspath(folder)
    sizes = _sizes(place)

    def read_and_sync(name: str) -> str:
        checksum = _checksum(place, name)
        sync_path(os.path.join(place, name))
        return checksum

    checksums = mapped(read_and_sync, list(sizes), _THREADS)
    files = {name: [sizes[name], checksum] for name, checksum in zip(sizes, checksums, strict=True)}
    for below, _, _ in os.walk(place):
        sync_folder(below)
    document = {
        **{"format": _FORMAT, "version": _VERSION, "metadata": dict(metadata)},
        "files": files,
    }
    written = os.path.join(place, f"{SEAL}.tmp")
    with open(written, "wb") as file:
        file.write(with_digest(document))
    sync_path(written)
    replace(written, os.path.join(place, SEAL))
    sync_folder(place)


def check_seal(folder: str | os.PathLike[str], *, full: bool = True) -> dict[str, Any]:
    """Check the files of a folder against its seal, and return the seal's metadata.

    Files that came after the seal are not looked at.

    Args:
        folder: a local folder.
        full: read every byte and compare checksums; False compares sizes.

    Raises:
        CheckpointNotFoundError: the folder has no seal.
        CorruptCheckpointError: the seal is damaged, or a file is not as it was sealed.
    """
    place = os.fspath(folder)
    try:
        with open(os.path.join(place, SEAL), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{place} has no {SEAL}: it was not written to its end, or by another program"
        ) from None
    if not digest_matches(data):
        raise CorruptCheckpointError(f"{place}: {SEAL} is damaged; take an older checkpoint")
    document = jsonio.loads(data, SEAL)
    if (document.get("format"), document.get("version")) != (_FORMAT, _VERSION):
        raise CorruptCheckpointError(
            f"{place}: {SEAL} is not of version {_VERSION}: update this package"
        )
    sizes = _sizes(place)
    for name, (size, _) in document["files"].items():
        if name not in sizes:
            raise CorruptCheckpointError(f"{place}: {name} is missing; take an older checkpoint")
        if sizes[name] != size:
            raise CorruptCheckpointError(
                f"{place}: {name} has {sizes[name]} bytes, and was sealed with {size}; take an "
                "older checkpoint"
            )
    sealed = {name: checksum for name, (_, checksum) in document["files"].items()}
    if not full:
        sealed = {}
    read = mapped(lambda name: _checksum(place, name), list(sealed), _THREADS)
    for name, checksum in zip(sealed, read, strict=True):
        if checksum != sealed[name]:
            raise CorruptCheckpointError(
                f"{place}: the bytes of {name} are not those that were sealed; take an older "
                "checkpoint"
            )
    metadata: dict[str, Any] = document["metadata"]
    return metadata


def _sizes(place: str) -> dict[str, int]:
    """Return the size of each file in and below a folder by its path in it, but for the seal."""
    sizes = {}
    for below, _, names in os.walk(place):
        for name in names:
            path = os.path.join(below, name)
            sizes[os.path.relpath(path, place).replace(os.sep, "/")] = os.path.getsize(path)
    return {name: sizes[name] for name in sorted(sizes) if name not in (SEAL, f"{SEAL}.tmp")}


def _checksum(place: str, name: str) -> str:
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(_BUFFER))
    with open(os.path.join(place, name), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
