"""Finding and opening checkpoints with all processes, before anything of them is used."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbour
from accel_callbacks.attempts import together
from accel_callbacks.checkpoint.training_state import open_folder, process_group

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader

__all__ = ["describe_foreign", "describe_foreign_folder", "open_newest", "open_one"]

_KINDS = (  # files that tell what a folder is, and what that is called
    (("optimizer.bin", "scheduler.bin", "random_states_0.pkl"), "accelerate"),
    ((".metadata",), "torch"),
    (("model.safetensors", "model.safetensors.index.json"), "weights"),
    (("pytorch_model.bin", "pytorch_model.bin.index.json"), "weights"),
)
_LOOKED_AT = 3
_ADVICE = {
    "accelerate": "was saved by Hugging Face Accelerate, whose optimizer and random states are "
    "pickles and are not read: load_checkpoint_in_model(model, path) takes the weights, and "
    "save_state() makes a checkpoint of the run from there on",
    "torch": "was saved by torch.distributed.checkpoint, whose metadata are a pickle and are not "
    "read: load it with torch, then save_state()",
    "weights": "holds the weights of a model and no training state: "
    "load_checkpoint_in_model(model, path) loads them",
}


def open_one(url: str, storage_options: Mapping[str, Any] | None = None) -> CheckpointReader:
    """Collective: the checkpoint at a place, the same one for all processes.

    Raises:
        LoadFailed: a process cannot open it.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.open import open_one
        >>> path = Accelerator(cpu=True).save_state("memory://doc-reading/c")
        >>> open_one(path).state["run"]["global_step"]
        0
    """
    require_neighbour("checkpoint_io")
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


def open_newest(
    root: str, storage_options: Mapping[str, Any] | None = None, skip: Collection[str] = ()
) -> CheckpointReader | None:
    """Collective: the newest checkpoint under ``root`` that opens on every process.

    Args:
        root: the folder of checkpoints.
        storage_options: for the filesystem behind it.
        skip: paths that were tried already.

    Raises:
        checkpoint_io.CorruptCheckpointError: there are checkpoints, and all are damaged.

    Example:
        >>> from accel_callbacks.checkpoint.open import open_newest
        >>> open_newest("memory://doc-reading/nothing") is None
        True
    """
    folder = open_folder(root, storage_options)
    import checkpoint_io

    try:
        return same_for_all(folder.open_latest(group=process_group(), skip=skip))
    except checkpoint_io.CheckpointNotFoundError:
        if not skip:
            return None
        raise checkpoint_io.CorruptCheckpointError(
            f"no valid checkpoint in {root}: all are damaged; the warnings say how."
        ) from None


def same_for_all(reader: CheckpointReader) -> CheckpointReader:
    """Collective: refuse a checkpoint that a save replaced between the looks of two processes.

    Raises:
        LoadFailed: the processes have opened different ones.
    """
    first = collectives.broadcast_object(reader.manifest.id)

    def check() -> CheckpointReader:
        import checkpoint_io

        if reader.manifest.id != first:
            raise checkpoint_io.CorruptCheckpointError(
                f"{reader.path} was replaced while the processes opened it: load it again."
            )
        return reader

    return together(f"reading {reader.path}", check)


def describe_foreign(url: str, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """What a folder is that is none of our checkpoints, and what to do with it; None if unknown.

    Example:
        >>> import pathlib, tempfile
        >>> from accel_callbacks.checkpoint.open import describe_foreign
        >>> folder = tempfile.mkdtemp()
        >>> _ = pathlib.Path(folder, "optimizer.bin").write_bytes(b"")
        >>> describe_foreign(folder).partition(",")[0]
        'was saved by Hugging Face Accelerate'
    """
    names = _names_in(url, storage_options)
    if names is None:
        return "is a file: give the folder of the checkpoint"
    return next((_ADVICE[kind] for marks, kind in _KINDS if names & set(marks)), None)


def describe_foreign_folder(root: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """The same for the newest by name of the folders in a folder, as a sentence; empty if unknown.

    Example:
        >>> from accel_callbacks.checkpoint.open import describe_foreign_folder
        >>> describe_foreign_folder("memory://doc-reading/nothing")
        ''
    """
    for name in sorted(_names_in(root, storage_options) or (), reverse=True)[:_LOOKED_AT]:
        if kind := describe_foreign(f"{root.rstrip('/')}/{name}", storage_options):
            return f" {name} {kind}."
    return ""


def _names_in(url: str, storage_options: Mapping[str, Any] | None) -> set[str] | None:
    """The names in a folder, none where it cannot be listed; None if it is a file."""
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url, **(storage_options or {}))
        if filesystem.isfile(path):
            return None
        listed: Iterable[Any] = filesystem.ls(path, detail=False)
        return {posixpath.basename(str(name).rstrip("/")) for name in listed}
    except Exception:  # each store's driver has errors of its own, and this is only for advice
        return set()
