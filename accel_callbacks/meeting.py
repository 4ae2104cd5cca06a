"""The name of one attempt of a run, where a store outlives the processes that meet at it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

__all__ = ["agree_on_attempt", "store_outlives"]

_FIRST_LOOK, _LONGEST_PAUSE = 0.005, 0.2  # seconds


def store_outlives(meet_at: str, env: Mapping[str, str]) -> bool:
    """Whether the elastic launcher may start processes again that meet at the same store.

    Args:
        meet_at: the URL at which the processes meet.
        env: the variables of this process.

    Example:
        >>> from accel_callbacks.meeting import store_outlives
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        True
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "False"})
        False
    """
    if meet_at.startswith("file://"):
        return "TORCHELASTIC_RUN_ID" in env
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(
    store: dist.distributed_c10d.Store, rank: int, world: int, timeout: timedelta
) -> str:
    """A name that the processes of this attempt agree on, whatever is left of earlier ones.

    The launcher's count of restarts is none: each machine counts its own, and a machine that comes
    or goes is not counted. So rank 0 makes up a name, the others answer, and each goes on only
    where its own answer is confirmed: what an earlier attempt left confirms somebody else's.

    Args:
        store: at which the processes meet.
        rank: of this process.
        world: number of processes.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: processes did not come.

    Example:
        >>> from datetime import timedelta
        >>> import torch.distributed as dist
        >>> from accel_callbacks.meeting import agree_on_attempt
        >>> len(agree_on_attempt(dist.HashStore(), 0, 1, timedelta(seconds=1)))
        32
    """
    if rank == 0:
        return _lead(store, world, timeout)
    return _follow(store, rank, timeout)


def _lead(store: dist.distributed_c10d.Store, world: int, timeout: timedelta) -> str:
    attempt = uuid.uuid4().hex
    store.set("attempt", attempt)
    answers = {rank: f"{attempt}/{rank}" for rank in range(1, world)}
    try:
        if answers:
            store.wait(list(answers.values()), timeout)
    except dist.DistStoreError as error:
        missing = [rank for rank, answer in answers.items() if not store.check([answer])]
        raise RuntimeError(
            f"ranks {missing} of {world} did not come within {timeout}: see their own output."
        ) from error
    confirmed = [store.get(answer).decode() for answer in answers.values()]
    store.set(f"{attempt}/confirmed", json.dumps(confirmed))
    return attempt


def _follow(store: dist.distributed_c10d.Store, rank: int, timeout: timedelta) -> str:
    own = uuid.uuid4().hex
    answered = ""
    pause, deadline = _FIRST_LOOK, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode() if store.check(["attempt"]) else ""
        if attempt and attempt != answered:
            store.set(f"{attempt}/{rank}", own)
            answered = attempt
        if attempt and store.check([f"{attempt}/confirmed"]):
            confirmed = json.loads(store.get(f"{attempt}/confirmed"))
            if own in confirmed:
                return attempt
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    raise RuntimeError(
        f"rank 0 did not confirm that rank {rank} takes part within {timeout}: see its output."
    )
