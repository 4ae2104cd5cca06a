"""Write and commit a prepared save: begin, write, publish, each step agreed by all ranks.

A crash leaves one of two states, depending on whether the manifest had been replaced:

* Before: the old checkpoint is intact, because every file of the new one has a new name.
* After: the new checkpoint is complete, because the manifest is written last, when all files that
  it names are durable.

In both, files that no manifest names may be left. The next save of the same run removes them (see
`metadata["run_id"]`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, objects_name, tensors_name
from checkpoint_io.format.parse import parse_manifest
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.outcome import Outcome, agree, collective, raise_failure
from checkpoint_io.saver.commit import Commit, NextGeneration
from checkpoint_io.saver.plan import RankPlan
from checkpoint_io.saver.writer import RankReport, RankWriter
from checkpoint_io.storage.open import Store


def failure_headline(url: str) -> str:
    """Return the start of every error of a save that committed nothing."""
    return f"saving to {url} failed, nothing was committed"


class Run:
    """One rank's part in writing and committing a save."""

    def __init__(
        self,
        url: str,
        save_id: str,
        store: Store,
        plan: RankPlan,
        group: ProcessGroupLike,
        on_written: Callable[[int], None],
    ) -> None:
        self._url = url
        self._save_id = save_id
        self._plan = plan
        self._group = group
        self._writer = RankWriter(store, save_id, group.rank, on_written)
        self._commit = Commit(store, save_id, plan.run_id, plan.metadata)
        self._headline = failure_headline(url)

    def save(self, next_generation: NextGeneration) -> Manifest:
        """Begin, write and publish; return the committed manifest."""
        with self._commit:  # rank 0 holds the lock of the folder until the old files are removed
            # Each step ends in an all-gather, which is also a barrier. The first one: no rank
            # writes a tensor before rank 0 holds the lock and the file that names the run is
            # durable. The second: rank 0 commits only when the files of all ranks are durable.
            begun, _ = self._step(self._begin)
            _, reports = self._step(lambda: self._write(begun), last=True)
            return self._publish(next_generation, reports)

    def _step(
        self, step: Callable[[], RankReport], *, last: bool = False
    ) -> tuple[RankReport, list[Any]]:
        """Take a step on all ranks; if it fails on any, remove the files and raise on all."""
        own = Outcome.of(step)
        # Rank 0 commits after the last step. If the gather fails on another rank then, rank 0 may
        # have received that rank's report nevertheless, and its manifest may name these files.
        # They stay, and the error must not claim that nothing was committed.
        in_doubt = last and self._group.rank > 0 and own.error is None

        def cleanup(gathered: bool) -> None:
            if gathered or not in_doubt:
                self._undo()

        reports = agree(
            self._group,
            own if own.error is not None else replace(own, value=own.value.to_plain()),
            self._headline,
            group_headline=self._unknown_headline if in_doubt else self._headline,
            cleanup=cleanup,
        )
        return own.value, reports

    def _begin(self) -> RankReport:
        """Lock the folder and write the JSON of the shared state, both on rank 0.

        That file names the run, so that whatever a killed save leaves can be attributed to it.
        """
        if self._plan.problem is not None:
            raise self._plan.problem
        _wait_for_devices(self._plan)
        if self._group.rank:
            return RankReport()
        self._commit.begin()
        assert self._plan.shared_tree is not None
        return self._write_objects(None, self._plan.shared_tree)

    def _write_objects(self, rank: int | None, tree: bytes) -> RankReport:
        """Write the JSON file of the shared state, or of this rank's own state."""
        data = self._plan.objects(tree, self._save_id, rank)
        return self._writer.write_objects(objects_name(self._save_id, rank), data)

    def _write(self, begun: RankReport) -> RankReport:
        """Write the tensor files and the own state of this rank."""
        rank, files = self._group.rank, self._plan.files
        named = [(tensors_name(self._save_id, rank, n), f) for n, f in enumerate(files, 1)]
        report = self._writer.write_tensors(named, self._plan.labels(self._save_id))
        report.files += begun.files
        if self._plan.local_tree is not None:
            report.files += self._write_objects(rank, self._plan.local_tree).files
        report.tied = self._plan.tied
        return report

    def _publish(self, next_generation: NextGeneration, reports: list[Any]) -> Manifest:
        """Commit on rank 0, and broadcast the verdict."""
        done = cleaned = Outcome(None, None)
        verdict: dict[str, Any] = {}
        if self._group.rank == 0:
            done = Outcome.of(lambda: self._commit.publish(next_generation, reports))
            verdict = self._commit.verdict(done)
            # Only now: until the new manifest is there, the old checkpoint needs its files.
            if verdict["state"] == "committed":
                cleaned = Outcome.of(lambda: self._commit.clean_up(done.error))
        headline = (
            f"saved to {self._url} (rank 0 committed it), but"
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
            return parse_manifest(verdict["manifest"], f"{self._url}/{MANIFEST}")
        if verdict["state"] == "absent":
            self._undo()
            raise_failure(self._headline, [verdict["outcome"]], done)
        raise_failure(
            f"saving to {self._url} failed and could not be checked, so nothing was removed; "
            "call checkpoint_io.verify there before saving again",
            [verdict["outcome"]],
            # Without the own error rank 0 raises with this headline too, unless interrupted.
            Outcome(None, None) if isinstance(done.error, Exception) else done,
        )

    @property
    def _unknown_headline(self) -> str:
        """The start of an error on a rank that does not know the outcome of the commit."""
        return f"saving to {self._url} may have failed; check it with checkpoint_io.verify"

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
    devices = {box.tensor.device for boxes in plan.files for box in boxes}
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
