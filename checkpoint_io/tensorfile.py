"""The safetensors file format: headers written and read, tensors as runs of bytes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_io import jsonio
from checkpoint_io.dtypes import DTYPES, ITEMSIZE, NAMES
from checkpoint_io.errors import CheckpointError, CorruptCheckpointError

ALIGNMENT = 4096
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a file, in absolute bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[str, torch.Tensor]], dict[str, Slot]]:
    """Plan a file: its header, the tensors in the order of their bytes, and where each lies."""
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not supported")
    # wider types first: every tensor is then aligned to its own element size
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for key, tensor in ordered:
        entries[key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{len(ordered)} tensors need a header of {length} bytes, over the format's limit"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    slots = {
        key: Slot(
            entries[key]["dtype"],
            tuple(tensor.shape),
            len(header) + entries[key]["data_offsets"][0],
            len(header) + entries[key]["data_offsets"][1],
        )
        for key, tensor in ordered
    }
    return header, ordered, slots


def contents(header: bytes, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    """Yield a file's bytes; at most one tensor at a time is copied (to the CPU, contiguous)."""
    yield memoryview(header)
    for _, tensor in tensors:
        if tensor.numel():
            yield as_bytes(to_host(tensor)).numpy().data


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in contiguous CPU memory, itself if it is there already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous CPU tensor as a flat run of bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def empty(dtype: str, shape: Sequence[int], where: str) -> torch.Tensor:
    """Allocate a tensor for a safetensors dtype name."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: torch {torch.__version__} has no dtype for {dtype}")
    return torch.empty(tuple(shape), dtype=DTYPES[dtype])


def parse_header(data: bytes, size: int, where: str) -> tuple[dict[str, str], dict[str, Slot]]:
    """Check a header (without its 8 length bytes) against the format; return metadata and slots."""
    document = jsonio.loads(data, where)
    try:
        metadata = dict(document.pop("__metadata__", {}))
        if not all(type(value) is str for value in metadata.values()):
            raise ValueError("metadata that is not text")
        base = 8 + len(data)
        slots = {key: _slot(entry, base) for key, entry in document.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{where}: bad safetensors header ({error!r:.200})") from None
    position = base
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != position:
            raise CorruptCheckpointError(f"{where}: tensors overlap or leave a hole")
        position = slot.end
    if position != size:
        raise CorruptCheckpointError(f"{where}: {size} bytes long, its header says {position}")
    return metadata, slots


def _slot(entry: Any, base: int) -> Slot:
    """Check one header entry."""
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape)):
        raise ValueError("a size that is not a whole number")
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**60:
        raise ValueError("an absurd shape")
    if math.prod(shape) * ITEMSIZE[dtype] != end - begin:
        raise ValueError("a shape that does not fit its bytes")
    return Slot(dtype, shape, base + begin, base + end)
