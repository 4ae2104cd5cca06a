"""Loading: everything returned has been verified, and nothing that fails is returned."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint_io import jsonio
from checkpoint_io.collect import is_shared, local_prefix
from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.files import check_sizes, manifest_of, open_listed, read_file
from checkpoint_io.manifest import Manifest, TensorEntry
from checkpoint_io.parts import Scatter, check_size
from checkpoint_io.store import Store, open_store
from checkpoint_io.tensorfile import as_bytes, empty
from checkpoint_io.tree import decode_tree

__all__ = ["Checkpoint", "load", "read_manifest", "verify"]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        path: the URL that it was loaded from.
        state: the shared state; tensors are on the CPU, tied tensors are one tensor again.
        local_state: the state that the asked rank saved for itself, None if it saved none.
        manifest: what the checkpoint consists of, with the caller's metadata.

    Example:
        >>> from checkpoint_io import load, save
        >>> _ = save("memory://doc-reader/c", {"step": 3}, local_state={"seen": 96})
        >>> checkpoint = load("memory://doc-reader/c")
        >>> checkpoint.state, checkpoint.local_state
        ({'step': 3}, {'seen': 96})
    """

    path: str
    state: dict[str, Any]
    local_state: dict[str, Any] | None
    manifest: Manifest


def load(
    url: str | os.PathLike[str],
    *,
    rank: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Load the shared state and one rank's own state; every byte used is verified first.

    Args:
        url: the folder of a checkpoint.
        rank: whose `local_state` to return; default 0. A rank that did not save gets None.
        storage_options: passed to the fsspec driver.

    Returns:
        A `Checkpoint`; its tensors are new, on the CPU, with the saved dtypes and shapes.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: a file is missing or differs; the message names it.
        ManifestVersionError: a newer version of this package wrote it.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, save
        >>> _ = save("memory://doc-reader/l", {"model": {"w": torch.arange(3)}})
        >>> load("memory://doc-reader/l").state["model"]["w"]
        tensor([0, 1, 2])
    """
    store = open_store(url, storage_options)
    manifest = manifest_of(store)
    try:
        return load_from(store, manifest, rank)
    except CorruptCheckpointError:
        # files also vanish when a save replaces the checkpoint while we read
        newer = manifest_of(store)
        if newer.id == manifest.id:
            raise
        return load_from(store, newer, rank)


def read_manifest(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Manifest:
    """Read and check the manifest of a checkpoint without reading its data.

    Args:
        url: the folder of a checkpoint.
        storage_options: passed to the fsspec driver.

    Returns:
        The manifest; its digest and all its entries have been checked.

    Raises:
        CheckpointNotFoundError: there is no manifest at `url`.
        CorruptCheckpointError: the manifest was damaged or is not acceptable.
        ManifestVersionError: a newer version of this package wrote it.

    Example:
        >>> from checkpoint_io import read_manifest, save
        >>> _ = save("memory://doc-reader/m", {"lr": 0.1}, metadata={"step": 200})
        >>> read_manifest("memory://doc-reader/m").metadata["step"]
        200
    """
    return manifest_of(open_store(url, storage_options))


def verify(
    url: str | os.PathLike[str],
    *,
    full: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Check a checkpoint: the files of all ranks, without building any tensor.

    Args:
        url: the folder of a checkpoint.
        full: read every byte and compare checksums (default); False compares sizes only.
        storage_options: passed to the fsspec driver.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: names the file, and the tensors in the damaged part.
        ManifestVersionError: a newer version of this package wrote it.

    Example:
        >>> from checkpoint_io import save, verify
        >>> _ = save("memory://doc-reader/v", {"lr": 0.1})
        >>> verify("memory://doc-reader/v")
    """
    store = open_store(url, storage_options)
    manifest = manifest_of(store)
    check_sizes(store, manifest)
    for index in range(len(manifest.files) if full else 0):
        read_file(store, manifest, index, lambda offset, part: None)


def load_from(store: Store, manifest: Manifest, rank: int) -> Checkpoint:
    """Load what one rank needs of a checkpoint whose manifest is known."""
    prefix = local_prefix(rank)
    names = [*manifest.tensors, *manifest.aliases]
    shared = [key for key in names if is_shared(key)]
    local = [key for key in names if key.startswith(prefix)]
    shared_tree = _read_tree(store, manifest, manifest.shared_objects)
    local_name = manifest.rank_objects.get(rank)
    local_tree = None if local_name is None else _read_tree(store, manifest, local_name)
    stored = {manifest.aliases.get(key, key) for key in (*shared, *local)}
    loaded = load_tensors(store, manifest, stored)
    known = {key: loaded[manifest.aliases.get(key, key)] for key in (*shared, *local)}
    state = _decode(shared_tree, known, f"{store.url}/{manifest.shared_objects}")
    own = None if local_name is None else _decode(local_tree, known, f"{store.url}/{local_name}")
    return Checkpoint(store.url, state, own, manifest)


def _read_tree(store: Store, manifest: Manifest, name: str) -> Any:
    """Read a verified JSON file and return its (still encoded) state."""
    index = next(i for i, entry in enumerate(manifest.files) if entry.name == name)
    where = f"{store.url}/{name}"
    if manifest.files[index].size > jsonio.MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{where}: {manifest.files[index].size} bytes of JSON refused")
    data = bytearray()
    read_file(store, manifest, index, lambda offset, part: data.extend(part))
    document = jsonio.loads(bytes(data), where)
    if not isinstance(document, dict) or "state" not in document:
        raise CorruptCheckpointError(f"{where}: holds no state")
    return document["state"]


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, Any]:
    """Decode a state, which is a dict at its root."""
    state = decode_tree(tree, tensors, where)
    if not isinstance(state, dict):
        raise CorruptCheckpointError(f"{where}: the state is not a dict")
    return state


def load_tensors(store: Store, manifest: Manifest, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read some stored tensors, each file once; chunks are put together."""
    wanted = {key: manifest.tensors[key] for key in sorted(keys)}
    needed = {chunk.file for entry in wanted.values() for chunk in entry.chunks}
    for index in sorted(needed):  # before memory is set aside for what a file may not hold
        with open_listed(store, manifest.files[index].name) as reader:
            entry = manifest.files[index]
            check_size(reader, f"{store.url}/{entry.name}", entry.size)
    boxes = {key: _allocate(entry, key) for key, entry in wanted.items()}
    for index in sorted(needed):
        scatter = Scatter(
            [
                (chunk.begin, chunk.end, as_bytes(box))
                for key, entry in wanted.items()
                for chunk, box in zip(entry.chunks, boxes[key], strict=True)
                if chunk.file == index
            ]
        )
        read_file(store, manifest, index, scatter.feed)
    return {key: _join(entry, boxes[key]) for key, entry in wanted.items()}


def _allocate(entry: TensorEntry, key: str) -> list[torch.Tensor]:
    """Allocate one tensor for each chunk."""
    return [empty(entry.dtype, chunk.shape, f"tensor {key!r}") for chunk in entry.chunks]


def _join(entry: TensorEntry, boxes: list[torch.Tensor]) -> torch.Tensor:
    """Put the chunks of a tensor together; a single one is the tensor."""
    if len(boxes) == 1:
        return boxes[0]
    result = empty(entry.dtype, entry.shape, "a tensor")
    for chunk, box in zip(entry.chunks, boxes, strict=True):
        place = tuple(
            slice(start, start + n) for start, n in zip(chunk.offsets, chunk.shape, strict=True)
        )
        result[place] = box
    return result
