"""Removing what ``trainer.save_checkpoint`` wrote: of this run, and no other file."""

from __future__ import annotations

import warnings

from accel_callbacks._siblings import require_neighbour

__all__ = ["remove_saved"]

_WEIGHTS = ("model", ".safetensors", "model.safetensors.index.json")


def remove_saved(path: str, run_id: str) -> None:
    """Remove the checkpoint (or the saved weights) at a path, if this run wrote it.

    A checkpoint of another run stays, with a warning. Where there is nothing, nothing happens.

    Example:
        >>> import checkpoint_io
        >>> from accel_callbacks.callbacks.adapters.removal import remove_saved
        >>> _ = checkpoint_io.save("memory://doc-removal/a.ckpt", {}, metadata={"run_id": "r1"})
        >>> remove_saved("memory://doc-removal/a.ckpt", "r1")
        >>> checkpoint_io.CheckpointFolder("memory://doc-removal").latest() is None
        True
    """
    require_neighbour("checkpoint_io")
    from checkpoint_io import CheckpointError, read_manifest
    from checkpoint_io.folder.removal import remove_checkpoint
    from checkpoint_io.storage.open import open_store

    store = open_store(path, {})
    present = set(store.sizes())
    if not present:
        return
    if all(_is_weights(name) for name in present):
        store.remove_many(sorted(present))
        store.remove_folder()
        return
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        warnings.warn(f"{path} was not removed: {error}", stacklevel=2)
        return
    if manifest.metadata.get("run_id") != run_id:
        warnings.warn(f"{path} was not removed: another run wrote it", stacklevel=2)
        return
    with store.lock():
        remove_checkpoint(store, manifest)


def _is_weights(name: str) -> bool:
    first, last, index = _WEIGHTS
    return name == index or (name.startswith(first) and name.endswith(last))
