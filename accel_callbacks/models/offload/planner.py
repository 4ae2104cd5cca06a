"""Plan the device of each unit of a model, from sizes and budgets alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import add
from typing import NamedTuple

from accel_callbacks.errors import nearest
from accel_callbacks.models.offload.budgets import Budget, Device, budgets_of
from accel_callbacks.models.offload.placement import ELSEWHERE, Items, balance, place
from accel_callbacks.models.offload.sizes import convert_file_size_to_int
from accel_callbacks.models.offload.weights import Unit, Weights
from accel_callbacks.terminal_text import size_of, table

__all__ = ["POLICIES", "DeviceUse", "Plan", "PlanError", "plan"]

POLICIES = ("auto", "sequential", "balanced", "balanced_low_0")
_NO_LIMIT = 1 << 62
_STORES = ("cpu", "disk")


@dataclass(frozen=True)
class DeviceUse:
    """The use of one device in a plan, in bytes.

    Args:
        device: number or name.
        budget: what it may hold; None for no limit.
        weights: parameters on it.
        buffers: buffers on it, those of offloaded units too where these stay.
        cache: the share of the cache of keys and values.
        window: kept free for offloaded units while they run.
        activations: kept free for activations.

    Example:
        >>> from accel_callbacks.offload import DeviceUse
        >>> DeviceUse(0, budget=10, weights=4, window=3).left
        3
    """

    device: Device
    budget: int | None
    weights: int = 0
    buffers: int = 0
    cache: int = 0
    window: int = 0
    activations: int = 0

    @property
    def reserve(self) -> int:
        """Bytes kept free: window and activations."""
        return self.window + self.activations

    @property
    def used(self) -> int:
        """Sum of all."""
        return self.weights + self.buffers + self.cache + self.reserve

    @property
    def left(self) -> int | None:
        """Bytes of the budget that nothing uses; None without a limit."""
        return None if self.budget is None else self.budget - self.used


@dataclass(frozen=True)
class Plan:
    """The device of each unit, and the reasons.

    Args:
        weights: what was planned.
        where: the device of each unit.
        devices: what is used of each device, in the order in which they are filled.
        execution_device: where offloaded units run; None if nothing runs anywhere.
        policy: how accelerators share what fits.
        fits: no budget is exceeded.
        short_by: if it does not fit, how many bytes more of a device would do, for each device of
            which more would.

    Example:
        >>> from accel_callbacks.offload import plan
        >>> plan_of_model = plan({"a.w": 6, "b.w": 4, "c.w": 4}, {0: 10, "cpu": 20}, prefetch=0)
        >>> plan_of_model.device_map
        {'a': 0, 'b': 'cpu', 'c': 'cpu'}
        >>> print(plan_of_model.explain("b"))
        b: 4 B on cpu: does not fit 0 (4 B > 0 B left); runs on 0
    """

    weights: Weights
    where: tuple[Device, ...]
    devices: tuple[DeviceUse, ...]
    execution_device: Device | None
    policy: str
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
            if use.device != self.execution_device and use.device in _STORES
        )

    @cached_property
    def _groups(self) -> list[list[int]]:
        return groups_of(self.weights.units)

    @cached_property
    def _group_of(self) -> dict[int, list[int]]:
        return {number: group for group in self._groups for number in group}

    def explain(self, name: str) -> str:
        """Return one line for each unit that a module or tensor has part in, with the reason.

        Raises:
            KeyError: there is no such name in the plan.

        Example:
            >>> from accel_callbacks.offload import plan
            >>> print(plan({"a.w": 6}, {0: 10}).explain("a.w"))
            a: 6 B on 0: fits
        """
        units = self.weights.units
        chosen = [
            number
            for number, unit in enumerate(units)
            if name in ("", unit.name) or unit.name.startswith(f"{name}.")
        ]
        if not chosen:  # a module or tensor inside of a unit
            inside = [n for n, unit in enumerate(units) if name.startswith(f"{unit.name}.")]
            chosen = inside[-1:]
        if not chosen:
            hint = nearest(name, [unit.name for unit in units])
            raise KeyError(f"no unit of the plan is {name!r}, has it or is in it.{hint}")
        return "\n".join(
            f"{units[n].name}: {size_of(units[n].nbytes)} on {self.where[n]}: {self._reason(n)}"
            for n in chosen
        )

    def _reason(self, number: int) -> str:
        """Return the reason for the device of a unit."""
        unit, device = self.weights.units[number], self.where[number]
        group = self._group_of[number]
        tied = [self.weights.units[member].name for member in group if member != number]
        reasons = [f"tied to {', '.join(tied[:3])}"] if tied and unit.ties else []
        if unit.nbytes or unit.shared:
            size = sum(self.weights.units[member].nbytes for member in group)
            for use in self.devices:
                if use.device == device:
                    break
                reasons.append(self._refused(use, size))
        if device in _STORES and device != self.execution_device:
            reasons.append(
                "runs on nothing"
                if self.execution_device is None
                else f"runs on {self.execution_device}"
            )
        return "; ".join(filter(None, reasons)) or "fits"

    def _refused(self, use: DeviceUse, size: int) -> str:
        """Return the reason why a unit is not on a device that is filled earlier."""
        if self.policy != "sequential" and use.used and not self.offloaded:
            return f"{use.device} has its share"
        if use.left is not None and size > use.left:
            return f"does not fit {use.device} ({size_of(size)} > {size_of(max(0, use.left))} left)"
        if not use.used:
            return f"{use.device} is not used: it has no room for a window"
        return f"after units that do not fit {use.device}"

    def table(self, *, every_unit: bool = False) -> str:
        """Return the plan as text: a line for each device, then one for each run of units.

        Args:
            every_unit: a line for each unit, also where neighbors are alike.

        Example:
            >>> from accel_callbacks.offload import plan
            >>> print(plan({"a.w": 6, "b.w": 4}, {0: 10, "cpu": 20}).table())
            DEVICE  BUDGET  WEIGHTS  BUFFERS  RESERVE  LEFT
            0       10 B    10 B     0 B      0 B      0 B
            cpu     20 B    0 B      0 B      0 B      20 B
            disk    -       0 B      0 B      0 B      -
            <BLANKLINE>
            UNITS   COUNT  SIZE  DEVICE  REASON
            a to b  2      10 B  0       fits
        """
        head = ["DEVICE", "BUDGET", "WEIGHTS", "BUFFERS", "CACHE", "RESERVE", "LEFT"]
        rows = [
            [
                str(use.device),
                _text(use.budget),
                size_of(use.weights),
                size_of(use.buffers),
                size_of(use.cache),
                size_of(use.reserve),
                _text(use.left),
            ]
            for use in self.devices
        ]
        if not any(use.cache for use in self.devices):
            rows = [[cell for at, cell in enumerate(row) if at != 4] for row in rows]
            head.remove("CACHE")
        units = table(
            ("UNITS", "COUNT", "SIZE", "DEVICE", "REASON"),
            [
                (name, str(count), size_of(nbytes), str(device), reason)
                for name, count, nbytes, device, reason in self.runs(every_unit)
            ],
        )
        return f"{table(head, rows)}\n\n{units}"

    def runs(self, every_unit: bool = False) -> Iterator[tuple[str, int, int, Device, str]]:
        """Yield names, count, bytes, device and reason of neighbors that are on one device.

        Args:
            every_unit: yield each alone.

        Example:
            >>> from accel_callbacks.offload import plan
            >>> list(plan({"a.w": 6, "b.w": 4}, {0: 10}).runs())
            [('a to b', 2, 10, 0, 'fits')]
        """
        units = self.weights.units
        sized = [n for n, unit in enumerate(units) if unit.nbytes or unit.shared]
        reasons = {n: self._reason(n) for n in sized}
        # The number in the key keeps units apart that are to have a line each.
        keys = groupby(sized, lambda n: (self.where[n], _kind(reasons[n]), n if every_unit else -1))
        for (device, _, _), numbers in keys:
            run = list(numbers)
            first, last = units[run[0]].name, units[run[-1]].name
            name = first if len(run) == 1 else f"{first} to {last}"
            yield name, len(run), sum(units[n].nbytes for n in run), device, reasons[run[0]]


def _kind(reason: str) -> str:
    """Return a reason without its figures."""
    return "".join(character for character in reason.partition("(")[0] if not character.isdigit())


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


class _Request(NamedTuple):
    """The arguments of a plan that stay the same for all budgets that are tried."""

    weights: Weights
    groups: list[list[int]]
    items: Items
    cache: list[int]
    policy: str
    factor: int
    activations: int
    keep_buffers: bool


class _Placed(NamedTuple):
    """The device of each group; None for one that has no bytes."""

    devices: list[Device]
    execution: Device | None
    windows: Mapping[Device, int]
    fits: bool


def plan(
    weights: Weights | Mapping[str, int],
    budgets: Mapping[Device, int | float | str | None] | Iterable[Budget],
    policy: str = "auto",
    *,
    activations: int | str = 0,
    kv_cache: int | str = 0,
    prefetch: int = 1,
    offload_buffers: bool = False,
) -> Plan:
    """Plan the device of each unit of a model.

    Accelerators are filled first, then ``"cpu"``, then ``"disk"``, which has no limit if no budget
    is given for it. Units that are not on an accelerator run on the first one: it keeps a window
    free for the largest of them and those that are fetched ahead, and their buffers. Units that
    share a parameter are on one device. If keeping a large unit makes for a smaller window, it is
    kept. The same arguments in any order give the same plan; nothing here looks at hardware.

    Args:
        weights: the units of a model, or bytes by the names of tensors.
        budgets: bytes, or text such as ``"8GB"``, by device; see ``get_max_memory``.
        policy: how accelerators share a model that they hold whole. ``"sequential"`` fills one
            after the other, ``"balanced"`` (also ``"auto"``) leaves the fullest as much room as
            possible, ``"balanced_low_0"`` puts on the first what the others do not hold. A model
            that they do not hold whole fills them in each case.
        activations: bytes that each device needs to compute.
        kv_cache: bytes of the cache of keys and values, for all blocks. A block's share is where
            the block runs.
        prefetch: offloaded units that are fetched ahead of the one that runs.
        offload_buffers: buffers of offloaded units are fetched too.

    Raises:
        PlanError: nothing keeps the budgets.
        ValueError: an argument that is invalid.

    Example:
        >>> from accel_callbacks.offload import plan
        >>> sizes = {f"blocks.{number}.mlp.weight": 4 for number in range(4)}
        >>> plan(sizes, {0: 8, 1: 8}).device_map
        {'blocks.0': 0, 'blocks.1': 0, 'blocks.2': 1, 'blocks.3': 1}
    """
    if policy not in POLICIES:
        raise ValueError(
            f"policy={policy!r} is not one of {', '.join(POLICIES)}.{nearest(policy, POLICIES)}"
        )
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch!r}: a number of units from 0 on.")
    if isinstance(weights, Mapping):
        weights = Weights.of_sizes(weights)
    known = budgets_of(
        budgets
        if isinstance(budgets, Mapping)
        else {budget.device: budget.nbytes for budget in budgets}
    )
    request = _request(
        weights,
        policy,
        1 + prefetch,
        convert_file_size_to_int(activations),
        convert_file_size_to_int(kv_cache),
        not offload_buffers,
    )
    placed = _place(request, known)
    if placed.fits:
        return _plan(request, known, placed)
    short = _short_by(request, known)
    incomplete = _plan(request, known, placed, short)
    raise PlanError(_message(incomplete, known), incomplete)


def offloaded_bytes(weights: Weights, budgets: Mapping[Device, int]) -> int:
    """Return what a sequential plan without prefetch offloads; all bytes if there is none."""
    known = budgets_of(budgets)
    request = _request(weights, "sequential", 1, 0, 0, True)
    placed = _place(request, known)
    return _plan(request, known, placed).offloaded if placed.fits else weights.nbytes


def _request(
    weights: Weights, policy: str, factor: int, activations: int, cache: int, keep_buffers: bool
) -> _Request:
    """Sum up sizes by groups of units that are on one device."""
    units = weights.units
    parameters = [unit.parameters for unit in units]
    buffers = [unit.buffers for unit in units]
    windows = [unit.parameters + unit.shared for unit in units]
    holders = [n for n, unit in enumerate(units) if unit.is_block]
    holders = holders or [n for n, nbytes in enumerate(parameters) if nbytes]
    caches = [0] * len(units)
    for at, number in enumerate(holders):
        caches[number] = cache // len(holders) + (at < cache % len(holders))
    moved, fixed = (
        (parameters, buffers)
        if keep_buffers
        else (list(map(add, parameters, buffers)), [0] * len(units))
    )
    if not keep_buffers:
        windows = list(map(add, windows, buffers))
    fixed = list(map(add, fixed, caches))
    held = list(map(add, map(add, windows, buffers), caches))
    groups = [group for group in groups_of(units) if any(held[n] for n in group)]
    if len(groups) < len(units):  # otherwise each unit is a group, in their order
        moved, fixed, caches = (
            [sum([values[n] for n in group]) for group in groups]
            for values in (moved, fixed, caches)
        )
        windows = [max([windows[n] for n in group]) for group in groups]
    items = Items(moved, fixed, windows)
    return _Request(weights, groups, items, caches, policy, factor, activations, keep_buffers)


def groups_of(units: Sequence[Unit]) -> list[list[int]]:
    """Return the groups of unit numbers that share a parameter, directly or transitively."""
    leader = list(range(len(units)))

    # Union-find with path halving; the smallest number leads a group.
    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    holder: dict[str, int] = {}
    tied = [number for number, unit in enumerate(units) if unit.ties]
    if not tied:
        return [[number] for number in leader]
    for number in tied:
        for tie in units[number].ties:
            root, other_root = find(number), find(holder.setdefault(tie, number))
            leader[max(root, other_root)] = min(root, other_root)
    groups: dict[int, list[int]] = {}
    for number in range(len(units)):
        groups.setdefault(find(number), []).append(number)
    return list(groups.values())


def _place(request: _Request, budgets: Sequence[Budget]) -> _Placed:
    """Place on accelerators, then on the host, then on disk."""
    sizes = {b.device: _NO_LIMIT if b.nbytes is None else b.nbytes for b in budgets}
    fast = [b.device for b in budgets if b.device not in _STORES and sizes[b.device]]
    for start in range(len(fast)):
        placed = _on_accelerators(request, sizes, fast[start:])
        if placed is not None and _shows_execution(placed):
            return placed
    for device in fast:  # only to run what is elsewhere
        placed = _on_accelerators(request, sizes, [device])
        if placed is not None:
            return placed
    if sizes.get("cpu"):
        room = sizes["cpu"] - request.activations
        placement = place(request.items, [room], request.factor) if room >= 0 else None
        if placement is not None:
            return _stored(request, sizes, placement, ["cpu"], "cpu")
    if not request.groups:
        return _Placed([], next(iter([*fast, "cpu"])), {}, True)
    first: Device | None = fast[0] if fast else "cpu" if sizes.get("cpu") else None
    if first is None:
        return _Placed(["disk"] * len(request.groups), None, {}, False)
    devices = fast or ["cpu"]
    placement = place(request.items, [sizes[device] for device in devices], 0)
    stored = _stored(request, sizes, placement or [], devices, first, with_windows=False)
    return stored._replace(fits=False)


def _shows_execution(placed: _Placed) -> bool:
    """Return whether a device map implies the execution device: its first accelerator."""
    return placed.execution in placed.devices or set(placed.devices).isdisjoint(_STORES)


def _on_accelerators(
    request: _Request, sizes: Mapping[Device, int], fast: Sequence[Device]
) -> _Placed | None:
    """Place groups on accelerators; None if the first has no room for the window of the rest."""
    rooms = [sizes[device] - request.activations for device in fast]
    if rooms[0] < 0:
        return None
    rooms = [max(0, room) for room in rooms]
    placement = None
    if request.policy != "sequential":
        placement = balance(request.items.sizes, rooms, request.policy == "balanced_low_0")
    if placement is None:
        placement = place(request.items, rooms, request.factor)
    if placement is not None and 0 not in placement:
        placement = _with_first(request, placement, rooms[0])
    return None if placement is None else _stored(request, sizes, placement, fast, fast[0])


def _with_first(request: _Request, placement: Sequence[int], room: int) -> list[int]:
    """Return a placement with a group on the first device, which implies that it runs the rest."""
    items = request.items
    away = [n for n, device in enumerate(placement) if device == ELSEWHERE]
    room -= request.factor * max((items.windows[n] for n in away), default=0)
    room -= sum(items.fixed[n] for n in away)
    fitting = (
        n for n, size in enumerate(items.sizes) if placement[n] != ELSEWHERE and size <= room
    )
    number = next(fitting, None) if away else None
    return [0 if n == number else device for n, device in enumerate(placement)]


def _stored(
    request: _Request,
    sizes: Mapping[Device, int],
    placement: Sequence[int],
    devices: Sequence[Device],
    execution: Device,
    with_windows: bool = True,
) -> _Placed:
    """Place the groups that no computing device holds: on the host, then on disk."""
    items, factor = request.items, request.factor
    rest = [n for n, device in enumerate(placement) if device == ELSEWHERE]
    group_devices: list[Device] = [devices[device] for device in placement]
    for number in rest:
        group_devices[number] = "disk"
    windows = {execution: factor * max((items.windows[n] for n in rest), default=0)}
    fits = True
    if rest and execution != "cpu" and sizes.get("cpu"):
        waiting = Items(
            [items.moved[n] for n in rest], [0] * len(rest), [items.windows[n] for n in rest]
        )
        # What comes from disk goes through the host's memory.
        held = place(waiting, [sizes["cpu"]], factor if with_windows else 0)
        fits = held is not None
        for number, device in zip(rest, held or [ELSEWHERE] * len(rest), strict=True):
            group_devices[number] = "disk" if device == ELSEWHERE else "cpu"
        staged = [items.windows[n] for n in rest if group_devices[n] == "disk"]
        windows["cpu"] = factor * max(staged, default=0)
    on_disk = sum(items.moved[n] for n in rest if group_devices[n] == "disk")
    return _Placed(group_devices, execution, windows, fits and on_disk <= sizes["disk"])


def _plan(
    request: _Request,
    budgets: Sequence[Budget],
    placed: _Placed,
    short: Mapping[Device, int] | None = None,
) -> Plan:
    """Return the plan of a placement, with what it uses of each device."""
    units = request.weights.units
    unit_devices: list[Device | None] = [None] * len(units)
    weights, buffers, cache = ({budget.device: 0 for budget in budgets} for _ in range(3))
    for group, device, share in zip(request.groups, placed.devices, request.cache, strict=True):
        cache[_of_fixed(True, device, placed)] += share
        of_buffers = _of_fixed(request.keep_buffers, device, placed)
        for number in group:
            unit_devices[number] = device
            weights[device] += units[number].parameters
            buffers[of_buffers] += units[number].buffers
    computing = {placed.execution} if request.groups else set()
    computing |= {device for device in placed.devices if device not in _STORES}
    uses = tuple(
        DeviceUse(
            budget.device,
            budget.nbytes,
            weights[budget.device],
            buffers[budget.device],
            cache[budget.device],
            placed.windows.get(budget.device, 0),
            request.activations if budget.device in computing else 0,
        )
        for budget in budgets
    )
    return Plan(
        request.weights,
        tuple(_next_to(unit_devices, placed.execution)),
        uses,
        placed.execution,
        request.policy,
        placed.fits,
        short,
    )


def _of_fixed(keep: bool, device: Device, placed: _Placed) -> Device:
    """Return the device of a unit's buffers and cache."""
    offloaded = device in _STORES and device != placed.execution
    return placed.execution if keep and offloaded and placed.execution is not None else device


def _next_to(devices: Sequence[Device | None], default: Device | None) -> Iterator[Device]:
    """Yield the devices; modules without tensors follow the unit before them."""
    last = next((device for device in devices if device is not None), default)
    for device in devices:
        last = last if device is None else device
        yield "cpu" if last is None else last


def _short_by(request: _Request, budgets: Sequence[Budget]) -> dict[Device, int]:
    """Return by device how many bytes more would suffice."""
    enough = sum(request.items.sizes) + request.activations
    enough += request.factor * max(request.items.windows, default=0)
    short: dict[Device, int] = {}
    fast = [budget.device for budget in budgets if budget.device not in _STORES]
    limits = {budget.device: budget.nbytes for budget in budgets}
    for device in [*fast[:1], "cpu", "disk"]:
        now = limits.get(device)
        if device not in limits or now is None:
            continue

        def fits(nbytes: int, device: Device = device) -> bool:
            tried = [Budget(b.device, nbytes) if b.device == device else b for b in budgets]
            return _place(request, tried).fits

        if fits(max(now, enough)):
            short[device] = 1 + bisect_left(range(now + 1, enough), True, key=fits)
    return short


def _message(plan: Plan, budgets: Sequence[Budget]) -> str:
    """Return the error text: why nothing fits, and the smallest budgets that would suffice."""
    sizes = {budget.device: budget.nbytes or 0 for budget in budgets}
    units = plan.weights.units
    sized = [unit for unit in units if unit.nbytes] or units  # there may be no more than a cache
    largest = max(sized, key=lambda unit: unit.nbytes + unit.shared)
    text = (
        f"The model ({size_of(plan.weights.nbytes)}, its largest unit {largest.name!r} with "
        f"{size_of(largest.nbytes + largest.shared)}) does not fit the budgets"
    )
    if not plan.short_by:
        return f"{text}: give one to a device that computes, as {{0: '8GB'}} or {{'cpu': '16GB'}}."
    ways = " or ".join(
        f"{sizes[device] + more:,} bytes ({size_of(sizes[device] + more)}) of {device}"
        for device, more in plan.short_by.items()
    )
    return f"{text}. With the other budgets as they are, it needs at least {ways}."
