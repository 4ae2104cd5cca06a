"""A checkpoint, put back into the prepared objects on all processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from accel_callbacks.attempts import LoadFailed, together
from accel_callbacks.checkpoint.open import open_newest, open_one
from accel_callbacks.checkpoint.project import number_of
from accel_callbacks.checkpoint.restore import LoadOptions, Ready, make_ready, read_content
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.putting_back import put_back

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import CheckpointReader

__all__ = ["LoadOptions", "restore_from", "restore_newest"]

_WHERE = "load_state"


def restore_from(accel: Accelerator, url: str, options: LoadOptions) -> str:
    """Collective: restore the checkpoint at a place; returns its path.

    Raises:
        ResumeError: it does not fit (nothing was changed), or is not exact and strict.
        checkpoint_io.CheckpointError: it is missing or damaged.
        RemoteError: another process failed.
    """
    accel.loop.saves.wait()
    try:
        return _load_steady(accel, open_one(url, options.storage_options), url, options)
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__


def restore_newest(
    accel: Accelerator, root: str, options: LoadOptions, skip: Iterable[str] = ()
) -> str | None:
    """Collective: restore the newest checkpoint of a folder that is whole; None if it has none.

    One that turns out to be damaged, even half-way, is passed over with a warning. Those in
    ``skip`` are not tried.

    Raises:
        ResumeError: it does not fit, or is not exact and strict.
        checkpoint_io.CorruptCheckpointError: there are some, and all are damaged.
        RemoteError: another process failed.
    """
    accel.loop.saves.wait()
    tried = list(skip)
    try:
        while (reader := open_newest(root, options.storage_options, tried)) is not None:
            try:
                return _load_steady(accel, reader, reader.path, options)
            except LoadFailed as failed:
                if not failed.damaged:
                    raise
                tried.append(reader.path)
                _warn_of(reader.path, failed)
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__
    return None


def _warn_of(path: str, failed: LoadFailed) -> None:
    import checkpoint_io

    text = f"passed over {path}: {failed}"
    warnings.warn(text, checkpoint_io.CheckpointWarning, stacklevel=4)


def _load_steady(
    accel: Accelerator, reader: CheckpointReader, url: str, options: LoadOptions
) -> str:
    """Load, and once more where a save has replaced the checkpoint while it was read."""
    try:
        return _load(accel, reader, options)
    except LoadFailed as failed:
        newer = None if failed.changed or not failed.damaged else _newer(reader, url, options)
        if newer is None:
            raise
        return _load(accel, newer, options)


def _newer(reader: CheckpointReader, url: str, options: LoadOptions) -> CheckpointReader | None:
    """Collective: what has taken the place of a checkpoint, if something has."""
    try:
        found = open_one(url, options.storage_options)
    except LoadFailed:
        return None
    return None if found.manifest.id == reader.manifest.id else found


def _load(accel: Accelerator, reader: CheckpointReader, options: LoadOptions) -> str:
    """Read what is small, check that all fits, read the rest in place, hand it out.

    Raises:
        LoadFailed: some process could not read something.
    """
    content = together(_WHERE, partial(read_content, accel, reader, options))
    with accel.registered.all_or_nothing():
        with shared_failure(_WHERE):
            ready = make_ready(accel, reader, content, options)
        _fill(accel, ready, options.progress)
    with shared_failure(_WHERE):
        put_back(accel, ready, options.selection)
    accel.loop.half_loaded = None
    accel.load_report = ready.report
    accel.project_configuration.count_from(number_of(reader.path))
    return reader.path


def _fill(accel: Accelerator, ready: Ready, progress: bool | None) -> None:
    """Read into the memory of models and optimizers; a failure leaves the run unable to step."""
    before = accel.loop.half_loaded
    accel.loop.half_loaded = ready.report.path
    try:
        together(_WHERE, partial(ready.filling.run, progress), changes=ready.filling.changes)
    except LoadFailed as failed:
        if not failed.changed:
            accel.loop.half_loaded = before
        raise
