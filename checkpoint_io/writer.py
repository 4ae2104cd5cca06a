"""What one rank writes: its tensor files and its JSON, with checksums taken on the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint_io import jsonio
from checkpoint_io.collect import TensorCollector, local_key, pack, shared_key
from checkpoint_io.manifest import PART_SIZE, Chunk, FileEntry, TensorEntry
from checkpoint_io.names import objects_name, tensors_name
from checkpoint_io.parts import HashingWriter
from checkpoint_io.store import Store
from checkpoint_io.tensorfile import contents, layout
from checkpoint_io.tree import TreeEncoder


@dataclass
class RankReport:
    """What one rank wrote; its chunks count files from this rank's first."""

    files: list[FileEntry] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shared_objects: str | None = None
    local_objects: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return plain JSON values, which any process group can carry."""
        return {
            "files": [entry.to_json() for entry in self.files],
            "tensors": {key: tensor.to_json() for key, tensor in self.tensors.items()},
            "aliases": self.aliases,
            "shared_objects": self.shared_objects,
            "local_objects": self.local_objects,
        }


@dataclass(frozen=True)
class SaveTask:
    """What stays the same during one save."""

    store: Store
    save_id: str
    rank: int
    max_shard_bytes: int
    run_id: str | None


class RankWriter:
    """Writes the files of one rank and can take them back."""

    def __init__(self, task: SaveTask) -> None:
        self._task = task
        self._created: list[str] = []
        self._report = RankReport()

    def write(
        self, shared: Mapping[str, Any] | None, local: Mapping[str, Any] | None
    ) -> RankReport:
        """Encode both states, then write tensors, then JSON; nothing is written if one is bad."""
        collector = TensorCollector()
        shared_tree = None
        if shared is not None:
            shared_tree = TreeEncoder(
                "state", lambda path, tensor: collector.add(shared_key(path), tensor)
            ).encode(dict(shared))
        boundary = len(collector.tensors)
        local_tree = None
        if local is not None:
            rank = self._task.rank
            local_tree = TreeEncoder(
                "local_state", lambda path, tensor: collector.add(local_key(rank, path), tensor)
            ).encode(dict(local))
        items = list(collector.tensors.items())
        # apart, so that another rank that wants the shared state need not read this rank's own
        self._write_tensors(items[:boundary])
        self._write_tensors(items[boundary:])
        self._report.aliases = collector.aliases
        if shared is not None:
            self._report.shared_objects = self._write_objects(None, shared_tree)
        if local is not None:
            self._report.local_objects = self._write_objects(self._task.rank, local_tree)
        return self._report

    def undo(self) -> None:
        """Remove what was written, as far as that is possible."""
        for name in self._created:
            with suppress(Exception):
                self._task.store.remove(name)

    def _write_tensors(self, items: list[tuple[str, torch.Tensor]]) -> None:
        """Write tensors in files of limited size."""
        for shard in pack(items, self._task.max_shard_bytes):
            name = tensors_name(self._task.save_id, self._task.rank, len(self._report.files) + 1)
            header, ordered, slots = layout(shard, {"format": "pt", **self._labels()})
            index = len(self._report.files)
            self._write_file(name, "tensors", contents(header, ordered))
            for key, slot in slots.items():
                chunk = Chunk(index, (0,) * len(slot.shape), slot.shape, slot.begin, slot.end)
                self._report.tensors[key] = TensorEntry(slot.dtype, slot.shape, (chunk,))

    def _write_objects(self, rank: int | None, tree: Any) -> str:
        """Write one JSON file and return its name."""
        name = objects_name(self._task.save_id, rank)
        data = jsonio.dumps({**self._labels(), "rank": rank, "state": tree}, name)
        self._write_file(name, "objects", [memoryview(data)])
        return name

    def _labels(self) -> dict[str, str]:
        """Say in each file whose it is, so that a killed save can be cleaned up."""
        labels = {"save_id": self._task.save_id}
        return labels if self._task.run_id is None else {**labels, "run_id": self._task.run_id}

    def _write_file(self, name: str, kind: str, pieces: Any) -> None:
        """Stream one file and note its size and checksums."""
        self._created.append(name)
        with self._task.store.create(name) as write:
            hashing = HashingWriter(write, PART_SIZE)
            for piece in pieces:
                hashing.write(piece)
        self._report.files.append(
            FileEntry(name, hashing.size, kind, self._task.rank, hashing.checksums())
        )
