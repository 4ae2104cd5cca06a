"""Roll back weights and optimizer states to a checkpoint, but not the position in the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_callbacks import collectives
from accel_callbacks.checkpoint.open import LoadFailed, open_folder, open_one, together
from accel_callbacks.checkpoint.restore import LoadOptions, restore_newest
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.distributed.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointReader

__all__ = ["RolledBack", "roll_back", "save_is_due"]

_WHERE = "a rollback"


class RolledBack(NamedTuple):
    """The result of a rollback.

    Args:
        path: the restored checkpoint, ``None`` if there was none.
        avoided: ids of the checkpoints that were skipped.
    """

    path: str | None
    avoided: list[str]


def roll_back(
    training: TrainingState, *, newest_step: int, avoid: Collection[str] = ()
) -> RolledBack:
    """Restore the weights from the newest checkpoint of a callback that saves.

    Collective; call it between two steps. Models, optimizer states, the loss scaler, registered
    objects, and callbacks whose ``rolls_back`` is True are restored. The run, its loaders and
    schedulers, and the options of the parameter groups (learning rates) are kept.

    Args:
        accel: the Accelerator of the run.
        newest_step: skip checkpoints of later steps.
        avoid: ids of further checkpoints to skip.

    Raises:
        ResumeError: the checkpoint does not fit.
        checkpoint_io.CheckpointError: all checkpoints are damaged, or a save in progress failed.
        RemoteError: another rank failed.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import Checkpoint
        >>> from accel_callbacks.callbacks.rollback import roll_back
        >>> accel = Accelerator(cpu=True, callbacks=[Checkpoint("memory://doc-rollback")])
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> _ = accel.save_state("memory://doc-rollback/step-00000000")
        >>> before = model.weight.item()
        >>> _ = torch.nn.init.constant_(model.weight, torch.nan)
        >>> roll_back(accel.training_state, newest_step=0).path, model.weight.item() == before
        ('memory://doc-rollback/step-00000000', True)
    """
    training.loop.saves.wait()
    avoided: list[str] = []
    for saver in training.loop.savers:
        root, storage_options = saver.resume_root(training.loop.run)
        candidates = _find_candidates(root, storage_options, newest_step, avoid)
        avoided += candidates.skipped_ids
        if candidates.usable:
            path = _restore(training, root, storage_options, candidates.skipped_paths)
            if path is not None:
                return RolledBack(path, avoided)
    return RolledBack(None, avoided)


def save_is_due(run: TrainingRun) -> bool:
    """Return whether a Checkpoint's schedule saves this step; ``run.save_now`` is not foreseen."""
    savers = getattr(run, "checkpoint_callbacks", ())  # a foreign trainer has none
    schedules = (getattr(saver, "schedule", None) for saver in savers)
    return any(one.step_is_due(run.global_step) for one in schedules if one is not None)


class _Candidates(NamedTuple):
    usable: int
    skipped_paths: list[str]
    skipped_ids: list[str]


def _find_candidates(
    root: str, storage_options: Mapping[str, Any] | None, newest_step: int, avoid: Collection[str]
) -> _Candidates:
    """Find the checkpoints that may be restored, on the main process. Collective."""
    found = _Candidates(0, [], [])
    with shared_failure(_WHERE):
        if collectives.rank() == 0:
            infos = open_folder(root, storage_options).list()
            skipped = [
                info
                for info in infos
                if info.manifest.id in avoid or info.manifest.metadata.get("step", 0) > newest_step
            ]
            paths, ids = [info.path for info in skipped], [info.manifest.id for info in skipped]
            found = _Candidates(len(infos) - len(skipped), paths, ids)
    return collectives.broadcast_object(found)


def _restore(
    training: TrainingState,
    root: str,
    storage_options: Mapping[str, Any] | None,
    skip: Collection[str],
) -> str | None:
    sections = ["models", "precision"]
    sections += ["optimizers"] if training.optimizers else []
    sections += ["registered"] if training.registered.names else []
    kept = [{**group} for group in _param_groups(training)]
    options = LoadOptions(Selection(sections), storage_options=storage_options)
    path = restore_newest(training, root, options, skip)
    if path is None:
        return None
    # Loading has replaced the group dicts; give the new ones the learning rates of before.
    for group, before in zip(_param_groups(training), kept, strict=True):
        group.update({name: value for name, value in before.items() if name != "params"})
    try:
        _restore_callbacks(training, open_one(path, storage_options))
    except LoadFailed as failed:
        raise failed.error from failed.error.__cause__
    return path


def _param_groups(training: TrainingState) -> list[dict[str, Any]]:
    return [group for one in training.optimizers for group in one.param_groups]


def _restore_callbacks(training: TrainingState, reader: CheckpointReader) -> None:
    """Restore the callbacks whose states are derived from weights."""
    saved = reader.state["callbacks"]
    chosen = {
        entry.key: entry.callback
        for entry in training.loop.dispatch.entries
        if getattr(entry.callback, "rolls_back", False) and entry.key in saved
    }
    read = partial(reader.load_tree, {key: saved[key] for key in chosen})
    states: dict[str, Any] = together(_WHERE, read)
    with shared_failure(_WHERE):
        for key, callback in chosen.items():
            callback.load_state_dict(states[key])
