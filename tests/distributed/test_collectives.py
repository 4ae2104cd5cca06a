"""Collectives and process control on two real processes."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    PartialState,
    broadcast,
    broadcast_object,
    gather_object,
    main_process_first,
    main_process_only,
    on_process,
    synchronize,
)

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=timedelta(seconds=30), **options)


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


def gathers() -> list:
    accel = accelerator()
    rank = accel.process_index
    pair = accel.gather(Pair(torch.tensor([rank]), {"x": torch.tensor(float(rank))}))
    return [type(pair).__name__, pair.left.tolist(), pair.right["x"].tolist(), str(accel.device)]


def test_gather_keeps_the_structure_and_the_rank_order(pool):
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2


def gathers_unevenly() -> list:
    accel = accelerator()
    rank = accel.process_index
    mine = {"x": torch.arange(rank + 1), "y": torch.full((3 * rank, 2), rank), "z": torch.tensor(7)}
    together = accel.gather(mine)
    return [together["x"].tolist(), tuple(together["y"].shape), together["z"].tolist()]


def test_gather_takes_another_size_on_each_process(pool):
    assert pool.run(gathers_unevenly) == [[[0, 0, 1], (3, 2), [7, 7]]] * 2


def gathers_what_does_not_fit(kind: str, how: str) -> None:
    accel = accelerator()
    other = {
        "shape": torch.ones(2, 3),
        "type": torch.ones(2, dtype=torch.float64),
        "number": [torch.ones(2), torch.ones(2)],
        "nothing": [],
    }[kind]
    getattr(accel, how)([torch.ones(2), other][accel.process_index])


@pytest.mark.parametrize("how", ["gather", "gather_for_metrics"])
@pytest.mark.parametrize("kind", ["shape", "type", "number", "nothing"])
def test_what_cannot_be_gathered_is_an_error_on_all_processes(pool, kind, how):
    for name, text in pool.outcomes(gathers_what_does_not_fit, kind, how):
        assert name == "ValueError"
        assert "process 1" in text
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


def metrics_of_a_batch_sampler() -> list:
    accel = accelerator()
    batches = [[0, 1], [2, 3], [4, 5, 6], [7], [8, 9, 10, 11]]
    loader = accel.prepare(torch.utils.data.DataLoader(range(12), batch_sampler=batches))
    seen = []
    for batch in loader:
        tensors, names = accel.gather_for_metrics((batch, batch.float().mean()))
        objects = accel.gather_for_metrics([f"{i}" for i in batch.tolist()])
        seen.append((tensors.tolist(), len(names), [int(name) for name in objects]))
    return seen


def test_metrics_count_each_sample_once_where_batches_have_many_sizes(pool):
    expected = [
        ([0, 1, 2, 3], 2, [0, 1, 2, 3]),
        ([4, 5, 6, 7], 2, [4, 5, 6, 7]),
        ([8, 9, 10, 11], 2, [8, 9, 10, 11]),
    ]
    assert pool.run(metrics_of_a_batch_sampler) == [expected] * 2


def reduces_transposed() -> list:
    accel = accelerator()
    value = torch.arange(6.0).reshape(2, 3)
    return accel.reduce(value if accel.process_index else value.T.contiguous().T).tolist()


def test_reduce_goes_by_place_and_not_by_memory_layout(pool):
    assert pool.run(reduces_transposed) == [[[0, 2, 4], [6, 8, 10]]] * 2


def reduces() -> dict:
    accel = accelerator()
    value = torch.tensor(float(accel.process_index + 1))
    return {
        "sum": accel.reduce(value).item(),
        "mean": accel.reduce(value, "mean").item(),
        "max": accel.reduce(value, "max").item(),
        "min": accel.reduce(value, "min").item(),
        "ints": accel.reduce(torch.tensor(accel.process_index), "mean").item(),
        "weighted": accel.reduce(value, "mean", weight=[3, 1][accel.process_index]).item(),
        "untouched": value.item(),
    }


def test_reduce_combines_and_weights(pool):
    first, second = pool.run(reduces)
    expected = {"sum": 3, "mean": 1.5, "max": 2, "min": 1, "ints": 0.5, "weighted": 1.25}
    assert first == {**expected, "untouched": 1}
    assert second == {**expected, "untouched": 2}


def pads() -> list:
    accel = accelerator()
    mine = torch.full((accel.process_index + 1, 2), 7.0)
    padded = accel.pad_across_processes(mine, pad_index=-1)
    front = accel.pad_across_processes(mine, pad_index=-1, pad_first=True)
    return [padded[:, 0].tolist(), front[:, 0].tolist()]


def test_pad_across_processes(pool):
    assert pool.run(pads) == [[[7, -1], [-1, 7]], [[7, 7], [7, 7]]]


def objects() -> list:
    rank = PartialState(cpu=True).process_index
    return [
        gather_object({"rank": rank}),
        broadcast_object(f"from {rank}", from_process=1),
        broadcast(torch.tensor([rank]), from_process=1).tolist(),
    ]


def test_gather_object_keeps_dicts(pool):
    assert pool.run(objects) == [[[{"rank": 0}, {"rank": 1}], "from 1", [1]]] * 2


def decorated() -> list:
    accel = accelerator()
    calls = [
        main_process_only(lambda: "main")(),
        on_process(lambda: "one", process_index=1)(),
        accel.on_last_process(lambda: "last")(),
        accel.on_local_main_process(lambda: "local")(),
    ]
    return calls


def test_decorators_choose_the_process_at_each_call(pool):
    assert pool.run(decorated) == [["main", None, None, "local"], [None, "one", "last", None]]


def fails_in_synchronize(failing: int) -> None:
    rank = PartialState(cpu=True).process_index
    with synchronize("download"):
        if rank == failing:
            raise ValueError("no such file")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_synchronize_reaches_every_rank(pool, failing):
    outcomes = pool.outcomes(fails_in_synchronize, failing)
    assert outcomes[failing][0] == "ValueError"
    kind, text = outcomes[1 - failing]
    assert kind == "RemoteError"
    assert f"rank {failing} failed in download" in text
    assert "no such file" in text


def synchronized_work() -> int:
    @synchronize
    def work() -> int:
        return PartialState(cpu=True).process_index

    return work()


def test_synchronize_decorates_and_the_group_survives_the_errors(pool):
    assert pool.run(synchronized_work) == [0, 1]


def main_fails_first() -> None:
    rank = PartialState(cpu=True).process_index
    with main_process_first():
        if rank == 0:
            raise OSError("disk full")


def test_main_process_first_releases_the_others_when_the_main_one_raises(pool):
    (main, _), (other, text) = pool.outcomes(main_fails_first)
    assert (main, other) == ("OSError", "RemoteError")
    assert "disk full" in text


def order_of_main_first(path: str) -> str:
    import time

    rank = PartialState(cpu=True).process_index
    with main_process_first():
        if rank == 0:
            time.sleep(0.3)
        with open(path, "a") as file:
            file.write(str(rank))
    accelerator().wait_for_everyone()
    with open(path) as file:
        return file.read()


def test_main_process_first_runs_the_main_one_first(pool, tmp_path):
    assert pool.run(order_of_main_first, str(tmp_path / "order")) == ["01", "01"]
