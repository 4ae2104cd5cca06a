"""Lose processes of small runs at random moments, and compare each with the run that lost nothing.

    python scripts/loss_proof.py                        10 losses of each layout
    python scripts/loss_proof.py DDP --losses 100       only layouts with that word in their name
    python scripts/loss_proof.py --ranks others --at_once 2 --seed 1    two, but never rank 0
    python scripts/loss_proof.py --survive              ranks that are left keep their process
    python scripts/loss_proof.py DDP --machines 2       each as a launcher of its own
    python scripts/loss_proof.py --memory_every 0       resume from checkpoints alone

Each loss is a SIGKILL to random ranks, some milliseconds after a random step, so that it also
comes in the middle of a snapshot. A restart resumes from the state in host memory, with --survive
under DDP and HSDP from the state of ranks that are left, where that is whole. As many processes
are there after each loss as before: on one machine the launcher starts no fewer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.ports import free_port  # noqa: E402

LAYOUTS = {"DDP": 2, "DDP of 4": 4, "FSDP2": 2, "FSDP2 of 4": 4, "HSDP, 2 x 2": 4}
_EPOCH = 21  # steps
_LONGEST_DELAY = 0.02  # seconds from the end of a step to the SIGKILL


class Loss(NamedTuple):
    """Ranks that are killed, the first step after which, and how many seconds later.

    Those with negative seconds are killed as the next step begins.
    """

    ranks: tuple[int, ...]
    step: int
    delay: float

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.ranks))}@{self.step}@{self.delay}"

    @classmethod
    def parse(cls, text: str) -> Loss:
        ranks, step, delay = text.split("@")
        return cls(tuple(map(int, ranks.split("+"))), int(step), float(delay))


class Line(NamedTuple):
    """What rank 0 notes of a step: the attempt, when it ended, and what must be as in any other."""

    attempt: int
    step: int
    time: float
    content: str


class Result(NamedTuple):
    """What the losses of a run have cost.

    Attributes:
        repeated: steps that were done again, for each loss.
        seconds: from the last step before to the first one after it.
        from_memory: how many restarts resumed from memory.
        living: how many of these from the state of ranks that were left.
        differences: steps, and files of weights, that are not those of the run without a loss.
        samples: how many were trained on more often in an epoch, or less, than without a loss.
    """

    repeated: list[int]
    seconds: list[float]
    from_memory: int
    living: int
    differences: list[str]
    samples: int


# --- the run ------------------------------------------------------------------------------------


def job(args: argparse.Namespace) -> None:
    """Train digits on this process; note each step on rank 0, and lose the ranks of ``--plan``."""
    import torch
    from replay_job import digits, loss_of
    from torch.utils.data import DataLoader, TensorDataset

    from accel_callbacks import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        set_seed,
    )
    from accel_callbacks.callbacks import Checkpoint

    sharded = not args.job.startswith("DDP")
    shards = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    axes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    saver = Checkpoint(
        every_n_steps=args.save_every, memory_every_n_steps=args.memory_every or None, keep_last=2
    )
    accel = Accelerator(
        cpu=True,
        project_dir=args.folder,
        fsdp_plugin=shards,
        parallelism_config=ParallelismConfig(**axes) if args.job.startswith("HSDP") else None,
        callbacks=[saver],
    )
    set_seed(0)
    network, data = digits(norm=True)
    samples = TensorDataset(*data.tensors, torch.arange(len(data)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    loader = DataLoader(samples, 16 // accel.num_processes, shuffle=True)
    model, optimizer, loader = accel.prepare(network, optimizer, loader)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if args.machines > 1:  # each launcher has a count of its own
        attempts = args.folder / "attempts"
        if accel.is_main_process:
            with attempts.open("a") as file:
                file.write(".")
        accel.wait_for_everyone()
        attempt = attempts.stat().st_size - 1
    losses = list(map(Loss.parse, args.plan.split()))
    loss_now, dies_next = losses[attempt] if attempt < len(losses) else None, False
    with accel.run("loss") as run, open(args.folder / "steps", "ab", buffering=0) as steps:
        for _ in run.epochs(args.epochs):
            for inputs, targets, numbers in loader:
                if dies_next:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = loss_of(model, inputs, targets)
                accel.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                batch = accel.gather(numbers).tolist()
                mean = accel.reduce(loss.detach(), "mean").item().hex()
                if accel.is_main_process:
                    line = f"{attempt} {run.global_step} {time.time()} {mean}:{batch}"
                    steps.write(line.replace(", ", ",").encode() + b"\n")
                if loss_now and run.global_step >= loss_now.step:
                    dies, delay = accel.process_index in loss_now.ranks, loss_now.delay
                    loss_now, dies_next = None, dies and delay < 0
                    if dies and delay >= 0:
                        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    accel.save_model(model, args.folder / "model")
    accel.end_training()


# --- the proof ----------------------------------------------------------------------------------


def run(layout: str, folder: Path, plan: list[Loss], args: argparse.Namespace) -> str:
    """Run the job to its end, and return what was printed.

    Raises:
        SystemExit: it ended with an error.
    """
    folder.mkdir(parents=True)
    options = [f"--folder={folder}", f"--memory_every={args.memory_every}"]
    options += [f"--save_every={args.save_every}", f"--epochs={args.epochs}"]
    options += ["--survive"] if args.survive else []
    options += [f"--plan={' '.join(map(str, plan))}"]
    options += [f"--machines={args.machines}"]
    launch = ["-m", "accel_callbacks.cli", "launch", "--cpu", f"--max_restarts={len(plan) + 1}"]
    launch += [f"--num_processes={LAYOUTS[layout]}"]
    if args.machines > 1:
        launch += [f"--num_machines={args.machines}", "--main_process_ip=127.0.0.1"]
        launch += [f"--main_process_port={free_port()}"]

    def launcher(rank: int) -> subprocess.CompletedProcess[str]:
        place = f"--machine_rank={rank}"
        return subprocess.run(
            [sys.executable, *launch, place, __file__, f"--job={layout}", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(args.machines) as threads:
        ended = list(threads.map(launcher, range(args.machines)))
    printed = "".join(done.stdout for done in ended)
    if any(done.returncode for done in ended):
        codes = [done.returncode for done in ended]
        raise SystemExit(f"{layout} ended with {codes}:\n{printed[-4000:]}")
    return printed


def lines_of(folder: Path) -> list[Line]:
    """Return the steps of a run in the order in which they were done, repeated ones too."""
    split = [line.split(" ") for line in (folder / "steps").read_text().splitlines()]
    return [Line(int(number), int(step), float(when), text) for number, step, when, text in split]


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def prove(layout: str, folder: Path, plan: list[Loss], args: argparse.Namespace) -> Result:
    """Run a layout without a loss and with those of a plan, and compare the two."""
    run(layout, folder / "whole", [], args)
    printed = run(layout, folder / "lost", plan, args)
    undisturbed, lost = lines_of(folder / "whole"), lines_of(folder / "lost")
    whole = {line.step: line.content for line in undisturbed}
    repeated, seconds = [], []
    for before, after in pairwise(lost):
        if after.attempt != before.attempt:
            repeated.append(before.step - after.step + 1)
            seconds.append(after.time - before.time)
    differences = sorted({f"step {line.step}" for line in lost if whole[line.step] != line.content})
    if {line.step for line in lost} != whole.keys():
        differences.append("the steps that were done")
    if weights_of(folder / "lost") != weights_of(folder / "whole"):
        differences.append("weights")
    resumed = re.findall(r"resumed from memory, \S*snapshot-\d+(-\w+)?", printed)
    pairs = zip(counts_of(undisturbed), counts_of(lost), strict=True)
    samples = sum(((before - now) + (now - before)).total() for before, now in pairs)
    living = sum(map(bool, resumed))
    return Result(repeated, seconds, len(resumed), living, differences, samples)


def counts_of(lines: list[Line]) -> list[Counter[int]]:
    """Return how often each epoch has trained on each sample; of a step done again, the last."""
    batches = {line.step: json.loads(line.content.partition(":")[2]) for line in lines}
    steps = sorted(batches)
    epochs = [steps[first : first + _EPOCH] for first in range(0, len(steps), _EPOCH)]
    return [Counter(chain(*(batches[step] for step in epoch))) for epoch in epochs]


def ranks_of(layout: str, args: argparse.Namespace, chance: random.Random) -> tuple[int, ...]:
    """Return the ranks that are lost at once."""
    others = range(int(args.ranks != "any"), LAYOUTS[layout])
    chosen = [0] if args.ranks == "0" else []
    more = min(args.at_once - len(chosen), len(others))
    return tuple(sorted([*chosen, *chance.sample(others, more)]))


def spread(values: list[Any], form: str) -> str:
    """Return median and maximum as text."""
    if not values:
        return "none"
    return f"{statistics.median(values):{form}} ({max(values):{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="?", default="", help="in the names of the layouts")
    parser.add_argument("--losses", type=int, default=10, help="of each layout")
    parser.add_argument("--seed", type=int, default=0, help="of the random losses")
    parser.add_argument("--ranks", choices=("any", "0", "others"), default="any", help="lost ones")
    parser.add_argument("--at_once", type=int, default=1, help="ranks that are lost together")
    parser.add_argument("--memory_every", type=int, default=2, help="steps; 0 for none in memory")
    parser.add_argument("--save_every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--epochs", type=int, help="of 21 steps; enough for the losses by default")
    parser.add_argument("--survive", action="store_true", help="ranks that are left keep their pid")
    parser.add_argument("--machines", type=int, default=1, help="launchers that share the ranks")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        from accel_callbacks import survive

        (survive(job) if args.survive else job)(args)
        return 0
    chosen = [layout for layout in LAYOUTS if args.word in layout]
    if not chosen:
        parser.error(f"no layout has {args.word!r} in its name")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args.epochs = args.epochs or 2 + args.losses // 2
    chance, failed = random.Random(args.seed), 0
    heads = ["layout", "processes", "losses", "of ranks", "from memory", "of a living rank"]
    heads += ["steps repeated", "seconds", "bits", "samples lost or repeated"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for layout in chosen:
        steps = sorted(chance.sample(range(3, _EPOCH * args.epochs - 5), args.losses))
        plan = [
            Loss(ranks_of(layout, args, chance), step, chance.uniform(0, _LONGEST_DELAY))
            for step in steps
        ]
        with tempfile.TemporaryDirectory() as folder:
            result = prove(layout, Path(folder), plan, args)
        bits = ", ".join(result.differences) or "equal"
        lost = f"{args.ranks}, {args.at_once} at once" if args.at_once > 1 else args.ranks
        cells = [layout, LAYOUTS[layout], len(result.repeated), lost, result.from_memory]
        cells += [result.living, spread(result.repeated, ".0f"), spread(result.seconds, ".2f")]
        cells += [bits, result.samples]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        failed += bool(result.differences or result.samples)
    print("steps and seconds: median (maximum); from the last step before a loss to the next one")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
