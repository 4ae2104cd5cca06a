"""Checkpoints built by hand from the description of the format, and a store that counts reads.

Small parts and odd chunks, which the writer makes only for large states on many ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint_io.format.manifest import seal
from checkpoint_io.format.safetensors import NAMES
from checkpoint_io.storage.base import REMOTE_SPAN
from checkpoint_io.storage.local import LocalStore

PART = 4096
Box = tuple[tuple[int, ...], tuple[int, ...]]


def sums(data: bytes, part: int = PART) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(data[at : at + part]) for at in range(0, len(data), part)]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(tensor: torch.Tensor) -> list[Box]:
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def split(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, length) of the pieces of one dimension."""
    edges = sorted({0, length, *(cut % (length + 1) for cut in cuts)})
    return [(low, high - low) for low, high in pairwise(edges)]


def rows(tensor: torch.Tensor, *cuts: int) -> list[Box]:
    """Boxes along the first dimension."""
    rest = tuple(tensor.shape[1:])
    return [((low, *(0,) * len(rest)), (length, *rest)) for low, length in split(len(tensor), cuts)]


def tensor_file(
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]],
    part: int = PART,
) -> tuple[bytes, bytes, dict[str, list[Any]]]:
    """The head and the data of a tensors file, and its rows in a manifest (file 0)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "save_id": "0" * 16}}
    pieces: list[bytes] = []
    found: dict[str, list[Any]] = {}
    at = 0
    for key, (tensor, boxes) in tensors.items():
        found[key] = [NAMES[tensor.dtype], list(tensor.shape)]
        for offsets, lengths in boxes:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            data = raw(tensor[place])
            is_whole = tuple(lengths) == tuple(tensor.shape)
            name = key if is_whole else f"{key}~@{','.join(map(str, offsets))}"
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(lengths),
                "data_offsets": [at, at + len(data)],
            }
            row = [0, at, at + len(data), "".join(sums(data, part))]
            found[key].append(row if is_whole else [*row, list(offsets), list(lengths)])
            pieces.append(data)
            at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096
    head = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
    for row in (row for entry in found.values() for row in entry[2:]):
        row[1] += length
        row[2] += length
    return head, b"".join(pieces), found


def handmade(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]],
    *,
    part: int = PART,
    head: bytes | None = None,
) -> Path:
    """Write a checkpoint whose shared state is a flat dict of these tensors."""
    own_head, data, found = tensor_file(tensors, part)
    head = own_head if head is None else head
    save_id = "0123456789abcdef"
    state = {"save_id": save_id, "rank": None, "state": {k: {"$tensor": k} for k in tensors}}
    objects = json.dumps(state).encode()
    names = [f"tensors-{save_id}-r00000-00001.safetensors", f"objects-{save_id}-shared.json"]
    contents = [head + data, objects]
    covered = [len(head), len(objects)]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, content, cover in zip(names, contents, covered, strict=True):
        (folder / name).write_bytes(content)
        files.append(
            {
                "name": name,
                "size": len(content),
                "kind": name.split("-")[0],
                "rank": 0,
                "covered": cover,
                "checksums": sums(content[:cover], part),
            }
        )
    document = {
        "format": "accel-callbacks-checkpoint",
        "version": 3,
        "id": save_id,
        "generation": 1,
        "created": "2025-01-31T12:00:00.000Z",
        "writer": {},
        "world_size": 1,
        "metadata": {},
        "checksum": {"algorithm": "xxh3-64", "part_size": part},
        "files": files,
        "aliases": {},
        "objects": {"shared": names[1], "ranks": {}},
        "tensors": found,
    }
    (folder / "manifest.json").write_bytes(seal(document))
    return folder


class CountingStore(LocalStore):
    """A local store that notes how many requests and bytes a remote one would have seen."""

    span_bytes = REMOTE_SPAN  # counted as a remote store would be asked

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.requests = 0
        self.nbytes = 0
        self.spans: list[Any] = []

    def forget(self) -> None:
        self.requests = self.nbytes = 0
        self.spans = []

    def fetch(self, spans: Sequence[Any], deliver: Any) -> None:
        self.spans += spans
        self.requests += len(spans)
        self.nbytes += sum(span.end - span.begin for span in spans)
        super().fetch(spans, deliver)

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        with super().open(name) as reader:
            yield _CountingReader(reader, self)


class _CountingReader:
    def __init__(self, reader: Any, store: CountingStore) -> None:
        self._reader, self._store, self.size = reader, store, reader.size

    def read(self, begin: int, end: int) -> Any:
        self._store.requests += 1
        self._store.nbytes += end - begin
        return self._reader.read(begin, end)
