"""Lose a rank many times, and show what the process that survives holds: the proof of `survive`.

    python scripts/survive_proof.py                    100 losses of rank 1, under DDP
    python scripts/survive_proof.py --losses 20 --job "--fsdp --workers 1"

The weights and the order of the samples are compared with those of a run that loses nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: What 100 losses may add: tables of Python and of the allocator grow by some pages now and then.
MOST_BYTES = 16 << 20


class Result(NamedTuple):
    """What a run has left behind.

    Attributes:
        facts: of each rank, one entry for each attempt; see ``survive_job.py``.
        weights: the file of the model.
        samples: in the order in which they were trained on.
        printed: by the launcher and the ranks.
    """

    facts: list[list[dict[str, Any]]]
    weights: bytes
    samples: list[int]
    printed: str


def command_of(folder: Path, processes: int, options: str, restarts: int) -> list[str]:
    """Return the command that runs the job."""
    launch = ["-m", "accel_callbacks.cli", "launch", "--cpu", f"--num_processes={processes}"]
    job = [str(ROOT / "scripts" / "survive_job.py"), str(folder), *options.split()]
    return [sys.executable, *launch, f"--max_restarts={restarts}", *job]


def run(folder: Path, processes: int = 2, options: str = "", restarts: int = 0) -> Result:
    """Run the job to its end.

    Raises:
        SystemExit: it ended with an error.
    """
    folder.mkdir(parents=True)
    done = subprocess.run(
        command_of(folder, processes, options, restarts),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return result_of(folder, processes, done.stdout)


def result_of(folder: Path, processes: int, printed: str) -> Result:
    """Read what a run has left in a folder."""
    facts = [
        [json.loads(line) for line in (folder / f"facts-{rank}.jsonl").read_text().splitlines()]
        for rank in range(processes)
    ]
    weights = (folder / "model" / "model.safetensors").read_bytes()
    samples = json.loads((folder / "seen.json").read_text())
    return Result(facts, weights, samples, printed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--job", default="", help="options of survive_job.py")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    epochs = f"--epochs {2 + args.losses * 5 // 8} {args.job}"  # eight steps an epoch, five lost
    losses = f"{epochs} --losses {args.losses}"
    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder, "whole"), args.processes, epochs)
        lost = run(Path(folder, "lost"), args.processes, losses, args.losses)
    survivor = min(lost.facts, key=lambda facts: len({fact["pid"] for fact in facts}))
    print("| loss | pid | first step | MiB | threads | descriptors | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for before, now in zip(survivor[:1] + survivor, survivor, strict=False):
        if now["attempt"] % max(1, args.losses // 10) and now is not survivor[-1]:
            continue
        seconds, memory = now["time"] - before["time"], now["rss"] / 2**20
        cells = (now["attempt"], now["pid"], now["first"], f"{memory:.1f}", now["threads"])
        print(f"| {' | '.join(map(str, cells))} | {now['descriptors']} | {seconds:.2f} |")
    # The first attempts still import, and fill caches. A save may have a file open at any moment.
    settled = survivor[min(5, len(survivor) - 1) :]
    few = max(1, len(settled) // 4)

    def grows(fact: str, by: int = 0) -> bool:
        before, after = (
            min(entry[fact] for entry in entries) for entries in (settled[:few], settled[-few:])
        )
        return after > before + by

    checks = {
        "one process": len({fact["pid"] for fact in survivor}) == 1,
        "all attempts": [fact["attempt"] for fact in survivor] == list(range(args.losses + 1)),
        "weights": lost.weights == whole.weights,
        "samples": lost.samples == whole.samples,
        "memory": not grows("rss", MOST_BYTES),
        "threads": not grows("threads"),
        "descriptors": not grows("descriptors"),
    }
    print(", ".join(f"{name}: {'as promised' if good else 'NOT'}" for name, good in checks.items()))
    if not all(checks.values()):
        print(lost.printed[-4000:], survivor[0]["names"], survivor[-1]["names"])
    return int(not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
