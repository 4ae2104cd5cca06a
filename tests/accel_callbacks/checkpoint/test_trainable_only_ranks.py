"""Checkpoints without frozen weights, and the files of an adapter, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import checkpoint_io
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.training_state import fingerprints
from tests.accel_callbacks.checkpoint.test_trainable_only import FILES, Peft
from tests.support.bound import BOUND
from tests.support.sharded import WIDTH, Network, accelerator

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def train(folder: str, epochs: int):
    saver = Checkpoint(folder, every="1 epoch", trainable_only=True)
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[saver])
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
    for checkpoint in Path(tmp_path / "cut").glob("[!.]*"):
        assert {path.name for path in checkpoint.iterdir()} >= set(FILES)


# --- frozen weights that are sharded ----------------------------------------------------------


def frozen(seed: int) -> Network:
    """A network of which the last layer is trained, on the base of this seed."""
    model = Network(seed)
    model.requires_grad_(False)
    torch.manual_seed(7)
    model.last = torch.nn.Linear(WIDTH, 1)
    return model


def save_or_load(layout: str, seed: int, path: str, load: bool) -> list[str]:
    """Save a checkpoint without the base, or load it strictly; return the loaded names."""
    accel, model = accelerator(layout), frozen(seed)
    held = [p for p in model.parameters() if p.requires_grad]
    model, _ = accel.prepare(model, torch.optim.SGD(held, lr=0.1))
    if not load:
        accel.save_state(path, trainable_only=True)
        return []
    accel.load_state(path, strict=True, only="models")
    return list(accel.load_report.kept)


def saved_by(world: Any, layout: str, folder: Path) -> str:
    path = str(folder / layout)
    world.run(save_or_load, layout, 0, path, False)
    return path


def marks(path: str) -> dict[str, Any]:
    return checkpoint_io.load(path).state["frozen"]["0"]


def test_a_sharded_base_has_the_fingerprints_of_an_unsharded_one(pool, alone, tmp_path):
    sharded = saved_by(pool, "fsdp", tmp_path)
    whole = saved_by(alone, "ddp", tmp_path)
    assert len(marks(whole)) == sum(not p.requires_grad for p in frozen(0).parameters())
    assert marks(sharded) == marks(whole)
    for path, world, layout in [(sharded, alone, "ddp"), (whole, pool, "fsdp")]:
        for kept in world.run(save_or_load, layout, 0, path, True):
            assert len(kept) == len(marks(whole))


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_another_base_under_shards_is_an_error_on_all_ranks(pool, tmp_path, layout):
    path = saved_by(pool, layout, tmp_path)
    for kind, text in pool.outcomes(save_or_load, "fsdp", 1, path, True):
        assert kind in ("ResumeError", "RemoteError")
        assert "8 of 14 frozen weights differ" in text  # those of LayerNorm start alike


def test_one_changed_element_of_a_shard_of_rank_1_is_seen_on_all_ranks(pool, tmp_path):
    path = saved_by(pool, "fsdp", tmp_path)
    for kind, text in pool.outcomes(load_with_a_changed_row, path):
        assert kind in ("ResumeError", "RemoteError")
        assert "1 of 14 frozen weights differ ('first.weight')" in text


def load_with_a_changed_row(path: str) -> None:
    accel, model = accelerator(), frozen(0)
    with torch.no_grad():
        model.first.weight[WIDTH - 1, 6] += 1
    held = [p for p in model.parameters() if p.requires_grad]
    accel.prepare(model, torch.optim.SGD(held, lr=0.1))
    accel.load_state(path, strict=True, only="models")


@pytest.mark.slow
def test_so_it_is_with_replicas(pool_of_4, alone, tmp_path):
    assert marks(saved_by(pool_of_4, "hsdp", tmp_path)) == marks(saved_by(alone, "ddp", tmp_path))


def hand_sharded(kind: str) -> list[Any]:
    """Fingerprints of a large tensor that is sharded in some way, and of the same one whole."""
    accelerator()
    torch.manual_seed(0)
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "bool": torch.bool}
    whole = torch.randn(61, 3, 30).to(dtypes.get(kind, torch.float32))
    mesh = init_device_mesh("cpu", (2,))
    placement = {"columns": Shard(2), "replicated": Replicate()}.get(kind, Shard(0))
    if kind == "fp8":  # which gloo does not send
        local = distribute_tensor(whole.view(torch.uint8), mesh, [placement]).to_local()
        options = {"shape": whole.shape, "stride": whole.stride()}
        parts = DTensor.from_local(local.view(whole.dtype), mesh, [placement], **options)
    else:
        parts = distribute_tensor(whole, mesh, [placement])
    scalar = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    plain = {"w": whole, "s": torch.tensor(3.0), "e": torch.zeros(0, 4)}
    sharded = {"w": parts, "s": scalar, "e": distribute_tensor(plain["e"], mesh, [Shard(0)])}
    return [fingerprints(plain), fingerprints(sharded)]


@pytest.mark.parametrize("kind", ["rows", "columns", "replicated", "bf16", "fp8", "bool"])
def test_fingerprints_are_those_of_whole_tensors_however_they_are_sharded(pool, kind):
    for whole, sharded in pool.run(hand_sharded, kind):
        assert list(whole) == ["w", "s", "e"]
        assert sharded == whole
