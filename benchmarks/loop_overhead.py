"""Microseconds a step that a wrapped loop adds to plain torch, against Accelerate and Fabric.

    pip install "accel-callbacks[bench]"        (in an environment of its own)
    python benchmarks/loop_overhead.py [--against PATH_OF_ANOTHER_CHECKOUT]

All contenders run the same small step in one process, in rounds whose order is shuffled, so that
what else the machine does falls on all of them. The loop is the same for each: prepared loader,
`accumulate` where the contender has it, backward, clipping left out, optimizer, scheduler,
zero_grad. Fabric has no accumulation context and does without. Peers that are not installed are
left out.

With ``--against``, the code of this checkout and of the other one run in a process each, whose
rounds are interleaved with the others. Each is compared with the plain loop in its own process, so
that the ratio of what the two add is of the same moments. These two are measured in CPU time, which
other work on the machine disturbs less; the quartiles of the difference show how much it does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Contender = Callable[[], None]
STEPS = 400
ROOT = Path(__file__).resolve().parent.parent


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


def timed(run: Contender, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds a step."""
    gc.collect()
    started = clock()
    run()
    return (clock() - started) / STEPS * 1e6


class Checkout:
    """A process with the code of a checkout, that runs one of its contenders on request."""

    NAMES = ("plain", "ours", "ours_with_callbacks")

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(root)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Checkout:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def time(self, name: str) -> float:
        with contextlib.suppress(BrokenPipeError):
            print(name, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("The process of a checkout ended, see above.")
        return float(answer)


def serve(root: Path) -> None:
    """Time the contender of each line of stdin with the code of a checkout."""
    import accel_callbacks

    if root not in Path(accel_callbacks.__file__).resolve().parents:
        raise SystemExit(f"{root} has no accel_callbacks: {accel_callbacks.__file__} is used.")
    contenders = {make.__name__: make() for make in (plain, ours, ours_with_callbacks)}
    for line in sys.stdin:
        print(timed(contenders[line.strip()], time.process_time), flush=True)


def measure(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a step, for each contender and round."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer()
    for _ in range(rounds):
        for name in random.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return times


def compare(times: dict[str, list[float]], title: str, other: str) -> None:
    """Print what the code of two checkouts adds to plain torch, and the ratio."""
    for name in Checkout.NAMES[1:]:
        added, fastest = {}, {}
        for key in (title, other):
            mine, base = times[f"{key}: {name}"], times[f"{key}: plain"]
            added[key] = [value - without for value, without in zip(mine, base, strict=True)]
            fastest[key] = min(mine) - min(base)
        medians = {key: statistics.median(values) for key, values in added.items()}
        further = [a - b for a, b in zip(added[title], added[other], strict=True)]
        low, middle, high = statistics.quantiles(further, n=4)
        print(f"{name}, CPU time that this checkout adds, and the other one:")
        for words, found in (("median", medians), ("fastest rounds", fastest)):
            print(
                f"    {words:16} {found[title]:8.1f} {found[other]:8.1f}"
                f"   ratio {found[title] / found[other]:.3f}"
            )
        print(f"    difference       {middle:+8.1f}   half of the rounds {low:+.1f} to {high:+.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with this one")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against and options.rounds < 2:
        parser.error("--against needs two rounds or more, to show how much they differ")
    torch.set_num_threads(1)
    if options.serve is not None:
        serve(options.serve)
        return
    rounds = options.rounds
    timers = {name: functools.partial(timed, run) for name, run in available()}
    with contextlib.ExitStack() as stack:
        roots = {"this": ROOT, "against": options.against.resolve()} if options.against else {}
        for title, root in roots.items():
            checkout = stack.enter_context(Checkout(root))
            for name in Checkout.NAMES:
                timers[f"{title}: {name}"] = functools.partial(checkout.time, name)
        times = measure(timers, rounds)
    base = times["plain"]
    # The difference within a round, so that a slow moment counts for both sides.
    added = {
        name: statistics.median(t - b for t, b in zip(values, base, strict=True))
        for name, values in times.items()
        if ":" not in name
    }
    print(f"torch {torch.__version__}, {rounds} rounds of {STEPS} steps, microseconds a step")
    for name in added:
        print(f"{name:22} {statistics.median(times[name]):8.1f}   adds {added[name]:+8.1f}")
    for peer in ("accelerate", "fabric"):
        if peer in added:
            print(f"ours adds {added['ours'] / added[peer]:.2f} of what {peer} adds")
    if options.against:
        compare(times, *roots)


if __name__ == "__main__":
    main()
