"""Save(), prepare_save, SaveJob."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import new_save_id
from checkpoint_io.group import ProcessGroupLike, SingleProcess
from checkpoint_io.outcome import Outcome, failed_ranks, raise_failure
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.commit import NextGeneration, following
from checkpoint_io.saver.plan import Draft, RankPlan
from checkpoint_io.saver.run import Run, headline_of, together
from checkpoint_io.sharding.local_tensors import Replicated
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.threads import collector_paused

__all__ = ["SaveJob", "prepare_save", "save"]


def prepare_save(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    next_generation: NextGeneration,
    local_state: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    group: ProcessGroupLike | None = None,
    max_shard_size: int | str = "5GB",
    replicated: Replicated = True,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveJob:
    """Settle what a save writes, and who writes it, without writing anything; collective.

    Plain values are taken over now; tensors are looked at when the job runs, unless
    `SaveJob.rebind` puts copies in their place. The arguments are those of `save`.

    Args:
        url: a folder: a local path or any fsspec URL.
        state: the state that all ranks share.
        next_generation: asked by rank 0 at the commit, with the manifest that is replaced or None,
            for the number that orders checkpoints.
        local_state: this rank's own state.
        metadata: plain values kept in the manifest; rank 0's is used.
        group: the processes that save together; default None: just this one.
        max_shard_size: largest tensor file.
        replicated: whether a plain tensor of the shared state is bitwise the same on all ranks, for
            all or by key; if not, rank 0's is written.
        storage_options: passed to the fsspec driver.

    Raises:
        UnsupportedStateError: a state holds an object that cannot be stored.
        CheckpointError: preparing failed on some rank; the message names it.
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, prepare_save
        >>> weight = torch.ones(2)
        >>> job = prepare_save("memory://doc-job/a", {"w": weight}, next_generation=lambda old: 1)
        >>> job.rebind([tensor.clone() for tensor in job.tensors])
        >>> _ = weight.zero_()  # training goes on
        >>> _ = job.run()
        >>> load("memory://doc-job/a").state
        {'w': tensor([1., 1.])}
    """
    group = group or SingleProcess()
    headline = headline_of(str(url))

    def start() -> tuple[Draft, Store]:
        store = open_store(url, storage_options)
        with collector_paused():
            draft = Draft(state, local_state, metadata or {}, group, max_shard_size, replicated)
        return draft, store

    mine = Outcome.of(start)
    hello = {**mine.to_plain(), "value": None}
    if mine.error is None:
        hello["value"] = {"save_id": new_save_id(), **mine.value[0].to_plain()}
    hellos = together(headline, lambda: group.all_gather_object(hello))
    if failed_ranks(hellos):
        raise_failure(headline, hellos, mine)
    draft, store = mine.value
    said = [h["value"] for h in hellos]
    plan = together(headline, lambda: draft.settle(group, said))
    return SaveJob(os.fspath(url), store, plan, said[0]["save_id"], group, next_generation)


class SaveJob:
    """A save that is settled and not yet written; `prepare_save` makes it.

    Attributes:
        url: where it goes.
        save_id: the id that its files and its manifest carry.
        nbytes: what this rank will write, in bytes.
        tensors: views of the tensors this rank writes, on whatever device, in the order written.

    Example:
        >>> import torch
        >>> from checkpoint_io import prepare_save
        >>> job = prepare_save(
        ...     "memory://doc-job/b", {"w": torch.ones(2)}, next_generation=lambda old: 1
        ... )
        >>> [tensor.shape for tensor in job.tensors], job.nbytes >= 8
        ([torch.Size([2])], True)
        >>> job.run().id == job.save_id
        True
    """

    def __init__(
        self,
        url: str,
        store: Store,
        plan: RankPlan,
        save_id: str,
        group: ProcessGroupLike,
        next_generation: NextGeneration,
    ) -> None:
        self.url = url
        self.save_id = save_id
        self.nbytes = plan.nbytes
        self._store = store
        self._plan = plan
        self._group = group
        self._next_generation = next_generation
        self._ran = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Views of the tensors this rank writes, in the order written."""
        return [box.tensor for boxes in self._plan.files for box in boxes]

    def rebind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write these instead of `tensors`: copies, in the same order.

        Raises:
            ValueError: their number, or a shape or dtype, is another one.
        """
        mine = self.tensors
        same = len(mine) == len(tensors) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(mine, tensors, strict=True)
        )
        if not same:
            raise ValueError(
                "rebind takes one tensor for each of job.tensors, of its shape and dtype"
            )
        source = iter(tensors)
        self._plan.files = [
            [box._replace(tensor=next(source)) for box in boxes] for boxes in self._plan.files
        ]

    def run(
        self, group: ProcessGroupLike | None = None, *, progress: bool | None = None
    ) -> Manifest:
        """Write, commit and clean up; collective, on any thread, once.

        Args:
            group: the same processes through another group, such as `TorchGroup.dedicated()`;
                default: the one it was prepared with.
            progress: a bar with bytes per second on rank 0; None (default) shows one for a long
                save on a terminal.

        Returns:
            The manifest that was committed, on every rank.

        Raises:
            CheckpointConflictError: another save is writing there, or was faster.
            CheckpointError: writing failed on some rank, or one of them died.
            RuntimeError: the job has run already.
        """
        if self._ran:
            raise RuntimeError("a SaveJob runs once: prepare_save makes another one")
        self._ran = True
        group = group or self._group
        shown = progress if group.rank == 0 else False
        with TransferProgress("saving", self.nbytes, shown) as bar:
            run = Run(self.url, self.save_id, self._store, self._plan, group, bar.add)
            return run.save(self._next_generation)


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
