"""A training script in which one rank is struck by a fault at one place.

Arguments: the place, the fault, the rank that it strikes, a folder, the timeout of the group in
seconds, and "plain" for a loop outside of a run, "sharded" for one with FSDP2, or "warned" for one
that goes on without checkpoints that cannot be written. With the fault "block", a call of a save
may take no longer than the timeout, instead of ten minutes. The file ``struck`` in the folder
begins to exist when the fault strikes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    main_process_first,
)
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.distributed import heartbeat
from checkpoint_io import BackgroundSaver
from loggers import Tracker
from tests.support.gated_files import GatedFileSystem

Reach = Callable[[str], None]


class Strike:
    """Lets the fault happen where the script reaches the place."""

    def __init__(self, place: str, fault: str, victim: str, folder: str, timeout: str) -> None:
        self._place, self._fault, self._folder = place, fault, folder
        self._timeout = float(timeout)
        self._seen = min(float(timeout) / 10, 1.0) * 2.5  # seconds in which a heartbeat shows where
        self._strikes = os.environ["RANK"] == victim
        # At once in some places: loader workers are forked when the loop begins.
        self.armed = place in (
            *("start", "join", "joined", "tracker start", "loader worker", "first forward"),
        )

    def reach(self, here: str) -> None:
        if here != self._place or not self._strikes or not self.armed:
            return
        self._strikes = False
        time.sleep(self._seen)
        Path(self._folder, "struck").touch()
        if self._fault == "raise":
            raise ValueError("struck")
        if self._fault == "exit":
            sys.exit(0)
        if self._fault == "vanish":
            os._exit(0)
        if self._fault in ("delay", "block"):
            time.sleep(1.5 * self._timeout if self._fault == "delay" else 3600)
            return
        os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self._fault])


class StrikingFiles(GatedFileSystem):
    """Strikes in a write of a save."""

    protocol = "striking"
    reach: Reach

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix("striking://").rstrip("/") or "/"

    def _pass(self) -> None:
        type(self).reach("save, in the write")
        type(self).reach("background save")


class StrikingTracker(Tracker):
    """Strikes in its start."""

    name = "striking"

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def start(self, run: Any) -> None:
        self._reach("tracker start")

    def log(self, scalars: Any, step: int) -> None: ...

    def finish(self, status: str = "success") -> None: ...


class Model(torch.nn.Linear):
    """Strikes in forward and in backward."""

    reach: Reach

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        type(self).reach("first forward")
        type(self).reach("forward")
        return _StrikesInBackward.apply(super().forward(inputs), type(self).reach)


class _StrikesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, reach: Reach) -> torch.Tensor:
        ctx.reach = reach
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.reach("backward")
        return gradient, None


class Rows(Dataset):
    """Strikes in a loader worker."""

    def __init__(self, reach: Reach) -> None:
        self._reach, self._main = reach, os.getpid()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != self._main and index > 30:
            self._reach("loader worker")
        return torch.ones(4) * index


def strike_in_join(reach: Reach) -> None:
    """Strikes before the ranks connect, and after this one has."""
    join = dist.init_process_group

    def struck(*args: Any, **options: Any) -> None:
        reach("join")
        join(*args, **options)
        reach("joined")

    dist.init_process_group = struck


def strike_in_collection(reach: Reach) -> None:
    """Strikes where all ranks know that a background save has ended, and ask each other how."""
    collect = BackgroundSaver._collect

    def struck(saver: BackgroundSaver, handle: Any) -> None:
        reach("end of a save")
        collect(saver, handle)

    BackgroundSaver._collect = struck


class Counted:
    """Strikes in a load."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._reach("load")


def wait_for_all(folder: Path) -> None:
    """Begin together: the timeout is short, and begins where the first rank joins."""
    (folder / f"ready-{os.environ['RANK']}").touch()
    while len(list(folder.glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def main(place: str, fault: str, victim: str, folder: str, timeout: str, run: str = "run") -> None:
    strike = Strike(place, fault, victim, folder, timeout)
    reach = strike.reach
    if fault == "block":
        heartbeat._LONGEST_CALL = 0.0
    StrikingFiles.reach = Model.reach = staticmethod(reach)
    fsspec.register_implementation("striking", StrikingFiles)
    strike_in_join(reach)
    strike_in_collection(reach)
    wait_for_all(Path(folder))
    reach("start")
    accel = Accelerator(
        cpu=True,
        timeout=timedelta(seconds=float(timeout)),
        project_dir=folder,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if run == "sharded" else None,
        log_with=StrikingTracker(reach) if place == "tracker start" else None,
        callbacks=[Checkpoint(every_n_steps=3, when_failed="warn")] if run == "warned" else [],
    )
    model = Model(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Rows(reach), batch_size=4, num_workers=int(place == "loader worker"))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    accel.register_for_checkpointing(Counted(reach))

    def train() -> None:
        saved = f"striking://{folder}/saved"
        accel.save_state(saved)
        for index, batch in enumerate(loader):
            accel.backward(model(batch).sum())
            reach("step")
            optimizer.step()
            optimizer.zero_grad()
            if run == "warned":
                time.sleep(0.5)  # a save has ended when the epoch does
            if index != 1:
                continue
            strike.armed = True
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

    if run == "plain":
        train()
    elif run == "warned":
        with accel.run("struck", resume=False) as training:
            for _ in training.epochs(2):
                train()
    else:
        with accel.run("struck", resume=False):
            train()
    reach("end_training")
    accel.end_training()


if __name__ == "__main__":
    faulthandler.enable()  # a crash says where it was
    main(*sys.argv[1:])
