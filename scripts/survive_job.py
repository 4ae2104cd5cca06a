"""A small training that loses a rank in each attempt, for ``survive_proof.py`` and its tests."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, set_seed, survive
from accel_callbacks.callbacks import Checkpoint

DATA = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))  # of all attempts


class Seen:
    """The samples of the run, as they were trained on; kept in checkpoints."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = list(state["samples"])


def facts(first: int) -> dict[str, Any]:
    """What this process is, and holds, in an attempt that began at the step `first`."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "pid": os.getpid(),
        "first": first,
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "names": sorted(thread.name for thread in threading.enumerate()),
        "time": time.time(),
    }


def fail(how: str) -> None:
    """What happens to the rank that is lost."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "pause":  # as a virtual machine that is moved to another host
        goes_on = f"sleep 12; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
    if how in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    raise ValueError("of this rank alone")


@survive
def train(args: argparse.Namespace) -> None:
    set_seed(0)
    attempt, rank = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    if (attempt, rank) == ("1", args.fails_first):
        fail("raise")
    accel = Accelerator(
        cpu=True,
        project_dir=args.folder,
        timeout=timedelta(seconds=args.timeout),
        callbacks=[Checkpoint(every_n_steps=2)],
        fsdp_plugin=FullyShardedDataParallelPlugin() if args.fsdp else None,
    )
    layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    indexed = torch.utils.data.TensorDataset(DATA, torch.arange(len(DATA)))
    data = torch.utils.data.DataLoader(
        indexed, batch_size=32 // accel.num_processes, shuffle=True, num_workers=args.workers
    )
    model, optimizer, data = accel.prepare(model, optimizer, data)
    seen = Seen()
    accel.register_for_checkpointing(seen)
    number = int(attempt)
    lost = args.ranks[number % len(args.ranks)] if number < args.losses else None
    with accel.run("survive") as run:
        first = run.global_step
        for _ in run.epochs(args.epochs):
            for batch, samples in data:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                seen.samples += accel.gather_for_metrics(samples).tolist()
                if run.global_step == first + 1:
                    with open(f"{args.folder}/facts-{rank}.jsonl", "a") as file:
                        file.write(json.dumps(facts(first)) + "\n")
                if lost is None or run.global_step != first + args.lose_after:
                    continue
                if args.fork_server:
                    await_fork_server()
                if rank == lost:
                    fail(args.how)
                if rank == args.stuck:
                    fail("stop")
    accel.save_model(model, f"{args.folder}/model")
    if accel.is_main_process:
        Path(args.folder, "seen.json").write_text(json.dumps(seen.samples))
    accel.end_training()


def await_fork_server() -> None:
    """Wait until the launcher forks lost processes, which is soon after the first steps."""
    note = Path(os.environ["ACCEL_LAUNCH_NOTES"], "warm.json")
    deadline = time.monotonic() + 90
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--ranks", default="1", help="which is lost in each attempt, as digits")
    parser.add_argument("--how", default="kill", choices=["kill", "stop", "pause", "raise"])
    parser.add_argument("--lose_after", type=int, default=5, help="steps of an attempt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=30)
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--stuck", help="a rank that stops at the same time")
    parser.add_argument("--fails_first", help="a rank that fails in attempt 1 before it joins")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--fork_server", action="store_true", help="lose ranks once it is ready")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
