"""Restore a training state: open, check that it fits, read in place, apply."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_callbacks.checkpoint.compatibility import chosen_indices, naming_checkpoint
from accel_callbacks.checkpoint.open import (
    LoadFailed,
    open_folder,
    open_newest,
    open_one,
    process_group,
    together,
    unwrapped_failure,
)
from accel_callbacks.checkpoint.part import Load, LoadOptions, RestoreReport
from accel_callbacks.checkpoint.project import number_of
from accel_callbacks.checkpoint.selection import all_keys
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import ResumeError
from accel_callbacks.logging import notice
from accel_callbacks.loop.step_state import StepState

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder, CheckpointReader

__all__ = ["find", "restore_from", "restore_newest", "training_state_in"]

_WHERE = "load_state"


def _divide(training: TrainingState, load: Load) -> None:
    """Decide which parts are read first, and which are read in place; read no tensors.

    Raises:
        ResumeError: the checkpoint holds no training state.
    """
    sections = [part.name for part in training.parts if part.always_saved]
    load.state = training_state_in(load.reader, sections, "checkpoint_io.load reads it.")
    load.selected = load.options.selection.apply(load.state)
    load.first = dict(load.state)
    # hooks are given tensors, which they may change
    hooks = training.loop.dispatch.hooks["on_load_checkpoint"]
    load.lazy = not (training.pre_hooks.load_some or hooks)
    for part in training.parts:
        part.plan(load)


def training_state_in(
    reader: CheckpointReader, sections: Iterable[str], advice: str
) -> dict[str, Any]:
    """Return the shared state of a checkpoint with views.

    Raises:
        ResumeError: one of these sections is not in it.
    """
    state: dict[str, Any] = dict(reader.state)
    if missing := [name for name in sections if name not in state]:
        raise ResumeError(
            f"{reader.path} holds no {missing[0]!r}: it was not written by save_state(). {advice}"
        )
    return state


def _read_first(training: TrainingState, load: Load) -> None:
    """Verify the checkpoint, and read all that is not read in place.

    Raises:
        checkpoint_io.CheckpointError: it is damaged.
    """
    from checkpoint_io.loader import views_in

    if not load.verifies_all:
        _divide(training, load)  # else all ranks have done so, before the collective of the check
    first = {"state": load.first, "local": load.reader.local_state}
    load.reader.check(
        load.verifies_all,
        keys={view.key for view in views_in([load.in_place, first])},
        progress=load.options.progress if load.verifies_all else False,
        group=process_group(),
        pairs=load.pairs,
    )
    tensors = load.reader.load_tree(first)
    load.state |= tensors["state"]
    load.local = tensors["local"]
    for part in training.parts:
        part.read(load)


def _fit(training: TrainingState, load: Load) -> None:
    """Check that all fits, and load what may refuse the load: hooks and registered objects.

    Raises:
        ResumeError: it does not fit, or the resume is not exact and ``strict``.
    """
    selection = load.options.selection
    names = [part.name for part in training.parts]
    selection.check((*all_keys(load.state), *names))
    load.selected = selection.apply(load.state)
    for part in training.parts:
        if part.prepared is not None:
            load.indices[part.name] = chosen_indices(
                load.selected, part.name, part.prepared, selection
            )
    # All of them, before a hook or an object of the user sees anything of the load.
    for part in training.parts:
        part.check(load)
    if not load.lazy:
        _call_hooks(training, load)
        # Hooks may have edited the state.
        load.selected = selection.apply(load.state)
        load.report = RestoreReport(load.reader.path)
    for part in training.parts:
        part.place(load)


def _call_hooks(training: TrainingState, load: Load) -> None:
    """Call the hooks of a load, which may edit the state, or load models by themselves."""
    if training.pre_hooks.load_some and load.indices["models"]:
        left = {id(model) for model in training.pre_hooks.load(training.models, load.reader.path)}
        indices = [i for i in load.indices["models"] if id(training.models[i]) in left]
        load.indices["models"] = indices
    if load.takes("callbacks"):
        training.loop.fire("on_load_checkpoint", load.state)


def _read_in_place(step: StepState, load: Load) -> None:
    """Read into the memory of models and optimizers; after a failure the run refuses to step."""
    # Set before the first byte: an interrupt leaves a mixture as an error does.
    before = step.half_loaded
    step.set_half_loaded(load.reader.path)
    try:
        together(_WHERE, partial(load.reads.run, load.options.progress), changes=load.reads.changes)
    except LoadFailed as failed:
        if not failed.changed:
            step.set_half_loaded(before)
        raise


def _apply(training: TrainingState, load: Load) -> None:
    """Restore the selected parts; tensors that are read in place have been read before."""
    for part in training.parts:
        if part.prepared is not None or load.takes(part.name):
            part.restore(load)
    for part in training.parts:
        part.finish(load)


def find(
    training: TrainingState, place: str, options: LoadOptions, *, newest: bool
) -> CheckpointReader | None:
    """Collective: open the checkpoint to restore, without reading its tensors.

    Args:
        training: whose save in the background is waited for.
        place: the path of a checkpoint, or a folder of them.
        options: of the restore.
        newest: ``place`` is a folder; return the newest in it that opens, None if it has none.

    Raises:
        checkpoint_io.CheckpointError: it is missing or damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    with unwrapped_failure():
        if newest:
            return _open_newest(open_folder(place, options.storage_options), options)
        return open_one(place, options.storage_options)


def restore_from(
    training: TrainingState,
    url: str,
    options: LoadOptions,
    reader: CheckpointReader | None = None,
) -> str:
    """Collective: restore the checkpoint at a URL, opened before or not; return its path.

    Raises:
        ResumeError: it does not fit (nothing was changed), or is not exact and ``strict``.
        checkpoint_io.CheckpointError: it is missing or damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    with unwrapped_failure():
        if reader is None:
            reader = open_one(url, options.storage_options)
        return _load_or_reload(training, reader, url, options)


def restore_newest(
    training: TrainingState,
    root: str,
    options: LoadOptions,
    skip: Iterable[str] = (),
    first: CheckpointReader | None = None,
) -> str | None:
    """Collective: restore the newest valid checkpoint of a folder; return None if it has none.

    One that is found to be damaged, even midway, is skipped with a notice. Those in ``skip`` are
    not tried; ``first`` is the newest, if it was opened before.

    Raises:
        ResumeError: it does not fit, or is not exact and ``strict``.
        checkpoint_io.CorruptCheckpointError: all checkpoints are damaged.
        RemoteError: another rank failed.
    """
    training.loop.saves.wait()
    tried = list(skip)
    folder = open_folder(root, options.storage_options)
    with unwrapped_failure():
        reader = _open_newest(folder, options, tried) if first is None else first
        while reader is not None:
            try:
                # Without a checkpoint to fall back to, the run starts over from untouched objects.
                volatile = options.source is not None and options.source.holds(reader.path)
                verify = "full" if volatile else options.verify
                return _load_or_reload(
                    training, reader, reader.path, replace(options, verify=verify)
                )
            except LoadFailed as failed:
                if not failed.damaged:
                    raise
                tried.append(reader.path)
                notice(f"passed over {reader.path}: {failed}")
            reader = _open_newest(folder, options, tried)
    return None


def _open_newest(
    folder: CheckpointFolder, options: LoadOptions, tried: Collection[str] = ()
) -> CheckpointReader | None:
    """Collective: open the newest checkpoint of a folder, or of the memory beside it."""
    if options.source is None:
        return open_newest(folder, tried)
    return options.source.open_newest(folder, tried)


def _load_or_reload(
    training: TrainingState, reader: CheckpointReader, url: str, options: LoadOptions
) -> str:
    """Load; load again if a save replaced the checkpoint while it was read."""
    try:
        return _load(training, reader, options)
    except LoadFailed as failed:
        newer = None if failed.changed or not failed.damaged else _newer(reader, url, options)
        if newer is None:
            raise
        return _load(training, newer, options)


def _newer(reader: CheckpointReader, url: str, options: LoadOptions) -> CheckpointReader | None:
    """Collective: return the checkpoint that has replaced this one, None if none has."""
    try:
        newer = open_one(url, options.storage_options)
    except LoadFailed:
        return None
    return None if newer.manifest.id == reader.manifest.id else newer


def _load(training: TrainingState, reader: CheckpointReader, options: LoadOptions) -> str:
    """Read what is small, check that all fits, read the rest in place, apply it.

    Raises:
        LoadFailed: a rank could not read a part.
    """
    if options.accept is not None:
        options.accept(reader)
    load = Load(_of_own_data(training, reader), options)
    if load.verifies_all:
        # a rank that raises here must not leave the others in the collective of a full check
        together(_WHERE, partial(_divide, training, load))
    together(_WHERE, partial(_read_first, training, load))
    # Objects of the user load before the rest, since they may refuse: up to the end of the read in
    # place, an error puts them back.
    with ExitStack() as undone:
        for part in training.parts:
            undone.enter_context(part.undone_by_a_failure())
        with shared_failure(_WHERE), naming_checkpoint(reader.path):
            _fit(training, load)
        _read_in_place(training.loop.step, load)
    # An error from here on leaves the run half loaded, and no step is taken before another load.
    with shared_failure(_WHERE):
        _apply(training, load)
    training.loop.step.set_half_loaded(None)
    training.loop.run.epoch_unknown = True
    training.load_report = load.report
    training.project.count_from(number_of(reader.path))
    if options.selection.takes("callbacks") and options.selection.takes("run"):
        for saver in training.loop.savers:
            if hasattr(saver, "resumed"):
                saver.resumed(training.loop.run)
    return reader.path


def _of_own_data(training: TrainingState, reader: CheckpointReader) -> CheckpointReader:
    """Return a reader of the local state of a rank that had read the data of this one.

    Collective, if another number of ranks shared a model in the run that saved.

    Raises:
        LoadFailed: a rank could not read it.
    """
    saved, ranks = reader.state.get("copies", 1), training.strategy.data
    if saved == ranks.copies:
        return reader
    copy = training.strategy.topology.rank % ranks.copies
    rank = ranks.rank * saved + copy % saved
    return together(_WHERE, lambda: reader.of_rank(rank))
