"""Compare the losses of models of transformers under each engine with those of one process.

Each trains six batches in windows of two, with clipping and AdamW; see ``scripts/parity``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT = 1e-5
#: Processes, and how they are arranged.
ENGINES: dict[str, tuple[int, dict[str, int]]] = {
    "ddp": (2, {}),
    "fsdp2": (2, {"dp_shard_size": 2}),
    "hsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp": (2, {"tp_size": 2}),
    "fsdp2 x tp": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "pp": (2, {"pp_size": 2}),
    "pp x fsdp2": (4, {"pp_size": 2, "dp_shard_size": 2}),
    "pp x tp": (4, {"pp_size": 2, "tp_size": 2}),
}
ALONE = "one process"


def train(model_name: str, sizes: dict[str, int]) -> list[float]:
    """Collective: return the losses and norms of a model under an arrangement of this process."""
    import torch

    from accel_callbacks import Accelerator, ParallelismConfig, TorchTensorParallelConfig
    from tests.support.known_models import BUILDERS, batches

    options: dict[str, Any] = {}
    if sizes:
        handler = TorchTensorParallelConfig(plan="proposed") if "tp_size" in sizes else None
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    accel = Accelerator(
        cpu=True, timeout=timedelta(seconds=60), gradient_accumulation_steps=2, **options
    )
    torch.manual_seed(0)
    model = accel.prepare(BUILDERS[model_name]())
    optimizer = accel.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    rows = 8 // accel.strategy.data_world
    part = slice(rows * accel.strategy.data_rank, rows * (accel.strategy.data_rank + 1))
    numbers = []
    for batch in batches(model_name, count=6):
        with accel.accumulate(model):
            loss = model(**{name: tensor[part] for name, tensor in batch.items()}).loss
            accel.backward(loss)
            if accel.sync_gradients:
                norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                numbers.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(accel.reduce(loss.detach(), "mean").item())
    return numbers


def work(engine: str, model_names: list[str], path: Path) -> None:
    """Train models under an engine, in a process of its group, until one cannot be."""
    sizes = ENGINES[engine][1] if engine != ALONE else {}
    for name in model_names:
        try:
            outcome: Any = train(name, sizes)
        except ValueError as error:
            outcome = str(error)
        if os.environ.get("RANK", "0") == "0":
            with path.open("a") as file:
                file.write(json.dumps([name, outcome]) + "\n")
        if isinstance(outcome, str):
            sys.exit(1)


def run(engine: str, model_names: list[str]) -> dict[str, Any]:
    """Return the numbers of models under an engine, or what it said."""
    outcomes: dict[str, Any] = {}
    processes = ENGINES[engine][0] if engine != ALONE else 1
    launch = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
    launch += ["--num_processes", str(processes)]
    while remaining := [name for name in model_names if name not in outcomes]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "outcomes")
            words = [__file__, "--work", engine, "--path", str(path), *remaining]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*launch, *words], env=environment, capture_output=True, text=True
            )
            lines = path.read_text().splitlines() if path.exists() else []
        outcomes.update(json.loads(line) for line in lines)
        if not lines:
            sys.exit(f"{engine}, {remaining[0]}:\n{done.stdout}{done.stderr}")
    return outcomes


def cell(outcome: Any, wanted: Any) -> tuple[str, bool]:
    """Return the text of a cell, and whether its numbers are those of one process."""
    if isinstance(outcome, str):
        return outcome.partition("\n")[0], True
    difference = max(abs(one - other) for one, other in zip(outcome, wanted, strict=True))
    return f"{difference:.0e}", difference <= LIMIT


def main() -> int:
    from tests.support.known_models import BUILDERS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*BUILDERS], metavar="MODEL")
    parser.add_argument("--engine", action="append", choices=[*ENGINES], dest="engines")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in BUILDERS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(BUILDERS)}")
    if args.work:
        work(args.work, args.models, args.path)
        return 0
    wanted = run(ALONE, args.models)
    ends, notes, table = [], [], []
    for engine in args.engines or ENGINES:
        outcomes, cells = run(engine, args.models), []
        for name in args.models:
            text, is_equal = cell(outcomes[name], wanted[name])
            ends.append(is_equal)
            if isinstance(outcomes[name], str):
                notes.append(f"{engine}, {name}: {text}")
                text = "refused"
            cells.append(text)
        table.append([engine, *cells])
        print(f"{engine}: " + ", ".join(map(": ".join, zip(args.models, cells, strict=True))))
    if args.markdown:
        rows = [["", *args.models], ["---"] * (len(args.models) + 1), *table]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print("\n".join(notes))
    return 0 if all(ends) else 1


if __name__ == "__main__":
    sys.exit(main())
