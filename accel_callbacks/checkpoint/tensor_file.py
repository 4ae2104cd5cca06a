"""One safetensors file of tensors, one of text, and the folder for the files of save hooks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from checkpoint_io.local_files import (
    advised,
    local_path,
    make_folders,
    remove,
    replace,
    sync_folder,
    sync_path,
)

__all__ = ["save_tensors", "save_text", "writable_folder"]

_INSTEAD = (
    "save() writes flat dicts of tensors, as safetensors. Use save_state() for the training state, "
    "register_for_checkpointing() for objects of your own, checkpoint_io.save() for nested state, "
    "json for plain values."
)


@contextmanager
def writable_folder(url: str) -> Iterator[str]:
    """Create the local folder of a checkpoint, for the files of save hooks.

    Yield its path, or the URL as it is if it is remote. If the block raises, an empty folder is
    removed again.
    """
    path = local_path(url)
    if path is None:
        yield url
        return
    path = os.path.abspath(path)
    make_folders(path)
    try:
        yield path
    except BaseException:
        with suppress(OSError):
            os.rmdir(path)
        raise


def save_tensors(
    obj: Any, place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a flat dict of tensors as a safetensors file, in one step where the store can.

    A local file is synced to the disk: it survives a power cut once this returns.

    Args:
        obj: names to tensors, on any device; tied ones are written under each name.
        place: path or fsspec URL of the file; folders are made.
        storage_options: for the filesystem behind the URL.

    Raises:
        TypeError: ``obj`` is something else, or ``place`` is an open file.
    """
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"save to a path or a URL, not to a {type(place).__qualname__}.")
    tensors = _tensors_on_cpu(obj)
    url = os.fspath(place)
    path = local_path(url)
    if path is not None:
        from safetensors.torch import save_file

        _replace_local(path, lambda part: save_file(tensors, part, {"format": "pt"}))
        return
    from fsspec.core import url_to_fs
    from safetensors.torch import save

    filesystem, key = url_to_fs(url, **(storage_options or {}))
    filesystem.pipe_file(key, save(tensors, {"format": "pt"}))


def save_text(text: str, place: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Write a text file in UTF-8, in one step where the store can; a local one is synced.

    Args:
        text: the content.
        place: path or fsspec URL of the file; folders are made.
        storage_options: for the filesystem behind the URL.
    """
    data, path = text.encode(), local_path(place)
    if path is not None:
        _replace_local(path, lambda part: Path(part).write_bytes(data))
        return
    from fsspec.core import url_to_fs

    filesystem, key = url_to_fs(place, **(storage_options or {}))
    filesystem.pipe_file(key, data)


def _tensors_on_cpu(obj: Any) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU, each in its own storage."""
    if not isinstance(obj, Mapping):
        raise TypeError(f"a {type(obj).__qualname__} is no dict of tensors. {_INSTEAD}")
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in obj.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"[{name!r}] is a {type(value).__qualname__}. {_INSTEAD}")
        host = value.detach().cpu().contiguous()
        memory = host.untyped_storage().data_ptr()
        tensors[name] = host.clone() if memory in seen else host
        seen.add(memory)
    return tensors


def _replace_local(path: str, write: Callable[[str], object]) -> None:
    """Write a file beside the path and sync it, then put it there in one step."""
    folder = os.path.dirname(os.path.abspath(path))
    make_folders(folder)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with advised(temporary):
            write(temporary)
        sync_path(temporary)
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise
    sync_folder(folder)
