"""States that Accelerate saved on two processes, read by two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks.compat.names import resolve
from tests.compat.test_checkpoints import save_random, written_weights
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
