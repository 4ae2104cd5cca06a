"""One of four ranks that hold shards fails or dies: nothing is committed, all say which it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from faultkit import sharded
from faultkit.forking import ForkServer, Victim
from faultkit.litter import litter
from faultkit.states import whole

import checkpoint_io
from checkpoint_io import load

pytestmark = [pytest.mark.distributed]

MESHES = {"fsdp": (4,), "hsdp": (2, 2)}


def start(victims: ForkServer, tmp_path: Path, job: Any, *args: Any) -> list[Victim]:
    return victims.ranks(4, job, 4, str(tmp_path / f"meet-{os.urandom(4).hex()}"), *args)


def saved(victims: ForkServer, tmp_path: Path, place: Path, step: int, mesh: Any) -> None:
    group = start(victims, tmp_path, sharded.save, str(place), step, mesh)
    assert [victim.result()[0] for victim in group] == ["returned"] * 4


def holds(place: Path, step: int) -> None:
    """One process reads what four have written."""
    for rank in range(4):
        assert whole(load(place, rank=rank), rank) == (step, 0)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# Where a rank fails or dies: at its first file, at a later one, at a sync, at the commit.
KILLS = [
    ("fsdp", 3, "write", 1),
    slow("hsdp", 2, "fsync", 0),
    slow("fsdp", 0, "replace", 0),
    slow("fsdp", 0, "write", 0),
    slow("fsdp", 1, "open", 0),
    slow("fsdp", 2, "fsync", 1),
    slow("hsdp", 0, "write", 1),
    slow("hsdp", 1, "write", 0),
    slow("hsdp", 0, "replace", 0),
]


@pytest.mark.parametrize(("mesh", "bad", "what", "nth"), KILLS)
def test_a_rank_is_killed_in_a_save(
    victims: ForkServer, tmp_path: Path, mesh: str, bad: int, what: str, nth: int
) -> None:
    place = tmp_path / "c"
    saved(victims, tmp_path, place, 1, MESHES[mesh])
    group = start(
        victims, tmp_path, sharded.save_and_die, str(place), 2, MESHES[mesh], bad, what, nth
    )
    results = [victim.result() for victim in group]
    assert results[bad][0] == "killed"
    for rank, (kind, text) in enumerate(results):
        assert rank == bad or ("Error" in kind and "rank" in text), f"rank {rank}: {kind}: {text}"
    holds(place, 1)
    other = MESHES["hsdp" if mesh == "fsdp" else "fsdp"]
    saved(victims, tmp_path, place, 3, other)
    holds(place, 3)
    assert litter(place) == set()


FAILURES = [
    ("fsdp", 2, "write", 1),
    slow("hsdp", 0, "open", 0),
    slow("fsdp", 0, "fsync", 1),
    slow("hsdp", 3, "write", 0),
    slow("fsdp", 3, "open", 0),
]


@pytest.mark.parametrize(("mesh", "bad", "what", "nth"), FAILURES)
def test_the_disk_of_a_rank_is_full(
    victims: ForkServer, tmp_path: Path, mesh: str, bad: int, what: str, nth: int
) -> None:
    place = tmp_path / "c"
    saved(victims, tmp_path, place, 1, MESHES[mesh])
    before = {path.name for path in place.iterdir()}
    group = start(
        victims, tmp_path, sharded.save_and_fail, str(place), 2, MESHES[mesh], bad, what, nth
    )
    for victim in group:
        kind, text = victim.result()
        assert isinstance(getattr(checkpoint_io, kind)(), checkpoint_io.CheckpointError)
        assert f"rank {bad}" in text, f"the error does not name the rank: {text}"
    holds(place, 1)
    assert {path.name for path in place.iterdir()} == before, "what the ranks had written is left"


@pytest.mark.parametrize(
    ("mesh", "key"), [("fsdp", "model/weight"), slow("hsdp", "optimizer/0/exp_avg")]
)
@pytest.mark.parametrize("shard", [0, slow(1), -1])
def test_all_ranks_pass_over_a_damaged_shard(
    victims: ForkServer, tmp_path: Path, mesh: str, key: str, shard: int
) -> None:
    root = tmp_path / "run"
    folder = checkpoint_io.CheckpointFolder(root)
    for step in (1, 2):
        saved(victims, tmp_path, Path(folder.path(step)), step, MESHES[mesh])
    newest = Path(folder.path(2))
    manifest = checkpoint_io.read_manifest(newest)
    chunk = manifest.tensors[key].chunks[shard]
    file = newest / manifest.files[chunk.file].name
    data = bytearray(file.read_bytes())
    data[chunk.begin] ^= 1
    file.write_bytes(bytes(data))
    group = start(victims, tmp_path, sharded.load_latest, str(root), MESHES[mesh])
    for victim in group:
        kind, result = victim.result()
        assert kind == "returned", f"{kind}: {result}"
        assert result[0] == (1, 0)
