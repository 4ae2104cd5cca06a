"""A manifest that may be hostile."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from checkpoint_io.errors import CorruptCheckpointError, ManifestVersionError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import (
    ALGORITHM,
    FORMAT,
    VERSION,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_matches,
    digest_of,
)
from checkpoint_io.format.names import kind_of
from checkpoint_io.format.safetensors import ITEMSIZE
from checkpoint_io.format.tree import decode_tree
from checkpoint_io.sharding.boxes import overlapping

LIMIT = 2**63 - 1
MAX_DIMS = 64
HEX16S = re.compile(r"[0-9a-f]+", re.ASCII).fullmatch
_HEX16 = re.compile(r"[0-9a-f]{16}", re.ASCII)
_MAX_CHUNKS = 65536
_MAX_PART = 256 * 1024 * 1024
_ALIGNMENT = 4096
_RANK = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


class Bad(Exception):
    """One thing wrong with a manifest."""


def typed(value: Any, kind: type, what: str) -> Any:
    """Return the value if it is of that JSON type."""
    if type(value) is not kind:
        raise Bad(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def integer(value: Any, what: str, low: int = 0, high: int = LIMIT) -> int:
    """Return a whole number within its bounds; true and false are not numbers."""
    if type(value) is not int or not low <= value <= high:
        raise Bad(f"{what} must be a whole number from {low} to {high}, not {show(value)}")
    return value


def show(value: Any) -> str:
    """Write a value for an error: short, and never slow, whatever it is."""
    if type(value) in (str, int, float, bool, type(None)):
        # the text of an int of thousands of digits is refused by Python itself
        huge = type(value) is int and value.bit_length() > 256
        return "a huge number" if huge else f"{value!r:.80}"
    return f"a {type(value).__name__}"


def integers(value: Any, what: str) -> tuple[int, ...]:
    """Return a list of whole numbers with at most as many entries as a tensor has dimensions."""
    if type(value) not in (list, tuple) or len(value) > MAX_DIMS:
        raise Bad(f"{what} must be a list of at most {MAX_DIMS} dimensions")
    for item in value:
        if type(item) is not int or not 0 <= item <= LIMIT:
            integer(item, what)
    return tuple(value)


def strings(value: Any, what: str) -> dict[str, str]:
    """Return an object whose values are all strings."""
    return {k: typed(v, str, f"{what}[{k!r:.80}]") for k, v in typed(value, dict, what).items()}


def checksums(value: Any, size: int, part_size: int, what: str) -> tuple[str, ...]:
    """Return one checksum for each part of so many bytes."""
    if type(value) is not list or len(value) != -(-size // part_size):
        raise Bad(f"{what} does not have one checksum for each {part_size} of its {size} bytes")
    for item in value:
        if type(item) is not str or not _HEX16.fullmatch(item):
            raise Bad(f"{what} has a checksum that is not 16 hex digits")
    return tuple(value)


def joined_checksums(value: Any, size: int, part_size: int) -> tuple[str, ...]:
    """Return the checksums of so many bytes out of one string."""
    if type(value) is not str or len(value) != 16 * -(-size // part_size):
        raise Bad(f"there is not one checksum for each {part_size} of its {size} bytes")
    if value and not HEX16S(value):
        raise Bad("a checksum that is not 16 hex digits")
    if size <= part_size:
        return (value,) if size else ()
    return tuple([value[begin : begin + 16] for begin in range(0, len(value), 16)])


def parse_tensors(value: Any, files: Sequence[FileEntry], part_size: int) -> dict[str, TensorEntry]:
    """Check every tensor entry, and that each tensors file is filled without a hole."""
    parser = _Parser(files, part_size)
    tensors = {}
    for key, item in typed(value, dict, "tensors").items():
        try:
            tensors[key] = parser.tensor(item)
        except Bad as problem:
            raise Bad(f"tensor {key!r:.200}: {problem}") from None
    for entry, ranges in zip(files, parser.used, strict=True):
        _refuse_holes(entry, ranges)
    return tensors


class _Parser:
    """Checks tensors one after the other; `used` collects which bytes of each file they claim."""

    def __init__(self, files: Sequence[FileEntry], part_size: int) -> None:
        self._files = files
        self._part_size = part_size
        self.used: list[list[tuple[int, int]]] = [[] for _ in files]

    def tensor(self, value: Any) -> TensorEntry:
        """Check that a tensor's chunks are inside it, do not overlap and fill it."""
        entry = self._small(value)
        if entry is not None:
            return entry
        if type(value) is not list or not 3 <= len(value) <= _MAX_CHUNKS + 2:
            raise Bad(f"must be a dtype, a shape and 1 to {_MAX_CHUNKS} chunks")
        dtype = value[0]
        if type(dtype) is not str or dtype not in ITEMSIZE:
            raise Bad(f"unknown dtype {show(dtype)}")
        shape, itemsize = integers(value[1], "its shape"), ITEMSIZE[dtype]
        if math.prod([n or 1 for n in shape]) * itemsize > LIMIT:
            raise Bad("an absurd shape")
        if len(value) == 3:
            only = self._chunk(value[2], shape, itemsize)
            if only.shape != shape:
                raise Bad("its chunk does not cover it")
            return TensorEntry(dtype, shape, (only,))
        chunks = tuple([self._chunk(row, shape, itemsize) for row in value[2:]])
        volume = sum([math.prod(chunk.shape) for chunk in chunks])
        if volume != math.prod(shape) or overlapping(
            [(c.offsets, c.shape) for c in chunks if c.end > c.begin]
        ):
            raise Bad("its chunks do not cover it exactly once")
        return TensorEntry(dtype, shape, chunks)

    def _small(self, value: Any) -> TensorEntry | None:
        """Check the usual entry, one whole chunk of at most one part; None says: look closer."""
        try:
            dtype, dims, (index, begin, end, sums) = value
            entry, itemsize = self._files[index], ITEMSIZE[dtype]
        except (TypeError, ValueError, KeyError, IndexError):
            return None
        plain = type(dims) is list and type(sums) is str and len(sums) == 16 and len(dims) <= 4
        if not (plain and type(index) is type(begin) is type(end) is int and index >= 0):
            return None
        size = itemsize
        for n in dims:
            if type(n) is not int or not 0 < n <= self._part_size:
                return None
            size *= n
        inside = entry.kind == "tensors" and entry.covered <= begin < end <= entry.size
        if not inside or size != end - begin or size > self._part_size or not HEX16S(sums):
            return None
        self.used[index].append((begin, end))
        shape = tuple(dims)
        offsets = (0,) * len(shape)
        return TensorEntry(dtype, shape, (Chunk(index, offsets, shape, begin, end, (sums,)),))

    def _chunk(self, row: Any, shape: tuple[int, ...], itemsize: int) -> Chunk:
        """Check that a chunk lies inside its tensor and its bytes inside their file."""
        if type(row) not in (list, tuple) or len(row) not in (4, 6):
            raise Bad("a chunk that has not 4 or 6 fields")
        index, begin, end = row[0], row[1], row[2]
        # true and false are not numbers, so no isinstance
        if not (type(index) is type(begin) is type(end) is int and 0 <= index < len(self._files)):
            raise Bad("a chunk whose file, begin and end are not whole numbers, or not a file")
        entry = self._files[index]
        if entry.kind != "tensors" or not entry.covered <= begin <= end <= entry.size:
            raise Bad(f"bytes {show(begin)} to {show(end)} are not in {entry.name}")
        offsets, extent = ((0,) * len(shape), shape) if len(row) == 4 else _box(row, shape)
        size = end - begin
        if math.prod(extent) * itemsize != size:
            raise Bad(f"{size} bytes do not hold a chunk of shape {list(extent)}")
        if size:
            self.used[index].append((begin, end))
        sums = joined_checksums(row[3], size, self._part_size)
        return Chunk(index, offsets, extent, begin, end, sums)


def _box(row: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check that a box lies inside its tensor."""
    at, lengths = integers(row[4], "its offsets"), integers(row[5], "the shape of a chunk")
    if not len(at) == len(lengths) == len(shape) or any(
        a + n > total for a, n, total in zip(at, lengths, shape, strict=True)
    ):
        raise Bad("a chunk that reaches outside its shape")
    return at, lengths


def _refuse_holes(entry: FileEntry, ranges: list[tuple[int, int]]) -> None:
    """Refuse bytes of a tensors file that two chunks claim, or none."""
    if entry.kind != "tensors":
        return
    position = entry.covered
    for begin, end in sorted(ranges):
        if begin < position:
            raise Bad(f"two tensors claim the same bytes of {entry.name}")
        if begin > position:
            break
        position = end
    if position != entry.size:
        raise Bad(f"no tensor claims byte {position} of {entry.name}")


def parse_manifest(data: bytes, where: str, *, tensors: bool = True) -> Manifest:
    """Check the bytes of a manifest completely and return it; `where` goes into errors.

    Without `tensors`, only what else it says is looked at and returned.
    """
    return parse_document(jsonio.loads(data, where), data, where, tensors=tensors)


def parse_document(document: Any, data: bytes, where: str, *, tensors: bool = True) -> Manifest:
    """Check a manifest of which the JSON is at hand already; `data` are its bytes."""
    try:
        return _parse(document, data, where, tensors)
    except Bad as problem:
        raise CorruptCheckpointError(f"{where}: {problem}") from None


def _parse(document: Any, data: bytes, where: str, with_tensors: bool) -> Manifest:
    """Check version, then digest, then every field."""
    typed(document, dict, "the manifest")
    if document.get("format") != FORMAT:
        raise Bad(f"not a checkpoint manifest (format is {show(document.get('format'))})")
    version = integer(document.get("version"), "version")
    if version != VERSION:
        advice = "upgrade accel-callbacks" if version > VERSION else "save it again"
        raise ManifestVersionError(
            f"{where} has format version {version}, this package reads version {VERSION}: {advice}"
        )
    if not digest_matches(data):
        raise Bad("its digest does not match: the file was damaged or edited")
    part_size = _part_size(document.get("checksum"))
    world_size = integer(document.get("world_size"), "world_size", low=1)
    files = _files(document.get("files"), part_size, world_size)
    tensors, aliases = {}, {}
    if with_tensors:
        tensors = parse_tensors(document.get("tensors"), files, part_size)
        aliases = _aliases(document.get("aliases"), tensors)
    shared, ranks = _objects(document.get("objects"), files, world_size)
    identity = typed(document.get("id"), str, "id")
    if not _ID.fullmatch(identity):
        raise Bad(f"id {identity!r:.80} is not hexadecimal")
    metadata = decode_tree(typed(document.get("metadata"), dict, "metadata"), None, where)
    return Manifest(
        id=identity,
        generation=integer(document.get("generation"), "generation"),
        created=typed(document.get("created"), str, "created"),
        writer=strings(document.get("writer"), "writer"),
        world_size=world_size,
        metadata=typed(metadata, dict, "metadata"),
        files=files,
        tensors=tensors,
        aliases=aliases,
        shared_objects=shared,
        rank_objects=ranks,
        part_size=part_size,
        digest=digest_of(data),
    )


def _part_size(value: Any) -> int:
    """Check the checksum record."""
    record = typed(value, dict, "checksum")
    if record.get("algorithm") != ALGORITHM:
        raise Bad(f"checksum algorithm {show(record.get('algorithm'))} is not {ALGORITHM}")
    size = integer(record.get("part_size"), "part_size", low=4096, high=_MAX_PART)
    if size % 8:
        raise Bad(f"parts of {size} bytes would split numbers")
    return size


def _files(value: Any, part_size: int, world_size: int) -> tuple[FileEntry, ...]:
    """Check names, sizes and checksum counts of all files."""
    files = tuple(_file(item, part_size, world_size) for item in typed(value, list, "files"))
    if len({entry.name for entry in files}) != len(files):
        raise Bad("a file is listed twice")
    return files


def _file(value: Any, part_size: int, world_size: int) -> FileEntry:
    """Check one file entry."""
    item = typed(value, dict, "a file entry")
    name = typed(item.get("name"), str, "a file name")
    kind = kind_of(name)
    if kind is None or item.get("kind") != kind:
        raise Bad(f"{name!r:.200} is not a name of this format for a file of its kind")
    size = integer(item.get("size"), f"size of {name}")
    covered = integer(item.get("covered"), f"covered of {name}", high=size)
    whole = kind == "objects"
    if (covered != size) if whole else (not covered or covered % _ALIGNMENT):
        raise Bad(f"{name} has checksums for {covered} of its {size} bytes")
    sums = checksums(item.get("checksums"), covered, part_size, name)
    rank = integer(item.get("rank"), f"rank of {name}", high=world_size - 1)
    return FileEntry(name, size, kind, rank, covered, sums)


def _aliases(value: Any, tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Check that every alias names a stored tensor and hides none."""
    aliases = strings(value, "aliases")
    for key, target in aliases.items():
        if target not in tensors or key in tensors:
            raise Bad(f"alias {key!r:.200} of {target!r:.200} is not usable")
    return aliases


def _objects(
    value: Any, files: tuple[FileEntry, ...], world_size: int
) -> tuple[str, dict[int, str]]:
    """Check that the JSON files it names are listed as such."""
    record = typed(value, dict, "objects")
    known = {entry.name for entry in files if entry.kind == "objects"}
    shared = typed(record.get("shared"), str, "objects.shared")
    names = strings(record.get("ranks"), "objects.ranks")
    if not {shared, *names.values()} <= known:
        raise Bad("objects names a file that is not listed")
    if not all(_RANK.fullmatch(rank) and int(rank) < world_size for rank in names):
        raise Bad("objects.ranks names a rank that did not save")
    return shared, {int(rank): name for rank, name in names.items()}
