"""One file of tensors, for ``Accelerator.save``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from accel_callbacks.local_path import local_path

__all__ = ["save_tensors"]

_INSTEAD = (
    "save() writes flat dicts of tensors, as safetensors. Use save_state() for the training state, "
    "register_for_checkpointing() for objects of your own, checkpoint_io.save() for nested state, "
    "json for plain values."
)


def save_tensors(obj: Any, place: str | os.PathLike[str]) -> None:
    """Write a flat dict of tensors as a safetensors file, in one step where the store can.

    Args:
        obj: names to tensors, on any device; tied ones are written under each name.
        place: path or fsspec URL of the file; folders are made.

    Raises:
        TypeError: ``obj`` is something else, or ``place`` is an open file.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import load_file
        >>> from accel_callbacks.checkpoint.tensor_file import save_tensors
        >>> path = tempfile.mkdtemp() + "/mean.safetensors"
        >>> save_tensors({"mean": torch.ones(2)}, path)
        >>> load_file(path)
        {'mean': tensor([1., 1.])}
    """
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"save to a path or a URL, not to a {type(place).__qualname__}.")
    tensors = _checked(obj)
    url = os.fspath(place)
    path = local_path(url)
    if path is not None:
        _write_local(tensors, path)
        return
    from fsspec.core import url_to_fs
    from safetensors.torch import save

    filesystem, key = url_to_fs(url)
    filesystem.pipe_file(key, save(tensors, {"format": "pt"}))


def _checked(obj: Any) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, each in memory of its own."""
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


def _write_local(tensors: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        save_file(tensors, temporary, {"format": "pt"})
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
