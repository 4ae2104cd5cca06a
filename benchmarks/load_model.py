"""Seconds from the files of a model to the end of its first forward, against a raw read of them.

    python benchmarks/load_model.py --gigabytes 1.33 --rounds 5

Every contender is a process of its own that drops the files from the page cache first (`--warm`:
reads them first), builds the model on the meta device, loads it, and runs 16 tokens through it, on
one torch thread. The raw read is O_DIRECT, 16 MB at a time, on one thread. The order is shuffled in
each round, and ratios are taken within a round, so that what else the machine does falls on all
sides. The bytes read from the disk are those that the kernel counts; private memory is what the
process holds for itself after the forward, over what it held before the load. Accelerate takes part
where it is installed: its load to `{"": "cpu"}` maps the files, as `mapped=True` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WIDTH, SHARDS, TOKENS, PIECE = 1664, 5, 16, 16 << 20


class Block(nn.Module):
    """A residual block with some projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.mix = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(self.mix(self.norm(inputs)))))


def empty_model(blocks: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(blocks))).to(torch.bfloat16)


def write(folder: str, blocks: int) -> None:
    from checkpoint_io import save_model

    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.bfloat16) * 0.02
        for name, tensor in empty_model(blocks).state_dict().items()
    }
    size = sum(tensor.nbytes for tensor in state.values())
    save_model(state, folder, max_shard_size=size // SHARDS + (8 << 20), progress=False)


# --- contenders, each in a process of its own -------------------------------------------------


def copied(model: nn.Module, folder: str) -> None:
    from checkpoint_io import load_model

    load_model(model, folder, progress=False)


def mapped(model: nn.Module, folder: str) -> None:
    from checkpoint_io import load_model

    load_model(model, folder, mapped=True, progress=False)


def accelerate(model: nn.Module, folder: str) -> None:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, folder, device_map={"": "cpu"})


LOADERS: dict[str, Callable[[nn.Module, str], None]] = {
    "load_model": copied,
    "load_model(mapped=True)": mapped,
    "accelerate": accelerate,
}


def raw(files: list[str]) -> None:
    memory = mmap.mmap(-1, PIECE)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        for begin in range(0, os.path.getsize(file), PIECE):
            os.preadv(descriptor, [memory], begin)
        os.close(descriptor)


def settle(files: list[str], warm: bool) -> None:
    """Put all of the files into the page cache, or none."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for begin in range(0, os.path.getsize(file) if warm else 0, PIECE):
            os.pread(descriptor, PIECE, begin)
        os.close(descriptor)


def counted(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def child(name: str, folder: str, blocks: int, warm: bool) -> None:
    torch.set_num_threads(1)
    files = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    result = 0.0
    if name == "raw":
        settle(files, warm=False)
        start = time.perf_counter()
        raw(files)
        loaded = time.perf_counter()
        private = 0
    else:
        load, model = LOADERS[name], empty_model(blocks)
        # what the first call imports, and the first forward sets up, is not what is compared
        with tempfile.TemporaryDirectory() as other, torch.no_grad():
            write(other, 1)
            small = empty_model(1)
            load(small, other)
            small(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16))
        del small
        settle(files, warm)
        time.sleep(1)
        before = counted("/proc/self/status", "RssAnon")
        read_before = counted("/proc/self/io", "read_bytes")
        cpu, start = time.process_time(), time.perf_counter()
        load(model, folder)
        loaded = time.perf_counter()
        with torch.no_grad():
            found = model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16))
        end, cpu = time.perf_counter(), time.process_time() - cpu
        result = float(found.float().sum())
        private = (counted("/proc/self/status", "RssAnon") - before) * 1024
        read = counted("/proc/self/io", "read_bytes") - read_before
        report = {"cpu": cpu, "read": read, "load": loaded - start, "seconds": end - start}
        print(json.dumps({**report, "private": private, "result": result}))
        return
    print(json.dumps({"seconds": loaded - start, "load": loaded - start}))


def measure(name: str, folder: str, blocks: int, warm: bool) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--child",
        name,
        "--folder",
        folder,
        "--blocks",
        str(blocks),
    ]
    output = subprocess.check_output([*command, *(["--warm"] if warm else [])], text=True)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.33)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="with the files in the page cache")
    parser.add_argument("--folder", help="for the files; default: a temporary one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.blocks, options.warm)
        return
    blocks = max(1, round(options.gigabytes * 1e9 / (24 * WIDTH * WIDTH)))
    names = [n for n in LOADERS if n != "accelerate" or importlib.util.find_spec("accelerate")]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(folder, blocks)
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(options.rounds):
            order = random.Random(number).sample(["raw", *names], len(names) + 1)
            rounds.append({n: measure(n, folder, blocks, options.warm) for n in order})
            found = rounds[-1]
            ratios = ", ".join(f"{n} {_ratio(found, n):.2f}" for n in names)
            print(f"round {number + 1}: raw {found['raw']['seconds']:.2f} s; {ratios}", flush=True)
    if len({one[n]["result"] for one in rounds for n in names}) != 1:
        raise AssertionError("the contenders do not compute the same")
    print(f"{'':24} {'x raw':>6} {'range':>12} {'seconds':>8} {'load':>6} {'CPU s':>6} "
          f"{'read MB':>8} {'private MB':>10}")  # fmt: skip
    for name in names:
        ratios_of = sorted(_ratio(one, name) for one in rounds)
        middle = {
            key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]
        }
        print(
            f"{name:24} {statistics.median(ratios_of):6.2f} "
            f"{f'{ratios_of[0]:.2f} to {ratios_of[-1]:.2f}':>12} {middle['seconds']:8.2f} "
            f"{middle['load']:6.2f} {middle['cpu']:6.2f} {middle['read'] / 1e6:8.0f} "
            f"{middle['private'] / 1e6:10.0f}"
        )


def _ratio(found: dict[str, dict[str, float]], name: str) -> float:
    return found[name]["seconds"] / found["raw"]["seconds"]


if __name__ == "__main__":
    main()
