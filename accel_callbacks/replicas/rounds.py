"""Rounds: a quorum, one gradient window, and a vote on whether it counts."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.checkpoint.restore import LoadOptions, restore_from
from accel_callbacks.distributed.tcp_store import is_loopback
from accel_callbacks.errors import ReplicaBehindError
from accel_callbacks.launch_notes import folder_of_launch
from accel_callbacks.logging import notice
from accel_callbacks.plugins.torchft import TorchFTKwargs
from accel_callbacks.replicas.batches import replica_batches
from accel_callbacks.replicas.group import GroupLost, ReplicaGroup
from accel_callbacks.replicas.interface import Share
from accel_callbacks.replicas.lighthouse import Lighthouse, Member
from accel_callbacks.replicas.state_server import StateServer, fetch_state

if TYPE_CHECKING:
    from accel_callbacks.checkpoint.checkpointer import Checkpointer
    from accel_callbacks.checkpoint.training_state import TrainingState
    from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["Rounds"]

_PAUSE = 0.2  # seconds before a quorum of too few replicas is asked for again


class Rounds:
    """The windows of one replica among others that come and go.

    A round begins with a quorum: who takes part, and who takes over the state of another. It ends
    with the mean of the gradients and a vote; a window that a replica was lost in is refused by
    all, and trained again by those that are left.

    Args:
        options: the lighthouse, the number of replicas and the limits.
        training: returns the state that a newcomer takes over.
        checkpointer: returns what writes that state.

    Attributes:
        is_open: a window is being trained.
        refused: the last window does not count.
        writes: this replica saves checkpoints and logs for all.
        on_writing: called when it begins to.
    """

    def __init__(
        self,
        options: TorchFTKwargs,
        training: Callable[[], TrainingState],
        checkpointer: Callable[[], Checkpointer],
    ) -> None:
        self.is_open = self.refused = self.writes = False
        self.on_writing: Callable[[], None] = lambda: None
        self._options = options
        self._training = training
        self._checkpointer = checkpointer
        name = options.replica or socket.gethostname()
        # A replica that comes back is another one: the old one may still be counted as alive.
        self._own = Member(f"{name}:{uuid.uuid4().hex[:12]}")
        self._token = options.token or ""
        self._lighthouse = Lighthouse(options.lighthouse or "", self._own.name, options.wait)
        self._group = ReplicaGroup(options.address, options.timeout)
        self._server: StateServer | None = None
        self._share = Share(0, 1)
        self._connected: tuple[Any, ...] = ()
        self._started: tuple[DataLoaderShard, int] | None = None
        self._members: tuple[str, ...] = ()

    # --- the beginning of a round -------------------------------------------------------------

    def join(self) -> None:
        """Wait for the others, and take over the state of one that trains.

        Raises:
            TimeoutError: too few replicas came, or no lighthouse answered.
            ValueError: the training is none that replicas can share.
        """
        self._check()
        if self._server is None:
            self._server = StateServer(self._options.address, self._token, self._options.timeout)
        self._own = replace(self._own, store=self._group.store_address, state=self._server.address)
        self.begin()

    def _check(self) -> None:
        training = self._training()
        if len(training.optimizers) != 1:
            raise ValueError(
                f"replicas vote on the step of one optimizer, and {len(training.optimizers)} are "
                "prepared: give parameter groups to a single one, before accel.run()."
            )
        if not (self._token or is_loopback(self._options.address)):
            raise ValueError(
                f"address={self._options.address!r} is reached from other machines, and the "
                "training state is served there: give all replicas the same secret, as token= or "
                "in ACCEL_REPLICA_TOKEN."
            )

    def begin(self) -> Share:
        """Begin a round unless one is open; return this replica's share of its batches.

        Raises:
            ReplicaBehindError: the others have gone on without this replica.
            TimeoutError: too few replicas came, or no lighthouse answered.
        """
        while not self.is_open:
            number, members = self._enough()
            try:
                self._connect(number, members)
                self._heal(members, _key(number, members))
                self.is_open, self.refused = True, False
            except GroupLost:
                self._fail()
        return self._share

    def _enough(self) -> tuple[int, list[Member]]:
        """Return a quorum that may train, without members that have fallen behind."""
        told, deadline = "", time.monotonic() + self._options.wait
        while True:
            number, present = self._lighthouse.members(self._own)
            members = self._up_to_date(present)
            needed = self._needed(members)
            if len(members) >= needed:
                return number, members
            text = f"waiting for {needed - len(members)} more of {needed} replicas"
            if text != told:
                told = text
                notice(text)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{needed - len(members)} of {needed} replicas did not come within "
                    f"{self._options.wait:.0f} seconds. They may have ended: a replica that comes "
                    "then does not train alone. Else start them, or give a smaller number "
                    "(replicas= at the start, min_replicas= later), or a longer wait=."
                )
            time.sleep(_PAUSE)

    def _needed(self, members: list[Member]) -> int:
        """Return how many must be there: at the start all of them, so that none trains apart."""
        if any(member.live for member in members):
            return self._options.min_replicas
        return max(self._options.replicas or 1, self._options.min_replicas)

    def _up_to_date(self, present: list[Member]) -> list[Member]:
        """Return the members without those that train, and have missed a window.

        Raises:
            ReplicaBehindError: this replica has.
        """
        newest = max((member.windows for member in present if member.live), default=0)
        members = [member for member in present if not member.live or member.windows == newest]
        if self._own.name not in [member.name for member in members]:
            raise ReplicaBehindError(
                f"this replica has trained {self._own.windows} windows and the others {newest}: "
                "they went on without it. Started again, it takes over their state; "
                "`accel launch --max_restarts 3` does so."
            )
        return members

    def _connect(self, number: int, members: list[Member]) -> None:
        """Connect the members of a quorum, unless they are connected already."""
        names = tuple(member.name for member in members)
        key = (number, _failures(members), names)
        place = names.index(self._own.name)
        self._share = Share(place, len(members))
        if key == self._connected:
            return
        self._say_who(names)
        self._own = replace(self._own, configured=self._own.configured + 1)
        self._connected = ()
        self._group.connect(members[0].store, _key(number, members), place, len(members))
        self._connected = key

    def _say_who(self, names: tuple[str, ...]) -> None:
        if names != self._members:
            self._members = names
            short = ", ".join(name.rpartition(":")[0] for name in names)
            who = "1 replica trains" if len(names) == 1 else f"{len(names)} replicas train"
            notice(f"{who} from window {self._own.windows} on: {short}")

    def _fail(self) -> None:
        self._group.close()
        self._connected = ()
        self._own = replace(self._own, failures=self._own.failures + 1)

    # --- the state of a newcomer ----------------------------------------------------------------

    def _heal(self, members: list[Member], key: str) -> None:
        """Let newcomers take over the state of a replica that trains, or of the first one."""
        source = _source_of(members)
        newcomers = [member for member in members if not member.live and member != source]
        if source.name == self._own.name:
            if newcomers:
                self._offer(key)
        elif not self._own.live:
            self._take_over(source, key)
        # At most one writes, for long: a place among the others may change with each newcomer.
        writer = next((member for member in members if member.writes), source)
        if writer.name == self._own.name and not self.writes:
            self.writes = True
            self.on_writing()
        self._own = replace(self._own, live=True, writes=self.writes)

    def _offer(self, key: str) -> None:
        """Serve the state of this replica; if that fails, the newcomer alone ends."""
        assert self._server is not None
        self._training().loop.worked = True  # no batch waits to be trained on
        write = partial(self._checkpointer().write, own=True)
        try:
            self._server.publish(key, write)
        except Exception as error:
            notice(f"a newcomer could not be given the state: {error}")

    def _take_over(self, source: Member, key: str) -> None:
        training = self._training()
        run = training.loop.run
        resumed_from = run.resumed_from
        began = time.perf_counter()
        place = folder_of_launch()
        with tempfile.TemporaryDirectory(prefix="accel-replica-", dir=place) as root:
            folder = os.path.join(root, "state")
            fetch_state(source.state, key, self._token, folder, self._options.timeout)
            restore_from(training, folder, LoadOptions(verify="full", progress=False))
        if run.global_step == 0:
            run.resumed_from = resumed_from
        name = source.name.rpartition(":")[0]
        seconds = time.perf_counter() - began
        notice(f"took over the state of {name} at step {run.global_step} in {seconds:.2f} s")

    def state_dict(self) -> dict[str, int]:
        """Return the windows committed so far."""
        return {"windows": self._own.windows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over the windows of another replica, or of a checkpoint."""
        self._own = replace(self._own, windows=state["windows"])

    # --- the data and the gradients of a round --------------------------------------------------

    def batches(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Return the batches of this replica in a training pass.

        Raises:
            RuntimeError: the loop is not inside of ``accel.run``.
        """
        if not self._own.live:
            raise RuntimeError(
                "replicas share the training inside of `with accel.run(...) as run:` and "
                "`for epoch in run.epochs(...)`, where a newcomer can go on: put the loop there."
            )
        return replica_batches(loader, self)

    def watch(self, loader: DataLoaderShard | None) -> None:
        """Note where the window begins in the data, at its first batch; None to forget."""
        if loader is None:
            self._started = None
        elif self._started is None:
            self._started = loader, loader.position - loader.real

    def settle(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of a window and vote on it; ``refused`` tells the result.

        Raises:
            RuntimeError: no window is open.
        """
        if not self.is_open:
            raise RuntimeError(
                "a second backward in one window, or one outside of the loop over the prepared "
                "loader: replicas average gradients at the last backward of a step. Add the "
                "losses up, or use gradient_accumulation_steps with `with accel.accumulate(model)`."
            )
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        try:
            self._average(trained)
            self._group.agree()
        except GroupLost as error:
            self._refuse(trained, error)
        else:
            self._own = replace(self._own, windows=self._own.windows + 1)
        self.is_open, self._started = False, None
        if self._server is not None:
            self._server.forget()  # newcomers have it, as they have voted

    def _average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Set gradients to their mean; one that no replica has stays None."""
        if self._share.replicas == 1:
            return
        used = torch.tensor([float(p.grad is not None) for p in parameters], device="cpu")
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]
        self._group.average([*gradients, used])
        for parameter, gradient, share in zip(parameters, gradients, used.tolist(), strict=True):
            parameter.grad = gradient if share else None

    def _refuse(self, parameters: list[torch.nn.Parameter], error: GroupLost) -> None:
        self.refused = True
        self._fail()
        for parameter in parameters:  # half averaged: nothing may be made of them
            if parameter.grad is not None:
                parameter.grad.zero_()
        if self._started is not None:
            loader, position = self._started
            loader.return_to(position)
        reason = str(error).partition("\n")[0][:100]
        notice(f"window {self._own.windows} is trained again: a replica was lost ({reason})")

    def close(self) -> None:
        """Leave the others."""
        self._lighthouse.close()
        self._group.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        self.is_open, self._connected = False, ()
        self._own = replace(self._own, live=False)  # and `writes`: who saves still does so


def _failures(members: list[Member]) -> int:
    return max(member.failures for member in members)


def _key(number: int, members: list[Member]) -> str:
    """Return a name for a quorum, also where a new lighthouse counts from 1 again."""
    first = members[0]
    return f"{first.name}.{first.configured}.{number}.{_failures(members)}"


def _source_of(members: list[Member]) -> Member:
    """Return the member whose state is taken over: one that trains, else the most advanced."""
    live = [member for member in members if member.live]
    if live:
        return next((member for member in live if member.writes), live[0])
    return max(members, key=lambda member: member.windows)
