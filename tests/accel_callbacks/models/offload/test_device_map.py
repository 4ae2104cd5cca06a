"""Device maps: complete, within their budgets, and never with more offloaded than Accelerate's."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accel_callbacks import infer_auto_device_map
from accel_callbacks.utils import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    find_tied_parameters,
    get_balanced_memory,
)
from tests.support.random_trees import FIGURES, WHOLE, case, device_of, uses

RECORDED: dict[str, int] = json.loads(FIGURES.read_text(encoding="utf-8"))["offloaded"]


class Small(nn.Module):
    """Of 64, 72 and 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def mapped(seed: int) -> tuple[dict[str, Any], bool]:
    """The map of a case, and whether it keeps the budgets."""
    one = case(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = infer_auto_device_map(
            one.model, one.memory, [WHOLE], offload_buffers=one.offload_buffers
        )
    return found, not any("leaves no room" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 60))])
def test_maps_are_complete_and_keep_the_budgets(first: int) -> None:
    kept = 0
    for seed in range(first, first + 30):
        one = case(seed)
        found, fits = mapped(seed)
        check_device_map(one.model, found)
        for group in find_tied_parameters(one.model):
            assert len({device_of(name, found) for name in group}) == 1
        counted = uses(one, found)
        assert counted is not None
        if fits:
            kept += 1
            over = {d: n for d, n in counted[1].items() if d != "disk" and n > one.memory[d]}
            assert over == {}, seed
    assert kept > 15


def test_no_more_is_offloaded_than_by_accelerate() -> None:
    less = 0
    for seed, theirs in RECORDED.items():
        one = case(int(seed))
        counted = uses(one, mapped(int(seed))[0])
        assert counted is not None
        assert counted[0] <= theirs, seed
        less += counted[0] < theirs
    assert len(RECORDED) > 100
    assert less > 20


def test_all_of_a_budget_is_used_if_nothing_is_offloaded() -> None:
    assert infer_auto_device_map(Small(), {0: 136, 1: 100}) == {
        "linear1": 0,
        "batchnorm": 0,
        "linear2": 1,
    }
    assert infer_auto_device_map(Small(), {0: 236}) == {"": 0}


def test_room_is_kept_for_what_is_offloaded() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    assert infer_auto_device_map(model, {0: 255, "cpu": 1000}) == {
        "0": 0,
        "1": 0,
        "2": "cpu",
        "3": "cpu",
    }
    with pytest.warns(UserWarning, match=r"needs at least 140 bytes .* of 0"):
        infer_auto_device_map(Small(), {0: 99, "cpu": 0})


def test_tensors_of_a_module_that_is_split_have_a_device() -> None:
    """Accelerate forgets buffers of such modules, and refuses its own map."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("offset", torch.ones(1))
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    model = nn.Sequential(Inner())
    found = infer_auto_device_map(model, {0: 100, 1: 100})
    check_device_map(model, found)
    assert {"0.scale", "0.offset"} <= found.keys()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"a.b": 0, "a.c": 0, "d": 1}, {"a": 0, "d": 1}),
        ({"a.b": 0, "a.c": 0, "d": 0}, {"": 0}),
        ({"a.b.c": 0, "a.b.d": 0, "a.e": 1, "a.e.f": 1}, {"a.b": 0, "a.e": 1}),
        ({"a.b": 0}, {"a.b": 0}),
        ({"ab.c": 0, "a.c": 1, "ab.d": 0}, {"ab": 0, "a.c": 1}),
        ({}, {}),
    ],
)
def test_a_map_is_cleaned_in_place(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert clean_device_map(given) is given
    assert given == expected


def test_only_a_module_of_a_map_is_cleaned() -> None:
    given: dict[str, Any] = {"a.b": 0, "a.c": 0, "d": 0}
    assert clean_device_map(given, "a") == {"a": 0, "d": 0}


def test_a_cleaned_map_has_the_same_devices() -> None:
    source = random.Random(0)
    for _ in range(100):
        keys = [".".join(source.choices("abc", k=4)) for _ in range(9)]
        given: dict[str, Any] = {key: source.choice([0, 1, "cpu"]) for key in keys}
        cleaned = clean_device_map(dict(given))
        assert {key: device_of(key, cleaned) for key in given} == given


def test_what_a_map_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"'batchnorm\.weight', 'batchnorm\.bias'"):
        check_device_map(Small(), {"linear1": 0, "linear2": 0})
    with pytest.warns(UserWarning, match=r"'linear3'.*Did you mean 'linear"):
        check_device_map(Small(), {"": 0, "linear3": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(
            Small(), {"linear1.weight": 0, "linear1.bias": 1, "batchnorm": 0, "linear2": 0}
        )


def test_a_second_name_of_a_module_needs_a_device_too() -> None:
    model = Small()
    model.again = model.linear1
    with pytest.raises(ValueError, match=r"again\.weight"):
        check_device_map(model, {"linear1": 0, "batchnorm": 0, "linear2": 0})
    check_device_map(model, infer_auto_device_map(model, {0: 200, 1: 100}))


def test_tied_parameters_on_two_devices_are_a_warning() -> None:
    group = [["a.weight", "b.weight"]]
    with pytest.warns(UserWarning, match="a.weight on 0, b.weight on cpu"):
        check_tied_parameters_on_same_device(group, {"a": 0, "b": "cpu"})
    with pytest.raises(ValueError, match=r"b\.weight"):
        check_tied_parameters_on_same_device(group, {"a": 0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({0: 200, 1: 200}, {0: 200, 1: 200}),
        ({0: 300, 1: 300}, {0: 215, 1: 300}),
        ({0: 300, 2: 500}, {0: 215, 2: 500}),
        ({0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, {0: 0, 1: 215, 2: 300}),
        ({"cpu": 100}, {"cpu": 100}),
    ],
)
def test_balanced_budgets_are_accelerates(given: dict[Any, int], expected: dict[Any, int]) -> None:
    assert get_balanced_memory(Small(), given) == expected
    assert all(isinstance(nbytes, int) for nbytes in get_balanced_memory(Small(), given).values())


def test_a_low_first_device_takes_what_the_others_do_not_hold() -> None:
    assert get_balanced_memory(Small(), {0: 300, 1: 300}, low_zero=True) == {0: 0, 1: 300}
    assert get_balanced_memory(Small(), {1: 300, 2: 172}, low_zero=True) == {1: 64, 2: 172}


def test_balance_offloads_nothing_that_the_budgets_hold() -> None:
    """Its share for each, with what it adds for boundaries, is too small for this model."""
    sizes = [1] * 20 + [60, 60, 60]
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))
    memory: dict[Any, int] = {0: 600, 1: 240, "cpu": 1000}
    balanced = get_balanced_memory(model, memory)
    found = infer_auto_device_map(model, balanced)
    assert set(found.values()) <= {0, 1}


def test_verbose_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(Small(), {0: 136, 1: 100}, verbose=True)
    assert "linear2    1      100 B  1" in capsys.readouterr().out


def test_a_map_says_that_no_accelerator_is_used() -> None:
    model = Small()
    model.batchnorm.register_buffer("table", torch.zeros(75))  # 300 bytes, needed where it runs
    with pytest.warns(UserWarning, match=r"runs on the CPU, since 0 has.*offload_buffers=True"):
        assert infer_auto_device_map(model, {0: 390, "cpu": 900}) == {"": "cpu"}
    with pytest.warns(UserWarning, match=r"raise its max_memory, or split larger classes"):
        infer_auto_device_map(model, {0: 300, "cpu": 900}, offload_buffers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 460, "cpu": 900})
        infer_auto_device_map(model, {"cpu": 900})
        infer_auto_device_map(model, {0: 0, "cpu": 900})
        infer_auto_device_map(nn.ReLU(), {0: 9, "cpu": 900})
