"""Loading: everything returned has been verified, and nothing that fails is returned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from checkpoint_io.format.manifest import Manifest
from checkpoint_io.loader.files import manifest_of, while_replaced
from checkpoint_io.loader.lazy import CheckpointReader, open_checkpoint
from checkpoint_io.loader.load import Request, read_checkpoint
from checkpoint_io.loader.selection import Only, Rename
from checkpoint_io.storage.open import open_store

__all__ = ["Checkpoint", "CheckpointReader", "load", "open_checkpoint", "read_manifest"]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        path: the URL that it was loaded from.
        state: the shared state; tensors are on the CPU (or the ones passed as `into`), tied
            tensors are one tensor again. What was not selected is still a `TensorView`.
        local_state: the state that the asked rank saved for itself, None if it saved none.
        manifest: what the checkpoint consists of, with the caller's metadata.
        missing: with `strict=False`: names in `into` (or patterns) for which nothing was saved.
        unexpected: with `strict=False`: saved names that have no place in `into`.

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
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load(
    url: str | os.PathLike[str],
    *,
    rank: int = 0,
    into: Mapping[Any, Any] | None = None,
    only: Only | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    verify: Literal["parts", "full", "sizes"] = "parts",
    cast: bool = False,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Load the shared state and one rank's own state; every byte used is verified first.

    No process group is needed, however many ranks saved: each process reads what it needs.

    Args:
        url: the folder of a checkpoint.
        rank: whose `local_state` to return; default 0. A rank that did not save gets None.
        into: a dict like the saved state, or some of its top-level keys, with tensors (on any
            device), DTensors or numpy arrays to be filled in place; of a DTensor only this rank's
            part is read. Plain values in it are not changed: the saved ones are in the returned
            state, which holds the given tensors. Saved tensors outside of its top-level keys are
            loaded as new ones.
        only: the saved names to load: a glob pattern over keys such as "models/0/*" (`*` also
            matches `/`), several, or a function. Default None: all. What is not selected comes
            back as a `TensorView`, which reads when it is asked to.
        rename: with `into`: prefixes of saved keys to what they are called there, or a function.
        strict: True (default): a name in `into` that was not saved, a saved one below the
            top-level keys of `into` that has no place there, or a pattern that matches nothing,
            is an error with the nearest names. False: they are listed in the result.
        verify: "parts" (default) checks sizes and headers before anything is changed, then each
            part of 1 MiB before it is copied; "full" checks every byte of the files it needs
            before anything is changed; "sizes" checks sizes alone.
        cast: convert to the dtypes of `into`; default False: another dtype is an error.
        progress: a bar with bytes per second; default None: for a long load on a terminal.
        storage_options: passed to the fsspec driver.

    Returns:
        A `Checkpoint`; new tensors are on the CPU, with the saved dtypes and shapes.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint at `url`.
        CorruptCheckpointError: a file is missing or differs; the message names it.
        StateMismatchError: names, shapes or dtypes do not fit `into`; nothing was changed.
        TornLoadError: the load broke off after some tensors in `into` had been written.
        ManifestVersionError: this package cannot read the version that wrote it.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, save
        >>> state = {"model": {"w": torch.arange(3)}, "optimizer": {"m": torch.zeros(3)}}
        >>> _ = save("memory://doc-reader/l", state)
        >>> load("memory://doc-reader/l").state["model"]["w"]
        tensor([0, 1, 2])
        >>> weights = torch.zeros(3, dtype=torch.int64)
        >>> _ = load("memory://doc-reader/l", into={"model": {"w": weights}}, only="model/*")
        >>> weights
        tensor([0, 1, 2])
    """
    # one bar is enough for all ranks
    shown = False if progress is None and rank else progress
    request = Request(into, only, rename, strict, verify, cast, shown)
    store = open_store(url, storage_options)
    return while_replaced(store, lambda m: _load(CheckpointReader(store, m, rank), request))


def _load(reader: CheckpointReader, request: Request) -> Checkpoint:
    """Load from an opened checkpoint."""
    loaded = read_checkpoint(reader, request)
    return Checkpoint(
        reader.path,
        loaded.state,
        loaded.local_state,
        reader.manifest,
        loaded.missing,
        loaded.unexpected,
    )


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
        ManifestVersionError: this package cannot read the version that wrote it.

    Example:
        >>> from checkpoint_io import read_manifest, save
        >>> _ = save("memory://doc-reader/m", {"lr": 0.1}, metadata={"step": 200})
        >>> read_manifest("memory://doc-reader/m").metadata["step"]
        200
    """
    return manifest_of(open_store(url, storage_options))
