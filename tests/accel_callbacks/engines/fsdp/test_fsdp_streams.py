"""Resume in the middle of a stream while the model is sharded: the exact remaining samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.accel_callbacks.data.test_stream_ranks import Sharded
from tests.support.rounding import reordered
from tests.support.sharded import Network, accelerator

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

#: The numbers of shards of uneven lengths; of a stream that is not sharded, one after the other. No
#: rank has run out at the saves: after a resume it would repeat another batch than without.
PARTS = [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12], [20, 21, 22], [30, 31, 32, 33]]


class Whole(IterableDataset[int]):
    """A stream that each rank reads, and takes its batches of."""

    def __iter__(self) -> Any:
        return (number for part in PARTS for number in part)


def features(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sin(numbers.float()[:, None] * torch.arange(1, 8))


def run(layout: str, kind: str, workers: int, folder: str, save_at: int) -> Any:
    """Train an epoch and one more; save after some steps (-1: never), or load (0) and go on."""
    accel, model = accelerator(layout, gradient_accumulation_steps=2), Network()
    data: Any = Sharded(PARTS) if kind == "shards" else Whole()
    model, optimizer, batches = accel.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        DataLoader(data, 2, num_workers=workers),
    )
    if save_at == 0:
        accel.load_state(folder, strict=True)
    epochs = []
    for _ in range(2):
        seen: list[list[int]] = []
        for numbers in batches:
            seen.append(accel.gather_for_metrics(numbers).tolist())
            with accel.accumulate(model):
                accel.backward(model(features(numbers)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if len(seen) == save_at:
                accel.save_state(folder)
        epochs.append(seen)
        save_at = -1
    state = accel.get_state_dict(model, all_ranks=True)
    return epochs, torch.cat([one.flatten() for one in state.values()]).tolist()


# Replicas exchange the gradients of an open window for a save: another order of the same sum.
def resumed(layout: str, kind: str, workers: int, folder: str, steps: list[int]) -> Any:
    (first, second), weights = run(layout, kind, workers, folder, -1)
    found = []
    for step in steps:
        run(layout, kind, workers, f"{folder}/{step}", step)
        (rest, following), after = run(layout, kind, workers, f"{folder}/{step}", 0)
        alike = after == (weights if layout == "fsdp" else reordered(weights))
        found.append((rest == first[step:], following == second, alike))
    return first, found


@pytest.mark.parametrize(
    ("kind", "workers", "steps"),
    [
        ("whole", 0, [1]),  # in a window
        ("shards", 0, [2]),  # at the end of one
        pytest.param("whole", 1, [1, 2, 3], marks=pytest.mark.slow),
        pytest.param("shards", 2, [1, 2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_stream_goes_on_with_exactly_the_samples_that_are_left(
    pool, tmp_path, kind, workers, steps
):
    for first, found in pool.run(resumed, "fsdp", kind, workers, str(tmp_path), steps):
        assert sorted(n for batch in first for n in batch) == sorted(n for p in PARTS for n in p)
        assert found == [(True, True, True)] * len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_a_stream_goes_on_over_replicas_of_shards(pool_of_4, tmp_path, kind):
    for _, found in pool_of_4.run(resumed, "hsdp", kind, 0, str(tmp_path), [1]):
        assert found == [(True, True, True)]


@pytest.mark.parametrize("turn", [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_another_strategy_goes_on_with_the_same_samples(pool, tmp_path, turn):
    """Of sharded weights and whole ones: the loaders do not know which."""
    saved_by, loaded_by = turn
    folder = str(tmp_path / "state")
    whole = pool.run(run, saved_by, "shards", 0, folder, 3)
    rest = pool.run(run, loaded_by, "shards", 0, folder, 0)
    for (epochs, weights), (after, others) in zip(whole, rest, strict=True):
        assert after == [epochs[0][3:], epochs[1]]
        assert others == reordered(weights)
