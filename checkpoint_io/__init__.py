"""Crash-safe checkpoints: sharded safetensors and JSON on any fsspec URL, without pickle.

A checkpoint exists once its manifest does, and not before; everything that is loaded is verified.

Example:
    >>> import torch, checkpoint_io
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = checkpoint_io.save("memory://doc-init/step-1", {"model": model.state_dict()})
    >>> sorted(checkpoint_io.load("memory://doc-init/step-1").state["model"])
    ['bias', 'weight']
"""

from checkpoint_io.async_save.background import BackgroundSaver, SaveHandle
from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    LeaseError,
    ManifestVersionError,
    StateMismatchError,
    TornLoadError,
    UnsupportedStateError,
)
from checkpoint_io.folder.discovery import CheckpointInfo, FolderEntry
from checkpoint_io.folder.folder import CheckpointFolder
from checkpoint_io.folder.retention import KeepPolicy, any_of, keep_best, keep_every, keep_last
from checkpoint_io.format.manifest import Chunk, FileEntry, Manifest, TensorEntry
from checkpoint_io.group import ProcessGroupLike, SingleProcess, TorchGroup
from checkpoint_io.loader.lazy import CheckpointReader, TensorView, open_checkpoint
from checkpoint_io.loader.load import Checkpoint, load, read_manifest
from checkpoint_io.loader.verify import verify
from checkpoint_io.progress import TransferProgress
from checkpoint_io.saver.save import SaveJob, prepare_save, save
from checkpoint_io.storage.lease import Lease, LeaseHolder
from checkpoint_io.weights.load import LoadReport, load_model, load_model_state
from checkpoint_io.weights.save import save_model

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointReader",
    "CheckpointWarning",
    "Chunk",
    "CorruptCheckpointError",
    "FileEntry",
    "FolderEntry",
    "KeepPolicy",
    "Lease",
    "LeaseError",
    "LeaseHolder",
    "LoadReport",
    "Manifest",
    "ManifestVersionError",
    "ProcessGroupLike",
    "SaveHandle",
    "SaveJob",
    "SingleProcess",
    "StateMismatchError",
    "TensorEntry",
    "TensorView",
    "TorchGroup",
    "TornLoadError",
    "TransferProgress",
    "UnsupportedStateError",
    "any_of",
    "keep_best",
    "keep_every",
    "keep_last",
    "load",
    "load_model",
    "load_model_state",
    "open_checkpoint",
    "prepare_save",
    "read_manifest",
    "save",
    "save_model",
    "verify",
]
