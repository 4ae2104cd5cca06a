"""The check of checkpoints: saved in mid-epoch, verified, loaded, trained on as if nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import checkpoint_io
from accel_callbacks import collectives
from accel_callbacks.accelerator import Accelerator
from accel_callbacks.distributed.rng import set_seed
from accel_callbacks.selftest.check import Expectations, Lab, Skipped
from accel_callbacks.selftest.small import flat_weights, samples, small_model
from checkpoint_io.format.names import MANIFEST, new_save_id
from checkpoint_io.storage.open import open_store

__all__ = ["resume_is_exact"]

_BATCH = 4
_SAVE_AFTER = 2
_BATCHES = 5


def resume_is_exact(lab: Lab) -> str:
    """Interrupted and resumed training ends with the weights of one that went on, bit by bit."""
    accel = lab.accelerator()
    if lab.folder is None:
        raise Skipped("several machines: name a folder that all of them see with --folder")
    with _own_folder(lab.folder) as folder:
        set_seed(7, device_specific=True)
        parts = _prepare(accel, seed=3)
        straight, left = _train(accel, parts, save_to=folder)
        if accel.is_main_process:
            checkpoint_io.verify(folder)
        again = lab.accelerator()
        set_seed(8, device_specific=True)
        parts = _prepare(again, seed=4)
        again.load_state(folder)
        resumed, left_again = _train(again, parts)
        manifest = checkpoint_io.read_manifest(folder)
        collectives.barrier()  # nobody reads any more
    expect = Expectations()
    expect.equal("the batches after the resume", left_again, left)
    expect.that(torch.equal(straight, resumed), "weights after the resume differ")
    expect.done()
    files = len(manifest.files)
    return f"saved in mid-epoch, verified, resumed bit by bit ({files} files in {lab.folder})"


def _prepare(accel: Accelerator, seed: int) -> Any:
    """Model, optimizer and a shuffled loader."""
    model = small_model(seed, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = samples(_BATCH * _BATCHES * accel.num_processes)
    return accel.prepare(model, optimizer, DataLoader(data, _BATCH, shuffle=True))


def _train(
    accel: Accelerator, parts: Any, save_to: str | None = None
) -> tuple[torch.Tensor, list[float]]:
    """Train to the end of the epoch; returns the weights, and marks of batches since the save."""
    model, optimizer, loader = parts
    seen = []
    for number, (inputs, targets) in enumerate(loader, 1):
        accel.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(inputs.sum()))
        if save_to is not None and number == _SAVE_AFTER:
            accel.save_state(save_to)
            seen.clear()
    return flat_weights(accel.unwrap_model(model)), seen


@contextmanager
def _own_folder(base: str) -> Iterator[str]:
    """A folder of this check alone, the same on all processes, which is removed again."""
    name = collectives.broadcast_object(f"accel-test-{new_save_id()}", 0)
    folder = f"{base.rstrip('/')}/{name}"
    try:
        yield folder
    finally:
        if collectives.rank() == 0:
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove what is in it, and itself."""
    with suppress(Exception):  # what was wrong with the folder has been told
        store = open_store(folder)
        store.remove_many([MANIFEST, *(name for name in store.sizes() if name != MANIFEST)])
        store.remove_folder()
