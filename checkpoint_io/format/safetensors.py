"""Safetensors files: dtypes, headers, and tensors as bytes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.pinned import read_ahead, streams_of

# Older versions of torch lack some dtypes (float8_e8m0fnu came with 2.7).
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

# For every dtype of the format, so that a manifest can be checked without the torch dtype.
ITEMSIZE: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip
ALIGNMENT = 4096  # a header ends at a multiple of it, so that tensor data starts on a page
MAX_DIMS = 64  # of a tensor in a file or manifest that is read
MAX_HEADER = 100_000_000  # limit of the safetensors library
PIECE = 16 << 20  # bytes that are copied to the host at a time
_READ_AHEAD_FROM = 1 << 20  # bytes; smaller tensors are not worth pinned memory
_quote = json.encoder.encode_basestring_ascii


class Slot(NamedTuple):
    """A tensor in a file, with absolute byte offsets."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[str, torch.Tensor]], list[tuple[int, int]]]:
    """Return the header of a file, its tensors in byte order, and the byte range of each."""
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not supported")
    # Wider dtypes first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    # Formatted as text: for 20,000 tensors, dicts would take longer than everything else here.
    rows = [f'"__metadata__":{json.dumps(dict(metadata))}']
    spans = []
    position = 0
    for key, tensor in ordered:
        dtype, shape, end = NAMES[tensor.dtype], list(tensor.shape), position + tensor.nbytes
        if len(shape) > MAX_DIMS or (end == position and _too_large(shape)):
            raise UnsupportedStateError(
                f"tensor {key!r:.200} of shape {tuple(shape)!s:.200}: readers refuse more than "
                f"{MAX_DIMS} dimensions, and sizes of an empty tensor whose product, without "
                "zeros, is 2**60 or more; reshape it"
            )
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


def box_name(key: str, offsets: Sequence[int]) -> str:
    """Return the name in a header of a part of a tensor, which begins at some offsets."""
    # "~@" is not an escape, so no key contains it
    return f"{key}~@{','.join(map(str, offsets))}"


def _too_large(shape: Sequence[int]) -> bool:
    """Return whether the sizes of a shape, other than zeros, have a product that may overflow."""
    return math.prod([n or 1 for n in shape]) >= 2**60


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview[int]]:
    """Yield the bytes of a tensor in C order; a tensor that needs a copy is copied in pieces.

    The bytes of a piece are valid until the next one is asked for.
    """
    if not tensor.numel():
        return
    module = streams_of(tensor.device) if tensor.nbytes >= _READ_AHEAD_FROM else None
    if module is None:
        yield from map(view_of, _parts(tensor))
    else:
        for host in read_ahead(_parts(tensor), module, PIECE):
            view: memoryview[int] = as_bytes(host).numpy().data
            yield view


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a tensor is made of in C order: all of it, or parts of at most a piece."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        count = flat.numel() if _is_ready(tensor) else max(1, PIECE // tensor.element_size())
        for begin in range(0, flat.numel(), count):
            yield flat[begin : begin + count]
    elif tensor.nbytes <= PIECE or tensor.dim() == 0:
        yield tensor
    else:
        rows = PIECE * tensor.shape[0] // tensor.nbytes
        for begin in range(0, tensor.shape[0], max(1, rows)):
            yield from _parts(tensor[begin : begin + rows] if rows else tensor[begin])


def _is_ready(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a contiguous tensor can be read where they are."""
    return tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())


def view_of(tensor: torch.Tensor) -> memoryview[int]:
    """Return the bytes of a tensor; copied only if it is not contiguous on the CPU."""
    view: memoryview[int] = as_bytes(to_host(tensor)).numpy().data
    return view


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in contiguous CPU memory; the same memory if it is there already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous CPU tensor as flat bytes."""
    flat = tensor.reshape(-1)
    if flat.numel() < 2:  # contiguous with any stride, but view() requires stride 1
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def dtype_of(name: str, key: str) -> torch.dtype:
    """Return the torch dtype for the one that the format names, of the tensor under a key."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CheckpointError(
            f"tensor {key}: torch {torch.__version__} has no dtype for {name}; a newer torch has"
        )
    return dtype


def header_bytes(reader: Any) -> bytes:
    """Return the JSON header of an open file (`size`, `read`); empty if it cannot be one."""
    length = int.from_bytes(bytes(reader.read(0, min(8, reader.size))), "little")
    fits = length <= min(MAX_HEADER, reader.size - 8)
    return bytes(reader.read(8, 8 + length)) if fits else b""


def parse_header(data: bytes, size: int, label: str) -> tuple[dict[str, str], dict[str, Slot]]:
    """Parse a header (without its 8 length bytes); return metadata and slots."""
    document = jsonio.loads(data, label)
    try:
        if type(document) is not dict:
            raise ValueError("not an object")
        metadata = document.pop("__metadata__", {})
        if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
            raise ValueError("metadata that is not text")
        base = 8 + len(data)
        slots = {key: _slot(entry, base) for key, entry in document.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{label}: bad safetensors header ({error!r:.200})") from None
    position = base
    for slot in sorted(slots.values(), key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != position:
            raise CorruptCheckpointError(f"{label}: tensors overlap or leave a hole")
        position = slot.end
    if position != size:
        raise CorruptCheckpointError(f"{label}: {size} bytes long, its header says {position}")
    return metadata, slots


def _slot(entry: Any, base: int) -> Slot:
    """Parse one header entry."""
    (begin, end), dtype, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise ValueError("a shape that is not a short list")
    for n in (begin, end, *shape):
        if type(n) is not int or not 0 <= n < 2**63:
            raise ValueError("a size that is not a whole number")
    if _too_large(shape):
        raise ValueError("a shape that is too large")
    if math.prod(shape) * ITEMSIZE[dtype] != end - begin:
        raise ValueError("a shape that does not fit its bytes")
    return Slot(dtype, tuple(shape), base + begin, base + end)
