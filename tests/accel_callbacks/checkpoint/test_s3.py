"""Checkpoints on S3, against a server on loopback."""

from __future__ import annotations

import fsspec
import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

pytestmark = pytest.mark.s3


def build(*callbacks, seed: int = 0) -> tuple:
    torch.manual_seed(seed)
    accel = Accelerator(cpu=True, callbacks=callbacks)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rows = torch.rand(8, 2, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, 2, shuffle=True)
    return accel, *accel.prepare(model, optimizer, loader)


def fit(*callbacks, epochs: int, seed: int = 0) -> tuple[Accelerator, torch.Tensor]:
    accel, model, optimizer, loader = build(*callbacks, seed=seed)
    with accel.run("s3") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                accel.backward(model(batch).pow(2).sum())
                optimizer.step()
                optimizer.zero_grad()
    return accel, model[0].weight.detach()


def test_state_goes_to_s3_and_comes_back(s3_options):
    accel, model, optimizer, _ = build()
    accel.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    url = "s3://bucket/state"
    assert accel.save_state(url, storage_options=s3_options, max_shard_size=64) == url
    fresh, other, its_optimizer, _ = build(seed=5)
    assert fresh.load_state(url, storage_options=s3_options) == url
    assert torch.equal(other[0].weight, model[0].weight)
    for ours, theirs in zip(
        its_optimizer.state_dict()["state"].values(),
        optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])


def test_a_checkpoint_that_is_not_there_is_a_clear_error(s3_options):
    accel, *_ = build()
    with pytest.raises(checkpoint_io.CheckpointNotFoundError, match="s3://bucket/nothing"):
        accel.load_state("s3://bucket/nothing", storage_options=s3_options)


def test_a_run_with_checkpoints_on_s3_resumes_exactly_and_prunes(s3_options):
    def saver() -> Checkpoint:
        return Checkpoint(
            "s3://bucket/run", every_n_steps=2, keep_last=2, storage_options=s3_options
        )

    _, expected = fit(epochs=2)
    fit(saver(), epochs=1)
    resumed, weight = fit(saver(), epochs=2, seed=5)
    assert resumed.current_run.resumed_from == "s3://bucket/run/step-00000004"
    assert torch.equal(weight, expected)
    folder = checkpoint_io.CheckpointFolder("s3://bucket/run", storage_options=s3_options)
    left = [int(entry.name.removeprefix("step-")) for entry in folder.list()]
    assert left == [4, 6, 8]  # the one resumed from, and the two newest


def test_a_model_saved_on_s3_is_plain_safetensors(s3_options, tmp_path):
    from safetensors.torch import load

    accel, model, *_ = build()
    accel.save_model(model, "s3://bucket/model", storage_options=s3_options)
    with fsspec.open("s3://bucket/model/model.safetensors", "rb", **s3_options) as file:
        tensors = load(file.read())
    assert torch.equal(tensors["0.weight"], model[0].weight)
