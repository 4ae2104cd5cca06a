"""The exit from a run for a preemption between step boundaries, in an evaluation above all."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from accel_callbacks import collectives
from accel_callbacks.addons.resilience.kept_tensors import KeptTensors, own_weights
from accel_callbacks.loop.run import RunLeft

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["BoundaryExit"]

_LOOK_EVERY = 0.2  # seconds between two looks at the store in an evaluation
_PATIENCE = (0.25, 1.0, 4.0)  # seconds that a rank waits for the others before a batch, by round
_LONGEST = 30.0  # seconds, for batches that take long
_POLL_EVERY = 0.01
_State = tuple[dict[str, Any], dict[str, Any]]


class BoundaryExit:
    """Keeps the state of a boundary, to which a run can go back until the next optimizer step.

    What the script does after the boundary, such as an evaluation or a step of a scheduler by the
    epoch, it does again after a resume. So the state of the boundary is what is saved. Its tensors
    are kept by reference: once one of them is written to, as by a step or by averaged weights that
    are swapped in, there is no way back, and the next boundary has to be reached.

    The ranks agree through the store, as a collective would meet another one of the script where
    ranks evaluate unequal numbers of batches. Each waits before a batch until all do, so that none
    is in a collective; those behind go on to the batch of the one that is furthest.

    Args:
        run: the run; its loop tells each boundary from now on, until the end of the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._training: TrainingState = run.accelerator.training_state
        self._run = run
        boundary = self._training.loop.boundary
        self._keep_others, boundary.keep = boundary.keep, self.keep
        self._kept: _State | None = None
        self._step = 0
        self._tensors = KeptTensors()
        # Of this run only: another one may use the same store later.
        self._key = f"leave/{collectives.broadcast_object(uuid.uuid4().hex)}"
        self._asked: tuple[str, int] | None = None
        self._next_look = 0.0
        self._came = self._pace = 0.0  # when the last batch came, and seconds since the one before
        self._round = self._batches = 0
        self._target: int | None = None

    def keep(self) -> None:
        """Keep the state of this boundary, at which all ranks are."""
        self._keep_others()
        training = self._training
        self._kept, self._target = None, None
        self._batches = self._round = 0
        self._came = time.monotonic()
        if not all(map(training.strategy.states.loads_in_place, training.models)):
            return  # the engine gives copies, which do not tell what is written to the tensors
        with suppress(Exception):  # a state that cannot be captured fails its save, and not here
            state = training.capture()
            self._tensors.keep(_tensors(state), _tensors(state[0]["models"]))
            self._step = self._run.global_step
            # The containers are copied, as a callback may return the very dict that it changes.
            self._kept = _pytree.tree_map(lambda leaf: leaf, state)

    def go_back(self) -> None:
        """Return to the boundary, once the script is unwound: its state is what is saved now."""
        if self._kept is None or self._run.global_step != self._step:
            return  # a script has caught the exit, gone on, and raises it only now
        self._training.left_state = self._boundary_state
        position = self._kept[0]["run"]  # what is saved at that position already is not saved again
        self._run.epoch_open = position["epoch_open"]
        self._run.epochs_done = position["epochs_done"]

    def _boundary_state(self) -> _State:
        """Return the state of the boundary, in which callbacks that save know what they saved."""
        assert self._kept is not None
        shared, local = self._kept
        entries = self._training.loop.dispatch.entries
        savers = {entry.key: entry.state() for entry in entries if entry.saves}
        return {**shared, "callbacks": {**shared["callbacks"], **savers}}, dict(local)

    def before_batch(self, reason: str | None) -> None:
        """Leave the run before this batch of an evaluation, if a rank asks for it and all can.

        Args:
            reason: what this rank asks for it with, None if it does not.

        Raises:
            RunLeft: all ranks leave here.
        """
        if self._kept is None:
            return
        self._batches += 1
        before, self._came = self._came, time.monotonic()
        self._pace = self._came - before
        if collectives.world_size() == 1:
            if reason is not None and self._can_return():
                raise RunLeft(reason, 0, self.go_back)
            return
        if self._target is None and self._round < len(_PATIENCE):
            with suppress(dist.DistError):  # a store that is gone: the next collective says why
                if self._asked is not None or self._is_asked(reason):
                    self._agree()
        if self._target is not None and self._asked and self._batches >= self._target:
            raise RunLeft(*self._asked, self.go_back)

    def interrupt(self, reason: str) -> None:
        """Leave the run of a single process, if it waits for a loader and the way back is open.

        Called in the handler of a signal: where nothing but the wait is under way, it may raise.

        Args:
            reason: of the preemption.

        Raises:
            RunLeft: it is left.
        """
        loop = self._training.loop
        waiting = [loader for loader in loop.position.active if loader.waits]
        if not waiting or collectives.world_size() > 1:
            return
        # While training waits for a batch, this is a boundary.
        if loop.position.outer in waiting and loop.step.worked and not loop.in_window:
            self.keep()
        if self._kept is not None and self._can_return():
            raise RunLeft(reason, 0, self.go_back)

    def _can_return(self) -> bool:
        """Return whether the tensors are still those of the boundary."""
        run = self._run
        if run.settle_steps is not None or run._global_step != self._step:
            return False
        with own_weights(run.callbacks):
            return self._tensors.unchanged()

    def _is_asked(self, reason: str | None) -> bool:
        """Return whether a rank has asked to leave; look into the store now and then."""
        store, asked = collectives.store(), f"{self._key}/asked"
        if reason is not None:
            store.compare_set(asked, "", json.dumps([reason, collectives.rank()]))
        elif time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_EVERY
        if not store.check([asked]):
            return False
        text, rank = json.loads(store.get(asked))
        self._asked = text, rank
        return True

    def _agree(self) -> None:
        """Find the batch before which all ranks leave; none if one is not before a batch soon."""
        store, ranks = collectives.store(), range(collectives.world_size())
        while store.check([outcome := f"{self._key}/{self._round}"]):
            self._round += 1  # it was closed before this rank came
        if self._round >= len(_PATIENCE):
            return
        places = [f"{outcome}/{rank}" for rank in ranks]
        place = self._batches if self._can_return() else None
        store.set(places[collectives.rank()], json.dumps(place))
        # At first another rank may wait in a collective of the next batch, for this one.
        longest = min(1.5 * self._pace, _LONGEST) if self._round else 0.0
        deadline = time.monotonic() + max(_PATIENCE[self._round], longest)
        self._round += 1
        while True:
            batches = store.read(places)
            if "null" in batches:  # that rank finishes the evaluation, so all do
                self._round = len(_PATIENCE)
                return
            if None not in batches:
                agreed = store.compare_set(outcome, "", "leave")
            elif time.monotonic() > deadline:
                agreed = store.compare_set(outcome, "", "go on")
            elif store.check([outcome]):
                agreed = store.get(outcome)
            else:
                time.sleep(_POLL_EVERY)
                continue
            break
        if agreed == b"leave":
            self._target = max(int(count) for count in store.read(places) if count is not None)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
