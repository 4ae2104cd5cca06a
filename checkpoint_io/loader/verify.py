"""Check a checkpoint against its manifest: sizes, headers and, on request, every byte."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import numpy as np

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import FileEntry, Manifest
from checkpoint_io.format.safetensors import MAX_HEADER, box_name, parse_header
from checkpoint_io.loader.files import check_sizes, in_tensors, retry_if_replaced
from checkpoint_io.loader.source import Source
from checkpoint_io.loader.transfer import Bytes, Flat, Want
from checkpoint_io.storage.open import open_store
from checkpoint_io.threads import collector_paused

__all__ = ["verify"]

# begin, end, name in the header, dtype and shape of each tensor of a file, in a header's order
_Rows = list[tuple[int, int, str, str, tuple[int, ...]]]


def verify(
    url: str | os.PathLike[str],
    *,
    full: bool = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Check the files of all ranks of a checkpoint without creating tensors.

    Args:
        url: the folder of a checkpoint.
        full: read every byte and compare checksums (default); False compares the sizes of all
            files, and the headers of those with tensors.
        progress: a bar with bytes per second; None shows one for a long check on a terminal.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: a file is damaged; names it, and the tensor in the damaged part.
        ManifestVersionError: a newer version of this package wrote it.

    Example:
        >>> from checkpoint_io import save, verify
        >>> _ = save("memory://doc-reader/v", {"lr": 0.1})
        >>> verify("memory://doc-reader/v")
    """
    store = open_store(url, storage_options)

    def check(manifest: Manifest) -> None:
        every = range(len(manifest.files))
        check_files(Source(store, manifest), every, full=full, progress=progress)

    retry_if_replaced(store, check)


def check_files(
    source: Source,
    files: Collection[int],
    *,
    headers: bool = True,
    full: bool = False,
    progress: bool | None = False,
) -> None:
    """Check some files (by index) against the manifest: sizes, then headers, then all bytes."""
    # cheapest first: most damage (a copy that was cut off) shows in the sizes
    check_sizes(source.store, source.manifest, files)
    if not headers and not full:
        return
    check_headers(source, [n for n in files if source.manifest.files[n].kind == "tensors"])
    if full:
        source.transfer(_all_of(source.manifest, files), progress=progress, label="verifying")


def _tensors_by_file(manifest: Manifest, files: Collection[int]) -> dict[int, _Rows]:
    """Return the tensors that the manifest puts into each of some files."""
    held: dict[int, _Rows] = defaultdict(list)
    for key, (dtype, whole, chunks) in manifest.tensors.items():
        for file, offsets, shape, begin, end, _ in chunks:
            if file not in files:
                continue
            name = key if shape == whole else box_name(key, offsets)
            held[file].append((begin, end, name, dtype, shape))
    for rows in held.values():
        rows.sort()
    return held


def _all_of(manifest: Manifest, files: Collection[int]) -> Iterator[Want]:
    """Yield a read of everything in some files that has a checksum."""
    for index in files:
        entry = manifest.files[index]
        yield Want(index, 0, entry.covered, entry.checksums, "")
    wanted = set(files)
    for key, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file in wanted:
                yield Want(chunk.file, chunk.begin, chunk.end, chunk.checksums, key)


def check_headers(source: Source, files: Collection[int]) -> None:
    """Check that the headers of tensor files agree with the manifest."""
    heads: dict[int, Bytes] = {}
    wants = []
    for index in files:
        entry = source.manifest.files[index]
        if not 8 <= entry.covered <= MAX_HEADER + 8:
            raise CorruptCheckpointError(
                f"{source.where(entry.name)}: a header of {entry.covered} bytes is not accepted"
            )
        heads[index] = np.empty(entry.covered, dtype=np.uint8)
        sink = Flat(heads[index])
        wants.append(Want(index, 0, entry.covered, entry.checksums, "", sink))
    source.transfer(wants)
    with collector_paused():
        held = _tensors_by_file(source.manifest, heads.keys())
        for index, data in heads.items():
            entry, head = source.manifest.files[index], data.tobytes()
            if not _as_written(entry, head, held[index]):
                _compare(source.where(entry.name), entry, head, held[index])


def _as_written(entry: FileEntry, head: bytes, held: _Rows) -> bool:
    """Return whether a header is byte for byte the one that this package writes."""
    # much faster than parsing; a header of another writer is compared entry by entry
    base = entry.covered
    rows = [
        f'{quoted(name)}:{{"dtype":"{dtype}","shape":{list(shape)},'
        f'"data_offsets":[{begin - base},{end - base}]}}'
        for begin, end, name, dtype, shape in held
    ]
    start = head[8:].split(b"}", 1)[0] + b"}"
    end = f",{','.join(rows)}}}".encode("ascii")
    try:
        first = jsonio.loads(start + b"}", entry.name)
    except CorruptCheckpointError:
        return False
    whole = head[:8] == (len(head) - 8).to_bytes(8, "little")
    return whole and [*first] == ["__metadata__"] and head[8:].rstrip(b" ") == start + end


def _compare(label: str, entry: FileEntry, head: bytes, held: _Rows) -> None:
    """Parse one header and compare it with the manifest."""
    if int.from_bytes(head[:8], "little") != len(head) - 8:
        raise CorruptCheckpointError(f"{label}: the length of its header is not the one saved")
    _, slots = parse_header(head[8:], entry.size, label)
    rows = sorted((s.begin, s.end, name, s.dtype, s.shape) for name, s in slots.items())
    if rows != held:
        wrong = set(held) - set(rows) or set(rows) - set(held)
        raise CorruptCheckpointError(
            f"{label}: its header does not agree with the manifest"
            f"{in_tensors(row[2] for row in sorted(wrong))}; load an older checkpoint"
        )
