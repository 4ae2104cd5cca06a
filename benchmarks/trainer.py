"""A step of transformers' Trainer on this library, as a ratio to one on Accelerate.

    python benchmarks/trainer.py --peer ../with-accelerate/bin/python

Each round trains the same tiny GPT-2 in a fresh process of each contender, in random order, and
compares the processor time of their steps; the losses must be the same. --width makes the step
longer. Then the Python calls of a step, which no load disturbs, and the milliseconds that
`import accelerate` adds to `import torch`. --instructions counts those of the processor in place of
time, by valgrind: times of fresh processes differ by more than the contenders do. It needs
transformers.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LENGTH, WORDS, WARM_UP = 16, 64, 20
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}
IMPORTS = {
    "import accelerate": "import accelerate",
    "from accelerate import Accelerator": "from accelerate import Accelerator",
}
TIMED = """
import time, torch
started = time.perf_counter()
{alias}
{snippet}
print((time.perf_counter() - started) * 1e3)
"""
ALIAS = "from accel_callbacks import compat; compat.install()"
Row = dict[str, Any]


# --- in a process of one contender ------------------------------------------------------------


def train(case: str, steps: int, width: int, *callbacks: Any) -> Row:
    """Return milliseconds of processor time of a steady step, and the losses."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.marks.append(time.process_time())

    torch.set_num_threads(1)
    set_seed(0)
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    tokens = torch.randint(0, WORDS, (64, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **{"output_dir": folder, "use_cpu": True, "report_to": [], "save_strategy": "no"},
            **{"disable_tqdm": True, "max_steps": steps + WARM_UP, "logging_steps": 50},
            **{"per_device_train_batch_size": 2},
            **CASES[case],
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            callbacks=[clock, *callbacks],
        )
        trainer.train()
    marks = clock.marks[WARM_UP:]
    times = [after - before for before, after in itertools.pairwise(marks)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # The mean of all but the longest tenth, which a median would not see the evaluations of.
    step = statistics.mean(sorted(times)[: len(times) * 9 // 10])
    return {"step": step * 1e3, "losses": losses}


def count_instructions(case: str, steps: int, width: int) -> Row:
    """Have valgrind count the instructions of steady steps."""
    import transformers

    class Counter(transformers.TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step in (WARM_UP, WARM_UP + steps):
                switch = "on" if state.global_step == WARM_UP else "off"
                subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], check=True)

    train(case, steps + 1, width, Counter())
    return {"steps": steps}


def calls(case: str, width: int) -> Row:
    """Return the Python and C functions that a steady step calls."""
    train(case, 4, width)  # what is called once
    counts = []
    for steps in (20, 60):
        with cProfile.Profile() as profile:
            train(case, steps, width)
        counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return {"calls": (counts[1] - counts[0]) / 40}


# --- in the process that asks -----------------------------------------------------------------


def child(python: str, *words: str) -> str:
    """Return the last line that a fresh process prints; raise RuntimeError if it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "ended silently")[-2000:])
    return done.stdout.splitlines()[-1]


def spread(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):7.3f} [{ordered[0]:.3f}..{ordered[-1]:.3f}]"


def compare(title: str, unit: str, rows: dict[str, list[float]]) -> None:
    """Print the times of each contender, and the ratio within the rounds."""
    line = ", ".join(f"{name} {spread(times)}" for name, times in rows.items() if times)
    print(f"{title}: {line} {unit}", flush=True)
    if rows.get("accelerate"):
        pairs = zip(rows["ours"], rows["accelerate"], strict=True)
        print(f"{'':{len(title)}}  ours / accelerate {spread(own / peer for own, peer in pairs)}")


def measure_steps(case: str, peers: dict[str, list[str]], args: argparse.Namespace) -> None:
    rows: dict[str, list[float]] = {name: [] for name in peers}
    words = ["--one", case, "--steps", str(args.steps), "--width", str(args.width)]
    for _ in range(args.rounds):
        losses = {}
        for name in random.sample(list(peers), len(peers)):
            row = json.loads(child(*peers[name], __file__, *words))
            rows[name].append(row["step"])
            losses[name] = row["losses"]
        assert len(set(map(tuple, losses.values()))) == 1, f"the losses differ: {losses}"
    compare(case, "ms a step", rows)


def measure_calls(case: str, peers: dict[str, list[str]], width: int) -> None:
    words = ["--one", case, "--calls", "--width", str(width)]
    rows = {name: json.loads(child(*peers[name], __file__, *words))["calls"] for name in peers}
    line = ", ".join(f"{name} {count:.0f}" for name, count in rows.items())
    ratio = f": {rows['ours'] / rows['accelerate']:.3f}" if "accelerate" in rows else ""
    print(f"{case}: {line} calls a step{ratio}", flush=True)


def measure_instructions(case: str, peers: dict[str, list[str]], args: argparse.Namespace) -> None:
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
    words = [__file__, "--one", case, "--instructions", "--steps", "10", "--width", str(args.width)]
    counts: dict[str, float] = {}
    for name, command in peers.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "counts")
            child(*valgrind, f"--callgrind-out-file={path}", *command, *words)
            total = re.search(r"^totals: (\d+)", path.read_text(), re.M)
            assert total is not None, "valgrind has counted nothing"
            counts[name] = int(total[1]) / 10
    line = ", ".join(f"{name} {count / 1e6:.2f}" for name, count in counts.items())
    ratio = f": {counts['ours'] / counts['accelerate']:.3f}" if "accelerate" in counts else ""
    print(f"{case}: {line} million instructions a step{ratio}", flush=True)


def measure_imports(snippet: str, peers: dict[str, list[str]], rounds: int) -> None:
    rows: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):  # the first one compiles
        for name in random.sample(list(peers), len(peers)):
            source = TIMED.format(alias=ALIAS if name == "ours" else "", snippet=IMPORTS[snippet])
            value = float(child(peers[name][0], "-c", source))
            if number:
                rows[name].append(value)
    compare(snippet, "ms after `import torch`", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--peer", help="the interpreter of an environment that has Accelerate")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--calls", action="store_true", help="count the calls of a step alone")
    parser.add_argument("--instructions", action="store_true", help="count those of a step alone")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.calls:
            row = calls(args.one, args.width)
        else:
            measure = count_instructions if args.instructions else train
            row = measure(args.one, args.steps, args.width)
        print(json.dumps(row))
        return
    # The same interpreter, so that nothing but the word of the command differs.
    python = args.peer or sys.executable
    peers = {"ours": [python, "-m", "accel_callbacks.as_accelerate"]}
    if args.peer:
        peers["accelerate"] = [python]
    cases = args.only.split(",")
    if args.instructions:
        for case in cases:
            measure_instructions(case, peers, args)
        return
    for case in cases:
        measure_calls(case, peers, args.width)
    if args.calls:
        return
    print(f"{args.rounds} rounds of {args.steps} steps, {os.cpu_count()} cores", flush=True)
    for case in cases:
        measure_steps(case, peers, args)
    for snippet in IMPORTS:
        measure_imports(snippet, peers, args.rounds)


if __name__ == "__main__":
    main()
