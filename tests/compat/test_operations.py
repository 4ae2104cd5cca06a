"""Helpers over nested structures, and inputs split over processes."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accel_callbacks import (
    Accelerator,
    PartialState,
    Topology,
    gather,
    reduce,
    split_between_processes,
)
from accel_callbacks.compat import operations as ops
from accel_callbacks.distributed import topology as state


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    x: Any
    name: str = "n"


@dataclass(frozen=True)
class Frozen:
    x: Any
    total: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", torch.zeros(2))


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Output(OrderedDict):
    """Like the outputs of transformers: a dict and a dataclass, with attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __init__(self, *args: Any, **entries: Any) -> None:
        super().__init__(*args)
        for key, value in entries.items():
            self[key] = value

    def __reduce__(self) -> Any:
        return (Output, (), None, None, iter(self.items()))


class Encoding(UserDict):
    """Like a tokenizer's encoding: more state than its entries."""

    def __init__(self, data: dict, origin: str) -> None:
        super().__init__(data)
        self.origin = origin


class Items(list):
    """A list with an attribute."""

    label = "none"


class Level(IntEnum):
    LOW = 1


def one() -> torch.Tensor:
    return torch.ones(2)


def items() -> Items:
    made = Items([one()])
    made.label = "kept"
    return made


CONTAINERS = {
    "list": ([one()], lambda d: d[0]),
    "tuple": ((one(), "a"), lambda d: d[0]),
    "named tuple": (Pair(one(), "a"), lambda d: d.left),
    "dict": ({3: one()}, lambda d: d[3]),
    "odd keys": ({(1, "a"): one(), None: "b"}, lambda d: d[1, "a"]),
    "ordered": (OrderedDict(b=one(), a="x"), lambda d: d["b"]),
    "default": (defaultdict(list, x=one()), lambda d: d["x"]),
    "output": (Output(x=one()), lambda d: d.x),
    "encoding": (Encoding({"x": one()}, "file"), lambda d: d["x"]),
    "read-only": (types.MappingProxyType({"x": one()}), lambda d: d["x"]),
    "deque": (deque([one()], maxlen=3), lambda d: d[0]),
    "list class": (items(), lambda d: d[0]),
    "dataclass": (Plain(one()), lambda d: d.x),
    "frozen": (Frozen(one()), lambda d: d.x),
    "slots": (Slotted(one()), lambda d: d.x),
    "torch's": (torch.ones(3, 2).max(0), lambda d: d.values),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_structure_comes_back_as_it_went_in(name):
    data, tensor_of = CONTAINERS[name]
    result = ops.recursively_apply(lambda t: t + 1, data)
    assert type(result) is type(data)
    assert result is not data
    assert torch.equal(tensor_of(result), torch.full((2,), 2.0))
    assert torch.equal(tensor_of(data), one())
    numbers = ops.recursively_apply(len, data, test_type=lambda leaf: isinstance(leaf, str))
    assert type(gather(numbers)) is type(reduce(numbers, "sum")) is type(data)


def test_what_a_container_knows_besides_its_entries_stays():
    double = lambda data: ops.recursively_apply(lambda t: t * 2, data)  # noqa: E731
    assert double(CONTAINERS["default"][0])["new"] == []
    assert list(double(CONTAINERS["ordered"][0])) == ["b", "a"]
    assert double(CONTAINERS["encoding"][0]).origin == "file"
    assert double(CONTAINERS["deque"][0]).maxlen == 3
    assert double(CONTAINERS["list class"][0]).label == "kept"
    output = double(CONTAINERS["output"][0])
    assert output.x is output["x"]
    assert double(CONTAINERS["frozen"][0]).total.tolist() == [0, 0]
    assert double(CONTAINERS["dataclass"][0]).name == "n"


def test_what_is_no_container_stays_the_same_object():
    for leaf in ({one()}, frozenset([1]), "text", None, Level.LOW, torch.Size([2]), Plain):
        assert ops.recursively_apply(lambda t: t, leaf) is leaf


def test_a_container_without_tensors_is_not_copied_where_that_could_cost():
    encoding = Encoding({"x": "text"}, "file")
    assert ops.recursively_apply(lambda t: t, encoding) is encoding


def test_other_types_can_be_chosen_and_refused():
    data = {"a": 1, "b": [2, "x"]}
    found = ops.recursively_apply(lambda n, by: n * by, data, 3, test_type=lambda v: type(v) is int)
    assert found == {"a": 3, "b": [6, "x"]}
    with pytest.raises(TypeError, match=r"\['b'\]\[0\] is a int"):
        ops.recursively_apply(torch.neg, {"b": [2]}, error_on_other_type=True)
    ops.recursively_apply(torch.neg, {"b": [one()], "c": []}, error_on_other_type=True)


def test_kinds_are_told_apart():
    assert ops.is_namedtuple(Pair(1, 2))
    assert not ops.is_namedtuple((1, 2))
    assert not ops.is_namedtuple(Plain(1))
    assert ops.is_torch_tensor(one())
    assert not ops.is_torch_tensor([one()])
    assert type(ops.honor_type(Pair(1, 2), [3, 4])) is Pair
    assert ops.honor_type([1], (x for x in "ab")) == ["a", "b"]


def test_facts_about_a_batch():
    batch = {"name": "a", "scale": torch.tensor(1.0), "x": [torch.ones(4, 2)]}
    assert ops.find_batch_size(batch) == 4
    assert ops.find_batch_size({"z": torch.ones(3), "a": torch.ones(1)}) == 3  # the first one
    assert ops.find_batch_size(["a"]) is None
    assert ops.find_device(batch) == torch.device("cpu")
    assert ops.find_device([torch.ones(1, device="meta")]).type == "meta"
    assert ops.find_device([]) is None
    assert ops.get_shape(batch) == {"name": "a", "scale": [], "x": [[4, 2]]}


def test_a_structure_can_be_described_and_made_again():
    batch = {"x": [torch.ones(4, 2)], "n": torch.tensor(3), "name": "a"}
    described = ops.get_data_structure(batch)
    assert described["n"] == ops.TensorInformation(torch.Size([]), torch.int64)
    made = ops.initialize_tensors(described)
    assert ops.get_data_structure(made) == described
    assert made["name"] == "a"


def test_slices_and_joins():
    halves = [
        ops.slice_tensors({"x": torch.arange(4), "n": "a"}, s) for s in (slice(2), slice(2, 4))
    ]
    assert halves[0]["x"].tolist() == [0, 1]
    joined = ops.concatenate(halves)
    assert joined["x"].tolist() == [0, 1, 2, 3]
    assert joined["n"] == "a"
    with pytest.raises(TypeError, match=r"\['n'\]"):
        ops.concatenate([{**halves[0]}, {**halves[1], "n": "b"}])
    arrays = ops.concatenate([(np.arange(2, dtype="int8"),)] * 2)[0]
    assert (type(arrays), arrays.dtype, arrays.tolist()) == (np.ndarray, "int8", [0, 1, 0, 1])
    assert ops.concatenate([one()[None], one()[None]], dim=1).shape == (1, 4)
    swapped = [{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}]
    assert ops.concatenate(swapped)["b"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="number 1"):
        ops.concatenate([{"a": one()}, {"b": one()}])
    with pytest.raises(ValueError, match="nothing"):
        ops.concatenate([])


def test_precision():
    low = {"h": one().half(), "b": one().bfloat16(), "d": one().double(), "i": torch.tensor(1)}
    high = ops.convert_to_fp32(low)
    assert [str(high[key].dtype)[6:] for key in low] == ["float32", "float32", "float64", "int64"]
    model = torch.nn.Linear(2, 2).bfloat16()
    assert ops.convert_outputs_to_fp32(model)(one().bfloat16()).dtype is torch.float32

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    assert ops.convert_outputs_to_fp32(forward).__name__ == "forward"


@pytest.mark.parametrize(("size", "parts", "padded"), [(3, 4, 4), (5, 2, 6), (6, 4, 8), (8, 4, 8)])
def test_batches_are_filled_up_to_a_multiple(size, parts, padded):
    batch = {"x": torch.ones(size, 2), "other": torch.ones(size + 1)}
    result = ops.pad_input_tensors(batch, size, parts)
    assert result["x"].shape == (padded, 2)
    assert result["x"].sum() == size * 2
    assert result["other"] is batch["other"]
    assert ops.pad_input_tensors(torch.ones(2, size), size, parts, dim=1).shape == (2, padded)


# --- split_between_processes --------------------------------------------------------------


@pytest.fixture
def shares(monkeypatch):
    """What each of some processes gets (without a group: splitting needs none)."""

    def split(inputs: Any, world: int, **options: Any) -> list[Any]:
        found = []
        for rank in range(world):
            topology = Topology(torch.device("cpu"), rank=rank, world_size=world)
            monkeypatch.setattr(state, "_current", topology)
            with split_between_processes(inputs, **options) as share:
                found.append(share)
        return found

    return split


def test_items_are_split_evenly_and_in_order(shares):
    assert shares(list("abcde"), 2) == [list("abc"), list("de")]
    assert shares(tuple("abcd"), 3) == [("a", "b"), ("c",), ("d",)]
    assert [share.tolist() for share in shares(torch.arange(5), 2)] == [[0, 1, 2], [3, 4]]
    assert [share.tolist() for share in shares(np.arange(3), 2)] == [[0, 1], [2]]
    assert shares(range(3), 2) == [[0, 1], [2]]


def test_padding_repeats_the_last_item(shares):
    assert shares(list("abcde"), 4, apply_padding=True) == [
        ["a", "b"], ["c", "e"], ["d", "e"], ["e", "e"],
    ]  # fmt: skip
    rows = shares(torch.arange(3)[:, None], 2, apply_padding=True)
    assert [share[:, 0].tolist() for share in rows] == [[0, 1], [2, 2]]
    assert shares([1, 2], 2, apply_padding=True) == [[1], [2]]
    assert shares(["a"], 3, apply_padding=True) == [["a"]] * 3


def test_fewer_items_than_processes_leave_the_last_with_none(shares):
    assert shares(["a"], 3) == [["a"], [], []]
    last = shares(torch.ones(1, 2, dtype=torch.bfloat16), 2)[1]
    assert (last.shape, last.dtype) == ((0, 2), torch.bfloat16)
    assert shares(np.ones((1, 2), np.float16), 2)[1].dtype == np.float16
    assert shares((), 2) == [(), ()]
    assert shares([], 2, apply_padding=True) == [[], []]


def test_values_of_mappings_are_split_alike(shares):
    inputs = {"id": [1, 2, 3], "x": torch.arange(3), "more": {"n": (4, 5, 6)}}
    first, second = shares(inputs, 2)
    assert (first["id"], first["x"].tolist(), first["more"]) == ([1, 2], [0, 1], {"n": (4, 5)})
    assert (second["id"], second["x"].tolist(), second["more"]) == ([3], [2], {"n": (6,)})
    encoding = shares(Encoding({"ids": [[1], [2]]}, "file"), 2)[1]
    assert (type(encoding), encoding.origin, encoding["ids"]) == (Encoding, "file", [[2]])
    assert shares({}, 2) == [{}, {}]
    with pytest.raises(ValueError, match=r"same length.*'b': 2"):
        shares({"a": [1], "b": [1, 2]}, 2)


def test_inputs_are_never_changed(shares):
    nested = {"a": [[1], [2], [3]]}
    padded = shares(nested, 2, apply_padding=True)
    padded[1]["a"].append("mine")
    assert nested == {"a": [[1], [2], [3]]}
    tensor = torch.arange(3)
    shares(tensor, 1)[0].add_(1)
    assert tensor.tolist() == [0, 1, 2]


def test_datasets_are_split(shares):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    first, second = shares(dataset, 2, apply_padding=True)
    assert (first["x"][:], second["x"][:]) == ([1, 2], [3, 3])
    assert type(second) is datasets.Dataset
    assert len(shares(dataset.select([0]), 2)[1]) == 0


@pytest.mark.parametrize("inputs", ["text", b"bytes", 3, {1, 2}, torch.tensor(1.0), {"a": "text"}])
def test_what_cannot_be_split_is_an_error(inputs):
    with (
        pytest.raises(TypeError, match=r"cannot be split.*pass a list"),
        split_between_processes(inputs),
    ):
        pass


def test_splitting_is_a_method_too():
    for handle in (PartialState(cpu=True), Accelerator(cpu=True)):
        with handle.split_between_processes({"a": [1, 2]}, apply_padding=True) as share:
            assert share == {"a": [1, 2]}


def test_an_exception_in_the_block_is_the_users():
    with pytest.raises(KeyError), split_between_processes([1]):
        raise KeyError("x")
