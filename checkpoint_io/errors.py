"""Exceptions and warnings; every message states the problem and the next step."""

from __future__ import annotations

__all__ = [
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointWarning",
    "CorruptCheckpointError",
    "LeaseError",
    "ManifestVersionError",
    "StateMismatchError",
    "TornLoadError",
    "UnsupportedStateError",
]


class CheckpointError(Exception):
    """Base of every error that this package raises about a checkpoint.

    Example:
        >>> from checkpoint_io import CheckpointError, CorruptCheckpointError
        >>> issubclass(CorruptCheckpointError, CheckpointError)
        True
    """


class CorruptCheckpointError(CheckpointError):
    """A checkpoint exists, but its bytes are not the ones that were saved.

    The message names the file and, if known, the tensors in the damaged part. Load an older
    checkpoint (`CheckpointFolder.load_latest` does so by itself) or copy the file again.

    Example:
        >>> from checkpoint_io import CorruptCheckpointError
        >>> raise CorruptCheckpointError("tensors-....safetensors: part 0 differs")
        Traceback (most recent call last):
        ...
        checkpoint_io.errors.CorruptCheckpointError: tensors-....safetensors: part 0 differs
    """


class TornLoadError(CorruptCheckpointError):
    """A load failed after it had begun to write into the caller's tensors.

    They now hold a mixture of old and new values: load a good checkpoint into them before they are
    used. The original error is the cause (`__cause__`).

    Example:
        >>> from checkpoint_io import CorruptCheckpointError, TornLoadError
        >>> issubclass(TornLoadError, CorruptCheckpointError)
        True
    """


class StateMismatchError(CheckpointError, ValueError):
    """An intact checkpoint does not match the load target in names, shapes or dtypes.

    Raised before anything is changed.

    Example:
        >>> import torch
        >>> from checkpoint_io import StateMismatchError, load, save
        >>> _ = save("memory://doc-errors/fit", {"w": torch.ones(2)})
        >>> try:
        ...     load("memory://doc-errors/fit", into={"w": torch.zeros(3)})
        ... except StateMismatchError as error:
        ...     print("(2,)" in str(error) and "(3,)" in str(error))
        True
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint (no `manifest.json`) at a URL.

    Example:
        >>> from checkpoint_io import CheckpointNotFoundError, load
        >>> try:
        ...     load("memory://doc-errors/nothing-here")
        ... except CheckpointNotFoundError as error:
        ...     print("not found")
        not found
    """


class UnsettledWriteError(CheckpointError):
    """A write request was sent and never answered, so it may still take effect."""


class UnsupportedStateError(CheckpointError, TypeError):
    """The state holds an object that is neither a tensor nor in the closed set of JSON types.

    Raised at save time, before anything is committed. The message names the type of the object and
    its path in the state.

    Example:
        >>> from checkpoint_io import UnsupportedStateError, save
        >>> try:
        ...     save("memory://doc-errors/bad", {"when": object()})
        ... except UnsupportedStateError as error:
        ...     print("state['when']" in str(error))
        True
    """


class CheckpointConflictError(CheckpointError):
    """Another save is writing, or has just written, to the same URL; nothing was mixed.

    Give each job its own folder, or wait for the other one.

    Example:
        >>> from checkpoint_io import CheckpointConflictError, CheckpointError
        >>> issubclass(CheckpointConflictError, CheckpointError)
        True
    """


class LeaseError(CheckpointConflictError):
    """Another process holds the lease of a folder, or may: its record cannot be read or taken.

    The message names the process, or the record. Give each run a folder of its own, wait for the
    end of the other one, or remove the record once no other process writes there.

    Example:
        >>> from checkpoint_io import CheckpointConflictError, LeaseError
        >>> issubclass(LeaseError, CheckpointConflictError)
        True
    """


class ManifestVersionError(CheckpointError):
    """The checkpoint has a format version that this package does not read.

    Example:
        >>> from checkpoint_io import CheckpointError, ManifestVersionError
        >>> issubclass(ManifestVersionError, CheckpointError)
        True
    """


class CheckpointWarning(UserWarning):
    """Something was skipped or could not be cleaned up; no checkpoint was damaged.

    Example:
        >>> import warnings
        >>> from checkpoint_io import CheckpointWarning
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", CheckpointWarning)  # a skip now raises
    """
