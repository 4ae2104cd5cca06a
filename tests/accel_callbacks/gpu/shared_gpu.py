"""One of two ranks that share a GPU over gloo: trains, gathers, saves or fails; ends with 0 if so.

NCCL refuses two ranks on one device. Without a GPU the ranks compute on the CPU, to try the script.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, InitProcessGroupKwargs, RemoteError
from accel_callbacks.callbacks import GradientNorm, NonFinite, Timer
from tests.support.bound import BOUND


def make() -> tuple[Accelerator, Any, Any, Any]:
    torch.manual_seed(0)
    accel = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16",
        callbacks=[Timer("1 h"), GradientNorm(), NonFinite()],  # of which two vote
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=BOUND)],
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), 4)
    return accel, *accel.prepare(model, adam, data)


def step(accel: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accel.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def flat(model: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def train() -> None:
    """Both ranks have the same weights after two epochs, and stop at the same step."""
    accel, model, optimizer, data = make()
    with accel.run("shared", resume=False) as run:
        for _ in run.epochs(2):
            for batch in data:
                assert batch.device == accel.device
                step(accel, model, optimizer, batch)
                if run.global_step == 10 and accel.process_index == 1:
                    run.stop("enough")
    held = accel.gather(flat(model)[None])
    assert torch.equal(held[0], held[1])
    assert accel.gather_for_metrics([run.global_step], use_gather_object=True) == [11, 11]


def gather() -> None:
    """Each dtype comes back on the device that it was on, uneven parts too."""
    accel = make()[0]
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64]
    for kind in [*kinds, torch.float8_e4m3fn]:
        part = torch.ones(3 + accel.process_index, 2, device=accel.device).to(kind)
        whole = accel.gather(part)
        assert (whole.device, whole.dtype, tuple(whole.shape)) == (part.device, kind, (7, 2)), kind
    large = torch.tensor([1 << 40], device=accel.device)
    assert accel.reduce(large, "sum").item() == 1 << 41


def save(folder: str) -> None:
    """A state that was saved is the one that is loaded."""
    accel, model, optimizer, data = make()
    step(accel, model, optimizer, next(iter(data)))
    before = flat(model).clone()
    accel.save_state(folder)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    accel.load_state(folder)
    assert torch.equal(flat(model), before)


def fail() -> None:
    """An error of one rank is raised on the other, with its text."""
    accel, model, optimizer, data = make()
    raised: BaseException | None = None
    try:
        with accel.run("shared", resume=False):
            for index, batch in enumerate(data):
                if index == 3 and accel.process_index == 1:
                    raise ValueError("planted")
                step(accel, model, optimizer, batch)
    except (RemoteError, ValueError) as error:
        raised = error
    assert type(raised) is (ValueError if accel.process_index == 1 else RemoteError)
    assert "planted" in str(raised)


if __name__ == "__main__":
    {"train": train, "gather": gather, "save": save, "fail": fail}[sys.argv[1]](*sys.argv[2:])
