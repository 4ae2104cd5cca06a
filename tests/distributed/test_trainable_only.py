"""Checkpoints without frozen weights, and the files of an adapter, on two processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from tests.accel_callbacks.checkpoint.test_trainable_only import FILES, Peft

pytestmark = pytest.mark.distributed


def train(folder: str, epochs: int):
    saver = Checkpoint(folder, every="1 epoch", trainable_only=True)
    accel = Accelerator(cpu=True, timeout=timedelta(seconds=30), callbacks=[saver])
    net = Peft(width=8)
    adam = torch.optim.AdamW(net.parameters(), lr=0.05)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accel.prepare(net, adam, loader)
    with accel.run("adapter") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    accel.save_model(model, f"{folder}-model")
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(), run.resumed_from


def test_a_trainable_only_run_resumes_exactly_and_writes_its_adapter_once(pool, tmp_path):
    whole = pool.run(train, str(tmp_path / "whole"), 2)
    pool.run(train, str(tmp_path / "cut"), 1)
    resumed = pool.run(train, str(tmp_path / "cut"), 2)
    assert [weights for weights, _ in resumed] == [weights for weights, _ in whole]
    assert all(path.endswith("step-00000004") for _, path in resumed)
    assert {path.name for path in Path(tmp_path / "cut-model").iterdir()} == set(FILES)
    for checkpoint in Path(tmp_path / "cut").iterdir():
        assert {path.name for path in checkpoint.iterdir()} >= set(FILES)
