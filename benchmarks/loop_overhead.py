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
other work on the machine disturbs less.

What is added is the median of the differences within a round, and is printed with the quartiles of
these. Where half of the rounds spread over more than a quarter of it, or two ways to look at the
same rounds disagree by that much, there is no verdict. Then, and always, there are the counts: the
opcodes and the Python calls of a steady step (the median of 40) inside of our packages, for this
checkout and for the other one, which no load disturbs (see ``counts.py``).
``--counts`` prints them alone, in seconds.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import results
import torch
from counts import STEADY, WARM_UP, OpcodeCounter, counting_callbacks, loop, packages, parts

Contender = Callable[[], None]
STEPS = 400
WIDE = 0.25  # of what is added: rounds that differ by more than this decide nothing
ROOT = Path(__file__).resolve().parent.parent


def plain() -> Contender:
    model, optimizer, loader, scheduler = parts(STEPS)

    def run() -> None:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def ours(steps: int = STEPS) -> Contender:
    from accel_callbacks import Accelerator

    return loop(Accelerator(cpu=True), steps)


def ours_with_callbacks(steps: int = STEPS) -> Contender:
    from accel_callbacks import Accelerator

    return loop(Accelerator(cpu=True, callbacks=counting_callbacks(1)), steps)


def accelerate() -> Contender:
    from accelerate import Accelerator

    return loop(Accelerator(cpu=True), STEPS)


def fabric() -> Contender:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader, scheduler = parts(STEPS)
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


def counted(make: Callable[[int], Contender]) -> tuple[int, int, float]:
    """Opcodes and Python calls of a steady step, and the mean opcodes of 40 steps."""
    return OpcodeCounter(*packages()).steady(make(STEADY + 2 * WARM_UP))


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
        """Microseconds of CPU time a step."""
        return float(self._ask(f"time {name}"))

    def count(self, name: str) -> tuple[int, int, float]:
        """Opcodes and Python calls of a steady step, and the mean opcodes."""
        opcodes, calls, mean = self._ask(f"count {name}").split()
        return int(opcodes), int(calls), float(mean)

    def _ask(self, request: str) -> str:
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("The process of a checkout ended, see above.")
        return answer


def serve(root: Path) -> None:
    """Time or count the contender of each line of stdin with the code of a checkout."""
    import accel_callbacks

    if root not in Path(accel_callbacks.__file__).resolve().parents:
        raise SystemExit(f"{root} has no accel_callbacks: {accel_callbacks.__file__} is used.")
    makers = {make.__name__: make for make in (ours, ours_with_callbacks)}
    contenders = {name: make() for name, make in {"plain": plain, **makers}.items()}
    for line in sys.stdin:
        what, name = line.split()
        if what == "count":
            print(*counted(makers[name]), flush=True)
        else:
            print(timed(contenders[name], time.process_time), flush=True)


def measure(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Microseconds a step, for each contender and round."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer()
    for _ in range(rounds):
        for name in random.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return times


class Added:
    """What the rounds of a contender add to those of another one.

    Args:
        values: microseconds a step in each round.
        base: the same of the other contender, in the same rounds.
    """

    def __init__(self, values: Sequence[float], base: Sequence[float]) -> None:
        # The difference within a round, so that a slow moment counts for both sides.
        self.each = [value - other for value, other in zip(values, base, strict=True)]
        self.low, self.median, self.high = statistics.quantiles(self.each, n=4, method="inclusive")
        self.of_medians = statistics.median(values) - statistics.median(base)
        self.fastest = min(values) - min(base)

    @property
    def is_sure(self) -> bool:
        """False if the rounds spread too far, or two ways to look at them disagree."""
        limit = WIDE * self.median
        apart = max(abs(self.median - other) for other in (self.of_medians, self.fastest))
        return self.high - self.low <= limit and apart <= limit

    def __str__(self) -> str:
        return f"{self.median:+8.1f}   half of the rounds {self.low:+.1f} to {self.high:+.1f}"


def ratio(one: Added, other: Added) -> str:
    """Return the ratio of what two contenders add, or that there is none."""
    if one.is_sure and other.is_sure:
        return f"{one.median / other.median:.2f}"
    return "no verdict: the rounds differ too much. Leave the machine alone, or take more --rounds"


def compare(times: Mapping[str, Sequence[float]], checkouts: Iterable[str]) -> None:
    """Print what the code of two checkouts adds to plain torch, and the ratio."""
    for name in Checkout.NAMES[1:]:
        added = [Added(times[f"{key}: {name}"], times[f"{key}: plain"]) for key in checkouts]
        print(f"{name}, microseconds of CPU time a step:")
        for words, found in zip(("this checkout", "the other one"), added, strict=True):
            print(f"    {words:14} adds {found}   fastest rounds {found.fastest:+.1f}")
        print(f"    ratio: {ratio(*added)}")


def print_counts(checkouts: Mapping[str, Checkout]) -> None:
    """Print the counts of a steady step, of both checkouts if there are two."""
    for make in (ours, ours_with_callbacks):
        print(f"{make.__name__}, of a steady step inside of our packages:")
        if not checkouts:
            print(f"    {told(counted(make))}")
        for words, one in zip(("this checkout", "the other one"), checkouts.values(), strict=False):
            print(f"    {words:14} {told(one.count(make.__name__))}")


def told(counts: tuple[int, int, float]) -> str:
    opcodes, calls, mean = counts
    return f"{opcodes:6} opcodes {calls:5} Python calls   mean of {STEADY} steps {mean:.1f} opcodes"


def print_times(
    checkouts: Mapping[str, Checkout], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, list[float]]]:
    """Measure all contenders; print what each adds, and what ours adds to each peer's."""
    timers = {name: functools.partial(timed, run, clock) for name, run in available()}
    for title, checkout in checkouts.items():
        for name in Checkout.NAMES:
            timers[f"{title}: {name}"] = functools.partial(checkout.time, name)
    times = measure(timers, rounds)
    print(f"torch {torch.__version__}, {rounds} rounds of {STEPS} steps, microseconds a step")
    print(f"{'plain':22} {statistics.median(times['plain']):8.1f}")
    names = [name for name in times if ":" not in name and name != "plain"]
    added = {name: Added(times[name], times["plain"]) for name in names}
    for name, found in added.items():
        print(f"{name:22} {statistics.median(times[name]):8.1f}   adds {found}")
    for peer in ("accelerate", "fabric"):
        if peer in added:
            print(f"ours adds, of what {peer} adds: {ratio(added['ours'], added[peer])}")
    if checkouts:
        compare(times, checkouts)
    return {
        "microseconds a step": {"plain": times["plain"], **{name: times[name] for name in names}},
        "microseconds added to a step": {name: added[name].each for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with this one")
    parser.add_argument("--counts", action="store_true", help="count, and leave the time out")
    parser.add_argument(
        "--cpu_time", action="store_true", help="of the processor, which other work disturbs less"
    )
    results.add_option(parser)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, to show how much they differ")
    torch.set_num_threads(1)
    if options.serve is not None:
        serve(options.serve)
        return
    with contextlib.ExitStack() as stack:
        roots = {"this": ROOT, "against": options.against.resolve()} if options.against else {}
        checkouts = {title: stack.enter_context(Checkout(root)) for title, root in roots.items()}
        clock = time.process_time if options.cpu_time else time.perf_counter
        if not options.counts:
            figures = print_times(checkouts, options.rounds, clock)
            if options.write:
                results.write("loop_overhead", figures)
        print_counts(checkouts)


if __name__ == "__main__":
    main()
