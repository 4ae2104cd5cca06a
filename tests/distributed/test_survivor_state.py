"""SurvivorState: one rank writes the state of all, or nothing where it is not certain."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    set_seed,
)
from accel_callbacks.callbacks import EMA
from accel_callbacks.checkpoint.async_save import SaveGroup
from accel_callbacks.checkpoint.boundary_parts import join_parts
from accel_callbacks.checkpoint.boundary_records import unpack
from accel_callbacks.checkpoint.survivor_state import SurvivorState
from accel_callbacks.collectives import is_sharded
from accel_callbacks.distributed.rng import capture_rng
from accel_callbacks.errors import LostRankError
from checkpoint_io import load, open_checkpoint

pytestmark = pytest.mark.distributed
LOST = LostRankError("rank 0 was killed", rank=0, where="backward")


def survivor_in(folder: str, ranks: Sequence[int]) -> SurvivorState:
    """Return what keeps the boundaries of the ranks of a machine, which has a folder."""
    return SurvivorState(lambda step: f"{folder}/snapshot-{step}", f"{folder}/records", "a", ranks)


def held_now(accel: Accelerator, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a rank holds."""
    bare = accel.unwrap_model(model)
    return {
        "weights": bare[2].weight.tolist(),
        "average": optimizer.state[bare[2].weight]["exp_avg"].tolist(),
        "mean": bare[0].running_mean.tolist(),
        "rng": capture_rng(torch.device("cpu"))["torch"],
        "rate": optimizer.param_groups[0]["lr"],
    }


def train(folder: str, case: str = "", alive: int = 1, apart: bool = False) -> list[dict[str, Any]]:
    """Take three steps, keep the boundary, do what the case says, lose the other rank.

    Args:
        folder: of what is left, or of a folder for each of two machines.
        case: what happens.
        alive: the rank that is not lost.
        apart: the ranks are on two machines, which meet again.
    """
    averages = [EMA(0.9)] if case == "averages" else []
    tracker = {"log_with": "jsonl", "project_dir": folder} if case == "rows" else {}
    accel = Accelerator(cpu=True, timeout=timedelta(seconds=60), callbacks=averages, **tracker)
    rank = accel.process_index
    if apart:
        folder = f"{folder}/machine{rank}"
    survivor = survivor_in(folder, [rank] if apart else range(2))
    set_seed(0, device_specific=True)
    width = 2000 if case == "large" else 4
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, width)
    )
    if case == "large":
        model.register_buffer("table", torch.zeros(2 << 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(model, optimizer)
    scheduler = accel.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with accel.run("demo", resume=False) as run:
        held = []
        for step in range(1, 4):
            accel.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not (case == "behind" and rank == 0 and step == 3):
                survivor.keep(run, trainable_only=False)
            held.append(held_now(accel, model, optimizer))
        accel.wait_for_everyone()
        loss = model(torch.randn(8, 4)).square().mean()  # writes buffers, and draws
        scheduler.step()
        if case == "stepped":
            accel.backward(loss)
            optimizer.step()
        if case == "written":
            next(model.parameters()).data.mul_(2)
        if rank == alive:
            error = ValueError("of this rank") if case == "own error" else LOST
            survivor.leave(run, error)
        accel.wait_for_everyone()
        survivor.close()
        if apart:
            meet_again(Path(folder), case, rank)
    accel.end_training()
    return held


def meet_again(folder: Path, case: str, rank: int) -> None:
    """Put together what two machines have, after what the case does to it."""
    if case.startswith("part") and rank == 1:
        newest = max(folder.glob("records/loss-*"), key=lambda path: path.name)
        for path in newest.glob("part/*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data if case == "part flipped" else data[:-1])
    if case == "record flipped" and rank == 0:
        records = [(unpack(path.read_bytes()), path) for path in folder.glob("records/rank-*")]
        path = max(records, key=lambda pair: pair[0].boundary)[1]  # type: ignore[union-attr]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    if case == "machine lost" and rank == 0:
        shutil.rmtree(folder / "records")
    group = SaveGroup()
    with group.acquired():
        join_parts(f"{folder}/records", lambda _, step: f"{folder}/snapshot-{step}", True, group)


@pytest.mark.parametrize(("case", "step"), [("", 3), ("stepped", 3), ("behind", 2), ("written", 2)])
def test_the_state_is_that_of_the_newest_boundary_of_all_ranks(
    pool: Any, tmp_path: Path, case: str, step: int
) -> None:
    assert_is_snapshot(tmp_path, pool.run(train, str(tmp_path), case), step)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        *(("", 3), ("stepped", 3), ("behind", 2), ("written", 2)),
        *(("part flipped", 2), ("part short", 2), ("record flipped", 2)),
    ],
)
def test_two_machines_put_it_together(pool: Any, tmp_path: Path, case: str, step: int) -> None:
    results = pool.run(train, str(tmp_path), case, 1, True)
    assert not list(tmp_path.glob("machine0/snapshot-*"))
    assert_is_snapshot(tmp_path / "machine1", results, step)


def test_a_machine_that_is_lost_has_what_only_it_knew(pool: Any, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path), "machine lost", 1, True)
    assert list(tmp_path.glob("machine1/records/loss-*/part/manifest.json"))
    assert not list(tmp_path.glob("machine*/snapshot-*"))


@pytest.mark.parametrize("alive", [0, 1])
def test_rows_of_trackers_are_written_or_the_state_is_not_used(
    pool: Any, tmp_path: Path, alive: int
) -> None:
    pool.run(train, str(tmp_path), "rows", alive, True)
    left = [path.parent.name for path in tmp_path.glob("machine*/snapshot-3")]
    assert left == ([] if alive else ["machine0"])


def assert_is_snapshot(folder: Path, results: list[list[dict[str, Any]]], step: int) -> None:
    """Assert that a folder has the state of a step of two ranks, and no other."""
    paths = list(folder.glob("snapshot-*"))
    assert [path.name for path in paths] == [f"snapshot-{step}"]
    held = [result[step - 1] for result in results]
    loaded = [load(str(paths[0]), rank=rank) for rank in range(2)]
    state = loaded[0].state
    adam = state["optimizers"]["0"]
    assert open_checkpoint(str(paths[0]), rank=0).manifest.world_size == 2
    assert state["run"]["global_step"] == step
    assert state["models"]["0"]["2.weight"].tolist() == held[0]["weights"]
    assert state["models"]["0"]["0.running_mean"].tolist() == held[0]["mean"] != held[1]["mean"]
    assert adam["state"]["0.2.weight"]["exp_avg"].tolist() == held[0]["average"]
    assert adam["state"]["0.2.weight"]["step"] == step
    assert adam["param_groups"][0]["lr"] == held[0]["rate"]
    assert [own.local_state["rng"]["torch"] for own in loaded] == [own["rng"] for own in held]


def test_averages_that_callbacks_hold_are_those_of_rank_0(pool: Any, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path), "averages")
    (path,) = tmp_path.glob("snapshot-*")
    state = load(str(path), rank=0).state
    assert set(state["callbacks"]["EMA"]["average"]) >= {"0.2.weight", "0.2.bias"}


@pytest.mark.parametrize("case", ["own error", "large"])
def test_a_state_that_is_not_certain_is_not_written(pool: Any, tmp_path: Path, case: str) -> None:
    pool.run(train, str(tmp_path), case)
    assert list(tmp_path.glob("snapshot-*")) == []


def test_without_room_nothing_is_left(pool: Any, tmp_path: Path) -> None:
    pool.run(_train_without_room, str(tmp_path))
    assert list(tmp_path.glob("snapshot-*")) == []


def _train_without_room(folder: str) -> None:
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10)  # type: ignore[assignment]
    try:
        train(folder)
    finally:
        shutil.disk_usage = usage


# --- shards with replicas -----------------------------------------------------------------------


def whole(tensor: Any) -> list[Any]:
    values: list[Any] = tensor.full_tensor().tolist()
    return values


def raise_loss(*_: Any) -> None:
    raise LOST


def train_hybrid(
    folder: str, alive: tuple[int, ...], case: str, replicas: int
) -> list[dict[str, Any]]:
    """Train shards with replicas, and let the ranks that are alive leave the last boundary."""
    accel = Accelerator(
        cpu=True,
        timeout=timedelta(seconds=60),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False),
        parallelism_config=ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=4 // replicas
        ),
        callbacks=[EMA(0.9)] if case == "averages" else [],
    )
    rank = accel.process_index
    survivor = survivor_in(folder, range(4))
    set_seed(0, device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(), torch.nn.Linear(5, 3))
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    held = []
    with accel.run("demo", resume=False) as run:
        for step in range(1, 4):
            accel.backward(model(torch.randn(8, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 4))
            if not (case == "behind" and rank == 1 and step == 3):
                survivor.keep(run, trainable_only=False)
            bias = accel.unwrap_model(model)[2].bias
            held.append(
                {
                    "bias": whole(bias),
                    "average": whole(optimizer.state[bias]["exp_avg"]),
                    "rng": capture_rng(torch.device("cpu"))["torch"],
                }
            )
        if case == "in forward":  # the error of a collective leaves whole parameters in the modules
            accel.unwrap_model(model)[1].register_forward_hook(raise_loss)
            with pytest.raises(LostRankError):
                model(torch.randn(8, 4))
            assert not is_sharded(accel.unwrap_model(model)[2].bias)
        else:
            accel.backward(model(torch.randn(8, 4)).square().mean())
        if case == "stepped" and rank > 1:
            optimizer.step()
        accel.wait_for_everyone()
        if rank in alive:
            survivor.leave(run, LOST)
        accel.wait_for_everyone()
        survivor.close()
    accel.end_training()
    return held


@pytest.mark.parametrize(
    ("alive", "case", "step"),
    [
        ((1, 2, 3), "", 3),
        ((1, 2), "in forward", 3),  # of each shard one
        ((0, 1, 3), "stepped", 3),
        ((0, 1, 2), "behind", 2),
    ],
)
def test_ranks_together_leave_all_shards_of_a_boundary(
    pool_of_4: Any, tmp_path: Path, alive: tuple[int, ...], case: str, step: int
) -> None:
    before = tmp_path / "records" / "loss-of_an_attempt_before-7"
    before.mkdir(parents=True)
    results = pool_of_4.run(train_hybrid, str(tmp_path), alive, case, 2)
    (path,) = tmp_path.glob("snapshot-*")
    assert path.name == f"snapshot-{step}"
    held = [result[step - 1] for result in results]
    loaded = [load(str(path), rank=rank) for rank in range(4)]
    state = loaded[0].state
    assert state["run"]["global_step"] == step
    assert state["models"]["0"]["2.bias"].tolist() == held[0]["bias"]
    assert state["optimizers"]["0"]["state"]["0.2.bias"]["exp_avg"].tolist() == held[0]["average"]
    assert [own.local_state["rng"]["torch"] for own in loaded] == [own["rng"] for own in held]
    assert not before.exists()


@pytest.mark.parametrize(
    ("alive", "case", "replicas"),
    [
        ((0, 2), "", 2),  # no one holds the other shards
        ((0, 1, 2), "", 1),
        ((0, 1, 2), "averages", 2),
    ],
)
def test_without_all_shards_nothing_is_left(
    pool_of_4: Any, tmp_path: Path, alive: tuple[int, ...], case: str, replicas: int
) -> None:
    pool_of_4.run(train_hybrid, str(tmp_path), alive, case, replicas)
    assert list(tmp_path.glob("snapshot-*")) == []
