"""Saving and loading a model with its Adam state, against what else people use.

    pip install "accel-callbacks[bench]"        (in an environment of its own)
    python benchmarks/checkpoint.py --gigabytes 3 --rounds 5
    python benchmarks/checkpoint.py --only save,load
    python benchmarks/checkpoint.py --small --rounds 30

Each figure is of a fresh process. The contenders of a round are shuffled, and a ratio is taken
within its round, so that what else the machine does falls on all. A save counts until it is
durable: what a contender does not fsync itself is fsynced for it. A load counts until the values
are in the existing parameters, with the page cache empty (cold) and full (warm). "extra MB" is the
peak of the process above what it had before the call. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import checkpoint_background
import checkpoint_small
import results
import torch
from checkpoint_contenders import LOADERS, MANY, SAVERS, Work

Row = dict[str, float]
Figures = dict[str, dict[str, list[float]]]  # what is measured: its samples by contender
PARTS = ("save", "load", "background", "many", "view")
MB = 1e6


# --- in the process that is measured --------------------------------------------------------


def memory(field: str) -> float:
    """A line of this process's memory figures, in bytes; 0 where there are none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0.0)


def measured(call: Callable[[], object]) -> Row:
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before, cpu, started = memory("VmRSS"), time.process_time(), time.perf_counter()
    call()
    took = time.perf_counter() - started
    return {
        "seconds": took,
        "cpu": time.process_time() - cpu,
        "extra": max(0.0, memory("VmHWM") - before),
    }


def drop_cache(folder: str) -> None:
    """Have the kernel forget what it holds of these files, where it lets itself be told."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run_save(name: str, folder: str, gigabytes: float) -> Row:
    return measured(SAVERS[name](Work(gigabytes), folder))


def run_load(name: str, folder: str, gigabytes: float) -> Row:
    work = Work(gigabytes)
    load = LOADERS[name][1](work, folder)
    kept = work.spoil()
    drop_cache(folder)
    cold = measured(load)
    work.check(kept)
    work.spoil()
    warm = measured(load)
    work.check(kept)
    return {**cold, "warm": warm["seconds"]}


def run_background(name: str, folder: str, gigabytes: float) -> Row:
    return checkpoint_background.measure(name, Work(gigabytes), folder)


def run_many(name: str, folder: str, gigabytes: float) -> Row:
    save, load = MANY[name](folder)
    saved = measured(save)
    return {"save": saved["seconds"], "load": min(measured(load)["seconds"] for _ in range(3))}


def run_view(name: str, folder: str, gigabytes: float) -> Row:
    """Bytes that the process reads for one tensor, and to know the checkpoint before that."""
    import checkpoint_io

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    checkpoint_io.open_checkpoint(folder)  # what is imported on the way is no part of it
    started = read_so_far()
    reader = checkpoint_io.open_checkpoint(folder)
    opened = read_so_far()
    key = next(key for key in reader.keys() if key.endswith("0.1.weight"))  # noqa: SIM118
    seconds = time.perf_counter()
    tensor = reader[key].read()
    seconds = time.perf_counter() - seconds
    read = read_so_far() - opened
    return {
        "opening": opened - started,
        "read": read,
        "tensor": tensor.nbytes,
        "seconds": seconds,
    }


RUNS: dict[str, Callable[[str, str, float], Row]] = {
    "save": run_save,
    "load": run_load,
    "background": run_background,
    "many": run_many,
    "view": run_view,
}
NAMES: dict[str, list[str]] = {
    "save": list(SAVERS),
    "load": list(LOADERS),
    "background": list(checkpoint_background.SAVERS),
    "many": list(MANY),
    "view": ["ours"],
    "small": list(checkpoint_small.SAVERS),
}


# --- in the process that asks -----------------------------------------------------------------


def ask(part: str, name: str, folder: str, gigabytes: float) -> Row | None:
    """Measure in a fresh process; None, and a note, if that fails."""
    command = [sys.executable, __file__, "--one", part, name, folder, "--gigabytes", str(gigabytes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    reason = (done.stderr.strip() or "ended without a word").splitlines()[-1]
    print(f"{part}: {name} left out: {reason}", flush=True)
    return None


def collect(
    part: str, names: list[str], rounds: int, place: Callable[[str], str], size: float
) -> dict[str, list[Row]]:
    """Rows of each contender, one a round; who fails once is left out."""
    rows: dict[str, list[Row]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(list(rows), len(rows)):
            row = ask(part, name, place(name), size)
            if row is None:
                del rows[name]
            else:
                rows[name].append(row)
    return rows


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def ratio(rows: dict[str, list[Row]], name: str, base: str, field: str) -> float:
    pairs = zip(rows[name], rows.get(base, []), strict=False)
    return median([a[field] / b[field] for a, b in pairs] or [float("nan")])


def report_times(rows: dict[str, list[Row]], base: str, fields: list[str], size: float) -> None:
    for name, found in rows.items():
        text = f"  {name:20}"
        for field in fields:
            times = [row[field] for row in found]
            text += f" {field} {median(times):7.3f} [{min(times):.3f}..{max(times):.3f}]"
            text += f" {ratio(rows, name, base, field):6.2f}x"
        first = fields[0]
        text += f"  {size / median(row[first] for row in found):5.2f} GB/s"
        text += f"  cpu {median(row['cpu'] for row in found):6.2f} s"
        print(text + f"  extra {median(row['extra'] for row in found) / MB:6.0f} MB", flush=True)


def samples(rows: dict[str, list[Row]], fields: dict[str, str]) -> Figures:
    """Return a field of all rows by contender, for each title."""
    return {
        title: {name: [row[field] for row in found] for name, found in rows.items()}
        for title, field in fields.items()
    }


def fresh_folder(root: str) -> Callable[[str], str]:
    """Give every run the same folder, empty."""

    def place(name: str) -> str:
        shutil.rmtree(f"{root}/run", ignore_errors=True)
        os.makedirs(f"{root}/run")
        return f"{root}/run"

    return place


def part_save(root: str, rounds: int, size: float) -> Figures:
    rows = collect("save", NAMES["save"], rounds, fresh_folder(root), size)
    print(f"save {size} GB, durable, seconds; x: times ours in the same round")
    report_times(rows, "ours", ["seconds"], size)
    for peer in ("accelerate", "raw direct write"):
        if peer in rows and "ours" in rows:
            print(f"  ours is {ratio(rows, peer, 'ours', 'seconds'):.2f} times as fast as {peer}")
    return samples(rows, {f"seconds to save {size:g} GB, durable": "seconds"})


def part_load(root: str, rounds: int, size: float) -> Figures:
    folders: dict[str, str] = {}
    savers = dict.fromkeys(LOADERS[name][0] for name in NAMES["load"])
    for number, saver in enumerate(savers):
        folder = f"{root}/{number}"
        os.makedirs(folder)
        if ask("save", saver, folder, size) is not None:
            folders[saver] = folder
    names = [name for name in NAMES["load"] if LOADERS[name][0] in folders]
    rows = collect("load", names, rounds, lambda name: folders[LOADERS[name][0]], size)
    print(f"load {size} GB into existing parameters, seconds (cold) and warm; x: times ours")
    report_times(rows, "ours: load(into=)", ["seconds", "warm"], size)
    cold, warm = (f"seconds to load {size:g} GB, {cache}" for cache in ("cold", "warm"))
    return samples(rows, {cold: "seconds", warm: "warm"})


def part_background(root: str, rounds: int, size: float) -> Figures:
    rows = collect("background", NAMES["background"], rounds, fresh_folder(root), size)
    print(f"background save of {size} GB, from the second on")
    for name, found in rows.items():
        value = {field: median(row[field] for row in found) for field in found[0]}
        of_copy = median(row["stall"] / row["copy"] for row in found)
        slower = median(row["step_during"] / row["step_alone"] for row in found)
        print(
            f"  {name:16} stall {value['stall']:.3f} s = {value['stall'] / size:.3f} s/GB = "
            f"{of_copy:.2f} of one memory copy; durable after {value['total']:.2f} s; steps "
            f"meanwhile {slower:.2f} times as long: {value['lost']:.2f} s lost in all, and a "
            f"save takes {value['cpu']:.2f} s of CPU"
        )
    title = f"seconds that a save of {size:g} GB"
    return samples(rows, {f"{title} holds the step": "stall", f"{title} takes in all": "total"})


def part_many(root: str, rounds: int, size: float) -> Figures:
    rows = collect("many", NAMES["many"], rounds, fresh_folder(root), size)
    print("20,000 tensors of 400 bytes, seconds; x: times safetensors in the same round")
    for name, found in rows.items():
        text = f"  {name:16}"
        for field in ("save", "load"):
            text += f" {field} {median(row[field] for row in found):.3f}"
            text += f" {ratio(rows, name, 'safetensors', field):.2f}x"
        print(text)
    return samples(
        rows, {f"seconds to {field} 20,000 tensors": field for field in ("save", "load")}
    )


def part_view(root: str, rounds: int, size: float) -> Figures:
    folder = fresh_folder(root)("ours")
    row = ask("save", "ours", folder, size) and ask("view", "ours", folder, size)
    if row:
        print(
            f"one tensor of {row['tensor'] / MB:.1f} MB out of {size} GB: "
            f"{row['read'] / row['tensor']:.4f} times its bytes read, in {row['seconds']:.3f} s; "
            f"opening the checkpoint reads {row['opening'] / 1e3:.0f} kB"
        )
    return {}


def part_small(root: str, rounds: int, size: float) -> Figures:
    return checkpoint_small.run(root, rounds, NAMES["small"])


SECTIONS: dict[str, Callable[[str, int, float], Figures]] = {
    "save": part_save,
    "load": part_load,
    "background": part_background,
    "many": part_many,
    "view": part_view,
    "small": part_small,
}


def keep_only(wanted: list[str], parser: argparse.ArgumentParser) -> None:
    """Leave out every contender that was not asked for, and say so if there is none of a name."""
    known = {name for names in NAMES.values() for name in names}
    if unknown := set(wanted) - known:
        parser.error(f"no such contender: {', '.join(sorted(unknown))}; there are {sorted(known)}")
    for part, names in NAMES.items():
        NAMES[part] = [name for name in names if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a state of 0.6 MB, and nothing else")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--contenders", default=None, help="some of them; default: all")
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: here")
    results.add_option(parser)
    parser.add_argument("--one", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, name, folder = args.one
        print(json.dumps(RUNS[part](name, folder, args.gigabytes)))
        return
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if args.contenders is not None:
        keep_only(args.contenders.split(","), parser)
    if args.small:
        chosen = ["small"]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.rounds} rounds")
    for part in chosen:
        root = tempfile.mkdtemp(prefix="checkpoint-bench-", dir=args.folder or os.getcwd())
        try:
            figures = SECTIONS[part](root, args.rounds, args.gigabytes)
            if args.write and figures:
                results.write(f"checkpoint_{part}", figures)
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
