"""A small run for ``replay_proof.py``: digits or a GPT-2, with what a replay must repeat."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, set_seed
from accel_callbacks.callbacks import Checkpoint, SpikeGuard

_SAMPLES = 16 * 20 + 5  # the last batch is a short one
_POISONED = 16 + 2  # in the second batch of an epoch: before the first judgment, and after it
_STEPS = 40


def digits(*, norm: bool) -> tuple[nn.Module, TensorDataset]:
    """Return a network with dropout, and images of handwritten digits.

    Args:
        norm: with batch norm, which would hide an outlier.
    """
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    inputs = torch.tensor(images[:_SAMPLES], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    network = nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(8 * 6 * 6, 10),
    )
    return network, TensorDataset(inputs, torch.tensor(targets[:_SAMPLES]))


def gpt2() -> tuple[nn.Module, TensorDataset]:
    """Return a tiny GPT-2 of transformers with random weights and dropout, and random tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    tokens = torch.randint(64, (_SAMPLES, 16), generator=torch.Generator().manual_seed(1))
    return network, TensorDataset(tokens, tokens)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    if inputs.dim() == 2:
        loss: torch.Tensor = model(input_ids=inputs, labels=targets).loss
        return loss
    return nn.functional.cross_entropy(model(inputs), targets)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=("digits", "gpt2"), default="digits")
    parser.add_argument("--fsdp", action="store_true", help="shard by FSDP2")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="of the loader")
    parser.add_argument("--save_every", type=int, default=9, help="steps")
    parser.add_argument("--save_epochs", action="store_true", help="save at each end of an epoch")
    parser.add_argument("--save_inside", action="store_true", help="also inside of windows")
    parser.add_argument("--kill_at", type=int, help="step at which a process is killed, once")
    parser.add_argument("--guard", choices=("memory", "checkpoints"), help="heal a spike from")
    return parser.parse_args()


def callbacks_of(args: argparse.Namespace) -> list[Any]:
    """Return the callbacks: one that saves, and one that heals a spike if that is asked for."""
    kept = None if args.guard == "checkpoints" else 2
    when = {"every_n_epochs": 1} if args.save_epochs else {"every_n_steps": args.save_every}
    saver = Checkpoint(**when, keep_last=kept)
    if args.guard is None:
        return [saver]
    every = 8 if args.guard == "memory" else None
    return [saver, SpikeGuard(warmup=10, snapshot_every_n_steps=every)]


def main() -> None:
    args = parse_arguments()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if args.fsdp else None
    accel = Accelerator(
        cpu=True,
        project_dir=args.folder,
        gradient_accumulation_steps=args.accumulate,
        fsdp_plugin=plugin,
        callbacks=callbacks_of(args),
    )
    set_seed(0)
    shuffle = args.guard is None
    network, data = digits(norm=shuffle) if args.model == "digits" else gpt2()
    if args.guard is not None:
        data.tensors[0][_POISONED] *= 1e4
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    size = 16 // accel.num_processes
    loader = DataLoader(data, size, shuffle=shuffle, num_workers=args.workers)
    model, optimizer, loader = accel.prepare(network, optimizer, loader)
    scheduler = accel.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98))
    killed = args.folder / "killed"
    epochs = -(-_STEPS // -(-len(loader) // args.accumulate))
    with accel.run("proof", config={"model": args.model}) as run:
        for _ in run.epochs(epochs):
            for number, (inputs, targets) in enumerate(loader):
                with accel.accumulate(model):
                    accel.backward(loss_of(model, inputs, targets))
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if args.save_inside and number == args.accumulate:
                    accel.save_state()
                last = accel.process_index == accel.num_processes - 1
                if run.global_step == args.kill_at and last and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
    accel.end_training()


if __name__ == "__main__":
    main()
