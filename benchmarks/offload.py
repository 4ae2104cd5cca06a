"""One forward of a model whose weights are on disk, against a raw read of the same bytes.

    python benchmarks/offload.py --rounds 5
    python benchmarks/offload.py --peer ../with-accelerate/bin/python
    python benchmarks/offload.py --tokens 64        (more compute: what reading ahead hides)

Each figure is of a fresh process. The contenders of a round are shuffled, and a ratio is taken
within its round, so that what else the machine does falls on all. A forward is cold when the page
cache has been told to forget the files, which the bytes that the process reads from the disk must
show, or the row is void. It is warm right after another one. All outputs must have the same bits.
The same weights are read from files of checkpoint_io and from files of the safetensors library,
whose tensors are aligned to nothing.

`raw read` is O_DIRECT in pieces of 16 MB into one buffer, of huge pages too; `resident` has all
weights in memory, so that its forward is compute alone. Accelerate's `disk_offload` runs where this
interpreter has it, or in the one of --peer; its pass over the weights that writes them again is not
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import mmap
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

import torch
from torch import nn

Row = dict[str, float | str]
Forward = Callable[[], torch.Tensor]
MB = 1e6
PIECE = 16 << 20
SHARDS = 5
FORMATS = ("checkpoint_io", "safetensors")
NOTHING = hashlib.sha256().hexdigest()
WARM = 3  # forwards, of which the fastest counts


class Block(nn.Module):
    """Attention over all tokens, and two layers: 12 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.value, self.out = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        mixed = torch.softmax(self.query(y) @ self.key(y).T / x.shape[-1] ** 0.5, -1)
        x = x + self.out(mixed @ self.value(y))
        return x + self.down(torch.relu(self.up(self.between(x))))


class Net(nn.Module):
    """An embedding, blocks, and a head."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(size: list[int], device: str) -> Net:
    """Return the model in bf16, with the same weights in each process unless on meta."""
    torch.manual_seed(0)
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Net(*size).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(previous)


# --- in the process that is measured --------------------------------------------------------


def write(folder: str, size: list[int]) -> None:
    """Write the model in both formats."""
    from safetensors.torch import save_file

    import checkpoint_io

    state = build(size, "cpu").state_dict()
    total = sum(one.nbytes for one in state.values())
    most = int(total / SHARDS * 1.06)
    checkpoint_io.save_model(state, f"{folder}/checkpoint_io", max_shard_size=most)
    # The library has no sharding of its own: the tensors of each file, written by it.
    os.makedirs(f"{folder}/safetensors")
    index = json.loads(Path(f"{folder}/checkpoint_io/model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        part = {name: state[name] for name, where in index["weight_map"].items() if where == file}
        save_file(part, f"{folder}/safetensors/{file}")
    Path(f"{folder}/safetensors/model.safetensors.index.json").write_text(json.dumps(index))


def files_in(folder: str) -> list[str]:
    return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)


def drop_cache(folder: str) -> None:
    """Have the kernel forget what it holds of these files."""
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_read(folder: str, huge: bool = False) -> torch.Tensor:
    """Read all files past the page cache, and keep nothing."""
    memory = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        position, size = 0, os.fstat(descriptor).st_size
        while position < size:
            position += os.preadv(descriptor, [memory], position)
        os.close(descriptor)
    return torch.zeros(0)


def raw(folder: str, size: list[int], tokens: torch.Tensor) -> Forward:
    return lambda: raw_read(folder)


def raw_in_huge_pages(folder: str, size: list[int], tokens: torch.Tensor) -> Forward:
    return lambda: raw_read(folder, huge=True)


def resident(folder: str, size: list[int], tokens: torch.Tensor) -> Forward:
    model = build(size, "cpu")
    return lambda: model(tokens)


def ours(direct: bool) -> Callable[[str, list[int], torch.Tensor], Forward]:
    def made(folder: str, size: list[int], tokens: torch.Tensor) -> Forward:
        from accel_callbacks import load_checkpoint_and_dispatch
        from accel_callbacks.models.offload import OffloadOptions

        model = build(size, "meta")
        load_checkpoint_and_dispatch(
            model, folder, {"": "disk"}, options=OffloadOptions(direct=direct)
        )
        WINDOWS.append(lambda: window_of(model))
        return lambda: model(tokens)

    return made


def window_of(model: nn.Module) -> Row:
    from accel_callbacks.models.offload import report

    traffic = report(model).traffic
    return {"window": traffic.peak, "waited": traffic.waited, "misses": traffic.misses}


def accelerate(folder: str, size: list[int], tokens: torch.Tensor) -> Forward:
    from accelerate import disk_offload

    model = build(size, "meta")
    disk_offload(model, folder, execution_device=torch.device("cpu"))
    return lambda: model(tokens)


def prepare_accelerate(folder: str, size: list[int]) -> None:
    from accelerate import disk_offload

    disk_offload(build(size, "cpu"), folder, execution_device=torch.device("cpu"))


WINDOWS: list[Callable[[], Row]] = []
CONTENDERS: dict[str, Callable[[str, list[int], torch.Tensor], Forward]] = {
    "raw read": raw,
    "raw read, huge": raw_in_huge_pages,
    "ours, direct": ours(True),
    "ours, buffered": ours(False),
    "accelerate": accelerate,
    "resident": resident,
}


def of_process(path: str, field: str) -> float:
    lines = Path(f"/proc/self/{path}").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field))


def measure(name: str, folder: str, size: list[int], tokens: int) -> Row:
    """Return the seconds of a cold forward and of a warm one, with what they read and took."""
    words = torch.randint(0, size[2], (tokens,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.zeros(8, 8, dtype=torch.bfloat16) @ torch.zeros(8, 8, dtype=torch.bfloat16)
        forward = CONTENDERS[name](folder, size, words)
        gc.collect()
        drop_cache(folder)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
        memory, disk = of_process("status", "VmRSS"), of_process("io", "read_bytes")
        cpu, start = time.process_time(), time.perf_counter()
        output = forward()
        cold = time.perf_counter() - start
        cpu = time.process_time() - cpu
        disk = of_process("io", "read_bytes") - disk
        peak = (of_process("status", "VmHWM") - memory) * 1024
        warm = []
        for _ in range(WARM):
            start = time.perf_counter()
            assert torch.equal(forward(), output)
            warm.append(time.perf_counter() - start)
    bits = hashlib.sha256(output.view(torch.uint8).numpy().tobytes()).hexdigest()
    row: Row = {"cold": cold, "warm": min(warm), "read": disk, "extra": peak, "cpu": cpu}
    return {**row, "bits": bits, **(WINDOWS[0]() if WINDOWS else {})}


# --- in the process that asks -----------------------------------------------------------------


class Setting:
    """What is measured, and with which interpreters."""

    def __init__(self, root: str, args: argparse.Namespace) -> None:
        self.root = root
        self.size = [args.width, args.depth, args.words]
        self.tokens = args.tokens
        self.threads = args.threads
        self.peer = args.peer or sys.executable

    def child(self, *call: str) -> Row:
        """Run a part of this script in a fresh process; raise RuntimeError if it fails."""
        peer = "accelerate" in call
        command = [self.peer if peer else sys.executable, __file__, "--one", *call]
        command += ["--width", str(self.size[0]), "--depth", str(self.size[1])]
        command += ["--words", str(self.size[2]), "--tokens", str(self.tokens)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "ended silently")[-2000:])
        return dict(json.loads(done.stdout.splitlines()[-1]))


def nbytes(folder: str) -> int:
    return sum(os.path.getsize(path) for path in files_in(folder))


def collect(setting: Setting, names: list[str], rounds: int) -> dict[tuple[str, str], list[Row]]:
    """Return a row of each contender and format, for each round."""
    cases = [
        (name, format_)
        for name in names
        for format_ in (("",) if name in ("accelerate", "resident") else FORMATS)
    ]
    rows: dict[tuple[str, str], list[Row]] = {case: [] for case in cases}
    for number in range(rounds):
        for name, format_ in random.sample(cases, len(cases)):
            folder = os.path.join(setting.root, format_ or name)
            row = setting.child(name, folder)
            rows[name, format_].append(row)
        print(f"round {number + 1}: {summary(rows)}", flush=True)
    return rows


def summary(rows: dict[tuple[str, str], list[Row]]) -> str:
    return ", ".join(
        f"{' '.join(case).strip()} {row[-1]['cold']:.2f}" for case, row in rows.items()
    )


def spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.median(found):5.2f} [{min(found):.2f}..{max(found):.2f}]"


def ratios(rows: list[Row], base: list[Row], field: str, other: str = "") -> list[float]:
    return [
        float(row[field]) / float(to[other or field]) for row, to in zip(rows, base, strict=True)
    ]


def report(rows: dict[tuple[str, str], list[Row]], setting: Setting) -> None:
    bits = {
        row["bits"] for (name, _), found in rows.items() for row in found if row["bits"] != NOTHING
    }
    assert len(bits) == 1, "the outputs differ"
    print(f"outputs: the same bits in all {sum(map(len, rows.values()))} processes\n")
    peer = rows.get(("accelerate", ""))
    for (name, format_), found in rows.items():
        base = rows["raw read", format_ or FORMATS[0]]
        folder = os.path.join(setting.root, format_ or name)
        stored = nbytes(folder) if os.path.isdir(folder) else 0
        text = f"{name:15}{format_:14} cold {spread(float(row['cold']) for row in found)} s"
        if name != "raw read":
            text += f" = {spread(ratios(found, base, 'cold'))} x raw read; "
            text += f"warm {spread(float(row['warm']) for row in found)} s"
            if name.startswith("raw"):
                text = text[: text.index("; warm")]
        if peer is not None and name.startswith("ours"):
            text += f" = {spread(ratios(found, peer, 'warm'))} x accelerate"
            if "huge" in "".join(name for name, _ in rows):
                huge = ratios(found, rows["raw read, huge", format_], "cold")
                text += f"; cold = {spread(huge)} x raw read, huge"
        print(text)
        if name == "resident":
            continue
        read = [float(row["read"]) for row in found]
        ahead = max(float(row.get("window", 0)) for row in found)  # for the next forward
        void = "" if all(0.99 < one / stored < 1.01 + ahead / stored for one in read) else ": VOID"
        text = f"{'':29} read {min(read) / MB:.0f}..{max(read) / MB:.0f} MB{void}"
        text += f", extra memory {max(float(row['extra']) for row in found) / MB:.0f} MB"
        if "window" in found[0]:
            text += f", window {max(float(row['window']) for row in found) / MB:.0f} MB"
            text += f", waited {statistics.median(float(row['waited']) for row in found):.2f} s"
        print(f"{text}, cpu {statistics.median(float(row['cpu']) for row in found):.2f} s")
    if ("resident", "") in rows:
        compute, read_time = rows["resident", ""], rows["raw read", FORMATS[0]]
        print("\ncold forward as a part of the raw read and the compute one after the other:")
        for (name, format_), found in rows.items():
            if name == "resident" or name.startswith("raw"):
                continue
            parts = [
                float(row["cold"]) / (float(raw["cold"]) + float(one["warm"]))
                for row, raw, one in zip(found, read_time, compute, strict=True)
            ]
            print(f"{name:15}{format_:14} {spread(parts)}")


def prepare(setting: Setting, names: list[str]) -> list[str]:
    """Write the files; return the contenders that can run."""
    setting.child("write", setting.root)
    print(f"{nbytes(f'{setting.root}/checkpoint_io') / MB:.0f} MB in {SHARDS} shards", flush=True)
    if "accelerate" not in names:
        return names
    start = time.perf_counter()
    try:
        setting.child("prepare", f"{setting.root}/accelerate", "accelerate")
    except RuntimeError as error:
        print(f"accelerate is left out: {error}")
        return [name for name in names if name != "accelerate"]
    print(
        f"accelerate has written {nbytes(f'{setting.root}/accelerate') / MB:.0f} MB more, in "
        f"{time.perf_counter() - start:.1f} s"
    )
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--words", type=int, default=16_000)
    parser.add_argument("--peer", help="the interpreter of an environment that has Accelerate")
    parser.add_argument("--only", default=",".join(CONTENDERS).replace(", ", "/"))
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: here")
    parser.add_argument("--one", nargs="+", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        size = [args.width, args.depth, args.words]
        call, folder = args.one[:2]
        made: Row = {}
        if call == "write":
            write(folder, size)
        elif call == "prepare":
            prepare_accelerate(folder, size)
        else:
            made = measure(call, folder, size, args.tokens)
        print(json.dumps(made))
        return
    names = [name.replace("/", ", ") for name in args.only.split(",")]
    if unknown := set(names) - set(CONTENDERS):
        parser.error(f"no such contender: {', '.join(sorted(unknown))}")
    names = ["raw read", *(name for name in names if name != "raw read")]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.rounds} rounds", flush=True)
    root = tempfile.mkdtemp(prefix="offload-bench-", dir=args.folder or os.getcwd())
    try:
        setting = Setting(root, args)
        rows = collect(setting, prepare(setting, names), args.rounds)
        report(rows, setting)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
