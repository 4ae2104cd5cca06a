"""What the journal adds to a training step: opcodes, Python calls, and a ratio of times.

    python benchmarks/journal.py [--rounds 31]

The same small step runs in a run with a journal, and in one without; their rounds alternate, so
that what else the machine does falls on both. The time is that of the processor, which includes
what the journal's own thread does. The counts are those of a steady step (the median of 40) on the
thread of the loop, which no load disturbs (see ``counts.py``).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import results
import torch
from counts import STEADY, WARM_UP, OpcodeCounter, loop, packages

STEPS = 400


def prepared(stack: ExitStack, folder: Path, steps: int, *, journal: bool) -> Any:
    """Return the loop of a run, which goes on until the stack is closed."""
    from accel_callbacks import Accelerator

    accelerator = Accelerator(cpu=True, project_dir=folder / str(journal), journal=journal)
    stack.enter_context(accelerator.run("journal"))
    return loop(accelerator, steps)


def counts(folder: Path, *, journal: bool) -> tuple[int, int]:
    """Return the opcodes and Python calls of a steady step."""
    with ExitStack() as stack:
        run = prepared(stack, folder, STEADY + 2 * WARM_UP, journal=journal)
        opcodes, calls, _ = OpcodeCounter(*packages()).steady(run)
    return opcodes, calls


def times(folder: Path, rounds: int) -> dict[bool, list[float]]:
    """Return microseconds of processor time a step, with a journal and without, by round."""
    each: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        runs = {on: prepared(stack, folder, STEPS, journal=on) for on in (True, False)}
        for run in runs.values():
            run()
        for number in range(rounds):
            for on in (True, False) if number % 2 else (False, True):
                began = time.process_time()
                runs[on]()
                each[on].append((time.process_time() - began) / STEPS * 1e6)
    return each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    results.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare, noted = (counts(folder / "counts", journal=on) for on in (False, True))
        each = times(folder / "times", options.rounds)
    print(f"opcodes of a step: {bare[0]} without, {noted[0]} with: {noted[0] - bare[0]} added")
    print(f"calls of a step:   {bare[1]} without, {noted[1]} with: {noted[1] - bare[1]} added")
    added = [on - off for on, off in zip(each[True], each[False], strict=True)]
    ratios = [on / off for on, off in zip(each[True], each[False], strict=True)]
    print(
        f"microseconds a step: {statistics.median(each[False]):.1f} without, "
        f"{statistics.median(added):+.2f} with (least {min(each[True]) - min(each[False]):+.2f}), "
        f"ratio {statistics.median(ratios):.3f}"
    )
    if options.write:
        figures = {"without": each[False], "added": added}
        results.write("journal", {"microseconds a step": figures, "ratio": {"with": ratios}})


if __name__ == "__main__":
    main()
