"""Every file of a checkpoint, damaged in every way: refused by name, nothing wrong gets through."""

from __future__ import annotations

import inspect
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit import groups
from faultkit import victims as do
from faultkit.damage import (
    WHOLE_FILE,
    Damage,
    damaged,
    flip,
    no_corrupt_byte,
    targets_like,
    tensors_at,
)
from faultkit.forking import ForkServer
from faultkit.states import state_of, whole

from checkpoint_io import (
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    load,
    read_manifest,
    save,
    verify,
)

NUMEL = 300_000  # of 1.2 MB: more than one part
HAS_INTO = "into" in inspect.signature(load).parameters
REFUSED = (CorruptCheckpointError, CheckpointNotFoundError)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-rank", "2-ranks"])
def place(
    request: pytest.FixtureRequest, victims: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint of step 5, by one rank or two; each test leaves it as it was."""
    folder = tmp_path_factory.mktemp("damage")
    place = folder / f"by-{request.param}"
    group = victims.ranks(
        request.param, groups.save_as_group, request.param, str(folder / "meet"), str(place), 5,
        NUMEL,
    )  # fmt: skip
    assert [victim.result() for victim in group] == [("returned", None)] * request.param
    for rank in range(request.param):
        assert whole(load(place, rank=rank), rank) == (5, 0)
    return place


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def refused(place: Path, name: str, action: Callable[[], Any]) -> str:
    """Check that something is refused and that the file is named; return the text."""
    with pytest.raises(REFUSED) as caught:
        action()
    assert name in str(caught.value)
    return str(caught.value)


def check_refused(place: Path, name: str) -> str:
    """Nobody takes a damaged checkpoint who reads the damaged file; return what verify said."""
    ranks = int(place.name.removeprefix("by-"))
    readers = 0
    for rank in range(ranks):
        try:
            found = load(place, rank=rank)
        except REFUSED as error:
            assert name in str(error)  # noqa: PT017
            readers += 1
        else:
            assert whole(found, rank) == (5, 0)
    assert readers == ranks or (readers and "-r0000" in name), f"{name} was not missed"
    if HAS_INTO:
        truth = state_of(5, NUMEL)
        targets = targets_like(truth)
        try:
            load(place, into=targets)
        except REFUSED as error:
            assert name in str(error)  # noqa: PT017
        else:
            assert readers < ranks
        no_corrupt_byte(targets, truth)
    return refused(place, name, lambda: verify(place))


@pytest.mark.parametrize("damage", WHOLE_FILE)
def test_each_file_in_each_way(place: Path, damage: str) -> None:
    for name in names(place):
        with damaged(place / name, WHOLE_FILE[damage]):
            check_refused(place, name)
            if damage not in ("zeros", "first_bit", "last_bit"):
                refused(place, name, lambda: verify(place, full=False))


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_any_bit(place: Path, count: int) -> None:
    chance, manifest = random.Random(11), read_manifest(place)
    for number in range(count):
        name = names(place)[number % len(names(place))]
        at = chance.randrange((place / name).stat().st_size)
        with damaged(place / name, flip(at, chance.randrange(8))):
            said = check_refused(place, name)
            for key in tensors_at(manifest, name, at):
                assert key in said, f"byte {at} of {name} belongs to {key}: {said}"


@pytest.mark.skipif(not HAS_INTO, reason="this version cannot load into tensors")
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_full_verification_touches_nothing(place: Path, count: int) -> None:
    chance, manifest = random.Random(12), read_manifest(place)
    files = [entry.name for entry in manifest.files if entry.kind == "tensors" and entry.rank == 0]
    for number in range(count):
        name = files[number % len(files)]
        at = chance.randrange((place / name).stat().st_size)
        local = any(key.startswith("ranks/") for key in tensors_at(manifest, name, at))
        targets = targets_like(state_of(5, NUMEL))
        untouched = targets_like(state_of(5, NUMEL))
        with damaged(place / name, flip(at)):
            try:
                load(place, into=targets, verify="full")
            except CorruptCheckpointError as error:
                assert name in str(error)  # noqa: PT017
            else:
                assert local, f"{name} byte {at} was not missed"
                continue
        assert all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(leaves(targets), leaves(untouched), strict=True)
        )


def leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in leaves(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def test_swapped_with_the_same_file_of_another_save(tmp_path: Path) -> None:
    for step in (1, 2):
        do.save_step(str(tmp_path / str(step)), step, numel=3000)
    mine, other = (read_manifest(tmp_path / step).files for step in ("1", "2"))
    place = tmp_path / "1"
    for own, foreign in zip(mine, other, strict=True):
        assert own.size == foreign.size
        good = (place / own.name).read_bytes()
        (place / own.name).write_bytes((tmp_path / "2" / foreign.name).read_bytes())
        refused(place, own.name, lambda: load(place))
        refused(place, own.name, lambda: verify(place))
        (place / own.name).write_bytes(good)
    assert whole(load(place)) == (1, 0)


def test_swapped_with_each_other(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.zeros(3000), "b": torch.ones(3000)}, max_shard_size=13_000)
    first, second = [e for e in read_manifest(tmp_path).files if e.kind == "tensors"]
    assert first.size == second.size
    a, b = tmp_path / first.name, tmp_path / second.name
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    for action in (load, verify):
        with pytest.raises(CorruptCheckpointError, match=f"{first.name}|{second.name}"):
            action(tmp_path)


def test_a_manifest_of_another_save(tmp_path: Path) -> None:
    for step in (1, 2):
        do.save_step(str(tmp_path / str(step)), step, numel=3000)
    shutil.copy(tmp_path / "2" / "manifest.json", tmp_path / "1" / "manifest.json")
    for action in (load, verify):
        with pytest.raises(CorruptCheckpointError, match="missing"):
            action(tmp_path / "1")


HARD = ["missing", "empty", "half_of_it", "zeros", "first_bit", "last_bit"]


@pytest.mark.parametrize("damage", HARD)
def test_latest_falls_back(tmp_path: Path, damage: str) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state_of(step, 3000), max_shard_size=13_000)
    newest = tmp_path / "step-00000002"
    for name in names(newest):
        with damaged(newest / name, WHOLE_FILE[damage]):
            with pytest.warns(CheckpointWarning, match="step-00000002") as warned:
                assert whole(folder.load_latest()) == (1, 0)
            said = " ".join(str(warning.message) for warning in warned)
            assert name in said or "manifest.json" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(folder.load_latest()) == (2, 0)


def test_all_damaged_is_not_the_same_as_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    damage: Damage = flip(-1)
    for step in (1, 2):
        folder.save(step, state_of(step, 3000))
        name = next(e.name for e in read_manifest(folder.path(step)).files if e.kind == "tensors")
        path = Path(folder.path(step)) / name
        path.write_bytes(damage(path.read_bytes()) or b"")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CorruptCheckpointError, match="all are damaged"),
    ):
        folder.load_latest()
