"""Checkpoints of ranks that share sequences, loaded on other layouts, also in an open window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import FullyShardedDataParallelPlugin
from tests.accel_callbacks.engines.context.test_context_parallel import (
    accelerator,
    sentences,
    summed,
)
from tests.support.language import LanguageModel
from tests.support.ring_attention import ring_on_cpu
from tests.support.rounding import reordered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

LAYOUTS = {"one": ({}, False), "cp": ({"cp_size": 2}, False), "cp, sharded": ({"cp_size": 2}, True)}
#: The save is in the middle of the second window of two.
SAVED_AFTER, STEPS = 3, 6


def trained(layout: str, load: str | None = None, save: str | None = None) -> dict[str, Any]:
    sizes, sharded = LAYOUTS[layout]
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    accel = accelerator(sizes, gradient_accumulation_steps=2, **options)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(sentences(STEPS), batch_size=1, shuffle=True)
    torch.manual_seed(5)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    if load is not None:
        accel.load_state(load)
    seen, number = [], SAVED_AFTER if load else 0
    with ring_on_cpu():
        for batch in loader:
            seen += batch["tokens"][:, 0].tolist()
            with accel.accumulate(model), accel.maybe_context_parallel([*batch.values()], [1] * 3):
                loss, count = summed(model(batch["tokens"], batch["positions"]), batch["labels"])
                accel.backward(loss, normalizer=count)
                optimizer.step()
                optimizer.zero_grad()
            number += 1
            if save is not None and number == SAVED_AFTER:
                accel.save_state(save)
                break
    state = accel.get_state_dict(model)
    weights = torch.cat([one.flatten() for one in state.values()]).tolist() if state else None
    return {"seen": seen, "weights": weights}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cp", "one"),
        ("one", "cp"),
        ("cp", "cp"),
        pytest.param("cp, sharded", "one", marks=pytest.mark.slow),
        pytest.param("one", "cp, sharded", marks=pytest.mark.slow),
        pytest.param("cp", "cp, sharded", marks=pytest.mark.slow),
        pytest.param("cp, sharded", "cp", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_in_a_window_goes_on_in_another_layout(
    alone, pool, tmp_path, before, after
):
    folder = str(tmp_path / "checkpoint")
    pools = {"one": alone}
    first = pools.get(before, pool).run(trained, before, None, folder)[0]
    found = pools.get(after, pool).run(trained, after, folder)[0]
    expected = alone.run(trained, "one")[0]
    assert first["seen"] + found["seen"] == expected["seen"]
    assert found["weights"] == reordered(expected["weights"])
