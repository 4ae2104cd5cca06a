"""The lighthouse of torchft: which replicas are there for the next step."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from accel_callbacks.logging import notice

__all__ = ["Lighthouse", "Member"]

_HEARTBEAT = 0.2  # seconds; torchft's lighthouse takes a replica for dead after 5 s by default
_CALL = 20.0  # seconds that one question may wait, so that an interrupt is noticed
_PAUSE = 0.5  # seconds before a lighthouse that did not answer is asked again
_CONNECT = 2.0  # seconds
_GRACE = 3.0  # seconds, in which the heartbeats of all replicas reach a new lighthouse


@dataclass(frozen=True)
class Member:
    """One replica as all others see it in a quorum.

    Args:
        name: unique to the process; members are ordered by it.
        windows: gradient windows committed.
        live: it trains, or has taken over the state of one that does.
        writes: it saves checkpoints and logs for all.
        failures: windows that it saw fail; a new number makes all connect again.
        configured: how often it has connected, so that no key of its store is used twice.
        store: host and port of its key-value store.
        state: host and port at which it serves its training state.
    """

    name: str
    windows: int = 0
    live: bool = False
    writes: bool = False
    failures: int = 0
    configured: int = 0
    store: str = ""
    state: str = ""


class Lighthouse:
    """Asks a lighthouse for quorums, and sends it heartbeats from a thread.

    A lighthouse that is lost is waited for. It keeps nothing, so another one may take its place at
    the same address.

    Args:
        address: host and port.
        name: of this replica, unique to the process.
        patience: seconds that a lost lighthouse is waited for.
    """

    def __init__(self, address: str, name: str, patience: float) -> None:
        self.address = address if "://" in address else f"http://{address}"
        self._name = name
        self._patience = patience
        self._client: Any = None
        self._ended = threading.Event()
        self._lost = threading.Event()  # set where the lighthouse has not answered
        self._thread: threading.Thread | None = None

    def members(self, own: Member) -> tuple[int, list[Member]]:
        """Return the number of a quorum that this replica is part of, and its members in order.

        Args:
            own: what the others are told of this replica.

        Raises:
            TimeoutError: no lighthouse has answered for ``patience`` seconds.
        """
        self._start_heartbeats()
        while True:
            if self._lost.is_set():
                self._wait_for_return()
            try:
                return self._ask(own)
            except TimeoutError:
                continue  # the others are not there yet
            except RuntimeError:
                self._lost.set()

    def _wait_for_return(self) -> None:
        """Wait for a lighthouse, and until it knows of the other replicas again."""
        deadline = time.monotonic() + self._patience
        told = False
        while True:
            self._client = None
            self._lost.clear()
            try:
                self._client = self._connect()
                self._client.heartbeat(self._name, timedelta(seconds=2))
                break
            except (RuntimeError, TimeoutError) as error:
                if not told:
                    told = True
                    notice(
                        f"the lighthouse at {self.address} does not answer; training goes on once "
                        f"it is back ({_first_line(error)})"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no lighthouse has answered at {self.address} for {self._patience:.0f} "
                        "seconds: start one there with torchft_lighthouse, or give a longer wait="
                    ) from error
                time.sleep(_PAUSE)
        # It has forgotten who is there, and would let the first to ask train alone.
        time.sleep(_GRACE)
        if told:
            notice(f"the lighthouse at {self.address} is back")

    def _ask(self, own: Member) -> tuple[int, list[Member]]:
        if self._client is None:
            self._client = self._connect()
        values = {key: value for key, value in asdict(own).items() if key != "name"}
        quorum = self._client.quorum(
            replica_id=own.name,
            timeout=timedelta(seconds=_CALL),
            address="",
            store_address="",
            step=own.windows,
            world_size=1,
            shrink_only=False,
            data=values,
        )
        try:
            members = [Member(entry.replica_id, **entry.data) for entry in quorum.participants]
        except TypeError:
            raise ValueError(
                f"another program, or another version of this library, asks the lighthouse at "
                f"{self.address} too: start a lighthouse for each training, at a port of its own."
            ) from None
        return int(quorum.quorum_id), sorted(members, key=lambda member: member.name)

    def _connect(self) -> Any:
        from torchft.coordination import LighthouseClient

        return LighthouseClient(self.address, timedelta(seconds=_CONNECT))

    def _start_heartbeats(self) -> None:
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(
                target=self._send_heartbeats, name="accel-replica-heartbeat", daemon=True
            )
            self._thread.start()

    def _send_heartbeats(self) -> None:
        client = None
        while not self._ended.wait(_HEARTBEAT):
            try:
                client = client or self._connect()
                client.heartbeat(self._name, timedelta(seconds=2))
            except (RuntimeError, TimeoutError):
                client = None
                self._lost.set()

    def close(self) -> None:
        """Send no more heartbeats, by which the lighthouse counts this replica out."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:120]
