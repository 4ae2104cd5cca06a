"""Checkpoints made to do harm: nothing is executed, nothing outside is read, written or removed."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit import victims as do
from faultkit.damage import admit
from faultkit.states import state_of, whole
from safetensors.torch import save_file

import checkpoint_io
from checkpoint_io import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWarning,
    CorruptCheckpointError,
    keep_last,
    load,
    load_model_state,
    read_manifest,
    verify,
)

NUMEL = 2000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    do.save_step(str(tmp_path / "c"), 5, numel=NUMEL)
    return tmp_path / "c"


# --- pickle anywhere -------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def zipped(mark: Path) -> bytes:
    """Return what torch.save writes, with a bomb inside."""
    buffer = io.BytesIO()
    torch.save({"w": Bomb(mark)}, buffer)
    assert zipfile.is_zipfile(buffer)
    return buffer.getvalue()


def old_style(mark: Path) -> bytes:
    """Return what torch.save wrote before it wrote zip files."""
    buffer = io.BytesIO()
    torch.save({"w": Bomb(mark)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def plain(protocol: int) -> Callable[[Path], bytes]:
    return lambda mark: pickle.dumps(Bomb(mark), protocol=protocol)


BOMBS: dict[str, Callable[[Path], bytes]] = {
    "protocol_0": plain(0),
    "protocol_5": plain(5),
    "torch_zip": zipped,
    "torch_old": old_style,
}


def test_the_bombs_go_off(tmp_path: Path) -> None:
    """The control: unpickled, each of them does make its folder."""
    for name, bomb in BOMBS.items():
        mark = tmp_path / name
        data = io.BytesIO(bomb(mark))
        if name.startswith("torch"):
            torch.load(data, weights_only=False)
        else:
            pickle.load(data)
        assert mark.exists()


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_in_place_of_each_file(place: Path, tmp_path: Path, bomb: str) -> None:
    mark = tmp_path / "executed"
    data = BOMBS[bomb](mark)
    entries = read_manifest(place).files
    kept = {path.name: path.read_bytes() for path in place.iterdir()}
    for name in (*(entry.name for entry in entries), "manifest.json"):
        for sealed in (False, True):
            if name == "manifest.json":
                (place / name).write_bytes(data)
            elif sealed:
                admit(place, name, data)
            else:
                (place / name).write_bytes(data)
            with pytest.raises(CheckpointError):
                load(place)
            if not sealed:
                with pytest.raises(CheckpointError):
                    verify(place)
            for other, good in kept.items():
                (place / other).write_bytes(good)
    assert not mark.exists()
    assert whole(load(place)) == (5, 0)


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        *(("pytorch_model.bin", bomb) for bomb in BOMBS),
        ("model.safetensors", "torch_zip"),
        ("model.safetensors.index.json", "torch_old"),
        ("pytorch_model.bin.index.json", "protocol_0"),
    ],
)
def test_pickle_in_a_model(tmp_path: Path, name: str, bomb: str) -> None:
    folder, mark = tmp_path / "model", tmp_path / "executed"
    folder.mkdir()
    (folder / name).write_bytes(BOMBS[bomb](mark))
    with pytest.raises(CheckpointError):
        load_model_state(folder)
    if hasattr(checkpoint_io, "load_model"):
        for target in (folder, folder / name):
            with pytest.raises(CheckpointError):
                checkpoint_io.load_model(torch.nn.Linear(2, 2), target)
    assert not mark.exists()


@pytest.mark.skipif(not hasattr(checkpoint_io, "load_model"), reason="no load_model here")
@pytest.mark.parametrize(
    ("name", "bomb"),
    [*(("w.bin", bomb) for bomb in BOMBS), ("w.pt", "torch_zip"), ("w.pth", "torch_old")],
)
def test_pickle_in_a_torch_file(tmp_path: Path, name: str, bomb: str) -> None:
    mark = tmp_path / "executed"
    (tmp_path / name).write_bytes(BOMBS[bomb](mark))
    with pytest.raises(CheckpointError):
        checkpoint_io.load_model(torch.nn.Linear(2, 2), tmp_path / name)
    assert not mark.exists()


# --- names that lead outside -----------------------------------------------------------------

OUTSIDE = ["../outside.safetensors", "{root}/outside.safetensors", "sub/../../outside.safetensors"]


@pytest.mark.parametrize(
    ("kind", "name"), [*(("safetensors", name) for name in OUTSIDE), ("bin", OUTSIDE[0])]
)
def test_index_that_names_a_file_outside(tmp_path: Path, name: str, kind: str) -> None:
    """A valid file lies there, so that only the refusal keeps it from being read."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    name = name.format(root=tmp_path)
    weights = torch.nn.Linear(2, 2).state_dict()
    if kind == "safetensors":
        save_file(weights, tmp_path / "outside.safetensors")
        index = "model.safetensors.index.json"
    else:
        name = name.replace("safetensors", "bin")
        torch.save(weights, tmp_path / "outside.bin")
        index = "pytorch_model.bin.index.json"
    document = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (folder / index).write_text(json.dumps(document))
    with pytest.raises(CheckpointError):
        load_model_state(folder)
    if hasattr(checkpoint_io, "load_model"):
        with pytest.raises(CheckpointError):
            checkpoint_io.load_model(torch.nn.Linear(2, 2), folder)


def test_extra_files_that_lead_outside_are_not_removed(tmp_path: Path) -> None:
    """Metadata may list files to remove with their checkpoint; not files of somebody else."""
    victim = tmp_path / "precious"
    victim.write_text("mine")
    folder = CheckpointFolder(tmp_path / "run")
    names = ["../../precious", str(victim), "../precious", "link", ".", "..", "", 7, None]
    for step in (1, 2, 3):
        metadata = {"run_id": "r", "extra_files": names}
        folder.save(step, state_of(step, NUMEL), metadata=metadata)
    (Path(folder.path(1)) / "link").symlink_to(victim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        folder.prune(keep_last(1), run_id="r")
    assert victim.read_text() == "mine"
    assert whole(folder.load_latest()) == (3, 0)


# --- links -----------------------------------------------------------------------------------


def test_linked_files_are_not_read(place: Path, tmp_path: Path) -> None:
    """Even if what the link leads to is right: it could be anything, and change at any time."""
    for path in sorted(place.iterdir()):
        outside = tmp_path / "outside"
        path.rename(outside)
        path.symlink_to(outside)
        for action in (load, verify):
            with pytest.raises(CorruptCheckpointError, match=path.name):
                action(place)
        path.unlink()
        outside.rename(path)
    assert whole(load(place)) == (5, 0)


def test_linked_manifest_is_not_written_through(tmp_path: Path) -> None:
    place, outside = tmp_path / "c", tmp_path / "outside.json"
    place.mkdir()
    outside.write_text("precious")
    (place / "manifest.json").symlink_to(outside)
    try:
        do.save_step(str(place), 1, numel=NUMEL)
    except CheckpointError:
        pass
    else:
        assert whole(load(place)) == (1, 0)
        assert not (place / "manifest.json").is_symlink()
    assert outside.read_text() == "precious"


def test_linked_folder_is_neither_found_nor_pruned(tmp_path: Path) -> None:
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    for step in (8, 9):
        elsewhere.save(step, state_of(step, NUMEL), metadata={"run_id": "r"})
    folder = CheckpointFolder(tmp_path / "run")
    for step in (1, 2):
        folder.save(step, state_of(step, NUMEL), metadata={"run_id": "r"})
        (tmp_path / "run" / f"step-0000000{step + 7}").symlink_to(elsewhere.path(step + 7))
    assert [info.name for info in folder.list()] == ["step-00000001", "step-00000002"]
    assert whole(folder.load_latest()) == (2, 0)
    folder.prune(keep_last(1), run_id="r")
    assert len(elsewhere.list()) == 2
    assert whole(elsewhere.load_latest()) == (9, 0)


def test_linked_left_overs_are_removed_as_links(place: Path, tmp_path: Path) -> None:
    """A planted link with a name of ours: cleaning up may take the link, not what it leads to."""
    outside = tmp_path / "outside.json"
    outside.write_text('{"save_id": "aa", "run_id": "faults"}')
    link = place / "objects-aaaaaaaaaaaaaaaa-shared.json"
    link.symlink_to(outside)
    do.save_step(str(place), 6, numel=NUMEL)
    assert outside.exists()
    assert whole(load(place)) == (6, 0)
