"""States that Accelerate saved on two processes, read by two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks.collectives import full_tensor
from accel_callbacks.compat.names import resolve
from tests.compat.test_checkpoints import deep, save_random, written_by_name, written_weights
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def loaded(root: str) -> tuple[str, float, list[float], list[int]]:
    project = resolve("accelerate", "ProjectConfiguration")(root, automatic_checkpoint_naming=True)
    options = resolve("accelerate", "DataLoaderConfiguration")(use_stateful_dataloader=True)
    accelerator = resolve("accelerate", "Accelerator")(
        cpu=True, project_config=project, dataloader_config=options, timeout=BOUND
    )
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), DataLoader(range(10)))
    path = accelerator.load_state()
    draws = torch.rand(2).tolist()
    weight = accelerator.unwrap_model(model).weight.item()
    return path, weight, draws, [batch.item() for batch in loader]


def test_each_rank_reads_the_newest_state_with_its_own_generators(pool, tmp_path: Path) -> None:
    draws = []
    for number in (3, 12):
        folder = tmp_path / f"checkpoints/checkpoint_{number}"
        written_weights(folder, {"module.weight": torch.full((1, 1), float(number))})
        torch.save({"_num_yielded": 2, "_iterator_finished": False}, folder / "dl_state_dict.bin")
    for rank in range(2):
        torch.manual_seed(40 + rank)
        save_random(folder, rank)
        draws.append(torch.rand(2).tolist())
    found = pool.run(loaded, str(tmp_path))
    assert [path for path, *_ in found] == [str(folder)] * 2
    assert [weight for _, weight, *_ in found] == [12.0, 12.0]
    assert [drawn for *_, drawn, _ in found] == draws
    assert [left for *_, left in found] == [[4, 6, 8], [5, 7, 9]]


def stepped(root: str, is_sharded: bool) -> tuple[list[Any], list[Any]]:
    accelerator = resolve("accelerate", "Accelerator")(
        cpu=True, timeout=BOUND,
        fsdp_plugin=resolve("accelerate", "FullyShardedDataParallelPlugin")(fsdp_version=2)
        if is_sharded else None,
    )  # fmt: skip
    model = deep()
    groups = [{"params": part.parameters()} for part in model]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=1.0))
    accelerator.load_state(root)
    accelerator.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()
    weights = accelerator.get_state_dict(model, all_ranks=True)
    states = [optimizer.optimizer.state[parameter] for parameter in model.parameters()]
    moments = [full_tensor(state["exp_avg"]).tolist() for state in states]
    return [weight.tolist() for weight in weights.values()], moments


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("was_sharded", [True, False])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_optimizers_that_fsdp_saved_go_on(
    pool, tmp_path: Path, was_sharded: bool, is_sharded: bool
) -> None:
    model, optimizer = written_by_name(tmp_path, was_sharded)
    found = pool.run(stepped, str(tmp_path), is_sharded)
    optimizer.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    for weights, moments in found:
        for weight, moment, parameter in zip(weights, moments, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(weight), parameter.detach())
            state = optimizer.state[parameter]
            torch.testing.assert_close(torch.tensor(moment), state["exp_avg"])
