"""Who writes and who reads what: pure functions, and real meshes where torch wants processes."""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from typing import Any, cast

import pytest
import torch

from checkpoint_io import CheckpointError, SingleProcess
from checkpoint_io.saver.plan import PlanCache, Proposal, Share
from checkpoint_io.sharding.planner import ReadBox, plan_reads, plan_writes
from tests.support.bound import BOUND


def plain(*shape: int, dtype: str = "F32") -> tuple[str, tuple[int, ...], None]:
    return (dtype, shape, None)


def sharded(shape: tuple[int, ...], *boxes: Any) -> tuple[str, tuple[int, ...], list[Any]]:
    return ("F32", shape, list(boxes))


def held(entries: dict[str, Any], tied: dict[str, str] | None = None) -> dict[str, Any]:
    """What a rank says it holds, as it comes over any group: lists for tuples."""
    record: dict[str, Any] = json.loads(json.dumps({"entries": entries, "tied": tied or {}}))
    return record


def test_replicated_tensors_are_spread_by_bytes() -> None:
    sizes = {"a": 100, "b": 60, "c": 50, "d": 40, "e": 30, "f": 20}
    everyone = [held({key: plain(size) for key, size in sizes.items()}) for _ in range(3)]
    ranks, tied = plan_writes(everyone)
    assert tied == {}
    assert sorted(key for of_rank in ranks for key, _ in of_rank) == sorted(sizes)
    assert [sum(sizes[key] for key, _ in of_rank) for of_rank in ranks] == [100, 110, 90]
    assert plan_writes(everyone) == plan_writes(everyone)


def test_rank_0_decides_where_plain_tensors_differ() -> None:
    first = held({"shape": plain(9), "dtype": plain(9), "lone": plain(9)})
    other = held({"shape": plain(8), "dtype": plain(9, dtype="F64"), "extra": plain(7)})
    ranks, _ = plan_writes([first, other])
    assert sorted(key for key, _ in ranks[0]) == ["dtype", "lone", "shape"]
    assert ranks[1] == []


def test_each_box_is_written_by_one_of_its_holders() -> None:
    """Four ranks, two of them with each half; and ten tensors, so that all have work."""
    low, high = ((0, 0), (2, 4)), ((2, 0), (2, 4))
    keys = [f"w{number}" for number in range(10)]
    records = [
        held({key: sharded((4, 4), low if rank < 2 else high) for key in keys}) for rank in range(4)
    ]
    ranks, _ = plan_writes(records)
    written = Counter(item for of_rank in ranks for item in of_rank)
    assert written == {(key, offsets): 1 for key in keys for offsets in ((0, 0), (2, 0))}
    assert [len(of_rank) for of_rank in ranks] == [5, 5, 5, 5]
    assert all(offsets == (0, 0) for of_rank in ranks[:2] for _, offsets in of_rank)


def test_empty_boxes_and_empty_tensors() -> None:
    records = [
        held({"few": sharded((1, 3), ((0, 0), (1, 3))), "none": sharded((0, 3), ((0, 0), (0, 3)))}),
        held({"few": sharded((1, 3), ((1, 0), (0, 3))), "none": sharded((0, 3), ((0, 0), (0, 3)))}),
    ]
    ranks, _ = plan_writes(records)
    assert sorted(ranks[0]) == [("few", (0, 0)), ("none", (0, 0))]
    assert ranks[1] == []


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0,), (2,)), ((2,), (1,))], "hold 3 of 4 elements"),
        ([((0,), (3,)), ((2,), (1,))], "overlap"),
        ([((0,), (2,)), ((3,), (2,))], "reaches outside"),
        ([((0,), (3,)), ((2,), (2,))], "hold 5 of 4 elements"),
        ([((0,), (0,)), ((2,), (0,))], "hold 0 of 4 elements"),
    ],
)
def test_shards_that_are_not_the_whole_are_refused(boxes: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_writes([held({"w": sharded((4,), box)}) for box in boxes])


def cut_by_rows(ranks: int) -> list[dict[str, Any]]:
    """Tensors that are longest along a dimension that is not the one they are cut along."""
    return [
        held({f"w{n}": sharded((ranks, 4096), ((rank, 0), (1, 4096))) for n in range(3)})
        for rank in range(ranks)
    ]


def test_overlaps_are_not_looked_for_in_quadratic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's check compares every pair of shards of such a tensor."""
    from torch.distributed.checkpoint import default_planner

    def refuse(*args: Any) -> None:
        raise AssertionError("torch's validation takes quadratic time")

    monkeypatch.setattr(default_planner, "_validate_global_plan", refuse)
    ranks, _ = plan_writes(cut_by_rows(50))
    assert [sorted(of_rank) for of_rank in ranks] == [
        [(f"w{n}", (rank, 0)) for n in range(3)] for rank in range(50)
    ]


def test_the_collector_of_garbage_rests_while_ranks_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def watched(records: Any) -> Any:
        ran.append(gc.isenabled())
        return plan_writes(records)

    monkeypatch.setattr("checkpoint_io.saver.plan.plan_writes", watched)

    class Group(SingleProcess):
        def all_gather_object(self, obj: Any) -> list[Any]:
            return records

    class Held:
        def to_plain(self) -> Any:
            return records[0]

    assert gc.isenabled()
    records = cut_by_rows(2)
    both = [{"digest": f"{time.monotonic_ns()}", "known": None}] * 2
    Proposal(cast(Any, Held()), 0, 2).settle(Group(), both)
    assert (ran, gc.isenabled()) == ([False], True)
    records = [records[0]]  # half of each tensor is on no rank
    with pytest.raises(CheckpointError, match="hold"):
        Proposal(cast(Any, Held()), 0, 1).settle(Group(), both)
    assert (ran, gc.isenabled()) == ([False, False], True)


def test_shards_that_rank_0_does_not_know_are_refused() -> None:
    for first in ({}, {"w": sharded((5,), ((0,), (5,)))}, {"w": plain(5)}):
        with pytest.raises(CheckpointError, match="rank 1 has a DTensor at 'w'"):
            plan_writes([held(first), held({"w": sharded((4,), ((0,), (4,)))})])


def test_ties_of_plain_tensors_are_those_of_rank_0() -> None:
    first = held({"a": plain(9), "b": plain(9)}, {"b": "a", "small": "a"})
    ranks, tied = plan_writes([first, held({"a": plain(9), "b": plain(9)})])
    assert tied == {"b": "a", "small": "a"}
    assert sorted(key for of_rank in ranks for key, _ in of_rank) == ["a"]


def test_ties_of_sharded_tensors_hold_where_all_ranks_agree() -> None:
    def entries(box: Any) -> dict[str, Any]:
        return {key: sharded((4,), box) for key in "abcd"}

    # rank 1 holds parts of nothing in the first case: to it, all look alike
    low, high = ((0,), (4,)), ((4,), (0,))
    records = [
        held(entries(low), {"b": "a", "d": "c"}),
        held(entries(high), {"b": "a", "c": "a", "d": "a"}),
    ]
    assert plan_writes(records).tied == {"b": "a", "d": "c"}
    records = [
        held(entries(low), {"b": "a", "c": "a"}),
        held(entries(high), {"c": "b"}),
    ]
    assert plan_writes(records).tied == {"c": "b"}


def test_memory_of_plans_forgets_the_oldest() -> None:
    cache = PlanCache()
    share = Share([], {})
    for number in range(8):
        cache.put(str(number), "all", share)
    assert cache.get("0") == ("all", share)
    cache.put("8", "all", share)
    assert cache.get("1") is None
    assert cache.get("0") is not None


def test_plain_target_reads_every_chunk_that_has_elements() -> None:
    target = torch.empty(4, 3)
    chunks = [((2, 0), (2, 3)), ((2, 0), (0, 3)), ((0, 0), (2, 3))]
    assert plan_reads((4, 3), chunks, target) == [
        ReadBox(0, (0, 0), (2, 0), (2, 3)),
        ReadBox(2, (0, 0), (0, 0), (2, 3)),
    ]
    assert plan_reads((), [((), ())], torch.tensor(1)) == [ReadBox(0, (), (), ())]
    assert plan_reads((0,), [((0,), (0,))], torch.empty(0)) == []
    with pytest.raises(ValueError, match="cannot fill"):
        plan_reads((4, 3), chunks, torch.empty(3, 4))


def read_into_meshes() -> list[str]:
    """Copy by the plan out of chunks of several cuts, and compare with what torch distributes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from accel_callbacks.distributed.topology import resolve_topology
    from checkpoint_io.sharding.dtensor import local_of

    resolve_topology(cpu=True, timeout=BOUND)
    whole = torch.arange(7 * 5.0).reshape(7, 5)
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    targets = {
        "rows": distribute_tensor(whole, line, [Shard(0)]),
        "columns": distribute_tensor(whole, line, [Shard(1)]),
        "grid": distribute_tensor(whole, grid, [Shard(1), Shard(0)]),
        "hybrid": distribute_tensor(whole, grid, [Replicate(), Shard(0)]),
        "twice": distribute_tensor(whole, grid, [Shard(0), Shard(0)]),
    }
    # what a strided shard alone holds is in two runs
    rows = whole[:6]
    dp = grid.get_coordinate()[0]
    local = torch.cat([half.chunk(2)[dp] for half in rows.chunk(2)])
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    targets["strided"] = DTensor.from_local(
        local, grid, placements, run_check=False, shape=rows.shape, stride=rows.stride()
    )
    wrong = []
    for name, target in targets.items():
        source = whole[: target.shape[0]]
        for cut in (1, 2, 7):
            pieces = [p for row in source.split(cut) for p in row.split(2, dim=1)]
            edges = [(r, c) for r in range(0, len(source), cut) for c in range(0, 5, 2)]
            chunks = [(edge, tuple(piece.shape)) for edge, piece in zip(edges, pieces, strict=True)]
            want = local_of(target).clone()
            got = torch.full_like(want, -1)
            for chunk, begin, into, lengths in plan_reads(source.shape, chunks, target):
                part, place = pieces[chunk], got
                for dim, (low, at, size) in enumerate(zip(begin, into, lengths, strict=True)):
                    part, place = part.narrow(dim, low, size), place.narrow(dim, at, size)
                place.copy_(part)
            if not torch.equal(got, want):
                wrong.append(f"{name} cut by {cut}: {got.tolist()} for {want.tolist()}")
    outside = DeviceMesh("cpu", [0])
    alone = distribute_tensor(whole, outside, [Shard(0)])
    reads = len(plan_reads((7, 5), [((0, 0), (7, 5))], alone))
    if reads != (1 if dist.get_rank() == 0 else 0):
        wrong.append(f"outside of its mesh {reads} reads")
    return wrong


@pytest.mark.distributed
def test_sharded_targets_read_their_own_part_of_any_cut(pool_of_4: Any) -> None:
    assert pool_of_4.run(read_into_meshes) == [[]] * 4
