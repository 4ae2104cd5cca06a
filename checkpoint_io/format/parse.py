"""Reading a manifest that may be damaged or hostile: nothing is believed before it is checked."""

from __future__ import annotations

import re
from typing import Any

from checkpoint_io.errors import CorruptCheckpointError, ManifestVersionError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import (
    ALGORITHM,
    FORMAT,
    VERSION,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_matches,
    digest_of,
)
from checkpoint_io.format.names import kind_of
from checkpoint_io.format.tree import decode_tree
from checkpoint_io.layout.checks import Bad, checksums, integer, show, strings, typed
from checkpoint_io.layout.parse_tensors import parse_tensors

_MAX_PART = 256 * 1024 * 1024
_ALIGNMENT = 4096
_RANK = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


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
