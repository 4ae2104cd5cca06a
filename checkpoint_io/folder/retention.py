"""Select the checkpoints to keep, and remove the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from checkpoint_io.errors import CheckpointConflictError
from checkpoint_io.folder.discovery import CheckpointInfo, FolderEntry, id_of
from checkpoint_io.folder.removal import remove_checkpoint, remove_leftovers, remove_unfinished
from checkpoint_io.storage.open import Store

__all__ = ["KeepPolicy", "any_of", "keep_best", "keep_every", "keep_last"]

Choose = Callable[[Sequence[CheckpointInfo]], Iterable[CheckpointInfo]]


class KeepPolicy:
    """Selects the checkpoints to keep from a run's valid ones, oldest first; `a | b` keeps both.

    Args:
        choose: takes the sequence of `CheckpointInfo`, returns those to keep.

    Example:
        >>> from checkpoint_io import KeepPolicy, keep_last
        >>> named = KeepPolicy(lambda infos: [i for i in infos if i.name == "best"])
        >>> policy = named | keep_last(2)
        >>> policy([])
        []
    """

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def __call__(self, infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return those to keep, in the order given."""
        chosen = {info.path for info in self._choose(infos)}
        return [info for info in infos if info.path in chosen]

    def __or__(self, other: Choose) -> KeepPolicy:
        return any_of(self, other)


def any_of(*policies: Choose) -> KeepPolicy:
    """Return a policy that keeps what any of the given ones keeps.

    Args:
        policies: policies, or functions like theirs; without any, nothing is kept.

    Example:
        >>> from checkpoint_io import any_of, keep_every, keep_last
        >>> policy = any_of(keep_last(3), keep_every(1000))
    """
    return KeepPolicy(lambda infos: [info for policy in policies for info in policy(infos)])


def keep_last(count: int) -> KeepPolicy:
    """Return a policy for `CheckpointFolder.prune` that keeps the newest `count` checkpoints.

    Args:
        count: how many to keep, at least 1.

    Raises:
        ValueError: if `count` is less than 1.

    Example:
        >>> from checkpoint_io import CheckpointFolder, keep_last
        >>> folder = CheckpointFolder("memory://doc-policies/last")
        >>> for step in (1, 2, 3):
        ...     _ = folder.save(step, {}, metadata={"run_id": "r1"})
        >>> [info.name for info in keep_last(2)(folder.list())]
        ['step-00000002', 'step-00000003']
    """
    _at_least_one(count, "keep at least one checkpoint")
    return KeepPolicy(lambda infos: infos[-count:])


def keep_every(steps: int) -> KeepPolicy:
    """Return a policy that keeps checkpoints whose `metadata["step"]` is a multiple of `steps`.

    Args:
        steps: the distance, at least 1. A checkpoint whose step is not an integer is not kept by
            this rule.

    Raises:
        ValueError: if `steps` is less than 1.

    Example:
        >>> from checkpoint_io import keep_every, keep_last
        >>> policy = keep_every(1000) | keep_last(3)
    """
    _at_least_one(steps, "the distance between steps is at least 1")

    def due(info: CheckpointInfo) -> bool:
        step = info.manifest.metadata.get("step")
        return type(step) is int and step % steps == 0

    return KeepPolicy(lambda infos: filter(due, infos))


def keep_best(count: int, metric: str | None = None, mode: str = "min") -> KeepPolicy:
    """Return a policy that keeps the `count` best checkpoints by a metric in their metadata.

    Args:
        count: how many to keep, at least 1.
        metric: a key of the metadata, or the monitor's name in a
            `metadata["score"] = {"monitor": name, "value": number}`; None uses any `score`.
            Checkpoints without that number (or with NaN) are not kept by this rule.
        mode: "min" if lower is better, or "max". Of equal checkpoints the older one wins.

    Raises:
        ValueError: if `count` is less than 1, or `mode` is neither.

    Example:
        >>> from checkpoint_io import CheckpointFolder, keep_best
        >>> folder = CheckpointFolder("memory://doc-policies/best")
        >>> for step, loss in enumerate((0.4, 0.2, 0.3)):
        ...     _ = folder.save(step, {}, metadata={"run_id": "r1", "val/loss": loss})
        >>> [info.name for info in keep_best(1, "val/loss")(folder.list())]
        ['step-00000001']
    """
    _at_least_one(count, "keep at least one checkpoint")
    check_mode(mode)
    return KeepPolicy(lambda infos: ranked(infos, metric, mode)[:count])


def _at_least_one(count: int, rule: str) -> None:
    """Raise ValueError for 0 and less."""
    if count < 1:
        raise ValueError(f"{rule}, not {count}")


def check_mode(mode: str) -> None:
    """Raise ValueError for anything but "min" and "max"."""
    if mode not in ("min", "max"):
        raise ValueError(f'mode is "min" or "max", not {mode!r}')


def ranked(infos: Sequence[CheckpointInfo], metric: str | None, mode: str) -> list[CheckpointInfo]:
    """Return the checkpoints that have the metric, best first."""
    sign = 1.0 if mode == "min" else -1.0
    scored = [(value, info) for info in infos if (value := score_of(info, metric)) is not None]
    # the sort is stable: among equals the older one stays in front
    return [info for _, info in sorted(scored, key=lambda pair: sign * pair[0])]


def score_of(info: CheckpointInfo, metric: str | None) -> float | None:
    """Return the number that a checkpoint is ranked by, None if it has none."""
    metadata = info.manifest.metadata
    score = metadata.get("score")
    if isinstance(score, dict) and (metric is None or score.get("monitor") == metric):
        number = score.get("value")
    else:
        number = score if metric is None else metadata.get(metric)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    try:
        value = float(number)
    except OverflowError:  # an int that is too large for a float
        return None
    return None if math.isnan(value) else value


class Pruning:
    """Removes, from a folder of checkpoints, those of one run that are not kept.

    Args:
        folder: the folder of checkpoints.
        run_id: the run whose checkpoints and leftovers may be removed.
        keep: names to keep.
        report: called with a line for each checkpoint that cannot be removed.
        dry_run: only return what would be removed.
    """

    def __init__(
        self,
        folder: Store,
        run_id: str,
        keep: Collection[str],
        report: Callable[[str], None],
        dry_run: bool,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._keep = keep
        self._report = report
        self._dry_run = dry_run

    def run(self, entries: Sequence[FolderEntry]) -> list[str]:
        """Prune the entries of a scan; return the paths of the removed checkpoints."""
        return [entry.path for entry in entries if self._is_ours(entry) and self._prune(entry)]

    def _is_ours(self, entry: FolderEntry) -> bool:
        """Return whether an entry is, or may be, of this run."""
        # The files of an unfinished save name its run; `_clean` reads them. The run of a
        # checkpoint with a broken manifest is unknown: it is never removed.
        if entry.manifest is None:
            return entry.status == "unfinished" and entry.name not in self._keep
        return entry.manifest.metadata.get("run_id") == self._run_id

    def _prune(self, entry: FolderEntry) -> bool:
        """Clean one folder; return whether its checkpoint was removed."""
        removes = entry.manifest is not None and entry.name not in self._keep
        if self._dry_run:
            return removes
        try:
            return self._clean(entry) and removes
        except CheckpointConflictError:
            return False  # a save has locked the folder: the next prune tries again
        except Exception as error:  # must not keep the other folders from being cleaned
            self._report(f"could not clean {entry.path}: {type(error).__name__}: {error}")
            return False

    def _clean(self, entry: FolderEntry) -> bool:
        """Remove from one folder what is not kept; return False if it changed since the scan."""
        store = self._folder.child(entry.name)
        with store.lock():
            # a save may have committed here between the scan and the lock
            if id_of(store) != (entry.manifest.id if entry.manifest else None):
                return False
            if entry.manifest is None:
                remove_unfinished(store, self._run_id)
            elif entry.name in self._keep:
                remove_leftovers(store, entry.manifest, self._run_id)
            else:
                remove_checkpoint(store, entry.manifest)
        return True
