"""Seconds from the command to the script's first line, and milliseconds of what answers at once.

    python benchmarks/cli.py

Launchers start the same script on two processes, in a random order in each round; the figure is
the median of the ratios to `torchrun` of the same round. `--local_addr` spares torchrun the name
server.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_LINE = 'import os, time; os.write(1, f"first {time.time()}\\n".encode())\n'
TWO = ["--num_processes", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCEL = [sys.executable, "-m", "accel_callbacks.cli"]
# Without GPUs it starts one process, whatever the number, and no launcher of torch's.
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *TWO]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--local_addr", "127.0.0.1"],
    "torchrun again": [*TORCHRUN, "--local_addr", "127.0.0.1"],
    "accel launch": [*ACCEL, "launch", "--cpu", *TWO],
    "accelerate launch (one)": ACCELERATE,
    "accel launch, one process": [*ACCEL, "launch", "--cpu"],
}
AT_ONCE = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "accel --help": [*ACCEL, "--help"],
    "accel config show": [*ACCEL, "config", "show"],
    "accel env --short": [*ACCEL, "env", "--short"],
    "accel launch --help": [*ACCEL, "launch", "--help"],
    "accel launch --dry_run": [*ACCEL, "launch", "--cpu", "--dry_run", *TWO, "first.py"],
    "accelerate --help": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "--help"],
}


def run(command: list[str], place: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCEL_HOME": place, "HF_HOME": place}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody compiles a package at each start
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


def to_first_line(command: list[str], place: str) -> float | None:
    """Seconds until the first process reached the script; None where the launcher failed."""
    started = time.time()
    done = run([*command, "first.py"], place)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("first ")]
    return min(float(line[1]) for line in lines) - started if lines else None


def to_answer(command: list[str], place: str) -> float | None:
    started = time.perf_counter()
    done = run(command, place)
    return (time.perf_counter() - started) * 1e3 if done.returncode == 0 else None


def measure(kinds: dict[str, list[str]], how: object, place: str, rounds: int) -> list[dict]:
    """What each took in each round; the first round fills the caches and does not count."""
    found = []
    for _ in range(rounds + 1):
        names = random.sample(list(kinds), len(kinds))
        found.append({name: how(kinds[name], place) for name in names})
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        Path(place, "first.py").write_text(FIRST_LINE)
        launches = measure(LAUNCHERS, to_first_line, place, rounds)
        answers = measure(AT_ONCE, to_answer, place, rounds)
    print(f"seconds to the first line of the script, {rounds} rounds; ratio to torchrun")
    for name in LAUNCHERS:
        values = [one[name] for one in launches if one[name] is not None]
        if not values:
            print(f"  {name:<26} not installed, or it failed")
            continue
        ratios = [one[name] / one["torchrun"] for one in launches if one[name] is not None]
        least, middle = min(values), statistics.median(values)
        print(
            f"  {name:<26} {middle:6.3f} s (least {least:.3f})  x {statistics.median(ratios):.3f}"
        )
    print(f"milliseconds to the end, {rounds} rounds: median (least)")
    for name in AT_ONCE:
        values = [one[name] for one in answers if one[name] is not None]
        if values:
            print(f"  {name:<26} {statistics.median(values):7.1f} ({min(values):.1f})")


if __name__ == "__main__":
    main()
