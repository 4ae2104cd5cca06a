"""Bytes of dtypes, and indexes of offload folders, as Accelerate has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks.compat import folder
from accel_callbacks.models.offload import sizes

__all__ = ["dtype_byte_size", "offload_weight", "save_offload_index"]

_Folder = str | os.PathLike[str]


def dtype_byte_size(dtype: torch.dtype | sizes.CustomDtype) -> int | float:
    """Return the bytes of one element, of which a bool counts as a bit.

    Args:
        dtype: the dtype.

    Raises:
        ValueError: it is no dtype.
    """
    return 1 / 8 if dtype == torch.bool else sizes.dtype_byte_size(dtype)


class _Entry(dict[str, Any]):
    """An entry of an index, whose digest is not among its keys.

    Args:
        entry: with the digest.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__((key, value) for key, value in entry.items() if key != folder.CHECKSUM)
        self.whole = entry


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: _Folder,
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write one tensor into an offload folder, and return the index with its dtype and shape.

    Args:
        weight: the tensor.
        weight_name: its name.
        offload_folder: an existing folder.
        index: gets the entry of the tensor.
    """
    folder.offload_weight(weight, weight_name, offload_folder, index)
    if index is not None:
        index[weight_name] = _Entry(index[weight_name])
    return index


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: _Folder) -> None:
    """Add entries to the index of an offload folder, those of :func:`offload_weight` with digests.

    Args:
        index: entries by name.
        offload_folder: the folder.
    """
    entries = {
        # An entry that was changed since is written as it is.
        name: entry.whole if isinstance(entry, _Entry) and entry == _Entry(entry.whole) else entry
        for name, entry in (index or {}).items()
    }
    folder.save_offload_index(entries, offload_folder)
