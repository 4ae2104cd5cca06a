"""Seconds from the loss of a process to the next step of a launch that restarts.

    python benchmarks/restart.py --rounds 5

Two processes train a small model with AdamW and a checkpoint in the background; rank 1 kills itself
after step 57, and the launcher starts both again, which resume at step 40.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import json, os, signal, sys, time
marks = {"script": time.time()}
import torch
marks["torch"] = time.time()
from accel_callbacks import Accelerator, set_seed
from accel_callbacks.callbacks import Checkpoint
marks["library"] = time.time()
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
set_seed(0)
accel = Accelerator(project_dir=sys.argv[1], callbacks=[Checkpoint(every_n_steps=20)])
marks["group"] = time.time()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
marks["optimizer"] = time.time()
data = torch.utils.data.DataLoader(torch.randn(2048, 64), batch_size=8, shuffle=True)
model, optimizer, data = accel.prepare(model, optimizer, data)
marks["prepare"] = time.time()
with accel.run("restart") as run:
    marks["run"] = time.time()
    for batch in data:
        accel.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if "step" not in marks:
            marks["step"] = time.time()
            marks["at"] = run.global_step
        if attempt == 0 and run.global_step == 57:
            time.sleep(1.0)  # the checkpoint of step 40 is written
            if rank == "1":
                with open("killed.json", "w") as file:
                    json.dump(time.time(), file)
                os.kill(os.getpid(), signal.SIGKILL)
        if run.global_step == 60:
            break
with open(f"{attempt}-{rank}.json", "w") as file:
    json.dump(marks, file)
accel.end_training()
"""
PARTS = ("script", "torch", "library", "group", "optimizer", "prepare", "run", "step")


def restart(folder: str) -> dict[str, float]:
    """Return the seconds of each part, and from the kill to the end of the next step."""
    place = Path(folder)
    (place / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCEL_HOME": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody compiles a package at each start
    words = ["--cpu", "--num_processes", "2", "--max_restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *words, "train.py", "runs"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    killed = json.loads((place / "killed.json").read_text())
    ranks = [json.loads((place / f"1-{rank}.json").read_text()) for rank in range(2)]
    if {marks["at"] for marks in ranks} != {41}:
        raise SystemExit(f"resumed elsewhere: {ranks}")
    seconds, before = {}, killed
    for part in PARTS:
        reached = max(marks[part] for marks in ranks)
        seconds["to the script" if part == "script" else part] = reached - before
        before = reached
    seconds["sum"] = before - killed
    return seconds


def main() -> None:
    """Measure, and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    measured = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            seconds = restart(folder)
        time.sleep(1.0)
        if number:  # the first round fills the caches
            measured.append(seconds)
    for part in measured[0]:
        print(f"{part:16}{statistics.median(seconds[part] for seconds in measured):9.3f}")
    sums = [seconds["sum"] for seconds in measured]
    print(f"{min(sums):.2f} to {max(sums):.2f} s")


if __name__ == "__main__":
    main()
