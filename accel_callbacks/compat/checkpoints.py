"""Read what ``save_state`` of Accelerate itself wrote, without running its pickles."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accel_callbacks.accelerator import Accelerator
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import ResumeError
from accel_callbacks.warning import warn

__all__ = ["is_of_accelerate", "restore"]

_FILES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
_PLACE = (
    "the folder was saved by Accelerate, which keeps no place in the data: the next pass begins an "
    "epoch. Leave out what was trained on by skip_first_batches(loader, ...)."
)
_SAMPLER = "sampler.bin is left out: it is an object of Accelerate, which only unpickling makes."


def is_of_accelerate(folder: str | os.PathLike[str]) -> bool:
    """Return whether a local folder is a state that Accelerate saved, and not this library."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    from checkpoint_io.format import MANIFEST

    return MANIFEST not in names and any(name in names for name in _FILES)


def restore(accelerator: Accelerator, place: str | os.PathLike[str]) -> None:
    """Restore models, optimizers, schedulers, the loss scale, random generators and objects.

    All pickles are read before anything changes.

    Args:
        accelerator: what it has prepared is restored, in the order of its preparation.
        place: the folder.

    Raises:
        ResumeError: a file is missing, or there is none for what is prepared.
        checkpoint_io.CheckpointError: a file is damaged, or does not fit.
        RemoteError: another rank failed.
    """
    with shared_failure("load_state"):
        for apply in _read(accelerator, Path(place)):
            apply()
    if accelerator.loaders:
        warn(_PLACE)


def _read(accelerator: Accelerator, folder: Path) -> list[Callable[[], Any]]:
    """Read the files; return the calls that apply them."""
    import checkpoint_io

    training = accelerator.training_state
    left = training.pre_hooks.load(training.models, str(folder))
    calls: list[Callable[[], Any]] = []
    models = [model for model in training.models if any(model is kept for kept in left)]
    for index, model in enumerate(models):
        weights = _weights(folder, index)
        bare = training.strategy.unwrap(model)

        def load(bare: torch.nn.Module = bare, weights: Path = weights) -> None:
            checkpoint_io.load_model(bare, weights)

        calls.append(load)
    for name, items in (("optimizer", training.optimizers), ("scheduler", training.schedulers)):
        for index, item in enumerate(items):
            calls.append(_loading(item, _content(folder / _numbered(f"{name}.bin", index))))
    if accelerator.scaler is not None:
        calls.append(_loading(accelerator.scaler, _content(folder / "scaler.pt")))
    objects = list(training.registered.objects)
    for index, item in enumerate(objects):
        calls.append(_loading(item, _content(folder / f"custom_checkpoint_{index}.pkl")))
    states = folder / f"random_states_{accelerator.process_index}.pkl"
    if states.exists():
        content = _content(states)
        calls.append(lambda: _restore_random(content))
    else:
        warn(f"{states.name} is not there: random generators go on as they are.")
    if (folder / "sampler.bin").exists():
        warn(_SAMPLER)
    return calls


def _loading(item: Any, state: Any) -> Callable[[], Any]:
    return lambda: item.load_state_dict(state)


def _numbered(name: str, index: int) -> str:
    """Return the name of the file of the first object, or of a later one."""
    stem, _, ending = name.partition(".")
    return name if index == 0 else f"{stem}_{index}.{ending}"


def _weights(folder: Path, index: int) -> Path:
    names = [_numbered(name, index) for name in ("model.safetensors", "pytorch_model.bin")]
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        raise ResumeError(
            f"{folder} has neither {names[0]} nor {names[1]}: sharded weights of Accelerate are "
            "merged by `accel merge-weights`, and loaded by load_checkpoint_in_model()."
        )
    return found[0]


def _content(path: Path) -> Any:
    from checkpoint_io.weights.torch_pickle import load_restricted

    if not path.exists():
        raise ResumeError(
            f"{path} is not there, and something that it is for is prepared or registered: prepare "
            "what was prepared when the state was saved."
        )
    return load_restricted(path, map_location="cpu")


def _restore_random(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["random_state"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "torch_cuda_manual_seed" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])
