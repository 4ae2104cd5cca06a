"""The public functions that save: `save`, and `prepare_save` with `SaveJob`.

A crash leaves one of two states, depending on whether the manifest had been replaced:

* Before: the old checkpoint is intact, because every file of the new one has a new name.
* After: the new checkpoint is complete, because the manifest is written last, when all files that
  it names are durable.

In both, files that no manifest names may be left. The next save of the same run removes them (see
`metadata["run_id"]`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from checkpoint_io.format.manifest import LazyManifest, Manifest, digest_of
from checkpoint_io.format.names import (
    MANIFEST,
    new_save_id,
    objects_name,
    parse_size,
    tensors_name,
)
from checkpoint_io.format.parse import parse_manifest
from checkpoint_io.group import (
    Outcome,
    ProcessGroupLike,
    SingleProcess,
    agree,
    collective,
    raise_failure,
)
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.commit import Commit, NextGeneration
from checkpoint_io.saver.plan import RankPlan
from checkpoint_io.saver.writer import RankReport, RankWriter
from checkpoint_io.sharding.local_tensors import Replicated
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.threads import collector_paused

T = TypeVar("T")

__all__ = ["SaveJob", "prepare_save", "save"]


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

    A previous checkpoint at `url` stays intact until the new one is committed, and is then removed.
    If anything fails on any rank, nothing is committed and every rank raises. With more than one
    rank the call is collective, and all ranks write: each its local shards of DTensors, and its
    share of the replicated tensors. Only one save at a time may go to one `url`; a second one
    raises CheckpointConflictError.

    Args:
        url: a folder: a local path (`~` works) or any fsspec URL.
        state: the state that all ranks share. Nested dicts, lists, tuples and sets of tensors,
            DTensors, numpy arrays and plain values. Tensors of any shape, on any device. Rank 0's
            is saved; the other ranks pass theirs so that they can write a part of it, or {} if they
            hold no shards.
        local_state: this rank's own state (random generators, data position); each rank writes
            its own. Default None: this rank has none.
        metadata: plain values kept in the manifest (run_id, step, metrics); rank 0's is used.
        group: the ranks that save together; default None: this process alone.
        max_shard_size: largest tensor file, in bytes or as text ("5GB" = 5e9 bytes, "1GiB").
            A single larger tensor gets its own file.
        generation: a number that orders checkpoints; default: one more than that of the replaced
            checkpoint.
        replicated: whether the plain tensors of `state` are bitwise the same on all ranks (default
            True), or a function that returns it for a key; if not, rank 0 writes its own.
        progress: show a progress bar on rank 0; None (default) shows one for a long save on a
            terminal.
        storage_options: passed to the fsspec driver (credentials, endpoint).

    Returns:
        The committed manifest, on every rank.

    Raises:
        UnsupportedStateError: if the state holds an object that cannot be stored.
        ManifestVersionError: if another version of this package wrote the checkpoint at `url`.
        CheckpointConflictError: if another save is writing to `url`, or was faster.
        CheckpointError: if writing failed on some rank; the message names it.
        ImportError: if the driver for this kind of URL is not installed.

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
        next_generation=generation,
        local_state=local_state,
        metadata=metadata,
        group=group,
        max_shard_size=max_shard_size,
        replicated=replicated,
        storage_options=storage_options,
    )
    return job.run(progress=progress)


def prepare_save(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    next_generation: NextGeneration = None,
    local_state: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    group: ProcessGroupLike | None = None,
    max_shard_size: int | str = "5GB",
    replicated: Replicated = True,
    before_write: Callable[[], None] | None = None,
    spread: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveJob:
    """Plan what each rank writes, without writing anything; collective.

    Plain values are captured now; tensors are read when the job runs, unless `SaveJob.rebind`
    replaces them with copies. The arguments are those of `save`.

    Args:
        url: a folder: a local path or any fsspec URL.
        state: the state that all ranks share.
        next_generation: the number that orders checkpoints, or a function that returns it; called
            on rank 0 at the commit, with the manifest that is replaced, or None. Default: one more
            than that of the replaced checkpoint.
        local_state: this rank's own state.
        metadata: plain values kept in the manifest; rank 0's is used.
        group: the ranks that save together; default None: this process alone.
        max_shard_size: largest tensor file.
        replicated: whether plain tensors of the shared state are bitwise the same on all ranks, for
            all or by key; if not, rank 0's is written.
        before_write: called on rank 0 before the first file is written, and again before the
            manifest is; if it raises, such as `Lease.check`, nothing is committed.
        spread: the ranks write to folders of their own, so that rank 0 does not see all files. Its
            folder gets the manifest; the caller brings the files together before a load.
        storage_options: passed to the fsspec driver.

    Raises:
        UnsupportedStateError: if a state holds an object that cannot be stored.
        CheckpointError: if preparing failed on some rank; the message names it.
        ImportError: if the driver for this kind of URL is not installed.

    Example:
        >>> import torch
        >>> from checkpoint_io import load, prepare_save
        >>> weight = torch.ones(2)
        >>> job = prepare_save("memory://doc-job/a", {"w": weight})
        >>> job.rebind([tensor.clone() for tensor in job.tensors])
        >>> _ = weight.zero_()  # training goes on
        >>> _ = job.run()
        >>> load("memory://doc-job/a").state
        {'w': tensor([1., 1.])}
    """
    group = group or SingleProcess()
    headline = failure_headline(str(url))

    def start() -> tuple[RankPlan, Store]:
        store = open_store(url, storage_options)
        plan = RankPlan(parse_size(max_shard_size))
        with collector_paused():
            plan.draft(state, local_state, metadata or {}, group, replicated)
        return plan, store

    outcome = Outcome.of(start)
    if outcome.error is None:
        plan, store = outcome.value
        # Every rank draws an id, so that one collective is enough; rank 0's is used. It is part of
        # all file names: an overwrite never touches a file that the old manifest names.
        outcome = replace(outcome, value={"save_id": new_save_id(), **plan.to_plain()})
    drafts = agree(group, outcome, headline, group_headline=headline)
    collective(lambda: plan.settle(group, drafts), headline)
    save_id = drafts[0]["save_id"]
    return SaveJob(
        os.fspath(url), store, plan, save_id, group, next_generation, before_write, spread
    )


def failure_headline(url: str) -> str:
    """Return the start of every error of a save that committed nothing."""
    return f"saving to {url} failed, nothing was committed"


class SaveJob:
    """A save that is planned and not yet written, from `prepare_save`.

    Attributes:
        url: the folder that it is saved to.
        save_id: the id in its manifest and in its file names.
        nbytes: number of bytes that this rank will write.
        tensors: views of the tensors that this rank writes, on their device.

    Example:
        >>> import torch
        >>> from checkpoint_io import prepare_save
        >>> job = prepare_save("memory://doc-job/b", {"w": torch.ones(2)})
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
        before_write: Callable[[], None] | None = None,
        spread: bool = False,
    ) -> None:
        self.url = url
        self.save_id = save_id
        self._store = store
        self._plan = plan
        self._group = group
        self._next_generation = next_generation
        self._headline = failure_headline(url)
        self._ran = False
        self._commit = Commit(
            store, save_id, plan.run_id, plan.metadata, before_write or (lambda: None), spread
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank will write."""
        return self._plan.nbytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Views of the tensors that this rank writes."""
        return list(self._plan.tensors)

    def rebind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace `tensors` with copies, in the same order.

        Raises:
            ValueError: if their number, a shape or a dtype differs.
        """
        current = self._plan.tensors
        same = len(current) == len(tensors) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(current, tensors, strict=True)
        )
        if not same:
            raise ValueError(
                "rebind takes one tensor for each of job.tensors, of its shape and dtype"
            )
        self._plan.tensors = list(tensors)

    def copy_tensors(self, copy: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Replace `tensors` with what a function makes of them, one copy for each in this order.

        As `rebind`, without its check.
        """
        self._plan.tensors = copy(self._plan.tensors)

    def run(
        self, group: ProcessGroupLike | None = None, *, progress: bool | None = None
    ) -> Manifest:
        """Write, commit and clean up; collective, once, on any thread.

        Args:
            group: another group of the same ranks, such as `TorchGroup.dedicated()`; default: the
                one that the job was prepared with.
            progress: show a progress bar on rank 0; None (default) shows one for a long save on a
                terminal.

        Returns:
            The committed manifest, on every rank.

        Raises:
            CheckpointConflictError: if another save is writing there, or was faster.
            CheckpointError: if writing failed on some rank, or a rank died.
            RuntimeError: if the job has run already.
        """
        if self._ran:
            raise RuntimeError("a SaveJob runs once: create another one with prepare_save")
        self._ran = True
        self._group = group or self._group
        self._plan.encode()
        shown = progress if self._group.rank == 0 else False
        with TransferProgress("saving", self.nbytes, shown) as bar:
            self._writer = RankWriter(self._store, self.save_id, self._group.rank, bar.add)
            return self._save()

    def _save(self) -> Manifest:
        """Begin, write and publish; return the committed manifest."""
        with (
            self._commit.lock
        ):  # rank 0 holds the lock of the folder until the old files are removed
            # Each step ends in an all-gather, which is also a barrier. The first one: no rank
            # writes a tensor before rank 0 holds the lock and the file that names the run is
            # durable. The second: rank 0 commits only when the files of all ranks are durable.
            # Files become durable together in each step, and a single rank, which has nobody to
            # wait for, takes both in one.
            if self._group.world_size == 1:
                reports = self._step(lambda: self._write(self._begin()), last=True)
            else:
                shared_files = self._step(self._begin)[self._group.rank]
                reports = self._step(lambda: self._write(shared_files), last=True)
            return self._publish(reports)

    def _step(self, step: Callable[[], T], *, last: bool = False) -> list[T]:
        """Take a step on all ranks; return what it returned on each.

        If it fails on any, remove the files and raise on all.
        """

        def durably() -> T:
            with self._store.together():
                return step()

        outcome = Outcome.of(durably)
        # Rank 0 commits after the last step. If the gather fails on another rank then, rank 0 may
        # have received that rank's report nevertheless, and its manifest may name these files.
        # They stay, and the error must not claim that nothing was committed.
        in_doubt = last and self._group.rank > 0 and outcome.error is None

        def cleanup(gathered: bool) -> None:
            if gathered or not in_doubt:
                self._undo()

        return agree(
            self._group,
            outcome,
            self._headline,
            group_headline=self._unknown_headline if in_doubt else self._headline,
            cleanup=cleanup,
        )

    def _begin(self) -> list[dict[str, Any]]:
        """Lock the folder and write the JSON of the shared state, both on rank 0.

        That file names the run, so that whatever a killed save leaves can be attributed to it.
        Return the manifest's entry of it.
        """
        if self._plan.problem is not None:
            raise self._plan.problem
        _wait_for_devices(self._plan)
        if self._group.rank:
            return []
        self._commit.begin()
        assert self._plan.shared_tree is not None
        return [self._write_objects(None, self._plan.shared_tree)]

    def _write_objects(self, rank: int | None, tree: bytes) -> dict[str, Any]:
        """Write the JSON file of the shared state, or of this rank's own state."""
        data = self._plan.objects(tree, self.save_id, rank)
        return self._writer.write_objects(objects_name(self.save_id, rank), data)

    def _write(self, shared_files: list[dict[str, Any]]) -> RankReport:
        """Write the tensor files and the own state of this rank."""
        rank, files = self._group.rank, self._plan.files()
        named = [(tensors_name(self.save_id, rank, n), boxes) for n, boxes in enumerate(files, 1)]
        report = self._writer.write_tensors(named, self._plan.labels(self.save_id))
        report["files"] += shared_files
        if self._plan.local_tree is not None:
            report["files"].append(self._write_objects(rank, self._plan.local_tree))
        report["tied"] = self._plan.tied
        return report

    def _publish(self, reports: Sequence[RankReport]) -> Manifest:
        """Commit on rank 0, and broadcast the verdict."""
        done = cleaned = Outcome(None, None)
        verdict: dict[str, Any] = {}
        if self._group.rank == 0:
            done = Outcome.of(lambda: self._commit.publish(self._next_generation, reports))
            verdict = self._commit.verdict(done)
            # Only now: until the new manifest is there, the old checkpoint needs its files.
            if verdict["state"] == "committed":
                cleaned = Outcome.of(lambda: self._commit.clean_up(done.error))
        headline = (
            f"saved to {self.url} (rank 0 committed it), but"
            if verdict.get("state") == "committed"
            else self._unknown_headline
        )
        verdict = collective(lambda: self._group.broadcast_object(verdict), headline)
        if verdict["state"] == "committed":
            for error in (done.error, cleaned.error):
                # The commit took place, so its error (say, a lost answer) is not one of the save.
                # An interrupt is raised, on this rank alone.
                if error is not None and not (error is done.error and isinstance(error, Exception)):
                    raise error
            if done.value is not None:
                manifest: Manifest = done.value
                return manifest
            # Of many ranks it takes seconds to parse, and nearly no caller needs more than the id.
            data, url = verdict["manifest"], f"{self.url}/{MANIFEST}"
            known = {"id": self.save_id, "digest": digest_of(data)}
            return LazyManifest(known, lambda: parse_manifest(data, url))
        if verdict["state"] == "absent":
            self._undo()
            raise_failure(self._headline, [verdict["outcome"]], done)
        raise_failure(
            f"saving to {self.url} failed and could not be checked, so nothing was removed; "
            "call checkpoint_io.verify there before saving again",
            [verdict["outcome"]],
            # Without the own error rank 0 raises with this headline too, unless interrupted.
            Outcome(None, None) if isinstance(done.error, Exception) else done,
        )

    @property
    def _unknown_headline(self) -> str:
        """The start of an error on a rank that does not know the outcome of the commit."""
        return f"saving to {self.url} may have failed; check it with checkpoint_io.verify"

    def _undo(self) -> None:
        """Remove what this save has written, as far as possible."""
        self._writer.undo()
        if self._group.rank == 0:
            self._commit.undo()


def _wait_for_devices(plan: RankPlan) -> None:
    """Synchronize the devices of the tensors.

    They are copied on other threads and streams, which do not wait for the kernels that compute
    them.
    """
    devices = {tensor.device for tensor in plan.tensors} - {torch.device("cpu")}
    accelerator = torch.accelerator.current_accelerator() if devices else None
    for device in devices:
        # others, such as XLA, wait in each copy
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)
