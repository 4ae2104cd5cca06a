"""Find and open a checkpoint on all ranks together."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from accel_callbacks import collectives
from accel_callbacks.checkpoint.async_save import SaveGroup, TrainingGroup
from accel_callbacks.errors import RemoteError
from accel_callbacks.errors.text import published_text
from accel_callbacks.logging import notice

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder, CheckpointReader, ProcessGroupLike

__all__ = [
    "LoadFailed",
    "describe_foreign",
    "describe_foreign_folder",
    "open_folder",
    "open_newest",
    "open_one",
    "process_group",
    "together",
    "unwrapped_failure",
]

T = TypeVar("T")
# Files by which a folder of another library is recognized.
_KINDS = (
    (("optimizer.bin", "scheduler.bin", "random_states_0.pkl"), "accelerate"),
    ((".metadata",), "torch"),
    (("model.safetensors", "model.safetensors.index.json"), "weights"),
    (("pytorch_model.bin", "pytorch_model.bin.index.json"), "weights"),
)
_MOST_FOLDERS = 3
_ADVICE = {
    "accelerate": "was saved by Hugging Face Accelerate, whose optimizer and random states are "
    "pickles and are not read: load_checkpoint_in_model(model, path) takes the weights, and "
    "save_state() makes a checkpoint of the run from there on",
    "torch": "was saved by torch.distributed.checkpoint, whose metadata are a pickle and are not "
    "read: load it with torch, then save_state()",
    "weights": "holds the weights of a model and no training state: "
    "load_checkpoint_in_model(model, path) loads them",
}


def open_folder(root: str, storage_options: Mapping[str, Any] | None = None) -> CheckpointFolder:
    """Return the folder of checkpoints at ``root``, which need not exist yet.

    What a kill has left there is a notice, once, instead of a warning: no line is at fault.
    """
    import checkpoint_io

    noticed: set[str] = set()

    def tell(text: str) -> None:
        if text not in noticed:
            noticed.add(text)
            notice(text)

    return checkpoint_io.CheckpointFolder(root, storage_options=storage_options, on_warning=tell)


def process_group() -> ProcessGroupLike | None:
    """Return the default group in the form that `checkpoint_io` takes, None for one rank."""
    return TrainingGroup() if collectives.world_size() > 1 else None


class LoadFailed(Exception):
    """A part of a load failed on some rank; raised on all ranks.

    Attributes:
        error: the error to raise on this rank: its own, or a :class:`RemoteError`.
        damaged: the checkpoint is at fault on every rank that failed, so an older one may load.
        changed: prepared objects of some rank were changed before the failure.
        text: the errors by rank.
    """

    def __init__(self, error: Exception, damaged: bool, changed: bool, text: str) -> None:
        super().__init__(text)
        self.error, self.damaged, self.changed, self.text = error, damaged, changed, text


@contextmanager
def unwrapped_failure() -> Iterator[None]:
    """Context manager: raise the error that a :class:`LoadFailed` carries, with its own cause."""
    try:
        yield
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__


def together(label: str, action: Callable[[], T], *, changes: bool = False) -> T:
    """Collective: return the result of an action if it succeeds on all ranks.

    The ranks wait in the group of saves, whose timeout allows for a slow action on one of them.

    Args:
        label: shown in the errors of the other ranks.
        action: called on each rank; errors that are no ``Exception`` are not shared.
        changes: the action changes prepared objects, so that a success on one rank is a change.

    Raises:
        LoadFailed: on all ranks, if the action failed on one.
    """
    # NCCL's default of ten minutes would end the others while one rank reads from a slow store.
    group = SaveGroup()
    group.acquire()
    error: Exception | None = None
    well = False
    try:
        try:
            result = action()
        except Exception as problem:
            error = problem
        reports = group.all_gather_object(_report(error, changes))
        well = True
    finally:
        (group.release if well else group.close)()
    failed = [(rank, report) for rank, report in enumerate(reports) if report.text]
    if not failed:
        return result
    rank, first = failed[0]
    shown = error or RemoteError(rank=rank, where=label, details=first.details)
    many = len(reports) > 1
    texts = (f"rank {number}: {report.text}" if many else report.text for number, report in failed)
    text = "; ".join(texts)
    damaged = all(report.damaged for report in reports)
    raise LoadFailed(shown, damaged, any(report.changed for report in reports), text) from error


class _Report(NamedTuple):
    """The outcome on one rank; without text if it succeeded."""

    text: str
    details: str
    damaged: bool
    changed: bool


def _report(error: Exception | None, changes: bool) -> _Report:
    if error is None:
        return _Report("", "", damaged=True, changed=changes)
    import checkpoint_io

    torn = isinstance(error, checkpoint_io.TornLoadError)
    # The mixture that a torn load leaves is none any more when an older checkpoint is loaded.
    reason = error.__cause__ if torn and error.__cause__ is not None else error
    # the checkpoint is at fault then, unlike where a network is down
    damage = (checkpoint_io.CorruptCheckpointError, FileNotFoundError)
    return _Report(
        text=f"{type(reason).__name__}: {reason}",
        details=published_text(error),
        damaged=isinstance(reason, damage),
        changed=changes and torn,
    )


def open_one(url: str, storage_options: Mapping[str, Any] | None = None) -> CheckpointReader:
    """Collective: open the checkpoint at a URL, the same one on all ranks.

    Raises:
        LoadFailed: a rank cannot open it.
    """
    import checkpoint_io

    def read() -> CheckpointReader:
        try:
            return checkpoint_io.open_checkpoint(
                url, rank=collectives.rank(), storage_options=storage_options
            )
        except checkpoint_io.CheckpointNotFoundError as error:
            kind = describe_foreign(url, storage_options)
            if kind is None:
                raise
            raise checkpoint_io.CheckpointNotFoundError(f"{url} {kind}.") from error

    return same_for_all(together(f"reading {url}", read))


def open_newest(folder: CheckpointFolder, skip: Collection[str] = ()) -> CheckpointReader | None:
    """Collective: open the newest checkpoint of a folder that opens on every rank.

    Args:
        folder: from :func:`open_folder`.
        skip: paths that were tried before.

    Raises:
        checkpoint_io.CorruptCheckpointError: all checkpoints are damaged.
    """
    import checkpoint_io

    try:
        return same_for_all(folder.open_latest(group=process_group(), skip=skip))
    except checkpoint_io.CheckpointNotFoundError:
        if not skip:
            return None
        raise checkpoint_io.CorruptCheckpointError(
            f"no valid checkpoint in {folder.url}: all are damaged, as reported for each."
        ) from None


def same_for_all(reader: CheckpointReader) -> CheckpointReader:
    """Collective: raise if a save replaced the checkpoint while the ranks opened it.

    Raises:
        LoadFailed: the ranks have opened different ones.
    """
    ids = collectives.all_objects(reader.manifest.id, operation="reading a checkpoint")

    def check() -> CheckpointReader:
        import checkpoint_io

        if reader.manifest.id != ids[0]:
            raise checkpoint_io.CorruptCheckpointError(
                f"{reader.path} was replaced while the processes opened it: load it again."
            )
        return reader

    return reader if len(set(ids)) == 1 else together(f"reading {reader.path}", check)


def describe_foreign(url: str, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Describe a folder that holds no checkpoint of ours, with advice; None if it is unknown."""
    names = _names_in(url, storage_options)
    if names is None:
        return "is a file: give the folder of the checkpoint"
    return next((_ADVICE[kind] for marks, kind in _KINDS if names & set(marks)), None)


def describe_foreign_folder(root: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """Describe the newest folder of a folder, by name, as a sentence; empty if it is unknown."""
    names = _names_in(root, storage_options) or ()
    # checkpoint_10 comes after checkpoint_9
    by_number = sorted(names, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(20), name))
    for name in by_number[: -_MOST_FOLDERS - 1 : -1]:
        if kind := describe_foreign(f"{root.rstrip('/')}/{name}", storage_options):
            return f" {name} {kind}."
    return ""


def _names_in(url: str, storage_options: Mapping[str, Any] | None) -> set[str] | None:
    """Return the names in a folder, none if it cannot be listed; None if it is a file."""
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url, **(storage_options or {}))
        if filesystem.isfile(path):
            return None
        listed: Iterable[Any] = filesystem.ls(path, detail=False)
        return {posixpath.basename(str(name).rstrip("/")) for name in listed}
    except Exception:
        # Each store's driver has errors of its own, and this is only for advice.
        return set()
