"""Read iterable datasets, and resume them at a position or from their own state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.data.iterable import CollateShare, IterableShards, Part, Piece
from accel_callbacks.data.order import (
    Generators,
    Record,
    base_seed_generator,
    own_generators,
    packed_state,
    seeded_generator,
    set_packed_state,
)
from accel_callbacks.data.sampler import mix_seed
from accel_callbacks.data.shard import ready_kept
from accel_callbacks.data.sources import Delivery, Source, State, check_even
from accel_callbacks.data.stream_checks import compare_over_ranks, compare_over_workers
from checkpoint_io.warning import warn

__all__ = ["StreamSource", "leads_to"]


class StreamSource(Source):
    """The batches of an iterable dataset; the next is read ahead where someone asks for the last.

    Args:
        loader: the user's.
        shards: reads the stream, in each worker process.
        collate_fn: collates the batch of this rank; the loader's own if ``None``.
        seeded: workers get a seed that is a function of seed and epoch.
        copies: number of processes that read each part of the stream.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        shards: IterableShards,
        collate_fn: Callable[[Any], Any] | None = None,
        seeded: bool = False,
        copies: int = 1,
    ) -> None:
        self._loader = loader
        self._seeded = seeded
        self._alone = shards.world_size * copies == 1
        self._seed = 0
        self._base: str | None = None
        self._fresh = True
        self._shards = shards
        self._collate = CollateShare(collate_fn or loader.collate_fn)
        self._workers = loader.num_workers
        self._begun: tuple[int, int] | None = None  # (epoch, position)
        self._again: State | None = None  # from which the current pass can be started once more
        self._first: State | None = None  # the dataset before any pass
        self._restored: State | None = None
        self._rewind = self._warned = self._checked = self.fresh_workers = False
        self._skip = 0

    @property
    def even_batches(self) -> bool:
        """Fill the tail up with repetitions, from the next pass on."""
        return self._shards.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        check_even(even, ready=self._shards.batch_size is None)
        self._shards.even = even

    @property
    def drop_last(self) -> bool:
        """True if a tail that does not fill a global batch is dropped."""
        return self._shards.drop_last

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch; ready batches count as one."""
        return self._shards.size

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        if self._shards.drop_last or self._shards.batch_size is None:
            return -1
        try:
            return len(self._shards) % self._shards.size
        except TypeError:
            return -1

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads from this source."""
        return {"dataset": self._shards, "batch_size": None, "collate_fn": self._collate}

    def steps(self) -> int:
        """Return the batches of an epoch; raise TypeError if the dataset has no length."""
        shards = self._shards
        full, tail = divmod(len(shards), shards.size)
        joins = not shards.even and full and tail < shards.world_size
        return full if shards.drop_last or joins else full + (tail > 0)

    def first_batch(self) -> int:
        """Return the index in the epoch of the first batch of this pass."""
        return 0 if self._begun is None else self._begun[1] // self._shards.size

    def position_of(self, batches: int) -> int:
        """Return the global samples before this batch of the epoch."""
        return batches * self._shards.size

    def worker_generator(self, seed: int, epoch: int, position: int) -> torch.Generator:
        """Return a generator that is the same on all ranks and after a resume, as the stream."""
        generator = seeded_generator(mix_seed(seed, epoch))
        if not self._fresh and self._base is not None:
            with suppress(RuntimeError):  # it was drawn on a device of another type
                set_packed_state(generator, self._base)
        return generator

    # --- the start of a pass --------------------------------------------------------------------

    def restore(self, state: State | None) -> None:
        """Store where to resume; ``None`` is the beginning of the stream."""
        self._restored = deepcopy(state)
        self._begun = None
        self._rewind = True

    def problem(self, state: State | None) -> str | None:
        """Return why a resume from this state cannot be exact, ``None`` if it is."""
        if state is None:
            return None
        if "own" in state:
            return "each process had read its own shards"
        if not state.keys() >= {"epoch", "position", "turn", "workers"}:
            return "its saved state is not understood"
        saved, readers = len(state["workers"]), max(self._workers, 1)
        if saved != readers:
            return f"it was saved with {saved} worker processes and is read with {readers}"
        return None

    @property
    def generators(self) -> Generators:
        """The generator of the loader."""
        return own_generators((), self._loader.generator)

    @property
    def base_seed_first(self) -> bool:
        """True if a pass from its start first draws the base seed, as in a plain loop."""
        return not self._seeded and self._alone

    @property
    def draws_base_seed(self) -> bool:
        """True if torch's loader draws its base seed in the current pass as in a plain loop."""
        return self._fresh and self.base_seed_first

    def record(self) -> Record | None:
        """Return the generator that the seed of the workers came from; None before the first pass.

        A record without one still tells a resume that the pass has drawn its base seed.
        """
        return None if self._begun is None else {"base": self._base}

    def seek(self, position: int) -> None:
        """Start the pass that was just begun at another position."""
        assert self._begun is not None
        self._begin(self._seed, self._begun[0], position)

    def begin(
        self,
        seed: int,
        epoch: int,
        position: int,
        record: Record | None = None,
        workers_start: bool = True,
    ) -> None:
        """Set the epoch of the dataset, and choose how to reach the position."""
        self._seed = seed
        self._fresh = record is None
        self._begin(seed, epoch, position)
        if record is not None:
            self._base = record.get("base")
        elif workers_start or self.fresh_workers:
            records = self._workers and self.draws_base_seed
            drawn_from = base_seed_generator(self._loader.generator) if records else None
            self._base = None if drawn_from is None else packed_state(drawn_from)

    def _begin(self, seed: int, epoch: int, position: int) -> None:
        again = self._begun == (epoch, position)
        if not again:
            self._again, self._skip = self._route_to(epoch, position)
        self._begun = (epoch, position)
        self._shards.set_pass(seed, epoch)
        self._shards.resume = self._again
        self.fresh_workers = again or self._rewind or self._again is not None
        if self._again is None:
            self._again = self._at_rest()
        if self._first is None:
            self._first = self._at_rest()
        self._rewind = False

    def _route_to(self, epoch: int, position: int) -> tuple[State | None, int]:
        """Return (state from which the readers start, global samples to drop after that)."""
        state, problem = self._restored, self.problem(self._restored)
        usable = state is not None and problem is None
        if state is not None and usable and state["epoch"] < epoch:  # of an earlier pass
            self._restored, usable = None, False
            first = state["workers"][0]
            if position == 0 and self._workers == 0 and first["ended"] and first["state"]:
                return _one_reader(first["state"]), 0
        if position == 0:
            return (self._first if self._rewind else None), 0
        if state is not None and usable and leads_to(state, epoch, position):
            self._warn_if_state_is_missing(state)
            return state, position - state["position"]
        self.warn_of_skipping(position, problem)
        # One reader skips by sample. Of several readers only the order of their batches is known,
        # so whole batches are read and dropped in deliver().
        if self._workers < 2:
            return {"turn": 0, "workers": [_mark(position)]}, 0
        return None, position

    def _warn_if_state_is_missing(self, state: State) -> None:
        """Warn if the samples before a saved position must be read, for lack of a dataset state."""
        marks = [mark for mark in state["workers"] if mark["read"] and not mark["ended"]]
        if marks and (not self._shards.stateful or any(mark["state"] is None for mark in marks)):
            self.warn_of_skipping(state["position"], None)

    def warn_of_skipping(self, position: int, problem: str | None) -> None:
        """Warn that samples are read and dropped: once, or each time there is a problem."""
        if self._warned and problem is None:
            return
        self._warned = True
        why = "one with state_dict and load_state_dict, or a map-style dataset, resumes at once"
        warn(
            f"resuming an iterable dataset reads and drops its first {position} samples; "
            f"{problem or why}.",
        )

    def _at_rest(self) -> State | None:
        """Return the state of the dataset in this process between two passes, if it has one."""
        if self._workers or not self._shards.stateful:
            return None
        with suppress(Exception):  # some datasets have no state before their first pass
            return _one_reader(deepcopy(self._shards.dataset.state_dict()))  # type: ignore[attr-defined]
        return None

    # --- a pass ---------------------------------------------------------------------------------

    def deliver(self, items: Iterator[Piece | None]) -> Iterator[tuple[Any, Delivery]]:
        """Yield each batch after the position with its counts."""
        assert self._begun is not None
        position = self._begun[1]
        resumed = self._shards.resume
        count = max(self._workers, 1)
        marks = [_mark(0) for _ in range(count)] if resumed is None else list(resumed["workers"])
        skip, dropped = self._skip, 0
        if resumed is None and not self._checked:
            self._checked = True
            name = type(self._shards.dataset).__name__
            if count > 1:
                items = compare_over_workers(items, count, name)
            if self._shards.may_divide and collectives.has_peers():
                items = compare_over_ranks(items, name)
        pieces = _Pieces(items, self._after_pass)
        place = _Place(position, marks)
        known: Part | None = None
        before = 0
        while True:
            piece = pieces.take() if pieces.is_ahead else next(pieces.items, None)
            if piece is None:
                break
            batch, part = piece
            # Hot path: full batches of a single reader share one part, so that the place in the
            # stream is worked out once for all of them, and read only when a state is asked for.
            if part is not known:
                if known is not None:
                    place = place.after(known, pieces.count - before)
                known, before = part, pieces.count
                if skip and dropped + part.real <= skip:
                    dropped += part.real
                    place, known = place.after(part, 1)._replace(position=position), None
                    continue
                delivery = self._delivery(part, place, pieces)
            pieces.count += 1
            yield batch, delivery
        pieces.end()

    def _delivery(self, part: Part, place: _Place, pieces: _Pieces) -> Delivery:
        """Return the counts of the batches that share a part, of which the first comes next."""
        assert self._begun is not None
        epoch, before = self._begun[0], pieces.count
        kept = None
        if part.real < part.padded and self._shards.batch_size is None:
            # Ready batches are repeated as a whole, and their samples are not counted.
            kept = ready_kept(part.real, part.padded)

        def state(number: int) -> State:
            position, marks = place.after(part, number - before)
            if pieces.ended and number == pieces.count:
                # The next pass continues from the dataset's own state.
                marks = [{**mark, "ended": True, "state": pieces.after} for mark in marks]
            turn = (part.worker + 1) % len(marks)
            return {"epoch": epoch, "position": position, "turn": turn, "workers": marks}

        return Delivery(part.real, part.padded, pieces.end_with, kept, state)

    def _after_pass(self) -> Any:
        """Return the state of the dataset from which its next pass continues, if it has one."""
        rest = self._at_rest()
        return None if rest is None else rest["workers"][0]["state"]


class _Place(NamedTuple):
    """A position in a stream: global samples before it, and the mark of each reader."""

    position: int
    marks: Sequence[State]

    def after(self, part: Part, times: int) -> _Place:
        """Return the position after so many batches of one part."""
        real, marks = times * part.real, list(self.marks)
        read = marks[part.worker]["read"] + real
        marks[part.worker] = {"read": read, "ended": part.ended, "state": part.state}
        return _Place(self.position + real, marks)


class _Pieces:
    """The pieces of a pass, of which the next is read early where someone asks for the end.

    Not always: a dataset that draws from a global generator would draw before the step of the batch
    in hand, and the numbers of dropout would be others than in a plain loop.

    Args:
        items: the pieces, with placeholders.
        after_pass: returns the state of the dataset after its end.

    Attributes:
        items: the pieces that were not read.
        count: batches delivered so far.
        is_ahead: the next piece, or that there is none, was read early.
        ended: all were read.
        after: what ``after_pass`` returned then.
    """

    def __init__(self, items: Iterator[Piece | None], after_pass: Callable[[], Any]) -> None:
        self.items = filter(None, items)
        self.count = 0
        self.is_ahead = self.ended = False
        self.after: Any = None
        self._after_pass = after_pass
        self._next: Piece | None = None
        self._problem: Exception | None = None

    def take(self) -> Piece | None:
        """Return the piece that was read early, None at the end; raise if reading it did."""
        self.is_ahead = False
        if self._problem is not None:
            raise self._problem
        return self._next

    def end_with(self, number: int) -> bool:
        """Return whether there are no more batches than this many, and no error after them."""
        if number != self.count:
            return False
        if not self.is_ahead and not self.ended:
            self.is_ahead = True
            try:
                self._next = next(self.items, None)
            except Exception as problem:  # belongs to the next batch, not to who asks for the end
                self._problem = problem
            else:
                if self._next is None:
                    self.end()
        return self.ended

    def end(self) -> None:
        """Note that all pieces were read."""
        if not self.ended:
            self.ended, self.after = True, self._after_pass()


def _mark(read: int) -> dict[str, Any]:
    return {"read": read, "ended": False, "state": None}


def _one_reader(state: Any) -> State:
    """Return the start of a pass for a single reader, with the dataset in this state."""
    return {"turn": 0, "workers": [{"read": 0, "ended": False, "state": state}]}


def leads_to(state: State, epoch: int, position: int) -> bool:
    """Return whether a state is of this epoch and not after this position."""
    return bool(state["epoch"] == epoch and state["position"] <= position)
