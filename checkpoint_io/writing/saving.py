"""Saving in one call: settle what is written, write it, commit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.saver.commit import following
from checkpoint_io.saver.save import prepare_save
from checkpoint_io.sharding.local_tensors import Replicated

__all__ = ["save"]


def save(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    local_state: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    group: ProcessGroupLike | None = None,
    max_shard_size: int | str = "5GB",
    generation: int | None = None,
    replicated: Replicated = True,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Save a state as a checkpoint at `url`; when it returns, the checkpoint is durable.

    A checkpoint that was at `url` before stays whole until the new one is committed, and is then
    removed. If anything fails on any rank, nothing is committed and every rank raises. With more
    than one rank this is a collective call, and all of them write: each the shards it holds of
    DTensors, and its share of the tensors that all have. Only one save at a time may go to one
    `url`; a second one gets a CheckpointConflictError.

    Args:
        url: a folder: a local path (`~` works) or any fsspec URL.
        state: the state that all ranks share. Nested dicts, lists, tuples and sets of tensors,
            DTensors, numpy arrays and plain values. Tensors of any shape, on any device. Rank 0's
            is the one that is kept; the other ranks pass theirs so that they can write a part of
            it, or {} if they hold no shards.
        local_state: this rank's own state (random generators, data position); each rank writes
            its own. Default None: this rank has none.
        metadata: plain values kept in the manifest (run_id, step, metrics); rank 0's is used.
        group: the processes that save together; default None: just this one.
        max_shard_size: largest tensor file, in bytes or as text ("5GB" = 5e9 bytes, "1GiB").
            A single larger tensor gets a file of its own.
        generation: a number that orders checkpoints; default: that of the one replaced + 1.
        replicated: whether the plain tensors of `state` are bitwise the same on all ranks (default
            True), or a function that says so of a key; if not, rank 0 writes its own.
        progress: a bar with bytes per second on rank 0; None (default) shows one for a long save on
            a terminal.
        storage_options: passed to the fsspec driver (credentials, endpoint).

    Returns:
        The manifest that was committed, on every rank.

    Raises:
        UnsupportedStateError: the state holds an object that cannot be stored.
        ManifestVersionError: another version of this package wrote what is at `url`.
        CheckpointConflictError: another save is writing to `url`, or was faster.
        CheckpointError: writing failed on some rank; the message names it.
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, save
        >>> manifest = save("memory://doc-save/last", {"w": torch.ones(2), "step": 3})
        >>> load("memory://doc-save/last").state
        {'w': tensor([1., 1.]), 'step': 3}
    """

    job = prepare_save(
        url,
        state,
        next_generation=following(generation),
        local_state=local_state,
        metadata=metadata,
        group=group,
        max_shard_size=max_shard_size,
        replicated=replicated,
        storage_options=storage_options,
    )
    return job.run(progress=progress)
