"""The script destroys the process group that an Accelerator uses, and goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, PartialState
from accel_callbacks.distributed.topology import destroy_topology
from tests.accel_callbacks.distributed.test_failing_scripts import run_script
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed
TIMEOUT = BOUND


def prepared() -> tuple[Accelerator, Any, Any]:
    accel = Accelerator(cpu=True, timeout=TIMEOUT)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accel, model, optimizer


def step(accel: Accelerator, model: Any, optimizer: Any) -> float:
    """Train on data that differ between ranks; return the weight."""
    accel.backward(model(torch.tensor([[accel.process_index + 1.0]])).sum())
    optimizer.step()
    optimizer.zero_grad()
    return float(accel.unwrap_model(model).weight.detach())


def make_own_group(file: str) -> None:
    """With a store of its own: torch may read the addresses of an earlier group in a used one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"rank": rank, "world_size": world, "timeout": TIMEOUT}
    dist.init_process_group("gloo", init_method=f"file://{file}", **options)
    dist.barrier()  # a rank that destroys its group at once may cut off one that still connects


def train_after_destroying(times: int) -> list[list[float]]:
    seen = []
    for _ in range(times):
        ready = prepared()
        seen.append([step(*ready), ready[0].gather(torch.tensor([1.0])).sum().item()])
        dist.destroy_process_group()
    return seen


def test_a_new_accelerator_joins_again(pool):
    first, second = pool.run(train_after_destroying, 3)
    assert first == second
    assert [total for _, total in first] == [2.0] * 3
    weights = [weight for weight, _ in first]
    assert weights == weights[:1] * 3  # the mean gradient of both ranks, each time


def train_in_own_groups(first_is_own: bool, folder: str) -> list[tuple[float, int, str]]:
    destroy_topology()
    seen = []
    for number, own in enumerate((first_is_own, not first_is_own, True, True, False)):
        if own:
            make_own_group(f"{folder}/{number}")
        ready = prepared()
        state = PartialState()
        seen.append((step(*ready), state.num_processes, str(state.device)))
        dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("first_is_own", [True, False])
def test_groups_of_the_script_and_of_ours_take_turns(pool, tmp_path, first_is_own):
    first, second = pool.run(train_in_own_groups, first_is_own, str(tmp_path))
    assert first == second
    assert first == first[:1] * 5
    assert first[0][1:] == (2, "cpu")


def use_after_destroying(use: str, folder: str, again: bool) -> str:
    destroy_topology()
    accel, model, optimizer = prepared()
    loader = accel.prepare(torch.utils.data.DataLoader(torch.ones(8, 1), 2))
    step(accel, model, optimizer)
    dist.destroy_process_group()
    if again:
        make_own_group(f"{folder}-group")
    uses = {
        "backward": lambda: step(accel, model, optimizer),
        "gather": lambda: accel.gather(torch.ones(1)),
        "wait": accel.wait_for_everyone,
        "save": lambda: accel.save_state(folder),
        "run": lambda: accel.run("late").__enter__(),
        "prepare": lambda: accel.prepare(torch.nn.Linear(1, 1)),
        "loader": lambda: [accel.backward(model(batch).sum()) for batch in loader],
    }
    try:
        uses[use]()
    except RuntimeError as error:
        text = str(error)
    else:
        text = "no error"
    accel.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    return text


@pytest.mark.parametrize(
    ("use", "again"),
    [(use, False) for use in ("backward", "gather", "wait", "save", "run", "prepare", "loader")]
    + [("backward", True), ("loader", True)],
)
def test_the_used_accelerator_says_that_its_group_is_gone(pool, tmp_path, use, again):
    folder = tmp_path / "state"
    for text in pool.run(use_after_destroying, use, str(folder), again):
        assert "was destroyed" in text
        assert "make a new Accelerator" in text
    assert not Path(folder).exists()


def end_after_destroying() -> list[Any]:
    destroy_topology()
    accel, model, optimizer = prepared()
    weight = step(accel, model, optimizer)
    dist.destroy_process_group()
    accel.end_training()
    return [weight, accel.is_main_process, accel.process_index]


def test_end_training_may_come_after_it(pool):
    (weight, *first), (same, *second) = pool.run(end_after_destroying)
    assert weight == same
    assert (first, second) == ([True, 0], [False, 1])


def make_group_after_one_alone(folder: str) -> list[Any]:
    """An Accelerator of one process, then a group of the script's."""
    destroy_topology()
    taken = {name: os.environ.pop(name) for name in ("WORLD_SIZE", "RANK")}
    try:
        alone = Accelerator(cpu=True).num_processes
    finally:
        os.environ.update(taken)
    make_own_group(f"{folder}/group")
    together = Accelerator(cpu=True)
    seen = [alone, together.num_processes, together.process_index]
    dist.destroy_process_group()
    return seen


def test_a_group_that_comes_later_is_noticed(pool, tmp_path):
    assert pool.run(make_group_after_one_alone, str(tmp_path)) == [[1, 2, 0], [1, 2, 1]]


SCRIPT_FIRST = """
import time
import torch.distributed as dist
from accel_callbacks import Accelerator

dist.init_process_group("gloo")
for name in ("the script's", "ours"):
    accel = Accelerator(cpu=True)  # no model: torch would keep the store up with it
    accel.wait_for_everyone()
    if accel.is_main_process and name == "the script's":
        time.sleep(2)  # the other rank asks for the next group at the store of this one
    dist.destroy_process_group()
"""


def test_the_store_of_the_scripts_group_may_still_be_up_when_ours_is_joined():
    outcomes = run_script(code=SCRIPT_FIRST)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
