"""Reading a manifest that may be damaged or hostile: nothing is believed before it is checked."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from checkpoint_io import jsonio
from checkpoint_io.dtypes import ITEMSIZE
from checkpoint_io.errors import CorruptCheckpointError, ManifestVersionError
from checkpoint_io.manifest import (
    ALGORITHM,
    FORMAT,
    VERSION,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_matches,
)
from checkpoint_io.names import kind_of
from checkpoint_io.tree import decode_tree

_LIMIT = 2**63 - 1
_MAX_DIMS = 64
_MAX_CHUNKS = 65536
_MAX_PART = 256 * 1024 * 1024
_HEX16 = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Check the bytes of a manifest completely and return it; `where` goes into errors."""
    try:
        return _parse(data, where)
    except _Bad as problem:
        raise CorruptCheckpointError(f"{where}: {problem}") from None


class _Bad(Exception):
    """One thing wrong with a manifest."""


def _parse(data: bytes, where: str) -> Manifest:
    """Check version, then digest, then every field."""
    document = _typed(jsonio.loads(data, where), dict, "the manifest")
    if document.get("format") != FORMAT:
        raise _Bad(f"not a checkpoint manifest (format is {document.get('format')!r:.80})")
    version = _integer(document.get("version"), "version")
    if version > VERSION:
        raise ManifestVersionError(
            f"{where} has format version {version}, this package reads up to {VERSION}: "
            "upgrade accel-callbacks"
        )
    if not digest_matches(data):
        raise _Bad("its digest does not match: the file was damaged or edited")
    part_size = _part_size(document.get("checksum"))
    world_size = _integer(document.get("world_size"), "world_size", low=1)
    files = _files(document.get("files"), part_size, world_size)
    tensors = _tensors(document.get("tensors"), files)
    _refuse_overlaps(tensors, files)
    shared, ranks = _objects(document.get("objects"), files, world_size)
    identity = _typed(document.get("id"), str, "id")
    if not _ID.fullmatch(identity):
        raise _Bad(f"id {identity!r:.80} is not hexadecimal")
    metadata = decode_tree(_typed(document.get("metadata"), dict, "metadata"), None, where)
    return Manifest(
        id=identity,
        generation=_integer(document.get("generation"), "generation"),
        created=_typed(document.get("created"), str, "created"),
        writer=_strings(document.get("writer"), "writer"),
        world_size=world_size,
        metadata=_typed(metadata, dict, "metadata"),
        files=files,
        tensors=tensors,
        aliases=_aliases(document.get("aliases"), tensors),
        shared_objects=shared,
        rank_objects=ranks,
        part_size=part_size,
        digest=_typed(document.get("digest"), str, "digest"),
    )


def _typed(value: Any, kind: type, what: str) -> Any:
    """Return the value if it is of that JSON type."""
    if type(value) is not kind:
        raise _Bad(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(value: Any, what: str, low: int = 0, high: int = _LIMIT) -> int:
    """Return a whole number within its bounds; true and false are not numbers."""
    if type(value) is not int or not low <= value <= high:
        raise _Bad(f"{what} must be a whole number from {low} to {high}, not {value!r:.80}")
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    """Return a list of whole numbers with at most as many entries as a tensor has dimensions."""
    items = _typed(value, list, what)
    if len(items) > _MAX_DIMS:
        raise _Bad(f"{what} has {len(items)} dimensions, more than {_MAX_DIMS}")
    return tuple(_integer(item, what) for item in items)


def _strings(value: Any, what: str) -> dict[str, str]:
    """Return an object whose values are all strings."""
    return {k: _typed(v, str, f"{what}[{k!r:.80}]") for k, v in _typed(value, dict, what).items()}


def _part_size(value: Any) -> int:
    """Check the checksum record."""
    record = _typed(value, dict, "checksum")
    if record.get("algorithm") != ALGORITHM:
        raise _Bad(f"checksum algorithm {record.get('algorithm')!r:.80} is not {ALGORITHM}")
    return _integer(record.get("part_size"), "part_size", low=4096, high=_MAX_PART)


def _files(value: Any, part_size: int, world_size: int) -> tuple[FileEntry, ...]:
    """Check names, sizes and checksum counts of all files."""
    files = tuple(_file(item, part_size, world_size) for item in _typed(value, list, "files"))
    if len({entry.name for entry in files}) != len(files):
        raise _Bad("a file is listed twice")
    return files


def _file(value: Any, part_size: int, world_size: int) -> FileEntry:
    """Check one file entry."""
    item = _typed(value, dict, "a file entry")
    name = _typed(item.get("name"), str, "a file name")
    kind = kind_of(name)
    if kind is None or item.get("kind") != kind:
        raise _Bad(f"{name!r:.200} is not a name of this format for a file of its kind")
    size = _integer(item.get("size"), f"size of {name}")
    checksums = tuple(_typed(item.get("checksums"), list, f"checksums of {name}"))
    if len(checksums) != -(-size // part_size):
        raise _Bad(f"{name} has {len(checksums)} checksums for {size} bytes")
    if not all(type(c) is str and _HEX16.fullmatch(c) for c in checksums):
        raise _Bad(f"{name} has a checksum that is not 16 hex digits")
    rank = _integer(item.get("rank"), f"rank of {name}", high=world_size - 1)
    return FileEntry(name, size, kind, rank, checksums)


def _tensors(value: Any, files: tuple[FileEntry, ...]) -> dict[str, TensorEntry]:
    """Check every tensor entry."""
    return {key: _tensor(key, item, files) for key, item in _typed(value, dict, "tensors").items()}


def _tensor(key: str, value: Any, files: tuple[FileEntry, ...]) -> TensorEntry:
    """Check that a tensor's chunks are inside it, do not overlap and fill it."""
    what = f"tensor {key!r:.200}"
    item = _typed(value, dict, what)
    dtype = _typed(item.get("dtype"), str, f"dtype of {what}")
    if dtype not in ITEMSIZE:
        raise _Bad(f"{what} has unknown dtype {dtype!r:.80}")
    shape = _integers(item.get("shape"), f"shape of {what}")
    if math.prod(max(n, 1) for n in shape) * ITEMSIZE[dtype] > _LIMIT:
        raise _Bad(f"{what} has an absurd shape")
    raw = _typed(item.get("chunks"), list, f"chunks of {what}")
    if not 1 <= len(raw) <= _MAX_CHUNKS:
        raise _Bad(f"{what} has {len(raw)} chunks")
    chunks = tuple(_chunk(what, c, shape, ITEMSIZE[dtype], files) for c in raw)
    if sum(math.prod(c.shape) for c in chunks) != math.prod(shape) or _boxes_overlap(chunks):
        raise _Bad(f"the chunks of {what} do not cover it exactly once")
    return TensorEntry(dtype, shape, chunks)


def _chunk(
    what: str, value: Any, shape: tuple[int, ...], itemsize: int, files: tuple[FileEntry, ...]
) -> Chunk:
    """Check that a chunk lies inside its tensor and its bytes inside their file."""
    item = _typed(value, dict, f"a chunk of {what}")
    index = _integer(item.get("file"), f"file of {what}", high=len(files) - 1)
    begin = _integer(item.get("begin"), f"begin of {what}")
    end = _integer(item.get("end"), f"end of {what}", low=begin)
    if files[index].kind != "tensors" or begin < 8 or end > files[index].size:
        raise _Bad(f"bytes {begin} to {end} of {what} are not in {files[index].name}")
    offsets = _integers(item.get("offsets"), f"offsets of {what}")
    extent = _integers(item.get("shape"), f"chunk shape of {what}")
    if not len(offsets) == len(extent) == len(shape) or any(
        start + length > total for start, length, total in zip(offsets, extent, shape, strict=True)
    ):
        raise _Bad(f"a chunk of {what} reaches outside its shape")
    if math.prod(extent) * itemsize != end - begin:
        raise _Bad(f"{what}: {end - begin} bytes do not hold a chunk of shape {list(extent)}")
    return Chunk(index, offsets, extent, begin, end)


def _boxes_overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Sweep along the first dimension and compare only boxes that meet there."""
    boxes = [c for c in chunks if math.prod(c.shape)]
    if len(boxes) < 2:
        return False
    boxes.sort(key=lambda c: c.offsets)
    active: list[Chunk] = []
    for box in boxes:
        active = [a for a in active if not a.offsets or a.offsets[0] + a.shape[0] > box.offsets[0]]
        if any(_meet(a, box) for a in active):
            return True
        active.append(box)
    return False


def _meet(a: Chunk, b: Chunk) -> bool:
    """Say whether two boxes share an element."""
    return all(
        x < y + m and y < x + n
        for x, n, y, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    )


def _refuse_overlaps(tensors: dict[str, TensorEntry], files: tuple[FileEntry, ...]) -> None:
    """Refuse two chunks that claim the same bytes of a file."""
    ranges = sorted(
        (c.file, c.begin, c.end) for t in tensors.values() for c in t.chunks if c.end > c.begin
    )
    for left, right in itertools.pairwise(ranges):
        if left[0] == right[0] and right[1] < left[2]:
            raise _Bad(f"two tensors claim the same bytes of {files[left[0]].name}")


def _aliases(value: Any, tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Check that every alias names a stored tensor and hides none."""
    aliases = _strings(value, "aliases")
    for key, target in aliases.items():
        if target not in tensors or key in tensors:
            raise _Bad(f"alias {key!r:.200} of {target!r:.200} is not usable")
    return aliases


def _objects(
    value: Any, files: tuple[FileEntry, ...], world_size: int
) -> tuple[str, dict[int, str]]:
    """Check that the JSON files it names are listed as such."""
    record = _typed(value, dict, "objects")
    known = {entry.name for entry in files if entry.kind == "objects"}
    shared = _typed(record.get("shared"), str, "objects.shared")
    names = _strings(record.get("ranks"), "objects.ranks")
    if not {shared, *names.values()} <= known:
        raise _Bad("objects names a file that is not listed")
    allowed = {str(rank) for rank in range(world_size)} if names else set()
    if not names.keys() <= allowed:
        raise _Bad("objects.ranks names a rank that did not save")
    return shared, {int(rank): name for rank, name in names.items()}
