"""Manifests whose tensors are not parsed before somebody asks for them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks.cli import main as cli
from checkpoint_io import (
    CheckpointError,
    CheckpointFolder,
    CheckpointWarning,
    CorruptCheckpointError,
    TorchGroup,
    UnsupportedStateError,
    keep_last,
    load,
    prepare_save,
    read_manifest,
    save,
    save_model,
)
from checkpoint_io.format import json as jsonio
from checkpoint_io.format import parse
from checkpoint_io.format.manifest import Manifest, seal
from checkpoint_io.sharding.local_tensors import WriteBox
from tests.checkpoint_io.test_sharded_save import join


class Counted:
    """Which manifests had their tensors parsed, and how many bytes of JSON were decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors = self.decoded = 0
        parse_tensors, loads = parse._parse_tensors, jsonio.loads

        def count_tensors(*args: Any) -> Any:
            self.tensors += 1
            return parse_tensors(*args)

        def count_bytes(data: bytes, what: str) -> Any:
            self.decoded += len(data)
            return loads(data, what)

        monkeypatch.setattr(parse, "_parse_tensors", count_tensors)
        monkeypatch.setattr(jsonio, "loads", count_bytes)


def fill(place: Path, *steps: int) -> CheckpointFolder:
    folder = CheckpointFolder(place)
    many = {f"layer.{n}": torch.full((2,), float(n)) for n in range(500)}
    for step in steps:
        folder.save(step, {"model": many}, metadata={"run_id": "r"})
    return folder


def test_scans_and_removals_decode_no_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, 1, 2, 3)
    size = (tmp_path / "step-00000001" / "manifest.json").stat().st_size
    assert size > 20_000
    counted = Counted(monkeypatch)
    folder = CheckpointFolder(tmp_path)
    latest = folder.latest()
    assert latest is not None
    assert latest.manifest.metadata == {"step": 3, "run_id": "r"}
    assert latest.manifest.nbytes == sum(entry.size for entry in latest.manifest.files)
    assert len(folder.prune(keep_last(2), run_id="r")) == 1
    assert folder.next_generation() == 4
    assert cli.main(["ckpt", "ls", str(tmp_path)]) == 0
    assert cli.main(["ckpt", "latest", str(tmp_path)]) == 0
    assert "step-00000003" in capsys.readouterr().out
    read_manifest(latest.path, tensors=False)
    assert (counted.tensors, counted.decoded < size) == (0, True)
    assert len(latest.manifest.tensors) == 500
    assert counted.tensors == 1


def test_what_is_asked_for_later_is_that_of_the_listed_checkpoint(tmp_path: Path) -> None:
    folder = fill(tmp_path, 1)
    first, second = folder.list()[0].manifest, CheckpointFolder(tmp_path).list()[0].manifest
    whole = read_manifest(folder.path(1))
    assert first.aliases == whole.aliases
    assert first.tensors == whole.tensors
    assert type(first) is Manifest
    fill(tmp_path, 1)
    assert second.id == whole.id
    with pytest.raises(CorruptCheckpointError, match="replaced this checkpoint since"):
        _ = second.tensors
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        _ = second.tensor  # type: ignore[attr-defined]


def test_it_compares_and_copies_like_any_other(tmp_path: Path) -> None:
    def lazy() -> Manifest:
        return read_manifest(place, tensors=False)

    place = fill(tmp_path, 1).path(1)
    whole = read_manifest(place)
    assert lazy() == whole
    assert whole == lazy()
    assert lazy() == lazy()
    shown = lazy()
    assert repr(shown).startswith(f"Manifest(id={whole.id!r}, generation=1, ")
    assert "tensors" not in vars(shown)
    assert copy.deepcopy(lazy()) == whole
    assert pickle.loads(pickle.dumps(lazy())) == whole
    assert fill(tmp_path, 2).latest().manifest != whole  # type: ignore[union-attr]


def test_damage_among_the_tensors_is_noticed_by_a_scan(tmp_path: Path, flip_bit: Any) -> None:
    folder = fill(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / "manifest.json"
    flip_bit(file, file.stat().st_size - 100)
    found = {entry.name: entry for entry in CheckpointFolder(tmp_path).survey()}
    assert found["step-00000002"].status == "broken"
    assert "its digest does not match" in found["step-00000002"].reason
    with pytest.warns(CheckpointWarning, match="its digest does not match"):
        latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000001"


def tensors_first(document: dict[str, Any]) -> dict[str, Any]:
    return {"tensors": document["tensors"], **document}


def with_a_brace(document: dict[str, Any]) -> dict[str, Any]:
    document["tensors"] = {"}" + key: value for key, value in document["tensors"].items()}
    return document


def with_such_metadata(document: dict[str, Any]) -> dict[str, Any]:
    document = tensors_first(document)
    document["metadata"] = {"a": 1, "tensors": {}}
    return {key: document[key] for key in ("metadata", *(k for k in document if k != "metadata"))}


def with_it_at_the_end(document: dict[str, Any]) -> dict[str, Any]:
    document = tensors_first(document)
    del document["metadata"]
    return {**document, "metadata": {"a": 1, "tensors": {}}}


def of_version_2(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "version": 2}


def empty(document: dict[str, Any]) -> dict[str, Any]:
    files = [file for file in document["files"] if file["kind"] == "objects"]
    return {**document, "files": files, "tensors": {}}


@pytest.mark.parametrize(
    "change",
    [tensors_first, with_a_brace, with_such_metadata, with_it_at_the_end, of_version_2, empty],
)
def test_any_order_of_fields_is_read(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    save(tmp_path, {"w": torch.ones(2)}, metadata={"run_id": "r"})
    data = seal(change(json.loads((tmp_path / "manifest.json").read_bytes())))
    whole = parse.parse_manifest(data, "here")
    lazy = parse.parse_without_tensors(data, "here", lambda: whole)
    assert (lazy.metadata, lazy.files) == (whole.metadata, whole.files)
    assert "tensors" not in vars(lazy)
    assert lazy == whole


def test_a_manifest_without_tensors_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path, 1)
    file = tmp_path / "step-00000001" / "manifest.json"
    document = json.loads(file.read_bytes())
    del document["tensors"]
    file.write_bytes(seal(document))
    assert [entry.status for entry in folder.survey()] == ["broken"]


def test_a_save_of_one_process_parses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    saved = save(tmp_path, {"w": torch.ones(3), "none": torch.ones(0, 4)}, metadata={"step": 1})
    assert saved.nbytes == sum(entry.size for entry in saved.files)
    assert (saved.generation, saved.world_size) == (1, 1)
    assert (counted.tensors, counted.decoded) == (0, 0)
    manifest = read_manifest(tmp_path)
    assert {name: value for name, value in vars(saved).items() if name != "_parse"} == {
        name: value for name, value in vars(manifest).items() if name in vars(saved)
    }
    assert saved == manifest


def whole_and_part(tensor: torch.Tensor) -> Any:
    """Take a share of one rank of two for all of the tensor, as a wrong group would."""
    boxes = WriteBox.all_of("w", tensor)
    return boxes._replace(tensor=tensor[:1])


def test_a_part_of_a_tensor_is_not_committed_as_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"w": torch.zeros(3)})
    job = prepare_save(tmp_path, {"w": torch.ones(3)}, next_generation=lambda old: 2)
    monkeypatch.setattr(
        "checkpoint_io.saver.plan.RankPlan.files",
        lambda plan: [[whole_and_part(plan.tensors[0])]],
    )
    with pytest.raises(CheckpointError, match="not cover it"):
        job.run()
    assert load(tmp_path).state["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 2**40, 2**21)])
def test_a_tensor_that_readers_refuse_is_not_saved(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path / "c", {"w": torch.zeros(3)})
    with pytest.raises(UnsupportedStateError, match=r"tensor 'w' of shape \((1, 1|0, 10).*reshape"):
        save(tmp_path / "c", {"w": torch.empty(shape)})
    assert load(tmp_path / "c").state["w"].tolist() == [0.0] * 3
    with pytest.raises(UnsupportedStateError, match="reshape it"):
        save_model({"w": torch.empty(shape)}, tmp_path / "m")
    largest = {"w": torch.empty(0, 2**39, 2**20), "v": torch.ones((1,) * 64)}
    save(tmp_path / "c", largest)
    loaded = load(tmp_path / "c").state
    assert [tensor.shape for tensor in loaded.values()] == [t.shape for t in largest.values()]


def save_and_count(place: str) -> tuple[int, int, bool]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        group = join()
        manifest = save(place, {"w": torch.ones(3), "step": 1}, group=group)
        after = (counted.tensors, counted.decoded)
        assert manifest.id
        assert len(manifest.digest) == 64
        assert (counted.tensors, counted.decoded) == after
        same = manifest == read_manifest(place)
    return (*after, same)


@pytest.mark.distributed
def test_no_rank_parses_what_was_saved(pool: Any, tmp_path: Path) -> None:
    """Rank 0 checks what it is about to commit."""
    assert pool.run(save_and_count, str(tmp_path)) == [(1, 0, True), (0, 0, True)]


def committed(place: str) -> tuple[list[str], dict[str, str]]:
    """Asked for after another save has replaced the checkpoint."""
    group = join()
    manifest = save(place, {"w": torch.ones(3)}, group=group)
    TorchGroup().all_gather_object(None)
    save(place, {"v": torch.ones(3)}, group=group)
    return list(manifest.tensors), dict(manifest.aliases)


@pytest.mark.distributed
def test_what_a_save_returns_outlives_the_checkpoint(pool: Any, tmp_path: Path) -> None:
    assert pool.run(committed, str(tmp_path)) == [(["w"], {})] * 2
