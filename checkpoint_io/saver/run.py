"""One rank's part in writing and committing a save, step by step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, objects_name, tensors_name
from checkpoint_io.format.parse import parse_manifest
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.outcome import Outcome, failed_ranks, raise_failure
from checkpoint_io.saver.commit import Commit, NextGeneration
from checkpoint_io.saver.plan import RankPlan
from checkpoint_io.saver.writer import RankReport, RankWriter
from checkpoint_io.storage.open import Store

T = TypeVar("T")


def headline_of(url: str) -> str:
    """Begin every error of a save."""
    return f"saving to {url} failed, nothing was committed"


def together(headline: str, call: Callable[[], T]) -> T:
    """Make a collective call; what goes wrong in the group itself is an error of the save."""
    try:
        return call()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{headline}: the group of processes failed, as it does when one of them dies or takes "
            f"too long ({type(error).__name__}: {error})"
        ) from error


class Run:
    """Runs a save: begin, write, commit; each step ends with all ranks knowing how it went."""

    def __init__(
        self,
        url: str,
        save_id: str,
        store: Store,
        plan: RankPlan,
        group: ProcessGroupLike,
        moved: Callable[[int], None],
    ) -> None:
        self._url = url
        self._save_id = save_id
        self._plan = plan
        self._group = group
        self._writer = RankWriter(store, save_id, group.rank, moved)
        self._commit = Commit(store, save_id, plan.run_id, plan.metadata)
        self._headline = headline_of(url)

    def save(self, next_generation: NextGeneration) -> Manifest:
        """Do all of it."""
        with self._commit:
            begun, _ = self._step(self._begin)
            _, reports = self._step(lambda: self._write(begun), last=True)
            return self._publish(next_generation, reports)

    def _step(self, step: Callable[[], Any], *, last: bool = False) -> tuple[Any, list[Any]]:
        """Take a step on all ranks; if one fails, nothing stays and all of them raise.

        After the `last` one rank 0 commits. A rank that did its part and then hears nothing leaves
        its files: rank 0 may have heard of them.
        """
        mine = Outcome.of(step)
        plain = mine.to_plain()
        if isinstance(mine.value, RankReport):
            plain["value"] = mine.value.to_plain()
        in_doubt = last and self._group.rank > 0 and mine.error is None
        headline = self._unheard({}) if in_doubt else self._headline
        try:
            outcomes = together(headline, lambda: self._group.all_gather_object(plain))
        except BaseException:
            if not in_doubt:
                self._undo()
            raise
        if failed_ranks(outcomes):
            self._undo()
            raise_failure(self._headline, outcomes, mine)
        return mine.value, [outcome["value"] for outcome in outcomes]

    def _begin(self) -> RankReport:
        """Lock the place and write the shared state's JSON, before any rank writes a tensor.

        It says which run this is: whatever is left of a killed save can then be told from the rest.
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
        """Write the JSON file of the shared state, or of this rank's own."""
        data = self._plan.objects(tree, self._save_id, rank)
        return self._writer.write_objects(objects_name(self._save_id, rank), data)

    def _write(self, begun: RankReport) -> RankReport:
        """Write everything else of this rank."""
        rank, files = self._group.rank, self._plan.files
        named = [(tensors_name(self._save_id, rank, n), f) for n, f in enumerate(files, 1)]
        report = self._writer.write_tensors(named, self._plan.labels(self._save_id))
        report.files += begun.files
        if self._plan.local_tree is not None:
            report.files += self._write_objects(rank, self._plan.local_tree).files
        report.tied = self._plan.tied
        return report

    def _publish(self, next_generation: NextGeneration, reports: list[Any]) -> Manifest:
        """Let rank 0 commit, and hear from it what became of that."""
        done = cleaned = Outcome(None, None)
        verdict: dict[str, Any] = {}
        if self._group.rank == 0:
            done = Outcome.of(lambda: self._commit.publish(next_generation, reports))
            verdict = self._commit.judge(done)
            if verdict["state"] == "committed":
                cleaned = Outcome.of(lambda: self._commit.clean_up(done.error))
        verdict = together(self._unheard(verdict), lambda: self._group.broadcast_object(verdict))
        if verdict["state"] == "committed":
            for error in (done.error, cleaned.error):
                if error is not None and not (error is done.error and isinstance(error, Exception)):
                    raise error  # an interrupt, which the others need not hear of
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
            # the headline is what counts, also on rank 0, unless somebody interrupted it
            Outcome(None, None) if isinstance(done.error, Exception) else done,
        )

    def _unheard(self, verdict: dict[str, Any]) -> str:
        """Begin the error of a rank that could not tell, or was not told, what became of it."""
        if verdict.get("state") == "committed":
            return f"saved to {self._url} (rank 0 committed it), but"
        return f"saving to {self._url} may have failed; look there with checkpoint_io.verify"

    def _undo(self) -> None:
        """Remove what was written, as far as that is possible."""
        self._writer.undo()
        if self._group.rank == 0:
            self._commit.undo()


def _wait_for_devices(plan: RankPlan) -> None:
    """Let what still computes the tensors end: they are copied on other threads and streams."""
    devices = {box.tensor.device for boxes in plan.files for box in boxes}
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
