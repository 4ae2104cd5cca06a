"""The manifest: typed records of the contents of a checkpoint, and the file that commits it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from checkpoint_io.format import json as jsonio
from checkpoint_io.format.names import MANIFEST

__all__ = ["Chunk", "FileEntry", "Manifest", "TensorEntry"]

FORMAT = "accel-callbacks-checkpoint"
VERSION = 3
#: Version 2 has the same layout; its training states do not record the order of samples.
READABLE = (2, 3)
ALGORITHM = "xxh3-64"
PART_SIZE = 1 << 20

# The digest has a fixed offset, so that a reader can blank it without parsing JSON.
_DIGEST_HEAD = b'{"digest":"'
_DIGEST_END = len(_DIGEST_HEAD) + 64


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: plain file name inside the checkpoint's folder.
        size: length in bytes.
        kind: "tensors" (a safetensors file) or "objects" (JSON).
        rank: the rank that wrote it.
        covered: how many of its first bytes `checksums` cover: all of an objects file, the header
            of a tensors file (a multiple of 4096), whose other bytes belong to chunks.
        checksums: one xxh3-64 of 16 hex digits for each `Manifest.part_size` covered bytes.

    Example:
        >>> from checkpoint_io import save
        >>> manifest = save("memory://doc-manifest/file", {"step": 1})
        >>> [(entry.kind, entry.rank, len(entry.checksums)) for entry in manifest.files]
        [('objects', 0, 1)]
    """

    name: str
    size: int
    kind: str
    rank: int
    covered: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "size": self.size,
            "kind": self.kind,
            "rank": self.rank,
            "covered": self.covered,
            "checksums": list(self.checksums),
        }


class Chunk(NamedTuple):
    """A box of a tensor and the bytes that hold it.

    Attributes:
        file: index into `Manifest.files`.
        offsets: where the box starts in the tensor, one index per dimension.
        shape: the extent of the box.
        begin: first byte, counted from the start of the file.
        end: one past the last byte.
        checksums: one xxh3-64 of 16 hex digits for each `Manifest.part_size` bytes, counted from
            `begin`; none for an empty box.

    Example:
        >>> import torch
        >>> from checkpoint_io import save
        >>> manifest = save("memory://doc-manifest/chunk", {"w": torch.zeros(2, 3)})
        >>> manifest.tensors["w"].chunks[0].shape
        (2, 3)
    """

    file: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    checksums: tuple[str, ...] = ()


class TensorEntry(NamedTuple):
    """One stored tensor: its safetensors dtype name, its full shape and its chunks.

    Example:
        >>> import torch
        >>> from checkpoint_io import save
        >>> manifest = save("memory://doc-manifest/tensor", {"w": torch.zeros(2, 3)})
        >>> manifest.tensors["w"].dtype, manifest.tensors["w"].shape
        ('F32', (2, 3))
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        id: random hex id of the save; part of every file name.
        generation: a number that increases with each save to the same URL or `CheckpointFolder`.
        created: UTC time of the commit, ISO-8601 with milliseconds.
        writer: versions of the libraries that wrote it.
        world_size: number of ranks that saved.
        metadata: the `metadata` of the caller.
        files: all files except the manifest.
        tensors: stored tensors by key.
        aliases: keys of tied tensors, to the key under which the bytes are stored.
        shared_objects: name of the JSON file of the shared state.
        rank_objects: name of the JSON file of each rank that saved its own state.
        part_size: bytes covered by one checksum.
        digest: SHA-256 of the manifest file with the digest itself blanked.

    Example:
        >>> from checkpoint_io import save
        >>> manifest = save("memory://doc-manifest/one", {"step": 1}, metadata={"run_id": "r1"})
        >>> manifest.metadata["run_id"], manifest.generation, manifest.world_size
        ('r1', 1, 1)
    """

    id: str
    generation: int
    created: str
    writer: Mapping[str, str]
    world_size: int
    metadata: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    shared_objects: str
    rank_objects: Mapping[int, str]
    part_size: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Total size of all files except the manifest."""
        return sum(entry.size for entry in self.files)

    def tensors_of_file(self, index: int) -> list[tuple[str, Chunk]]:
        """Return key and chunk of every chunk in one file, in byte order."""
        chunks = [
            (key, chunk)
            for key, tensor in self.tensors.items()
            for chunk in tensor.chunks
            if chunk.file == index
        ]
        return sorted(chunks, key=lambda item: (item[1].begin, item[1].end))


class LazyManifest(Manifest):
    """A manifest of which a part is known, and which is parsed when another part is asked for.

    From then on it is a plain `Manifest`. Of many ranks a manifest takes seconds to parse and a
    gigabyte of memory; most callers want its id, or its metadata and files.

    Args:
        known: the fields that are known.
        parse: returns the whole manifest; its errors come from the access to a field.
    """

    def __init__(self, known: Mapping[str, Any], parse: Callable[[], Manifest]) -> None:
        vars(self).update(known, _parse=parse)

    def __getattr__(self, name: str) -> Any:
        # called for what is not among the attributes yet
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._complete()
        return vars(self)[name]

    def __eq__(self, other: object) -> bool:
        self._complete()
        return self == other

    def __repr__(self) -> str:
        known = [f"{name}={vars(self)[name]!r}" for name in _FIELDS if name in vars(self)]
        return f"Manifest({', '.join(known)}, ...)"

    __hash__ = None  # type: ignore[assignment]  # a Manifest holds dicts

    def __reduce__(self) -> tuple[Any, ...]:
        self._complete()
        return Manifest, tuple(getattr(self, name) for name in _FIELDS)

    def _complete(self) -> None:
        """Parse, and become a plain `Manifest`, for comparisons and copies."""
        parse = vars(self).get("_parse")
        if parse is not None:  # else another thread was faster
            vars(self).update(vars(parse()))
            object.__setattr__(self, "__class__", Manifest)
            vars(self).pop("_parse", None)


_FIELDS = tuple(field.name for field in fields(Manifest))


def seal(document: Mapping[str, Any]) -> bytes:
    """Serialize a manifest document with its digest, which comes first."""
    blank = {"digest": "0" * 64, **{k: v for k, v in document.items() if k != "digest"}}
    data = jsonio.dumps(blank, MANIFEST)
    digest = hashlib.sha256(data).hexdigest().encode("ascii")
    return data[: len(_DIGEST_HEAD)] + digest + data[_DIGEST_END:]


def same_manifest(data: bytes, reader: Any) -> bool:
    """Return whether an open file (`size`, `read`) is this manifest, by its size and digest."""
    head = min(_DIGEST_END, reader.size)
    return reader.size == len(data) and bytes(reader.read(0, head)) == data[:_DIGEST_END]


def digest_matches(data: bytes) -> bool:
    """Return whether manifest bytes match their digest."""
    if not data.startswith(_DIGEST_HEAD):
        return False
    blank = hashlib.sha256(data[: len(_DIGEST_HEAD)])
    blank.update(b"0" * 64)
    blank.update(memoryview(data)[_DIGEST_END:])
    return data[len(_DIGEST_HEAD) : _DIGEST_END] == blank.hexdigest().encode("ascii")


def digest_of(data: bytes) -> str:
    """Return the digest in manifest bytes."""
    return data[len(_DIGEST_HEAD) : _DIGEST_END].decode("ascii")
