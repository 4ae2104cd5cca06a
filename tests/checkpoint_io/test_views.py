"""Lazy views: what they give, and how little they read for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_io import (
    CheckpointReader,
    CorruptCheckpointError,
    StateMismatchError,
    TensorView,
    open_checkpoint,
    read_manifest,
    save,
)
from checkpoint_io.format.safetensors import DTYPES
from tests.checkpoint_io.handmade import PART, CountingStore, handmade, rows, split, whole

MIB = 1 << 20


def counting(path: Path) -> tuple[CheckpointReader, CountingStore]:
    store = CountingStore(str(path))
    reader = CheckpointReader(store, read_manifest(path))
    return reader, store


# --- what they give ------------------------------------------------------------------------


def index_of(draw: st.DrawFn, length: int) -> int | slice:
    if length and draw(st.booleans()):
        return draw(st.integers(-length, length - 1))
    bound = st.none() | st.integers(-length - 2, length + 2)
    return slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, length + 2)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[Any], Any]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 33, 70]), max_size=3))
    dtype = draw(st.sampled_from([torch.float64, torch.int32, torch.float16, torch.uint8]))
    tensor = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    pieces = [split(n, draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
    boxes: list[Any] = [((), ())]
    for options in pieces:
        boxes = [((*o, low), (*n, length)) for o, n in boxes for low, length in options]
    index: list[Any] = [index_of(draw, n) for n in shape]
    kept = draw(st.integers(0, len(index)))
    if draw(st.booleans()):
        index[kept:] = [Ellipsis]
    return tensor, draw(st.permutations(boxes)), tuple(index[: kept + 1])


@settings(max_examples=150, deadline=None)
@given(cases())
def test_slices_are_those_of_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[torch.Tensor, list[Any], Any]
) -> None:
    tensor, boxes, index = case
    place = handmade(tmp_path_factory.mktemp("c"), {"t": (tensor, boxes)})
    view = open_checkpoint(place)["t"]
    assert torch.equal(view[index], tensor[index])
    assert view[index].shape == tensor[index].shape
    assert torch.equal(view.read(), tensor)
    order = tuple(range(tensor.dim()))[::-1]
    target = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(order)
    assert torch.equal(view.read_into(target), tensor)  # strided


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    data = torch.randint(0, 2 if name == "BOOL" else 256, (40, 48, 8), dtype=torch.uint8)
    tensor = data.view(DTYPES[name])
    view = open_checkpoint(handmade(tmp_path, {"t": (tensor, rows(tensor, 7, 30))}))["t"]
    assert (view.dtype, view.shape, view.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
    for part, same in [(view.read(), tensor), (view[5:33, ::7], tensor[5:33, ::7])]:
        assert torch.equal(part.contiguous().view(torch.uint8), same.contiguous().view(torch.uint8))


def test_scalars_and_empty_ones(tmp_path: Path) -> None:
    save(tmp_path, {"zero": torch.tensor(1234), "none": torch.empty(3, 0, 2)})
    reader = open_checkpoint(tmp_path)
    assert reader["zero"].read() == reader["zero"][()] == reader["zero"][...] == 1234
    assert reader["none"].read().shape == (3, 0, 2)
    assert reader["none"][1].shape == (0, 2)
    assert reader["zero"].read_into(torch.tensor(0)) == 1234


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (3, IndexError),
        (-4, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (None, IndexError),
        (True, IndexError),
        ([0, 1], IndexError),
        (torch.tensor([True, False, True]), IndexError),
        (1.0, IndexError),
        (slice(None, None, -1), ValueError),
        (slice(None, None, 0), ValueError),
    ],
)
def test_what_does_not_index(tmp_path: Path, index: Any, error: type[Exception]) -> None:
    save(tmp_path, {"t": torch.arange(6).reshape(3, 2)})
    with pytest.raises(error):
        open_checkpoint(tmp_path)["t"][index]


def test_a_view_iterates_over_rows(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.arange(6).reshape(3, 2)})
    assert [row.tolist() for row in open_checkpoint(tmp_path)["t"]] == [[0, 1], [2, 3], [4, 5]]


# --- how little they read ------------------------------------------------------------------


def test_one_tensor_of_many_reads_little_more_than_its_bytes(tmp_path: Path) -> None:
    big = torch.randn(3 * MIB + 77)
    others = {f"layer.{n}.weight": torch.randn(300, 300) for n in range(60)}
    save(tmp_path, {"a": others, "big": big, "z": dict(others)})
    reader, store = counting(tmp_path)
    extra = store.nbytes + (tmp_path / "manifest.json").stat().st_size
    store.forget()
    assert torch.equal(reader["big"].read(), big)
    assert store.nbytes == big.nbytes
    assert store.requests == 1
    assert store.nbytes + extra < 1.01 * big.nbytes


def test_a_slice_reads_only_the_parts_that_hold_it(tmp_path: Path) -> None:
    tensor = torch.randn(64, 256, 256)  # 64 rows of 256 KiB
    save(tmp_path, {"t": tensor})
    reader, store = counting(tmp_path)
    for index, parts in [
        (5, 1),
        (slice(4, 8), 1),
        (slice(3, 5), 2),
        ((slice(None, None, 16), 0), 4),
        ((7, 3, 9), 1),
        (slice(0, 0), 0),
    ]:
        store.forget()
        assert torch.equal(reader["t"][index], tensor[index])
        assert store.nbytes == parts * MIB, index


def test_columns_of_wide_rows_read_only_their_parts(tmp_path: Path) -> None:
    tensor = torch.randn(5, MIB)  # 4 parts a row
    save(tmp_path, {"t": tensor})
    reader, store = counting(tmp_path)
    store.forget()
    assert torch.equal(reader["t"][:, 300_000:300_010], tensor[:, 300_000:300_010])
    assert store.nbytes == 5 * MIB


def test_many_small_tensors_are_read_in_few_spans(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((50,), n) for n in range(5000)}
    save(tmp_path, state)
    reader, store = counting(tmp_path)
    store.forget()
    loaded = reader.load_tree(reader.state)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert store.requests == 1


def test_far_apart_tensors_are_not_read_through(tmp_path: Path) -> None:
    state = {f"t{n}": torch.randn(100_000) for n in range(9)}
    save(tmp_path, state)
    reader, store = counting(tmp_path)
    store.forget()
    reader.load_tree([reader["t0"], reader["t8"]])
    assert store.requests == 2
    assert store.nbytes == 2 * 400_000


def test_spans_are_at_most_16_mib(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.randn(10 * MIB), "u": torch.randn(MIB + 3)})
    reader, store = counting(tmp_path)
    store.forget()
    reader.load_tree(reader.state)
    assert max(span.end - span.begin for span in store.spans) <= 16 * MIB
    assert store.requests == 3


# --- the reader ----------------------------------------------------------------------------


def test_trees_hold_views_and_load_as_they_were(tmp_path: Path) -> None:
    weight, array = torch.randn(3, 3), np.arange(4.0)
    state = {
        "w": weight, "tied": weight, "deep": [({1: torch.ones(2)},), {"x": None}],
        "array": array, "same": array, "step": 3,
    }  # fmt: skip
    save(tmp_path, state, local_state={"rng": torch.arange(5)})
    reader = open_checkpoint(tmp_path)
    assert isinstance(reader.state["w"], TensorView)
    names = ["array", "deep/0/0/1", "ranks/0/rng", "same", "tied", "w"]
    assert sorted(reader.keys()) == names
    loaded = reader.load_tree({"state": reader.state, "own": reader.local_state})
    assert loaded["state"]["w"] is loaded["state"]["tied"]
    assert torch.equal(loaded["state"]["w"], weight)
    assert torch.equal(loaded["state"]["deep"][0][0][1], torch.ones(2))
    assert isinstance(loaded["state"]["array"], np.ndarray)
    assert np.array_equal(loaded["state"]["same"], array)
    assert loaded["state"]["step"] == 3
    assert torch.equal(loaded["own"]["rng"], torch.arange(5))


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"layer1.weight": torch.ones(1)}})
    reader = open_checkpoint(tmp_path)
    assert "model/layer1.weight" in reader
    with pytest.raises(KeyError, match=r"model/layer1\.weight"):
        reader["model/layer1.wieght"]


def test_read_fills_all_targets_in_one_go(tmp_path: Path) -> None:
    state = {"a": torch.randn(7, 5), "b": torch.randn(300, 300), "c": torch.arange(3)}
    save(tmp_path, state)
    reader, store = counting(tmp_path)
    store.forget()
    targets = {key: torch.zeros_like(value) for key, value in state.items()}
    reader.read([(reader[key], target) for key, target in targets.items()])
    assert all(torch.equal(targets[key], state[key]) for key in state)
    assert store.requests == 1


def test_views_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", {"t": torch.ones(2)})
    save(tmp_path / "b", {"t": torch.zeros(2)})
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    with pytest.raises(ValueError, match="another checkpoint"):
        a.read([(b["t"], torch.zeros(2))])


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.zeros(3, 2), r"\(2, 3\).*\(3, 2\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "float32.*float64.*cast=True"),
        (torch.zeros(2, 1).expand(2, 3), "expanded"),
        (torch.zeros(2, 3, device="meta"), "meta"),
        (torch.zeros(2, 3).to_sparse(), "layout"),
    ],
)
def test_targets_that_do_not_fit(tmp_path: Path, target: torch.Tensor, text: str) -> None:
    save(tmp_path, {"t": torch.ones(2, 3), "u": torch.ones(1)})
    reader = open_checkpoint(tmp_path)
    fine = torch.zeros(1)
    with pytest.raises(StateMismatchError, match=text):
        reader.read([(reader["u"], fine), (reader["t"], target)])
    assert fine == 0


def test_cast_converts_in_bounded_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(5, 3, 1_000_003)  # more than one stage of 16 MiB
    view = open_checkpoint(handmade(tmp_path, {"t": (tensor, whole(tensor))}, part=MIB))["t"]
    target = torch.zeros(5, 3, 1_000_003, dtype=torch.float64)
    assert torch.equal(view.read_into(target, cast=True), tensor.double())


def test_targets_with_odd_memory(tmp_path: Path) -> None:
    tensor = torch.randn(40, 30, dtype=torch.complex64)
    save(tmp_path, {"t": tensor})
    view = open_checkpoint(tmp_path)["t"]
    base = torch.zeros(100, 90, dtype=torch.complex64)
    assert torch.equal(view.read_into(base[10:90:2, 3:63:2]), tensor)
    assert base.count_nonzero() == tensor.count_nonzero()
    assert torch.equal(view.read_into(torch.zeros(40, 30, dtype=torch.complex64).conj()), tensor)
    parameter = torch.nn.Parameter(torch.zeros(40, 30, dtype=torch.complex64))
    assert torch.equal(view.read_into(parameter), tensor)
    assert parameter.requires_grad


def test_autograd_notices_the_change(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(3)})
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight * weight).sum()
    open_checkpoint(tmp_path)["t"].read_into(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_replaced_checkpoint_says_so(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(3)})
    reader = open_checkpoint(tmp_path)
    assert not reader.replaced()
    save(tmp_path, {"t": torch.zeros(3)})
    assert reader.replaced()
    with pytest.raises(CorruptCheckpointError, match=r"in tensor t.*replaced.*open it again"):
        reader["t"].read()
    target = torch.full((3,), 7.0)
    with pytest.raises(CorruptCheckpointError, match="open it again"):
        reader["t"].read_into(target)
    assert (target == 7).all()


def test_damage_outside_of_a_slice_does_not_matter(tmp_path: Path) -> None:
    tensor = torch.arange(5 * PART, dtype=torch.uint8)
    place = handmade(tmp_path, {"t": (tensor, whole(tensor))})
    file = next(place.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    view = open_checkpoint(place)["t"]
    assert torch.equal(view[: 4 * PART], tensor[: 4 * PART])
    with pytest.raises(CorruptCheckpointError, match="in tensor t"):
        view[4 * PART :]
