"""Compare models of transformers, or features, under each engine with one process.

Models train six batches in windows of two, with clipping and AdamW; see ``scripts/parity``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 1e-5
#: Of the environment that ``scripts/test_xla`` makes.
XLA_PYTHON = Path(os.environ.get("XLA_VENV", ROOT / ".venv" / "xla"), "bin", "python")


class Engine(NamedTuple):
    """An arrangement of processes.

    Attributes:
        processes: how many.
        sizes: of a ``ParallelismConfig``.
        zero_stage: of DeepSpeed, None without it.
        xla_devices: of one process, on which torch_xla computes; 0 without it.
    """

    processes: int
    sizes: dict[str, int]
    zero_stage: int | None = None
    xla_devices: int = 0

    @property
    def is_installed(self) -> bool:
        """Whether what it needs is there."""
        if self.xla_devices:
            return XLA_PYTHON.exists()
        return self.zero_stage is None or importlib.util.find_spec("deepspeed") is not None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its processes."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if self.xla_devices:
            variables["LD_LIBRARY_PATH"] = str(XLA_PYTHON.parent.parent / "stubs")
            variables |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.xla_devices)}
        return variables

    def command(self, name: str) -> list[str]:
        """Return the words of a subcommand of ``accel`` for its processes."""
        python = str(XLA_PYTHON) if self.xla_devices else sys.executable
        kind = "--tpu" if self.xla_devices else "--cpu"
        words = [python, "-m", "accel_callbacks.cli", name, kind]
        return words if self.xla_devices else [*words, f"--num_processes={self.processes}"]


ENGINES = {
    "ddp": Engine(2, {}),
    "fsdp2": Engine(2, {"dp_shard_size": 2}),
    "hsdp": Engine(4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp": Engine(2, {"tp_size": 2}),
    "fsdp2 x tp": Engine(4, {"dp_shard_size": 2, "tp_size": 2}),
    "pp": Engine(2, {"pp_size": 2}),
    "pp x fsdp2": Engine(4, {"pp_size": 2, "dp_shard_size": 2}),
    "pp x tp": Engine(4, {"pp_size": 2, "tp_size": 2}),
    "pp x replicas": Engine(4, {"pp_size": 2, "dp_replicate_size": 2}),
    "sp": Engine(2, {"sp_size": 2}),
    "cp": Engine(2, {"cp_size": 2}),
    "xla": Engine(1, {}, xla_devices=2),
    "zero 1": Engine(2, {}, zero_stage=1),
    "zero 2": Engine(2, {}, zero_stage=2),
    "zero 3": Engine(2, {}, zero_stage=3),
}
ALONE = "one process"
ENGINES[ALONE] = Engine(1, {})
#: What an engine refuses, and how.
REFUSED = {
    ("pp", "fp16"): r"fp16' does not go with a pipeline, .*: use \"bf16\"",
    ("tp", "resnet"): r"no plan",
    ("xla", "fp16"): r"'fp16' does not go with XLA, .*: use 'bf16'",
    ("zero", "save in a window"): "inside of a gradient window: .* Save after optimizer.step",
    ("zero", "resume in a window"): "was saved inside of a gradient window, .* load it with only=",
}


def perform(engine: str, task: str, folder: Path) -> Any:
    """Collective: return the numbers of a model or a feature, of this process's group."""
    import features
    import torch

    from tests.support.ring_attention import ring_on_cpu

    _, sizes, zero_stage, xla_devices = ENGINES[engine]
    if xla_devices:  # whose torch asks CUDA for it, of which there are only stand-ins
        torch.cuda.is_current_stream_capturing = lambda: False
    lab = features.Lab(sizes, folder, zero_stage, on_xla=bool(xla_devices))
    with ring_on_cpu() if "cp_size" in sizes else nullcontext():
        return perform_in(lab, task)


def perform_in(lab: Any, task: str) -> Any:
    """Collective: return the numbers of a model or a feature, in an arrangement."""
    import features

    if task in features.BUILDERS:
        accel = lab.accelerator(gradient_accumulation_steps=2)
        return features.Parts.of(accel, 6, task).train(max_norm=0.5)
    if task == "survives":
        return features.survives(lab)
    return (features.FEATURES.get(task) or features.RESUMES[task])[0](lab)


def work(engine: str, tasks: Sequence[str], path: Path, folder: Path) -> None:
    """Perform tasks under an engine, in a process of its group, until one cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        try:
            outcome: Any = perform(engine, task, folder)
        except (ValueError, RuntimeError) as error:
            outcome = str(error)
        if os.environ.get("RANK", "0") == "0":
            with path.open("a") as file:
                file.write(json.dumps([task, outcome]) + "\n")
        if isinstance(outcome, str):
            sys.exit(1)


def launch_words(engine: str, tasks: Sequence[str], path: Path, folder: Path) -> list[str]:
    """Return the words that start :func:`work` in the processes of an engine."""
    words = [__file__, "--work", engine, "--path", str(path), "--folder", str(folder), *tasks]
    return [*ENGINES[engine].command("launch"), *words]


def run(engine: str, tasks: Sequence[str], base: Path) -> dict[str, Any]:
    """Return the numbers of tasks under an engine, or what it said.

    Args:
        engine: its name.
        tasks: models, or features.
        base: has a folder for each engine.
    """
    outcomes: dict[str, Any] = {}
    while remaining := [task for task in tasks if task not in outcomes]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "outcomes")
            words = launch_words(engine, remaining, path, base / engine)
            variables = ENGINES[engine].environment
            done = subprocess.run(words, env=variables, capture_output=True, text=True)
            lines = path.read_text().splitlines() if path.exists() else []
        outcomes.update(json.loads(line) for line in lines)
        if not lines:
            sys.exit(f"{engine}, {remaining[0]}:\n{done.stdout}{done.stderr}")
    return outcomes


def killed(engine: str, base: Path, kills: int = 2) -> Any:
    """Return the weights of a run that is killed at random moments, by their digest."""
    progress = base / engine / "progress"
    progress.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "outcomes")
        words = launch_words(engine, ["survives"], path, base / engine)
        variables = ENGINES[engine].environment
        for _ in range(kills):
            seen = progress.stat().st_size if progress.exists() else 0
            process = subprocess.Popen(
                words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            more = random.randint(1, 4) * ENGINES[engine].processes
            while process.poll() is None:
                if progress.exists() and progress.stat().st_size >= seen + more:
                    break
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.1))
            process.kill()  # its workers end with it, by the same signal
            process.wait()
    return run(engine, ["survives"], base)["survives"]


def self_test(engine: str) -> str:
    """Return the last line of ``accel test`` under an engine."""
    arrangement = ENGINES[engine]
    words = arrangement.command("test")
    if arrangement.sizes:
        words += ["--use_parallelism_config"]
        words += [f"--parallelism_config_{size}={n}" for size, n in arrangement.sizes.items()]
    if arrangement.zero_stage is not None:
        words += ["--use_deepspeed", f"--zero_stage={arrangement.zero_stage}"]
    done = subprocess.run(words, env=ENGINES[engine].environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{engine}, accel test:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()[-1]


def cell(engine: str, task: str, outcome: Any, wanted: Any, limit: float) -> tuple[str, bool]:
    """Return the text of a cell, and whether it holds."""
    if isinstance(outcome, str):
        sentences = [
            sentence
            for (part, what), sentence in REFUSED.items()
            if part in engine.split() and what == task
        ]
        return "refused", any(re.search(sentence, outcome) for sentence in sentences)
    pairs = zip(outcome, wanted, strict=True)
    difference = max(abs(number - other) for number, other in pairs)
    return f"{difference:.0e}" if limit else "equal", difference <= limit


class Table:
    """Rows of cells, printed as they are known.

    Args:
        columns: their titles.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.rows: list[list[str]] = []
        self.notes: list[str] = []
        self.holds = True

    def add(self, engine: str, cells: Sequence[tuple[str, bool]], outcomes: Sequence[Any]) -> None:
        """Add a row, and print it."""
        for column, (_, holds), outcome in zip(self.columns, cells, outcomes, strict=True):
            if isinstance(outcome, str) or not holds:
                self.notes.append(f"{engine}, {column}: {str(outcome).partition(chr(10))[0]}")
            self.holds &= holds
        texts = [text if holds else f"**{text}**" for text, holds in cells]
        self.rows.append([engine, *texts])
        print(f"{engine}: " + ", ".join(map(": ".join, zip(self.columns, texts, strict=True))))

    def markdown(self) -> str:
        """Return the table for the docs."""
        head = [["", *self.columns], ["---"] * (len(self.columns) + 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *self.rows])


def compare_models(names: Sequence[str], engines: Sequence[str], base: Path) -> Table:
    """Compare losses and norms of models under each engine with one process."""
    table, wanted = Table(names), run(ALONE, names, base)
    for engine in engines:
        outcomes = run(engine, names, base)
        cells = [cell(engine, name, outcomes[name], wanted[name], LIMIT) for name in names]
        table.add(engine, cells, [outcomes[name] for name in names])
    return table


def compare_features(engines: Sequence[str], base: Path) -> Table:
    """Compare features under each engine with one process, and checkpoints between all pairs."""
    from features import FEATURES, RESUMES

    table = Table([*FEATURES, *RESUMES, "kills", "accel test"])
    wanted = run(ALONE, [*FEATURES], base)
    found = {engine: run(engine, [*FEATURES], base) for engine in engines}
    for engine, outcomes in found.items():
        cells = [
            cell(engine, name, outcomes[name], wanted[name], limit)
            for name, (_, limit) in FEATURES.items()
        ]
        for name, (_, feature) in RESUMES.items():
            resumed = run(engine, [name], base)[name]
            expected = wanted[feature] * len(resumed)
            if not isinstance(resumed, str):
                resumed = [number for numbers in resumed.values() for number in numbers]
            cells.append(cell(engine, name, resumed, expected, LIMIT))
            outcomes[name] = resumed
        with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as often:
            unbroken = run(engine, ["survives"], Path(once))["survives"]
            survived = killed(engine, Path(often))
        cells.append(cell(engine, "kills", survived, unbroken, 0.0))
        cells.append((self_test(engine), True))
        table.add(engine, cells, [*outcomes.values(), survived, None])
    return table


def main() -> int:
    from features import BUILDERS, CUT_SEQUENCES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*BUILDERS], metavar="MODEL")
    parser.add_argument("--features", action="store_true", help="features in place of models")
    parser.add_argument("--engine", action="append", choices=[*ENGINES], dest="engines")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.models, args.path, args.folder)
        return 0
    if unknown := [name for name in args.models if name not in BUILDERS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(BUILDERS)}")
    engines = args.engines or [
        name
        for name, engine in ENGINES.items()
        if engine.is_installed and name != ALONE
        if args.features or name not in CUT_SEQUENCES
    ]
    with tempfile.TemporaryDirectory() as folder:
        if args.features:
            table = compare_features(engines, Path(folder))
        else:
            table = compare_models(args.models, engines, Path(folder))
    if args.markdown:
        print(table.markdown())
    print("\n".join(table.notes))
    return 0 if table.holds else 1


if __name__ == "__main__":
    sys.exit(main())
