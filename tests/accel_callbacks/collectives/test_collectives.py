"""Collectives on one process: the same answers as a group of one would give."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch

from accel_callbacks import (
    Accelerator,
    broadcast,
    broadcast_object,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
)
from accel_callbacks.collectives.nested import is_number, map_leaves
from accel_callbacks.collectives.objects import Call, differences


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


@dataclass
class Box:
    value: torch.Tensor
    label: str | None = None


def test_gather_keeps_every_structure():
    data = {"pair": Pair(torch.tensor([1, 2]), {"n": torch.tensor(3.0)}), "none": None}
    result = gather(data)
    assert type(result["pair"]) is Pair
    assert result["pair"].left.tolist() == [1, 2]
    assert result["pair"].right["n"].tolist() == [3.0]
    assert result["none"] is None
    assert gather(Box(torch.ones(2))).value.tolist() == [1.0, 1.0]
    assert gather([torch.zeros(0, 3)])[0].shape == (0, 3)


def test_leaves_are_visited_as_they_were_put_in_or_by_key_where_ranks_must_agree():
    filled = {"b": 1, "a": [2, {"d": 3, "c": 4}]}
    for by_key, expected in ((False, [1, 2, 3, 4]), (True, [2, 4, 3, 1])):
        seen: list[int] = []
        options = {"by_key": True} if by_key else {}
        copy = map_leaves(
            filled, lambda leaf, to=seen: to.append(leaf) or leaf, is_number, **options
        )
        assert seen == expected
        assert copy == filled
        assert list(copy) == ["b", "a"]


def test_gathered_tensors_need_no_gradients():
    assert not gather(torch.ones(2, requires_grad=True) * 2).requires_grad
    assert not reduce(torch.ones(2, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64],
)
def test_gather_and_broadcast_keep_the_type(dtype):
    tensor = torch.tensor([0, 1]).to(dtype)
    assert gather(tensor).dtype is dtype
    assert broadcast(tensor).dtype is dtype
    assert broadcast(tensor).tolist() == tensor.tolist()


@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min"])
def test_reduce_of_one_process_is_the_value(reduction):
    value = torch.tensor([1.5, -2.0])
    assert torch.equal(reduce(value, reduction), value)
    assert torch.equal(reduce(value, reduction, scale=2.0), value * 2)
    assert reduce(value, reduction) is not value


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_whole_numbers_stay_whole_and_exact(reduction):
    count = torch.tensor([2**24 + 1, 2**53 + 1])
    result = reduce({"tokens": count}, reduction)["tokens"]
    assert result.dtype is torch.int64
    assert torch.equal(result, count)


def test_the_mean_of_whole_numbers_is_a_float_on_one_process_too():
    assert reduce(torch.tensor([1, 2]), "mean").dtype is torch.float32


def test_a_weight_of_one_process_changes_nothing():
    assert reduce(torch.tensor(3.0), "mean", weight=7).item() == 3.0
    assert reduce(torch.tensor(3.0), "mean", weight=torch.tensor(2)).item() == 3.0
    with pytest.raises(ValueError, match="weight="):
        reduce(torch.tensor(3.0), "sum", weight=2)
    with pytest.raises(ValueError, match=r"'meen' is unknown.*Did you mean 'mean'"):
        reduce(torch.tensor(3.0), "meen")


def test_no_reduction_gives_what_this_process_has():
    data = {"x": torch.tensor([1, 2]), "n": 3}
    result = reduce(data, "none")
    assert (result["x"].tolist(), result["n"]) == ([1, 2], 3)
    assert result["x"] is not data["x"]
    assert reduce(data, "none", scale=2)["n"] == 6


def test_numbers_are_reduced_and_sent_as_numbers():
    assert reduce([3, 2.5, True, 1j], "sum") == [3, 2.5, 1, 1j]
    assert reduce({"n": 2**70}, "max") == {"n": 2**70}
    means = reduce((3, True), "mean")
    assert means == (3.0, 1.0)
    assert [type(mean) for mean in means] == [float, float]
    assert type(reduce(3, "sum")) is int
    assert reduce(3, "sum", scale=0.5) == 1.5
    assert reduce(3.0, weight=0) == 3.0
    assert broadcast([1, 0.5, None]) == [1, 0.5, None]
    gathered = gather((1, 0.1, True))
    assert [number.tolist() for number in gathered] == [[1], [0.1], [True]]
    assert [number.dtype for number in gathered] == [torch.int64, torch.float64, torch.bool]


ARRAYS = {
    "int64": np.arange(3),
    "float64": np.array([0.1, np.nan, 2]),
    "float16": np.ones((2, 2), "float16"),
    "bool": np.array([True, False]),
    "uint16": np.arange(6, dtype="uint16").reshape(2, 3).T,
    "complex64": np.array([1j], dtype="complex64"),
    "reversed": np.arange(3)[::-1],
    "other bytes": np.array([1.5], dtype=">f8"),
    "no dimensions": np.array(3),
    "empty": np.zeros((0, 2)),
    "scalar": np.float32(2.5),
    "a scalar that is a float": np.float64(0.1),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_combined_as_tensors_and_stay_arrays(kind):
    array = ARRAYS[kind]
    expected = gather(torch.from_numpy(np.array(array, array.dtype.newbyteorder("="))))
    gathered = gather({"x": [array]})["x"][0]
    assert type(gathered) is np.ndarray
    assert gathered.dtype.name == array.dtype.name
    np.testing.assert_array_equal(gathered, expected.numpy())
    if kind != "complex64":
        assert reduce(array, "max").dtype.name == array.dtype.name
    for how in (lambda x: reduce(x, "max"), broadcast, pad_across_processes):
        if kind != "complex64":
            result = how(array)
            assert type(result) is type(array)
            np.testing.assert_array_equal(result, array)
    assert reduce(np.array([True, False]), "sum").tolist() == [1, 0]


def test_an_array_that_cannot_be_written_to_is_combined_without_a_warning(recwarn):
    array = np.arange(2)
    array.flags.writeable = False
    result = gather(array)
    result += 1
    assert array.tolist() == [0, 1]
    assert not recwarn


class Color(Enum):
    RED = 1


OTHERS = {
    "str": "a",
    "bytes": b"a",
    "set": {1, 2},
    "object": object(),
    "Color": Color.RED,
    "ndarray of dtype <U1": np.array(["a"]),
    "ndarray of dtype object": np.array([1, None]),
    "MaskedArray": np.ma.masked_array([1, 2], [False, True]),
    "datetime64": np.datetime64("2020-01-01"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("how", [gather, reduce, pad_across_processes, broadcast])
def test_what_cannot_be_combined_is_refused_with_its_place(how, kind):
    way = "broadcast_object" if how is broadcast else "gather_object"
    with pytest.raises(TypeError, match=f"{how.__name__} cannot.* of type {kind}.* to {way}"):
        how(OTHERS[kind])
    with pytest.raises(TypeError, match=r"combine \['x'\]\[1\].left.label of type str"):
        how({"x": [torch.ones(1), Pair(Box(torch.ones(1), "s"), {})]})
    assert how([None, [], {}]) == [None, [], {}]


def test_of_several_that_cannot_be_combined_all_ranks_name_the_same():
    for names in ("ab", "ba"):  # as ranks fill them in
        with pytest.raises(TypeError, match=r"combine \['a'\] of type str"):
            gather(dict.fromkeys(names, "text"))


def test_metrics_name_what_they_cannot_combine():
    accel = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"\['split'\] of type str.*use_gather_object=True"):
        accel.gather_for_metrics({"x": torch.ones(2), "split": "val"})
    with pytest.raises(TypeError, match=r"\['x'\]\[1\] of type str"):
        accel.gather_for_metrics({"x": [torch.ones(2), "val"]})
    assert accel.gather_for_metrics({"split": "val"}) == [{"split": "val"}]
    assert accel.gather_for_metrics({"loss": 1.0}) == [{"loss": 1.0}]
    pair = accel.gather_for_metrics((torch.ones(2), ("a", "b"), [{"c"}], (1, 2)))
    assert pair[1:3] == (["a", "b"], [{"c"}])
    assert [number.tolist() for number in pair[3]] == [[1], [2]]


def test_bools_are_counted():
    flags = torch.tensor([True, False])
    assert reduce(flags, "sum").tolist() == [1, 0]
    assert reduce(flags, "sum").dtype is torch.int64
    assert reduce(flags, "max").dtype is torch.bool
    assert reduce(flags, "mean").tolist() == [1.0, 0.0]


@pytest.mark.parametrize("how", [gather, reduce, broadcast])
def test_sparse_tensors_are_refused_with_the_way_out(how):
    with pytest.raises(TypeError, match=r"\.to_dense\(\)"):
        how([torch.eye(2).to_sparse()])
    with pytest.raises(TypeError, match="to_padded_tensor"):
        how(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))


def test_what_has_no_order_has_no_maximum():
    with pytest.raises(TypeError, match=r"max of torch\.complex64 does not exist"):
        reduce(torch.tensor([1j]), "max")


@pytest.mark.parametrize("how", [broadcast, broadcast_object, broadcast_object_list])
def test_a_process_that_is_not_there_cannot_send(how):
    with pytest.raises(ValueError, match="from_process=1"):
        how([1], from_process=1)
    with pytest.raises(ValueError, match="from_process=-1"):
        how([1], from_process=-1)


def test_a_result_does_not_share_memory_with_the_input():
    tensor = torch.ones(2)
    for result in (reduce(tensor), broadcast(tensor)):
        result += 1
    assert tensor.tolist() == [1.0, 1.0]


def test_padding_alone_changes_nothing():
    tensor = torch.arange(6).reshape(2, 3)
    assert torch.equal(pad_across_processes(tensor, dim=1), tensor)
    assert torch.equal(pad_across_processes(tensor, dim=-1), tensor)
    assert torch.equal(pad_across_processes(tensor, dim=5), tensor)
    assert pad_across_processes({"n": torch.tensor(1)})["n"].item() == 1


def test_objects():
    assert gather_object({"a": 1}) == [{"a": 1}]
    assert gather_object([1, 2]) == [1, 2]
    assert gather_object((1, 2)) == [1, 2]
    assert gather_object("ab") == ["ab"]
    assert broadcast_object({1, 2}) == {1, 2}
    mine = [{"a": 1}, "b"]
    assert broadcast_object_list(mine) is mine
    assert mine == [{"a": 1}, "b"]
    with pytest.raises(TypeError, match="use broadcast_object"):
        broadcast_object_list((1, 2))


def test_the_methods_are_the_functions():
    accel = Accelerator(cpu=True)
    assert accel.gather(torch.tensor(1)).tolist() == [1]
    assert accel.reduce(torch.tensor([1.0]), "mean", weight=3).tolist() == [1.0]
    assert accel.pad_across_processes(torch.ones(2)).tolist() == [1.0, 1.0]
    assert accel.gather_for_metrics(torch.ones(2)).tolist() == [1.0, 1.0]
    assert accel.gather_for_metrics("text") == ["text"]
    assert accel.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert accel.gather_for_metrics([], use_gather_object=True) == []


class Movable:
    def to(self, device: object) -> str:
        return f"on {device}"


def test_send_to_device_keeps_structures():
    box = Box(torch.ones(1), "x")
    data = [Pair(torch.ones(1), {"b": [torch.ones(1)]}), (1, "x", Movable()), box]
    moved = send_to_device(data, "meta")
    assert type(moved[0]) is Pair
    assert moved[0].left.device.type == "meta"
    assert moved[0].right["b"][0].device.type == "meta"
    assert moved[1] == (1, "x", "on meta")
    assert moved[2].value.device.type == "meta"
    assert moved[2].label == "x"
    assert data[2].value.device.type == "cpu"


def test_what_can_move_itself_is_moved_wherever_it_is():
    assert send_to_device(Pair(torch.ones(1), {"b": Movable()}), "cpu").right["b"] == "on cpu"


def test_a_table_of_differences_joins_those_who_do_the_same():
    calls = [Call("gather()", ("x: a", "y: b"), "train.py:3")] * 6
    calls[1] = calls[4] = Call("reduce()", ("x: a",), "train.py:9")
    assert differences(calls).splitlines() == [
        "processes 1, 4 differ from processes 0, 2-3, 5, so nothing was sent:",
        "  processes 0, 2-3, 5: gather() at train.py:3",
        "      y: b",
        "  processes 1, 4: reduce() at train.py:9",
    ]
