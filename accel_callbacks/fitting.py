"""Whether a checkpoint fits the prepared objects, found out before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.data.own_state import stream_problems
from accel_callbacks.errors import ResumeError, nearest

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import Checkpoint

__all__ = ["check_counts", "check_weights", "own_part", "weights_for"]


def check_counts(accel: Accelerator, state: Mapping[str, Any]) -> None:
    """As many objects are prepared as were saved.

    Raises:
        ResumeError: there are more or fewer.
    """
    for kind in ("models", "optimizers", "schedulers", "loaders"):
        saved, here = len(state[kind]), len(getattr(accel, kind))
        if saved != here:
            raise ResumeError(
                f"the checkpoint holds {saved} {kind}, but {here} were prepared: prepare the "
                "same objects as the run that saved it, before loading."
            )


def check_weights(accel: Accelerator, state: Mapping[str, Any], indices: Iterable[int]) -> None:
    """The saved weights fit the models with these indices, in names and shapes.

    Raises:
        ResumeError: they do not, or a save hook left them out and no load hook took the model.
    """
    for index in indices:
        if state["models"][str(index)] is None:
            raise ResumeError(
                f"a save hook left the weights of model {index} out of the checkpoint: register "
                "the load hook that loads them, and takes the model out of its `models`, with "
                "register_load_state_pre_hook."
            )
        current = accel.bare_models[index].state_dict()
        saved = weights_for(current, state, index)
        for name in saved.keys() ^ current.keys():
            place = "checkpoint" if name in saved else "model"
            other = current if name in saved else saved
            raise ResumeError(f"{name!r} is only in the {place}.{nearest(name, other)}")
        for name, tensor in current.items():
            if isinstance(tensor, torch.Tensor) and tensor.shape != saved[name].shape:
                raise ResumeError(
                    f"{name!r} has shape {tuple(tensor.shape)} in the model and "
                    f"{tuple(saved[name].shape)} in the checkpoint."
                )


def weights_for(current: Mapping[str, Any], state: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The saved weights of a model; what a save hook dropped stays as it is now."""
    dropped = state.get("dropped_weights", {}).get(str(index), ())
    kept = {name: current[name] for name in dropped if name in current}
    return {**kept, **state["models"][str(index)]}


def own_part(accel: Accelerator, checkpoint: Checkpoint, strict: bool) -> dict[str, Any] | None:
    """This process's own part, or None where it belongs to another number of processes.

    Raises:
        ResumeError: the latter, or a stream cannot go on exactly, and ``strict``.
    """
    saved, here = checkpoint.manifest.world_size, accel.num_processes
    local = checkpoint.local_state if saved == here else None
    prepared = {str(index): loader for index, loader in enumerate(accel.loaders)}
    problems = stream_problems(prepared, checkpoint.state["loaders"], local)
    text = "".join(f"a stream does not go on exactly: {problem}; " for problem in problems)
    if saved != here:
        order = "" if problems else "the order of samples goes on exactly, but "
        text += (
            f"the checkpoint was saved by {saved} processes and is loaded by {here}: {order}"
            "random generators start anew; "
        )
    if text and strict:
        raise ResumeError(text + "pass strict=False to accept that.")
    if text:
        warnings.warn(text.removesuffix("; ") + ".", stacklevel=5)
    return local
