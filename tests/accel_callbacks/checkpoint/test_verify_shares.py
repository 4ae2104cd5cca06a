"""Several ranks that verify a whole checkpoint read each byte of it on one of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from checkpoint_io import (
    CheckpointFolder,
    CheckpointReader,
    CheckpointWarning,
    CorruptCheckpointError,
    TorchGroup,
    open_checkpoint,
    read_manifest,
    save,
)
from checkpoint_io.loader.source import Source
from checkpoint_io.storage.local import LocalStore
from tests.accel_callbacks.checkpoint.test_restore_ranks import spread_job
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

ROWS = 1 << 19  # of 4 bytes: 2 MiB
SLACK = 3 << 16  # headers, and what is read along with what is wanted
Range = tuple[str, int, int]


class Reads:
    """The bytes that this rank has read, and the ranges that it has verified."""

    def __init__(self) -> None:
        self.nbytes = self.loads = 0
        self.verified: list[Range] = []


@contextmanager
def watched() -> Iterator[Reads]:
    reads, fetch, run = Reads(), LocalStore.fetch, Source.run

    def counting(store: Any, spans: Any, deliver: Any) -> None:
        reads.nbytes += sum(span.end - span.begin for span in spans)
        fetch(store, spans, deliver)

    def running(source: Any, transfer: Any, live: bool, progress: Any, label: str) -> None:
        if label == "verifying":
            names = [entry.name for entry in source.manifest.files]
            reads.verified += [(names[file], begin, end) for file, begin, end in transfer.ranges()]
        reads.loads += live
        run(source, transfer, live, progress, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "fetch", counting)
        patch.setattr(Source, "run", running)
        yield reads


def state(value: float) -> dict[str, Any]:
    """4 MiB that are sharded, and 2 MiB that are not; in rows, so that parts are of both."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = float(value)
    spread = distribute_tensor(torch.full((2 * ROWS,), value), mesh, [Shard(0)])
    return {"spread": spread, "whole": torch.full((ROWS,), value), "small": torch.full((3,), value)}


def fill(path: str, *steps: int) -> None:
    Accelerator(cpu=True, timeout=BOUND)
    group = TorchGroup()
    for step in steps:
        local = {"own": torch.full((9,), float(group.rank))}
        CheckpointFolder(path).save(
            step, {"model": state(step)}, local_state=local, metadata={"run_id": "r"}, group=group
        )


def take(path: str, how: str = "both") -> dict[str, Any]:
    group = TorchGroup()
    targets = state(0.0)
    into = None if how == "one" and group.rank else {"model": targets}
    with warnings.catch_warnings(record=True) as told, watched() as reads:
        warnings.simplefilter("always", CheckpointWarning)
        found = CheckpointFolder(path).load_latest(group=group, into=into).state["model"]
    values = {key: float(torch.as_tensor(local(found[key]))[-1]) for key in found}
    return {
        "values": set(values.values()),
        "nbytes": reads.nbytes,
        "verified": reads.verified,
        "loads": reads.loads,
        "told": [str(w.message) for w in told if "passed over" in str(w.message)],
    }


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def once(folder: Path, verified: list[list[Range]], without: str = "none") -> None:
    """Every byte of tensors was verified, by one rank."""
    expected = []
    manifest = read_manifest(folder)
    for entry in manifest.files:
        if entry.kind == "tensors" and not entry.name.endswith(without):
            expected.append((entry.name, entry.covered, entry.size))
    joined: list[Range] = []
    for name, begin, end in sorted(piece for of_rank in verified for piece in of_rank):
        if joined and joined[-1][0] == name and joined[-1][2] == begin:
            joined[-1] = (name, joined[-1][1], end)
        else:
            joined.append((name, begin, end))
    assert joined == sorted(expected)


@pytest.mark.parametrize("how", ["both", "one"])
def test_ranks_verify_what_they_read_and_share_the_rest(
    pool: Any, tmp_path: Path, how: str
) -> None:
    pool.run(fill, str(tmp_path), 1)
    found = pool.run(take, str(tmp_path), how)
    place = tmp_path / "step-00000001"
    assert [one["values"] for one in found] == [{1.0}, {1.0}]
    assert [one["told"] for one in found] == [[], []]
    own = "-r00001-00002.safetensors" if how == "one" else "none"
    once(place, [one["verified"] for one in found], without=own)
    if how == "one":
        return  # rank 1 reads all into new tensors, and verifies its own parts then
    for rank, one in enumerate(found):
        # 2 MiB of its own and 2 MiB of all are read; verified are 2 MiB, and 1 MiB of those of all
        assert abs(one["nbytes"] - (7 << 20)) < SLACK, one["nbytes"]
        own = [piece for piece in one["verified"] if f"-r{rank:05d}-" in piece[0]]
        assert sum(end - begin for _, begin, end in own) >= 2 << 20


def damage(place: Path, where: str) -> str:
    """Flip a bit; return the name of the file."""
    manifest = read_manifest(place)
    if where == "header":
        entry, at = next(e for e in manifest.files if e.rank == 1 and e.kind == "tensors"), 40
    else:
        chunk = next(
            c
            for c in manifest.tensors[where.rstrip("+")].chunks
            if where.startswith("model/w") or manifest.files[c.file].rank == 1
        )
        entry, at = manifest.files[chunk.file], chunk.end - 1 if where[-1] == "+" else chunk.begin
    data = bytearray((place / entry.name).read_bytes())
    data[at] ^= 1
    (place / entry.name).write_bytes(bytes(data))
    return entry.name


@pytest.mark.parametrize(
    "where", ["model/spread", "model/whole", "model/whole+", "ranks/1/own", "header"]
)
def test_damage_on_one_rank_makes_all_fall_back_before_any_writes(
    pool: Any, tmp_path: Path, where: str
) -> None:
    pool.run(fill, str(tmp_path), 1, 2)
    name = damage(tmp_path / "step-00000002", where)
    for one in pool.run(take, str(tmp_path)):
        assert one["values"] == {1.0}
        assert len(one["told"]) == 1
        assert name in one["told"][0]
        assert one["loads"] == 1  # of the older one alone


def checks_all(path: str) -> list[str]:
    """Ranks that opened the plain values of rank 0 alone."""
    reader = open_checkpoint(path, rank=0)
    try:
        reader.check(True, group=TorchGroup())
    except CorruptCheckpointError as error:
        return [str(error)]
    return []


def test_a_check_of_all_files_reads_the_plain_values_of_all_ranks(
    pool: Any, tmp_path: Path
) -> None:
    pool.run(fill, str(tmp_path), 1)
    place = tmp_path / "step-00000001"
    assert pool.run(checks_all, str(place)) == [[], []]
    damaged = next(place.glob("objects-*-r00001.json"))
    data = bytearray(damaged.read_bytes())
    data[20] ^= 1
    damaged.write_bytes(bytes(data))
    (error,) = [text for told in pool.run(checks_all, str(place)) for text in told]
    assert damaged.name in error


def take_while_saving(path: str) -> list[Any]:
    """A save replaces the checkpoint after rank 0 has opened it."""
    group, opened = TorchGroup(), 0
    real = CheckpointReader.__init__

    def opening(reader: Any, *args: Any) -> None:
        nonlocal opened
        opened += 1
        if opened == 1 and group.rank:
            group.all_gather_object("replaced")
        real(reader, *args)
        if opened == 1 and not group.rank:
            one_rank = {"model": {"w": torch.full((3,), 2.0)}}
            save(f"{path}/step-00000001", one_rank, metadata={"run_id": "r"})
            group.all_gather_object("replaced")

    weight = torch.zeros(3)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        patch.setattr(CheckpointReader, "__init__", opening)
        CheckpointFolder(path).load_latest(group=group, into={"model": {"w": weight}})
    return weight.tolist()


def fill_small(path: str) -> None:
    Accelerator(cpu=True, timeout=BOUND)
    for step in (0, 1):
        weight = {"model": {"w": torch.full((3,), float(step))}}
        CheckpointFolder(path).save(step, weight, group=TorchGroup())


def test_ranks_that_opened_different_checkpoints_begin_again(pool: Any, tmp_path: Path) -> None:
    pool.run(fill_small, str(tmp_path))
    assert pool.run(take_while_saving, str(tmp_path)) == [[2.0] * 3] * 2


# --- load_state ------------------------------------------------------------------------------


def saves_state(path: str, *steps: int) -> None:
    accel, _, _ = spread_job(0, 1, (2,))
    for step in steps:
        accel.save_state(f"{path}/step-{step}")


def loads_state(path: str) -> list[Any]:
    accel, model, _ = spread_job(1, 1, (2,))
    before = [local(parameter.detach()).tolist() for parameter in model.parameters()]
    with watched() as reads:
        try:
            accel.load_state(path, verify="full")
            error = ""
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    same = before == [local(parameter.detach()).tolist() for parameter in model.parameters()]
    return [reads.verified, error, same]


def test_load_state_verifies_each_byte_on_one_rank(pool: Any, tmp_path: Path) -> None:
    pool.run(saves_state, str(tmp_path), 1)
    place = tmp_path / "step-1"
    found = pool.run(loads_state, str(place))
    assert [(error, same) for _, error, same in found] == [("", False)] * 2
    once(place, [verified for verified, _, _ in found])
    manifest = read_manifest(place)
    for rank, (verified, _, _) in enumerate(found):
        for key in ("models/0/0.weight", "optimizers/0/state/0.0.weight/exp_avg"):
            chunk = manifest.tensors[key].chunks[rank]
            name = manifest.files[chunk.file].name
            assert any(n == name and a <= chunk.begin < b for n, a, b in verified), (key, rank)


def test_load_state_changes_nothing_on_any_rank_if_one_finds_damage(
    pool: Any, tmp_path: Path
) -> None:
    pool.run(saves_state, str(tmp_path), 1)
    name = damage(tmp_path / "step-1", "models/0/0.weight")
    (_, first, same), (_, second, as_well) = pool.run(loads_state, str(tmp_path / "step-1"))
    assert "CorruptCheckpointError" in second
    assert name in second
    assert name in first
    assert same is as_well is True
