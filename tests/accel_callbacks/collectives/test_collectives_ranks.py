"""Collectives on two real processes."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import types
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accel_callbacks import (
    Accelerator,
    PartialState,
    broadcast,
    broadcast_object,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict


@dataclass(frozen=True)
class Stats:
    loss: torch.Tensor
    count: int
    more: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "more", [torch.tensor([self.count])])


def rank() -> int:
    return PartialState(cpu=True).process_index


def gathers() -> list:
    accel = accelerator()
    rank = accel.process_index
    pair = accel.gather(Pair(torch.tensor([rank]), {"x": torch.tensor(float(rank))}))
    return [type(pair).__name__, pair.left.tolist(), pair.right["x"].tolist(), str(accel.device)]


@pytest.mark.first
def test_gather_keeps_the_structure_and_the_rank_order(pool):
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2


def gathers_unevenly() -> list:
    accel = accelerator()
    rank = accel.process_index
    mine = {"x": torch.arange(rank + 1), "y": torch.full((3 * rank, 2), rank), "z": torch.tensor(7)}
    together = accel.gather(mine)
    return [together["x"].tolist(), tuple(together["y"].shape), together["z"].tolist()]


def test_gather_takes_another_size_on_each_process(pool):
    assert pool.run(gathers_unevenly) == [[[0, 0, 1], (3, 2), [7, 7]]] * 2


def moves_a_row_of_a_matrix() -> list:
    accel = accelerator()
    cut = torch.full((1, 8), accel.process_index + 1)[:, 0]  # one number, with a stride of 8
    return [
        accel.gather(cut).tolist(),
        accel.gather_for_metrics(cut).tolist(),
        accel.reduce(cut, "sum").tolist(),
        broadcast(cut, from_process=1).tolist(),
    ]


def test_one_number_cut_from_a_row_is_moved_as_any_other(pool):
    expected = [[1, 2], [1, 2], [3], [2]]
    assert pool.run(moves_a_row_of_a_matrix) == [expected] * 2


def gathers_what_does_not_fit(kind: str, how: str) -> None:
    accel = accelerator()
    other = {
        "shape": torch.ones(2, 3),
        "type": torch.ones(2, dtype=torch.float64),
        "number": [torch.ones(2), torch.ones(2)],
        "nothing": [],
    }[kind]
    getattr(accel, how)([torch.ones(2), other][accel.process_index])


@pytest.mark.first
@pytest.mark.parametrize("how", ["gather", "gather_for_metrics"])
@pytest.mark.parametrize("kind", ["shape", "type", "number", "nothing"])
def test_what_cannot_be_gathered_is_an_error_on_all_processes(pool, kind, how):
    for name, text in pool.outcomes(gathers_what_does_not_fit, kind, how):
        assert name == "ValueError"
        assert "process 1" in text
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


def metrics_of_a_batch_sampler() -> list:
    accel = accelerator()
    batches = [[0, 1], [2, 3], [4, 5, 6], [7], [8, 9, 10, 11]]
    loader = accel.prepare(torch.utils.data.DataLoader(range(12), batch_sampler=batches))
    seen = []
    for batch in loader:
        tensors, names = accel.gather_for_metrics((batch, batch.float().mean()))
        objects = accel.gather_for_metrics([f"{i}" for i in batch.tolist()])
        seen.append((tensors.tolist(), len(names), [int(name) for name in objects]))
    return seen


def test_metrics_count_each_sample_once_where_batches_have_many_sizes(pool):
    expected = [
        ([0, 1, 2, 3], 2, [0, 1, 2, 3]),
        ([4, 5, 6, 7], 2, [4, 5, 6, 7]),
        ([8, 9, 10, 11], 2, [8, 9, 10, 11]),
    ]
    assert pool.run(metrics_of_a_batch_sampler) == [expected] * 2


def reduces_transposed() -> list:
    accel = accelerator()
    value = torch.arange(6.0).reshape(2, 3)
    return accel.reduce(value if accel.process_index else value.T.contiguous().T).tolist()


def test_reduce_goes_by_place_and_not_by_memory_layout(pool):
    assert pool.run(reduces_transposed) == [[[0, 2, 4], [6, 8, 10]]] * 2


def reduces() -> dict:
    accel = accelerator()
    value = torch.tensor(float(accel.process_index + 1))
    return {
        "sum": accel.reduce(value).item(),
        "mean": accel.reduce(value, "mean").item(),
        "max": accel.reduce(value, "max").item(),
        "min": accel.reduce(value, "min").item(),
        "ints": accel.reduce(torch.tensor(accel.process_index), "mean").item(),
        "weighted": accel.reduce(value, "mean", weight=[3, 1][accel.process_index]).item(),
        "untouched": value.item(),
    }


@pytest.mark.first
def test_reduce_combines_and_weights(pool):
    first, second = pool.run(reduces)
    expected = {"sum": 3, "mean": 1.5, "max": 2, "min": 1, "ints": 0.5, "weighted": 1.25}
    assert first == {**expected, "untouched": 1}
    assert second == {**expected, "untouched": 2}


def pads() -> list:
    accel = accelerator()
    mine = torch.full((accel.process_index + 1, 2), 7.0)
    padded = accel.pad_across_processes(mine, pad_index=-1)
    front = accel.pad_across_processes(mine, pad_index=-1, pad_first=True)
    return [padded[:, 0].tolist(), front[:, 0].tolist()]


@pytest.mark.first
def test_pad_across_processes(pool):
    assert pool.run(pads) == [[[7, -1], [-1, 7]], [[7, 7], [7, 7]]]


def objects() -> list:
    me = rank()
    mine = [{"rank": me}, f"text {me}"] if me else [None]
    filled = broadcast_object_list(mine, from_process=1)
    return [
        gather_object({"rank": me}),
        gather_object([me] * (me + 1)),
        gather_object((me,)),
        gather_object(f"r{me}"),
        gather_object([me] if me else "text"),
        broadcast_object(f"from {me}", from_process=1),
        filled is mine and mine,
        broadcast(torch.tensor([me]), from_process=1).tolist(),
    ]


@pytest.mark.first
def test_gather_object_joins_lists_and_keeps_dicts(pool):
    expected = [
        [{"rank": 0}, {"rank": 1}],
        [0, 1, 1],
        [0, 1],
        ["r0", "r1"],
        ["text", [1]],
        "from 1",
        [{"rank": 1}, "text 1"],
        [1],
    ]
    assert pool.run(objects) == [expected] * 2


LOCKS = {"threading": threading.Lock, "multiprocessing": multiprocessing.Lock}


def sends_what_cannot_be_sent(how: str, sender: int, lock: str) -> None:
    value = LOCKS[lock]() if rank() == sender else "fine"
    {
        "gather_object": lambda: gather_object(value),
        "broadcast_object": lambda: broadcast_object(value, from_process=sender),
        "broadcast_object_list": lambda: broadcast_object_list([value], from_process=sender),
    }[how]()


@pytest.mark.parametrize("lock", LOCKS)  # the first is a TypeError of pickle, the other is not
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("how", ["gather_object", "broadcast_object", "broadcast_object_list"])
def test_an_object_that_cannot_be_sent_is_an_error_on_all_processes(pool, how, sender, lock):
    for name, text in pool.outcomes(sends_what_cannot_be_sent, how, sender, lock):
        assert name == "TypeError"
        assert f"process {sender} passed an object that cannot be sent" in text
        assert "lock" in text.lower()
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


def sends_what_another_does_not_know(sender: int) -> int:
    value: object = "fine"
    if rank() == sender:
        module = types.ModuleType(f"known_on_{sender}")
        value = type("Unknown", (), {"__module__": module.__name__})()
        module.Unknown = type(value)
        sys.modules[module.__name__] = module
    return len(gather_object(value))


@pytest.mark.parametrize("sender", [0, 1])
def test_an_object_of_an_unknown_class_is_an_error_where_it_is_unknown(pool, sender):
    outcomes = pool.outcomes(sends_what_another_does_not_know, sender)
    assert outcomes[sender] == ("ok", 2)
    assert outcomes[1 - sender][0] == "ModuleNotFoundError"
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


def structures() -> dict:
    me = rank()
    stats = Stats(torch.tensor([1.0 + me]), 3 + me)
    table = defaultdict(list, {("a", 1): torch.tensor([me]), None: None})
    summed, sent = reduce(stats, "sum"), broadcast(stats, from_process=1)
    gathered, grouped = gather(stats), gather(table)
    return {
        "summed": [type(summed).__name__, summed.loss.tolist(), summed.count],
        "inside": summed.more[0].tolist(),
        "sent": [sent.loss.tolist(), sent.count, type(sent.count).__name__],
        "gathered": [gathered.loss.tolist(), gathered.count.tolist(), gathered.more[0].tolist()],
        "table": [grouped["a", 1].tolist(), grouped[None], grouped["new"]],
    }


def test_structures_come_back_as_they_went_in(pool):
    expected = {
        "summed": ["Stats", [3.0], 7],
        "inside": [7],
        "sent": [[2.0], 4, "int"],
        "gathered": [[1.0, 2.0], [3, 4], [3, 4]],
        "table": [[0, 1], None, []],
    }
    assert pool.run(structures) == [expected] * 2


def filled_in_another_order() -> list:
    me = rank()
    data = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    if me:
        data = dict(reversed(data.items()))
    results = [gather(data), reduce(data, "sum"), broadcast(data, from_process=1)]
    numbers = reduce({"x": 1, "y": 2} if me else {"y": 2, "x": 1}, "sum")
    return [[result["a"].tolist(), result["b"].tolist()] for result in results] + [numbers]


def test_dicts_that_were_filled_in_another_order_meet_by_key(pool):
    expected = [[[1, 1], [2, 2]], [[2], [4]], [[1], [2]], {"x": 2, "y": 4}]
    assert pool.run(filled_in_another_order) == [expected] * 2


def padded() -> list:
    own = torch.ones(rank() + 1)
    every = [pad_across_processes(own), pad_across_processes(own, pad_first=True)]
    return [one.tolist() for one in every]


def test_padding_is_put_at_the_end_unless_it_is_asked_for_at_the_start(pool):
    assert pool.run(padded) == [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]


def numbers() -> list:
    me = rank()
    mixed = [me + 1, 0.5 if me else 1, bool(me), 2**70 + me]
    return [
        reduce(mixed, "sum"),
        reduce(mixed, "max"),
        reduce(mixed, "min", scale=2),
        reduce(me + 1, weight=[3, 1][me]),
        reduce([me, True], "mean"),
        reduce(float("nan") if me else 1.0, "max") != 1.0,
        reduce(float("nan") if me else 1.0, "mean", weight=1 - me),
        broadcast({"n": me, "f": me / 2}, from_process=1),
        gather([me, me / 10 if me else 0, bool(me)])[1].tolist(),
        gather(0.1j if me else 1).tolist(),
    ]


def test_numbers_are_combined_exactly_and_stay_numbers(pool):
    expected = [
        [3, 1.5, 1, 2**71 + 1],
        [2, 1, True, 2**70 + 1],
        [2, 1.0, 0, 2**71],
        1.25,
        [0.5, 1.0],
        True,
        1.0,
        {"n": 1, "f": 0.5},
        [0, 0.1],  # in double precision, as Python's own
        [1, 0.1j],
    ]
    assert pool.run(numbers) == [expected] * 2


def arrays() -> list:
    me = rank()
    data = {"x": np.array([3 + me, 10]), "f": [np.float64(me / 10)], "s": np.float32(me)}
    summed, sent = reduce(data, "sum"), broadcast(data, from_process=1)
    gathered = gather({**data, "x": data["x"][: 1 + me], "b": np.array([me == 1])})
    padded = pad_across_processes(data["x"][: 1 + me].astype("int8"), pad_index=7)
    leaves = [summed["x"], summed["f"][0], summed["s"], reduce(data["x"], "mean")]
    leaves += [sent["x"], sent["f"][0], gathered["x"], gathered["f"][0], gathered["s"]]
    leaves += [gathered["b"], padded, reduce(data["x"], "sum", scale=2)]
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    return [(str(leaf.dtype), leaf.tolist()) for leaf in leaves]


def test_arrays_are_combined_over_processes(pool):
    first, second = pool.run(arrays)
    expected = [
        ("int64", [7, 20]),
        ("float64", 0.1),
        ("float32", 1.0),
        ("float32", [3.5, 10.0]),
        ("int64", [4, 10]),
        ("float64", 0.1),
        ("int64", [3, 4, 10]),
        ("float64", [0.0, 0.1]),
        ("float32", [0.0, 1.0]),
        ("bool", [False, True]),
        ("int8", [4, 10]),
        ("int64", [14, 40]),
    ]
    assert second == expected
    assert first == [*expected[:10], ("int8", [3, 7]), expected[11]]


REFUSED = {
    "strings": lambda me: ["a", f"r{me}"],
    "sets": lambda me: {"x": torch.ones(2), "seen": {me}},
    "records": lambda me: Named(f"r{me}"),
    "objects": lambda me: [np.array([me, None])],
}


@dataclass
class Named:
    name: str


def refuses(kind: str, how: str) -> None:
    getattr(accelerator(), how)(REFUSED[kind](rank()))


@pytest.mark.parametrize("how", ["gather", "reduce", "pad_across_processes"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_combined_is_an_error_on_all_processes(pool, kind, how):
    for name, text in pool.outcomes(refuses, kind, how):
        assert name == "TypeError"
        assert "gather_object" in text
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


def refuses_on_one_rank(how: str) -> None:
    getattr(accelerator(), how)([torch.ones(1) if rank() else "a"])


@pytest.mark.parametrize("how", ["gather", "pad_across_processes"])
def test_what_one_process_cannot_combine_is_an_error_on_all(pool, how):
    for name, text in pool.outcomes(refuses_on_one_rank, how):
        assert name == "ValueError"
        assert "[0]: str" in text
    assert pool.run(gathers) == [["Pair", [0, 1], [0.0, 1.0], "cpu"]] * 2  # the group goes on


MOVED = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
]  # fmt: skip


def moves(dtype: str) -> list:
    kind, me = getattr(torch, dtype), rank()
    mine = torch.tensor([[1, 0, 1], [me, 1, 0]]).to(kind)
    sent = broadcast(mine, from_process=1)
    even, uneven = gather(mine), gather(mine[: 1 + me])
    padded = pad_across_processes(mine[: 1 + me], pad_index=1)
    turned = gather(mine.T)  # not contiguous
    empty = gather(mine[:0])
    results = [sent, even, uneven, padded, turned, empty]
    assert all(result.dtype is kind for result in results)
    return [result.to(torch.complex128).real.tolist() for result in results]


@pytest.mark.parametrize("dtype", MOVED)
def test_every_type_is_moved_as_it_is(pool, dtype):
    top, low, high = [1, 0, 1], [0, 1, 0], [1, 1, 0]
    first = [[top, high], [top, low, top, high], [top, top, high], [top, [1, 1, 1]]]
    second = [*first[:3], [top, high]]
    turned = [[1, 0], [0, 1], [1, 0], [1, 1], [0, 1], [1, 0]]
    assert pool.run(moves, dtype) == [[*first, turned, []], [*second, turned, []]]


def reduces_types(dtype: str) -> dict:
    kind, me = getattr(torch, dtype), rank()
    value = torch.tensor([me, 1]).to(kind)
    found = {how: reduce(value, how) for how in ("sum", "mean", "max", "min")}
    return {how: (str(x.dtype)[6:], x.double().tolist()) for how, x in found.items()}


@pytest.mark.parametrize(
    "dtype",
    [name for name in MOVED if "complex" not in name and name != "uint64"],
)
def test_every_type_is_reduced(pool, dtype):
    whole = "float" not in dtype
    expected = {
        "sum": ("int64" if dtype == "bool" else dtype, [1, 2]),
        "mean": ("float32" if whole else dtype, [0.5, 1]),
        "max": (dtype, [1, 1]),
        "min": (dtype, [0, 1]),
    }
    assert pool.run(reduces_types, dtype) == [expected] * 2


def reduces_what_is_hard() -> dict:
    me = rank()
    half = torch.tensor([60000.0], dtype=torch.float16)
    steps = torch.full((1,), 256.0 if me else 1.0, dtype=torch.bfloat16)
    return {
        "no overflow": reduce(half, "mean").tolist(),
        "one rounding": reduce(steps, "sum", scale=3).tolist(),
        "exact": reduce(torch.tensor([2**53 + me]), "sum").tolist(),
        "complex": reduce(torch.tensor([1j + me]), "mean").tolist(),
        "conjugate": reduce(torch.tensor([1j]).conj(), "sum").tolist(),
        "turned": reduce(torch.arange(4).reshape(2, 2).T * (me + 1), "sum").tolist(),
        "empty": list(reduce(torch.zeros(0, 3)).shape),
        "nothing here": reduce(torch.tensor(float("nan") if me else 2.0), weight=1 - me).item(),
        "gradients": reduce(torch.ones(1, requires_grad=True)).requires_grad,
        "none": reduce(torch.tensor([me]), "none").tolist(),
    }


def test_nothing_is_lost_on_the_way(pool):
    first, second = pool.run(reduces_what_is_hard)
    expected = {
        "no overflow": [60000.0],
        "one rounding": [772.0],
        "exact": [2**54 + 1],
        "complex": [0.5 + 1j],
        "conjugate": [-2j],
        "turned": [[0, 6], [3, 9]],
        "empty": [0, 3],
        "nothing here": 2.0,
        "gradients": False,
    }
    assert first == {**expected, "none": [0]}
    assert second == {**expected, "none": [1]}


def pads_structures() -> list:
    me = rank()
    data = {
        "b": torch.ones(2, 1 + 2 * me, dtype=torch.bool),
        "a": [torch.ones(3, 3 - me), torch.tensor(5)],
        "n": 7,
    }
    padded = pad_across_processes(data, dim=1, pad_index=0, pad_first=True)
    return [
        padded["b"].long().tolist()[0],
        padded["a"][0].tolist()[0],
        padded["a"][1].item(),
        padded["n"],
        list(pad_across_processes(torch.ones(1 + me), dim=-1).shape),
    ]


def fails_to_pad() -> None:
    pad_across_processes(torch.ones(2, 3 + rank()), dim=0)


def test_structures_are_padded_along_any_dimension(pool):
    first, second = pool.run(pads_structures)
    assert first == [[0, 0, 1], [1, 1, 1], 5, 7, [2]]
    assert second == [[1, 1, 1], [0, 1, 1], 5, 7, [2]]


def test_what_differs_elsewhere_cannot_be_padded(pool):
    for name, text in pool.outcomes(fails_to_pad):
        assert name == "ValueError"
        assert "process 1 differs from process 0" in text
        assert "value: float32 (*, 4) on cpu" in text
