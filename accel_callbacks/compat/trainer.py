"""Checkpoints of the Trainer of transformers that a kill at any moment leaves whole, and signals.

The Trainer writes the files of a checkpoint one after the other into the folder that it resumes
from. Here it writes them into a folder beside: when all ranks have, they are made durable and
sealed with their checksums, and only then the folder gets its name. The Trainer's methods are
amended in place, and not in a subclass, since scripts and packages derive from it.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.addons.trainer.trainer_folder import (
    PREFIX,
    SAVING,
    STATE,
    candidates,
    newest_whole,
    problem_of,
    step_of,
)
from accel_callbacks.addons.trainer.trainer_mirror import folder_of, mirror_of
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.logging import notice
from checkpoint_io import (
    CheckpointError,
    CorruptCheckpointError,
    keep_last,
)
from checkpoint_io.folder.sealed import check_seal, seal_folder
from checkpoint_io.local_files import base_name, local_path, replace, sync_folder
from checkpoint_io.warning import warn

__all__ = ["amend_trainer", "amend_trainer_utils", "amend_training_args"]

_WHERE = "the Trainer's checkpoint"
_WRITES = ("save_model", "save_metrics", "save_state", "create_model_card")
_SEAMS = ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "train")


def amend_trainer_utils(module: ModuleType) -> None:
    """Let ``get_last_checkpoint`` of transformers pass over what a kill has left."""
    module.get_last_checkpoint = newest_whole  # type: ignore[attr-defined]


def amend_training_args(module: ModuleType) -> None:
    """Let TrainingArguments fetch the newest checkpoint, before a script looks into its folder."""
    arguments_class = module.TrainingArguments
    plain = arguments_class.__post_init__

    @functools.wraps(plain)
    def __post_init__(arguments: Any) -> None:
        place = arguments.output_dir
        if isinstance(place, str) and "://" in place:
            arguments.output_dir = local_path(place) or folder_of(place)
        plain(arguments)
        mirror = mirror_of(arguments.output_dir) if arguments.output_dir else None
        if mirror is not None:
            mirror.fetch(arguments.output_dir)

    arguments_class.__post_init__ = __post_init__


def amend_trainer(module: ModuleType) -> None:
    """Let the Trainer write checkpoints beside, and check the one that it resumes from."""
    trainer_class = module.Trainer
    if not all(hasattr(trainer_class, name) for name in _SEAMS):
        warn(
            "checkpoints of this transformers are written as it writes them, so that a kill may "
            "leave half of one: update transformers."
        )
        return
    rotate = getattr(module, "rotate_checkpoints", None)
    trainer_class._save_checkpoint = _save_beside(trainer_class._save_checkpoint, rotate)
    trainer_class.train = _resume_whole(trainer_class.train)
    for name in _WRITES:
        if hasattr(trainer_class, name):
            setattr(trainer_class, name, _copy_to_mirror(getattr(trainer_class, name)))


# --- save ---------------------------------------------------------------------------------------


def _save_beside(plain: Callable[..., None], rotate: Callable[..., None] | None) -> Any:
    """Return the method that saves a checkpoint, by the Trainer's own one."""

    @functools.wraps(plain)
    def _save_checkpoint(trainer: Any, model: Any, trial: Any) -> None:
        run_dir = trainer._get_output_dir(trial=trial)
        saving = os.path.join(run_dir, SAVING)
        name = f"{PREFIX}{trainer.state.global_step}"
        first_here = trainer.args.local_process_index == 0
        with shared_failure(_WHERE):
            if first_here:
                _clear(run_dir, saving)
        with shared_failure(_WHERE):
            with _redirect_writes(trainer, saving):
                plain(trainer, model, trial)
            _save_callbacks(trainer, saving, os.path.join(saving, name), run_dir)
        with shared_failure(_WHERE):
            if trainer.is_world_process_zero():
                _commit(trainer, run_dir, saving, name)
        # A machine that does not share the disk of rank 0 has its own part of the checkpoint. On
        # one that does, it may take a while until the new name is seen.
        with shared_failure(_WHERE), suppress(FileNotFoundError):
            if first_here and os.path.isdir(os.path.join(saving, name)):
                _commit(trainer, run_dir, saving, name)
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(os.path.join(run_dir, name))
        if trainer.args.should_save:
            _rotate(trainer, run_dir, rotate)
        mirror = mirror_of(run_dir)
        if mirror is not None and trainer.is_world_process_zero():
            limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
            keep = keep_last(limit) if limit else None
            mirror.wait_and_warn()
            mirror.put(os.path.join(run_dir, name), trainer.state.global_step, keep, step_of(best))

    return _save_checkpoint


def _copy_to_mirror(plain: Callable[..., Any]) -> Any:
    """Return a method of the Trainer that writes files, which copies them to the mirror too."""

    @functools.wraps(plain)
    def write(trainer: Any, *args: Any, **options: Any) -> Any:
        outcome = plain(trainer, *args, **options)
        if trainer.is_world_process_zero() and "_get_output_dir" not in vars(trainer):
            mirror = mirror_of(trainer.args.output_dir)
            if mirror is not None and os.path.isdir(trainer.args.output_dir):
                mirror.put_files(trainer.args.output_dir)
        return outcome

    return write


@contextmanager
def _redirect_writes(trainer: Any, saving: str) -> Iterator[None]:
    """Let the Trainer's own method write below another folder, and not push what it writes."""
    attributes = dict(vars(trainer))
    trainer._get_output_dir = lambda trial=None: saving
    trainer._push_from_checkpoint = lambda checkpoint_folder: None
    try:
        yield
    finally:
        for name in ("_get_output_dir", "_push_from_checkpoint"):
            delattr(trainer, name)
            if name in attributes:
                setattr(trainer, name, attributes[name])


def _save_callbacks(trainer: Any, saving: str, folder: str, run_dir: str) -> None:
    """Write what belongs to a checkpoint and the Trainer's method has not written, or wrongly."""
    from accel_callbacks.addons.trainer.transformers import TrainerEvents

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrainerEvents):
            callback.save_into(folder, trainer.state)
    best = trainer.state.best_model_checkpoint
    if best is not None and os.path.dirname(best) == saving:
        trainer.state.best_model_checkpoint = os.path.join(run_dir, base_name(best))
        if trainer.args.should_save:
            trainer.state.save_to_json(os.path.join(folder, STATE))


def _samples_per_step(trainer: Any) -> int:
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _commit(trainer: Any, run_dir: str, saving: str, name: str) -> None:
    """Seal what has been written, and give it its name."""
    metadata = {
        "step": trainer.state.global_step,
        "samples_per_step": _samples_per_step(trainer),
    }
    seal_folder(os.path.join(saving, name), metadata)
    _publish(run_dir, saving, name)


def _publish(run_dir: str, saving: str, name: str) -> None:
    """Give a sealed checkpoint its name; one of this name is removed."""
    target = os.path.join(run_dir, name)
    if os.path.isdir(target):
        replace(target, os.path.join(saving, f"replaced-{name}"))
    replace(os.path.join(saving, name), target)
    sync_folder(saving)
    sync_folder(run_dir)
    shutil.rmtree(saving, ignore_errors=True)


def _clear(run_dir: str, saving: str) -> None:
    """Remove what a killed save has left; what it had sealed gets its name."""
    if not os.path.isdir(saving):
        return
    for _, path in candidates(saving):
        if problem_of(path) is None:
            _publish(run_dir, saving, base_name(path))
            return
    shutil.rmtree(saving, ignore_errors=True)


def _rotate(trainer: Any, run_dir: str, rotate: Callable[..., None] | None) -> None:
    if rotate is None:  # before transformers 5
        trainer._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
        return
    rotate(
        output_dir=run_dir,
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


# --- resume -------------------------------------------------------------------------------------


def _resume_whole(plain: Callable[..., Any]) -> Any:
    """Return the method that trains, which resumes from what is whole, by the Trainer's own one."""

    @functools.wraps(plain)
    def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_for_all(trainer) or True  # its error is the Trainer's
        elif resume_from_checkpoint and os.path.isdir(resume_from_checkpoint):
            _check_chosen(trainer, os.fspath(resume_from_checkpoint))
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            resume_from_checkpoint = _give_name(trainer, os.fspath(resume_from_checkpoint))
            _check_samples(trainer, resume_from_checkpoint)
        _meet_signals(trainer)
        try:
            return plain(trainer, resume_from_checkpoint, *args, **options)
        finally:
            mirror = mirror_of(trainer.args.output_dir)
            if mirror is not None:
                mirror.wait_and_warn()

    return train


def _meet_signals(trainer: Any) -> None:
    """Add a callback that saves and stops on a signal for which the script has no handler."""
    from accel_callbacks.addons.trainer.transformers import TrainerEvents, to_transformers
    from accel_callbacks.callbacks import Preemption

    hosted = [c for c in trainer.callback_handler.callbacks if isinstance(c, TrainerEvents)]
    if threading.current_thread() is not threading.main_thread() or any(
        isinstance(callback.accel_callback, Preemption) for callback in hosted
    ):
        return
    # On each rank, with or without a handler: they vote.
    known = [getattr(signal, name, None) for name in ("SIGTERM", "SIGUSR1")]
    free = [number for number in known if number and signal.getsignal(number) is signal.SIG_DFL]
    trainer.add_callback(to_transformers(Preemption(free), trainer=trainer))


def _newest_for_all(trainer: Any) -> str | None:
    """Collective: return the newest checkpoint that is whole for all ranks, to the last byte."""
    folder = trainer.args.output_dir
    paths = dict(candidates(folder)) if os.path.isdir(folder) else {}
    whole = [step for step, path in paths.items() if problem_of(path) is None]
    steps = set.intersection(*map(set, collectives.all_objects(whole, operation=_WHERE)))
    for step in sorted(paths, reverse=True):
        if step in steps:
            problem = _problem_for_all(trainer, paths[step])
            if problem is None:
                return paths[step]
        else:
            problem = problem_of(paths[step]) or "another rank does not have it"
        notice(f"{paths[step]} is passed over: {problem}")
    return None


def _problem_for_all(trainer: Any, path: str) -> str | None:
    """Collective: return what is wrong with a checkpoint, which a rank of each machine reads."""
    problem = problem_of(path, full=True) if trainer.args.local_process_index == 0 else None
    problems = collectives.all_objects(problem, operation=_WHERE)
    return next((text for text in problems if text is not None), None)


def _check_chosen(trainer: Any, path: str) -> None:
    """Collective: raise if the checkpoint that the script has chosen is damaged."""
    problem = _problem_for_all(trainer, path)
    if problem is None:
        return
    name = base_name(path)
    others = [other for _, other in candidates(os.path.dirname(os.path.abspath(path)))]
    older = next(
        (o for o in others if base_name(o) != name and problem_of(o, full=True) is None), None
    )
    advice = "there is no other" if older is None else f"resume from {older}"
    raise CorruptCheckpointError(f"{path} is not resumed from: {problem}; {advice}.")


def _give_name(trainer: Any, path: str) -> str:
    """Collective: return the path of a checkpoint, which gets its name if a kill came before."""
    saving, name = os.path.split(os.path.abspath(path))
    run_dir = os.path.dirname(saving)
    if base_name(saving) != SAVING:
        return path
    with shared_failure(_WHERE):
        if trainer.args.local_process_index == 0:
            _clear(run_dir, saving)
    return os.path.join(run_dir, name)


def _check_samples(trainer: Any, path: str) -> None:
    """Warn if the Trainer, which counts its place in steps, would go on at another sample."""
    try:
        saved = check_seal(path, full=False).get("samples_per_step")
    except CheckpointError:
        return
    if saved not in (None, _samples_per_step(trainer)):
        warn(
            f"{base_name(path)} was trained with {saved} samples a step, and now there are "
            f"{_samples_per_step(trainer)}: the Trainer counts its place in steps, and goes on at "
            "another sample. Give gradient_accumulation_steps or per_device_train_batch_size with "
            f"which it is {saved} again."
        )
