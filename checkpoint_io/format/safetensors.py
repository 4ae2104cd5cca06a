"""Headers, dtypes, tensors as bytes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format import json as jsonio

# float8_e8m0fnu came with torch 2.7: getattr keeps older ones working.
_CANDIDATES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attr) for name, attr in _CANDIDATES.items() if hasattr(torch, attr)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# Sizes for every name of the format, so that a manifest can be checked without the torch dtype.
ITEMSIZE: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
ALIGNMENT = 4096
MAX_HEADER = 100_000_000
PIECE = 16 << 20
_quote = json.JSONEncoder(ensure_ascii=True).encode


class Slot(NamedTuple):
    """Where one tensor lies in a file, in absolute bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[str, torch.Tensor]], list[tuple[int, int]]]:
    """Plan a file: its header, the tensors in the order of their bytes, and where each lies."""
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not supported")
    # wider types first: every tensor is then aligned to its own element size
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    # written as text, because making objects of 20,000 entries takes longer than all else
    rows = [f'"__metadata__":{json.dumps(dict(metadata))}']
    spans = []
    position = 0
    for key, tensor in ordered:
        dtype, shape, end = NAMES[tensor.dtype], list(tensor.shape), position + tensor.nbytes
        rows.append(
            f'{_quote(key)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{position},{end}]}}'
        )
        spans.append((position, end))
        position = end
    text = f"{{{','.join(rows)}}}".encode("ascii")
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{len(ordered)} tensors need a header of {length} bytes, over the format's limit"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    base = len(header)
    return header, ordered, [(base + begin, base + end) for begin, end in spans]


def contents(header: bytes, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    """Yield a file's bytes, in pieces."""
    yield memoryview(header)
    for _, tensor in tensors:
        yield from host_pieces(tensor)


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview[int]]:
    """Yield a tensor's bytes in C order; of one that needs a copy, only a piece is copied."""
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        ready = tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
        count = flat.numel() if ready else max(1, PIECE // tensor.element_size())
        for begin in range(0, flat.numel(), count):
            yield view_of(flat[begin : begin + count])
    elif tensor.nbytes <= PIECE or tensor.dim() == 0:
        yield view_of(tensor)
    else:
        rows = PIECE * tensor.shape[0] // tensor.nbytes
        for begin in range(0, tensor.shape[0], max(1, rows)):
            yield from host_pieces(tensor[begin : begin + rows] if rows else tensor[begin])


def view_of(tensor: torch.Tensor) -> memoryview[int]:
    """Return a small tensor's bytes, copied to the CPU unless they are there in C order."""
    view: memoryview[int] = as_bytes(to_host(tensor)).numpy().data
    return view


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in contiguous CPU memory, itself if it is there already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous CPU tensor as a flat run of bytes."""
    flat = tensor.reshape(-1)
    if flat.numel() < 2:  # contiguous with any stride, which view() minds
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def empty(dtype: str, shape: Sequence[int], where: str) -> torch.Tensor:
    """Allocate a tensor for a safetensors dtype name."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: torch {torch.__version__} has no dtype for {dtype}")
    return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="cpu")


def parse_header(data: bytes, size: int, where: str) -> tuple[dict[str, str], dict[str, Slot]]:
    """Check a header (without its 8 length bytes) against the format; return metadata and slots."""
    document = jsonio.loads(data, where)
    try:
        if type(document) is not dict:
            raise ValueError("not an object")
        metadata = document.pop("__metadata__", {})
        if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
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
    (begin, end), dtype, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
    if type(shape) is not list or len(shape) > 64:
        raise ValueError("a shape that is not a short list")
    for n in (begin, end, *shape):
        if type(n) is not int or not 0 <= n < 2**63:
            raise ValueError("a size that is not a whole number")
    if math.prod([n or 1 for n in shape]) >= 2**60:
        raise ValueError("an absurd shape")
    if math.prod(shape) * ITEMSIZE[dtype] != end - begin:
        raise ValueError("a shape that does not fit its bytes")
    return Slot(dtype, tuple(shape), base + begin, base + end)
