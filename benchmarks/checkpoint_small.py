"""What `checkpoint.py --small` measures: a state of 0.6 MB, where code costs more than bytes.

Each contender has a process of its own that lives for all rounds, and saves when it is asked to,
one contender after the other in an order that is shuffled for each round. Between two saves it
takes some training steps. `call` is the time that the call holds the training thread, `cpu` the
time of the processor in it, which other programs disturb less. The fsyncs of a save are counted and
timed one by one; after the save, the files that it left to the kernel are fsynced, and that is
timed apart. So a contender without fsyncs can be compared with one that has them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_contenders import fsync_tree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Row = dict[str, float]
Save = Callable[[str], object]  # returns a function that waits, or nothing
LAYERS, WIDTH = 12, 64


class Training:
    """A model of 12 layers with AdamW, a scheduler and a loader: a state of 0.6 MB."""

    def __init__(self, accelerator: Any = None) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model: Any = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        data = TensorDataset(torch.randn(256, WIDTH))
        self.loader: Any = DataLoader(data, batch_size=32, shuffle=True)
        if accelerator is not None:
            self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
                self.model, self.optimizer, self.scheduler, self.loader
            )
        self._backward = torch.Tensor.backward if accelerator is None else accelerator.backward

    def steps(self) -> None:
        """One pass of 8 steps."""
        for (inputs,) in self.loader:
            self._backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """The same parts, for contenders that are given a dict."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def our_save_state() -> tuple[Training, Save]:
    from accel_callbacks import Accelerator

    accelerator = Accelerator(cpu=True)
    training = Training(accelerator)

    def save(folder: str) -> None:
        accelerator.save_state(folder)

    return training, save


def our_background() -> tuple[Training, Save]:
    from accel_callbacks import Accelerator

    accelerator = Accelerator(cpu=True)
    training = Training(accelerator)

    def save(folder: str) -> object:
        accelerator.save_state(folder, async_save=True)
        return accelerator.wait_for_save

    return training, save


def accelerate() -> tuple[Training, Save]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    training = Training(accelerator)

    def save(folder: str) -> None:
        accelerator.save_state(folder)

    return training, save


def torch_save() -> tuple[Training, Save]:
    training = Training()
    return training, lambda folder: torch.save(training.state(), f"{folder}/state.pt")


def dcp() -> tuple[Training, Save]:
    import torch.distributed.checkpoint as peer

    training = Training()

    def save(folder: str) -> None:
        peer.save(training.state(), checkpoint_id=folder)

    return training, save


SAVERS: dict[str, Callable[[], tuple[Training, Save]]] = {
    "ours: save_state": our_save_state,
    "ours: background": our_background,
    "accelerate": accelerate,
    "torch.save": torch_save,
    "DCP": dcp,
}


# --- in the process of a contender ------------------------------------------------------------


class Fsyncs:
    """Counts and times the fsyncs of this process."""

    def __init__(self) -> None:
        self._fsync = os.fsync
        os.fsync = self._timed
        self.reset()

    def reset(self) -> None:
        self.count, self.seconds = 0, 0.0

    def _timed(self, descriptor: int) -> None:
        started = time.perf_counter()
        self._fsync(descriptor)
        self.seconds += time.perf_counter() - started
        self.count += 1


def measure(training: Training, save: Save, folder: str, fsyncs: Fsyncs) -> Row:
    """One save: the seconds of the call and of its fsyncs, then of those that it left out."""
    gc.collect()  # between two saves, not in one
    training.steps()
    fsyncs.reset()
    started, cpu = time.perf_counter(), time.thread_time()
    wait = save(folder)
    held, cpu = time.perf_counter() - started, time.thread_time() - cpu
    if callable(wait):
        wait()
    row = {"seconds": held, "cpu": cpu, "durable": time.perf_counter() - started}
    row |= {"fsyncs": fsyncs.count, "fsync seconds": fsyncs.seconds}
    fsyncs.reset()
    fsync_tree(folder)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    row |= {"late fsyncs": fsyncs.count, "late seconds": fsyncs.seconds}
    return row | {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def serve(name: str) -> None:
    """Save once for each folder that standard input names; print a row for each."""
    training, save = SAVERS[name]()
    fsyncs = Fsyncs()
    for line in sys.stdin:
        os.makedirs(line.strip())
        print(json.dumps(measure(training, save, line.strip(), fsyncs)), flush=True)


# --- in the process that asks -----------------------------------------------------------------


def collect(root: str, rounds: int, names: list[str]) -> dict[str, list[Row]]:
    """Rows of each contender, one a round, after two that are not counted."""
    command = [sys.executable, __file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {
        name: subprocess.Popen([*command, name], stderr=subprocess.DEVNULL, **pipes)
        for name in names
    }
    rows: dict[str, list[Row]] = {name: [] for name in names}
    try:
        for number in range(-2, rounds):
            for name in random.sample(list(rows), len(rows)):
                worker = workers[name]
                with contextlib.suppress(BrokenPipeError):  # it has ended: there is no line
                    folder = f"{root}/{name.replace(': ', '-')}/{number}"
                    print(folder, file=worker.stdin, flush=True)
                if not (line := worker.stdout.readline()):
                    print(f"small: {name} left out: it is not installed, or it failed", flush=True)
                    del rows[name]
                elif number >= 0:
                    rows[name].append(json.loads(line))
    finally:
        for worker in workers.values():
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
            worker.wait()
    return rows


def report(rows: dict[str, list[Row]]) -> None:
    """Print medians, and the middle half of the rounds."""

    def middle(values: list[float]) -> str:
        low, half, high = statistics.quantiles(values, n=4)
        return f"{half * 1e3:6.2f} [{low * 1e3:5.2f}..{high * 1e3:5.2f}]"

    def of(name: str, field: str) -> list[float]:
        return [row[field] for row in rows[name]]

    for name, found in rows.items():
        some = found[0]
        print(
            f"  {name:18} call {middle(of(name, 'seconds'))}  cpu {middle(of(name, 'cpu'))}  "
            f"durable {middle(of(name, 'durable'))}  {some['fsyncs']:.0f} fsyncs "
            f"{middle(of(name, 'fsync seconds'))}, left out {some['late fsyncs']:.0f} "
            f"{middle(of(name, 'late seconds'))}  {some['files']:.0f} files, "
            f"{some['bytes'] / 1e6:.2f} MB",
            flush=True,
        )
    if {"ours: save_state", "accelerate"} <= rows.keys():
        pairs = list(zip(rows["ours: save_state"], rows["accelerate"], strict=True))
        ours = [a["seconds"] - a["fsync seconds"] for a, _ in pairs]
        print(f"  save_state without its fsyncs {middle(ours)}, accelerate", end=" ")
        print(f"{middle([b['seconds'] for _, b in pairs])}")
        durable = [a["seconds"] / (b["seconds"] + b["late seconds"]) for a, b in pairs]
        same = [a["seconds"] / (b["seconds"] + a["fsync seconds"]) for a, b in pairs]
        print(
            f"  save_state takes {statistics.median(durable):.2f} of accelerate plus the fsyncs "
            f"that it leaves out, {statistics.median(same):.2f} of accelerate plus our fsyncs"
        )


def run(root: str, rounds: int, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Measure and print; return milliseconds by contender."""
    print(f"small state ({LAYERS} layers, AdamW), milliseconds: median [middle half]")
    rows = collect(root, rounds, names)
    report(rows)
    fields = {
        "milliseconds that a save holds the step": "seconds",
        "milliseconds of processor time of that": "cpu",
        "milliseconds until the files are written": "durable",
        "milliseconds of fsyncs that it left out": "late seconds",
    }
    return {
        title: {name: [row[field] * 1e3 for row in found] for name, found in rows.items()}
        for title, field in fields.items()
    }


if __name__ == "__main__":
    serve(sys.argv[1])
