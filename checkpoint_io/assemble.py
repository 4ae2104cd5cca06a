"""Joining what the ranks report into one manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata as importlib_metadata
from typing import Any

import torch

from checkpoint_io.manifest import Chunk, FileEntry, Manifest, TensorEntry


def assemble(
    save_id: str, generation: int, metadata: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]
) -> Manifest:
    """Join the reports of all ranks into one manifest."""
    files: list[FileEntry] = []
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    rank_objects: dict[int, str] = {}
    for rank, report in enumerate(reports):
        base = len(files)
        files += [FileEntry(**{**f, "checksums": tuple(f["checksums"])}) for f in report["files"]]
        for key, tensor in report["tensors"].items():
            tensors[key] = _tensor_entry(tensor, base)
        aliases.update(report["aliases"])
        if report["local_objects"] is not None:
            rank_objects[rank] = report["local_objects"]
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return Manifest(
        id=save_id,
        generation=generation,
        created=created.replace("+00:00", "Z"),
        writer={"checkpoint_io": _own_version(), "torch": str(torch.__version__)},
        world_size=len(reports),
        metadata=dict(metadata),
        files=tuple(files),
        tensors=tensors,
        aliases=aliases,
        shared_objects=reports[0]["shared_objects"],
        rank_objects=rank_objects,
    )


def _tensor_entry(plain: Mapping[str, Any], base: int) -> TensorEntry:
    """Rebuild a tensor entry, its files counted from the first of all."""
    chunks = tuple(
        Chunk(c["file"] + base, tuple(c["offsets"]), tuple(c["shape"]), c["begin"], c["end"])
        for c in plain["chunks"]
    )
    return TensorEntry(plain["dtype"], tuple(plain["shape"]), chunks)


def _own_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return importlib_metadata.version("accel-callbacks")
    except importlib_metadata.PackageNotFoundError:
        return "unknown"
