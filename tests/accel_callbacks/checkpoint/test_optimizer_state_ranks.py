"""State that an optimizer keeps under a name, over two processes and from two to one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin
from tests.accel_callbacks.checkpoint.test_optimizer_state import Keeper
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def own_state(folder: str, load: str | None, sharded: bool) -> tuple[dict, str]:
    """Return what an optimizer keeps itself after three steps or a load, and a checkpoint."""
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    accel = Accelerator(cpu=True, timeout=BOUND, project_dir=folder, **options)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accel.prepare(model, Keeper(model.parameters(), 0.1))
    for _ in range(3 if load is None else 0):
        accel.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if load is not None:
        accel.load_state(load)
    saved = load or accel.save_state()
    names = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    kept = {str(key): repr(optimizer.state[key]) for key in names}
    lengths = [len(optimizer.state[p]["recent"]) for p in model.parameters()]
    return {**kept, "recent": lengths}, saved


@pytest.mark.parametrize("sharded", [False, True])
def test_it_is_restored_on_each(pool, sharded, tmp_path: Path):
    (first, saved), (second, _) = pool.run(own_state, str(tmp_path), None, sharded)
    assert first == second
    assert "'steps': 3" in first["global"]
    for kept, _ in pool.run(own_state, str(tmp_path / "again"), saved, sharded):
        assert kept == first
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        alone, _ = own_state(str(tmp_path / "alone"), saved, False)
    assert alone == first
