"""Write weights that no file has yet to a folder, once, as safetensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress

import torch

from accel_callbacks.models.offload.source import StoredWeights

__all__ = ["Spill", "spill"]

_NO_LIMIT = 1 << 62  # bytes of a file


class Spill:
    """Write groups of weights into a new folder, which is named after its content.

    Another model, or other weights of the same one, get another folder; the same weights are
    stored once. The folder has its name when all of it is there.

    Args:
        folder: where that folder is made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        import xxhash

        from checkpoint_io.format.names import new_save_id

        self._folder = os.path.abspath(folder)
        self._temporary = f"weights-{new_save_id()}.tmp"
        self._digest = xxhash.xxh3_128()
        self._names: set[str] = set()
        self._count = 0

    def note(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Add a group to the digest that names the folder."""
        from checkpoint_io.format.safetensors import host_pieces

        self._names.update(weights)
        for name, tensor in weights.items():
            self._digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            for piece in host_pieces(tensor.detach()):
                self._digest.update(piece)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a group of weights to a file."""
        self.note(weights)
        self._write(weights)

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        import checkpoint_io

        group = os.path.join(self._folder, self._temporary, f"{self._count:05d}")
        checkpoint_io.save_model(
            {name: tensor.detach() for name, tensor in weights.items()},
            group,
            max_shard_size=_NO_LIMIT,
            progress=False,
        )
        self._count += 1

    def existing(self) -> StoredWeights | None:
        """Return the noted weights, if they were written before."""
        from checkpoint_io import CheckpointError

        target = os.path.join(self._folder, self._target)
        try:
            groups = sorted(os.listdir(target))
            stored = [StoredWeights.of_checkpoint(os.path.join(target, group)) for group in groups]
        except (OSError, CheckpointError, ValueError):
            return None
        tensors = {name: entry for group in stored for name, entry in group.tensors.items()}
        if self._names - tensors.keys():
            return None
        return StoredWeights(
            tensors,
            {path: identity for group in stored for path, identity in group.identities.items()},
        )

    @property
    def _target(self) -> str:
        return f"weights-{self._digest.hexdigest()}"

    def finish(self) -> StoredWeights:
        """Rename the folder to its digest; return its weights."""
        from checkpoint_io.storage.local import LocalStore

        if (stored := self.existing()) is not None:
            self.discard()
            return stored
        target = os.path.join(self._folder, self._target)
        shutil.rmtree(target, ignore_errors=True)  # damaged
        try:
            LocalStore(self._folder).rename(self._temporary, self._target)
        except OSError:  # another process has written the same
            if (stored := self.existing()) is not None:
                self.discard()
                return stored
            raise
        stored = self.existing()
        assert stored is not None
        return stored

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            shutil.rmtree(os.path.join(self._folder, self._temporary))


def spill(weights: Mapping[str, torch.Tensor], folder: str | os.PathLike[str]) -> StoredWeights:
    """Write weights into a folder, unless it has the same ones; return their places.

    Args:
        weights: by name; a tensor with two names is stored once.
        folder: where a folder for them is made.

    Raises:
        OSError: they cannot be written.
    """
    if not weights:
        return StoredWeights({})
    written = Spill(folder)
    written.note(weights)
    if (stored := written.existing()) is not None:
        return stored
    try:
        written._write(weights)
        return written.finish()
    except BaseException:
        written.discard()
        raise
