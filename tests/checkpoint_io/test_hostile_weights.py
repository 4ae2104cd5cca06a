"""Model weights that are damaged or meant to do harm: refused, before anything changes."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_io import (
    CheckpointError,
    CorruptCheckpointError,
    load_model,
    load_model_state,
    save_model,
)

SINGLE = "model.safetensors"


class Payload:
    """A pickle of this would make a file when it is read by plain pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def fresh() -> torch.nn.Linear:
    return torch.nn.Linear(2, 3)


def write_header(path: Path, header: bytes, data: bytes = bytes(8)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("name", "zipped"), [("pytorch_model.bin", True), ("model.pt", False), ("old.pth", True)]
)
def test_a_pickle_that_needs_more_runs_nothing(tmp_path: Path, name: str, zipped: bool) -> None:
    planted = tmp_path / "planted"
    model = fresh()
    state = {**model.state_dict(), "x": Payload(planted)}
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CorruptCheckpointError, match="refused"):
        load_model(model, tmp_path / name)
    assert not planted.exists()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(fresh(), tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpointError, match=r"save_model or torch\.save"):
        load_model(fresh(), tmp_path / "model.pt")


@pytest.mark.parametrize(
    "document",
    [{"epoch": 3, "optimizer": {}}, [torch.ones(1)], {}, {"w": torch.ones(2).to_sparse()}],
    ids=["training state", "list", "empty", "sparse"],
)
def test_other_contents_are_named(tmp_path: Path, document: Any) -> None:
    torch.save(document, tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpointError, match="not a dict of names to tensors"):
        load_model(fresh(), tmp_path / "model.pt")


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("../../planted", "x")
    with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
        load_model(fresh(), tmp_path / "model.pt")


OUTSIDE = (
    "../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "/a/x.safetensors",
    "a/..\\..\\x.safetensors", "..\\x.safetensors", "a\0/x.safetensors", "a/", 3, None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("index", "name"),
    [
        *((f"{SINGLE}.index.json", name) for name in OUTSIDE),
        ("pytorch_model.bin.index.json", OUTSIDE[0]),
    ],
)
def test_an_index_stays_in_its_folder(tmp_path: Path, index: str, name: Any) -> None:
    folder = tmp_path / "folder"
    save_model(fresh().state_dict(), tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "x.safetensors")
    folder.mkdir()
    (folder / index).write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
    with pytest.raises(CorruptCheckpointError, match="weight_map is not usable"):
        load_model(fresh(), folder)


def test_a_safe_index_does_not_lead_to_a_pickle(tmp_path: Path) -> None:
    torch.save(fresh().state_dict(), tmp_path / "a.bin")
    index = {"weight_map": {"weight": "a.bin", "bias": "a.bin"}}
    (tmp_path / f"{SINGLE}.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="weight_map is not usable"):
        load_model(fresh(), tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"weight_map":[]}', b'{"weight_map":{}}', b"[" * 100_000, b"\xff\xfe",
     b'{"weight_map":{"a":"b.safetensors","a":"c.safetensors"}}'],
    ids=range(8),
)  # fmt: skip
def test_a_broken_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / f"{SINGLE}.index.json").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        load_model(fresh(), tmp_path)


def test_a_shard_that_lacks_what_the_index_says(tmp_path: Path) -> None:
    names = save_model(fresh().state_dict(), tmp_path, max_shard_size=1)
    index = json.loads((tmp_path / names[-1]).read_text())
    index["weight_map"]["ghost"] = names[0]
    (tmp_path / names[-1]).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="ghost"):
        load_model(fresh(), tmp_path)
    (tmp_path / names[0]).unlink()
    with pytest.raises(CorruptCheckpointError, match=names[0]):
        load_model(fresh(), tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 4095, 4096, 4100])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    save_model(fresh().state_dict(), tmp_path)
    os.truncate(tmp_path / SINGLE, cut)
    with pytest.raises(CorruptCheckpointError, match=SINGLE):
        load_model(fresh(), tmp_path)


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "old.pth"])
def test_a_truncated_torch_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    torch.save(fresh().state_dict(), path, _use_new_zipfile_serialization=kind.endswith("bin"))
    whole = path.read_bytes()
    for cut in (0, 1, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptCheckpointError, match=kind):
            load_model(fresh(), path)


def test_a_huge_shape_costs_no_memory(tmp_path: Path) -> None:
    shape = [2**40, 2]
    header = {"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**43]}}
    write_header(tmp_path / SINGLE, json.dumps(header).encode())
    with pytest.raises(CorruptCheckpointError, match="bytes long"):
        load_model(fresh(), tmp_path)
    (tmp_path / SINGLE).write_bytes((2**62).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CorruptCheckpointError, match="header"):
        load_model(fresh(), tmp_path)


def attempt(path: Path, whole: dict[str, torch.Tensor], data: bytes) -> None:
    """Whatever the bytes are: an error that this package raises, or shapes that fit."""
    path.write_bytes(data)
    model = fresh()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_model(model, path)
    except CheckpointError:
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    else:
        assert {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in whole.items()
        }


FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EDITS = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=6)


@FUZZ
@given(edits=EDITS)
def test_mutated_safetensors(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    whole = fresh().state_dict()
    save_model(whole, tmp_path)
    data = bytearray((tmp_path / SINGLE).read_bytes())
    for at, value in edits:
        data[at] = value
    attempt(tmp_path / "mutated.safetensors", whole, bytes(data))


@FUZZ
@given(edits=EDITS, zipped=st.booleans())
def test_mutated_torch_files(tmp_path: Path, edits: list[tuple[int, int]], zipped: bool) -> None:
    whole = fresh().state_dict()
    buffer = io.BytesIO()
    torch.save(whole, buffer, _use_new_zipfile_serialization=zipped)
    data = bytearray(buffer.getvalue())
    for at, value in edits:
        data[at % len(data)] = value
    attempt(tmp_path / "mutated.pt", whole, bytes(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F64", "BOOL", "F4", ""]) | JSON,
        "shape": st.lists(st.integers(-2, 2**70), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**70), min_size=2, max_size=2) | JSON,
    }
)


@FUZZ
@given(header=st.dictionaries(st.sampled_from(["weight", "bias", "__metadata__"]), ENTRY | JSON))
def test_made_up_headers(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(64)
    attempt(tmp_path / "made.safetensors", fresh().state_dict(), data)


@FUZZ
@given(document=JSON | st.fixed_dictionaries({"weight_map": JSON}))
def test_made_up_indexes(tmp_path: Path, document: Any) -> None:
    path = tmp_path / f"{SINGLE}.index.json"
    attempt(path, fresh().state_dict(), json.dumps(document).encode())


@pytest.mark.parametrize("remote", [True, False])
def test_a_compressed_archive_is_refused(tmp_path: Path, remote: bool) -> None:
    """A few kB that inflate to GBs; torch.save does not compress."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save(fresh().state_dict(), plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info), zipfile.ZIP_DEFLATED)
    place = str(packed)
    if remote:
        place = "memory://hostile-weights/packed.pt"
        fsspec.filesystem("memory").pipe(place, packed.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        load_model(fresh(), place)


def test_an_expanded_tensor_cannot_fill_the_memory(tmp_path: Path) -> None:
    torch.save({"mask": torch.zeros(1).expand(512, 8), "w": torch.ones(2)}, tmp_path / "a.pt")
    assert load_model_state(tmp_path / "a.pt")["mask"].shape == (512, 8)
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "b.pt")
    with pytest.raises(CorruptCheckpointError, match="expanded"):
        load_model_state(tmp_path / "b.pt")
