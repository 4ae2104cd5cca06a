"""A script's own group of NCCL alone: votes, flags and objects go over a gloo group beside it.

NCCL needs a GPU for each rank. A group of gloo of which the library is told that it serves no
tensors of the CPU stands for it: what would go to the device goes over the default group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, Callback, LocalSGD, PartialState, collectives
from accel_callbacks.collectives import group as groups
from accel_callbacks.distributed import abort
from accel_callbacks.distributed.topology import destroy_topology
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed
TIMEOUT = BOUND
# torch 2.13 renamed it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
CALLS = ("all_reduce", GATHER, "barrier", "broadcast", "gather")
OF_LONG_OBJECTS = ("all_gather_object", "broadcast_object_list")


@contextmanager
def own_group(file: str) -> Iterator[Any]:
    """The script's own group, that serves no tensors of the CPU; yield it."""
    destroy_topology()
    serves, groups.serves_cpu = groups.serves_cpu, lambda group: False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options: Any = {"rank": rank, "world_size": world, "timeout": TIMEOUT}
    dist.init_process_group("gloo", init_method=f"file://{file}", **options)
    try:
        yield dist.group.WORLD
    finally:
        groups.serves_cpu = serves
        dist.destroy_process_group()
        destroy_topology()


@contextmanager
def watched() -> Iterator[list[tuple[str, bool]]]:
    """Collect the collectives of the block, and whether each is in the control group."""
    seen: list[tuple[str, bool]] = []
    real = {name: getattr(dist, name) for name in CALLS + OF_LONG_OBJECTS}

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            control = kwargs.get("group")
            seen.append((name, control is not None and control is collectives.control_group()))
            return real[name](*args, **kwargs)

        return call

    for name in CALLS + OF_LONG_OBJECTS:
        setattr(dist, name, noting(name))
    try:
        yield seen
    finally:
        for name, call in real.items():
            setattr(dist, name, call)


class Stops(Callback):
    """One rank stops the run after two steps."""

    can_vote = True

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_rank == 1 and run.global_step == 2:
            run.stop("enough")


def each_kind_of_control(file: str) -> list:
    with own_group(file):
        accel = Accelerator(cpu=True)
        found: dict[str, Any] = {}
        with watched() as seen:
            found["flag"] = collectives.any_process(accel.process_index == 1)
            found["objects"] = accel.gather_for_metrics([accel.process_index], True)
            found["sent"] = collectives.broadcast_object(accel.process_index, from_process=1)
            accel.wait_for_everyone()
            # uneven, which the ranks compare first
            held = accel.gather(torch.ones(1 + accel.process_index))
            found["gathered"] = held.tolist()
            found["sum"] = accel.reduce(torch.tensor(1.0)).item()
        return [found, sorted({name for name, _ in seen}), all(control for _, control in seen)]


def test_control_goes_over_the_group_beside_it(pool, tmp_path):
    found = {"flag": True, "objects": [0, 1], "sent": 1, "gathered": [1.0] * 3, "sum": 2.0}
    assert (
        pool.run(each_kind_of_control, str(tmp_path / "store"))
        == [[found, sorted(CALLS), True]] * 2
    )


def votes(file: str) -> list:
    with own_group(file):
        accel = Accelerator(cpu=True, callbacks=[Stops()])
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.DataLoader(torch.ones(12, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = accel.prepare(model, sgd, data)
        with watched() as seen, accel.run("votes", resume=False) as run:
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
        return [run.global_step, run.stop_reason, all(control for _, control in seen)]


def test_votes_do_too(pool, tmp_path):
    assert pool.run(votes, str(tmp_path / "store")) == [[3, "enough", True]] * 2


def averages(file: str) -> list:
    with own_group(file):
        accel = Accelerator(cpu=True)
        model = accel.prepare(torch.nn.BatchNorm1d(1))
        bare = accel.unwrap_model(model)
        with LocalSGD(accel, model, local_sgd_steps=1) as local, watched() as seen:
            bare.running_mean.fill_(accel.process_index)
            local.step()
        return [bare.running_mean.item(), seen]


def test_buffers_on_the_cpu_are_averaged_there(pool, tmp_path):
    mean, seen = pool.run(averages, str(tmp_path / "store"))[0]
    assert mean == 0.5
    assert seen == [["all_reduce", True]] or seen == [("all_reduce", True)]


def life_of_the_group(folder: str) -> list:
    seen = []
    for number in range(2):
        with own_group(f"{folder}/{number}"):
            state = PartialState(cpu=True)
            control = collectives.control_group()
            timeout = control._get_backend(torch.device("cpu")).options._timeout
            seen.append([control is not None, control is collectives.control_group(), timeout])
            seen.append(control in abort._groups())
            assert state.num_processes == 2
            destroy_topology()
            seen.append([collectives.control_group() is None, control in abort._groups()])
            seen.append(dist.is_initialized())  # the script's own stays
    Accelerator(cpu=True, timeout=TIMEOUT)
    return [*seen, collectives.control_group() is None]


def test_it_is_made_with_each_group_and_goes_with_the_accelerators(pool, tmp_path):
    once = [[True, True, TIMEOUT], True, [True, False], True]
    assert pool.run(life_of_the_group, str(tmp_path)) == [[*once, *once, True]] * 2
