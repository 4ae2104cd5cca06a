"""The prepared loader: reads this rank's share, and resumes at any sample; views that skip."""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from accel_callbacks.data.device import Feed
from accel_callbacks.data.order import Record, base_seed_generator, draw_base_seed
from accel_callbacks.data.sources import Delivery, Source
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.distributed.processes import end_workers_at_exit, stopped_workers
from accel_callbacks.errors import ResumeError
from checkpoint_io.warning import warn

__all__ = [
    "LOADER_OPTIONS",
    "DataLoaderShard",
    "LoopEvents",
    "NoEvents",
    "SkipBatchSampler",
    "SkipDataLoader",
    "keep_workers",
    "skip_first_batches",
    "stop_workers",
]

_TAKEN_OVER = (
    "another pass over this prepared loader was begun before this one ended, and a loader has one "
    "position in its data: prepare a second DataLoader(...) over the dataset, and use that inside "
    "of (or beside) the loop over this one."
)
_REPEATS = (
    "two epochs had the same order, because set_epoch of the sampler was not called. Call "
    "set_epoch(epoch) of the prepared loader, or of the sampler, before each epoch."
)
_LEGACY = (
    "the checkpoint is of an older version, which chose the orders of epochs itself: the open "
    "epoch goes on in its order, the next ones have the order of the loader's own sampler. "
    "DataLoaderConfiguration(seeded_order=True) keeps the orders of that version."
)
_OTHER_LENGTH = (
    "the epoch that the checkpoint interrupted cannot go on exactly: {}. Give the dataset the size "
    "that it had at the save, before the loop over the loader."
)
_AGAIN = (
    "the view of skip_first_batches is trained on in a second epoch, which begins without its "
    "first {} batches too: iterate the view in the epoch that is resumed, and the prepared loader "
    "itself in those after it."
)
_inherited: list[Any] = []  # iterators whose workers belong to a process that was forked


def keep_workers(loader: DataLoader[Any]) -> None:
    """Shut the persistent workers down as soon as their loader is collected.

    A loader is part of a reference cycle. When the garbage collector frees the cycle, it may close
    the queues to the workers before they are told to stop, and they then notice seconds later.
    """
    iterator = getattr(loader, "_iterator", None)
    known: tuple[Any, Any] = getattr(loader, "_workers_end", (None, None))
    if iterator is None or (known[0] is not None and known[0]() is iterator):
        return
    end = weakref.finalize(loader, _shut_down, iterator, os.getpid())
    end.atexit = False  # torch itself stops the workers at exit
    loader._workers_end = weakref.ref(iterator), end


def _shut_down(iterator: Any, owner: int, *, at_once: bool = False) -> None:
    # A fork, such as a worker of another loader, has copies of the loader and of its iterator. To
    # collect these must not end the workers of the process that was forked, and torch's own
    # finalizer fails there with "can only test a child process": the fork keeps its copy.
    if os.getpid() == owner:
        if stopped := iterator._workers if at_once else stopped_workers(iterator._workers):
            # torch waits ten seconds for each, and its handler raises where a worker is killed.
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            iterator._worker_pids_set = False
            for worker in stopped:
                worker.kill()
        iterator._shutdown_workers()
    else:
        _inherited.append(iterator)


def stop_workers(loader: DataLoader[Any]) -> None:
    """Shut the workers down now; the next pass starts new ones."""
    known: tuple[Any, Any] = getattr(loader, "_workers_end", (None, None))
    if known[1] is not None:
        known[1]()
    loader._iterator = None


class LoopEvents(Protocol):
    """The loop around the batches of a loader, which adds the hooks."""

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate ``loader.batches()``, firing the hooks around each batch."""


class NoEvents:
    """Events of a loader without an Accelerator: only the batches."""

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate the batches."""
        return loader.batches()


#: Arguments of torch's DataLoader that a loader of the same samples takes over.
LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)
# What undo_pass() sets back.
_UNDONE = ("epoch", "position", "_continue", "_next_epoch", "finished", "_record")
# What a loader was made from, and says of itself as the loader that was prepared.
_DESCRIBED = ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last")


class DataLoaderShard(DataLoader[Any]):
    """A torch DataLoader that reads this rank's share, in an order that can be reproduced.

    Made by ``Accelerator.prepare``. Each ``for`` over it is one epoch; the order is a function
    of the seed and the epoch, and the position is a count of global samples, so that a resume
    continues at the exact sample, on the same or another number of ranks.

    Its dataset, sampler, ``batch_size`` and ``drop_last`` are those of the loader as it was given.
    A copy, by ``copy`` or ``pickle``, reads the same samples without an Accelerator, and fires no
    hooks.

    Attributes:
        epoch: index of the current pass, -1 before the first.
        batch_index: index of the current batch in its epoch.
        real: samples of the current global batch, each counted once.
        padded: samples of the current global batch as read, repetitions included.
        done: training has read it to its end in the current epoch of the run.
        kept: see :class:`accel_callbacks.data.sources.Delivery`.
        batches_done: of a resumed epoch, before the save.
        counted_done: after a resume, the script counts an epoch as done of which nothing is left.
        rereads: a resumed epoch is read from its first batch.
        waits: True while a pass waits for the batch that its workers read.
        origin: the torch loader that was prepared.
        rng_types: the random generators that each pass synchronizes.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, DataLoaderShard
        >>> loader = torch.utils.data.DataLoader(range(5), batch_size=2)
        >>> prepared = Accelerator(cpu=True).prepare(loader)
        >>> isinstance(prepared, DataLoaderShard), [batch.tolist() for batch in prepared]
        (True, [[0, 1], [2, 3], [4]])
    """

    # A class of the user's is among the bases, and its ``__iter__`` gets the batches.
    _has_own_iter = False

    def __init__(
        self,
        source: Source,
        *,
        events: LoopEvents,
        feed: Feed | None,
        seed: int,
        origin: DataLoader[Any] | None = None,
        rng_types: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        # Not of a class of the user's, which may be among the bases.
        DataLoader.__init__(self, **{**options, **source.loader_options()})
        # What torch reads from, in place of what a script asks for and calls set_epoch of.
        self._read = {name: vars(self)[name] for name in _DESCRIBED}
        if origin is not None:
            described = {name: getattr(origin, name) for name in _DESCRIBED}
            if self.batch_sampler is not None:  # with the batches of this rank
                described["batch_sampler"] = getattr(
                    self.batch_sampler, "described", self.batch_sampler
                )
            self.__dict__.update(described)
            if self._has_own_iter:
                self.__dict__.update({**vars(origin), **vars(self)})
        self._torch_iterator: Any = None  # of the current pass
        self._source = source
        self._record: Record | None = None  # of the pass to be resumed
        self._drawn_early: torch.Generator | None = None
        # A loader that is zipped with one that was read to its end may not begin a pass at all.
        self._in_resumed_epoch = False
        self._told: int | None = None  # the last set_epoch
        self._workers_known = False  # the persistent workers of a resumed run had their seed
        self._events = events
        self._feed = feed
        self.seed = seed
        self.origin = origin
        self.rng_types = rng_types
        self.epoch = -1
        self.finished = False
        self.real = self.padded = 0
        self.kept: Sequence[int] | None = None
        self.waits = False
        self._last: bool | Callable[[int], bool] | None = False
        self.batch_index = self._first = 0
        self._batches: int | None = None  # of this pass; None if unknown
        # The position at a batch, since which all have had as many samples as the current one.
        self._known_position, self._known_index = 0, 0
        self.trained = False  # the last pass was a training pass
        self.done = False
        self.counted_done = self.rereads = False
        self.passes = 0
        self._continue = False
        self._skip_pass = self._nothing_left = False
        self.batches_done = 0  # of the resumed epoch
        self._strict = False
        self._next_epoch: int | None = None
        self._start: int | None = None
        self._opened = 0
        self._warned = False
        # From which a stream continues after the current batch, and after the one before it.
        self._stream: Mapping[str, Any] | None = None
        self._stream_before: Mapping[str, Any] | None = None
        self._delivery: Delivery | None = None  # of the current batch, while a pass goes on
        self._before: dict[str, Any] = {}  # the start of this pass, see undo_pass()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        fresh = not (
            self._has_own_iter or self._in_resumed_epoch or self._continue or self._workers_known
        )
        if fresh and self.num_workers == 0 and self._source.base_seed_first:
            self._drawn_early = self._draw_base_seed()
        return self._events.iterate(self)

    def _draw_base_seed(self) -> torch.Generator | None:
        """Draw the base seed now, and return a generator that gives it again.

        torch draws it in ``iter``, and all else of a pass at the first ``next``; it is the same
        but for loaders that are zipped.
        """
        again = base_seed_generator(self.generator)
        if again is not None:
            draw_base_seed(self.generator)
        return again

    def __getstate__(self) -> dict[str, Any]:
        before, after = self._streams()
        # What belongs to the pass that is open here stays here.
        closed: dict[str, Any] = {"_iterator": None, "_delivery": None, "_last": False}
        closed |= {"_stream_before": before, "_stream": after}
        state = {**vars(self), "_events": NoEvents(), **closed}
        for name in ("_workers_end", "_torch_iterator", "_delivered"):
            state.pop(name, None)
        return state

    def __copy__(self) -> DataLoaderShard:
        # What the script gave is shared, as in torch; what has the position in a pass is not.
        given = (self.dataset, self.generator, self._feed, self.origin)
        given = (*given, *(() if self.origin is None else vars(self.origin).values()))
        return copy.deepcopy(self, {id(part): part for part in given if part is not None})

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self._source.steps()

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""
        return self._source.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, over all ranks; TypeError if it has no length."""
        dataset: Any = self.dataset
        return len(dataset)

    @property
    def continues(self) -> bool:
        """True if the next pass is of an epoch that a checkpoint has cut."""
        return self._continue

    @property
    def resumes(self) -> bool:
        """True if the next pass goes on within an epoch, where no view of the user's begins."""
        return self._continue and self.position > 0 and self._first_batch_of_pass() is None

    @property
    def moves_on(self) -> bool:
        """True if the next pass is the next epoch, because nothing is left of the resumed one."""
        if not (self._continue and self._nothing_left):
            return False
        start = self._first_batch_of_pass()
        return self.counted_done if start is None else start < self.batches_done

    def _first_batch_of_pass(self) -> int | None:
        """Return where in its epoch the next pass begins, None for where the loader is."""
        return 0 if self._start is None and self._continue and self.rereads else self._start

    @property
    def position(self) -> int:
        """Samples of this epoch delivered so far, over all ranks."""
        return self._known_position + self.real * (self.batch_index - self._known_index)

    @position.setter
    def position(self, position: int) -> None:
        self._known_position, self._known_index = position, self.batch_index

    @property
    def left(self) -> int | None:
        """Batches left in the epoch, the current one included; ``None`` if unknown."""
        if self._batches is None:
            return None
        return self._batches - max(self.batch_index - self._first, 0)

    @property
    def starts(self) -> bool:
        """True while the first batch of a pass is the current one."""
        return self.batch_index == self._first

    @property
    def on_last(self) -> bool:
        """True while the last batch of a pass is the current one; a stream reads on to know it."""
        if self._last is None:  # the batches are counted
            return self.left is not None and self.left <= 1
        if callable(self._last):
            return self._last(self.batch_index - self._first + 1)
        return self._last

    @property
    def end_of_dataloader(self) -> bool:
        """True while the last batch of a pass is the current one."""
        return self.on_last

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        return self._source.remainder

    @property
    def even_batches(self) -> bool:
        """True if the last batch is filled up with repetitions; may be set, for the next pass.

        Raises:
            ValueError: set to ``False`` for a loader of ready batches.
        """
        return self._source.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._source.even_batches = even

    def get_sampler(self) -> Any:
        """Return the sampler that the order comes from, ``None`` for a stream."""
        return getattr(self._source, "sampler", None)

    def set_sampler(self, sampler: Any) -> None:
        """Take the order from another sampler, from the next pass on."""
        if self.get_sampler() is None:
            raise TypeError("a stream has an order of its own, and no sampler to set.")
        self._source.sampler = sampler  # type: ignore[attr-defined]

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of a resumed one, on the device."""
        if self._skip_pass:
            self._skip_pass, self.finished = False, True
            return
        self._begin()
        # After the start of the pass, as a resume or a view that skips moves its first batch.
        self._batches, first = self._extent()
        self._settle_stream()
        position = self.position
        self._first, self.batch_index = first, first - 1
        self.position = position
        generator = self._choose_generator()
        self._opened += 1
        self._last = False
        opened = self._opened
        # Hot path: written past torch's DataLoader.__setattr__, which checks every name.
        here = vars(self)
        if self._has_own_iter:
            pairs = self._run_own_iter(self._open_late(generator))
        else:
            pairs = self._deliver(self._items(generator))
        if self._feed is not None:
            pairs = self._feed(pairs)
        if self.num_workers:
            pairs = self._wait_for(pairs)
        owner = os.getpid()
        try:
            for index, (item, delivery) in enumerate(pairs, first):
                if delivery is not self._delivery:  # full batches share one
                    self._change_counts(delivery)
                here["batch_index"] = index
                yield item
                if opened != self._opened:
                    raise RuntimeError(_TAKEN_OVER)
            self.finished = True
            if self.trained and not self._warned and getattr(self._source, "repeats", False):
                self._warned = True
                warn(_REPEATS)
        except RuntimeError:
            remote_failure.raise_in("the DataLoader")  # it ended the wait for the workers
            raise
        finally:
            if opened == self._opened:  # no newer pass has replaced this one
                self._last = False
                self._settle_stream()
            # Not left to the collector, which may come late where an error keeps the frames, and
            # then waits 5 s for each worker: see keep_workers.
            if self.num_workers and not self.persistent_workers:
                # A script that ends does not wait for a batch that is not to be trained on.
                items, at_once = self._torch_iterator, isinstance(sys.exc_info()[1], SystemExit)
                if items is not None:
                    _shut_down(items, owner, at_once=at_once)
            self._torch_iterator = None

    def _extent(self) -> tuple[int | None, int]:
        """Return the batches left in the epoch, None if unknown, and the index of the first."""
        return self._source.remaining(), self._source.first_batch()

    def _deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Yield this rank's batches with their counts, from torch's iterator."""
        return self._source.deliver(items)

    def _wait_for(self, pairs: Iterator[tuple[Any, Delivery]]) -> Iterator[tuple[Any, Delivery]]:
        """Yield the pairs, with ``waits`` True until each has come."""
        here = vars(self)  # past torch's __setattr__, as in batches()
        while True:
            here["waits"] = True
            try:
                pair = next(pairs, None)
            finally:
                here["waits"] = False
            if pair is None:
                return
            yield pair

    def _change_counts(self, delivery: Delivery) -> None:
        """Note the counts of the batches from the next one on."""
        here = vars(self)  # past torch's __setattr__, as in batches()
        here["_stream"] = self._streams()[1]
        here["_known_position"], here["_known_index"] = self.position, self.batch_index
        here["real"], here["padded"], here["_last"], here["kept"], _ = delivery
        here["_delivery"] = delivery

    def _streams(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Return where a stream continues before the current batch, and after it."""
        if self._delivery is None:
            return self._stream_before, self._stream
        number = self.batch_index - self._first + 1
        changed = self.batch_index == self._known_index + 1
        before = self._stream if changed else self._delivery.state_after(number - 1)
        return before, self._delivery.state_after(number)

    def _settle_stream(self) -> None:
        """Keep where a stream continues, and nothing of the pass."""
        self._stream_before, self._stream = self._streams()
        self._delivery = None

    def _choose_generator(self) -> torch.Generator | None:
        """Return where torch's loader draws the base seed of this pass from, None for globally."""
        known, self._workers_known = self._workers_known, False
        early, self._drawn_early = self._drawn_early, None
        if early is not None and self._source.draws_base_seed:
            return early
        if self._source.draws_base_seed and not known:
            return cast(torch.Generator | None, self.generator)
        # A resumed pass has drawn it before the checkpoint, and several ranks need different ones.
        place = self.seed, self.epoch, self.position
        return self._source.worker_generator(*place)

    def _items(self, generator: torch.Generator | None) -> Any:
        """Return torch's iterator, with its workers started."""
        if self._source.fresh_workers:
            stop_workers(self)
        described = {name: vars(self)[name] for name in (*_DESCRIBED, "generator")}
        self.__dict__.update(self._read, generator=generator)
        try:
            self._torch_iterator = items = DataLoader.__iter__(self)
        finally:
            self.__dict__.update(described)
        if self.num_workers:
            end_workers_at_exit()
        if self.persistent_workers:
            keep_workers(self)
        return items

    def _open_late(self, generator: torch.Generator | None) -> Iterator[tuple[Any, Delivery]]:
        """Yield the batches, with torch's iterator made where the first is asked for."""
        yield from self._deliver(self._items(generator))

    def _run_own_iter(
        self, pairs: Iterator[tuple[Any, Delivery]]
    ) -> Iterator[tuple[Any, Delivery]]:
        """Yield the batches as the ``__iter__`` of a class of the user's changes them."""
        raise NotImplementedError

    def _begin(self) -> None:
        self._before = {name: getattr(self, name) for name in _UNDONE}
        if not self._continue:
            self.epoch = self.epoch + 1 if self._next_epoch is None else self._next_epoch
            self.position = 0
        moves_on, start = self.moves_on, self._first_batch_of_pass()
        record = self._record if self._continue else None
        if (problem := self._source.problem_of(record)) is not None:
            text = _OTHER_LENGTH.format(problem)
            if self._strict:
                raise ResumeError(f"{text} Or load the checkpoint with strict=False.")
            warn(text)
        self._continue, self._next_epoch, self._start, self._record = False, None, None, None
        self.finished = self._nothing_left = False
        self._synchronize()
        drawn = self._workers_known or self._drawn_early is not None
        workers_start = self._iterator is None and not drawn
        self._start_source(moves_on, start, record, workers_start)

    def _start_source(
        self, moves_on: bool, start: int | None, record: Record | None, workers_start: bool
    ) -> None:
        """Begin the pass: in the epoch, in the next one, or at a batch of it."""
        source = self._source
        source.begin(self.seed, self.epoch, self.position, record, workers_start)
        if moves_on:
            source.finish()
            self.epoch += 1
            self.position = 0
            source.begin(self.seed, self.epoch, 0, None, self._iterator is None)
        if start is not None:
            position = source.position_of(start)
            if position != self.position:
                self.position = position
                source.seek(position)

    def _synchronize(self) -> None:
        """Set random generators to their state on rank 0, if ``rng_types`` names any."""
        if not self.rng_types:
            return
        from accel_callbacks.distributed.rng import synchronize_rng_states

        generator = getattr(self.get_sampler(), "generator", None)
        if generator is None:
            generator = getattr(self.origin, "generator", None)
        names = [name for name in self.rng_types if generator is not None or name != "generator"]
        synchronize_rng_states(names, generator)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the sampler and of the batch sampler, if they have it.

        Orders that are a function of seed and epoch use this epoch in the next pass; by default
        passes count up from 0.
        """
        self._told = epoch
        self._source.set_epoch(epoch)
        if epoch != self.epoch:
            self._continue = False
        self._next_epoch = epoch

    def start_at(self, batch: int | None) -> None:
        """Start the next pass at this batch of its epoch; see ``skip_first_batches``."""
        self._start = batch

    def end_pass(self) -> None:
        """End an epoch whose loop was left early; the next pass is a new epoch."""
        self.finished = True
        self._continue = False

    def rewind(self) -> None:
        """Start over with the first epoch."""
        self.end_pass()
        self.begin_epoch(counted=True)
        self.epoch = -1

    def begin_epoch(self, *, counted: bool) -> None:
        """Reset the state of an epoch; ``counted`` if it is one of ``run.epochs``.

        Args:
            counted: False for a single pass in a plain loop.
        """
        # A zip stops at its first empty loader, and does not ask a second one for its empty rest.
        if self._nothing_left:
            self._continue = self._nothing_left = False
        if counted:
            self.done = self._skip_pass = False
        self._in_resumed_epoch = False

    def undo_pass(self) -> None:
        """Undo the start of this pass, which only peeked at the first batch."""
        for name, value in self._before.items():
            setattr(self, name, value)
        self._stream, self._delivery = self._streams()[0], None

    def skip_next_pass(self) -> None:
        """Deliver nothing in the next pass: the resumed run had read this epoch to its end."""
        self._skip_pass = True

    def state_dict(self, *, again: bool = False) -> dict[str, Any]:
        """Return seed, epoch, and position, with the state of a stream.

        Args:
            again: return the state before the current batch, so that it is delivered again.
        """
        last = self.on_last  # first, because who finds the end of a stream completes its state
        before, after = self._streams()
        stream = before if again else after
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position - self.real if again else self.position,
            "batches": self.batch_index + (not again),
            "finished": self.finished,
            "trained": self._is_continued(),
            "done": self.done,
            "last": (last and not again) or self._nothing_left,
            "order": self._order_state(),
            **({} if stream is None else {"stream": stream}),
        }

    def _is_continued(self) -> bool:
        """Return whether a resume goes on within this pass; any does that no loop counts."""
        return self.trained or isinstance(self._events, NoEvents)

    def layout(self) -> dict[str, Any]:
        """Return what the samples of each step of the current pass follow from, as plain values."""
        return {**self._source.layout(), "seed": self.seed}

    def random_state(self) -> dict[str, Any]:
        """Return the states of the random generators of the sampler and of the loader."""
        return self._source.generators.capture()

    def _order_state(self) -> dict[str, Any]:
        """Return what the orders of this pass and of the next ones are drawn from."""
        opened = self._is_continued() and not self.finished
        # A resumed pass that has not begun yet is still that of its own record.
        record = self._record if self._record is not None else self._source.record()
        return {
            "record": record if opened else None,
            "generators": self.random_state(),
            "told": self._told,
            "workers": self._iterator is not None or self._workers_known,
        }

    def resume_problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why a resume from this state cannot be exact, ``None`` if it is."""
        return self._source.problem(state.get("stream"))

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = False) -> None:
        """Continue from ``state`` with the next ``for``.

        Args:
            state: from :meth:`state_dict`.
            strict: the pass raises ResumeError if its sampler has another length than it had, in
                place of a warning. A dataset may be grown or cut up to then.
        """
        self._strict = strict
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.finished = state["finished"]
        self.trained = state["trained"]
        self.done, self._nothing_left = state["done"], state["last"]
        self.batches_done = state.get("batches", 1)  # older versions saved none
        self._stream, self._delivery = state.get("stream"), None
        self._source.restore(self._stream)
        # Only training is continued; an evaluation starts over.
        self._continue = self.epoch >= 0 and self.trained and not self.finished
        self._restore_order(state.get("order"))

    def _restore_order(self, order: Mapping[str, Any] | None) -> None:
        self._record, self._in_resumed_epoch = None, True
        if order is None:
            if self._continue:
                self._record = {"seeded": True}
                if self._source.draws_order:
                    warn(_LEGACY)
            return
        self._record = order["record"] if self._continue else None
        self._source.generators.restore(order["generators"])
        self._told = order["told"]
        if self._told is not None:
            self._source.set_epoch(self._told)
        self._workers_known = bool(
            order["workers"] and self.persistent_workers and self._iterator is None
        )


# --- views that begin within an epoch -------------------------------------------------------


class SkipBatchSampler(BatchSampler):
    """A batch sampler (or sampler) without its first batches.

    Args:
        batch_sampler: any iterable of batches of indices, or of indices.
        skip_batches: how many to leave out.

    Example:
        >>> from accel_callbacks.data.loader import SkipBatchSampler
        >>> sampler = SkipBatchSampler([[0, 1], [2, 3], [4]], 2)
        >>> list(sampler), len(sampler)
        ([[4]], 1)
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches with those that are left out."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batch_sampler, self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class SkipDataLoader(DataLoader[Any]):
    """A view of a loader whose passes start at a later batch of the epoch.

    Made by :func:`skip_first_batches`. It has all attributes of its loader.

    Args:
        loader: prepared or not.
        skip_batches: number of batches to skip at the start of the epoch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks.data.loader import SkipDataLoader
        >>> [batch.tolist() for batch in SkipDataLoader(DataLoader(range(5), 2), 2)]
        [[4]]
    """

    def __init__(self, loader: DataLoader[Any], skip_batches: int = 0) -> None:
        # Without DataLoader.__init__, because all but the first batches is that of the loader.
        self.loader = loader
        self.skip_batches = skip_batches
        self._trained = 0  # passes

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loader = self.loader
        if not isinstance(loader, DataLoaderShard):
            yield from _rest_of(loader, self.skip_batches)
            return
        # Set when the pass starts, so that no other pass over the loader uses it.
        loader.start_at(self.skip_batches)
        if self._trained == 1 and self.skip_batches:
            warn(_AGAIN.format(self.skip_batches))
        try:
            yield from loader
            self._trained += loader.trained
        finally:
            loader.start_at(None)

    def __len__(self) -> int:
        return max(len(self.loader) - self.skip_batches, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an empty copy (of pickle, copy) would recurse
            raise AttributeError(name)
        return getattr(self.loader, name)


def _rest_of(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    """Iterate a plain loader from this batch on; a map-style dataset is not read before it."""
    if isinstance(loader.dataset, IterableDataset):
        return islice(loader, batches, None)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if loader.batch_sampler is None:
        options |= {"sampler": SkipBatchSampler(loader.sampler, batches), "batch_size": None}
    else:
        options["batch_sampler"] = SkipBatchSampler(loader.batch_sampler, batches)
    return iter(DataLoader(loader.dataset, **options))


def skip_first_batches(
    dataloader: DataLoader[Any] | SkipDataLoader, num_batches: int = 0
) -> SkipDataLoader:
    """Return a view of a loader that skips the first batches of an epoch.

    Batches are counted from the start of the epoch. So the usual recipe is exact: after
    ``load_state``, a pass over the view is the rest of the interrupted epoch, and a pass over the
    loader itself is then the next one. (It is not needed: a prepared loader continues without it.)
    Without ``load_state``, a pass over the view is the next epoch without its first batches. The
    loader advances with its view: its epoch, its position and its end are those of the view.

    Args:
        dataloader: prepared or not, with any dataset. Skipped samples of a map-style one are not
            read.
        num_batches: number of batches to skip; a larger number than there are leaves none.

    Returns:
        The view. Its length is the number of batches left, if the loader has a length.

    Raises:
        ValueError: ``num_batches`` is negative.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import Accelerator, skip_first_batches
        >>> loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
        >>> view = skip_first_batches(loader, 2)
        >>> len(view), [batch.tolist() for batch in view]
        (1, [[4, 5]])
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} must be 0 or more.")
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader(dataloader.loader, dataloader.skip_batches + num_batches)
    return SkipDataLoader(dataloader, num_batches)
