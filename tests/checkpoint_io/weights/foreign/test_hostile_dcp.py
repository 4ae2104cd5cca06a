"""Metadata of `torch.distributed.checkpoint` that would take for ever, or all of the memory."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from checkpoint_io import CorruptCheckpointError, load_model_state
from checkpoint_io.storage import open_store
from checkpoint_io.weights import DcpSource, DcpTensor
from checkpoint_io.weights.foreign.inert_pickle import read_inert

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

DAG = b")" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


@pytest.mark.parametrize(
    "key",
    [DAG, b")" + b"\x85" * 300_000, b"\x8a\x09" + b"\x01" * 9],
    ids=["a value 2**60 times", "too deep for the stack", "a number"],
)
def test_a_key_that_cannot_be_hashed_is_not(key: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="a key is neither text nor an object"):
        read_inert(b"\x80\x04}" + key + b"K\x01s.", "x")


@pytest.mark.parametrize(
    "document",
    [
        b"\x80\x04(" + DAG + b"K\x01d.",  # DICT
        b"\x80\x04(" + DAG + b"\x91.",  # FROZENSET
        b"\x80\x04\x8f(" + DAG + b"\x90.",  # ADDITEMS
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",  # BYTEARRAY8
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
    ],
)
def test_what_torch_never_writes_is_refused_at_once(document: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be read as the metadata"):
        read_inert(document, "x")


def test_nothing_that_a_pickle_names_is_imported_or_called() -> None:
    call = read_inert(b"cno_such_module\nname\n(K\x01tR}S'a'\nK\x02sb.", "x")
    assert (call.kind, call.args, call.fields) == ("no_such_module.name", (1,), {"a": 2})
    text = read_inert(b"S'a'\n(K\x01tR.", "x")
    assert (text.kind, text.maker) == ("", "a")


def sized(metadata: Metadata, *shape: int, length: int) -> None:
    """Claim that the tensor is one piece of this shape."""
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size(shape)
    origin = torch.Size([0] * len(shape))
    entry.chunks = [ChunkStorageMetadata(origin, entry.size)]
    (place,) = metadata.storage_data.values()
    place.length = length
    metadata.storage_data = {MetadataIndex("w", origin): place}


def of_rank(metadata: Metadata, offsets: int, sizes: int) -> None:
    """Claim that the piece of the tensor has other numbers of dimensions."""
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    origin, size = torch.Size([0] * offsets), torch.Size([4, 4, 1][:sizes])
    entry.chunks = [ChunkStorageMetadata(origin, size)]
    (place,) = metadata.storage_data.values()
    metadata.storage_data = {MetadataIndex("w", origin): place}


def repeated(metadata: Metadata, count: int, pieces: int) -> None:
    """Claim that many names have the pieces of one."""
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    if pieces > 1:
        empty = torch.Size((0, 4))
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), empty)
        entry.size, entry.chunks = empty, [chunk] * pieces
    (place,) = metadata.storage_data.values()
    names = [f"w{number}" for number in range(count)]
    metadata.planner_data = None
    metadata.state_dict_metadata = dict.fromkeys(names, entry)
    metadata.storage_data = {MetadataIndex(name, torch.Size((0, 0))): place for name in names}


def nested(metadata: Metadata) -> None:
    value: Any = ()
    for _ in range(60):
        value = (value, value)
    metadata.planner_data = {"w": (value,)}


def of(**fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in fields.items():
            setattr(metadata, name, value)

    return change


HOSTILE: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a product of 2**64": (lambda m: sized(m, 2**32, 2**32, length=2**62), "no tensor is that"),
    "empty, with strides": (lambda m: sized(m, 2**62, 0, 2**62, length=9), "no tensor is that"),
    "a terabyte": (lambda m: sized(m, 2**38, length=2**40), "is cut off, or not of this folder"),
    "names for one piece": (lambda m: repeated(m, 300, 1), "is cut off, or not of this folder"),
    "lists of pieces": (lambda m: repeated(m, 2000, 2000), "names more than is stored"),
    "offsets of more dimensions": (lambda m: of_rank(m, 3, 2), "one reaches outside of it"),
    "offsets of fewer dimensions": (lambda m: of_rank(m, 1, 2), "one reaches outside of it"),
    "sizes of more dimensions": (lambda m: of_rank(m, 2, 3), "one reaches outside of it"),
    "sizes of fewer dimensions": (lambda m: of_rank(m, 2, 1), "one reaches outside of it"),
    "a path 2**60 long": (nested, "is not where its name says"),
    "a deep path": (of(planner_data={"w": ("model",) * 10**5}), "is not where its name says"),
    "another path": (of(planner_data={"w": ("v",)}), "is not where its name says"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_claimed_is_refused_before_it_costs_anything(folder: Path, name: str) -> None:
    change, said = HOSTILE[name]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    with pytest.raises(CorruptCheckpointError, match=said):
        load_model_state(folder)


def test_a_size_that_contains_itself(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    size = b"K\x04K\x04\x86\x94\x85\x94R\x94"  # the arguments of torch.Size, and its call
    at = whole.index(size)
    memo = sum(
        code.name == "MEMOIZE" and place < at for code, _, place in pickletools.genops(whole)
    )
    itself = b"]\x94\x8c\x00\x940R\x94" + b"h%ch%ca0" % (memo, memo + 2)
    assert memo + 2 < 256
    (folder / ".metadata").write_bytes(_unframed(whole.replace(size, itself, 1)))
    with pytest.raises(CorruptCheckpointError, match="its entry of 'w' is not understood"):
        load_model_state(folder)


def _unframed(document: bytes) -> bytes:
    """Leave out the length of the frame, which is another one now."""
    return document[:2] + document[11:] if document[2:3] == b"\x95" else document


# --- a part as a tree -------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[Metadata], None]) -> DcpSource:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return DcpSource(open_store(folder))


def test_a_tree_has_its_values_and_lists(tmp_path: Path) -> None:
    state = {"a": [1, {"b": None}, (2, "x")], "w": {"0.1": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    tree = DcpSource(open_store(tmp_path)).tree()
    assert tree["a"] == [1, {"b": None}, (2, "x")]
    assert tree["w"] == {"0.1": DcpTensor("w.0.1", torch.float32, (2,))}


@pytest.mark.parametrize("path", [("a", []), ("a", {}), ("a", "b", "c")])
def test_a_path_that_leads_nowhere(tmp_path: Path, path: tuple[Any, ...]) -> None:
    dcp.save({"w": torch.ones(1), "a": {"b": 1}}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata: Metadata) -> None:
        metadata.planner_data["a.b"] = path

    with pytest.raises(CorruptCheckpointError):
        rewritten(tmp_path, change).tree()


def test_values_beyond_their_file(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1), "a": 1}, checkpoint_id=tmp_path, no_dist=True)

    def change(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            place.offset += (index.fqn == "a") * 10**15

    with pytest.raises(CorruptCheckpointError):
        rewritten(tmp_path, change).tree()
