"""Saves by several ranks: each writes its share, and what one process loads is the whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointError,
    Manifest,
    TorchGroup,
    load,
    read_manifest,
    save,
    verify,
)
from checkpoint_io.storage.open import open_store
from tests.support import warm
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

MESHES: dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]] = {
    "rows": ((8, 3), "line", (0,)),
    "columns": ((3, 8), "line", (1,)),
    "uneven": ((7, 3), "line", (0,)),
    "few": ((2, 3), "line", (0,)),
    "one": ((1,), "line", (0,)),
    "copies": ((5, 2), "line", (-1,)),
    "number": ((), "line", (-1,)),
    "nothing": ((0, 3), "line", (1,)),
    "grid": ((5, 6), "square", (0, 1)),
    "hybrid": ((6, 2), "square", (-1, 0)),
    "twice": ((9, 2), "square", (0, 0)),
    "square_copies": ((4,), "square", (-1, -1)),
}
STRIDED = {"strided": 8, "strided_uneven": 7, "strided_few": 3}


def join() -> TorchGroup:
    """Join the processes of the pool."""
    from accel_callbacks.distributed.topology import resolve_topology

    resolve_topology(cpu=True, timeout=BOUND)
    return TorchGroup()


def full(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def meshes() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    return {
        "line": init_device_mesh("cpu", (world,)),
        "square": init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")),
    }


def sharded_state() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    of = meshes()
    state = {}
    for name, (shape, mesh, dims) in MESHES.items():
        placements = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
        state[name] = distribute_tensor(full(shape), of[mesh], placements)
    for name, rows in STRIDED.items():
        state[name] = strided(of["square"], rows)
    state["runs"] = in_two_runs(of["square"])
    return state


def strided(mesh: Any, rows: int) -> Any:
    """What FSDP makes of rows that tensor parallelism has already cut: each half is cut again."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = full((rows, 2))
    dp, tp = mesh.get_coordinate()

    def part(tensor: torch.Tensor, parts: int, at: int) -> torch.Tensor:
        chunks = tensor.chunk(parts)
        return chunks[at] if at < len(chunks) else tensor[:0]

    local = part(part(whole, mesh.shape[1], tp), mesh.shape[0], dp)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        [_StridedShard(0, split_factor=mesh.shape[1]), Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def in_two_runs(mesh: Any) -> Any:
    """A strided shard alone: what a rank holds is not one box."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = full((6, 2))
    at = mesh.get_coordinate()[0]
    local = torch.cat([half.chunk(mesh.shape[0])[at] for half in whole.chunk(2)])
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save_sharded(folder: str) -> list[int]:
    group = join()
    manifest = save(Path(folder), {"model": sharded_state(), "step": 3}, group=group)
    return sorted({entry.rank for entry in manifest.files})


def expected() -> dict[str, torch.Tensor]:
    shapes = {name: shape for name, (shape, _, _) in MESHES.items()} | {"runs": (6, 2)}
    return {
        name: full(s) for name, s in {**shapes, **{n: (r, 2) for n, r in STRIDED.items()}}.items()
    }


def check_whole(folder: Path) -> Manifest:
    """One process, no process group: everything is there, bit for bit, and stored once."""
    verify(folder)
    state = load(folder).state
    assert state["step"] == 3
    assert state["model"].keys() == expected().keys()
    for name, tensor in expected().items():
        assert state["model"][name].dtype == tensor.dtype
        assert torch.equal(state["model"][name], tensor), name
    manifest = read_manifest(folder)
    stored = sum(entry.size - entry.covered for entry in manifest.files if entry.kind == "tensors")
    assert stored == sum(tensor.nbytes for tensor in expected().values())
    return manifest


def ranks_of(manifest: Manifest, key: str) -> list[int]:
    return [manifest.files[chunk.file].rank for chunk in manifest.tensors[key].chunks]


def test_shards_of_two_ranks(pool: Any, tmp_path: Path) -> None:
    assert pool.run(save_sharded, str(tmp_path)) == [[0, 1], [0, 1]]
    manifest = check_whole(tmp_path)
    for key in ("rows", "columns", "uneven", "few"):
        assert sorted(ranks_of(manifest, f"model/{key}")) == [0, 1]
    assert ranks_of(manifest, "model/one") == [0]


@pytest.mark.slow
def test_shards_of_four_ranks(pool_of_4: Any, tmp_path: Path) -> None:
    assert pool_of_4.run(save_sharded, str(tmp_path)) == [[0, 1, 2, 3]] * 4
    manifest = check_whole(tmp_path)
    chunks = {key: len(entry.chunks) for key, entry in manifest.tensors.items()}
    assert [chunks[f"model/{key}"] for key in ("rows", "few", "one", "copies", "number")] == [
        4, 2, 1, 1, 1,
    ]  # fmt: skip
    assert [chunks[f"model/{key}"] for key in ("grid", "hybrid", "twice")] == [4, 2, 4]
    assert [chunks[f"model/{key}"] for key in (*STRIDED, "runs")] == [4, 4, 3, 4]


def plain_state(rank: int) -> dict[str, Any]:
    big = {f"w{n}": torch.full((256, 1024), float(n)) for n in range(8)}
    odd = torch.full((200, 1024 if rank == 0 else 1000), float(rank))
    return {
        "big": big,
        "small": torch.arange(9),
        "odd": odd,
        "mine": torch.full((256, 1024), float(rank)),
    }


def save_plain(folder: str) -> None:
    group = join()
    state = plain_state(group.rank)
    save(folder, state, group=group, replicated=lambda key: key != "mine", local_state={"x": 1})


def test_replicated_tensors_are_written_once_and_spread(pool_of_4: Any, tmp_path: Path) -> None:
    pool_of_4.run(save_plain, str(tmp_path))
    manifest = read_manifest(tmp_path)
    spread = Counter(ranks_of(manifest, f"big/w{n}")[0] for n in range(8))
    assert spread == {0: 2, 1: 2, 2: 2, 3: 2}
    for key in ("small", "odd", "mine"):
        assert ranks_of(manifest, key) == [0]
    sizes = Counter({entry.rank: entry.size for entry in manifest.files if entry.kind == "tensors"})
    assert max(sizes[rank] for rank in (1, 2, 3)) < 2 * 256 * 1024 * 4 + 8192
    state = load(tmp_path).state
    for key, tensor in plain_state(0).items():
        assert key == "big" or torch.equal(state[key], tensor)
    assert all(torch.equal(state["big"][k], t) for k, t in plain_state(0)["big"].items())


def save_from_rank_0(folder: str) -> None:
    group = join()
    state = plain_state(0) if group.rank == 0 else {}
    save(folder, state, group=group, local_state={"rank": group.rank})


def test_other_ranks_may_pass_nothing(pool: Any, tmp_path: Path) -> None:
    pool.run(save_from_rank_0, str(tmp_path))
    manifest = read_manifest(tmp_path)
    assert all(ranks_of(manifest, key) == [0] for key in manifest.tensors)
    assert torch.equal(load(tmp_path).state["odd"], plain_state(0)["odd"])
    assert [load(tmp_path, rank=rank).local_state for rank in range(2)] == [
        {"rank": 0},
        {"rank": 1},
    ]


def save_tied(folder: str) -> dict[str, str]:
    """Rows for the first ranks only; on the others, parts of nothing that look alike."""
    from torch.distributed.tensor import DTensor, Shard

    group = join()
    line = meshes()["line"]
    nothing = torch.empty(4, 3)[:0]

    def of(value: float) -> Any:
        local = torch.full((1, 3), value) if group.rank < 2 else nothing
        return DTensor.from_local(
            local, line, [Shard(0)], run_check=False, shape=torch.Size((2, 3)), stride=(3, 1)
        )

    a, b = of(1.0), of(2.0)
    plain = torch.ones(3)
    state = {"a": a, "b": b, "again": a, "plain": plain, "tied": [plain, plain]}
    return dict(save(folder, state, group=group).aliases)


def test_ties_hold_on_all_ranks_or_not_at_all(pool_of_4: Any, tmp_path: Path) -> None:
    ties = {"again": "a", "tied/0": "plain", "tied/1": "plain"}
    assert pool_of_4.run(save_tied, str(tmp_path)) == [ties] * 4
    state = load(tmp_path).state
    assert state["again"] is state["a"]
    assert state["tied"][0] is state["plain"]
    assert torch.equal(state["a"], torch.ones(2, 3))
    assert torch.equal(state["b"], torch.full((2, 3), 2.0))


def save_on_part_of_the_ranks(folder: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = join()
    mesh = DeviceMesh("cpu", [1, 2])
    inside = group.rank in (1, 2)
    local = torch.full((2, 2), float(group.rank)) if inside else torch.empty(0)
    part = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )
    save(folder, {"part": part}, group=group)


def test_mesh_of_some_ranks(pool_of_4: Any, tmp_path: Path) -> None:
    pool_of_4.run(save_on_part_of_the_ranks, str(tmp_path))
    assert ranks_of(read_manifest(tmp_path), "part") == [1, 2]
    assert load(tmp_path).state["part"][:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


class Listening(TorchGroup):
    """Counts the bytes of what goes over the group."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.heard.append(len(repr(obj)))
        return super().all_gather_object(obj)

    heard: list[int]


def save_twice(folder: str) -> list[list[int]]:
    join()
    group = Listening()
    state = {f"w{n}": t for n, t in enumerate(plain_state(0)["big"].values())}
    state |= sharded_state()
    said = []
    for state["step"] in (1, 2):
        group.heard = []
        save(folder, state, group=group)
        said.append(group.heard)
    state["w0"] = torch.zeros(3)
    group.heard = []
    save(folder, state, group=group)
    said.append(group.heard)
    return said


def test_second_save_exchanges_a_digest_instead_of_the_plan(pool: Any, tmp_path: Path) -> None:
    for first, second, changed in pool.run(save_twice, str(tmp_path)):
        assert len(first) == len(changed) == len(second) + 1
        assert first[1] > 800
        assert second[0] < 500
    assert load(tmp_path).state["w0"].tolist() == [0, 0, 0]


def refusals(folder: str) -> list[str]:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    group = join()
    line = meshes()["line"]
    rows = distribute_tensor(full((4, 2)), line, [Shard(0)])
    summed = DTensor.from_local(torch.ones(2), line, [Partial()], run_check=False)
    cases = [
        {"model": {"loss": summed}},
        {"rows": rows} if group.rank == 0 else {},
        {"rows": rows} if group.rank else {},
        {"rows": rows if group.rank else full((2, 2))},
        {"fine": 1} if group.rank == 0 else {"x": [1, object()]},
    ]
    seen = []
    for state in cases:
        try:
            save(folder, state, group=group)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    try:
        save(folder, {}, local_state={"rows": rows}, group=group)
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_states_that_do_not_fit_together_are_refused_on_all_ranks(
    pool: Any, tmp_path: Path
) -> None:
    for partial, lone, strange, other, unsupported, own in pool.run(refusals, str(tmp_path / "c")):
        assert partial.startswith("UnsupportedStateError")
        assert "state['model']['loss']" in partial
        assert "reduce it first" in partial
        assert "'rows' is a DTensor of shape [4, 2]" in lone
        assert "hold 4 of 8 elements" in lone
        assert "rank 1 has a DTensor at 'rows'" in strange
        assert "rank 1 has a DTensor at 'rows'" in other
        assert unsupported.startswith("UnsupportedStateError")
        assert "rank 1: " in unsupported
        assert "state['x'][1]" in unsupported
        assert "local_state['rows']" in own
        assert "full_tensor" in own
    assert not (tmp_path / "c").exists()


def save_with_a_limit(folder: str, bad_rank: int) -> str:
    """On one rank the kernel refuses files above 1 MB."""
    import resource

    group = join()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"big": {f"w{n}": torch.full((512, 1024), float(n)) for n in range(4)}, "step": 2}
    if group.rank == bad_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        save(folder, state, group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_rank_that_fails_while_writing_fails_all(pool: Any, tmp_path: Path, bad_rank: int) -> None:
    save(tmp_path, {"step": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    for text in pool.run(save_with_a_limit, str(tmp_path), bad_rank):
        assert text.startswith("CheckpointError")
        assert "nothing was committed" in text
        assert f"rank {bad_rank}: " in text
        assert f"rank {1 - bad_rank}: " not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert load(tmp_path).state == {"step": 1}
    assert pool.run(save_with_a_limit, str(tmp_path), -1) == ["saved", "saved"]
    assert len(list(tmp_path.iterdir())) == 1 + len(read_manifest(tmp_path).files)


def save_and_tell(folder: str) -> str:
    group = join()
    try:
        return save(folder, {"w": torch.ones(3)}, group=group).id
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_conflict_on_rank_0_is_one_on_all(pool: Any, tmp_path: Path) -> None:
    with open_store(tmp_path).lock():
        for text in pool.run(save_and_tell, str(tmp_path)):
            assert text.startswith("CheckpointConflictError")
    assert list(tmp_path.iterdir()) == []
    first, second = pool.run(save_and_tell, str(tmp_path))
    assert first == second == read_manifest(tmp_path).id


def use_dedicated(folder: str) -> list[Any]:
    join()
    group = TorchGroup.dedicated(timeout=BOUND)
    manifest = save(folder, {"w": torch.ones(3)}, group=group)
    group.close()
    group.close()
    return [group.rank, group.world_size, manifest.world_size]


def test_dedicated_group(pool: Any, tmp_path: Path) -> None:
    assert pool.run(use_dedicated, str(tmp_path)) == [[0, 2, 2], [1, 2, 2]]


class LeavesLate(TorchGroup):
    """Rank 1 hears that all have written, and is interrupted once rank 0 has committed."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def all_gather_object(self, obj: Any) -> list[Any]:
        before = read_manifest(self.folder).id
        heard = super().all_gather_object(obj)
        if self.rank == 1 and (obj.get("value") or {}).get("files"):
            while read_manifest(self.folder).id == before:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return heard


def save_and_leave_late(folder: str) -> str:
    join()
    group = LeavesLate(folder)
    try:
        return save(folder, {f"w{n}": torch.ones(256, 1024) for n in range(4)}, group=group).id
    except KeyboardInterrupt:
        group.broadcast_object(None)  # what rank 0 still waits for
        return "interrupted"


def test_rank_that_is_interrupted_takes_nothing_back_from_a_commit(
    pool: Any, tmp_path: Path
) -> None:
    save(tmp_path, {"step": 1})
    saved, said = pool.run(save_and_leave_late, str(tmp_path))
    assert said == "interrupted"
    assert read_manifest(tmp_path).id == saved
    verify(tmp_path)


def save_with_a_place_on_one_rank(folder: str, good: int) -> str:
    group = join()
    place: Any = folder if group.rank == good else None
    try:
        return save(place, {"step": 1}, group=group).id
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("good", [0, 1])
def test_rank_without_a_place_is_named_at_once(pool: Any, tmp_path: Path, good: int) -> None:
    for text in pool.run(save_with_a_place_on_one_rank, str(tmp_path), good):
        assert f"rank {1 - good}: TypeError" in text


def join_as_a_stranger() -> str:
    import torch.distributed as dist

    join()
    group = dist.new_group([0])
    try:
        return str(TorchGroup(group).rank)
    except ValueError as error:
        return str(error)


def test_group_of_others_is_refused(pool: Any) -> None:
    first, second = pool.run(join_as_a_stranger)
    assert first == "0"
    assert "not a member" in second


DYING = """
import datetime, os, signal, sys, torch, torch.distributed as dist
import checkpoint_io as c
rank, store, url, when = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
    timeout=datetime.timedelta(minutes=10),
)
class Dying(c.TorchGroup):
    calls = 0
    def all_gather_object(self, obj):
        self.calls += 1
        if rank == 1 and self.calls == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().all_gather_object(obj)
try:
    c.save(url, {f"w{n}": torch.ones(256, 1024) for n in range(4)}, group=Dying())
except c.CheckpointError as error:
    print("refused", error)
os._exit(0)
"""


def test_rank_that_dies_while_saving(tmp_path: Path) -> None:
    """After it has written its files and before it can say so."""
    place = tmp_path / "c"
    save(place, {"step": 1})
    before = sorted(path.name for path in place.iterdir())
    arguments = [str(tmp_path / "store"), str(place), "4"]
    ranks = [
        warm.Popen(
            [sys.executable, "-c", DYING, str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said, _ = ranks[0].communicate()
    assert ranks[1].wait() == -signal.SIGKILL
    assert "refused" in said
    assert "nothing was committed: the process group failed" in said
    assert "rank 1 did not answer" in said
    assert sorted(path.name for path in place.iterdir()) == before
    assert load(place).state == {"step": 1}


def test_local_boxes_tile_what_torch_makes() -> None:
    """Every split of every size, without processes: the parts of all ranks are the whole, once."""
    from checkpoint_io.sharding.dtensor import _part

    for rows, dp, tp in product(range(12), (1, 2, 3), (1, 2, 4)):
        whole = list(range(rows))
        seen: list[int] = []
        for row, column in product(range(dp), range(tp)):
            runs = [(0, rows)] if rows else []
            held = _part(_part(runs, dp, row, tp), tp, column, 1)
            mine = [start + n for start, length in held for n in range(length)]
            seen += mine
            assert mine == sorted(mine)
        assert sorted(seen) == whole, (rows, dp, tp)
