"""What `checkpoint.py` measures of saving in the background: the stall, and the steps meanwhile.

Beside those that save in the background are some that do not, whose call is the stall. No fsync is
added to theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from checkpoint_contenders import Work
from torch import nn

Save = Callable[[str], Callable[[], bool]]  # starts one; the result says whether it has ended


def ours(work: Work) -> Save:
    import checkpoint_io

    saver = checkpoint_io.BackgroundSaver()

    def save(folder: str) -> Callable[[], bool]:
        handle = saver.save(folder, work.state())
        assert handle is not None
        return handle.done

    return save


def dcp(work: Work) -> Save:
    import torch.distributed as dist
    import torch.distributed.checkpoint as peer
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # pinned memory is for GPUs; the stager is kept, which makes the second save its best
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(folder: str) -> Callable[[], bool]:
        answer: Any = peer.async_save(work.state(), checkpoint_id=folder, async_stager=stager)
        return answer.done

    return save


def in_the_call(call: Callable[[str], object]) -> Save:
    """Return a save that has ended when its call returns."""

    def save(folder: str) -> Callable[[], bool]:
        os.makedirs(folder)
        call(folder)
        return lambda: True

    return save


def accelerate(work: Work) -> Save:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(work.model, work.optimizer)
    return in_the_call(accelerator.save_state)


def torch_save(work: Work) -> Save:
    return in_the_call(lambda folder: torch.save(work.state(), f"{folder}/state.pt"))


def fabric(work: Work) -> Save:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    return in_the_call(lambda folder: runner.save(f"{folder}/state.ckpt", work.state()))


SAVERS: dict[str, Callable[[Work], Save]] = {
    "ours": ours,
    "DCP async_save": dcp,
    "accelerate": accelerate,
    "fabric": fabric,
    "torch.save": torch_save,
}


def training_step() -> Callable[[], None]:
    """A step of some tens of milliseconds."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(256, 1024)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_seconds(work: Work) -> float:
    """One copy of the state into memory that is there already."""
    tensors = list(work.flat().values())
    copies = [tensor.clone() for tensor in tensors]

    def copy() -> None:
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source)

    return min(timed(copy) for _ in range(3))


def measure(name: str, work: Work, folder: str) -> dict[str, float]:
    """The second of two saves, with and without steps meanwhile, of a third."""
    copied = copy_seconds(work)
    save, step = SAVERS[name](work), training_step()
    until(save(f"{folder}/1"))
    cpu = time.process_time()
    started = time.perf_counter()
    done = save(f"{folder}/2")
    stall = time.perf_counter() - started
    until(done)
    total, cpu = time.perf_counter() - started, time.process_time() - cpu
    step()
    alone = sorted(timed(step) for _ in range(40))[20]
    done = save(f"{folder}/3")
    steps: list[float] = []
    while not done():
        steps.append(timed(step))
    return {
        "stall": stall,
        "copy": copied,
        "total": total,
        "cpu": cpu,
        "step_alone": alone,
        "step_during": sum(steps) / max(1, len(steps)),
        "lost": sum(steps) - alone * len(steps),
    }


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.002)
