"""The loop on a CUDA device; run with -m gpu where there is one."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

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


def test_the_accelerator_takes_the_gpu_by_itself():
    assert Accelerator().device == torch.device("cuda", 0)
