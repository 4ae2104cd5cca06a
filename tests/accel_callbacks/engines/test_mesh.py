"""Ranks that share a model read the same data and count once, under models that ignore the mesh.

DDP over all ranks with ``cp_size=2``, and no sequence that is cut: two ranks do the same work, so
that a run on a mesh of 2n ranks must be a plain run on n ranks.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from accel_callbacks import (
    Accelerator,
    DataLoaderConfiguration,
    ParallelismConfig,
    set_seed,
    skip_first_batches,
)
from accel_callbacks.callbacks import Throughput
from tests.support.bound import BOUND
from tests.support.rounding import reordered

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SHORT = BOUND
#: Ranks of the mesh, and of the plain run that it must equal.
WORLDS = [(2, 1), (4, 2)]
on_both = pytest.mark.parametrize(("mesh", "plain"), WORLDS)


def accelerator(copies: int = 1, *, config: dict[str, Any] | None = None, **options: Any):
    """An Accelerator on which this many neighboring ranks share a model."""
    arrangement = None
    if copies > 1:
        replicas = int(os.environ["WORLD_SIZE"]) // copies
        arrangement = ParallelismConfig(dp_replicate_size=replicas, cp_size=copies)
    return Accelerator(
        cpu=True,
        timeout=SHORT,
        parallelism_config=arrangement,
        dataloader_config=DataLoaderConfiguration(**(config or {})),
        **options,
    )


@pytest.fixture(scope="module")
def run_on(alone, pool, pool_of_4) -> Callable[..., list[Any]]:
    """Runs a function on one, two or four processes, which live as long as the module."""
    pools = {1: alone, 2: pool, 4: pool_of_4}
    return lambda world, function, *args: pools[world].run(function, *args)


def doubled(results: list[Any]) -> list[Any]:
    """What ranks in pairs do where each pair does what a rank of the plain run does."""
    return [result for result in results for _ in range(2)]


# --- loaders -----------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """Numbers that are shuffled by the generator of the process that reads them."""

    def __init__(self, count: int, shuffled: bool = False) -> None:
        self.count, self.shuffled = count, shuffled

    def __iter__(self):
        order = torch.randperm(self.count).tolist() if self.shuffled else range(self.count)
        return iter(order)


class Sharded(IterableDataset):
    """Uneven shards, as of Hugging Face datasets."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts, self.place = parts, 0

    num_shards = property(lambda self: len(self.parts))

    def shard(self, num_shards, index):
        return Sharded(self.parts[index::num_shards])

    def __iter__(self):
        own = [number for part in self.parts for number in part]
        while self.place < len(own):
            self.place += 1
            yield own[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Noisy(TensorDataset):
    """Samples with noise from the generator of the worker that reads them."""

    def __getitem__(self, index):
        return torch.stack([self.tensors[0][index], torch.rand(())])


def whole(batch, piece, **_):
    return batch[piece]


def loader_of(kind: str) -> DataLoader:
    numbers = torch.arange(11)
    if kind == "batch sampler":
        return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(range(11)), 2, False))
    if kind == "ready batches":
        return DataLoader(numbers.split(2), batch_size=None, shuffle=True)
    if kind == "own generator":
        return DataLoader(numbers, 2, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "stream":
        return DataLoader(Numbers(11), 2)
    if kind == "shuffled stream in workers":
        return DataLoader(Numbers(11, shuffled=True), 2, num_workers=1)
    if kind == "shards":
        return DataLoader(Sharded([[0, 1, 2, 3, 4, 5], [10, 11], [20, 21], [30]]), 2)
    if kind == "noise in workers":
        return DataLoader(Noisy(torch.arange(11.0)), 2, num_workers=2, shuffle=True)
    return DataLoader(numbers, 2, shuffle=True)


KINDS = ["shuffled", "batch sampler", "ready batches", "own generator", "stream", "shards"]
IN_WORKERS = ["shuffled stream in workers", "noise in workers"]


def read(kind: str, copies: int, config: dict[str, Any], skipped: int = 0) -> Any:
    """(own batches, those of all ranks by tensors and by objects) of the second of two epochs."""
    accel = accelerator(copies, config=config)
    torch.manual_seed(5 + accel.process_index)  # as scripts do, and must not differ in a pair
    loader = accel.prepare(loader_of(kind))
    for _ in range(2):
        own, tensors, objects = [], [], []
        for batch in skip_first_batches(loader, skipped) if skipped else loader:
            own.append(batch.tolist())
            tensors.append(accel.gather_for_metrics(batch).tolist())
            objects += accel.gather_for_metrics(own[-1], use_gather_object=True)
    return own, tensors, objects


def compare(run_on, mesh: int, plain: int, *args: Any) -> list[Any]:
    """Check that pairs read what the ranks of a plain run read, but for noise of a process."""
    expected = run_on(plain, read, args[0], 1, *args[1:])
    found = run_on(mesh, read, args[0], 2, *args[1:])
    assert found == doubled(expected)
    return expected


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_reads_what_one_rank_of_half_as_many_reads(run_on, kind, even):
    mesh, plain = WORLDS[(KINDS.index(kind) + even) % 2]
    if kind == "ready batches" and not even:
        even = True  # they cannot be split
    compare(run_on, mesh, plain, kind, {"even_batches": even})


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "shards"])
def test_a_dispatching_loader_sends_both_of_a_pair_the_same_part(run_on, kind):
    compare(run_on, 4, 2, kind, {"dispatch_batches": True})


def test_batches_that_are_split_or_skipped_are_those_of_data_ranks(run_on):
    compare(run_on, 4, 2, "shuffled", {"split_batches": True}, 1)
    compare(run_on, 2, 1, "stream", {}, 1)
    compare(run_on, 4, 2, "shards", {}, 1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", IN_WORKERS)
def test_workers_of_a_pair_have_the_same_seeds(run_on, world, kind):
    found = run_on(world, read, kind, 2, {})
    owns = [own for own, *_ in found]
    assert owns == doubled(owns[::2])
    if kind == "noise in workers" and world == 4:
        noise = [{pair[1] for batch in own for pair in batch} for own in owns]
        assert not noise[0] & noise[2]


def enough_for_two() -> list[int]:
    accel = accelerator(2, config={"even_batches": False})
    return [len(batch) for batch in accel.prepare(DataLoader(torch.arange(3), 2))]


def test_uneven_batches_need_a_sample_a_data_rank_and_not_a_rank(run_on):
    assert run_on(4, enough_for_two) == doubled([[2], [1]])


def slices() -> tuple[list[Any], list[Any]]:
    accel = accelerator(2, config={"dispatch_batches": True})
    asked = []

    def take(batch, piece, process_index, num_processes):
        asked.append((process_index, num_processes))
        return batch[piece]

    loader = accel.prepare_data_loader(DataLoader(torch.arange(8), 2), slice_fn_for_dispatch=take)
    return [batch.tolist() for batch in loader], asked


def test_a_dispatching_loader_slices_for_data_ranks(run_on):
    found = run_on(4, slices)
    assert [own for own, _ in found] == doubled([[[0, 1], [4, 5]], [[2, 3], [6, 7]]])
    assert found[0][1] == [(0, 2), (1, 2)] * 2


def fails_to_read() -> None:
    class Broken(Numbers):
        def __iter__(self):
            yield 0
            raise OSError("the disk is gone")

    accel = accelerator(2, config={"dispatch_batches": True})
    list(accel.prepare(DataLoader(Broken(4), 1)))


def test_a_dispatching_loader_that_fails_ends_all_ranks(run_on, pool_of_4):
    kinds = [kind for kind, _ in pool_of_4.outcomes(fails_to_read)]
    assert kinds == ["OSError", *["RemoteError"] * 3]


# --- metrics -----------------------------------------------------------------------------------


def measured(copies: int) -> list[Any]:
    accel = accelerator(copies)
    loader = accel.prepare(DataLoader(torch.arange(7), 2))
    found = []
    for batch in loader:
        mean = batch.double().mean()
        data = {"x": batch, "names": [str(int(n)) for n in batch], "mean": mean, "n": len(batch)}
        found.append(
            {
                key: value if isinstance(value, list) else value.tolist()
                for key, value in accel.gather_for_metrics(data).items()
            }
        )
    rows = accel.gather_for_metrics(torch.full((2 + accel.strategy.data.rank,), 1.0))
    one = accel.gather_for_metrics({"rank": accel.strategy.data.rank}, use_gather_object=True)
    return [*found, rows.tolist(), one]


@on_both
def test_metrics_of_a_pair_count_once(run_on, mesh, plain):
    expected = run_on(plain, measured, 1)
    assert [number for step in expected[0][:-2] for number in step["x"]] == list(range(7))
    assert run_on(mesh, measured, 2) == doubled(expected)


def plain_collectives() -> tuple[Any, ...]:
    accel = accelerator(2)
    rank = accel.process_index
    with accel.split_between_processes(list(range(8))) as own:
        part = list(own)
    gathered = accel.gather(torch.tensor([rank])).tolist()
    return gathered, accel.reduce(torch.tensor(1)).item(), part


def test_other_collectives_are_over_all_ranks(run_on):
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert run_on(4, plain_collectives) == [([0, 1, 2, 3], 4, part) for part in parts]


# --- training ----------------------------------------------------------------------------------


def trained(copies: int, normalized: bool = False, debug: bool = False) -> dict[str, Any]:
    """Losses, norms, learning rates, weights and totals of two epochs with dropout."""
    throughput = Throughput(log_every_n_steps=1, tokens=lambda batch: batch[0].numel())
    accel = accelerator(
        copies,
        gradient_accumulation_steps=2,
        scheduler_steps_per_process=True,
        callbacks=[throughput],
        debug=debug,
    )
    set_seed(7, device_specific=True)
    model, optimizer, loader, scheduler = objects(accel)
    losses, norms, rates = [], [], []
    for _ in range(2):
        for inputs, targets in loader:
            with accel.accumulate(model):
                each = (model(inputs) - targets).pow(2)
                losses.append(accel.gather_for_metrics(each).mean().item())
                if normalized:
                    accel.backward(each.sum(), normalizer=len(inputs))
                else:
                    accel.backward(each.mean())
                norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                norms += [] if norm is None else [float(norm)]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates += scheduler.get_last_lr()
    weights = [p.detach().flatten() for p in accel.unwrap_model(model).parameters()]
    totals = [throughput.rates[f"throughput/total_{name}"] for name in ("samples", "tokens")]
    state = throughput.state_dict()
    return {
        "numbers": [*losses, *norms, *rates, *torch.cat(weights).tolist()],
        "totals": [*map(float, totals), float(state["samples"]), float(state["tokens"])],
        "dropout": torch.rand(3).tolist(),
    }


def objects(accel: Accelerator) -> Any:
    inputs = torch.arange(66.0).reshape(22, 3).sin()
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 3, shuffle=True)
    return accel.prepare(model, optimizer, data, scheduler)


@on_both
@pytest.mark.parametrize("normalized", [False, True], ids=["means", "sums"])
def test_a_run_on_a_mesh_is_the_run_of_half_as_many_ranks(run_on, mesh, plain, normalized):
    expected = run_on(plain, trained, 1, normalized)
    found = run_on(mesh, trained, 2, normalized)
    assert [one["totals"] for one in found] == doubled([one["totals"] for one in expected])
    assert [one["dropout"] for one in found] == doubled([one["dropout"] for one in expected])
    for one, other in zip(found, doubled(expected), strict=True):
        if plain == 1:  # halves of equal gradients add up exactly
            assert one["numbers"] == other["numbers"]
        assert one["numbers"] == reordered(other["numbers"])


def test_the_debug_mode_finds_nothing_odd_in_pairs(run_on):
    assert run_on(4, trained, 2, True, True) == run_on(4, trained, 2, True)


def joined(copies: int) -> tuple[int, list[float]]:
    """The steps of this rank and the weights after an epoch with more batches on the first."""
    accel = accelerator(copies, config={"even_batches": False})
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    batches = [torch.full((2, 1), 1.0 + number) for number in range(3 - accel.strategy.data.rank)]
    steps = 0
    with accel.join_uneven_inputs([model]):
        for batch in batches:
            accel.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps, [p.item() for p in accel.unwrap_model(model).parameters()]


def test_uneven_inputs_of_pairs_are_joined(run_on):
    expected = run_on(2, joined, 1)
    for (steps, weights), (others, same) in zip(
        run_on(4, joined, 2), doubled(expected), strict=True
    ):
        assert steps == others
        assert weights == reordered(same)


# --- random numbers ----------------------------------------------------------------------------


def drawn(seeds: bool) -> list[float]:
    accel = accelerator(2)
    torch.manual_seed(accel.process_index)
    random.seed(accel.process_index)
    if seeds:
        set_seed(3, device_specific=True)
    else:
        accel.prepare(torch.nn.Linear(1, 1))
    return [torch.rand(()).item(), random.random()]


@pytest.mark.parametrize("seeds", [True, False], ids=["set_seed", "prepare"])
def test_ranks_of_a_pair_draw_the_same_numbers(run_on, seeds):
    found = run_on(4, drawn, seeds)
    assert found == doubled(found[::2])
    assert not set(found[0]) & set(found[2])


def seeded_before() -> float:
    """What a rank draws that is seeded before there is an Accelerator, on a launched mesh."""
    Accelerator(cpu=True, timeout=SHORT).end_training()
    os.environ["ACCEL_PARALLELISM_TP_SIZE"] = "2"
    try:
        set_seed(3, device_specific=True)
    finally:
        del os.environ["ACCEL_PARALLELISM_TP_SIZE"]
    return torch.rand(()).item()


def test_before_an_accelerator_the_launcher_says_which_ranks_are_pairs(run_on):
    found = run_on(4, seeded_before)
    assert found == doubled(found[::2])
    assert found[0] != found[2]


# --- resume ------------------------------------------------------------------------------------


def shards() -> DataLoader:
    return DataLoader(Sharded([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]), 1)


def stopped(copies: int, folder: str, at: int) -> None:
    """Save within an epoch, before the end of a window."""
    accel = accelerator(copies, gradient_accumulation_steps=2)
    set_seed(7, device_specific=True)
    model, optimizer, loader, scheduler = objects(accel)
    stream = accel.prepare(shards())
    batches = zip(loader, stream, strict=False)
    steps(accel, model, optimizer, scheduler, batches, at, lambda: accel.save_state(folder))


def steps(accel, model, optimizer, scheduler, batches, count=None, finish=None) -> list[Any]:
    losses: list[Any] = []
    for (inputs, targets), number in batches:
        with accel.accumulate(model):
            loss = (model(inputs) - targets).pow(2).mean() * (1 + number.float().mean() / 10)
            accel.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append([loss.item(), number.tolist()])
        if len(losses) == count:
            finish()
            break
    return losses


def resumed(copies: int, folder: str) -> list[Any]:
    """The rest of the epoch, and the messages of the load."""
    accel = accelerator(copies, gradient_accumulation_steps=2)
    set_seed(99)
    model, optimizer, loader, scheduler = objects(accel)
    stream = accel.prepare(shards())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accel.load_state(folder, strict=True)
    rest = steps(accel, model, optimizer, scheduler, zip(loader, stream, strict=False))
    weights = [p.detach().flatten() for p in accel.unwrap_model(model).parameters()]
    return [rest, torch.cat(weights).tolist(), [str(one.message) for one in told]]


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        ((4, 2), (2, 1), 3),  # in a window, and 2: between windows
        ((2, 1), (4, 2), 3),
        ((4, 2), (4, 2), 3),
        ((2, 2), (1, 1), 2),
        ((1, 1), (2, 2), 3),
        ((2, 1), (4, 2), 2),
    ],
)
def test_a_resume_finds_the_state_of_its_data_rank(run_on, tmp_path, before, after, at):
    """Random numbers, streams and open windows: all of them decide on the losses."""
    folder = str(tmp_path / "checkpoint")
    run_on(before[0], stopped, before[1], folder, at)
    expected = run_on(before[0], resumed, before[1], folder)[:: before[1]]
    found = run_on(after[0], resumed, after[1], folder)[:: after[1]]
    assert len(expected) == len(found) == before[0] // before[1]
    assert all(0 < len(rest) < 8 for rest, *_ in expected)
    for (rest, weights, told), (others, same, _) in zip(found, expected, strict=True):
        assert [number for _, number in rest] == [number for _, number in others]
        assert [loss for loss, _ in rest] == reordered([loss for loss, _ in others])
        assert weights == reordered(same)
        assert told == []


def loaded_on_more(copies: int, folder: str) -> str:
    accel = accelerator(copies, gradient_accumulation_steps=2)
    objects(accel)
    accel.prepare(shards())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accel.load_state(folder)
    return " ".join(str(one.message) for one in told)


def test_another_number_of_data_ranks_is_told(run_on, tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_on(4, stopped, 2, folder, 3)
    told = run_on(4, loaded_on_more, 1, folder)
    assert all("saved by 2 data ranks and is loaded by 4" in text for text in told)
    assert not any("dropped" in text for text in told)  # the open window is of all ranks


# --- the mesh ----------------------------------------------------------------------------------


def arranged(sizes: dict[str, int]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ParallelismConfig(**sizes)
        accel = Accelerator(cpu=True, timeout=SHORT, parallelism_config=config)
        mesh = accel.torch_device_mesh
        parts = {
            name: config.get_submesh([name]).mesh.tolist()
            for name in (*config.active_mesh_dims, "dp", "dp_shard_cp", "dp_cp")
            if name in config.active_mesh_dims or len(axes_of(config, name)) > 1
        }
        sharding = config.get_submesh(config.fsdp_dim_names) if config.dp_shard_enabled else None
    return {
        "names": mesh.mesh_dim_names,
        "parts": parts,
        "fsdp": None if sharding is None else (sharding.mesh_dim_names, sharding.mesh.tolist()),
        "ranks": [
            accel.data_parallel_rank,
            accel.data_parallel_shard_rank,
            accel.tensor_parallel_rank,
            accel.context_parallel_rank,
        ],
        "state": accel.state.device_mesh is mesh and accel.state.parallelism_config is config,
    }


def axes_of(config: ParallelismConfig, joined: str) -> list[str]:
    return getattr(config, f"{joined}_dim_names")


def test_a_mesh_of_shards_and_tensor_parallelism(run_on):
    found = run_on(4, arranged, {"dp_shard_size": 2, "tp_size": 2})
    assert found[2]["names"] == ("dp_shard", "tp")
    assert found[2]["parts"] == {"dp_shard": [0, 2], "tp": [2, 3]}
    assert found[3]["fsdp"] == (("dp_shard",), [1, 3])
    assert [one["ranks"] for one in found] == [
        [0, 0, 0, 0],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
    ]
    assert all(one["state"] for one in found)


def test_a_mesh_of_replicas_and_shards(run_on):
    found = run_on(4, arranged, {"dp_replicate_size": 2, "dp_shard_size": 2})
    assert found[1]["parts"] == {
        "dp_replicate": [1, 3],
        "dp_shard": [0, 1],
        "dp": [0, 1, 2, 3],
        "dp_cp": [0, 1, 2, 3],
    }
    assert found[1]["fsdp"] == (("dp_replicate", "dp_shard"), [[0, 1], [2, 3]])
    assert [one["ranks"][:2] for one in found] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_mesh_whose_shards_join_two_axes(run_on):
    found = run_on(4, arranged, {"dp_shard_size": 2, "cp_size": 2})
    assert found[1]["parts"]["dp_shard_cp"] == [0, 1, 2, 3]
    assert found[1]["fsdp"] == (("dp_shard_cp",), [0, 1, 2, 3])
    assert [one["ranks"][3] for one in found] == [0, 1, 0, 1]


def built_anew() -> tuple[bool, bool, int]:
    """A mesh of a group that is gone is no mesh."""
    config = ParallelismConfig(dp_replicate_size=1, tp_size=2)
    first = Accelerator(cpu=True, timeout=SHORT, parallelism_config=config)
    again = Accelerator(cpu=True, timeout=SHORT, parallelism_config=config)
    before = first.torch_device_mesh
    shared = again.torch_device_mesh is before
    first.end_training()
    third = Accelerator(cpu=True, timeout=SHORT, parallelism_config=config)
    mesh = third.torch_device_mesh
    total = torch.ones(())
    torch.distributed.all_reduce(total, group=mesh.get_group("tp"))
    return shared, mesh is before, int(total)


def test_a_mesh_belongs_to_its_process_group(run_on):
    assert run_on(2, built_anew) == [(True, False, 2)] * 2


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"dp_shard_size": 3}, "arranges 3 ranks, and this run has 2"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "accel launch --num_processes 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_error_on_all_ranks(pool, sizes, text):
    for kind, found in pool.outcomes(misfit, sizes):
        assert kind == "ValueError"
        assert text in found


def misfit(sizes: dict[str, int]) -> None:
    Accelerator(cpu=True, timeout=SHORT, parallelism_config=ParallelismConfig(**sizes))


def unsized() -> tuple[Any, ...]:
    accel = Accelerator(cpu=True, timeout=SHORT, parallelism_config=ParallelismConfig())
    return accel.distributed_type.value, accel.data_parallel_rank, accel.should_save_model


def test_a_mesh_without_sizes_replicates_over_all_ranks(run_on):
    assert run_on(2, unsized) == [("MULTI_CPU", rank, True) for rank in range(2)]
