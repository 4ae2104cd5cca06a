"""Manifests and JSON files written to do harm; each is sealed with a correct digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from checkpoint_io import (
    CorruptCheckpointError,
    ManifestVersionError,
    load,
    read_manifest,
    save,
    verify,
)
from checkpoint_io.format.manifest import seal

Document = dict[str, Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "outside.json").write_text("{}")
    save(tmp_path / "c", {"w": torch.ones(4, 4), "v": torch.zeros(3), "step": 1})
    return tmp_path / "c"


def edit(place: Path, change: Callable[[Document], Any]) -> None:
    file = place / "manifest.json"
    document = json.loads(file.read_bytes())
    change(document)
    file.write_bytes(seal(document))


def first_tensor(document: Document) -> list[Any]:
    """[dtype, shape, chunk, ...]"""
    tensor: list[Any] = document["tensors"]["w"]
    return tensor


def first_chunk(document: Document) -> list[Any]:
    """[file, begin, end, checksums], and of a box offsets and shape."""
    chunk: list[Any] = document["tensors"]["w"][2]
    return chunk


def put(values: list[Any], index: int, *new: Any) -> None:
    values[index : index + len(new)] = new


def objects_entry(document: Document) -> Document:
    return next(f for f in document["files"] if f["kind"] == "objects")


def rename_objects(document: Document, name: str) -> None:
    objects_entry(document)["name"] = name
    document["objects"]["shared"] = name


CHANGES: dict[str, Callable[[Document], Any]] = {
    "other_format": lambda d: d.update(format="zip"),
    "bool_version": lambda d: d.update(version=True),
    "parent_name": lambda d: rename_objects(d, "../outside.json"),
    "absolute_name": lambda d: rename_objects(d, "/etc/passwd"),
    "foreign_name": lambda d: rename_objects(d, "outside.json"),
    "newline_name": lambda d: rename_objects(d, objects_entry(d)["name"] + "\n"),
    "kind": lambda d: objects_entry(d).update(kind="tensors"),
    "file_twice": lambda d: d["files"].append(d["files"][0]),
    "negative_size": lambda d: d["files"][0].update(size=-1),
    "huge_size": lambda d: d["files"][0].update(size=2**62),
    "float_size": lambda d: d["files"][0].update(size=10.0),
    "checksum_count": lambda d: d["files"][0]["checksums"].append("0" * 16),
    "checksum_text": lambda d: d["files"][0].update(checksums=["g" * 16]),
    "file_rank": lambda d: d["files"][0].update(rank=1),
    "covered_absent": lambda d: d["files"][0].pop("covered"),
    "covered_odd": lambda d: d["files"][0].update(covered=4095),
    "covered_past_end": lambda d: d["files"][0].update(covered=2**40),
    "covered_data": lambda d: d["files"][0].update(covered=8192),
    "covered_part": lambda d: objects_entry(d).update(covered=0, checksums=[]),
    "chunk_sums": lambda d: put(first_chunk(d), 3, first_chunk(d)[3] * 2),
    "chunk_sums_absent": lambda d: first_chunk(d).pop(),
    "chunk_sums_text": lambda d: put(first_chunk(d), 3, "G" * 16),
    "chunk_sums_list": lambda d: put(first_chunk(d), 3, [first_chunk(d)[3]]),
    "hole": lambda d: d["files"][0].update(size=d["files"][0]["size"] + 1),
    "ranks_endless": lambda d: d.update(
        world_size=2**62, objects={**d["objects"], "ranks": {"-1": d["objects"]["shared"]}}
    ),
    "part_size_0": lambda d: d["checksum"].update(part_size=0),
    "part_size_huge": lambda d: d["checksum"].update(part_size=2**40),
    "algorithm": lambda d: d["checksum"].update(algorithm="none"),
    "chunk_file": lambda d: put(first_chunk(d), 0, 9),
    "chunk_in_json": lambda d: put(first_chunk(d), 0, 1),
    "chunk_past_end": lambda d: put(first_chunk(d), 1, 10**9, 10**9 + 64),
    "chunk_before_start": lambda d: put(first_chunk(d), 1, 0, 64),
    "chunk_short": lambda d: put(first_chunk(d), 2, first_chunk(d)[2] - 4),
    "chunk_fields": lambda d: first_chunk(d).append([0, 0]),
    "chunk_outside": lambda d: first_chunk(d).extend([[1, 0], [4, 4]]),
    "chunk_smaller": lambda d: first_chunk(d).extend([[0, 0], [3, 4]]),
    "chunk_dims": lambda d: first_chunk(d).extend([[0], [4, 4]]),
    "chunk_object": lambda d: put(first_tensor(d), 2, {"file": 0}),
    "no_chunks": lambda d: first_tensor(d).pop(),
    "chunk_twice": lambda d: first_tensor(d).append(first_chunk(d)),
    "shape_wider": lambda d: put(first_tensor(d), 1, [4, 5]),
    "shape_absurd": lambda d: put(first_tensor(d), 1, [2**62, 2**62, 0]),
    "shape_dims": lambda d: put(first_tensor(d), 1, [1] * 1000),
    "shape_text": lambda d: put(first_tensor(d), 1, "44"),
    "dtype": lambda d: put(first_tensor(d), 0, "F31"),
    "dtype_list": lambda d: put(first_tensor(d), 0, ["F32"]),
    "tensor_object": lambda d: d["tensors"].update(w={"dtype": "F32"}),
    "same_bytes": lambda d: d["tensors"].update(z=d["tensors"]["w"]),
    "tensor_absent": lambda d: d["tensors"].pop("w"),
    "alias_dangling": lambda d: d["aliases"].update(x="nothing"),
    "alias_hides": lambda d: d["aliases"].update(w="v"),
    "objects_absent": lambda d: d["objects"].pop("shared"),
    "objects_tensors": lambda d: d["objects"].update(shared=d["files"][0]["name"]),
    "objects_rank": lambda d: d["objects"]["ranks"].update({"1": d["objects"]["shared"]}),
    "objects_rank_text": lambda d: d["objects"]["ranks"].update({"00": d["objects"]["shared"]}),
    "world_size": lambda d: d.update(world_size=0),
    "world_size_list": lambda d: d.update(world_size=[1]),
    "metadata_tag": lambda d: d.update(metadata={"$tensor": "w"}),
    "metadata_list": lambda d: d.update(metadata=[]),
    "id": lambda d: d.update(id="../x"),
    "files_null": lambda d: d.update(files=None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_manifest_is_refused(place: Path, name: str) -> None:
    edit(place, CHANGES[name])
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json|objects-|tensors-"):
        load(place)


def test_bytes_of_no_tensor_are_refused(place: Path) -> None:
    """Before, between and after tensors."""
    for change in ("tensor_absent", "hole"):
        edit(place, CHANGES[change])
        with pytest.raises(CorruptCheckpointError, match="no tensor claims byte"):
            read_manifest(place)
        save(place, {"w": torch.ones(4, 4), "v": torch.zeros(3), "step": 1})


def test_sealing_unchanged_is_accepted(place: Path) -> None:
    """The control of the test above: the seal alone is not what is refused."""
    edit(place, lambda d: None)
    assert load(place).state["step"] == 1
    edit(place, lambda d: d.update(added_later={"x": 1}))
    assert load(place).state["step"] == 1


def test_the_version_before_is_read(place: Path) -> None:
    edit(place, lambda d: d.update(version=2))
    assert load(place).state["step"] == 1


@pytest.mark.parametrize(("version", "advice"), [(1, "save it again"), (4, "upgrade accel-call")])
def test_other_versions_say_what_to_do(place: Path, version: int, advice: str) -> None:
    edit(place, lambda d: d.update(version=version, files="another shape"))
    with pytest.raises(ManifestVersionError, match=advice):
        load(place)
    with pytest.raises(ManifestVersionError):
        save(place, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format":1,"format":2}',
        b'{"format":NaN}',
        b"\xff\xfe",
        b'{"version":' + b"9" * 5000 + b"}",
    ],
    ids=range(8),
)
def test_bytes_that_are_no_manifest(place: Path, data: bytes) -> None:
    (place / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        read_manifest(place)


def test_oversized_manifest_is_not_read(place: Path) -> None:
    with (place / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CorruptCheckpointError, match="no manifest"):
        read_manifest(place)


STATES: list[Any] = [
    {"x": {"$tensor": "nothing"}},
    {"x": {"$tensor": ["w"]}},
    {"x": {"$unknown": 1}},
    {"x": {"$tuple": [], "y": 1}},
    {"x": {"$tuple": 5}},
    {"x": {"$deque": 5}},
    {"x": {"$deque": [None, 5]}},
    {"x": {"$deque": [1, [1, 2]]}},
    {"x": {"$deque": ["2", [1, 2]]}},
    {"x": {"$deque": [2**70, []]}},
    {"x": {"$set": [[1]]}},
    {"x": {"$dict": [[[1], 2]]}},
    {"x": {"$dict": [[1, 2, 3]]}},
    {"x": {"$dict": [[1, 2], [1, 3]]}},
    {"x": {"$dict": 7}},
    {"x": {"$bytes": "*"}},
    {"x": {"$float": "0"}},
    {"x": {"$dtype": "load"}},
    {"$tuple": []},
    [],
]


@pytest.mark.parametrize("tree", STATES, ids=str)
def test_hostile_state_is_refused(place: Path, tree: Any) -> None:
    name = json.loads((place / "manifest.json").read_bytes())["objects"]["shared"]
    data = json.dumps({"state": tree}).encode()
    (place / name).write_bytes(data)

    def admit(document: Document) -> None:
        checksums = [xxhash.xxh3_64_hexdigest(data)]
        objects_entry(document).update(size=len(data), covered=len(data), checksums=checksums)

    edit(place, admit)
    verify(place)
    with pytest.raises(CorruptCheckpointError, match="objects-"):
        load(place)
