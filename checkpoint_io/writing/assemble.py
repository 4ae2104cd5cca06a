"""Joining what the ranks report into one manifest, as the JSON document that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata as importlib_metadata
from typing import Any

import torch

from checkpoint_io.format.manifest import ALGORITHM, FORMAT, PART_SIZE, VERSION
from checkpoint_io.format.names import objects_name
from checkpoint_io.format.tree import encode_plain


def assemble(
    save_id: str, generation: int, metadata: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Join the reports of all ranks into one document."""
    files: list[Any] = []
    tensors: dict[str, list[Any]] = {}
    aliases: dict[str, str] = {}
    for report in reports:
        base = len(files)
        files += report["files"]
        aliases.update(report["tied"])
        for key, dtype, shape, chunk in report["chunks"]:
            row = tensors.get(key)
            if row is None:
                row = tensors[key] = [dtype, shape]
            row.append((chunk[0] + base, *chunk[1:]) if base else chunk)
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    present = {file["name"] for file in files}
    own = {str(rank): objects_name(save_id, rank) for rank in range(len(reports))}
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": save_id,
        "generation": generation,
        "created": created.replace("+00:00", "Z"),
        "writer": {"checkpoint_io": _own_version(), "torch": str(torch.__version__)},
        "world_size": len(reports),
        "metadata": encode_plain(metadata, "metadata"),
        "checksum": {"algorithm": ALGORITHM, "part_size": PART_SIZE},
        "files": files,
        "aliases": aliases,
        "objects": {
            "shared": objects_name(save_id, None),
            "ranks": {rank: name for rank, name in own.items() if name in present},
        },
        "tensors": tensors,
    }


def _own_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return importlib_metadata.version("accel-callbacks")
    except importlib_metadata.PackageNotFoundError:
        return "unknown"
