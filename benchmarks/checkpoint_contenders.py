"""What `checkpoint.py` compares: each contender prepares, and returns the call that is timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Timed = Callable[[], Any]
WIDTH = 1024
SMALL_TENSORS, SMALL_NUMEL = 20_000, 100


class Work:
    """A model with its Adam state, `gigabytes` in all; `flat` are its tensors by name."""

    def __init__(self, gigabytes: float) -> None:
        torch.manual_seed(0)
        block_bytes = 4 * (8 * WIDTH * WIDTH + 7 * WIDTH)
        blocks = max(1, round(gigabytes * 1e9 / 3 / block_bytes))
        self.model = nn.Sequential(*[self._block() for _ in range(blocks)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _block(self) -> nn.Module:
        layers = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
        return nn.Sequential(*layers)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict()["state"].items():
            found.update({f"{index}.{name}": value for name, value in entry.items()})
        return found

    def take(self, state: dict[str, Any]) -> None:
        """What every training script does with new tensors."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def spoil(self) -> torch.Tensor:
        """Change all tensors; return what one of them was."""
        kept = self.model[0][1].weight.detach()[:4].clone()
        with torch.no_grad():
            for tensor in self.flat().values():
                tensor.zero_()
        return kept

    def check(self, kept: torch.Tensor) -> None:
        if not torch.equal(self.model[0][1].weight.detach()[:4], kept):
            raise AssertionError("the loaded values are not the saved ones")


def fsync_tree(folder: str) -> None:
    """Make durable what a contender only handed to the kernel."""
    for root, _, names in os.walk(folder):
        for path in (root, *(os.path.join(root, name) for name in names)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def then_fsync(call: Timed, folder: str) -> Timed:
    def run() -> None:
        call()
        fsync_tree(folder)

    return run


# --- saving --------------------------------------------------------------------------------


def raw_direct(work: Work, folder: str) -> Timed:
    """The same number of bytes with nothing but direct IO."""
    import fcntl
    import mmap

    size, piece = sum(tensor.nbytes for tensor in work.flat().values()), 16 * 2**20
    memory = mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(os.urandom(piece))

    def run() -> None:
        descriptor = os.open(Path(folder, "raw"), os.O_WRONLY | os.O_CREAT, 0o600)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        for at in range(0, size, piece):
            os.write(descriptor, memoryview(memory)[: -(-min(piece, size - at) // 4096) * 4096])
        os.fsync(descriptor)
        os.close(descriptor)

    return run


def ours(work: Work, folder: str) -> Timed:
    import checkpoint_io

    return lambda: checkpoint_io.save(folder, work.state())


def our_save_state(work: Work, folder: str) -> Timed:
    from accel_callbacks import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(work.model, work.optimizer)
    return lambda: accelerator.save_state(folder)


def accelerate(work: Work, folder: str) -> Timed:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(work.model, work.optimizer)
    return then_fsync(lambda: accelerator.save_state(folder), folder)


def torch_save(work: Work, folder: str) -> Timed:
    return then_fsync(lambda: torch.save(work.state(), f"{folder}/state.pt"), folder)


def safetensors(work: Work, folder: str) -> Timed:
    from safetensors.torch import save_file

    return then_fsync(lambda: save_file(work.flat(), f"{folder}/state.safetensors"), folder)


def dcp(work: Work, folder: str) -> Timed:
    import torch.distributed.checkpoint as peer

    return then_fsync(lambda: peer.save(work.state(), checkpoint_id=folder), folder)


def fabric(work: Work, folder: str) -> Timed:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    return then_fsync(lambda: runner.save(f"{folder}/state.ckpt", work.state()), folder)


# --- loading what the saver of that name wrote ----------------------------------------------


def load_ours_into(work: Work, folder: str) -> Timed:
    import checkpoint_io

    return lambda: checkpoint_io.load(folder, into=work.state())


def load_ours(work: Work, folder: str) -> Timed:
    import checkpoint_io

    return lambda: work.take(checkpoint_io.load(folder).state)


def load_our_state(work: Work, folder: str) -> Timed:
    from accel_callbacks import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(work.model, work.optimizer)
    return lambda: accelerator.load_state(folder)


def load_accelerate(work: Work, folder: str) -> Timed:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(work.model, work.optimizer)
    return lambda: accelerator.load_state(folder)


def load_torch(work: Work, folder: str) -> Timed:
    return lambda: work.take(torch.load(f"{folder}/state.pt", weights_only=True))


def load_safetensors(work: Work, folder: str) -> Timed:
    from safetensors.torch import load_file

    def run() -> None:
        targets = work.flat()
        with torch.no_grad():
            for name, value in load_file(f"{folder}/state.safetensors").items():
                targets[name].copy_(value)

    return run


def load_dcp(work: Work, folder: str) -> Timed:
    import torch.distributed.checkpoint as peer

    return lambda: peer.load(work.state(), checkpoint_id=folder)


def load_fabric(work: Work, folder: str) -> Timed:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    return lambda: work.take(runner.load(f"{folder}/state.ckpt"))


# --- 20,000 small tensors -------------------------------------------------------------------


def small_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer.{n}.weight": torch.randn(SMALL_NUMEL) for n in range(SMALL_TENSORS)}


def many_ours(folder: str) -> tuple[Timed, Timed]:
    import checkpoint_io

    state = small_tensors()
    save = lambda: checkpoint_io.save(folder, state)  # noqa: E731
    return save, lambda: checkpoint_io.load(folder).state


def many_safetensors(folder: str) -> tuple[Timed, Timed]:
    from safetensors.torch import load_file, save_file

    state, path = small_tensors(), f"{folder}/state.safetensors"
    return then_fsync(lambda: save_file(state, path), folder), lambda: load_file(path)


SAVERS: dict[str, Callable[[Work, str], Timed]] = {
    "raw direct write": raw_direct,
    "ours": ours,
    "ours: save_state": our_save_state,
    "accelerate": accelerate,
    "torch.save": torch_save,
    "safetensors": safetensors,
    "DCP": dcp,
    "fabric": fabric,
}
LOADERS: dict[str, tuple[str, Callable[[Work, str], Timed]]] = {
    "ours: load(into=)": ("ours", load_ours_into),
    "ours: load": ("ours", load_ours),
    "ours: load_state": ("ours: save_state", load_our_state),
    "accelerate": ("accelerate", load_accelerate),
    "torch.load": ("torch.save", load_torch),
    "safetensors": ("safetensors", load_safetensors),
    "DCP": ("DCP", load_dcp),
    "fabric": ("fabric", load_fabric),
}
MANY: dict[str, Callable[[str], tuple[Timed, Timed]]] = {
    "ours": many_ours,
    "safetensors": many_safetensors,
}
