"""Keep_last, keep_best, prune."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence

from checkpoint_io.errors import CheckpointConflictError, CheckpointWarning
from checkpoint_io.folder.discovery import CheckpointInfo, FolderEntry, id_of
from checkpoint_io.folder.removal import remove_checkpoint, remove_left_overs, remove_unfinished
from checkpoint_io.storage.open import Store

__all__ = ["KeepPolicy", "any_of", "keep_best", "keep_every", "keep_last"]

Choose = Callable[[Sequence[CheckpointInfo]], Iterable[CheckpointInfo]]


class KeepPolicy:
    """Picks, from a run's valid checkpoints, oldest first, those to keep; `a | b` keeps both.

    Args:
        choose: takes the sequence of `CheckpointInfo`, returns those of them to keep.

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
        policies: policies, or functions like theirs; none of them keeps nothing.

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
        steps: the distance, at least 1. A checkpoint without a whole number as its step is not
            kept by this rule.

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
        metric: a key of the metadata, or the monitor's name of a
            `metadata["score"] = {"monitor": name, "value": number}`; None takes any `score`.
            Checkpoints without that number (or with NaN) are not kept by this rule.
        mode: "min" if lower is better, or "max". Of equal ones the older is the better.

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
    """Refuse 0 and less."""
    if count < 1:
        raise ValueError(f"{rule}, not {count}")


def check_mode(mode: str) -> None:
    """Refuse what is no mode."""
    if mode not in ("min", "max"):
        raise ValueError(f'mode is "min" or "max", not {mode!r}')


def ranked(infos: Sequence[CheckpointInfo], metric: str | None, mode: str) -> list[CheckpointInfo]:
    """Return those that have the metric, best first."""
    sign = 1.0 if mode == "min" else -1.0
    scored = [(value, info) for info in infos if (value := score_of(info, metric)) is not None]
    # the sort keeps the given order among equals, so the older one stays in front
    return [info for _, info in sorted(scored, key=lambda pair: sign * pair[0])]


def score_of(info: CheckpointInfo, metric: str | None) -> float | None:
    """Find the number that a checkpoint is ranked by; None if it has none."""
    metadata = info.manifest.metadata
    score = metadata.get("score")
    if isinstance(score, dict) and (metric is None or score.get("monitor") == metric):
        found = score.get("value")
    else:
        found = score if metric is None else metadata.get(metric)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    try:
        value = float(found)
    except OverflowError:  # a whole number beyond all floats is no score
        return None
    return None if math.isnan(value) else value


class Pruning:
    """One walk through a folder of checkpoints.

    Args:
        folder: the folder of checkpoints.
        run_id: whose checkpoints and left-overs may go.
        keep: names that stay.
        dry_run: only say what would go.
    """

    def __init__(self, folder: Store, run_id: str, keep: Collection[str], dry_run: bool) -> None:
        self._folder = folder
        self._run_id = run_id
        self._keep = keep
        self._dry_run = dry_run

    def run(self, entries: Sequence[FolderEntry]) -> list[str]:
        """Go through what a scan found; return the paths of the checkpoints removed."""
        return [entry.path for entry in entries if self._concerns(entry) and self._treat(entry)]

    def _concerns(self, entry: FolderEntry) -> bool:
        """Say whether an entry is, or may be, of this run."""
        if entry.manifest is None:  # whose a broken one is cannot be known
            return entry.status == "unfinished" and entry.name not in self._keep
        return entry.manifest.metadata.get("run_id") == self._run_id

    def _treat(self, entry: FolderEntry) -> bool:
        """Clean one folder; a problem there is told and does not keep others from being cleaned."""
        goes = entry.manifest is not None and entry.name not in self._keep
        if self._dry_run:
            return goes
        try:
            return self._clean(entry) and goes
        except CheckpointConflictError:
            return False  # a save is at work there: the next prune will look again
        except Exception as error:
            text = f"could not clean {entry.path}: {type(error).__name__}: {error}"
            warnings.warn(text, CheckpointWarning, stacklevel=4)
            return False

    def _clean(self, entry: FolderEntry) -> bool:
        """Remove what is to go from one folder; False if it is no longer what the scan saw."""
        store = self._folder.child(entry.name)
        with store.lock():
            if id_of(store) != (entry.manifest.id if entry.manifest else None):
                return False
            if entry.manifest is None:
                remove_unfinished(store, self._run_id)
            elif entry.name in self._keep:
                remove_left_overs(store, entry.manifest, self._run_id)
            else:
                remove_checkpoint(store, entry.manifest)
        return True
