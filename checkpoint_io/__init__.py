"""Crash-safe checkpoints: sharded safetensors and JSON on any fsspec URL, without pickle.

A checkpoint exists once its manifest does, and not before; everything that is loaded is verified.

Example:
    >>> import torch, checkpoint_io
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = checkpoint_io.save("memory://doc-init/step-1", {"model": model.state_dict()})
    >>> sorted(checkpoint_io.load("memory://doc-init/step-1").state["model"])
    ['bias', 'weight']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Imported on first use: other packages take `local_files` and `warning` from here without torch.
_NAMES = {
    "async_save.background": ("BackgroundSaver", "SaveHandle"),
    "errors": (
        *("CheckpointConflictError", "CheckpointError", "CheckpointNotFoundError"),
        *("CheckpointWarning", "CorruptCheckpointError", "LeaseError", "ManifestVersionError"),
        *("StateMismatchError", "TornLoadError", "UnsupportedStateError"),
    ),
    "folder.discovery": ("CheckpointInfo", "FolderEntry"),
    "folder.folder": ("CheckpointFolder",),
    "folder.retention": ("KeepPolicy", "any_of", "keep_best", "keep_every", "keep_last"),
    "format.manifest": ("Chunk", "FileEntry", "Manifest", "TensorEntry"),
    "group": ("ProcessGroupLike", "SingleProcess", "TorchGroup"),
    "loader.lazy": ("CheckpointReader", "TensorView", "open_checkpoint"),
    "loader.load": ("Checkpoint", "load", "read_manifest"),
    "loader.verify": ("verify",),
    "progress": ("TransferProgress",),
    "saver.save": ("SaveJob", "prepare_save", "save"),
    "storage.lease": ("Lease", "LeaseHolder"),
    "weights.load": ("LoadReport", "load_model", "load_model_state"),
    "weights.save": ("save_model",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_ROOMS = {module.partition(".")[0] for module in _NAMES}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from checkpoint_io.async_save.background import BackgroundSaver as BackgroundSaver
    from checkpoint_io.async_save.background import SaveHandle as SaveHandle
    from checkpoint_io.errors import CheckpointConflictError as CheckpointConflictError
    from checkpoint_io.errors import CheckpointError as CheckpointError
    from checkpoint_io.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from checkpoint_io.errors import CheckpointWarning as CheckpointWarning
    from checkpoint_io.errors import CorruptCheckpointError as CorruptCheckpointError
    from checkpoint_io.errors import LeaseError as LeaseError
    from checkpoint_io.errors import ManifestVersionError as ManifestVersionError
    from checkpoint_io.errors import StateMismatchError as StateMismatchError
    from checkpoint_io.errors import TornLoadError as TornLoadError
    from checkpoint_io.errors import UnsupportedStateError as UnsupportedStateError
    from checkpoint_io.folder.discovery import CheckpointInfo as CheckpointInfo
    from checkpoint_io.folder.discovery import FolderEntry as FolderEntry
    from checkpoint_io.folder.folder import CheckpointFolder as CheckpointFolder
    from checkpoint_io.folder.retention import KeepPolicy as KeepPolicy
    from checkpoint_io.folder.retention import any_of as any_of
    from checkpoint_io.folder.retention import keep_best as keep_best
    from checkpoint_io.folder.retention import keep_every as keep_every
    from checkpoint_io.folder.retention import keep_last as keep_last
    from checkpoint_io.format.manifest import Chunk as Chunk
    from checkpoint_io.format.manifest import FileEntry as FileEntry
    from checkpoint_io.format.manifest import Manifest as Manifest
    from checkpoint_io.format.manifest import TensorEntry as TensorEntry
    from checkpoint_io.group import ProcessGroupLike as ProcessGroupLike
    from checkpoint_io.group import SingleProcess as SingleProcess
    from checkpoint_io.group import TorchGroup as TorchGroup
    from checkpoint_io.loader.lazy import CheckpointReader as CheckpointReader
    from checkpoint_io.loader.lazy import TensorView as TensorView
    from checkpoint_io.loader.lazy import open_checkpoint as open_checkpoint
    from checkpoint_io.loader.load import Checkpoint as Checkpoint
    from checkpoint_io.loader.load import load as load
    from checkpoint_io.loader.load import read_manifest as read_manifest
    from checkpoint_io.loader.verify import verify as verify
    from checkpoint_io.progress import TransferProgress as TransferProgress
    from checkpoint_io.saver.save import SaveJob as SaveJob
    from checkpoint_io.saver.save import prepare_save as prepare_save
    from checkpoint_io.saver.save import save as save
    from checkpoint_io.storage.lease import Lease as Lease
    from checkpoint_io.storage.lease import LeaseHolder as LeaseHolder
    from checkpoint_io.weights.load import LoadReport as LoadReport
    from checkpoint_io.weights.load import load_model as load_model
    from checkpoint_io.weights.load import load_model_state as load_model_state
    from checkpoint_io.weights.save import save_model as save_model


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
