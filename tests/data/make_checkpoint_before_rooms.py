"""A small training whose checkpoints were written by an earlier layout of the code.

    PYTHONPATH=CHECKOUT_OF_220a8ea python tests/data/make_checkpoint_before_rooms.py

It was run with commit 220a8ea, and writes what lies in ``checkpoint_before_rooms``: ``one`` and
``two``, checkpoints by one process and by two from the middle of an epoch; what that code had after
loading each (``expected.json``), and at the end of the training (``one.safetensors``,
``two.safetensors``). Tests load the checkpoints with the code at hand and compare. To make them
again with newer code would test nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, DataLoaderConfiguration
from accel_callbacks.callbacks import EMA, Checkpoint, EarlyStopping

DATA = Path(__file__).resolve().parent / "checkpoint_before_rooms"
WORLDS = {"one": 1, "two": 2}
SAMPLES, BATCH, EPOCHS = 48, 4, 3
#: Windows of the second epoch that are trained before the save.
WINDOWS_BEFORE = 2


class History:
    """The registered object."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Training:
    """All that is prepared, registered and called back."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.ema = EMA(decay=0.75, use_buffers=True)
        self.stopping = EarlyStopping("loss", patience=5)
        self.saver = Checkpoint("kept", every_n_epochs=1, monitor="loss", async_save=False)
        self.accel = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            callbacks=[self.ema, self.stopping, self.saver],
            timeout=timedelta(seconds=30),
            **options,
        )
        # No bias before BatchNorm: its gradient is rounding noise, which AdamW would scale up, and
        # the weights would then depend on the CPU.
        first = nn.Linear(4, 8, bias=False)
        model = nn.Sequential(
            first, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = torch.arange(SAMPLES)
        inputs = torch.stack([(ids * prime % 17 - 8) / 8 for prime in (1, 3, 5, 7)], dim=1)
        loader = DataLoader(TensorDataset(ids, inputs), batch_size=BATCH, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        self.model, self.optimizer, self.loader, self.scheduler = self.accel.prepare(
            model, optimizer, loader, scheduler
        )
        torch.manual_seed(seed + self.accel.process_index)  # another dropout on each rank
        self.history = History()
        self.accel.register_for_checkpointing(history=self.history)

    def step(self, ids: torch.Tensor, inputs: torch.Tensor) -> float:
        """Train on a batch and return its loss on this rank."""
        with self.accel.accumulate(self.model):
            loss = (self.model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            self.accel.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()

    def end_epoch(self, losses: list[float]) -> None:
        mean = self.accel.gather(torch.tensor(losses)).mean().item()
        self.history.losses.append(mean)
        self.accel.log({"loss": mean})

    def state(self, run: Any) -> dict[str, Any]:
        """Return what a checkpoint restores, tensors as a hash of their bytes."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            "weights": digest(self.accel.unwrap_model(self.model).state_dict()),
            "moments": [digest(self.optimizer.state[p]) for p in parameters],
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "scheduler": [self.scheduler.scheduler.last_epoch, *self.scheduler.get_last_lr()],
            "average": digest(self.ema.state_dict()),
            "average_updates": self.ema.updates,
            "saver": self.saver.best_path,
            "stopping": [self.stopping.best, self.stopping.wait_count],
            "history": list(self.history.losses),
            "position": [run.global_step, run.current_epoch],
            "rng": digest(
                {
                    "torch": torch.get_rng_state(),
                    "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
                    "python": torch.tensor(random.getstate()[1]),
                }
            ),
        }


def digest(tree: Any) -> str:
    """Return a hash of the tensors in nested dicts and lists."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                add(f"{name}.{index}", item)

    add("", tree)
    return found.hexdigest()


@contextmanager
def inside(folder: str) -> Iterator[None]:
    """Work in a folder: names relative to it keep the paths of a machine out of a checkpoint."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def save(path: str, folder: str) -> None:
    """Train to the middle of the second epoch, and save there."""
    with inside(folder):
        _save(path)


def _save(path: str) -> None:
    training = Training(seed=7)
    with training.accel.run("before", resume=False) as run:
        for epoch in run.epochs(EPOCHS):
            losses = []
            for index, batch in enumerate(training.loader):
                losses.append(training.step(*batch))
                if (epoch, index + 1) == (1, 2 * WINDOWS_BEFORE):
                    training.accel.save_state(path)
                    run.stop("saved")
                    break
            else:
                training.end_epoch(losses)


def resume(path: str, folder: str, **options: Any) -> dict[str, Any]:
    """Load a checkpoint, train to the end, and return what this rank has seen and has."""
    with inside(folder):
        return _resume(path, **options)


def resume_by_seed(path: str, folder: str) -> dict[str, Any]:
    """Resume with orders by seed, as they were when the checkpoints were made."""
    config = DataLoaderConfiguration(seeded_order=True)
    return resume(path, folder, dataloader_config=config)


def _resume(path: str, **options: Any) -> dict[str, Any]:
    training = Training(seed=99, **options)
    batches, losses = [], []
    with training.accel.run("after", resume=path) as run:
        loaded = training.state(run)
        for _ in run.epochs(EPOCHS):
            of_epoch = []
            for ids, inputs in training.loader:
                batches.append(ids.tolist())
                of_epoch.append(training.step(ids, inputs))
            losses += of_epoch
            training.end_epoch(of_epoch)
        last = training.accel.unwrap_model(training.model).state_dict()
        with training.ema.applied():
            averaged = training.accel.unwrap_model(training.model).state_dict()
            tensors = {f"average.{name}": value.clone() for name, value in averaged.items()}
        tensors |= {f"weights.{name}": value.clone() for name, value in last.items()}
        scheduler = training.scheduler.get_last_lr()
    return {
        "loaded": loaded,
        "batches": batches,
        "losses": losses,
        "steps": run.global_step,
        "history": training.history.losses,
        "last_lr": scheduler,
        "tensors": {name: value.tolist() for name, value in tensors.items()},
    }


def _processes(world: int, *args: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}
    children = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        command = [sys.executable, __file__, *args, str(rank)]
        children.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
    if max(child.wait() for child in children):
        raise SystemExit("A process failed, see above.")


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["save"]:
        save(sys.argv[2], sys.argv[3])
        return
    if sys.argv[1:2] == ["resume"]:
        result = resume(str(DATA / sys.argv[2]), sys.argv[3])
        Path(sys.argv[3], f"rank{sys.argv[4]}.json").write_text(json.dumps(result))
        return
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    expected = {}
    for name, world in WORLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            _processes(world, "save", name, folder)
            shutil.copytree(Path(folder) / name, DATA / name)
        with tempfile.TemporaryDirectory() as folder:  # as a test, without what else was kept
            _processes(world, "resume", name, folder)
            paths = [Path(folder) / f"rank{rank}.json" for rank in range(world)]
            ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        of_ranks = [rank.pop("tensors") for rank in ranks]
        tensors = {key: torch.tensor(values) for key, values in of_ranks[0].items()}
        save_file(tensors, DATA / f"{name}.safetensors")
        expected[name] = ranks
    text = json.dumps(expected, indent=1)
    (DATA / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
