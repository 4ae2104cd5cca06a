"""Weights that an index of Accelerate's describes: raw files, or places in safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks._siblings import require_neighbour
from accel_callbacks.offload.source import (
    FileIdentity,
    StoredTensor,
    StoredWeights,
    WeightReadError,
)

__all__ = ["INDEX", "names_in", "stored_in_index"]

INDEX = "index.json"
Index = Mapping[str, Mapping[str, Any]]


def stored_in_index(
    index: Index | None, folder: str | os.PathLike[str] | None
) -> StoredWeights | None:
    """Return the weights of an offload folder, or of an index without one.

    Args:
        index: name to ``{"dtype", "shape"}`` of ``<folder>/<name>.dat``, or to
            ``{"safetensors_file", "weight_name"}``; by default that of the folder.
        folder: where files of raw bytes are.

    Returns:
        Where they are; None if there is neither an index nor a folder with one.

    Raises:
        WeightReadError: a file is missing, or not as the index describes it.

    Example:
        >>> from accel_callbacks.offload.offload_index import stored_in_index
        >>> stored_in_index(None, None) is None
        True
    """
    if index is None:
        index = _read_index(folder)
    if index is None:
        return None
    tensors: dict[str, StoredTensor] = {}
    identities: dict[str, FileIdentity] = {}
    headers: dict[str, Mapping[str, StoredTensor]] = {}
    for name, entry in index.items():
        file = entry.get("safetensors_file")
        if file is None:
            tensors[name], identity = _raw(name, entry, folder)
            identities[tensors[name].path] = identity
            continue
        path = os.path.realpath(file)
        if path not in headers:
            headers[path] = _header(path)
            identities[path] = FileIdentity.of(path)
        stored = entry.get("weight_name", name)
        if stored not in headers[path]:
            raise WeightReadError(f"{path} has no tensor {stored!r}, which the index names.")
        tensors[name] = headers[path][stored]
    return StoredWeights(tensors, identities)


def _read_index(folder: str | os.PathLike[str] | None) -> Index | None:
    if folder is None:
        return None
    path = os.path.join(folder, INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightReadError(f"{path} is no index of offloaded weights: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise WeightReadError(f"{path} is no index of offloaded weights.")
    return found


def _raw(
    name: str, entry: Mapping[str, Any], folder: str | os.PathLike[str] | None
) -> tuple[StoredTensor, FileIdentity]:
    """Return a tensor in a file of its own, of which the size is checked."""
    if folder is None or os.path.basename(name) != name:
        raise WeightReadError(f"{name}: the index names no file for it, and there is no folder.")
    path = os.path.join(os.path.abspath(folder), f"{name}.dat")
    dtype = getattr(torch, str(entry.get("dtype")), None)
    shape = entry.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, (list, tuple)):
        raise WeightReadError(f"{path}: the index has no dtype or no shape of it.")
    stored = StoredTensor(path, 0, dtype, tuple(int(length) for length in shape))
    try:
        status = os.stat(path)
    except OSError as error:
        raise WeightReadError(f"{path}: {error.strerror}, though the index names it.") from None
    if status.st_size != stored.nbytes and not (stored.nbytes == 0 and status.st_size <= 1):
        raise WeightReadError(
            f"{path} has {status.st_size} bytes, and by the index {stored.nbytes}: write it again."
        )
    return stored, FileIdentity(status.st_size, status.st_mtime_ns, "")


def names_in(path: str) -> dict[int, str]:
    """Return the names of the tensors in a safetensors file, by the first byte of each."""
    return {one.begin: name for name, one in _header(path).items()}


def _header(path: str) -> Mapping[str, StoredTensor]:
    require_neighbour("checkpoint_io")
    from checkpoint_io.format.safetensors import DTYPES
    from checkpoint_io.storage.local import LocalStore
    from checkpoint_io.weights.safetensors import read_header
    from checkpoint_io.weights.source import WeightFile

    folder, name = os.path.split(path)
    _, slots = read_header(WeightFile(LocalStore(folder), name, name))
    return {
        key: StoredTensor(path, slot.begin, DTYPES[slot.dtype], tuple(slot.shape))
        for key, slot in slots.items()
        if slot.dtype in DTYPES
    }
