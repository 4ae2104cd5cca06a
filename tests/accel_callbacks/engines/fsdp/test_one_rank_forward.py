"""A forward of a sharded model on some ranks only: an error at once, or one that says who waits."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin
from accel_callbacks.distributed.topology import destroy_topology
from tests.support.bound import BOUND, patience
from tests.support.sharded import Network, accelerator, batch_of, step

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def on_one_rank(how: str, what: str, layout: str = "fsdp") -> list[str]:
    """Call a model in a block of one rank; return the errors, and train after them."""
    accel, model = accelerator(layout), Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(model, optimizer, forward_methods=["score"])
    inputs = batch_of(4)
    bare = accel.unwrap_model(model)
    calls = {
        "forward": lambda: model(inputs),
        "block": lambda: bare.blocks[0](torch.ones(1, 30)),
        "method": lambda: model.score(inputs),
        "whole": lambda: accel.full_parameters(model).__enter__(),
        "plain": lambda: torch.nn.Linear(7, 1)(inputs),
    }

    def report() -> None:
        with torch.no_grad():
            calls[what]()

    errors = []
    try:
        if how.endswith("first"):
            with getattr(accel, how)():
                report()
        elif how == "on_process":
            accel.on_process(report, process_index=1)()
        elif how == "on_local_process":
            accel.on_local_process(report, local_process_index=1)()
        else:
            getattr(accel, how)(report)()
    except RuntimeError as error:
        errors.append(f"{type(error).__name__}: {error}")
    step(accel, model, optimizer, inputs)  # nobody waits for anybody, and no hook is left
    return errors


@pytest.mark.parametrize(
    ("how", "what", "name"),
    [
        ("on_main_process", "forward", "the forward of Network inside of report (main_process"),
        ("on_local_main_process", "block", "the forward of Block inside of report (local_main"),
        ("on_process", "method", "Network.score inside of report (on_process)"),
        ("on_local_process", "whole", "full_parameters inside of report (on_local_process)"),
        ("on_last_process", "forward", "the forward of Network inside of report (last_process"),
    ],
)
def test_a_sharded_model_is_not_called_where_one_rank_runs(pool, how, what, name):
    results = pool.run(on_one_rank, how, what)
    (errors,) = (one for one in results if one)  # of the one rank that ran it
    assert name in errors[0]
    assert "call accel.get_state_dict(model) on all ranks before" in errors[0]


@pytest.mark.parametrize("how", ["main_process_first", "local_main_process_first"])
def test_nor_where_the_ranks_take_turns(pool, how):
    for errors in pool.run(on_one_rank, how, "forward"):
        assert f"the forward of Network inside of {how} would wait for ever" in errors[0]


@pytest.mark.parametrize(("layout", "what"), [("fsdp", "plain"), ("ddp", "forward")])
@pytest.mark.parametrize("how", ["on_main_process", "main_process_first"])
def test_models_that_are_whole_are_called_there(pool, how, layout, what):
    assert pool.run(on_one_rank, how, what, layout) == [[], []]


@pytest.mark.parametrize("how", ["on_main_process", "main_process_first"])
def test_one_process_calls_what_it_likes(alone, how):
    assert alone.run(on_one_rank, how, "forward") == [[]]


# --- under a plain `if`, which nobody sees ------------------------------------------------------


def under_an_if(then: str, run: bool, seconds: float) -> None:
    destroy_topology()  # the group of other tests has a longer timeout
    plugin, timeout = FullyShardedDataParallelPlugin(), timedelta(seconds=seconds)
    accel, model = Accelerator(cpu=True, timeout=timeout, fsdp_plugin=plugin), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if run:
        with accel.run("job"):
            _forward_on_rank_0(accel, model, optimizer, then, seconds)
    else:
        _forward_on_rank_0(accel, model, optimizer, then, seconds)


def _forward_on_rank_0(accel: Any, model: Any, optimizer: Any, then: str, seconds: float) -> None:
    step(accel, model, optimizer, batch_of(4))
    if accel.is_main_process:
        with torch.no_grad():
            model(batch_of(4))
    if then == "wait":
        accel.wait_for_everyone()
    for _ in range(3 if then == "step" else 0):
        step(accel, model, optimizer, batch_of(4))
    if then == "sleep":
        time.sleep(2 * seconds)


PLACES = {
    "wait": r"in accel_callbacks\.distributed\.process_control\.wait_for_everyone",
    "sleep": "",
}


@pytest.mark.parametrize(
    ("then", "run"),
    [
        ("wait", False),
        *(
            pytest.param(then, run, marks=pytest.mark.slow)
            for then, run in [("wait", True), ("sleep", True)]
        ),
    ],
)
def test_the_error_names_the_rank_that_does_not_come_and_its_place(pool, then, run):
    try:
        outcomes = pool.outcomes(under_an_if, then, run, patience(8))
    finally:
        pool.restart()
    kind, text = outcomes[0]
    assert kind == "RuntimeError"
    assert re.match(
        "the forward of Network, which gathers weights from all ranks: all ranks live, but one did "
        r"not come within the timeout of the process group: rank 1 was last seen at "
        rf"(test_one_rank_forward|sharded)\.py:\d+ in \w+(, )?{PLACES[then]}",
        text,
    ), text
    kind, text = outcomes[1]
    # It waits for nothing, until it looks at the run; or it hears of rank 0 before it times out.
    if then == "sleep" or (run and kind == "RemoteError"):
        assert kind == "RemoteError"
        assert "rank 0 failed in the run 'job'" in text
    else:
        assert kind == "RuntimeError"
        # Both time out at once; where rank 0 is first, it has closed the connection.
        assert re.search(
            r"rank 0 was last seen at (test_one_rank_forward|sharded|pool_worker)\.py:\d+", text
        ), text


@pytest.mark.parametrize("run", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_in_different_forwards_say_so_at_once(pool, run):
    try:
        outcomes = pool.outcomes(under_an_if, "step", run, BOUND.total_seconds())
    finally:
        pool.restart()
    for kind, text in outcomes:
        assert kind == "RuntimeError"
        assert text.startswith(
            "rank 0 came to the forward of 'Network' without gradients, and rank 1 to the forward "
            "of 'Network': "
        ), text


class Breaks(Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a size does not fit")


def breaks() -> None:
    accelerator().prepare(Breaks())(batch_of(4))


def test_an_error_of_the_forward_itself_stays_as_it_is(pool):
    for kind, text in pool.outcomes(breaks):
        assert kind == "RuntimeError"
        assert text.startswith("a size does not fit\n")
