"""Place sized items on devices of limited capacity: integers only, no names and no devices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import add

__all__ = ["ELSEWHERE", "Items", "balance", "place"]

ELSEWHERE = -1
_TRIALS = 30_000  # items to look at in all, over the sizes of a window that are tried
_GAIN = 100  # the part of all bytes that a trial must be able to gain


@dataclass(frozen=True)
class Items:
    """What is placed, in order.

    Args:
        moved: bytes that go where the item is placed.
        fixed: bytes that go with it, but to the first device if it is placed elsewhere: they are
            needed while it computes, and are not fetched.
        windows: bytes that the first device needs while it computes with an item from elsewhere.
    """

    moved: Sequence[int]
    fixed: Sequence[int]
    windows: Sequence[int]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each on a device of its own."""
        return list(map(add, self.moved, self.fixed))


def place(items: Items, capacities: Sequence[int], factor: int) -> list[int] | None:
    """Return the device of each item, or `ELSEWHERE`; None if the first has no room for a window.

    In order, from the first device on; what a device has no room for closes it, and gaps are filled
    afterwards by what would be elsewhere. The first device keeps room for `factor` times the
    largest window of what is elsewhere, if anything is.

    Args:
        items: what is placed.
        capacities: bytes of each device.
        factor: how many windows there are at a time.
    """
    best = _best(items, capacities, factor)
    least = _elsewhere(items, best)
    total = sum(items.moved)
    bound = total + sum(items.fixed) - sum(capacities) + factor * min(items.windows, default=0)
    if least == 0 or bound > least - total // _GAIN:
        return best
    # The largest first waste least, and tear neighbors apart: only for a gain.
    order = sorted(range(len(items.moved)), key=items.sizes.__getitem__, reverse=True)
    sorted_items = Items(
        *(
            [values[number] for number in order]
            for values in (items.moved, items.fixed, items.windows)
        )
    )
    packed = _best(sorted_items, capacities, factor)
    if packed is None or _elsewhere(sorted_items, packed) >= least - total // _GAIN:
        return best
    placement = [ELSEWHERE] * len(order)
    for number, device in zip(order, packed, strict=True):
        placement[number] = device
    return placement


def _elsewhere(items: Items, placement: Sequence[int] | None) -> int:
    """Return the bytes that no device holds; without a placement more than the total."""
    if placement is None:
        return 2 * sum(items.moved) + 1
    return sum(compress(items.moved, (device == ELSEWHERE for device in placement)))


def _best(items: Items, capacities: Sequence[int], factor: int) -> list[int] | None:
    """Return the placement with the fewest bytes elsewhere, over sizes of the window."""
    room = sum(capacities) - sum(items.fixed)
    total = sum(items.moved)
    if total <= room:
        whole = _fill(items, capacities, 0, 0)
        if whole is not None and ELSEWHERE not in whole:
            return whole
    best: list[int] | None = None
    least = 2 * total + 1
    plain, windows = _in_order(items, capacities, factor)
    for window, start in [(windows[0], plain), *((window, None) for window in windows)]:
        # Even without gaps this much is elsewhere: what gains next to nothing is not tried.
        if best is not None and total - (room - factor * window) > least - total // _GAIN:
            continue
        placement = _fill(items, capacities, window, factor, start)
        rest = _elsewhere(items, placement)
        if rest < least:
            best, least = placement, rest
    return best


def _in_order(items: Items, capacities: Sequence[int], factor: int) -> tuple[list[int], list[int]]:
    """Place in plain order until nothing fits; return that, and sizes of the window to try."""
    count = len(items.windows)
    largest = list(accumulate(reversed(items.windows), max, initial=0))[::-1]
    ends = [0, *accumulate(items.sizes)]
    fixed = [0, *accumulate(items.fixed)]

    def covered(first: int) -> list[int]:
        """Return where each device ends if items from `first` on are elsewhere."""
        room = capacities[0] - factor * largest[first] - (fixed[count] - fixed[first])
        bounds = [max(0, bisect_right(ends, room) - 1)]
        for capacity in capacities[1:]:
            bounds.append(bisect_right(ends, ends[bounds[-1]] + capacity) - 1)
        return bounds

    # Fewer items elsewhere need no larger window: from above, the first fixed point is the best.
    first, until = count, covered(count)
    while until[-1] < first:
        first = until[-1]
        until = covered(first)
    placement = [ELSEWHERE] * count
    for device, (begin, end) in enumerate(pairwise([0, *until])):
        placement[begin:end] = [device] * (end - begin)
    plain = largest[first]
    distinct = sorted(set(items.windows), reverse=True)
    near = [size for size in distinct if size < plain] + [
        size for size in reversed(distinct) if size > plain
    ]
    return placement, [plain, *near[: _TRIALS // max(1, count)]]


def _fill(
    items: Items,
    capacities: Sequence[int],
    window: int,
    factor: int,
    start: Sequence[int] | None = None,
) -> list[int] | None:
    """Place items if a window of a size is kept; what needs a larger one must not be elsewhere.

    With a start, only gaps are filled.
    """
    sizes = items.sizes
    left = list(capacities)
    left[0] -= factor * window + (sum(items.fixed) if factor else 0)
    # On the first device fixed bytes are counted from the start: they are there in any case.
    on_first = items.moved if factor else sizes
    if start is None:
        placement = _next_fit(items, sizes, on_first, left, window, factor)
    else:
        placement = list(start)
        for number, device in enumerate(placement):
            if device != ELSEWHERE:
                _take(items, sizes, on_first, left, number, device, factor)
    waiting = [number for number, device in enumerate(placement) if device == ELSEWHERE]
    while waiting:
        before = len(waiting)
        waiting = _gaps(items, sizes, on_first, waiting, placement, left, factor)
        needed = max((items.windows[number] for number in waiting), default=0) if factor else 0
        left[0] += factor * (window - needed)
        if len(waiting) == before and needed == window:
            break
        window = needed
    return placement if left[0] >= 0 else None


def _take(
    items: Items,
    sizes: Sequence[int],
    on_first: Sequence[int],
    left: list[int],
    number: int,
    device: int,
    factor: int,
) -> None:
    """Count an item on a device."""
    left[device] -= sizes[number] if device else on_first[number]
    if device and factor:
        left[0] += items.fixed[number]


def _next_fit(
    items: Items,
    sizes: Sequence[int],
    on_first: Sequence[int],
    left: list[int],
    window: int,
    factor: int,
) -> list[int]:
    """Place items in order; what a device has no room for closes it."""
    devices, device = len(left), 0
    placement = [ELSEWHERE] * len(sizes)
    needed = [factor > 0 and size > window for size in items.windows]
    held = sum(size for size, must in zip(sizes, needed, strict=True) if must)
    free = sum(left)
    for number, (size, must) in enumerate(zip(sizes, needed, strict=True)):
        if must:
            held -= size
        elif size > free - held:
            continue  # what must not be elsewhere needs the room
        while device < devices and (size if device else on_first[number]) > left[device]:
            free -= left[device]
            device += 1
        if device == devices:
            break
        free -= size if device else on_first[number]
        left[device] -= size if device else on_first[number]
        if device and factor:
            left[0] += items.fixed[number]
        placement[number] = device
    return placement


def _gaps(
    items: Items,
    sizes: Sequence[int],
    on_first: Sequence[int],
    waiting: Sequence[int],
    placement: list[int],
    left: list[int],
    factor: int,
) -> list[int]:
    """Place items into the room that is left; return those that do not fit."""
    rest = []
    room = max(left)
    for number in waiting:
        device = ELSEWHERE
        if on_first[number] <= room:
            needs = ((sizes[number] if device else on_first[number]) for device in range(len(left)))
            fitting = (device for device, need in enumerate(needs) if need <= left[device])
            device = next(fitting, ELSEWHERE)
        placement[number] = device
        if device == ELSEWHERE:
            rest.append(number)
        else:
            _take(items, sizes, on_first, left, number, device, factor)
            room = max(left)
    return rest


def balance(sizes: Sequence[int], capacities: Sequence[int], low_first: bool) -> list[int] | None:
    """Place all items in order so that the fullest device holds least; None if not all fit.

    Args:
        sizes: bytes of each item.
        capacities: bytes of each device.
        low_first: the first device takes only what the others have no room for.
    """
    ends = [0, *accumulate(sizes)]
    count, total = len(sizes), ends[-1]

    def reached(limit: int, first: int = 0, start: int = 0) -> int:
        for capacity in capacities[start:]:
            first = bisect_right(ends, ends[first] + min(limit, capacity)) - 1
        return first

    if reached(total) < count:
        return None
    begin = start = 0
    if low_first and len(capacities) > 1:  # the fewest items for the first device
        start = 1
        begin = bisect_left(range(count), True, key=lambda first: reached(total, first, 1) == count)
    # All items fit from some limit on, so bisection finds the least.
    limit = bisect_left(range(total), True, key=lambda most: reached(most, begin, start) == count)
    placement = [0] * begin
    for device in range(start, len(capacities)):
        at = len(placement)
        end = bisect_right(ends, ends[at] + min(limit, capacities[device])) - 1
        placement += [device] * (end - at)
    return placement
