"""Milliseconds to plan a model of 10,000 units, against Accelerate's map of the same model.

    pip install "accel-callbacks[bench]"        (in an environment of its own)
    python benchmarks/plan.py

`plan` has sizes alone; `infer_auto_device_map` has a model on the meta device, which it measures as
well. Processor time of the best of some rounds, so that neighbors on the machine matter little.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from accel_callbacks.models.offload import Unit, Weights, plan
from accel_callbacks.utils import infer_auto_device_map

GOAL = 200.0  # milliseconds
KINDS: dict[str, Callable[[random.Random], int]] = {
    "alike": lambda source: 10**6,
    "two sizes": lambda source: source.choice([10**6, 10**8]),
    "random sizes": lambda source: source.randint(1, 10**9),
}


def best(function: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def budgets(total: int) -> dict[str, dict[Any, int]]:
    return {
        "fits on two": {0: total, 1: total},
        "host and disk": {0: total // 2, "cpu": total // 4},
        "three, host, disk": {0: total // 4, 1: total // 4, 2: total // 4, "cpu": total // 8},
    }


def plans(units: int, rounds: int) -> float:
    worst = 0.0
    for kind, size in KINDS.items():
        source = random.Random(0)
        made = tuple(Unit(f"b.{n}", size(source), source.randint(0, 9)) for n in range(units))
        weights = Weights(made)
        for name, memory in budgets(weights.nbytes).items():
            found = best(lambda w=weights, m=memory: plan(w, m), rounds)  # type: ignore[misc]
            worst = max(worst, found)
            print(f"plan, {kind}, {name}: {found:.1f} ms")
    return worst


def maps(layers: int, rounds: int) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    memory: dict[Any, int] = {0: total // 2, "cpu": total}
    ours = best(lambda: infer_auto_device_map(model, memory), rounds)
    print(f"infer_auto_device_map of {layers} layers: {ours:.1f} ms")
    try:
        from accelerate.utils import infer_auto_device_map as theirs
    except ImportError:
        return
    peer = best(lambda: theirs(model, dict(memory)), 1)
    print(f"the same by Accelerate: {peer:.1f} ms, {peer / ours:.0f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    worst = plans(args.units, args.rounds)
    maps(args.layers, args.rounds)
    print(f"worst plan: {worst:.1f} ms, to be {GOAL:.0f} or less")
    sys.exit(worst > GOAL)


if __name__ == "__main__":
    main()
