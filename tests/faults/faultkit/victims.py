"""What victims do. Each function runs in a forked process: `function(link, *args)`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import checkpoint_io
from faultkit.interpose import Call, Interposer
from faultkit.recording import Recorder
from faultkit.states import NUMEL, local_of, state_of
from faultkit.trouble import Trouble, from_the
from tests.support.bound import BOUND

RUN = "faults"


def join_group(rank: int, size: int, rendezvous: str, timeout: timedelta = BOUND) -> Any:
    """Join a gloo group that meets at a file; None for a single process."""
    if size == 1:
        return None
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return checkpoint_io.TorchGroup()


def save_step(
    url: str,
    step: int,
    *,
    job: int = 0,
    rank: int = 0,
    group: Any = None,
    options: dict[str, Any] | None = None,
    numel: int = NUMEL,
    run: str = RUN,
) -> None:
    """Save the state of one step over what is at `url`."""
    checkpoint_io.save(
        url,
        state_of(step, numel, job),
        local_state=local_of(step, rank, job),
        metadata={"run_id": run, "step": step},
        group=group,
        max_shard_size=numel * 5,
        storage_options=options,
    )


def overwrite(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    start: int,
    options: dict[str, Any] | None = None,
    numel: int = NUMEL,
) -> None:
    """Save over one path, again and again; say when each save begins and when it is done."""
    group = join_group(rank, size, rendezvous)
    for step in count(start):
        link.send(("begin", step))
        save_step(url, step, rank=rank, group=group, options=options, numel=numel)
        link.send(("saved", step))


def fill_folder(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    start: int,
    options: dict[str, Any] | None = None,
    numel: int = NUMEL,
) -> None:
    """Save step after step into a folder of checkpoints that keeps the last two."""
    group = join_group(rank, size, rendezvous)
    folder = checkpoint_io.CheckpointFolder(url, storage_options=options)
    for step in count(start):
        link.send(("begin", step))
        folder.save(
            step,
            state_of(step, numel),
            local_state=local_of(step, rank),
            metadata={"run_id": RUN},
            group=group,
            max_shard_size=numel * 5,
        )
        link.send(("saved", step))
        if rank == 0:
            folder.prune(checkpoint_io.keep_last(2), run_id=RUN)


def overwrite_in_background(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    start: int,
    options: dict[str, Any] | None = None,
    numel: int = NUMEL,
) -> None:
    """Save in the background while the tensors are changed in place, as an optimizer does."""
    group = join_group(rank, size, rendezvous)
    saver = checkpoint_io.BackgroundSaver(group=group)
    for step in count(start):
        link.send(("begin", step))
        state, own = state_of(step, numel), local_of(step, rank)
        handle = saver.save(
            url,
            state,
            local_state=own,
            metadata={"run_id": RUN, "step": step},
            max_shard_size=numel * 5,
            storage_options=options,
        )
        for tensor in (state["model"]["weight"], state["model"]["bias"], own["rng"]):
            tensor.add_(1)  # the next step of the training, which the save must not see
        handle.wait()
        link.send(("saved", step))


def save_and_die(link: Connection, url: str, step: int, at: int, after: bool) -> None:
    """Save once and be killed before or after the `at`-th system call on the folder."""

    def die(call: Call, result: Any = None) -> None:
        if call.index == at:
            os.kill(os.getpid(), signal.SIGKILL)

    watch = Interposer(url, after=die) if after else Interposer(url, before=die)
    with watch:
        save_step(url, step)


def count_calls(link: Connection, url: str, step: int) -> list[tuple[str, str]]:
    """Save once; return name and file of each system call on the folder."""
    calls: list[tuple[str, str]] = []

    def note(call: Call) -> None:
        if call.index >= 0:
            calls.append((call.name, os.path.basename(call.path)))

    with Interposer(url, before=note):
        save_step(url, step)
    return calls


def once(
    link: Connection, url: str, step: int, options: dict[str, Any] | None = None, job: int = 0
) -> None:
    """Save one step."""
    save_step(url, step, options=options, job=job)


def attempt(action: Callable[[], Any]) -> tuple[str, str]:
    """Run something that may fail: ("ok", "") or (the error's kinds, its text)."""
    try:
        action()
    except Exception as error:
        kinds = ",".join(kind.__name__ for kind in type(error).__mro__)
        return kinds, str(error)
    return "ok", ""


def record_saves(link: Connection, root: str, url: str, steps: int, numel: int) -> list[Any]:
    """Save some steps over one path; return what was asked of the disk, with the bytes."""
    recorder = Recorder(root)
    with recorder.watch:
        for step in range(1, steps + 1):
            recorder.mark("begin", step)
            save_step(url, step, numel=numel)
            recorder.mark("saved", step)
    return recorder.events


def record_folder(link: Connection, root: str, url: str, steps: int, numel: int) -> list[Any]:
    """Save some steps into a folder that keeps the last two; return what was asked of the disk."""
    recorder = Recorder(root)
    folder = checkpoint_io.CheckpointFolder(url)
    with recorder.watch:
        for step in range(1, steps + 1):
            recorder.mark("begin", step)
            folder.save(
                step,
                state_of(step, numel),
                local_state=local_of(step, 0),
                metadata={"run_id": RUN},
                max_shard_size=numel * 5,
            )
            recorder.mark("saved", step)
            folder.prune(checkpoint_io.keep_last(2), run_id=RUN)
    return recorder.events


def save_on_demand(link: Connection, url: str, numel: int) -> None:
    """Save each step that is asked for."""
    while True:
        step = link.recv()
        link.send(("begin", step))
        save_step(url, step, numel=numel)
        link.send(("saved", step))


def try_on_demand(link: Connection, url: str) -> None:
    """Save the steps asked for, in between do to the system what is asked for."""
    trouble = Trouble(url)
    while True:
        first, *rest = link.recv()
        if isinstance(first, int):
            numel = rest[0]
            with trouble.watch():
                outcome = attempt(lambda step=first, n=numel: save_step(url, step, numel=n))
            link.send(("answer", outcome))
        else:
            getattr(trouble, first)(*rest)


def load_in_little_memory(link: Connection, url: str) -> tuple[str, str]:
    """Load in a process that may not grow much."""
    limit_memory()
    return attempt(lambda: checkpoint_io.load(url))


def load_weights_in_little_memory(link: Connection, url: str) -> tuple[str, str]:
    """Load a model's weights in a process that may not grow much."""
    limit_memory()
    return attempt(lambda: checkpoint_io.load_model_state(url))


def allocate_in_little_memory(link: Connection) -> tuple[str, str]:
    """Ask for more than there may be."""
    limit_memory()
    return attempt(lambda: bytearray(2 * MORE))


MORE = 2**30  # address space, of which threads reserve much more than they use


def limit_memory() -> None:
    """Let this process have some more memory than it has, and no more than that."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE, now + MORE))


def save_rounds(
    link: Connection | None,
    url: str,
    job: int,
    rounds: int,
    numel: int,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """Save some steps as one of several jobs, each until it gets through; return every outcome."""
    outcomes = []
    for step in range(1, rounds + 1):
        while outcomes.count("ok") < step:
            kinds, text = attempt(
                lambda s=step: save_step(
                    url, s, job=job, options=options, numel=numel, run=f"{RUN}-{job}"
                )
            )
            outcomes.append(kinds.split(",")[0])
            if outcomes[-1] == "CheckpointConflictError":
                time.sleep(random.uniform(0, 0.02))
            elif outcomes[-1] != "ok":
                raise RuntimeError(f"step {step}: {kinds}: {text}")
    return outcomes


def fill_rounds(link: Connection, url: str, start: int, rounds: int, numel: int) -> None:
    """Save some steps into a folder that keeps the last two."""
    folder = checkpoint_io.CheckpointFolder(url)
    for step in range(start, rounds + 1):
        folder.save(step, state_of(step, numel), metadata={"run_id": RUN})
        folder.prune(checkpoint_io.keep_last(2), run_id=RUN)


def save_and_rest(link: Connection, url: str, step: int, numel: int) -> None:
    """Stop in the middle of a save."""

    def rest(call: Call) -> None:
        link.send(("resting",))
        time.sleep(1000)

    with Interposer(url, before=from_the("fsync", 0, rest, repeat=False)):
        save_step(url, step, numel=numel)


def try_in_background(link: Connection, url: str) -> None:
    """Save the steps asked for in the background of this process."""
    saver = checkpoint_io.BackgroundSaver()
    while True:
        step, numel = link.recv()
        handle = saver.save(
            url, state_of(step, numel), local_state=local_of(step, 0), metadata={"run_id": RUN}
        )
        link.send(("answer", attempt(handle.wait)))
