"""Shard map-style datasets: plan the samples that each rank reads at each step."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, SequentialSampler

from accel_callbacks import collectives
from accel_callbacks.data.order import (
    GLOBAL,
    Draws,
    Generators,
    Record,
    draw_base_seed,
    draws_again,
    draws_at_random,
    epoch_order,
    length_of,
    own_generators,
    seeded_generator,
)
from accel_callbacks.data.sampler import (
    SeedableRandomSampler,
    call_set_epoch,
    mix_seed,
    set_seed_and_epoch,
    with_inner,
)
from accel_callbacks.data.sources import Delivery, Source, check_even, split_size
from checkpoint_io.warning import warn

__all__ = [
    "BatchPlan",
    "SamplePlan",
    "Share",
    "ShareSource",
    "fill_up",
    "ready_kept",
    "refuse_too_few",
    "split_evenly",
]

Batches = Sequence[Sequence[Any]]

_OTHER_ORDER = (
    "{} does not draw again what it drew before the checkpoint, so the rest of this epoch is not "
    "what was left of it: call its set_epoch before the pass, or let it draw from generators of "
    "torch, Python or NumPy only."
)
_DIFFERENT_ORDERS = (
    "{} gives other indices on each process, and prepare() gives each process a part of them, so "
    "that some samples are never seen and others twice: let it give the same order on all "
    "processes (seeded with the epoch, not with the rank), and the samples of all of them."
)
_PROBE = 1000
_AT_ONCE = 16  # batches
_STOPPED = (
    "an item of {}, or the collate_fn, raised StopIteration, which would end the epoch here in "
    "silence. It is often a next(...) of an iterator that is used up: give next() a default, or "
    "begin the iterator anew. `for index in range(len(dataset)): dataset[index]` shows which item."
)


class Share(NamedTuple):
    """The part of one global batch that this rank reads.

    Args:
        indices: of this rank's samples, padding included; the same number on all ranks (it may
            differ for a batch sampler or without padding).
        real: samples of the global batch, each counted once.
        padded: samples that all ranks read together; the last ``padded - real`` of them, in rank
            order, are repetitions.
        last: True if it is the last of its epoch; ``None`` if the loader counts its batches.
    """

    indices: Sequence[Any]
    real: int
    padded: int
    last: bool | None = None


@dataclass(frozen=True)
class SamplePlan:
    """A plan in which global batch k is the next ``batch_size * world_size`` samples of the order.

    Rank r reads the r-th contiguous piece. The last batch of an epoch is split evenly, and at most
    ``world_size - 1`` samples from the start of the epoch fill it up, so that all ranks take the
    same number of steps and the repetitions are the last in rank order.

    If not ``even``, nothing is filled up: some ranks read one sample more, and a tail of fewer
    samples than ranks joins the batch before it. Only a resume in that tail, of a run that had
    another number of ranks, still fills up, because the tail would be lost otherwise.

    Example:
        >>> from accel_callbacks.data.shard import SamplePlan
        >>> plan = SamplePlan(batch_size=2, drop_last=False, rank=1, world_size=2)
        >>> [list(share.indices) for share in plan.shares(range(7), 0)]
        [[2, 3], [6, 0]]
        >>> plan = SamplePlan(batch_size=2, drop_last=False, rank=1, world_size=2, even=False)
        >>> [list(share.indices) for share in plan.shares(range(9), 0)]
        [[2, 3], [7, 8]]
    """

    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    even: bool = True

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch."""
        return self.batch_size * self.world_size

    def check(self, order: Sequence[Any]) -> None:
        """Raise ValueError if the ranks cannot take the same number of steps."""
        if not self.even and not self.drop_last:
            refuse_too_few(len(order), self.world_size)

    def _layout(self, samples: int) -> tuple[int, int]:
        """Return (number of full batches, size of one more batch after them or 0)."""
        full, tail = divmod(samples, self.total_batch_size)
        if self.drop_last:
            return full, 0
        if self.even or not full or not 0 < tail < self.world_size:
            return full, tail
        return full - 1, self.total_batch_size + tail

    def steps(self, total: int) -> int:
        """Return the number of steps of an order of this length."""
        full, tail = self._layout(total)
        return full + (tail > 0)

    def remaining(self, order: Sequence[Any], position: int) -> int:
        """Return the number of global batches after ``position`` global samples."""
        return self.steps(max(len(order) - position, 0))

    def position_of(self, order: Sequence[Any], step: int) -> int:
        """Return the global samples before this step; all of them beyond the last step."""
        full, tail = self._layout(len(order))
        if step > full:
            return full * self.total_batch_size + tail
        return step * self.total_batch_size

    def shares(self, order: Sequence[Any], position: int) -> Iterator[Share]:
        """Yield this rank's share of each global batch after ``position`` global samples."""
        full, tail = self._layout(max(len(order) - position, 0))
        size = self.total_batch_size
        for step in range(full):
            first = position + step * size + self.rank * self.batch_size
            yield Share(list(order[first : first + self.batch_size]), size, size)
        if tail:
            start = position + full * size
            yield _divide(order[start : start + tail], order, self)


@dataclass(frozen=True)
class BatchPlan:
    """A plan for a custom batch sampler: at step k, rank r reads batch ``k * world_size + r``.

    The last step is filled up with batches from the start of the epoch. Positions still count
    samples.

    If not ``even``, the batches after the last full step are split over the ranks; if they hold
    fewer samples than there are ranks, they are split together with the step before.

    With ``split``, each batch of the sampler is a global batch, and is split over the ranks;
    samples from the start of the epoch fill it up, unless ``even`` is off.

    Args:
        rank: index of this process.
        world_size: number of processes.
        even: fill the last step up with repetitions.
        split: split each batch over the ranks.
        batch_size: of one rank, if the sampler has one; its batches may still be smaller.

    Example:
        >>> from accel_callbacks.data.shard import BatchPlan
        >>> plan = BatchPlan(rank=0, world_size=1)
        >>> [share.indices for share in plan.shares([[0], [1, 2]], 1)]
        [[1, 2]]
    """

    rank: int
    world_size: int
    even: bool = True
    split: bool = False
    batch_size: int | None = None

    drop_last = False  # a sampler that drops the last batch has done so already

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` if the sampler has no batch size."""
        return None if self.batch_size is None else self.batch_size * self.world_size

    @property
    def _per_step(self) -> int:
        """Batches of the sampler in a full step."""
        return 1 if self.split else self.world_size

    def check(self, order: Batches) -> None:
        """Raise ValueError if the ranks cannot take the same number of steps."""
        if not self.even:
            refuse_too_few(sum(map(len, order)), self.world_size)

    def steps(self, total: int) -> int | None:
        """Return the steps of an epoch of this many batches; ``None`` if their sizes decide."""
        certain = self.even or (not self.split and total % self.world_size == 0)
        return -(-total // self._per_step) if certain else None

    def remaining(self, order: Batches, position: int) -> int:
        """Return the number of global batches after ``position`` global samples."""
        return len(self._groups(order, position))

    def position_of(self, order: Batches, step: int) -> int:
        """Return the global samples before this step; all of them beyond the last step."""
        groups = self._groups(order, 0)
        return sum(len(batch) for group in groups[:step] for batch in group)

    def shares(self, order: Batches, position: int) -> Iterator[Share]:
        """Yield this rank's share of each global batch after ``position`` global samples."""
        for group in self._groups(order, position):
            yield self._share(group, order)

    def _groups(self, order: Batches, position: int) -> list[list[Sequence[Any]]]:
        """Return the sampler's batches of each step."""
        first, count = self.batches_before(order, position), self._per_step
        groups = [list(order[i : i + count]) for i in range(first, len(order), count)]
        return groups if self.even else self._join_short_steps(groups)

    def _join_short_steps(self, groups: list[list[Sequence[Any]]]) -> list[list[Sequence[Any]]]:
        """Join a step that has fewer samples than ranks with the step before it.

        If the first step is such a one, it joins the step after it.
        """
        joined: list[list[Sequence[Any]]] = []
        for group in groups:
            if joined and self.world_size > min(_samples(group), _samples(joined[-1])):
                joined[-1] = joined[-1] + group
            else:
                joined.append(group)
        return joined

    def _share(self, group: list[Sequence[Any]], order: Batches) -> Share:
        world, real = self.world_size, _samples(group)
        if not self.split and len(group) == world:
            return Share(group[self.rank], real, real)
        if self.even and not self.split:
            group = group + [order[extra % len(order)] for extra in range(world - len(group))]
            return Share(group[self.rank], real, _samples(group))
        return _divide(list(chain(*group)), list(chain(*order[:world])), self)

    def batches_before(self, order: Batches, position: int) -> int:
        """Return the number of the sampler's batches that end at or before ``position``."""
        first = seen = 0
        while first < len(order) and seen + len(order[first]) <= position:
            seen += len(order[first])
            first += 1
        return first


def _divide(samples: Sequence[Any], opening: Sequence[Any], plan: SamplePlan | BatchPlan) -> Share:
    """Return this rank's share of samples that are divided over all ranks."""
    real, world = len(samples), plan.world_size
    # Fewer samples than ranks are filled up in any case: a rank without one would miss a step.
    if not plan.even and real >= world:
        return Share(list(split_evenly(samples, plan.rank, world)), real, real)
    return Share(fill_up(samples, opening, plan.rank, world), real, -(-real // world) * world)


def _samples(group: Sequence[Sequence[Any]]) -> int:
    return sum(map(len, group))


def split_evenly(samples: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """Return the contiguous piece of one rank; the first ranks get one sample more if needed.

    Example:
        >>> from accel_callbacks.data.shard import split_evenly
        >>> [list(split_evenly(range(5), rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    each, more = divmod(len(samples), world_size)
    first = rank * each + min(rank, more)
    return samples[first : first + each + (rank < more)]


def fill_up(
    samples: Sequence[Any], opening: Sequence[Any], rank: int, world_size: int
) -> Sequence[Any]:
    """Return the piece of one rank, of equal length on all; ``opening`` fills the last ones up.

    Example:
        >>> from accel_callbacks.data.shard import fill_up
        >>> [fill_up([7, 8, 9], [0, 1], rank, 2) for rank in range(2)]
        [[7, 8], [9, 0]]
    """
    each = -(-len(samples) // world_size)
    piece = list(samples[rank * each : (rank + 1) * each])
    filler = max(rank * each - len(samples), 0)
    while len(piece) < each:
        piece.append(opening[filler % len(opening)])
        filler += 1
    return piece


def refuse_too_few(samples: int, world_size: int) -> None:
    """Raise if an epoch has fewer samples than ranks, none of which may be read twice."""
    if 0 < samples < world_size:
        raise ValueError(
            f"the epoch has {samples} samples for {world_size} processes, and with "
            "even_batches=False none is read twice: leave even_batches on for this loader, or "
            "start fewer processes."
        )


class ShareSource(Source):
    """The batches of a map-style dataset, by a plan over the sampler's order.

    It is the ``batch_sampler`` of the prepared loader (its ``sampler`` if ``batch_size=None``).

    A single process asks the sampler for the next batch when torch's loader asks for it, so that
    everything is drawn as in a plain loop. Several processes draw the whole order at the start of
    a pass, from the generators of rank 0.

    Args:
        loader: the user's.
        plan: the distribution of samples over steps and ranks.
        sampler: the source of the order: a batch sampler for a :class:`BatchPlan`.
        batched: the loader has a batch size or a batch sampler.
        seeded: the order is a function of seed and epoch.
        copies: number of processes that read each share.
        parts: number of ranks that share a batch of the batch sampler.

    Attributes:
        sampler: the source of the order; may be replaced, for the next pass.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: SamplePlan | BatchPlan,
        sampler: Any,
        batched: bool,
        seeded: bool = False,
        copies: int = 1,
        parts: int = 1,
    ) -> None:
        self._loader = loader
        self._copies, self._parts = copies, parts
        self._latest = self._current = plan
        self.sampler = sampler
        self._batched = batched
        self._seeded = seeded
        self._waiting: deque[Delivery] = deque()  # of the batches that are being read
        # Of the current pass: the sampler's draws, None if seeded; the whole order, if it is known.
        self._draws: Draws | None = None
        self._order: Any = None
        self._position = 0
        self._skip = 0  # batches of a batch sampler before the position
        self._fresh = self._workers_start = True
        self._compared = False  # the orders of the ranks, in the first pass
        self._counted = True  # the sampler has as many items as it says
        self._passes: tuple[int | None, int | None] = (None, None)  # digests of the last two

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins a pass of its own; the sampler's iterator may be a generator.
        return {**vars(self), "_draws": None, "_waiting": deque()}

    @property
    def batch_sampler(self) -> Any:
        """The user's batch sampler, which this one shares out."""
        return self._loader.batch_sampler

    @property
    def _plan(self) -> SamplePlan | BatchPlan:
        """The plan of the next pass: a script may change its batch sampler between epochs."""
        plan, batches = self._latest, self.batch_sampler
        size = getattr(batches, "batch_size", None)
        if batches is not None and size is not None:
            size = split_size(size, self._parts)
            if isinstance(plan, BatchPlan):
                plan = replace(plan, batch_size=size)
            elif (plan.batch_size, plan.drop_last) != (size, batches.drop_last):
                plan = replace(plan, batch_size=size, drop_last=batches.drop_last)
        return plan

    @_plan.setter
    def _plan(self, plan: SamplePlan | BatchPlan) -> None:
        self._latest = plan

    @property
    def batch_size(self) -> int | None:
        """Batch size of one rank, ``None`` if unknown; may be set, for the next pass."""
        return self._plan.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.batch_sampler.batch_size = size * self._parts

    @property
    def drop_last(self) -> bool:
        """True if a tail that does not fill a global batch is dropped; that of the loader."""
        return self._plan.drop_last

    @drop_last.setter
    def drop_last(self, drop: bool) -> None:
        self.batch_sampler.drop_last = drop

    @property
    def described(self) -> Any:
        """What the prepared loader names as its batch sampler: the user's, if no rank shares it."""
        return self.batch_sampler if self._alone else self

    @property
    def num_processes(self) -> int:
        """Number of processes that share the batches; 1 for a sampler that shares them itself."""
        return self._plan.world_size

    @num_processes.setter
    def num_processes(self, number: int) -> None:
        self._plan = replace(self._plan, world_size=number)

    @property
    def process_index(self) -> int:
        """Index of this process among those that share the batches."""
        return self._plan.rank

    @process_index.setter
    def process_index(self, index: int) -> None:
        self._plan = replace(self._plan, rank=index)

    @property
    def even_batches(self) -> bool:
        """Fill the tail up with repetitions, from the next pass on."""
        return self._plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        check_even(even, ready=not self._batched)
        self._plan = replace(self._plan, even=even)

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch."""
        return self._plan.total_batch_size

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        size, total = self.total_batch_size, length_of(self.sampler)
        if size is None or total is None or self.drop_last or isinstance(self._plan, BatchPlan):
            return -1
        return total % size

    @property
    def generators(self) -> Generators:
        """The generators that belong to the sampler or to the loader."""
        return own_generators(self.sampler, self._loader.generator)

    @property
    def draws_order(self) -> bool:
        """True if orders are drawn at random by the user's sampler."""
        return not self._seeded and draws_at_random(self.sampler)

    @property
    def base_seed_first(self) -> bool:
        """True if a pass from its start first draws the base seed, as in a plain loop."""
        plain = not self._seeded
        # Some samplers shuffle where __iter__ is called, which torch does before.
        return plain and not (self._is_asked and draws_again(self.sampler))

    @property
    def draws_base_seed(self) -> bool:
        """True if torch's loader draws its base seed in the current pass as in a plain loop."""
        return self._draws is not None and self._fresh and self._alone

    @property
    def _alone(self) -> bool:
        return self._plan.world_size * self._copies == 1

    @property
    def repeats(self) -> bool:
        """True if the last two passes had one order, of a sampler that can be told the epoch."""
        before, last = self._passes
        samplers = [sampler for sampler in with_inner(self.sampler) if _takes_epochs(sampler)]
        shuffles = all(getattr(sampler, "shuffle", True) for sampler in samplers)
        return last is not None and before == last and bool(samplers) and shuffles

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads from this source."""
        options: dict[str, Any] = {"dataset": self._loader.dataset}
        options["collate_fn"] = self._loader.collate_fn
        if self._batched:
            return options | {"batch_sampler": self}
        return options | {"sampler": self, "batch_size": None}

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the sampler and of the one inside it, if they have it."""
        for sampler in with_inner(self.sampler):
            if _takes_epochs(sampler):
                call_set_epoch(sampler, epoch)

    # --- counting -------------------------------------------------------------------------------

    def steps(self) -> int:
        """Return the batches of an epoch; if their sizes decide, those of the current epoch."""
        steps = self._plan.steps(len(self.sampler))
        if steps is None:
            order = self._order
            if order is None:
                with Generators(GLOBAL, ()).preserve():
                    order = list(self.sampler)
            steps = self._plan.remaining(order, 0)
        return steps

    def _known_order(self) -> Any:
        """Return the order, or a range where its length is enough; None where it is not known."""
        if self._order is not None or isinstance(self._current, BatchPlan):
            return self._order
        total = length_of(self.sampler)
        return None if total is None else range(total)

    def remaining(self) -> int | None:
        """Return the batches left in the current epoch, ``None`` if unknown."""
        if self._order is None and not self._counted:
            return None
        if (order := self._known_order()) is not None:
            return self._current.remaining(order, self._position)
        total = length_of(self.sampler)
        return None if total is None else max(total - self._skip, 0)

    def first_batch(self) -> int:
        """Return the index in the epoch of the first batch of this pass."""
        plan, order = self._current, self._known_order()
        if order is not None:
            return plan.remaining(order, 0) - plan.remaining(order, self._position)
        if isinstance(plan, BatchPlan):
            return self._skip
        return -(-self._position // plan.total_batch_size)

    def position_of(self, batches: int) -> int:
        """Return the global samples before this batch of the current epoch (its end at most)."""
        plan, order = self._current, self._known_order()
        if order is None and isinstance(plan, SamplePlan):
            return batches * plan.total_batch_size
        if order is None:
            assert self._draws is not None
            # Batches of any size: only the order knows.
            order = self._draw_all(self._draws, self._fresh and self._workers_start)
            self._order, self._fresh = order, False
        return plan.position_of(order, batches)

    def worker_generator(self, seed: int, epoch: int, position: int) -> torch.Generator:
        """Return a generator that differs between ranks and after each resume."""
        return seeded_generator(mix_seed(seed, epoch, position, self._plan.rank))

    # --- the start of a pass --------------------------------------------------------------------

    def begin(
        self,
        seed: int,
        epoch: int,
        position: int,
        record: Record | None = None,
        workers_start: bool = True,
    ) -> None:
        """Prepare a pass over this epoch from this position on."""
        self._current = self._plan
        self._waiting.clear()
        self._position, self._skip, self._fresh = position, 0, record is None
        self._workers_start = workers_start
        self._draws = self._order = None
        if self._seeded if record is None else record.get("seeded", False):
            self._order = epoch_order(self.sampler, seed, epoch)
        else:
            for sampler in with_inner(self.sampler):
                set_seed_and_epoch(sampler, seed, epoch)
            self._draws = Draws(self.sampler, record, self._loader.generator)
            if self._draws.differs:
                warn(_OTHER_ORDER.format(type(self.sampler).__name__))
            if not self._alone:
                self._order = self._agree_on_order(self._draws)
            elif record is not None and isinstance(self._plan, BatchPlan):
                self._skip = self._plan.batches_before(self._draws.held, position)
        if self._order is not None:
            self._current.check(self._order)

    def seek(self, position: int) -> None:
        """Start the pass that was just begun at another position."""
        self._position = position

    def finish(self) -> None:
        """Draw what the sampler draws at its end."""
        if self._order is None and self._draws is not None:
            self._draws.take(None)

    def _agree_on_order(self, draws: Draws) -> Sequence[Any]:
        """Collective: return the order that rank 0 draws, drawing as a single process would."""
        base = self._fresh and self._workers_start
        if not draws.draws:
            order = self._draw_all(draws, base)
            return range(len(order)) if type(self.sampler) is SequentialSampler else order
        before = draws.generators.capture()
        agreed, base = collectives.broadcast_object((before, base))
        draws.generators.restore(agreed)
        order = self._draw_all(draws, base)
        # Where ranks draw different numbers (dropout), they go on with their own; but a generator
        # that is alike on all has advanced on all.
        draws.generators.restore(
            {
                name: before[name]
                for name in GLOBAL
                if name in before and before[name] != agreed[name]
            }
        )
        self._note_end(draws)
        if draws.watched and not self._compared:
            self._compared = True
            self._compare_orders(order)
        return order

    def _compare_orders(self, order: Sequence[Any]) -> None:
        """Collective: warn of orders that lose samples because they differ between the ranks."""
        batches = isinstance(self._plan, BatchPlan)
        # As text: indices may be lists, or of several types.
        indices = [repr(index) for index in (chain.from_iterable(order) if batches else order)]
        checksums = [zlib.crc32(repr(items).encode()) for items in (order, sorted(indices))]
        unique = len(set(indices)) == len(indices)
        gathered = collectives.gather_object([(*checksums, unique)])
        # Who draws with repetitions loses nothing by drawing for itself.
        if len({first for first, *_ in gathered}) == 1 or not all(row[2] for row in gathered):
            return
        probe = set(collectives.broadcast_object(indices[:_PROBE]))
        apart = collectives.rank() == 0 or probe.isdisjoint(indices)
        rows = collectives.gather_object([(apart, len(indices))])
        # Subsets that each rank chooses at random overlap, and are no parts of the dataset.
        parts = all(row[0] for row in rows) and length_of(self._loader.dataset) == sum(
            row[1] for row in rows
        )
        alike = len({second for _, second, _ in gathered}) == 1
        if alike or parts:
            warn(_DIFFERENT_ORDERS.format(type(self.sampler).__name__))

    def _draw_all(self, draws: Draws, base: bool) -> Sequence[Any]:
        """Draw the whole order, with the draws and in the sequence of torch's loader."""
        early = self._fresh and self._opens_early
        if early:
            draws.open()
        if base:
            draw_base_seed(self._loader.generator)
            if early and self._loader.num_workers:
                draws.open()
        return draws.take(None)

    @property
    def _opens_early(self) -> bool:
        # torch calls __iter__ of what it asks for batches before it draws the base seed. It matters
        # for samplers that are no generator functions.
        return self._is_asked and self._draws is not None and self._draws.watched

    @property
    def _is_asked(self) -> bool:
        """True if torch's loader would ask the sampler itself, and not a BatchSampler around it."""
        return isinstance(self._plan, BatchPlan) or not self._batched

    def record(self) -> dict[str, Any] | None:
        """Return what draws the order of the current pass again; None before the first."""
        if self._draws is None:
            return None if self._order is None else {"seeded": True}
        return {**self._draws.record(), "total": length_of(self.sampler)}

    def layout(self) -> dict[str, Any]:
        """Return the plan of the pass, what its order was drawn from, and by which sampler."""
        plan, sampler = self._current, self.sampler
        inner = getattr(sampler, "generator", None)
        return {
            **super().layout(),
            "plan": "batches" if isinstance(plan, BatchPlan) else "samples",
            "batch_size": plan.batch_size,
            "drop_last": plan.drop_last,
            "even": plan.even,
            "split": isinstance(plan, BatchPlan) and plan.split,
            "world_size": plan.world_size,
            "position": self._position,
            "record": self.record(),
            "sampler": {
                "kind": type(sampler).__name__,
                "length": _source_length(sampler),
                "replacement": getattr(sampler, "replacement", False),
                "samples": getattr(sampler, "_num_samples", None),
                "own_generator": isinstance(inner, torch.Generator),
            },
        }

    def problem_of(self, record: Record | None) -> str | None:
        """Return why a resume from this record cannot be exact, ``None`` if it is."""
        saved, total = (record or {}).get("total"), length_of(self.sampler)
        if saved is None or total is None or saved == total:
            return None
        unit = "batches" if isinstance(self._plan, BatchPlan) else "samples"
        return f"its sampler had {saved} {unit} and has {total}"

    # --- a pass ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._order is None and self._fresh and self._opens_early:
            assert self._draws is not None
            # torch asks twice where it starts workers; a resume of persistent ones must not.
            if self._workers_start or not self._draws.is_open:
                self._draws.open()
        return self._indices()

    def _indices(self) -> Iterator[Any]:
        plan = self._current
        if self._draws is not None and self._order is None and isinstance(plan, SamplePlan):
            expected = self.remaining()
            if expected is not None:
                return self._draw_samples(self._draws, plan, expected)
        return self._planned_indices()

    def _draw_samples(self, draws: Draws, plan: SamplePlan, expected: int) -> Iterator[Any]:
        """Yield the indices of a single process, drawn when they are asked for.

        A sampler that draws once a pass is asked for several batches at once, so that torch's
        loader takes them from an iterator that runs no Python; but never for more than it has,
        because some draw again at their end.
        """
        size, count, ended = plan.batch_size, 0, False
        full = Delivery(size, size)  # one object for all of them, by which the loader knows them
        draws.take(self._position)
        while not ended:
            batches = 1 if draws.watched else max(1, min(expected - count - 1, _AT_ONCE))
            items = draws.take(batches * size)
            whole, tail = divmod(len(items), size)
            self._waiting.extend(repeat(full, whole))
            pieces = map(list, map(islice, repeat(iter(items)), repeat(size, whole)))
            yield from pieces if self._batched else items
            count += whole
            ended = whole < batches
            if tail and not plan.drop_last:
                self._waiting.append(Delivery(tail, tail))
                count += 1
                yield items[-tail:]
        self._end_draws(draws, count, expected)

    def _planned_indices(self) -> Iterator[Any]:
        for share in self._next_shares():
            self._note(share)
            yield share.indices if self._batched else share.indices[0]

    def _note(self, share: Share) -> None:
        """Queue the counts of a batch, for its delivery."""
        real, padded = share.real, share.padded
        # Ready batches are repeated as a whole, and their samples are not counted.
        whole = self._batched or real == padded
        kept = None if whole else ready_kept(real, padded)
        self._waiting.append(Delivery(real, padded, share.last, kept))

    def _next_shares(self) -> Iterator[Share]:
        if self._order is not None:
            return self._current.shares(self._order, self._position)
        assert self._draws is not None
        return self._draw_shares(self._draws)

    def _draw_shares(self, draws: Draws) -> Iterator[Share]:
        """Yield the batches of a single process, each drawn when it is asked for."""
        expected, count = self.remaining(), 0
        draws.take(self._skip if isinstance(self._current, BatchPlan) else self._position)
        batch = self._next_batch(draws)
        while batch is not None:
            # One batch ahead only where the sampler does not say how many there are.
            ahead = self._next_batch(draws) if expected is None else None
            last = None if expected is not None else ahead is None
            yield Share(batch, len(batch), len(batch), last)
            count += 1
            batch = self._next_batch(draws) if expected is not None else ahead
        self._end_draws(draws, count, count if expected is None else expected)

    def _end_draws(self, draws: Draws, count: int, expected: int) -> None:
        """Note the end of a pass; warn if the sampler gave another number than it said."""
        self._note_end(draws)
        if count != expected:
            self._counted = False
            warn(
                f"{type(self.sampler).__name__} said that {expected} batches were left and gave "
                f"{count}, so the last accumulation window may have been cut: make its __len__ "
                "exact, or leave it out."
            )

    def _next_batch(self, draws: Draws) -> Sequence[Any] | None:
        """Return the next batch of indices, None at the end."""
        if isinstance(self._current, BatchPlan):
            batches = draws.take(1)
            return batches[0] if batches else None
        items = draws.take(self._current.batch_size)
        short = len(items) < self._current.batch_size
        return items if items and not (short and self._current.drop_last) else None

    def _note_end(self, draws: Draws) -> None:
        """Keep the digest of a complete pass."""
        self._passes = (self._passes[1], draws.digest)

    def __len__(self) -> int:
        return self.steps()

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Yield each batch of the torch loader with its counts."""
        # torch delivers batches in the order of their indices, with workers too. Hot path: zip
        # takes the batch first, then its counts, and runs no Python for it.
        counts = iter(self._waiting.popleft, None)
        return chain(zip(items, counts, strict=False), self._check_end())

    def _check_end(self) -> Iterator[tuple[Any, Delivery]]:
        """Raise if the iteration ended before what the sampler had asked for; yield nothing."""
        if self._waiting:
            raise RuntimeError(_STOPPED.format(type(self._loader.dataset).__name__))
        yield from ()


def _source_length(sampler: Any) -> int | None:
    """Return the number of samples that a sampler chooses from, None if it does not say."""
    return length_of(getattr(sampler, "data_source", sampler))


def _takes_epochs(sampler: Any) -> bool:
    """Return whether a sampler's ``set_epoch`` is the user's to call."""
    # begin() tells a SeedableRandomSampler the epoch of each pass.
    seedable = isinstance(sampler, SeedableRandomSampler)
    return not seedable and callable(getattr(sampler, "set_epoch", None))


def ready_kept(real: int, padded: int) -> list[int]:
    """Return ``kept`` of a step of ready batches: those of the first ``real`` ranks count.

    Example:
        >>> from accel_callbacks.data.shard import ready_kept
        >>> [kept > 0 for kept in ready_kept(2, 3)]
        [True, True, False]
    """
    return [sys.maxsize if rank < real else 0 for rank in range(padded)]
