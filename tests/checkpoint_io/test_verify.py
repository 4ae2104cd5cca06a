"""What a checkpoint is checked for before and while it is read."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointReader,
    Chunk,
    CorruptCheckpointError,
    TensorEntry,
    TornLoadError,
    load,
    open_checkpoint,
    read_manifest,
    save,
    verify,
)
from checkpoint_io.format.manifest import seal
from checkpoint_io.loader.source import wants_for
from tests.checkpoint_io.handmade import PART, CountingStore, handmade, rows, tensor_file, whole

Flip = Callable[[Path, int], None]
State = dict[str, torch.Tensor]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    a, b = torch.randn(100, 50), torch.randn(30)
    return handmade(tmp_path / "c", {"a": (a, rows(a, 33)), "b": (b, whole(b))})


def tensors_of(place: Path) -> Path:
    return next(place.glob("*.safetensors"))


CHECKS: dict[str, Callable[[Path], Any]] = {
    "verify": verify,
    "load": load,
    "full": lambda place: load(place, verify="full"),
    "check": lambda place: open_checkpoint(place).check(full=True),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_sound_ones_pass(place: Path, check: Callable[[Path], Any]) -> None:
    check(place)
    open_checkpoint(place).check()
    verify(place, full=False)


def test_a_manifest_that_an_editor_has_laid_out_anew_is_refused(place: Path) -> None:
    path = place / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    with pytest.raises(CorruptCheckpointError, match="digest does not match"):
        load(place)


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_every_flipped_bit_is_found(
    place: Path, flip_bit: Flip, check: Callable[[Path], Any]
) -> None:
    generator = random.Random(0)
    for file in sorted(place.iterdir()):
        for at in generator.sample(range(file.stat().st_size), 12):
            flip_bit(file, at)
            with pytest.raises(CorruptCheckpointError, match=file.name):
                check(place)
            flip_bit(file, at)
    check(place)


def test_the_tensor_is_named(place: Path, flip_bit: Flip) -> None:
    file = tensors_of(place)
    flip_bit(file, file.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="in tensor b;"):
        load(place)
    flip_bit(file, file.stat().st_size - 1)
    flip_bit(file, read_manifest(place).tensors["a"].chunks[1].begin + PART)
    with pytest.raises(CorruptCheckpointError, match="in tensor a"):
        verify(place)


@pytest.mark.parametrize("change", ["truncate", "grow", "empty", "remove", "link", "folder"])
@pytest.mark.parametrize("kind", ["tensors", "objects"])
def test_files_that_are_not_what_was_saved(
    place: Path, tmp_path: Path, change: str, kind: str
) -> None:
    file = next(place.glob(f"{kind}-*"))
    data = file.read_bytes()
    file.unlink()
    if change == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif change == "folder":
        file.mkdir()
    elif change != "remove":
        file.write_bytes({"truncate": data[:-1], "grow": data + b"x", "empty": b""}[change])
    for check in (*CHECKS.values(), lambda place: verify(place, full=False)):
        with pytest.raises(CorruptCheckpointError, match=file.name) as caught:
            check(place)
        if kind == "tensors" and change in ("truncate", "grow", "empty", "remove"):
            assert "in tensors a, b" in str(caught.value)


# --- headers that contradict the manifest --------------------------------------------------


def other_header(change: Callable[[dict[str, Any]], Any]) -> bytes:
    tensors = {"w": torch.arange(64.0), "v": torch.arange(32.0)}
    head = tensor_file({key: (value, whole(value)) for key, value in tensors.items()})[0]
    document = json.loads(head[8:])
    change(document)
    text = json.dumps(document).encode().ljust(len(head) - 8)
    return len(text).to_bytes(8, "little") + text


def swapped(header: dict[str, Any]) -> None:
    header["w"]["data_offsets"], header["v"]["data_offsets"] = [128, 384], [0, 128]


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda h: h["w"].update(shape=[32, 2]),
    "dtype": lambda h: h["w"].update(dtype="I32"),
    "order": swapped,
    "name": lambda h: h.update(x=h.pop("w")),
    "one_less": lambda h: h.pop("v"),
    "one_more": lambda h: h.update(z={"dtype": "F32", "shape": [0], "data_offsets": [384, 384]}),
    "names_exchanged": lambda h: h.update(
        w={**h["w"], "shape": [64]}, v={**h["w"]}
    ),
    "not_json": lambda h: h.update(w=[1]),
    "hole": lambda h: h["v"].update(data_offsets=[260, 388]),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_contradicts_the_manifest(tmp_path: Path, name: str) -> None:
    tensors = {"w": torch.arange(64.0), "v": torch.arange(32.0)}
    wholes = {key: (value, whole(value)) for key, value in tensors.items()}
    place = handmade(tmp_path, wholes, head=other_header(HEADERS[name]))
    target = torch.zeros(64)
    for check in (
        verify,
        lambda place: verify(place, full=False),
        lambda place: load(place, into={"w": target, "v": None}),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"tensors-.*header|tensors-.*overlap"):
            check(place)
    assert not target.any()


def test_other_spellings_of_the_same_header_are_fine(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(64.0), "v": torch.arange(32.0)}
    wholes = {key: (value, whole(value)) for key, value in tensors.items()}

    def respell(header: dict[str, Any]) -> None:
        header["__metadata__"]["note"] = "} in text"
        header["w"] = header.pop("w")

    place = handmade(tmp_path, wholes, head=other_header(respell))
    verify(place)
    assert torch.equal(load(place).state["v"], tensors["v"])


def test_the_header_that_is_written_needs_no_parsing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the slow way was taken")

    monkeypatch.setattr("checkpoint_io.loader.verify.parse_header", refuse)
    state = {"ä/~": torch.ones(3), "e": torch.empty(0, 2), "h": torch.ones(2).half()}
    save(tmp_path, {**state, "s": torch.tensor(1)}, metadata={"run_id": 'r"1'})
    verify(tmp_path, full=False)


# --- memory --------------------------------------------------------------------------------


def edit(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((place / "manifest.json").read_bytes())
    change(document)
    (place / "manifest.json").write_bytes(seal(document))


def objects_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in document["files"] if f["kind"] == "objects")
    return found


def test_a_claim_without_the_bytes_costs_no_memory(place: Path) -> None:
    """Sizes are compared before memory is set aside for what a file may not hold."""
    huge = 1 << 40

    def claim(document: dict[str, Any]) -> None:
        entry = document["files"][0]
        sums = "0" * 16 * (huge // (256 << 20))
        document["checksum"]["part_size"] = 256 << 20
        start = entry["covered"]
        document["tensors"] = {
            key: ["U8", [huge], [0, start + n * huge, start + (n + 1) * huge, sums]]
            for n, key in enumerate("ab")
        }
        entry["size"] = start + 2 * huge

    edit(place, claim)
    tracemalloc.start()
    for attempt in (load, verify, lambda place: load(place, verify="sizes")):
        with pytest.raises(CorruptCheckpointError, match=r"tensors-.*were saved"):
            attempt(place)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_huge_json_is_refused_unread(place: Path) -> None:
    size = 600 << 20

    def claim(document: dict[str, Any]) -> None:
        document["checksum"]["part_size"] = 256 << 20
        entry = objects_of(document)
        entry.update(size=size, covered=size, checksums=["0" * 16] * 3)
        document["files"][0]["checksums"] = document["files"][0]["checksums"][:1]
        for row in (row for entry in document["tensors"].values() for row in entry[2:]):
            row[3] = row[3][:16]

    edit(place, claim)
    with next(place.glob("objects-*")).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CorruptCheckpointError, match="of JSON are refused"):
        load(place)


@pytest.mark.parametrize("size", [1, -1])
def test_a_file_that_changes_after_the_check(tmp_path: Path, size: int) -> None:
    """The check of the sizes and the reads are two moments."""
    state = {"a": torch.ones(5 << 20), "b": torch.ones(100)}
    save(tmp_path, state)

    class Changing(CountingStore):
        def fetch(self, spans: Any, deliver: Any) -> None:
            file = tensors_of(tmp_path)
            with file.open("r+b") as handle:
                handle.truncate(file.stat().st_size + size)
            super().fetch(spans, deliver)

    manifest = read_manifest(tmp_path)
    reader = CheckpointReader(CountingStore(str(tmp_path)), manifest)
    targets = {key: torch.zeros_like(value) for key, value in state.items()}
    reader.check()
    reader.source.store = Changing(str(tmp_path))
    pairs = [(reader[key], target) for key, target in targets.items()]
    if size > 0:  # what is added belongs to no tensor
        reader.read(pairs)
        assert all(torch.equal(targets[key], state[key]) for key in state)
        return
    with pytest.raises(CorruptCheckpointError, match="tensors-") as caught:
        reader.read(pairs)
    assert isinstance(caught.value, TornLoadError) == any(bool(t.any()) for t in targets.values())


# --- stores that do not keep their word ----------------------------------------------------


class Careless(CountingStore):
    """Delivers too little, twice, or not at all."""

    kind = ""

    def fetch(self, spans: Any, deliver: Any) -> None:
        def wrong(index: int, data: memoryview) -> None:  # type: ignore[type-arg]
            if self.kind == "short":
                data = data[:-1]
            if self.kind != "never":
                deliver(index, data)
            if self.kind == "twice":
                deliver(index, data)

        super().fetch(spans, wrong)


@pytest.mark.parametrize(
    ("kind", "text"), [("short", "bytes came for"), ("twice", "twice"), ("never", "delivered")]
)
def test_a_store_that_delivers_wrongly(place: Path, kind: str, text: str) -> None:
    reader = open_checkpoint(place)
    reader.source.store = Careless(str(place))
    reader.source.store.kind = kind
    with pytest.raises(Exception, match=text):
        reader["a"].read()


def test_a_plan_that_leaves_a_hole_is_refused() -> None:
    """The parser lets no such manifest pass; the plan is checked all the same."""
    chunk = Chunk(0, (0, 0), (2, 3), 4096, 4120, ("0" * 16,))
    entry = TensorEntry("F32", (4, 3), (chunk,))
    with pytest.raises(CorruptCheckpointError, match="fill 6 of the 12"):
        list(wants_for(entry, "t", torch.zeros(3, 4).t(), PART))


def test_reads_of_a_checkpoint_with_local_files_of_others(tmp_path: Path) -> None:
    """A rank checks all files, and loads without those of other ranks."""
    save(tmp_path, {"a": torch.ones(3)}, local_state={"x": torch.ones(4)})
    manifest = read_manifest(tmp_path)
    own = manifest.tensors["ranks/0/x"].chunks[0].file
    (tmp_path / manifest.files[own].name).unlink()
    assert load(tmp_path, rank=1).state["a"].all()
    with pytest.raises(CorruptCheckpointError, match="ranks/0/x"):
        load(tmp_path, rank=0)
    reader = open_checkpoint(tmp_path)
    reader.check(keys=["a"])
    with pytest.raises(CorruptCheckpointError, match="ranks/0/x"):
        reader.check()


def test_parts_that_would_split_numbers_are_refused(place: Path) -> None:
    def claim(document: dict[str, Any]) -> None:
        document["checksum"]["part_size"] = (256 << 20) - 4

    edit(place, claim)
    with pytest.raises(CorruptCheckpointError, match="split numbers"):
        read_manifest(place)
