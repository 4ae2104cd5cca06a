"""Microseconds a step that a wrapped loop adds to plain torch, against Accelerate and Fabric.

    pip install "accel-callbacks[bench]"        (in an environment of its own)
    python benchmarks/loop_overhead.py

All contenders run the same small step in one process, in rounds whose order is shuffled, so that
what else the machine does falls on all of them. The loop is the same for each: prepared loader,
`accumulate` where the contender has it, backward, clipping left out, optimizer, scheduler,
zero_grad. Fabric has no accumulation context and does without. Peers that are not installed are
left out.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Contender = Callable[[], None]
STEPS = 400


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 8, 32)), batch_size=8)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 10_000)


def plain() -> Contender:
    model, optimizer, loader, scheduler = parts()

    def run() -> None:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def accumulating(accelerator) -> Contender:
    """The loop of Accelerate's quick tour, which is ours too."""
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())

    def run() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def ours() -> Contender:
    from accel_callbacks import Accelerator

    return accumulating(Accelerator(cpu=True))


def ours_with_callbacks() -> Contender:
    from accel_callbacks import Accelerator, Callback

    class Counter(Callback):
        count = 0

        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            self.count += 1

    return accumulating(Accelerator(cpu=True, callbacks=[Counter() for _ in range(1)]))


def accelerate() -> Contender:
    from accelerate import Accelerator

    return accumulating(Accelerator(cpu=True))


def fabric() -> Contender:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader, scheduler = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def run() -> None:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def available() -> Iterator[tuple[str, Contender]]:
    for make in (plain, ours, ours_with_callbacks, accelerate, fabric):
        try:
            yield make.__name__, make()
        except ImportError as error:
            print(f"{make.__name__:22} left out: {error}")


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Microseconds a step, for each contender and round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            gc.collect()
            started = time.perf_counter()
            contenders[name]()
            times[name].append((time.perf_counter() - started) / STEPS * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    times = measure(dict(available()), rounds)
    base = times["plain"]
    # The difference within a round, so that a slow moment counts for both sides.
    added = {
        name: statistics.median(t - b for t, b in zip(values, base, strict=True))
        for name, values in times.items()
    }
    print(f"torch {torch.__version__}, {rounds} rounds of {STEPS} steps, microseconds a step")
    for name, values in times.items():
        print(f"{name:22} {statistics.median(values):8.1f}   adds {added[name]:+8.1f}")
    for peer in ("accelerate", "fabric"):
        if peer in added:
            print(f"ours adds {added['ours'] / added[peer]:.2f} of what {peer} adds")


if __name__ == "__main__":
    main()
