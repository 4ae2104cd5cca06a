"""Train on through the loss of a worker or of a whole machine, with each sample once an epoch.

The launcher starts the script again with whoever is left; the script resumes by itself. The number
that is printed for each epoch stands for the order of its samples: it is that of a run in which
nothing was lost.

    accel launch --num_processes 2 --max_restarts 2 examples/elastic.py --lose worker
    torchrun --nproc_per_node 2 --max_restarts 2 examples/elastic.py --lose worker

On several machines, the same on each; one of them may be lost:

    accel launch --nnodes 1:2 --max_restarts 2 --rdzv_endpoint node0:29500 examples/elastic.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, DataLoaderConfiguration, set_seed
from accel_callbacks.callbacks import Checkpoint, Preemption


class Seen:
    """The samples of this epoch, as they were trained on; kept in checkpoints."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = list(state["samples"])

    def report(self, total: int) -> str:
        """Whether it was each sample once, and a number that stands for the order."""
        once = sorted(self.samples) == list(range(total))
        order = hashlib.sha256(repr(self.samples).encode()).hexdigest()[:8]
        return f"{len(self.samples)} samples, each once: {once}, order {order}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on through the loss of processes.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--project_dir", default="runs/elastic")
    parser.add_argument("--every_n_steps", type=int, default=10)
    parser.add_argument("--memory_every_n_steps", type=int, help="also keep the state in memory")
    parser.add_argument("--lose", choices=["worker", "machine"], help="what to lose, for once")
    parser.add_argument("--lose_rank", type=int, default=1, help="which, by the rank")
    parser.add_argument("--lose_at", type=int, default=57, help="at this step")
    return parser.parse_args()


def is_lost(args: argparse.Namespace, rank: int, step: int) -> bool:
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"  # unset: nobody starts it again
    return first and rank == args.lose_rank and step == args.lose_at


def lose(what: str) -> None:
    """What memory that runs out does to a worker, or a power cut to a machine."""
    # Windows has no signals: there, SIGTERM ends a process at once and without asking it.
    kill = getattr(signal, "SIGKILL", signal.SIGTERM)
    if what == "machine":
        os.kill(os.getppid(), kill)  # the launcher of this machine
    os.kill(os.getpid(), kill)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )


def main() -> None:
    args = parse_arguments()
    set_seed(0)
    saver = Checkpoint(
        every_n_steps=args.every_n_steps, memory_every_n_steps=args.memory_every_n_steps
    )
    accel = Accelerator(
        project_dir=args.project_dir,
        # One batch is shared by all processes, so fewer of them take the same steps. Orders by seed
        # depend on no other draw: fewer processes draw less for dropout.
        dataloader_config=DataLoaderConfiguration(split_batches=True, seeded_order=True),
        # A machine that is cut off closes no connection: this is how soon that is noticed.
        timeout=timedelta(seconds=30),
        callbacks=[saver, Preemption()],
    )
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
        torch.arange(len(digits.target)),
    )
    model, seen = build_model(), Seen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, args.batch_size, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    accel.register_for_checkpointing(seen)

    may_change = ["project_dir", "*every_n_steps", "lose*"]
    with accel.run("elastic", config=vars(args), may_change=may_change) as run:
        accel.print(f"{accel.num_processes} processes begin at step {run.global_step}", flush=True)
        for epoch in run.epochs(args.epochs):
            for images, targets, samples in loader:
                loss = nn.functional.cross_entropy(model(images), targets)
                accel.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.samples += accel.gather_for_metrics(samples).tolist()
                if args.lose and is_lost(args, accel.process_index, run.global_step):
                    lose(args.lose)
            if not run.should_stop:
                accel.print(f"epoch {epoch + 1}: {seen.report(len(data))}", flush=True)
                seen.samples = []
    accel.save_model(model, f"{args.project_dir}/model")
    accel.print(f"done on {accel.num_processes} processes after {run.global_step} steps")
    accel.end_training()


if __name__ == "__main__":
    main()
