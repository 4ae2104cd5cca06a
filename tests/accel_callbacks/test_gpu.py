"""The loop on a CUDA device; run with -m gpu where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.device import StreamFeed
from accel_callbacks.data.sources import Delivery

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(folder, precision: str, epochs: int, resume: bool):
    torch.manual_seed(0)
    accel = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        callbacks=[Checkpoint(folder, every_n_steps=3)],
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, pin_memory=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    with accel.run("gpu", resume=resume) as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                assert batch.device == accel.device
                with accel.accumulate(model):
                    loss = model(batch).square().mean()
                    accel.backward(loss)
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"loss": loss})
    assert model(data[:2].to(accel.device)).dtype is torch.float32
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_resumed_run_on_the_gpu_ends_with_the_same_weights(tmp_path, precision):
    whole = train(tmp_path / "whole", precision, 3, resume=False)
    train(tmp_path / "parts", precision, 1, resume=False)
    resumed = train(tmp_path / "parts", precision, 3, resume=True)
    for one, other in zip(whole, resumed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_torch_for_cuda_asks_the_cpu_where_there_is_no_gpu():
    code = "from accel_callbacks.utils import is_bf16_available as ask; print(ask())"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=hidden, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]


def test_the_accelerator_takes_the_gpu_by_itself():
    assert Accelerator().device == torch.device("cuda", 0)


class Slow(torch.nn.Module):
    """Keeps the device busy for a while with each batch, so that copies can overtake."""

    def forward(self, batch):
        weight = torch.eye(2048, device=batch.device)
        for _ in range(20):
            weight = weight @ weight
        return batch * weight[0, 0]


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_copied_ahead_hold_what_they_should(pin_memory, non_blocking, workers):
    config = DataLoaderConfiguration(non_blocking=non_blocking)
    accel = Accelerator(dataloader_config=config)
    # Large enough that memory given back too early would be used for the next copy.
    rows = torch.arange(40).float().repeat_interleave(1 << 18).reshape(40, -1)
    data = DataLoader(rows, batch_size=2, pin_memory=pin_memory, num_workers=workers)
    model, loader = accel.prepare(Slow().eval(), data)
    sums = [model(batch).sum(dim=1, dtype=torch.float64) for batch in loader]
    assert torch.cat(sums).cpu().tolist() == [float(n) * (1 << 18) for n in range(40)]


def test_the_copy_of_the_next_batch_does_not_wait_for_the_computation():
    device = torch.device("cuda", 0)
    copied = []
    # Pinned beforehand: to ask for such memory may wait for the device.
    rows = [torch.full((1 << 22,), float(index)).pin_memory() for index in range(3)]

    class Watching(StreamFeed):
        def _hand_over(self, ahead, delivery, event):
            copied.append(event)
            return super()._hand_over(ahead, delivery, event)

    feed = Watching(device, torch.cuda)((row, Delivery(1, 1)) for row in rows)
    first, _ = next(feed)
    torch.cuda.synchronize()
    for _ in range(50):
        Slow()(first)
    computed = torch.cuda.Event()
    computed.record()
    next(feed)
    next(feed)  # the third batch was sent off after the computation was
    copied[2].synchronize()
    assert not computed.query(), "the copy was done first"
    torch.cuda.synchronize()


def test_loaders_without_device_placement_stay_on_the_host():
    accel = Accelerator(device_placement=False)
    loader = accel.prepare(DataLoader(torch.ones(2, 1), 1))
    assert {batch.device.type for batch in loader} == {"cpu"}


def test_a_state_saved_while_the_next_batch_is_copied_is_the_one_of_the_current(tmp_path):
    def make():
        accel = Accelerator()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = DataLoader(torch.arange(9).float().unsqueeze(1), 2, pin_memory=True)
        return accel, *accel.prepare(model, optimizer, data)

    def train(accel, model, optimizer, loader, save_at):
        seen = []
        for batch in loader:
            seen.append(batch.flatten().tolist())
            accel.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == save_at:
                accel.save_state(str(tmp_path / f"{save_at}"))
        return seen

    whole = train(*make(), save_at=0)
    for k in range(1, len(whole) + 1):
        train(*make(), save_at=k)
        parts = make()
        parts[0].load_state(str(tmp_path / f"{k}"))
        assert train(*parts, save_at=0) == whole[k:]
