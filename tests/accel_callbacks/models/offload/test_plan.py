"""Plans: nothing lost, no budget exceeded, and errors with the smallest budget that would do."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from accel_callbacks.models.offload.planner import tied_groups
from accel_callbacks.offload import Plan, PlanError, Unit, Weights, plan

STORES = ("cpu", "disk")


def random_request(seed: int) -> tuple[Weights, dict[Any, Any], dict[str, Any]]:
    source = random.Random(seed)
    units = []
    for number in range(source.randint(1, 14)):
        ties = tuple(f"tie{n}" for n in range(3) if source.random() < 0.08)
        earlier = {tie for unit in units for tie in unit.ties}
        shared = 7 * len(earlier.intersection(ties))
        own = source.choice([0, 1, 5, 20, 20, 20, 90]) + 7 * len(set(ties) - earlier)
        buffers = source.choice([0, 0, 0, 1, 6])
        units.append(Unit(f"part{number}", own, buffers, shared, ties))
    weights = Weights(tuple(units))
    total = weights.nbytes
    budgets: dict[Any, Any] = {
        number: int(total * source.uniform(0, 1)) for number in range(source.randint(0, 3))
    }
    if source.random() < 0.9:
        budgets["cpu"] = int(total * source.choice([0, 0.3, 0.8, 2]))
    if source.random() < 0.3:
        budgets["disk"] = int(total * source.uniform(0, 1))
    options = {
        "prefetch": source.choice([0, 1, 2]),
        "offload_buffers": source.random() < 0.5,
    }
    return weights, budgets, options


def planned(seed: int) -> tuple[Plan, dict[str, Any]]:
    weights, budgets, options = random_request(seed)
    try:
        return plan(weights, budgets, **options), options
    except PlanError as error:
        return error.plan, options


def recount(found: Plan, options: dict[str, Any]) -> dict[Any, int]:
    """The bytes that are needed of each device, from the device map alone."""
    units, runs_on = found.weights.units, found.execution_device
    needed: dict[Any, int] = {"cpu": 0} | {use.device: 0 for use in found.devices}
    windows: dict[Any, int] = {}
    for unit in units:
        device = found.device_map[unit.name]
        away = device in STORES and device != runs_on
        needed[device] += unit.parameters
        needed[runs_on if away and not options["offload_buffers"] else device] += unit.buffers
        if away:
            window = unit.parameters + unit.shared
            window += unit.buffers if options["offload_buffers"] else 0
            windows[device] = max(windows.get(device, 0), window)
    factor = 1 + options["prefetch"]
    if windows:
        needed[runs_on] += factor * max(windows.values())
        staged = any(use.device == "cpu" and use.budget for use in found.devices)
        if runs_on != "cpu" and staged:
            needed["cpu"] += factor * windows.get("disk", 0)
    return needed


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (150, 300, 450))]
)
def test_nothing_is_lost_and_no_budget_is_exceeded(first: int) -> None:
    fitting = 0
    for seed in range(first, first + 150):
        found, options = planned(seed)
        units = found.weights.units
        assert list(found.device_map) == [unit.name for unit in units]
        for group in tied_groups(units):
            assert len({found.where[number] for number in group}) == 1
        assert sum(use.weights + use.buffers for use in found.devices) == found.weights.nbytes
        if not found.fits:
            continue
        fitting += 1
        needed = recount(found, options)
        for use in found.devices:
            assert use.used == needed[use.device]
            assert use.left is None or use.left >= 0, (seed, use)
    assert fitting > 60


def refusal(weights: Weights, budgets: dict[Any, Any], options: dict[str, Any]) -> PlanError | None:
    try:
        plan(weights, budgets, **options)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 40, 60))]
)
def test_the_budget_that_an_error_names_is_the_smallest(first: int) -> None:
    errors = 0
    for seed in range(first, first + 20):
        weights, budgets, options = random_request(seed)
        error = refusal(weights, budgets, options)
        if error is None:
            continue
        assert not error.plan.fits
        for device, more in (error.plan.short_by or {}).items():
            errors += 1
            enough = budgets[device] + more
            assert f"{enough:,} bytes" in str(error)
            assert refusal(weights, {**budgets, device: enough}, options) is None, seed
            assert refusal(weights, {**budgets, device: enough - 1}, options) is not None
    assert errors > 1


def blocks(count: int, nbytes: int = 10) -> Weights:
    return Weights(tuple(Unit(f"blocks.{n}", nbytes) for n in range(count)))


def counts(found: Plan) -> dict[Any, int]:
    return {use.device: use.weights for use in found.devices if use.weights}


def test_a_window_is_kept_only_for_what_is_offloaded() -> None:
    assert counts(plan(blocks(4), {0: 40})) == {0: 40}
    found = plan(blocks(4), {0: 39, "cpu": 100})
    assert counts(found) == {0: 10, "cpu": 30}
    assert [use.window for use in found.devices] == [20, 0, 0]
    assert counts(plan(blocks(4), {0: 39, "cpu": 100}, prefetch=0)) == {0: 20, "cpu": 20}
    on_disk = plan(blocks(5), {0: 39, "cpu": 35})
    assert [use.window for use in on_disk.devices] == [20, 20, 0]
    assert counts(on_disk) == {0: 10, "cpu": 10, "disk": 30}


def test_a_device_that_is_smaller_than_its_largest_layer_is_used() -> None:
    """Accelerate leaves it empty, as it reserves that layer though nothing is offloaded."""
    weights = Weights((Unit("small", 10), Unit("large", 90)))
    assert plan(weights, {0: 10, 1: 90}).where == (0, 1)


def test_a_large_unit_stays_if_that_makes_for_a_smaller_window() -> None:
    weights = Weights((*blocks(10).units, Unit("head", 100)))
    found = plan(weights, {0: 150, "cpu": 200})
    assert found.device_map["head"] == 0
    assert counts(found) == {0: 130, "cpu": 70}


def test_buffers_of_offloaded_units_stay_where_these_run() -> None:
    weights = Weights(tuple(Unit(f"b{n}", 10, 3) for n in range(4)))
    found = plan(weights, {0: 42, "cpu": 100}, prefetch=0)
    assert (found.devices[0].weights, found.devices[0].buffers) == (20, 12)
    assert found.offloaded == found.devices[1].weights == 20
    moved = plan(weights, {0: 42, "cpu": 100}, prefetch=0, offload_buffers=True)
    assert [use.buffers for use in moved.devices] == [6, 6, 0]
    assert moved.offloaded == 26


def test_tied_units_are_one() -> None:
    weights = Weights(
        (Unit("wte", 30, ties=("w",)), *blocks(3).units, Unit("head", 0, shared=30, ties=("w",)))
    )
    found = plan(weights, {0: 30, 1: 30})
    assert found.device_map == {"wte": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1, "head": 0}
    away = plan(weights, {"cpu": 60}, prefetch=0)
    assert away.device_map["head"] == away.device_map["wte"]


def test_without_accelerators_the_host_computes() -> None:
    found = plan(blocks(4), {"cpu": 35})
    assert found.execution_device == "cpu"
    assert counts(found) == {"cpu": 10, "disk": 30}
    assert plan(blocks(4), {0: 0, "cpu": 40}).execution_device == "cpu"


def test_a_device_without_room_for_a_window_is_left_out() -> None:
    found = plan(blocks(4), {0: 15, "cpu": 100})
    assert (counts(found), found.execution_device) == ({"cpu": 40}, "cpu")


def test_a_device_map_shows_where_offloaded_units_run() -> None:
    """Accelerate runs them on the first accelerator of the map, so that one has the window."""
    for seed in range(200):
        found, _ = planned(seed)
        if found.fits and found.offloaded:
            fast = [device for device in found.where if device not in STORES]
            assert not fast or found.execution_device in fast


def test_where_the_first_device_has_no_room_but_the_window_the_host_holds_all() -> None:
    """If the second held a block, its map would say that offloaded blocks run there."""
    found = plan(blocks(4), {0: 25, 1: 15, "cpu": 100})
    assert (counts(found), found.execution_device) == ({"cpu": 40}, 0)
    moved_on = plan(blocks(6), {0: 15, 1: 35, "cpu": 100})
    assert (counts(moved_on), moved_on.execution_device) == ({1: 10, "cpu": 50}, 1)


def test_a_table_has_a_line_for_each_run_of_units() -> None:
    found = plan(blocks(5), {0: 39, "cpu": 35})
    assert found.table().splitlines()[:4] == [
        "DEVICE  BUDGET  WEIGHTS  BUFFERS  RESERVE  LEFT",
        "0       39 B    10 B     0 B      20 B     9 B",
        "cpu     35 B    10 B     0 B      20 B     5 B",
        "disk    -       30 B     0 B      0 B      -",
    ]
    assert "blocks.2 to blocks.4  3      30 B  disk" in found.table()
    assert len(found.table(every_unit=True).splitlines()) == len(found.table().splitlines()) + 2


def test_a_unit_without_bytes_has_no_line_unless_its_weights_are_elsewhere() -> None:
    found = plan({"a.w": 6, "b.w": 0, "c.w": 4}, {0: 10})
    assert found.table().splitlines()[-1].split() == ["a", "to", "c", "2", "10", "B", "0"]
    assert [line[:1] for line in found.table(every_unit=True).splitlines()[-2:]] == ["a", "c"]


def test_errors_say_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"at least 20 bytes \(20 B\) of cpu\.") as caught:
        plan(blocks(4), {"cpu": 15})
    assert caught.value.plan.short_by == {"cpu": 5}
    assert copy.copy(caught.value).plan == caught.value.plan  # as between processes
    with pytest.raises(
        PlanError, match=r"at least 40 bytes \(40 B\) of cpu or 30 bytes .* of disk"
    ):
        plan(blocks(4), {"cpu": 35, "disk": 5})
    with pytest.raises(PlanError, match=r"at least 40 bytes \(40 B\) of 0 or 30 bytes .* of disk"):
        plan(blocks(4), {0: 35, "disk": 5})
    with pytest.raises(PlanError, match="give one to a device that computes"):
        plan(blocks(4), {"disk": 100})
    with pytest.raises(ValueError, match="prefetch=-1"):
        plan(blocks(1), {0: 1}, prefetch=-1)


def test_modules_without_tensors_are_next_to_the_unit_before_them() -> None:
    weights = Weights((Unit("drop", 0), Unit("a", 10), Unit("act", 0), Unit("b", 10)))
    assert plan(weights, {0: 10, 1: 10}).where == (0, 0, 0, 1)
    assert plan(Weights((Unit("relu", 0),)), {0: 10}).where == (0,)
    assert plan(Weights(()), {"cpu": 0}).device_map == {}


def test_ten_thousand_units_are_looked_at_a_bounded_number_of_times() -> None:
    """The milliseconds are in benchmarks/plan.py; here it is the work that is bounded."""
    import sys

    source = random.Random(0)
    units = tuple(Unit(f"b.{n}", source.randint(1, 10**9)) for n in range(10_000))
    weights = Weights(units)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan(weights, {0: weights.nbytes // 3, "cpu": weights.nbytes // 3})
    finally:
        sys.setprofile(before)
    assert calls < 40 * len(units)
