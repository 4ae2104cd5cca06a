"""Run a model under a limit of this process's memory: streamed from disk, then loaded.

python -m tests.accel_callbacks.models.offload.under_a_limit FOLDER BLOCKS WIDTH LIMIT more|whole
"""

from __future__ import annotations

import hashlib
import resource
import sys
import threading
from pathlib import Path

import torch

import checkpoint_io
from accel_callbacks import init_empty_weights, load_checkpoint_and_dispatch


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def built(blocks: int, width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Block(width) for _ in range(blocks))).requires_grad_(False)


def private_bytes() -> int:
    """Return what the kernel counts against RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def digest(output: torch.Tensor) -> str:
    return hashlib.sha256(output.numpy().tobytes()).hexdigest()


def main(folder: str, blocks: int, width: int, limit: int, more: bool) -> None:
    """Print the output of the streamed model, then of the loaded one, under a limit in bytes.

    Args:
        folder: has the weights.
        blocks: of the model.
        width: of the model.
        limit: bytes of private memory.
        more: than the process has so far; else in all.
    """
    threading.stack_size(1 << 20)
    with init_empty_weights(include_buffers=True):  # which allocates nothing meanwhile
        streamed, loaded = built(blocks, width), built(blocks, width)
    x = torch.linspace(-1, 1, width).expand(4, width).contiguous()
    with torch.no_grad():
        torch.tanh(torch.nn.functional.linear(x, torch.eye(width)))  # threads and scratch memory
        limit += private_bytes() if more else 0
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        load_checkpoint_and_dispatch(streamed, folder, {"": "disk"})
        print("streamed", digest(streamed(x)), flush=True)
        del streamed
        checkpoint_io.load_model(loaded, folder, device="cpu")
        print("loaded", digest(loaded(x)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5] == "more")
