"""Checkpoints that cannot be lost: sharded safetensors and JSON on any fsspec URL, no pickle.

A checkpoint exists when its manifest does, and not before; what is loaded has been verified.

Example:
    >>> import torch, checkpoint_io
    >>> model = torch.nn.Linear(2, 1)
    >>> _ = checkpoint_io.save("memory://doc-init/step-1", {"model": model.state_dict()})
    >>> sorted(checkpoint_io.load("memory://doc-init/step-1").state["model"])
    ['bias', 'weight']
"""

from checkpoint_io.commit import save
from checkpoint_io.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    ManifestVersionError,
    UnsupportedStateError,
)
from checkpoint_io.folder import CheckpointFolder, CheckpointInfo
from checkpoint_io.group import ProcessGroupLike, SingleProcess, TorchGroup
from checkpoint_io.hf import load_model_state, save_model
from checkpoint_io.manifest import Chunk, FileEntry, Manifest, TensorEntry
from checkpoint_io.reader import Checkpoint, load, read_manifest, verify
from checkpoint_io.retention import KeepPolicy, keep_last

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointWarning",
    "Chunk",
    "CorruptCheckpointError",
    "FileEntry",
    "KeepPolicy",
    "Manifest",
    "ManifestVersionError",
    "ProcessGroupLike",
    "SingleProcess",
    "TensorEntry",
    "TorchGroup",
    "UnsupportedStateError",
    "keep_last",
    "load",
    "load_model_state",
    "read_manifest",
    "save",
    "save_model",
    "verify",
]
