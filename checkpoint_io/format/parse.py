"""Parse a manifest that may be damaged or hostile; everything in it is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from checkpoint_io.errors import CorruptCheckpointError, ManifestVersionError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import (
    ALGORITHM,
    FORMAT,
    READABLE,
    VERSION,
    Chunk,
    FileEntry,
    LazyManifest,
    Manifest,
    TensorEntry,
    digest_matches,
    digest_of,
)
from checkpoint_io.format.names import kind_of
from checkpoint_io.format.safetensors import ALIGNMENT, ITEMSIZE, MAX_DIMS
from checkpoint_io.format.tree import decode_tree
from checkpoint_io.sharding.boxes import cover_fault

_LIMIT = 2**63 - 1
_TENSORS = b',"tensors":{'
_MAX_CHUNKS = 65536
_MAX_PART = 256 * 1024 * 1024
_HEX16 = re.compile(r"[0-9a-f]{16}", re.ASCII)
_is_hex = re.compile(r"[0-9a-f]+", re.ASCII).fullmatch
_RANK = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


def parse_manifest(data: bytes, label: str) -> Manifest:
    """Parse the bytes of a manifest; `label` names it in errors."""
    return parse_document(jsonio.loads(data, label), data, label)


def parse_document(document: Any, data: bytes, label: str) -> Manifest:
    """Parse a manifest whose JSON is decoded already; `data` are its bytes."""
    try:
        head = _parse_head(document, data, label)
        tensors = _parse_tensors(document.get("tensors"), head["files"], head["part_size"])
        aliases = _aliases(document.get("aliases"), tensors)
    except _Invalid as problem:
        raise CorruptCheckpointError(f"{label}: {problem}") from None
    return Manifest(**head, tensors=tensors, aliases=aliases)


def parse_without_tensors(data: bytes, label: str, whole: Callable[[], Manifest]) -> Manifest:
    """Parse a manifest, but for its tensors and aliases; these are taken from `whole()` if needed.

    The digest is checked over all bytes, so damage is noticed anywhere.
    """
    document = _decode_without_tensors(data, label)
    try:
        head = _parse_head(document, data, label)
        _require_type(document.get("tensors"), dict, "tensors")
    except _Invalid as problem:
        raise CorruptCheckpointError(f"{label}: {problem}") from None
    return LazyManifest(head, whole)


def _decode_without_tensors(data: bytes, label: str) -> Any:
    """Decode the JSON of a manifest, without that of its tensors where they come last."""
    # Tensors are nearly all of a large manifest. Their entries hold no objects, so that the first
    # brace that closes after they begin ends them, unless it is in a key. Any other order of fields
    # (and such a key) is allowed, and only slower.
    at = data.rfind(_TENSORS)
    if at > 0 and data.find(b"}", at) == len(data) - 2 and data.endswith(b"}"):
        with suppress(CorruptCheckpointError):  # it was not a field of the manifest itself
            document = jsonio.loads(data[:at] + b"}", label)
            if isinstance(document, dict) and "tensors" not in document:
                return {**document, "tensors": {}}
    return jsonio.loads(data, label)


def _parse_head(document: Any, data: bytes, label: str) -> dict[str, Any]:
    """Parse the version, then check the digest, then parse all other fields but the tensors."""
    _require_type(document, dict, "the manifest")
    if document.get("format") != FORMAT:
        raise _Invalid(f"not a checkpoint manifest (format is {_show(document.get('format'))})")
    version = _integer(document.get("version"), "version")
    if version not in READABLE:
        advice = "upgrade accel-callbacks" if version > VERSION else "save it again"
        raise ManifestVersionError(
            f"{label} has format version {version}, this package reads versions {READABLE[0]} to "
            f"{VERSION}: {advice}"
        )
    if not digest_matches(data):
        raise _Invalid("its digest does not match: the file was damaged or edited")
    part_size = _part_size(document.get("checksum"))
    world_size = _integer(document.get("world_size"), "world_size", low=1)
    files = _files(document.get("files"), part_size, world_size)
    shared, ranks = _objects(document.get("objects"), files, world_size)
    identity = _require_type(document.get("id"), str, "id")
    if not _ID.fullmatch(identity):
        raise _Invalid(f"id {identity!r:.80} is not hexadecimal")
    metadata = decode_tree(_require_type(document.get("metadata"), dict, "metadata"), None, label)
    return {
        "id": identity,
        "generation": _integer(document.get("generation"), "generation"),
        "created": _require_type(document.get("created"), str, "created"),
        "writer": _strings(document.get("writer"), "writer"),
        "world_size": world_size,
        "metadata": _require_type(metadata, dict, "metadata"),
        "files": files,
        "shared_objects": shared,
        "rank_objects": ranks,
        "part_size": part_size,
        "digest": digest_of(data),
    }


def _part_size(value: Any) -> int:
    """Parse the checksum record."""
    record = _require_type(value, dict, "checksum")
    if record.get("algorithm") != ALGORITHM:
        raise _Invalid(f"checksum algorithm {_show(record.get('algorithm'))} is not {ALGORITHM}")
    size = _integer(record.get("part_size"), "part_size", low=4096, high=_MAX_PART)
    if size % 8:
        raise _Invalid(f"parts of {size} bytes would split numbers")
    return size


def _files(value: Any, part_size: int, world_size: int) -> tuple[FileEntry, ...]:
    """Parse all file entries."""
    files = tuple(
        _file(item, part_size, world_size) for item in _require_type(value, list, "files")
    )
    if len({entry.name for entry in files}) != len(files):
        raise _Invalid("a file is listed twice")
    return files


def _file(value: Any, part_size: int, world_size: int) -> FileEntry:
    """Parse one file entry."""
    item = _require_type(value, dict, "a file entry")
    name = _require_type(item.get("name"), str, "a file name")
    kind = kind_of(name)
    if kind is None or item.get("kind") != kind:
        raise _Invalid(f"{name!r:.200} is not a name of this format for a file of its kind")
    size = _integer(item.get("size"), f"size of {name}")
    covered = _integer(item.get("covered"), f"covered of {name}", high=size)
    whole = kind == "objects"
    if (covered != size) if whole else (not covered or covered % ALIGNMENT):
        raise _Invalid(f"{name} has checksums for {covered} of its {size} bytes")
    sums = _checksums(item.get("checksums"), covered, part_size, name)
    rank = _integer(item.get("rank"), f"rank of {name}", high=world_size - 1)
    return FileEntry(name, size, kind, rank, covered, sums)


def _aliases(value: Any, tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Parse the aliases; raise unless each names a stored tensor and hides none."""
    aliases = _strings(value, "aliases")
    for key, target in aliases.items():
        if target not in tensors or key in tensors:
            raise _Invalid(f"alias {key!r:.200} of {target!r:.200} is not usable")
    return aliases


def _objects(
    value: Any, files: tuple[FileEntry, ...], world_size: int
) -> tuple[str, dict[int, str]]:
    """Parse the names of the JSON files; raise unless these files are listed."""
    record = _require_type(value, dict, "objects")
    known = {entry.name for entry in files if entry.kind == "objects"}
    shared = _require_type(record.get("shared"), str, "objects.shared")
    names = _strings(record.get("ranks"), "objects.ranks")
    if not {shared, *names.values()} <= known:
        raise _Invalid("objects names a file that is not listed")
    if not all(_RANK.fullmatch(rank) and int(rank) < world_size for rank in names):
        raise _Invalid("objects.ranks names a rank that did not save")
    return shared, {int(rank): name for rank, name in names.items()}


def _parse_tensors(
    value: Any, files: Sequence[FileEntry], part_size: int
) -> dict[str, TensorEntry]:
    """Parse every tensor entry; raise unless they fill each tensors file without a gap."""
    parser = _Parser(files, part_size)
    tensors = {}
    for key, item in _require_type(value, dict, "tensors").items():
        try:
            tensors[key] = parser.tensor(item)
        except _Invalid as problem:
            raise _Invalid(f"tensor {key!r:.200}: {problem}") from None
    for entry, ranges in zip(files, parser.used, strict=True):
        _check_filled(entry, ranges)
    return tensors


class _Parser:
    """Parses tensor entries; `used` collects the byte ranges that they claim in each file."""

    def __init__(self, files: Sequence[FileEntry], part_size: int) -> None:
        self._files = files
        self._part_size = part_size
        self.used: list[list[tuple[int, int]]] = [[] for _ in files]

    def tensor(self, value: Any) -> TensorEntry:
        """Parse a tensor; raise unless its chunks cover it exactly once."""
        entry = self._small(value)  # the fast path for the usual entry
        if entry is not None:
            return entry
        if type(value) is not list or not 3 <= len(value) <= _MAX_CHUNKS + 2:
            raise _Invalid(f"must be a dtype, a shape and 1 to {_MAX_CHUNKS} chunks")
        dtype = value[0]
        if type(dtype) is not str or dtype not in ITEMSIZE:
            raise _Invalid(f"unknown dtype {_show(dtype)}")
        shape, itemsize = _integers(value[1], "its shape"), ITEMSIZE[dtype]
        if math.prod([n or 1 for n in shape]) * itemsize > _LIMIT:
            raise _Invalid("a shape that is too large")
        chunks = tuple([self._chunk(row, shape, itemsize) for row in value[2:]])
        fault = cover_fault(shape, [(chunk.offsets, chunk.shape) for chunk in chunks])
        if fault is not None:
            raise _Invalid(f"its chunks do not cover it exactly once: {fault}")
        return TensorEntry(dtype, shape, chunks)

    def _small(self, value: Any) -> TensorEntry | None:
        """Parse a tensor of one chunk of at most one part; None for any other, or if in doubt."""
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
        if not inside or size != end - begin or size > self._part_size or not _is_hex(sums):
            return None
        self.used[index].append((begin, end))
        shape = tuple(dims)
        offsets = (0,) * len(shape)
        return TensorEntry(dtype, shape, (Chunk(index, offsets, shape, begin, end, (sums,)),))

    def _chunk(self, row: Any, shape: tuple[int, ...], itemsize: int) -> Chunk:
        """Parse a chunk; raise unless its bytes lie inside the file."""
        if type(row) not in (list, tuple) or len(row) not in (4, 6):
            raise _Invalid("a chunk that does not have 4 or 6 fields")
        index, begin, end = row[0], row[1], row[2]
        # A bool is not an integer here, so no isinstance.
        if not (type(index) is type(begin) is type(end) is int and 0 <= index < len(self._files)):
            raise _Invalid(
                "a chunk whose begin or end is not a whole number, or whose file is not listed"
            )
        entry = self._files[index]
        if entry.kind != "tensors" or not entry.covered <= begin <= end <= entry.size:
            raise _Invalid(f"bytes {_show(begin)} to {_show(end)} are not in {entry.name}")
        offsets, extent = (0,) * len(shape), shape
        if len(row) == 6:
            offsets = _integers(row[4], "its offsets")
            extent = _integers(row[5], "the shape of a chunk")
        size = end - begin
        if math.prod(extent) * itemsize != size:
            raise _Invalid(f"{size} bytes do not hold a chunk of shape {list(extent)}")
        if size:
            self.used[index].append((begin, end))
        sums = _split_checksums(row[3], size, self._part_size)
        return Chunk(index, offsets, extent, begin, end, sums)


def _check_filled(entry: FileEntry, ranges: list[tuple[int, int]]) -> None:
    """Raise unless each byte of a tensors file belongs to exactly one chunk."""
    if entry.kind != "tensors":
        return
    position = entry.covered
    for begin, end in sorted(ranges):
        if begin < position:
            raise _Invalid(f"two tensors claim the same bytes of {entry.name}")
        if begin > position:
            break
        position = end
    if position != entry.size:
        raise _Invalid(f"no tensor claims byte {position} of {entry.name}")


class _Invalid(Exception):
    """A defect of a manifest."""


def _require_type(value: Any, kind: type, label: str) -> Any:
    """Return a value; raise unless it has exactly this type."""
    if type(value) is not kind:
        raise _Invalid(f"{label} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _integer(value: Any, label: str, low: int = 0, high: int = _LIMIT) -> int:
    """Return an integer; raise unless it is within its bounds. A bool is not an integer."""
    if type(value) is not int or not low <= value <= high:
        raise _Invalid(f"{label} must be a whole number from {low} to {high}, not {_show(value)}")
    return value


def _show(value: Any) -> str:
    """Format a value for an error, briefly and fast for any input."""
    if type(value) in (str, int, float, bool, type(None)):
        # Python refuses to convert an int of thousands of digits to text.
        huge = type(value) is int and value.bit_length() > 256
        return "a huge number" if huge else f"{value!r:.80}"
    return f"a {type(value).__name__}"


def _integers(value: Any, label: str) -> tuple[int, ...]:
    """Return integers, at most as many as a tensor may have dimensions."""
    if type(value) not in (list, tuple) or len(value) > MAX_DIMS:
        raise _Invalid(f"{label} must be a list of at most {MAX_DIMS} dimensions")
    for item in value:
        if type(item) is not int or not 0 <= item <= _LIMIT:
            _integer(item, label)
    return tuple(value)


def _strings(value: Any, label: str) -> dict[str, str]:
    """Return a dict; raise unless all of its values are strings."""
    return {
        k: _require_type(v, str, f"{label}[{k!r:.80}]")
        for k, v in _require_type(value, dict, label).items()
    }


def _checksums(value: Any, size: int, part_size: int, label: str) -> tuple[str, ...]:
    """Return the checksums of `size` bytes, given as a list."""
    if type(value) is not list or len(value) != -(-size // part_size):
        raise _Invalid(
            f"{label} does not have one checksum for each {part_size} of its {size} bytes"
        )
    for item in value:
        if type(item) is not str or not _HEX16.fullmatch(item):
            raise _Invalid(f"{label} has a checksum that is not 16 hex digits")
    return tuple(value)


def _split_checksums(value: Any, size: int, part_size: int) -> tuple[str, ...]:
    """Return the checksums of `size` bytes, given as one string."""
    if type(value) is not str or len(value) != 16 * -(-size // part_size):
        raise _Invalid(f"there is not one checksum for each {part_size} of its {size} bytes")
    if value and not _is_hex(value):
        raise _Invalid("a checksum that is not 16 hex digits")
    if size <= part_size:
        return (value,) if size else ()
    return tuple([value[begin : begin + 16] for begin in range(0, len(value), 16)])
