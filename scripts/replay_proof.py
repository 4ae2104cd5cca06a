"""Run small trainings, and replay random steps of them: the proof of `accel replay`.

    python scripts/replay_proof.py                      200 random steps, over all cases
    python scripts/replay_proof.py "killed" --steps 20  only cases with that word in their name

A replay begins at the nearest checkpoint before a step, or at the start of the run, and compares
each step on the way, on all ranks. So random steps behind one checkpoint are replayed together.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from accel_callbacks.addons.journal import Journal
from accel_callbacks.addons.journal.replay import (
    Difference,
    Replay,
    ReplayRequest,
    first_difference,
)

ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """A run: its number of processes, and the options of ``replay_job.py``."""

    processes: int
    options: str = ""


CASES = {
    "digits": Case(1),
    "digits, windows with tails, loader workers": Case(1, "--accumulate 3 --workers 2"),
    "digits, saved inside of windows": Case(1, "--accumulate 3 --save_inside --save_every 100"),
    "digits, killed and resumed": Case(1, "--kill_at 23 --workers 1"),
    "digits, healed from memory": Case(1, "--guard memory"),
    "digits, healed from memory, saved by epochs": Case(1, "--guard memory --save_epochs"),
    "digits, healed from checkpoints": Case(1, "--guard checkpoints"),
    "digits, DDP": Case(2),
    "digits, DDP, healed from memory, killed": Case(2, "--guard memory --kill_at 31"),
    "digits, FSDP2, windows with tails": Case(2, "--fsdp --accumulate 3"),
    "digits, DDP, killed and resumed": Case(4, "--kill_at 23"),
    "GPT-2, dropout": Case(1, "--model gpt2"),
    "GPT-2, dropout, killed and resumed": Case(1, "--model gpt2 --kill_at 23"),
    "GPT-2, DDP, windows with tails": Case(2, "--model gpt2 --accumulate 3"),
    "GPT-2, FSDP2, killed and resumed": Case(2, "--model gpt2 --fsdp --kill_at 23"),
    "GPT-2, DDP, dropout": Case(4, "--model gpt2"),
    "GPT-2, FSDP2, dropout": Case(4, "--model gpt2 --fsdp"),
}


class Result(NamedTuple):
    """What the replays of a case showed.

    Attributes:
        steps: the random steps.
        compared: all steps that were compared, on all ranks.
        replays: number of replays.
        differences: the first one of each replay that has one.
    """

    steps: int
    compared: int
    replays: int
    differences: list[Difference]


def command_of(case: Case, folder: Path) -> list[str]:
    """Return the command that runs a case."""
    job = [str(ROOT / "scripts" / "replay_job.py"), str(folder), *case.options.split()]
    if case.processes == 1:
        return [sys.executable, *job]
    launch = ["-m", "accel_callbacks.cli", "launch", "--cpu"]
    return [sys.executable, *launch, f"--num_processes={case.processes}", *job]


def run(case: Case, folder: Path) -> Journal:
    """Run a case to its end, and return its journal.

    Raises:
        SystemExit: it ended with an error, or was not killed where it should have been.
    """
    folder.mkdir(parents=True)
    starts = 2 if "--kill_at" in case.options else 1
    for start in range(starts):
        done = subprocess.run(
            command_of(case, folder),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        last = start == starts - 1
        if (done.returncode == 0) != last:
            raise SystemExit(f"{case} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return Journal.read(folder)


def together(journal: Journal, steps: Iterable[int]) -> list[Replay]:
    """Return one replay for all steps behind the same checkpoint: that of the last of them."""
    replays: dict[str | None, Replay] = {}
    for step in sorted(steps):
        replay = Replay(journal, step)
        replays[replay.checkpoint] = replay
    return list(replays.values())


def prove(case: Case, folder: Path, count: int, chance: random.Random) -> Result:
    """Run a case, and replay random steps of it from the command that its journal recorded."""
    journal = run(case, folder / "run")
    of_ranks = [
        set(journal.rows(rank, repeated=False)["step"].tolist()) for rank in range(case.processes)
    ]
    steps = chance.sample(sorted(set.intersection(*of_ranks)), count)
    replays = together(journal, steps)
    compared, differences = 0, []
    for number, replay in enumerate(replays):
        now = replay.run(ReplayRequest(str(folder / f"replay-{number}"), replay.step))
        difference = first_difference(journal, now, replay.first, replay.step)
        if difference is not None:
            differences.append(difference)
        else:
            compared += replay.step - replay.first + 1
    return Result(len(steps), compared, len(replays), differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="?", default="", help="in the names of the cases")
    parser.add_argument("--steps", type=int, default=200, help="random steps in all")
    parser.add_argument("--seed", type=int, default=0, help="of the random steps")
    args = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if args.word in name}
    if not chosen:
        parser.error(f"no case has {args.word!r} in its name")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chance, total, failed = random.Random(args.seed), 0, 0
    print("| case | processes | random steps | compared | replays | bits | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, (name, case) in enumerate(chosen.items()):
        count = (number + 1) * args.steps // len(chosen) - number * args.steps // len(chosen)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            result = prove(case, Path(folder), count, chance)
        bits = "; ".join(map(str, result.differences)) or "equal"
        cells = (name, case.processes, *result[:3], bits, f"{time.perf_counter() - began:.0f}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        total += result.steps
        failed += bool(result.differences)
    print(f"{total} random steps, {failed} cases with a difference")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
