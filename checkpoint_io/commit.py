"""Saving: all ranks write under new names, then one file, the manifest, makes it a checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoint_io.assemble import assemble
from checkpoint_io.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
)
from checkpoint_io.files import manifest_of
from checkpoint_io.group import ProcessGroupLike, SingleProcess
from checkpoint_io.manifest import Manifest, encode_manifest
from checkpoint_io.names import MANIFEST, new_save_id, temporary_name
from checkpoint_io.outcome import Outcome, failed_ranks, raise_failure
from checkpoint_io.parse import parse_manifest
from checkpoint_io.sizes import parse_size
from checkpoint_io.store import Store, open_store
from checkpoint_io.tree import encode_plain
from checkpoint_io.writer import RankWriter, SaveTask

__all__ = ["save"]

NextGeneration = Callable[["Manifest | None"], int]


def save(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    local_state: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    group: ProcessGroupLike | None = None,
    max_shard_size: int | str = "5GB",
    generation: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Save a state as a checkpoint at `url`; when it returns, the checkpoint is durable.

    A checkpoint that was at `url` before stays whole until the new one is committed, and is then
    removed. If anything fails on any rank, nothing is committed and every rank raises. With more
    than one rank this is a collective call. Only one save at a time may go to one `url`.

    Args:
        url: a folder: a local path (`~` works) or any fsspec URL.
        state: the state that all ranks share; rank 0 writes it. Nested dicts, lists, tuples and
            sets of tensors, numpy arrays and plain values. Tensors of any shape, on any device.
        local_state: this rank's own state (random generators, data position); each rank writes
            its own. Default None: this rank has none.
        metadata: plain values kept in the manifest (run_id, step, metrics); rank 0's is used.
        group: the processes that save together; default None: just this one.
        max_shard_size: largest tensor file, in bytes or as text ("5GB" = 5e9 bytes, "1GiB").
            A single larger tensor gets a file of its own.
        generation: a number that orders checkpoints; default: that of the one replaced + 1.
        storage_options: passed to the fsspec driver (credentials, endpoint).

    Returns:
        The manifest that was committed, on every rank.

    Raises:
        UnsupportedStateError: the state holds an object that cannot be stored.
        ManifestVersionError: a newer version of this package wrote what is at `url`.
        CheckpointError: writing failed on some rank; the message names it.
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, save
        >>> manifest = save("memory://doc-save/last", {"w": torch.ones(2), "step": 3})
        >>> load("memory://doc-save/last").state
        {'w': tensor([1., 1.]), 'step': 3}
    """

    def choose(previous: Manifest | None) -> int:
        return (
            generation if generation is not None else (previous.generation if previous else 0) + 1
        )

    return save_with(
        url, state, local_state, metadata or {}, group, max_shard_size, choose, storage_options
    )


def save_with(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    local_state: Mapping[str, Any] | None,
    metadata: Mapping[str, Any],
    group: ProcessGroupLike | None,
    max_shard_size: int | str,
    next_generation: NextGeneration,
    storage_options: Mapping[str, Any] | None,
) -> Manifest:
    """Run the protocol of `save`; `next_generation` is asked on rank 0 only."""
    group = group or SingleProcess()
    save_id = group.broadcast_object(new_save_id() if group.rank == 0 else None)
    job = _Save(url, save_id, group.rank, metadata, storage_options)
    shared = state if group.rank == 0 else None
    written = Outcome.of(lambda: job.write(shared, local_state, max_shard_size))
    outcomes = group.all_gather_object(written.to_plain())
    headline = f"saving to {os.fspath(url)} failed, nothing was committed"
    if failed_ranks(outcomes):
        job.undo()
        raise_failure(headline, outcomes, written)
    committed = Outcome(None, None)
    verdict: dict[str, Any] = {}
    if group.rank == 0:
        reports = [outcome["value"] for outcome in outcomes]
        committed = Outcome.of(lambda: job.commit(next_generation, reports))
        verdict = job.judge(committed)
    verdict = group.broadcast_object(verdict)
    if verdict["state"] == "committed":
        job.clean_up()
        if committed.error is not None and not isinstance(committed.error, Exception):
            raise committed.error
        return parse_manifest(verdict["manifest"], f"{os.fspath(url)}/{MANIFEST}")
    if verdict["state"] == "absent":
        job.undo()
    else:
        headline = (
            f"saving to {os.fspath(url)} failed and could not be checked, so nothing was removed; "
            "call checkpoint_io.verify there before saving again"
        )
        committed = Outcome(None, None)  # the headline is what counts, also on rank 0
    raise_failure(headline, [verdict["outcome"]], committed)


class _Save:
    """One rank's part in one save."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        save_id: str,
        rank: int,
        metadata: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._url = url
        self._save_id = save_id
        self._rank = rank
        self._metadata = metadata
        self._options = storage_options
        self._store: Store | None = None
        self._writer: RankWriter | None = None
        self._previous: Manifest | None = None
        self._manifest_bytes: bytes | None = None

    def write(
        self,
        shared: Mapping[str, Any] | None,
        local: Mapping[str, Any] | None,
        max_shard_size: int | str,
    ) -> dict[str, Any]:
        """Write this rank's files and report them as plain values."""
        shard_bytes = parse_size(max_shard_size)
        run_id = self._metadata.get("run_id")
        self._store = open_store(self._url, self._options)
        if self._rank == 0:
            # a bad value or a newer checkpoint should not cost the whole write first
            encode_plain(self._metadata, "metadata")
            self._previous = _previous(self._store)
        label = run_id if isinstance(run_id, str) else None
        task = SaveTask(self._store, self._save_id, self._rank, shard_bytes, label)
        self._writer = RankWriter(task)
        return self._writer.write(shared, local).to_plain()

    def commit(self, next_generation: NextGeneration, reports: Sequence[Mapping[str, Any]]) -> None:
        """Check that every rank's files are where rank 0 sees them, then publish the manifest."""
        assert self._store is not None
        generation = next_generation(self._previous)
        manifest = assemble(self._save_id, generation, self._metadata, reports)
        data = encode_manifest(manifest)
        parse_manifest(data, self._store.url)  # never commit what the reader would refuse
        _check_files(self._store, manifest)
        self._manifest_bytes = data
        self._store.replace(MANIFEST, data, temporary_name(self._save_id))

    def judge(self, outcome: Outcome) -> dict[str, Any]:
        """Say what became of the commit; after an error the store itself is asked.

        A lost answer, or an interrupt at the wrong moment, may follow a commit that took place.
        """
        state = "committed"
        if outcome.error is not None and self._manifest_bytes is None:
            state = "absent"
        elif outcome.error is not None:
            assert self._store is not None
            store = self._store
            look = Outcome.of(lambda: _previous(store))
            found = look.value.id if isinstance(look.value, Manifest) else None
            state = "unknown" if look.error else "absent"
            state = "committed" if found == self._save_id else state
        return {"state": state, "manifest": self._manifest_bytes, "outcome": outcome.to_plain()}

    def undo(self) -> None:
        """Remove what this rank wrote."""
        if self._writer is not None:
            self._writer.undo()

    def clean_up(self) -> None:
        """Remove the files of the checkpoint that was replaced (known on rank 0)."""
        if self._store is not None and self._previous is not None:
            remove_files(self._store, [entry.name for entry in self._previous.files])


def _previous(store: Store) -> Manifest | None:
    """Return the manifest about to be replaced; a broken one counts as none."""
    try:
        return manifest_of(store)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


def _check_files(store: Store, manifest: Manifest) -> None:
    """Refuse to commit files that rank 0 does not see whole."""
    present = store.sizes()
    for entry in manifest.files:
        if present.get(entry.name) == entry.size:
            continue
        try:  # a network filesystem may list late, but opens fresh
            with store.open(entry.name) as reader:
                size: int | None = reader.size
        except FileNotFoundError:
            size = None
        if size != entry.size:
            raise CheckpointError(
                f"rank 0 does not see {entry.name} of rank {entry.rank} whole in {store.url}: "
                "save to a place that all ranks share"
            )


def remove_files(store: Store, names: Sequence[str]) -> None:
    """Remove files that no manifest names any more; a failure leaves litter, not damage."""
    for name in names:
        try:
            store.remove(name)
        except Exception as error:
            warnings.warn(
                f"could not remove {store.url}/{name}: {error}", CheckpointWarning, stacklevel=2
            )
