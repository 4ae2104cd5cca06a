"""Plot how the blocks of a model that is on disk are read while others compute.

python examples/plot_offload.py offload.png
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from accel_callbacks import Accelerator, load_checkpoint_and_dispatch
from accel_callbacks.offload import OffloadOptions, report

MB = 1e6
Span = tuple[float, float]


class Block(nn.Module):
    """Two layers that note when they compute."""

    def __init__(self, width: int, spans: list[Span]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.spans = spans

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        x = x + self.down(torch.relu(self.up(x)))
        self.spans.append((start, time.perf_counter()))
        return x


def forget(folder: str) -> None:
    """Have the kernel forget what it holds of the files."""
    if hasattr(os, "posix_fadvise"):
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def forward(
    folder: str, width: int, depth: int, tokens: int, ahead: int
) -> tuple[list[Span], list[Span], float]:
    """Return when blocks computed, and the bytes that were read at each moment, of one forward."""
    spans: list[Span] = []
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width, spans) for _ in range(depth)))
    options = OffloadOptions(direct=True, ahead=ahead)
    load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"}, options=options)
    read: list[Span] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            read.append((time.perf_counter(), report(model[0]).traffic.bytes_read))

    inputs = torch.randn(tokens, width)
    with torch.no_grad():
        model(inputs)  # allocates the window
        spans.clear()
        forget(folder)
        before = report(model[0]).traffic.bytes_read / MB
        thread = threading.Thread(target=watch)
        thread.start()
        start = time.perf_counter()
        model(inputs)
        took = time.perf_counter() - start
    ended.set()
    thread.join()
    moved = [(begin - start, end - start) for begin, end in spans]
    return (
        moved,
        [(at - start, count / MB - before) for at, count in read if 0 < at - start < took],
        took,
    )


def measure(
    folder: str, width: int = 1280, depth: int = 12, tokens: int = 96
) -> dict[str, tuple[list[Span], list[Span], float]]:
    """Return `forward` without and with a block ahead, of a model saved to an empty folder."""
    Accelerator(cpu=True).save_model(
        nn.Sequential(*(Block(width, []) for _ in range(depth))), folder
    )
    return {
        "each block is read when it is needed": forward(folder, width, depth, tokens, ahead=0),
        "one block ahead": forward(folder, width, depth, tokens, ahead=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--folder", default=None, help="on the disk to read from")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs = measure(folder, args.width, args.depth, args.tokens)
    figure, rows = plt.subplots(2, 1, sharex=True, sharey=True, figsize=(7, 5))
    for row, (title, (spans, read, took)) in zip(rows, runs.items(), strict=True):
        for number, (begin, end) in enumerate(spans):
            label = None if number else "a block computes"
            row.axvspan(begin, end, color="tab:orange", alpha=0.5, linewidth=0, label=label)
        row.plot(*zip(*read, strict=True), color="tab:blue", label="bytes read")
        row.axvline(took, color="black", linewidth=1, linestyle=":")
        row.set_title(f"{title}: {took:.2f} s", fontsize=10)
        row.set_ylabel("MB")
        computed = sum(end - begin for begin, end in spans)
        print(f"{title}: {took:.2f} s, of which blocks computed for {computed:.2f} s")
    rows[0].legend(loc="upper left")
    rows[1].set_xlabel("seconds of one forward")
    figure.tight_layout()
    figure.savefig(args.output, dpi=90)


if __name__ == "__main__":
    main()
