"""Place sized items on devices of limited capacity: integers only, no names and no devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["ELSEWHERE", "Items", "balance", "place"]

ELSEWHERE = -1
_TRIALS = 40_000  # items to look at in all, over the sizes of a window that are tried


class Items(NamedTuple):
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

    @property
    def sizes(self) -> list[int]:
        """Bytes of each on a device of its own."""
        return [moved + fixed for moved, fixed in zip(self.moved, self.fixed, strict=True)]


def place(items: Items, capacities: Sequence[int], factor: int) -> list[int] | None:
    """Return the device of each item, or `ELSEWHERE`; None if the first has no room for a window.

    In order, from the first device on; what a device has no room for closes it, and gaps are filled
    afterwards by what would be elsewhere. The first device keeps room for `factor` times the
    largest window of what is elsewhere, if anything is.

    Args:
        items: what is placed.
        capacities: bytes of each device.
        factor: how many windows there are at a time.

    Example:
        >>> from accel_callbacks.offload.placement import Items, place
        >>> items = Items(moved=[4, 4, 4], fixed=[0, 0, 0], windows=[4, 4, 4])
        >>> place(items, [12], 1), place(items, [11], 1)
        ([0, 0, 0], [0, -1, -1])
    """
    whole = _fill(items, capacities, 0, 0)
    if whole is not None and ELSEWHERE not in whole:
        return whole
    best: list[int] | None = None
    least = -1
    for window in _windows(items, capacities, factor):
        found = _fill(items, capacities, window, factor)
        if found is None:
            continue
        rest = sum(
            moved for moved, device in zip(items.moved, found, strict=True) if device == ELSEWHERE
        )
        if best is None or rest < least:
            best, least = found, rest
    return best


def _windows(items: Items, capacities: Sequence[int], factor: int) -> list[int]:
    """Return sizes of the window to try: that of a placement in plain order, and its neighbours."""
    count = len(items.windows)
    largest = list(accumulate(reversed(items.windows), max, initial=0))[::-1]
    ends = [0, *accumulate(items.sizes)]
    fixed = [0, *accumulate(items.fixed)]

    def covered(first: int) -> int:
        """Return how many items fit in order if those from `first` on are elsewhere."""
        room = capacities[0] - factor * largest[first] - (fixed[count] - fixed[first])
        at = max(0, bisect_right(ends, room) - 1)
        for capacity in capacities[1:]:
            at = bisect_right(ends, ends[at] + capacity) - 1
        return at

    # Fewer items elsewhere need no larger window: from above, the first fixed point is the best.
    first = count
    while (shorter := covered(first)) < first:
        first = shorter
    plain = largest[first]
    distinct = sorted(set(items.windows), reverse=True)
    near = [size for size in distinct if size < plain] + [
        size for size in reversed(distinct) if size > plain
    ]
    return [plain, *near[: max(1, _TRIALS // max(1, count)) - 1]]


def _fill(items: Items, capacities: Sequence[int], window: int, factor: int) -> list[int] | None:
    """Place items if a window of a size is kept; what needs a larger one must not be elsewhere."""
    moved, sizes, windows = items.moved, items.sizes, items.windows
    left = list(capacities)
    left[0] -= factor * window + (sum(items.fixed) if factor else 0)
    here = moved if factor else sizes  # what the fixed bytes are counted for already
    devices, device = len(left), 0
    where = [ELSEWHERE] * len(sizes)
    held = sum(
        size for size, needed in zip(sizes, windows, strict=True) if factor and needed > window
    )
    free = sum(left)
    for number, size in enumerate(sizes):
        must = factor > 0 and windows[number] > window
        if must:
            held -= size
        elif size > free - held:
            continue  # what must not be elsewhere needs the room
        while device < devices and (size if device else here[number]) > left[device]:
            free -= left[device]
            device += 1
        if device == devices:
            if not must:
                break
            continue
        taken = size if device else here[number]
        left[device] -= taken
        free -= taken
        where[number] = device
        if device and factor:
            left[0] += items.fixed[number]
    waiting = [number for number, device in enumerate(where) if device == ELSEWHERE]
    while waiting:
        before = len(waiting)
        waiting = _gaps(items, here, sizes, waiting, where, left, factor)
        needed = max((windows[number] for number in waiting), default=0) if factor else 0
        if needed > window:
            return None
        left[0] += factor * (window - needed)
        if len(waiting) == before and needed == window:
            break
        window = needed
    return where if left[0] >= 0 else None


def _gaps(
    items: Items,
    here: Sequence[int],
    sizes: Sequence[int],
    waiting: Sequence[int],
    where: list[int],
    left: list[int],
    factor: int,
) -> list[int]:
    """Put items where there still is room; return those for which there is none."""
    rest = []
    room = max(left)
    for number in waiting:
        if here[number] <= room:
            for device, space in enumerate(left):
                taken = sizes[number] if device else here[number]
                if taken <= space:
                    left[device] -= taken
                    where[number] = device
                    if device and factor:
                        left[0] += items.fixed[number]
                    room = max(left)
                    break
            else:
                rest.append(number)
        else:
            rest.append(number)
    return rest


def balance(sizes: Sequence[int], capacities: Sequence[int], low_first: bool) -> list[int] | None:
    """Place all items in order so that the fullest device holds least; None if not all fit.

    Args:
        sizes: bytes of each item.
        capacities: bytes of each device.
        low_first: the first device takes only what the others have no room for.

    Example:
        >>> from accel_callbacks.offload.placement import balance
        >>> balance([1, 1, 1, 1], [4, 4], low_first=False)
        [0, 0, 1, 1]
    """
    ends = [0, *accumulate(sizes)]
    count, total = len(sizes), ends[-1]

    def reached(limit: int, first: int = 0, start: int = 0) -> int:
        for capacity in capacities[start:]:
            first = bisect_right(ends, ends[first] + min(limit, capacity)) - 1
        return first

    if reached(total) < count:
        return None
    begin = 0
    if low_first and len(capacities) > 1:
        low, high = 0, count
        while low < high:  # the fewest items for the first device
            middle = (low + high) // 2
            if reached(total, middle, 1) == count:
                high = middle
            else:
                low = middle + 1
        begin = low
    start = 1 if low_first and len(capacities) > 1 else 0
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if reached(middle, begin, start) == count:
            high = middle
        else:
            low = middle + 1
    where = [0] * begin
    for device in range(start, len(capacities)):
        at = len(where)
        end = bisect_right(ends, ends[at] + min(low, capacities[device])) - 1
        where += [device] * (end - at)
    return where
