"""Weights that are not in the folder itself: behind links, in folders of it, or not downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_callbacks import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_callbacks.cli.main import main
from accel_callbacks.compat.folder import OffloadedWeightsLoader
from accel_callbacks.compat.models import load, load_state_dict
from checkpoint_io import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    load_model,
    load_model_state,
)
from checkpoint_io.weights import map_tensors, merge_weights
from tests.checkpoint_io.test_weights import (
    LAYOUTS,
    Tied,
    Write,
    as_bin,
    as_bin_shards,
    as_checkpoint,
    as_dcp,
    as_file,
    as_folder,
    as_hub_snapshot,
    as_plain_checkpoint,
    as_shards,
    same,
    trained,
)
from tests.cli.test_deepspeed_checkpoints import same as same_tensors
from tests.cli.test_deepspeed_checkpoints import write as write_deepspeed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

INDEX = "model.safetensors.index.json"
OWN = (as_checkpoint, as_plain_checkpoint)
FOREIGN = [layout for layout in LAYOUTS if layout not in OWN]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"5" * 64 + b"\nsize 12345\n"
ANNEX = b"/annex/objects/SHA256E-s12345--" + b"5" * 64 + b".safetensors\n"


def link_all(folder: Path, cache: Path, relative: bool) -> None:
    """Move each file into a folder elsewhere, under a name without an ending; leave a link."""
    cache.mkdir()
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        target = cache / f"{number:032x}"
        os.rename(os.path.realpath(path), target)
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent) if relative else target)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("write", FOREIGN)
def test_each_layout_is_read_through_links(write: Write, relative: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    place = write(trained(), folder)
    if write is not as_hub_snapshot:
        link_all(folder, tmp_path / "cache", relative)
    model = Tied()
    assert load_model(model, place) == ([], [])
    assert same(model, trained())


def test_a_checkpoint_of_deepspeed_is_read_through_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = write_deepspeed(tmp_path / "folder", 2)
    link_all(tmp_path / "folder", tmp_path / "cache", relative=True)
    found = load_model_state(tmp_path / "folder")
    assert same_tensors(found, {**state, "tied": state["b.weight"]})
    assert main(["ckpt", "show", str(tmp_path / "folder")]) == 0
    assert "tied      float32  [4, 5]  -> b.weight" in capsys.readouterr().out


@pytest.mark.parametrize("write", OWN)
def test_a_checkpoint_of_this_package_is_not_read_through_links(
    write: Write, tmp_path: Path
) -> None:
    place = write(trained(), tmp_path / "folder")
    link_all(place, tmp_path / "cache", relative=False)
    with pytest.raises(CorruptCheckpointError, match=r"symbolic link.*put the file itself there"):
        load_model(Tied(), place)


def test_every_reader_follows_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, folder = trained(), tmp_path / "folder"
    as_shards(wanted, folder)
    link_all(folder, tmp_path / "cache", relative=False)
    model = Tied()
    load_checkpoint_in_model(model, folder)
    assert same(model, wanted)
    model = Tied()
    load_checkpoint_in_model(model, folder, mapped=True)
    assert same(model, wanted)
    assert torch.equal(map_tensors(folder)["body.weight"], wanted.body.weight)
    spread = {"emb": "cpu", "head": "cpu", "norm": "cpu", "body": "disk"}
    model = load_checkpoint_and_dispatch(Tied(), folder, spread)
    assert torch.equal(model.body(torch.ones(4)), wanted.body(torch.ones(4)))
    merge_weights(folder, tmp_path / "merged")
    assert torch.equal(load_file(tmp_path / "merged/model.safetensors")["body.weight"],
                       wanted.body.weight)  # fmt: skip
    code = main(["ckpt", "show", str(folder)])
    text = "".join(capsys.readouterr())
    assert (code, "body" in text or "Total" in text) == (0, True), text


def test_single_files_are_read_through_links_of_any_name(tmp_path: Path) -> None:
    weights = {"scale": torch.ones(2)}
    save_file(weights, tmp_path / "safe")
    torch.save(weights, tmp_path / "pickled")
    for name in ("safe", "pickled"):
        (tmp_path / f"{name}-link").symlink_to(name)
        for place in (tmp_path / name, tmp_path / f"{name}-link"):
            assert torch.equal(load_state_dict(str(place))["scale"], weights["scale"])
            assert torch.equal(load(str(place))["scale"], weights["scale"])
    index = {"scale": {"safetensors_file": str(tmp_path / "safe-link"), "weight_name": "scale"}}
    assert torch.equal(OffloadedWeightsLoader(index=index)["scale"], weights["scale"])


def test_weights_are_not_merged_over_what_links_lead_to(tmp_path: Path) -> None:
    as_folder(trained(), tmp_path / "outside")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model.safetensors").symlink_to(tmp_path / "outside/model.safetensors")
    with pytest.raises(CheckpointConflictError, match="the folder that is read"):
        merge_weights(tmp_path / "folder", tmp_path / "outside", overwrite=True)


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (".git/annex/objects/x1/y2/SHA256E-s9--1.safetensors", "`git annex get`"),
        ("/nowhere/weights", "fetch that file, or copy with `cp -L`"),
    ],
)
@pytest.mark.parametrize("write", [as_folder, as_shards, as_bin, as_bin_shards])
def test_a_link_to_nothing_is_named(write: Write, target: str, advice: str, tmp_path: Path) -> None:
    place = write(trained(), tmp_path)
    path = sorted(p for p in tmp_path.iterdir() if p.suffix in (".safetensors", ".bin"))[0]
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(CorruptCheckpointError) as raised:
        load_model(Tied(), place)
    text = str(raised.value)
    assert f"{path} is a link to " in text
    assert f"{target}, which is not there" in text
    assert advice in text


@pytest.mark.parametrize(
    ("content", "system", "advice"),
    [(LFS, "Git LFS", "git lfs pull"), (ANNEX, "git-annex", "git annex get")],
)
@pytest.mark.parametrize(
    "write", [as_file, as_folder, as_shards, as_bin, as_bin_shards, as_hub_snapshot, as_dcp]
)
def test_a_pointer_in_place_of_a_file_is_named(
    write: Write, content: bytes, system: str, advice: str, tmp_path: Path
) -> None:
    place = write(trained(), tmp_path)
    kinds = (".safetensors", ".bin", ".distcp", ".json", ".metadata")
    files = sorted(p for p in tmp_path.rglob("*") if p.suffix in kinds or p.name in kinds)
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(content)
        message = rf"{path.name} is a pointer of {system} .*run `{advice}` there"
        with pytest.raises(CorruptCheckpointError, match=message):
            load_model(Tied(), place)
        path.write_bytes(whole)
    load_model(Tied(), place)


def test_other_readers_name_pointers_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(LFS)
    for read in (
        lambda: load_state_dict(str(path)),
        lambda: load(str(path)),
        lambda: OffloadedWeightsLoader(index={"w": {"safetensors_file": str(path)}})["w"],
        lambda: map_tensors(tmp_path),
        lambda: load_checkpoint_in_model(Tied(), tmp_path),
    ):
        with pytest.raises(CorruptCheckpointError, match="git lfs pull"):
            read()
    assert main(["ckpt", "show", str(tmp_path)]) == 1
    assert "git lfs pull" in capsys.readouterr().err


def test_what_dvc_has_not_fetched_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.dvc").write_text("outs:\n- path: model.safetensors\n")
    with pytest.raises(CheckpointNotFoundError, match=r"model\.safetensors\.dvc.*`dvc pull`"):
        load_model(Tied(), tmp_path)


# --- an index ---------------------------------------------------------------------------------


def write_index(folder: Path, weight_map: dict[str, Any], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("safe", [True, False])
def test_shards_may_be_in_folders(safe: bool, tmp_path: Path) -> None:
    weight, bias = torch.ones(3, 2), torch.zeros(3)
    (tmp_path / "sub/deep").mkdir(parents=True)
    ending, name = ("safetensors", INDEX) if safe else ("bin", "pytorch_model.bin.index.json")
    write = save_file if safe else torch.save
    write({"weight": weight}, tmp_path / f"sub/a.{ending}")
    write({"bias": bias}, tmp_path / f"sub/deep/b.{ending}")
    shards = {"weight": f"sub/a.{ending}", "bias": f"./sub//deep/b.{ending}"}
    write_index(tmp_path, shards, name)
    model = torch.nn.Linear(2, 3)
    load_model(model, tmp_path)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)
    (tmp_path / name).write_text(json.dumps(shards))  # the map alone, as some write it
    assert torch.equal(load_model_state(tmp_path)["weight"], weight)


@pytest.mark.parametrize("safe", [True, False])
def test_an_index_that_names_another_shard(safe: bool, tmp_path: Path) -> None:
    shards = [{"weight": torch.ones(3, 2), "both": torch.ones(1), "more": torch.ones(2)},
              {"bias": torch.ones(3), "both": torch.zeros(1)}]  # fmt: skip
    ending, name = ("safetensors", INDEX) if safe else ("bin", "pytorch_model.bin.index.json")
    names = [f"a.{ending}", f"b.{ending}"]
    for shard, file in zip(shards, names, strict=True):
        (save_file if safe else torch.save)(shard, tmp_path / file)
    wrong = {"weight": names[1], "bias": names[0]}
    for weight_map, both in (
        (wrong, 0.0),
        ({**wrong, "both": names[0]}, 1.0),
        ({**wrong, "both": names[1]}, 0.0),
    ):
        write_index(tmp_path, weight_map, name)
        state = load_model_state(tmp_path)
        assert sorted(state) == ["bias", "both", "more", "weight"]
        assert state["both"].item() == both
        assert torch.equal(state["weight"], shards[0]["weight"])
