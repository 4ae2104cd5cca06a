"""A training script in which one rank is struck by a fault at one place.

Arguments: the place, the fault, the rank that it strikes, a folder, and the timeout of the group in
seconds. The file ``struck`` in the folder begins to exist when the fault strikes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import torch
from gated_files import GatedFileSystem
from torch.utils.data import DataLoader, Dataset

from accel_callbacks import Accelerator, main_process_first
from loggers import Tracker

place, fault, victim, folder, timeout = sys.argv[1:]
SECONDS = float(timeout)
MAIN, armed = os.getpid(), False


def strike() -> None:
    """Let the fault happen, after the heartbeat has seen where."""
    time.sleep(min(SECONDS / 10, 1.0) * 2.5)
    Path(folder, "struck").touch()
    if fault == "raise":
        raise ValueError("struck")
    if fault == "exit":
        sys.exit(0)
    if fault == "vanish":
        os._exit(0)
    os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[fault])


def reach(here: str) -> None:
    if here == place and os.environ["RANK"] == victim and armed:
        strike()


class StrikingFiles(GatedFileSystem):
    protocol = "striking"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix("striking://").rstrip("/") or "/"

    def _pass(self) -> None:
        reach("save, in the write")
        reach("background save")


fsspec.register_implementation("striking", StrikingFiles)


class Striking(Tracker):
    name = "striking"

    def start(self, run: Any) -> None:
        reach("tracker start")

    def log(self, scalars: Any, step: int) -> None: ...

    def finish(self, status: str = "success") -> None: ...


class Model(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        reach("forward")
        return super().forward(inputs)


class Strikes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        reach("backward")
        return gradient


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != MAIN and index > 30:
            reach("loader worker")
        return torch.ones(4) * index


class Counted:
    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        reach("load")


accel = Accelerator(
    cpu=True,
    timeout=timedelta(seconds=SECONDS),
    project_dir=folder,
    log_with=Striking() if place == "tracker start" else None,
)
model = Model(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = DataLoader(Rows(), batch_size=4, num_workers=int(place == "loader worker"))
# At once, as loader workers are forked when the loop begins.
armed = place in ("tracker start", "loader worker")
model, optimizer, loader = accel.prepare(model, optimizer, loader)
accel.register_for_checkpointing(Counted())


def step(batch: torch.Tensor) -> None:
    loss = Strikes.apply(model(batch)).sum()
    accel.backward(loss)
    reach("step")
    optimizer.step()
    optimizer.zero_grad()


def train() -> None:
    global armed
    saved = f"striking://{folder}/saved"
    accel.save_state(saved)
    for index, batch in enumerate(loader):
        step(batch)
        if index != 1:
            continue
        armed = True
        reach("save, before the write")
        if place == "background save":
            accel.save_state(f"{saved}-2", async_save=True)
        elif place.startswith("save"):
            accel.save_state(f"{saved}-2")
        reach("save, after the write")
        if place == "load":
            accel.load_state(saved)
        with main_process_first():
            reach("main_process_first")
        with accel.evaluate(model):
            reach("evaluate")
        reach("gather")
        accel.gather(torch.ones(1))


if sys.argv[0].endswith("plain"):
    train()
else:
    with accel.run("struck", resume=False):
        train()
accel.end_training()
