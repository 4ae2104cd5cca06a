"""Stored tensors as views of files that are mapped into memory."""

from __future__ import annotations

import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.safetensors import DTYPES, Slot
from checkpoint_io.memory import free_memory
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.local_read import open_regular
from checkpoint_io.weights.find import open_weights
from checkpoint_io.weights.safetensors import SafetensorsSource, header_of
from checkpoint_io.weights.source import WeightFile, WeightSource

__all__ = ["map_tensors", "mappable", "misaligned", "read_ahead"]

_ADVICE = 128 * 1024  # bytes; Linux ignores what exceeds the read-ahead of the disk, often no more

# Python before 3.13 does not have the name; a few machines have another number
_HAS_NO_RESERVE = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE = 0x4000 if _HAS_NO_RESERVE else 0


def map_tensors(
    source: WeightSource | str | os.PathLike[str], names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Map stored tensors into memory without reading them.

    A tensor reads a page of its file when the page is first used, and the system may take the page
    away again: it is no private memory of this process. Writing to a tensor copies the page
    and never changes the file. The file stays mapped as long as one of its tensors lives: if it is
    removed, or replaced by rename, the tensors keep the old content. A file that is truncated or
    overwritten in place takes its content from them, and the system ends a process that reads past
    the new end (SIGBUS).

    Args:
        source: safetensors files on this machine: a path that `load_model` takes, or what
            `open_weights` has returned.
        names: of the tensors; default all. A name that is tied to another shares its tensor.

    Returns:
        Names to CPU tensors.

    Raises:
        CheckpointError: the weights are in another format, or not on this machine, or a tensor
            does not start at a multiple of its element size.
        CheckpointNotFoundError: there are no weights.
        CorruptCheckpointError: a file is damaged, or was replaced since it was opened.
        KeyError: there is no tensor of that name.

    Example:
        >>> import tempfile, torch
        >>> from checkpoint_io import save_model
        >>> from checkpoint_io.weights import map_tensors
        >>> folder = tempfile.mkdtemp()
        >>> _ = save_model({"w": torch.ones(2)}, folder)
        >>> mapped = map_tensors(folder)
        >>> mapped["w"][0] = 5  # a page of this process now; the file keeps its ones
        >>> map_tensors(folder)["w"]
        tensor([1., 1.])
    """
    if isinstance(source, (str, os.PathLike)):
        source = open_weights(source, 0, None)
    weights = mappable(source)
    tensor_names = list(names) if names is not None else [*weights.infos, *weights.tied]
    by_file: dict[int, dict[str, Slot]] = {}
    for name in tensor_names:
        stored = weights.tied.get(name, name)
        number, slot = weights.slot(stored)
        if misaligned(slot):
            raise CheckpointError(
                f"{weights.where}: {stored} cannot be mapped, it starts at byte {slot.begin}, no "
                f"multiple of the {DTYPES[slot.dtype].itemsize} of an element: load it, or save "
                "the weights again with save_model"
            )
        by_file.setdefault(number, {})[stored] = slot
    mapped: dict[str, torch.Tensor] = {}
    for number, slots in by_file.items():
        mapped.update(_map_file(weights.files[number], slots))
    return {name: mapped[weights.tied.get(name, name)] for name in tensor_names}


def mappable(source: WeightSource) -> SafetensorsSource:
    """Return a source whose files can be mapped; raise CheckpointError for any other."""
    if not isinstance(source, SafetensorsSource):
        reason = "only safetensors files are mapped, and a checkpoint is verified while it is read"
    elif any(local_folder(file.store) is None for file in source.files):
        reason = "only files on this machine are mapped"
    elif sys.byteorder != "little":
        reason = "the files are little-endian and this machine is not"
    else:
        return source
    raise CheckpointError(
        f"{source.where} cannot be mapped: {reason}. Load it without mapped=True, or save it with "
        "save_model to a local folder first"
    )


def misaligned(slot: Slot) -> bool:
    """Return whether a tensor does not start where its elements may be in memory."""
    # files of this package and of the safetensors library hold none; the format allows it
    return slot.begin % DTYPES[slot.dtype].itemsize != 0


def read_ahead(source: SafetensorsSource, names: Iterable[str]) -> None:
    """Let the system read the files of mapped tensors, in the background and as far as memory has
    room for all of them; a first use that waits for page after page takes several times as long.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    for name in names:
        number, slot = source.slot(name)
        spans.setdefault(number, []).append((slot.begin, slot.end))
    total = sum(end - begin for ranges in spans.values() for begin, end in ranges)
    if not hasattr(os, "posix_fadvise") or total > (free_memory() or 0):
        return
    paths = [
        (os.path.join(local_folder(source.files[number].store) or "", source.files[number].name), s)
        for number, s in sorted(spans.items())
    ]
    # a daemon: a program that ends does not wait for a slow disk
    thread = threading.Thread(target=_advise, args=(paths,), name="checkpoint_io", daemon=True)
    with suppress(RuntimeError):  # no thread can start: the pages come when they are used
        thread.start()


def _advise(paths: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> None:
    """Ask for the bytes of files, in the order in which they are stored."""
    if sys.platform in ("win32", "darwin") or not hasattr(os, "posix_fadvise"):
        return
    for path, spans in paths:
        with suppress(OSError, CorruptCheckpointError), open_regular(path) as reader:
            for begin, end in sorted(spans):
                for low in range(begin, end, _ADVICE):
                    length = min(_ADVICE, end - low)
                    os.posix_fadvise(reader.fileno(), low, length, os.POSIX_FADV_WILLNEED)


def _map_file(file: WeightFile, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Map one file, and return views of it."""
    path = os.path.join(local_folder(file.store) or "", file.name)
    try:
        with open_regular(path) as reader:
            # not the header read before: another file may have this name by now
            _, now = header_of(reader, file.where)
            memory = _private(reader.fileno(), reader.size)
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"{file.where} is missing, though it is listed there: copy all files again"
        ) from None
    for key, slot in slots.items():
        if now.get(key) != slot:
            raise CorruptCheckpointError(
                f"{file.where} was replaced while it was opened, {key} is not what it was: load "
                "it again"
            )
    return {key: _view(memory, slot) for key, slot in slots.items()}


def _private(descriptor: int, size: int) -> mmap.mmap:
    """Map a whole file, writable and copied on write."""
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    # without it, Linux refuses a file larger than memory and swap: all of it may be written to
    no_reserve = getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
    # the descriptor that mmap duplicates would stay open as long as the mapping
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(
        descriptor,
        size,
        flags=mmap.MAP_PRIVATE | no_reserve,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        **options,
    )


def _view(memory: mmap.mmap, slot: Slot) -> torch.Tensor:
    """Return a tensor over bytes of a mapping, which it keeps alive."""
    dtype = DTYPES[slot.dtype]
    if slot.begin == slot.end:
        return torch.empty(slot.shape, dtype=dtype, device="cpu")
    raw = torch.frombuffer(
        memory, dtype=torch.uint8, count=slot.end - slot.begin, offset=slot.begin
    )
    return raw.view(dtype).reshape(slot.shape)
