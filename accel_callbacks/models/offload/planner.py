"""Plan the device of each unit of a model, from sizes and budgets alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from accel_callbacks.models.offload.budgets import STORES, Device, budgets_of
from accel_callbacks.models.offload.weights import Unit, Weights
from accel_callbacks.terminal_text import size_of, table

__all__ = ["DeviceUse", "Plan", "PlanError", "plan"]

_NO_LIMIT = 1 << 62
_ELSEWHERE = -1
_TRIALS = 10_000  # groups to look at in all, over the sizes of a window that are tried


@dataclass(frozen=True)
class DeviceUse:
    """The use of one device in a plan, in bytes.

    Args:
        device: number or name.
        budget: what it may hold; None for no limit.
        weights: parameters on it.
        buffers: buffers on it, those of offloaded units too where these stay.
        window: kept free for offloaded units while they run.

    Example:
        >>> from accel_callbacks.offload import DeviceUse
        >>> DeviceUse(0, budget=10, weights=4, window=3).left
        3
    """

    device: Device
    budget: int | None
    weights: int = 0
    buffers: int = 0
    window: int = 0

    @property
    def used(self) -> int:
        """Sum of all."""
        return self.weights + self.buffers + self.window

    @property
    def left(self) -> int | None:
        """Bytes of the budget that nothing uses; None without a limit."""
        return None if self.budget is None else self.budget - self.used


@dataclass(frozen=True)
class Plan:
    """The device of each unit, and the use of each device.

    Args:
        weights: what was planned.
        where: the device of each unit.
        devices: what is used of each device, in the order in which they are filled.
        execution_device: where offloaded units run; None if nothing runs anywhere.
        fits: no budget is exceeded.
        short_by: if it does not fit, how many bytes more of a device would do, for each device of
            which more would.

    Example:
        >>> from accel_callbacks.offload import plan
        >>> plan({"a.w": 6, "b.w": 4, "c.w": 4}, {0: 10, "cpu": 20}, prefetch=0).device_map
        {'a': 0, 'b': 'cpu', 'c': 'cpu'}
    """

    weights: Weights
    where: tuple[Device, ...]
    devices: tuple[DeviceUse, ...]
    execution_device: Device | None
    fits: bool = True
    short_by: Mapping[Device, int] | None = None

    @cached_property
    def device_map(self) -> dict[str, Device]:
        """The device of each unit by its name, as Accelerate's functions take it."""
        return {u.name: device for u, device in zip(self.weights.units, self.where, strict=True)}

    @cached_property
    def offloaded(self) -> int:
        """Bytes that are fetched each time that the model runs."""
        return sum(
            use.weights + use.buffers
            for use in self.devices
            if use.device != self.execution_device and use.device in STORES
        )

    def table(self, *, every_unit: bool = False) -> str:
        """Return the plan as text: a line for each device, then one for each run of units.

        Args:
            every_unit: a line for each unit, also where neighbors are on one device.

        Example:
            >>> from accel_callbacks.offload import plan
            >>> print(plan({"a.w": 6, "b.w": 4}, {0: 10, "cpu": 20}).table())
            DEVICE  BUDGET  WEIGHTS  BUFFERS  RESERVE  LEFT
            0       10 B    10 B     0 B      0 B      0 B
            cpu     20 B    0 B      0 B      0 B      20 B
            disk    -       0 B      0 B      0 B      -
            <BLANKLINE>
            UNITS   COUNT  SIZE  DEVICE
            a to b  2      10 B  0
        """
        devices = [
            (
                str(use.device),
                _text(use.budget),
                size_of(use.weights),
                size_of(use.buffers),
                size_of(use.window),
                _text(use.left),
            )
            for use in self.devices
        ]
        units = self.weights.units
        sized = [n for n, unit in enumerate(units) if unit.nbytes or unit.shared]
        rows = []
        # The number in the key keeps units apart that are to have a line each.
        keys = groupby(sized, lambda n: (self.where[n], n if every_unit else -1))
        for (device, _), numbers in keys:
            run = [units[n] for n in numbers]
            name = run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}"
            size = size_of(sum(unit.nbytes for unit in run))
            rows.append((name, str(len(run)), size, str(device)))
        head = ("DEVICE", "BUDGET", "WEIGHTS", "BUFFERS", "RESERVE", "LEFT")
        return f"{table(head, devices)}\n\n{table(('UNITS', 'COUNT', 'SIZE', 'DEVICE'), rows)}"


def _text(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    return size_of(nbytes) if nbytes >= 0 else f"-{size_of(-nbytes)}"


class PlanError(ValueError):
    """No placement keeps the budgets; the message has the smallest budget that would do.

    ``plan`` holds what fits without room to run the rest.

    Example:
        >>> from accel_callbacks.offload import PlanError, plan
        >>> try:
        ...     plan({"a.w": 6, "b.w": 6}, {"cpu": 5}, prefetch=0)
        ... except PlanError as error:
        ...     print(error.plan.short_by)
        {'cpu': 1}
    """

    def __init__(self, text: str, plan: Plan) -> None:
        super().__init__(text)
        self.plan = plan

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, Plan]]:
        return type(self), (str(self), self.plan)


class _Group(NamedTuple):
    """Units that share parameters, and so are on one device.

    Args:
        units: their numbers.
        size: bytes of all of them.
        fixed: bytes of their buffers, if these stay on the running device when they are offloaded.
        window: bytes kept free on the running device when they are offloaded.
    """

    units: Sequence[int]
    size: int
    fixed: int
    window: int


class _Placement(NamedTuple):
    """The device of each group, the one that runs the offloaded, and the windows kept free."""

    devices: Sequence[Device]
    execution: Device | None
    windows: Mapping[Device, int]
    fits: bool


def plan(
    weights: Weights | Mapping[str, int],
    budgets: Mapping[Device, int | float | str | None],
    *,
    prefetch: int = 1,
    offload_buffers: bool = False,
) -> Plan:
    """Plan the device of each unit of a model.

    Accelerators are filled first, then ``"cpu"``, then ``"disk"``, which has no limit if no budget
    is given for it. Units that are not on an accelerator run on the first one: it keeps a window
    free for the largest of them and those that are fetched ahead, and their buffers. Units that
    share a parameter are on one device. If keeping a large unit makes for a smaller window, it is
    kept. Nothing here looks at hardware.

    Args:
        weights: the units of a model, or bytes by the names of tensors in the order of the model.
        budgets: bytes, or text such as ``"8GB"``, by device; see ``get_max_memory``. What
            activations and caches need is not to be in them.
        prefetch: offloaded units that are fetched ahead of the one that runs.
        offload_buffers: buffers of offloaded units are fetched too.

    Raises:
        PlanError: nothing keeps the budgets.
        ValueError: an argument that is invalid.

    Example:
        >>> from accel_callbacks.offload import plan
        >>> sizes = {f"blocks.{number}.weight": 4 for number in range(4)}
        >>> plan(sizes, {0: 8, 1: 8}).device_map
        {'blocks.0': 0, 'blocks.1': 0, 'blocks.2': 1, 'blocks.3': 1}
    """
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch!r}: a number of units from 0 on.")
    if isinstance(weights, Mapping):
        weights = Weights.of_sizes(weights)
    limits = {
        device: _NO_LIMIT if nbytes is None else nbytes
        for device, nbytes in budgets_of(budgets).items()
    }
    groups = _groups(weights.units, 1 + prefetch, offload_buffers)
    placement = _place(groups, limits)
    if placement.fits:
        return _plan(weights, groups, limits, placement)
    closest = _plan(weights, groups, limits, placement, _short_by(groups, limits))
    raise PlanError(_message(closest), closest)


def _groups(units: Sequence[Unit], factor: int, offload_buffers: bool) -> list[_Group]:
    """Return the groups that have bytes; the window holds ``factor`` of them at a time."""
    groups = []
    for numbers in tied_groups(units):
        members = [units[number] for number in numbers]
        buffers = sum([unit.buffers for unit in members])
        size = buffers + sum([unit.parameters for unit in members])
        fetched = [unit.parameters + unit.shared for unit in members]
        if offload_buffers:
            fetched = [unit.buffers + nbytes for unit, nbytes in zip(members, fetched, strict=True)]
        window = factor * max(fetched)
        if size or window:
            groups.append(_Group(numbers, size, 0 if offload_buffers else buffers, window))
    return groups


def tied_groups(units: Sequence[Unit]) -> list[list[int]]:
    """Return the groups of unit numbers that share a parameter, directly or transitively."""
    groups: list[list[int]] = []
    group_of: dict[str, list[int]] = {}  # by the name of a shared parameter
    for number, unit in enumerate(units):
        joined = [number]
        for tie in unit.ties:
            group = group_of.get(tie, joined)
            if group is not joined:
                groups.remove(group)
                joined += group
                group_of.update((known, joined) for known, of in group_of.items() if of is group)
            group_of[tie] = joined
        groups.append(joined)
    return sorted(sorted(group) for group in groups)


def _place(groups: Sequence[_Group], limits: Mapping[Device, int]) -> _Placement:
    """Place groups on accelerators, then on the host, then on disk."""
    fast = [device for device, nbytes in limits.items() if device not in STORES and nbytes]
    for start in range(len(fast)):
        placement = _place_on(fast[start:], groups, limits)
        # Who reads a device map runs the offloaded on its first accelerator: it needs the window.
        if placement is not None and (
            placement.execution in placement.devices or set(placement.devices).isdisjoint(STORES)
        ):
            return placement
    computing = [*fast, "cpu"] if limits.get("cpu") else fast
    for device in computing:  # an accelerator only to run what is elsewhere
        placement = _place_on([device], groups, limits)
        if placement is not None:
            return placement
    if not groups:
        return _Placement([], "cpu", {}, fits=True)
    if not computing:
        return _Placement(["disk"] * len(groups), None, {}, fits=False)
    # What fits without room to run the rest, for the error.
    bare = [group._replace(fixed=0, window=0) for group in groups]
    placement = _place_on(fast or ["cpu"], bare, limits)
    assert placement is not None
    return placement._replace(fits=False)


def _place_on(
    computing: Sequence[Device], groups: Sequence[_Group], limits: Mapping[Device, int]
) -> _Placement | None:
    """Place groups on computing devices, then on the host, then on disk.

    Returns:
        None if the first of the devices has no room for the window of what is elsewhere.
    """
    places = _fill(groups, [limits[device] for device in computing])
    if places is None:
        return None
    devices = ["disk" if place == _ELSEWHERE else computing[place] for place in places]
    rest = [number for number, place in enumerate(places) if place == _ELSEWHERE]
    windows = {computing[0]: max((groups[number].window for number in rest), default=0)}
    fits = True
    if rest and computing[0] != "cpu" and limits.get("cpu"):
        # The host has a window too: what comes from disk goes through its memory.
        waiting = [
            groups[number]._replace(size=groups[number].size - groups[number].fixed, fixed=0)
            for number in rest
        ]
        on_host = _fill(waiting, [limits["cpu"]])
        fits = on_host is not None
        for number, place in zip(rest, on_host or [], strict=fits):
            if place != _ELSEWHERE:
                devices[number] = "cpu"
        staged = (groups[number].window for number in rest if devices[number] == "disk")
        windows["cpu"] = max(staged, default=0)
    on_disk = sum(
        group.size - group.fixed
        for group, device in zip(groups, devices, strict=True)
        if device == "disk"
    )
    return _Placement(devices, computing[0], windows, fits and on_disk <= limits["disk"])


def _fill(groups: Sequence[_Group], rooms: Sequence[int]) -> list[int] | None:
    """Return the device of each group, `_ELSEWHERE` for the fewest bytes; None without a window.

    The first device keeps room for the largest window of what is elsewhere, and for its buffers. A
    smaller window, for which larger groups have to stay, may leave room for more.
    """
    whole = [_Group(group.units, group.size, 0, 0) for group in groups]
    windows = sorted({group.window for group in groups}, reverse=True)
    windows = windows[: max(1, _TRIALS // max(1, len(groups)))]
    places = _fill_in_order(whole, rooms, 0)
    if places is not None and _ELSEWHERE not in places:
        return places
    best: list[int] | None = None
    least = sum([group.size for group in groups]) + 1
    for window in windows:
        places = _fill_in_order(groups, rooms, window)
        if places is None:
            continue
        elsewhere = [g.size - g.fixed for g, p in zip(groups, places, strict=True) if p < 0]
        if sum(elsewhere) < least:
            best, least = places, sum(elsewhere)
    return best


def _fill_in_order(groups: Sequence[_Group], rooms: Sequence[int], window: int) -> list[int] | None:
    """Place groups on one device after the other, then into gaps.

    Args:
        groups: what is placed.
        rooms: bytes of each device.
        window: kept free on the first device; a group that needs a larger one has to be placed.

    Returns:
        The device of each; None if the first has no room for the window of what is elsewhere.
    """
    left = list(rooms)
    # The buffers of all groups are on the first device, but for groups on another one.
    left[0] -= window + sum([group.fixed for group in groups])
    places = [_ELSEWHERE] * len(groups)

    def put(number: int, device: int) -> bool:
        _, size, fixed, _ = groups[number]
        nbytes = size if device else size - fixed
        if nbytes > left[device]:
            return False
        left[device] -= nbytes
        left[0] += fixed if device else 0
        places[number] = device
        return True

    has_to_be_placed = sum([group.size for group in groups if group.window > window])
    device = 0
    for number, group in enumerate(groups):
        if device == len(rooms):
            break
        if group.window > window:
            has_to_be_placed -= group.size
        elif group.size > sum(left[device:]) - has_to_be_placed:
            continue
        while device < len(rooms) and not put(number, device):
            device += 1  # what a device has no room for closes it, until gaps are filled
    for number, group in enumerate(groups):
        if places[number] == _ELSEWHERE and group.size - group.fixed <= max(left):
            for device in range(len(rooms)):
                if put(number, device):
                    break
    needed = [group.window for group, place in zip(groups, places, strict=True) if place < 0]
    return places if left[0] + window >= max(needed, default=0) else None


def _plan(
    weights: Weights,
    groups: Sequence[_Group],
    limits: Mapping[Device, int],
    placement: _Placement,
    short: Mapping[Device, int] | None = None,
) -> Plan:
    """Return the plan of a placement, with what it uses of each device."""
    execution = placement.execution
    where: list[Device | None] = [None] * len(weights.units)
    parameters = dict.fromkeys(limits, 0)
    buffers = dict.fromkeys(limits, 0)
    for group, device in zip(groups, placement.devices, strict=True):
        # Buffers that are not fetched are where their group runs.
        stays = group.fixed and device in STORES
        at = execution if stays and execution is not None else device
        for number in group.units:
            where[number] = device
            parameters[device] += weights.units[number].parameters
            buffers[at] += weights.units[number].buffers
    uses = [
        DeviceUse(
            device,
            None if nbytes == _NO_LIMIT else nbytes,
            parameters[device],
            buffers[device],
            placement.windows.get(device, 0),
        )
        for device, nbytes in limits.items()
    ]
    # Modules without tensors follow the unit before them, the first ones that after them.
    known = (device for device in where if device is not None)
    last = next(known, "cpu" if execution is None else execution)
    for number, at_unit in enumerate(where):
        last = where[number] = last if at_unit is None else at_unit
    devices = tuple(device for device in where if device is not None)
    return Plan(weights, devices, tuple(uses), execution, placement.fits, short)


def _short_by(groups: Sequence[_Group], limits: Mapping[Device, int]) -> dict[Device, int]:
    """Return how many bytes more would do, of the first accelerator, the host, or the disk."""
    enough = sum(group.size for group in groups)
    enough += max((group.window for group in groups), default=0)
    short: dict[Device, int] = {}
    for device in dict.fromkeys([*list(limits)[:1], "cpu", "disk"]):
        budget = limits.get(device, _NO_LIMIT)
        if budget == _NO_LIMIT:
            continue

        def fits(nbytes: int, device: Device = device) -> bool:
            return _place(groups, {**limits, device: nbytes}).fits

        if fits(max(budget, enough)):
            short[device] = 1 + bisect_left(range(budget + 1, enough), True, key=fits)
    return short


def _message(plan: Plan) -> str:
    """Return why nothing fits, and the smallest budgets that would do."""
    sized = [unit for unit in plan.weights.units if unit.nbytes] or plan.weights.units
    largest = max(sized, key=lambda unit: unit.nbytes + unit.shared)
    text = (
        f"The model ({size_of(plan.weights.nbytes)}, its largest unit {largest.name!r} with "
        f"{size_of(largest.nbytes + largest.shared)}) does not fit the budgets"
    )
    budgets = {use.device: use.budget or 0 for use in plan.devices}
    needed = {device: budgets[device] + more for device, more in (plan.short_by or {}).items()}
    if not needed:
        return f"{text}: give one to a device that computes, as {{0: '8GB'}} or {{'cpu': '16GB'}}."
    ways = " or ".join(f"{size:,} bytes ({size_of(size)}) of {d}" for d, size in needed.items())
    return f"{text}. With the other budgets as they are, it needs at least {ways}."
