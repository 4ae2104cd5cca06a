"""Headers, shapes and JSON made to do harm: refused, in a process whose memory is limited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faultkit import victims as do
from faultkit.damage import admit, edit_manifest
from faultkit.forking import ForkServer

from checkpoint_io import read_manifest, save

NUMEL = 2000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    do.save_step(str(tmp_path / "c"), 5, numel=NUMEL)
    return tmp_path / "c"


def header(document: str | bytes, data: int, length: int | None = None) -> bytes:
    """Build a safetensors file by hand."""
    text = document.encode() if isinstance(document, str) else document
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + bytes(data)


def tensor(begin: int, end: int, shape: list[int] | None = None) -> str:
    shape = [(end - begin) // 4] if shape is None else shape
    return json.dumps({"dtype": "F32", "shape": shape, "data_offsets": [begin, end]})


HEADERS: dict[str, bytes] = {
    "length_of_2_63": header("{}", 8, 2**63),
    "length_of_2_64": header("{}", 8, 2**64 - 1),
    "length_over_the_limit": header("{}", 8, 100_000_001),
    "length_past_the_end": header("{}", 8, 1000),
    "no_length": b"\1\2\3",
    "overlap": header(f'{{"a":{tensor(0, 8)},"b":{tensor(4, 12)}}}', 12),
    "hole": header(f'{{"a":{tensor(0, 8)},"b":{tensor(12, 16)}}}', 16),
    "hole_at_the_start": header(f'{{"a":{tensor(4, 8)}}}', 8),
    "past_the_end": header(f'{{"a":{tensor(0, 80)}}}', 8),
    "backwards": header(f'{{"a":{tensor(8, 0, [2])}}}', 8),
    "negative": header(f'{{"a":{tensor(-8, 0, [2])}}}', 8),
    "absurd_shape": header(f'{{"a":{tensor(0, 8, [2**62, 2**62])}}}', 8),
    "absurd_empty_shape": header(f'{{"a":{tensor(0, 0, [2**62, 0, 2**62])}}}', 0),
    "thousand_dimensions": header(f'{{"a":{tensor(0, 4, [1] * 1000)}}}', 4),
    "duplicate_key": header(f'{{"a":{tensor(0, 4)},"a":{tensor(0, 4)}}}', 4),
    "deep": header('{"a":' * 100_000 + "1" + "}" * 100_000, 0),
    "deep_lists": header("[" * 500_000, 0),
    "huge_number": header('{"a":' + "9" * 200_000 + "}", 0),
    "not_json": header("\xff\xfe", 0),
    "nan": header('{"a":NaN}', 0),
}


def in_little_memory(
    victims: ForkServer, action: Callable[..., Any], *args: Any
) -> tuple[str, str]:
    """Run something in a process that may grow by 1 GB; return its outcome."""
    outcome: tuple[str, str] = victims.run(action, *args)
    return outcome


def refused(outcome: tuple[str, str]) -> None:
    assert "CheckpointError" in outcome[0], f"not refused, or not in our words: {outcome}"


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_header(victims: ForkServer, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(HEADERS[name])
    refused(in_little_memory(victims, do.load_weights_in_little_memory, str(tmp_path / "model")))
    # in a checkpoint the manifest counts, which makes the file's own header a second opinion
    place = tmp_path / "c"
    do.save_step(str(place), 5, numel=NUMEL)
    entry = next(entry for entry in read_manifest(place).files if entry.kind == "tensors")
    good = (place / entry.name).read_bytes()
    bad = HEADERS[name][: len(good)]
    admit(place, entry.name, bad + good[len(bad) :])
    refused(in_little_memory(victims, do.load_in_little_memory, str(place)))


OBJECTS: dict[str, bytes] = {
    "deep_lists": b'{"state":{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
    "deep_dicts": b'{"state":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deep_but_parsable": b'{"state":{"x":' + b"[" * 800 + b"]" * 800 + b"}}",
    "duplicate_key": b'{"state":{"x":1,"x":2}}',
    "duplicate_state": b'{"state":{"x":1},"state":{"x":2}}',
    "huge_number": b'{"state":{"x":' + b"9" * 200_000 + b"}}",
    "nan": b'{"state":{"x":NaN}}',
    "two_documents": b'{"state":{}}{"state":{}}',
    "latin_1": '{"state":{"x":"ä"}}'.encode("latin-1"),
    "no_state": b'{"stat":{}}',
    "list": b"[]",
    "nothing": b"",
    "zeros": bytes(1000),
    "dict_tag_deep": b'{"state":{"x":' + b'{"$tuple":[' * 5000 + b"]}" * 5000 + b"}}",
    "tensor_of_others": b'{"state":{"x":{"$tensor":"ranks/7/x"}}}',
    "ndarray_of_half": b'{"state":{"x":{"$ndarray":"model/half"}}}',
}


@pytest.mark.parametrize("name", OBJECTS)
def test_hostile_objects_file(victims: ForkServer, place: Path, name: str) -> None:
    admit(place, read_manifest(place).shared_objects, OBJECTS[name])
    refused(in_little_memory(victims, do.load_in_little_memory, str(place)))


def test_manifest_that_promises_too_much(victims: ForkServer, tmp_path: Path) -> None:
    """A tensor of 64 GB in a file that does not hold it: refused before memory is set aside."""
    save(tmp_path, {"w": torch.zeros(2000)})
    end = 4096 + 2**36

    def promise(document: dict[str, Any]) -> None:
        assert document["tensors"]["w"][:2] == ["F32", [2000]]
        document["tensors"]["w"][1:] = [[2**34], [0, 4096, end, "0" * 16 * 2**16]]
        document["files"][0]["size"] = end

    edit_manifest(tmp_path, promise)
    assert read_manifest(tmp_path).tensors["w"].shape == (2**34,)
    refused(in_little_memory(victims, do.load_in_little_memory, str(tmp_path)))


def test_memory_limit_bites(victims: ForkServer) -> None:
    """The control: what is truly large does not fit."""
    assert "MemoryError" in in_little_memory(victims, do.allocate_in_little_memory)[0]


def test_honest_checkpoint_fits(victims: ForkServer, place: Path) -> None:
    """The control: in as little memory an honest one loads."""
    outcome = in_little_memory(victims, do.load_in_little_memory, str(place))
    assert outcome == ("ok", "")
