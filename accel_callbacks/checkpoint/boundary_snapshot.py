"""The snapshot of a boundary: put together from what ranks have left, and saved by one for all."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from accel_callbacks.launch_memory import free_bytes
from accel_callbacks.terminal_text import size_of

__all__ = ["merge", "save_for_all"]

_RANKS_WAIT = 60.0  # seconds that the threads of a save wait for each other


def merge(
    sections: Mapping[str, Any],
    replicated: Mapping[str, Collection[str]],
    record: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the state that all ranks share.

    Args:
        sections: the models and optimizers of one rank.
        replicated: names of parameters that are the same on other ranks, by model.
        record: what rank 0 has written at the boundary.

    Raises:
        ValueError: a tensor may have another value on another rank.
    """
    models, optimizers = {}, {}
    for number, weights in sections["models"].items():
        buffers = record["buffers"][number]
        if unknown := weights.keys() - buffers.keys() - set(replicated[number]):
            raise ValueError(f"{sorted(unknown)[0]} may differ between ranks")
        models[number] = {name: buffers.get(name, weights[name]) for name in weights}
    names = {f"{number}.{name}" for number, model in replicated.items() for name in model}
    for number, optimizer in sections["optimizers"].items():
        if unknown := optimizer["state"].keys() - names:
            raise ValueError(f"the optimizer's {sorted(unknown)[0]} may differ between ranks")
        pairs = zip(optimizer["param_groups"], record["groups"][number], strict=True)
        groups = [{"params": now["params"], **then} for now, then in pairs]
        optimizers[number] = {**optimizer, "param_groups": groups}
    return {**sections, "models": models, "optimizers": optimizers, **record["shared"]}


def save_for_all(
    path: str,
    nbytes: int,
    whole_state: Callable[[], Mapping[str, Any]],
    own_states: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Any],
) -> str:
    """Save for all ranks, unless another one does; return why not, empty if it is there.

    Args:
        path: of the checkpoint.
        nbytes: that it needs at least.
        whole_state: returns what the ranks share.
        own_states: what each has for itself, by rank.
        labels: the metadata.
    """
    try:
        os.makedirs(path, mode=0o700)
    except FileExistsError:
        return ""
    try:
        free = free_bytes(path)
        if free >= nbytes:
            _save(path, whole_state(), own_states, labels)
            return ""
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    return f"it needs {size_of(nbytes)}, and {size_of(free)} are free"


def _save(
    path: str,
    state: Mapping[str, Any],
    own_states: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Any],
) -> None:
    """Save as all ranks would together, each of which is a thread."""
    from checkpoint_io import save

    seats, problems = _Seats(len(own_states)), list[BaseException]()

    def take_part(rank: int) -> None:
        try:
            save(
                path,
                {} if rank else state,
                local_state=own_states[rank],
                metadata=labels,
                group=_Seat(seats, rank),
                generation=labels.get("step", 0),
                replicated=False,
                progress=False,
            )
        except BaseException as problem:
            problems.append(problem)
            seats.barrier.abort()

    threads = [
        threading.Thread(target=take_part, args=(rank,), name=f"accel-save-{rank}")
        for rank in range(1, len(own_states))
    ]
    for thread in threads:
        thread.start()
    take_part(0)
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class _Seats:
    """What the threads that stand for the ranks of a save exchange."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.objects: list[Any] = [None] * count


class _Seat:
    """The group of a save, as one of the threads sees it."""

    def __init__(self, seats: _Seats, rank: int) -> None:
        self._seats = seats
        self.rank, self.world_size = rank, len(seats.objects)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all threads, in rank order."""
        self._seats.objects[self.rank] = obj
        self._seats.barrier.wait(_RANKS_WAIT)
        gathered = list(self._seats.objects)
        self._seats.barrier.wait(_RANKS_WAIT)
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one of them."""
        return self.all_gather_object(obj)[src]
