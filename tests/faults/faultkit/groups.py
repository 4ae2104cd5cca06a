"""What victims do as ranks of one group: `function(link, rank, size, rendezvous, ...)`."""

from __future__ import annotations

import os
import re
import signal
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import checkpoint_io
from faultkit.interpose import Interposer
from faultkit.states import local_of, state_of, whole
from faultkit.trouble import Trouble, from_the
from faultkit.victims import RUN, join_group, save_step
from tests.support.bound import patience


def save_as_group(
    link: Connection, rank: int, size: int, rendezvous: str, url: str, step: int, numel: int
) -> None:
    """Save one step together."""
    group = join_group(rank, size, rendezvous)
    save_step(url, step, rank=rank, group=group, numel=numel)


def save_with_a_bad_rank(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    step: int,
    bad: int,
    what: str,
    nth: int,
) -> None:
    """Save together; on one rank the state cannot be stored, or the n-th call fails."""
    group = join_group(rank, size, rendezvous)
    trouble = Trouble(url)
    local: Any = local_of(step, rank)
    if rank == bad and what == "state":
        local["bad"] = object()
    elif rank == bad:
        trouble.fail(what, "EIO", nth)
    with trouble.watch():
        checkpoint_io.save(
            url,
            state_of(step, 20_000),
            local_state=local,
            metadata={"run_id": RUN},
            group=group,
            max_shard_size=100_000,
        )


def save_with_a_dead_rank(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    step: int,
    bad: int,
    what: str,
    nth: int,
    after: bool = False,
) -> None:
    """Save together; one rank is killed before or after its n-th call of a name."""
    group = join_group(rank, size, rendezvous)
    die = from_the(what, nth, lambda call: os.kill(os.getpid(), signal.SIGKILL), repeat=True)
    hooks: dict[str, Any] = {}
    if rank == bad:
        hooks = {"after": lambda call, result: die(call)} if after else {"before": die}
    with Interposer(url, **hooks):
        save_step(url, step, rank=rank, group=group, numel=20_000)


def save_with_a_stopped_rank(
    link: Connection, rank: int, size: int, rendezvous: str, url: str, step: int
) -> None:
    """Save together; rank 1 is stopped before its first write."""
    group = join_group(rank, size, rendezvous, timeout=timedelta(seconds=patience(4)))
    stop = from_the("write", 0, lambda call: os.kill(os.getpid(), signal.SIGSTOP), repeat=False)
    with Interposer(url, before=stop if rank == 1 else None):
        save_step(url, step, rank=rank, group=group, numel=20_000)


def load_latest_together(
    link: Connection, rank: int, size: int, rendezvous: str, url: str, dead: int | None = None
) -> Any:
    """Load the newest checkpoint together; return what it is, and the damaged files named."""
    group = join_group(rank, size, rendezvous)
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checkpoint_io.CheckpointFolder(url).load_latest(group=group)
    said = " ".join(str(warning.message) for warning in caught)
    return whole(found, rank), sorted(set(re.findall(r"objects-[0-9a-f]+-r\d+\.json", said)))
