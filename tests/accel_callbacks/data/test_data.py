"""What each of two processes reads, with every option of the loaders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from accel_callbacks import Accelerator, DataLoaderConfiguration, prepare_data_loader
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(rng_types=None, **options) -> Accelerator:
    return Accelerator(
        cpu=True,
        timeout=BOUND,
        dataloader_config=DataLoaderConfiguration(**options),
        rng_types=rng_types,
    )


def batches(count: int, batch_size: int, options: dict) -> list:
    accel = accelerator(**options)
    loader = accel.prepare(DataLoader(range(count), batch_size))
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]]]),
        ({"even_batches": False}, [[[0, 1], [4, 5, 6]], [[2, 3], [7, 8]]]),
        ({"split_batches": True}, [[[n] for n in range(0, 9, 2)], [[1], [3], [5], [7], [0]]]),
    ],
)
def test_each_process_reads_its_part(pool, options, expected):
    assert pool.run(batches, 9, 2, options) == expected


def orders(config: dict) -> list:
    torch.manual_seed(100 + Accelerator(cpu=True).process_index)  # each has a seed of its own
    accel = accelerator(**config)
    generator = torch.Generator().manual_seed(accel.process_index)
    own = BatchSampler(torch.utils.data.RandomSampler(range(12)), 2, False)
    loaders = accel.prepare(
        DataLoader(range(12), 2, shuffle=True),
        DataLoader(range(12), 2, shuffle=True, generator=generator),
        DataLoader(range(12), batch_sampler=own),
    )
    return [
        [accel.gather(batch).tolist() for batch in loader] for loader in loaders for _ in range(2)
    ]


@pytest.mark.parametrize(
    "config", [{}, {"use_seedable_sampler": True}, {"data_seed": 5}], ids=["ours", "its", "seed"]
)
def test_processes_with_other_seeds_agree_on_the_order(pool, config):
    first, second = pool.run(orders, config)
    assert first == second
    for epoch in first:
        assert sorted(n for batch in epoch for n in batch) == list(range(12))


def too_few() -> None:
    accel = accelerator(even_batches=False)
    loader = accel.prepare(DataLoader(range(1), 1))
    for _ in loader:
        accel.wait_for_everyone()


def test_fewer_samples_than_processes_are_the_same_error_on_all(pool):
    outcomes = pool.outcomes(too_few)
    assert all("1 samples for 2 processes" in text for _, text in outcomes), outcomes


def draws(rng_types: list | None) -> list:
    accel = accelerator(rng_types=rng_types)
    torch.manual_seed(accel.process_index)
    generator = torch.Generator().manual_seed(accel.process_index)
    loader = accel.prepare(DataLoader(range(4), 1, shuffle=True, generator=generator))
    seen = []
    for _ in range(2):
        for _ in loader:
            seen.append([torch.rand(1).item(), torch.rand(1, generator=generator).item()])
            break
        torch.rand(accel.process_index)  # and apart again
        torch.rand(accel.process_index, generator=generator)
    return seen


def test_rng_types_are_those_of_the_main_process_at_each_pass(pool):
    def alike(rng_types: list | None) -> list[bool]:
        first, second = pool.run(draws, rng_types)
        pairs = [zip(a, b, strict=True) for a, b in zip(first, second, strict=True)]
        return [a == b for pair in pairs for a, b in pair]

    # The loader's own generator is that of rank 0 anyway: the order is drawn from it.
    assert alike(None) == [False, True] * 2
    assert alike(["torch"]) == [True, True] * 2
    assert alike(["generator"]) == [False, True] * 2
    assert alike(["torch", "generator"]) == [True] * 4


def without_a_generator() -> list:
    loader = accelerator(rng_types=["generator"]).prepare(DataLoader(range(4), 1, shuffle=True))
    return [batch.item() for batch in loader]


def test_a_generator_that_no_loader_has_is_not_missed(pool):
    assert sorted(n for rank in pool.run(without_a_generator) for n in rank) == [0, 1, 2, 3]


def alone() -> list:
    loader = prepare_data_loader(DataLoader(range(7), 2, shuffle=True))
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def test_prepare_data_loader_finds_its_place_among_the_processes(pool):
    first, second = pool.run(alone)
    for epoch in (0, 1):
        read = [
            n for step in zip(first[epoch], second[epoch], strict=True) for b in step for n in b
        ]
        assert sorted(read[:7]) == list(range(7))
        assert read[7:] == read[:1]


def trains(count: int, even: bool) -> list:
    """One epoch of SGD in which each process may have another number of samples in a batch."""
    accel = accelerator(even_batches=even)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer, loader = accel.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(count, 1), 2)
    )
    steps = 0
    for batch in loader:
        accel.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return [steps, accel.unwrap_model(model).weight.item()]


@pytest.mark.parametrize("count", range(2, 10))
@pytest.mark.parametrize("even", [False, True])
def test_all_take_the_same_steps_so_that_no_collective_hangs(pool, count, even):
    first, second = pool.run(trains, count, even)
    assert first == second
    steps = -(-count // 4) if even else max(-(-(count - 1) // 4), 1)
    assert first[0] == steps
    assert first[1] == pytest.approx(-0.1 * steps)


def changes_between_passes() -> list:
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(9), 2))
    seen = []
    for even in (True, False, True):
        accel.even_batches = even
        seen.append([batch.tolist() for batch in loader])
    return seen


def test_even_batches_can_be_changed_between_passes(pool):
    first, second = pool.run(changes_between_passes)
    assert first == [[[0, 1], [4, 5], [8]], [[0, 1], [4, 5, 6]], [[0, 1], [4, 5], [8]]]
    assert second == [[[2, 3], [6, 7], [0]], [[2, 3], [7, 8]], [[2, 3], [6, 7], [0]]]


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise LookupError("sample 5 is missing")
        return index


def reads_a_broken_sample(workers: int) -> list:
    accel = accelerator()
    loader = accel.prepare(DataLoader(Broken(), 2, num_workers=workers))
    seen = []
    try:
        for batch in loader:
            seen += batch.tolist()
    except LookupError:
        seen.append("error")
    return [seen, len(accel.loop.position.active)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_leaves_no_loader_active(pool, workers):
    assert pool.run(reads_a_broken_sample, workers) == [[[0, 1, "error"], 0], [[2, 3, 6, 7], 0]]


def shares_of_hugging_face() -> list:
    import datasets

    data = datasets.Dataset.from_dict({"x": list(range(7))}).with_format("torch")
    accel = accelerator()
    loader = accel.prepare(DataLoader(data, 2, shuffle=True))
    return [n for batch in loader for n in accel.gather_for_metrics(batch)["x"].tolist()]


def test_a_dataset_of_hugging_face_is_shared_out(pool):
    pytest.importorskip("datasets")
    first, second = pool.run(shares_of_hugging_face)
    assert sorted(first) == list(range(7)) != first
    assert first == second
