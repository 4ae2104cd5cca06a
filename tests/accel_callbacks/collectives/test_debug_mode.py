"""Debug mode: processes that do different things are told so, instead of hanging."""

from __future__ import annotations

import os
import sys

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
    synchronize,
)
from accel_callbacks.distributed.topology import resolve_topology
from tests.support import warm
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def tensors(kind: str) -> object:
    return {
        "ones": torch.ones(2, 3),
        "wide": torch.ones(2, 4),
        "double": torch.ones(2, 3, dtype=torch.float64),
        "deep": torch.ones(2, 3, 1),
        "pair": [torch.ones(2, 3), torch.ones(1)],
        "same pair": (torch.ones(2, 3), torch.ones(1)),
        "named": {"x": torch.ones(2, 3)},
        "number": 3,
        "sparse": torch.ones(2, 3).to_sparse(),
    }[kind]


METHODS = {
    "gather": lambda accel, data: accel.gather(data),
    "gather_for_metrics": lambda accel, data: accel.gather_for_metrics(data),
    "reduce": lambda accel, data: accel.reduce(data),
    "mean": lambda accel, data: accel.reduce(data, "mean"),
    "weighted": lambda accel, data: accel.reduce(data, "mean", weight=2),
    "pad": lambda accel, data: accel.pad_across_processes(data),
    "pad dim 1": lambda accel, data: accel.pad_across_processes(data, dim=1),
    "wait": lambda accel, data: accel.wait_for_everyone(),
}


def differ(calls: list, inputs: list) -> None:
    accel = accelerator(debug=True)
    me = accel.process_index
    METHODS[calls[me]](accel, tensors(inputs[me]))


def agree() -> list:
    accel = accelerator(debug=True)
    results = [METHODS[name](accel, tensors("pair")) for name in METHODS]
    uneven = accel.gather(torch.ones(1 + accel.process_index))
    return [results[2][0].sum().item(), len(uneven)]


def test_what_fits_together_goes_through(pool):
    assert pool.run(agree) == [[12.0, 3]] * 2


@pytest.mark.parametrize(
    ("calls", "inputs", "says"),
    [
        (["gather"] * 2, ["ones", "wide"], ["value: float32 (*, 3) on", "value: float32 (*, 4)"]),
        (["reduce"] * 2, ["ones", "wide"], ["value: float32 (2, 3) on", "value: float32 (2, 4)"]),
        (["reduce"] * 2, ["ones", "double"], ["float32 (2, 3)", "float64 (2, 3)"]),
        (["mean"] * 2, ["pair", "ones"], ["[1]: float32 (1)"]),
        (["reduce"] * 2, ["ones", "named"], ["['x']: float32 (2, 3)"]),
        (["reduce"] * 2, ["ones", "number"], ["value: number"]),
        (["reduce"] * 2, ["ones", "sparse"], ["value: sparse_coo float32 (2, 3)"]),
        (["pad"] * 2, ["ones", "deep"], ["float32 (*, 3) on", "float32 (*, 3, 1)"]),
        (["gather_for_metrics"] * 2, ["named", "ones"], ["['x']: float32 (*, 3)"]),
        (["reduce", "mean"], ["ones"] * 2, ["reduce(reduction='sum')", "reduction='mean'"]),
        (["mean", "weighted"], ["ones"] * 2, ["weighted=False", "weighted=True"]),
        (["pad", "pad dim 1"], ["ones"] * 2, ["dim=0", "dim=1"]),
        (["gather", "reduce"], ["ones"] * 2, ["process 0: gather()", "process 1: reduce("]),
        (["gather", "wait"], ["ones"] * 2, ["process 1: wait_for_everyone() at test_debug_mode"]),
        (["wait", "pad"], ["ones"] * 2, ["process 0: wait_for_everyone()"]),
        (["gather", "gather_for_metrics"], ["ones"] * 2, ["process 1: gather_for_metrics()"]),
    ],
)
def test_all_are_told_who_differs(pool, calls, inputs, says):
    for name, text in pool.outcomes(differ, calls, inputs):
        assert name == "DistributedOperationException"
        assert "process 1 differs from process 0, so nothing was sent" in text
        assert "test_debug_mode.py:" in text
        for part in says:
            assert part in text
    assert pool.run(agree) == [[12.0, 3]] * 2  # the group goes on


def test_a_tuple_and_a_list_of_the_same_tensors_are_alike(pool):
    pool.run(differ, ["reduce"] * 2, ["pair", "same pair"])


def entries_in_common() -> None:
    accel = accelerator(debug=True)
    data = {f"w{index}": torch.ones(index) for index in range(30)}
    if accel.process_index:
        data["w7"] = torch.ones(8)
        data.update({f"new{index}": torch.ones(1) for index in range(20)})
    accel.reduce(data)


def test_only_what_differs_is_listed(pool):
    for name, text in pool.outcomes(entries_in_common):
        assert name == "DistributedOperationException"
        assert "['w7']: float32 (7)" in text
        assert "['w6']" not in text
        assert "and 13 more" in text


FUNCTIONS = {
    "gather": lambda: gather(torch.ones(2)),
    "reduce": lambda: reduce(torch.ones(2)),
    "broadcast": lambda: broadcast(torch.ones(2)),
    "broadcast from 1": lambda: broadcast(torch.ones(2), from_process=1),
    "broadcast_object": lambda: broadcast_object(1),
    "broadcast_object_list": lambda: broadcast_object_list([1]),
    "gather_object": lambda: gather_object(1),
    "pad_across_processes": lambda: pad_across_processes(torch.ones(2)),
    "synchronize": lambda: synchronize(lambda: None)(),
    "prepare": lambda: accelerator().prepare(torch.utils.data.DataLoader(range(4))),
}


def functions_differ(names: list) -> None:
    os.environ["ACCEL_DEBUG"] = "1"
    try:
        FUNCTIONS[names[PartialState(cpu=True).process_index]]()
    finally:
        del os.environ["ACCEL_DEBUG"]


@pytest.mark.parametrize(
    "names",
    [
        ["gather", "reduce"],
        ["broadcast", "gather"],
        ["broadcast", "broadcast from 1"],
        ["broadcast_object", "gather_object"],
        ["broadcast_object_list", "broadcast_object"],
        ["pad_across_processes", "gather"],
        ["synchronize", "gather"],
        ["prepare", "reduce"],
    ],
)
def test_the_environment_asks_functions_too(pool, names):
    for name, text in pool.outcomes(functions_differ, names):
        assert name == "DistributedOperationException", text
        assert "process 1 differs from process 0" in text


def leaves_a_block_of_the_others() -> None:
    accel = accelerator(debug=True)
    with synchronize("download"):
        if accel.process_index:
            raise OSError("disk full")
        FUNCTIONS["gather"]()


def with_the_environment() -> None:
    os.environ["ACCEL_DEBUG"] = "1"
    try:
        leaves_a_block_of_the_others()
    finally:
        del os.environ["ACCEL_DEBUG"]


def test_a_process_that_failed_is_told_of_in_debug_mode_too(pool):
    (first, text), (second, _) = pool.outcomes(with_the_environment)
    assert (first, second) == ("RemoteError", "OSError")
    assert "disk full" in text
    pool.run(begin_again)


def begin_again() -> None:
    resolve_topology(cpu=True, anew=True)


def meets_while_others_gather() -> None:
    accel = accelerator(debug=True)
    os.environ["ACCEL_DEBUG"] = "1"
    try:
        if accel.process_index:
            with synchronize("download"):
                pass
        else:
            accel.gather(torch.ones(1))
    finally:
        del os.environ["ACCEL_DEBUG"]


def test_a_meeting_is_compared_too(pool):
    for name, text in pool.outcomes(meets_while_others_gather):
        assert name == "DistributedOperationException"
        assert "process 1: wait_for_everyone()" in text


def exchanges(debug: bool) -> int:
    accel = accelerator(debug=debug)
    counted = 0
    original = torch.distributed.gather

    def counting(*args, **kwargs):
        nonlocal counted
        counted += 1
        return original(*args, **kwargs)

    torch.distributed.gather = counting
    try:
        for name in ("gather", "reduce", "mean", "pad", "wait"):
            METHODS[name](accel, torch.ones(2))
    finally:
        torch.distributed.gather = original
    return counted


def test_without_debug_nothing_more_is_sent(pool):
    assert pool.run(exchanges, False) == [0, 0]
    assert pool.run(exchanges, True) == [5, 5]


def two_accelerators_of_one_process() -> list:
    careful, quick = accelerator(debug=True), accelerator()
    values = [accel.reduce(torch.ones(1)).item() for accel in (careful, quick)]
    return [careful.debug, quick.debug, *values]


def test_debug_belongs_to_one_accelerator(pool):
    assert pool.run(two_accelerators_of_one_process) == [[True, False, 2.0, 2.0]] * 2


def test_the_launcher_hands_it_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from accel_callbacks import PartialState, gather, reduce\n"
        "state = PartialState()\n"
        "(gather if state.is_main_process else reduce)(torch.ones(2))\n"
    )
    words = ["launch", "--cpu", "--num_processes", "2", "--debug", str(script)]
    done = warm.run(
        [sys.executable, "-m", "accel_callbacks.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        warm_children=True,
    )
    assert done.returncode == 1
    assert "process 0: gather() at script.py:4" in done.stderr
    assert "process 1: reduce(reduction='mean', weighted=False) at script.py:4" in done.stderr
