"""Random changes to random files: loading raises or gives bitwise what was saved, never else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faultkit import victims as do
from faultkit.damage import edit_manifest
from faultkit.states import whole
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from checkpoint_io import CheckpointError, load, verify

Change = Callable[[bytearray], Any]

positions = st.floats(0, 1, exclude_max=True)
pieces = st.binary(min_size=1, max_size=40)


def at(data: bytearray, where: float) -> int:
    return int(where * len(data))


def put(where: float, piece: bytes) -> Change:
    return lambda data: data.__setitem__(
        slice(at(data, where), at(data, where) + len(piece)), piece
    )


def insert(where: float, piece: bytes) -> Change:
    return lambda data: data.__setitem__(slice(at(data, where), at(data, where)), piece)


def cut(where: float, length: int) -> Change:
    return lambda data: data.__delitem__(slice(at(data, where), at(data, where) + length))


def flip(where: float, bit: int) -> Change:
    def change(data: bytearray) -> None:
        if data:
            data[at(data, where)] ^= 1 << bit

    return change


def double(where: float, to: float) -> Change:
    """Copy a block of the file over another place of it."""

    def change(data: bytearray) -> None:
        block = bytes(data[at(data, where) : at(data, where) + 512])
        data[at(data, to) : at(data, to) + len(block)] = block

    return change


changes = st.one_of(
    st.builds(flip, positions, st.integers(0, 7)),
    st.builds(put, positions, pieces),
    st.builds(insert, positions, pieces),
    st.builds(cut, positions, st.integers(1, 5000)),
    st.builds(double, positions, positions),
)
attacks = st.lists(st.tuples(st.integers(0, 99), changes), min_size=1, max_size=3)
moves = st.tuples(
    st.sampled_from(["swap", "copy", "remove"]), st.integers(0, 99), st.integers(0, 99)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mutations") / "c"
    do.save_step(str(place), 5, numel=2000)
    return place


def budget(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def unchanged_or_refused(saved: Path, place: Path) -> None:
    same = all(
        (place / path.name).exists() and (place / path.name).read_bytes() == path.read_bytes()
        for path in saved.iterdir()
    )
    try:
        found = load(place)
    except CheckpointError:
        assert not same
        return
    assert whole(found) == (5, 0)
    try:
        verify(place)
    except CheckpointError:
        assert not same
    else:
        assert same, "verify passed what is not bitwise the same"


def mutate(saved: Path, attack: list[tuple[int, Change]]) -> None:
    place = saved.parent / "mutant"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved, place)
    files = sorted(path.name for path in saved.iterdir())
    for number, change in attack:
        path = place / files[number % len(files)]
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(bytes(data))
    unchanged_or_refused(saved, place)


def move(saved: Path, what: tuple[str, int, int]) -> None:
    place = saved.parent / "moved"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved, place)
    files = sorted(path.name for path in saved.iterdir())
    kind, first, second = what
    a, b = place / files[first % len(files)], place / files[second % len(files)]
    left, right = a.read_bytes(), b.read_bytes()
    if kind == "remove":
        a.unlink()
    else:
        a.write_bytes(right)
        b.write_bytes(left if kind == "swap" else right)
    unchanged_or_refused(saved, place)


# --- a manifest that was changed and sealed again: any error but ours would be a bug ----------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
edits = st.lists(
    st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=7), values), max_size=3
)


def edit(document: Any, path: list[int], value: Any) -> None:
    """Put a value somewhere into a document; the path is taken as far as it goes."""
    for step in path[:-1]:
        inner = list(document.values()) if isinstance(document, dict) else document
        inner = inner[step % len(inner)] if inner else None
        if not isinstance(inner, (dict, list)) or not inner:
            break
        document = inner
    if isinstance(document, dict):
        document[list(document)[path[-1] % len(document)]] = value
    elif document:
        document[path[-1] % len(document)] = value


def forge(saved: Path, changes: list[tuple[list[int], Any]]) -> None:
    place = saved.parent / "forged"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved, place)

    def change(document: dict[str, Any]) -> None:
        for path, value in changes:
            edit(document, path, json.loads(json.dumps(value)))

    edit_manifest(place, change)
    for action in (load, verify):
        try:
            action(place)
        except CheckpointError as error:
            assert str(place) in str(error) or "tensor" in str(error)  # noqa: PT017


def run(
    examples: int, strategy: Any, property_of: Callable[[Path, Any], None], saved: Path
) -> None:
    budget(examples)(given(strategy)(lambda case: property_of(saved, case)))()


FACTOR = [1, pytest.param(25, marks=[pytest.mark.slow])]


@pytest.mark.parametrize("factor", FACTOR)
def test_bytes_are_changed(saved: Path, factor: int) -> None:
    run(120 * factor, attacks, mutate, saved)


@pytest.mark.parametrize("factor", FACTOR)
def test_files_change_places(saved: Path, factor: int) -> None:
    run(40 * factor, moves, move, saved)


@pytest.mark.parametrize("factor", FACTOR)
def test_the_manifest_is_forged(saved: Path, factor: int) -> None:
    run(150 * factor, edits, forge, saved)
