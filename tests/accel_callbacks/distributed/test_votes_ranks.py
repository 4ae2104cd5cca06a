"""What one of two processes asks for, both do, at the end of the step after it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist

from accel_callbacks import Accelerator, Callback, collectives
from accel_callbacks.callbacks import Checkpoint
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


class Asks(Callback):
    """One process asks in the middle of an epoch; notes what happens then and at which step."""

    def __init__(
        self,
        kind: str,
        step: int,
        *,
        can_vote: bool = True,
        code: int | None = None,
        at_once: bool = False,
    ):
        self.kind, self.step, self.can_vote, self.code = kind, step, can_vote, code
        self.votes_at_once = at_once
        self.told: list = []

    def on_after_backward(self, run, model):  # within a gradient window too
        if run.global_rank == 1 and run.global_step == self.step and self.kind:
            getattr(run, self.kind)(f"{self.kind} by {run.global_rank}")

    def on_checkpoint_saved(self, run, model, path):
        self.told.append(("saved", path[-2:], run.global_step))

    def on_preempt(self, run, model, reason):
        run.exit_code = self.code
        self.told.append((reason, run.global_step))


def train(asks: Asks, *others: Callback, window: int = 1, plain: bool = False) -> list:
    """Two epochs of six batches; what was told, where it ended, and how."""
    accel = Accelerator(
        cpu=True,
        timeout=BOUND,
        callbacks=[asks, *others],
        gradient_accumulation_steps=window,
    )
    model = torch.nn.Linear(1, 1)
    model, optimizer, data = accel.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.DataLoader(torch.ones(12, 1)),
    )

    def epoch() -> None:
        for batch in data:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()

    run, ended = accel.current_run, None
    try:
        if plain:
            for _ in range(2):
                epoch()
            accel.end_training()
        else:
            with accel.run("votes", resume=False) as run:
                for _ in run.epochs(2):
                    epoch()
    except SystemExit as error:
        ended = error.code
    return [asks.told, run.global_step, run.stop_reason, run.preempted, ended]


def stop(plain: bool) -> list:
    return train(Asks("stop", 2), plain=plain)


@pytest.mark.first
@pytest.mark.parametrize("plain", [False, True])
def test_a_stop(pool, plain):
    assert pool.run(stop, plain) == [[[], 4, "stop by 1", False, None]] * 2


def stop_at_once() -> list:
    return train(Asks("stop", 2, at_once=True))


def test_a_callback_can_have_the_ranks_decide_at_the_end_of_the_very_step(pool):
    assert pool.run(stop_at_once) == [[[], 3, "stop by 1", False, None]] * 2


def at_once_on_one() -> None:
    Accelerator(
        cpu=True,
        timeout=BOUND,
        callbacks=[Asks("stop", 2, at_once=int(dist.get_rank()) == 0)],
    ).prepare(torch.nn.Linear(1, 1))


def test_ranks_that_would_decide_at_different_steps_are_an_error(pool):
    pool.run(stop_at_once)  # which joins the group
    for kind, text in pool.outcomes(at_once_on_one):
        assert "ValueError" in kind + text
        assert "rank 0 has ['Asks (votes at once)'], rank 1 has ['Asks']" in text


def ask_in_the_last_step(plain: bool) -> list:
    return train(Asks("preempt", 5, code=75), plain=plain)


@pytest.mark.parametrize("plain", [False, True])
def test_at_the_last_step_of_an_epoch_the_ranks_decide_at_once(pool, plain):
    told = [("preempt by 1", 6)]
    assert pool.run(ask_in_the_last_step, plain) == [[told, 6, "preempt by 1", True, 75]] * 2


def left_by_break(kind: str, again: bool) -> list:
    """One process asks in the second batch; the third ends the loop before it does anything."""
    asks = Asks(kind, 1, code=75)
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[asks])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(12, 1))
    model, optimizer, data = accel.prepare(model, sgd, data)
    seen = 0
    try:
        with accel.run("votes", resume=False) as run:
            for _ in range(1 + again):
                for index, batch in enumerate(data):
                    if index == 2:
                        break
                    seen += 1
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
    except SystemExit as error:
        return [asks.told, seen, run.stop_reason, error.code]
    return [asks.told, seen, run.stop_reason, None]


@pytest.mark.parametrize("again", [False, True])
def test_no_decision_is_lost_where_the_loop_is_left(pool, again):
    assert pool.run(left_by_break, "stop", again) == [[[], 2, "stop by 1", None]] * 2
    told = [("preempt by 1", 2)]
    assert pool.run(left_by_break, "preempt", again) == [[told, 2, "preempt by 1", 75]] * 2


class SavesInTheLoop(Callback):
    """Saves after each step, and notes whether an exchange of votes was under way."""

    collective = True
    can_vote = True

    def __init__(self, folder: str) -> None:
        self.folder, self.ballots = folder, []

    def on_after_optimizer_step(self, run, model, optimizer):
        before = run.votes._ballot
        run.accelerator.save_state(f"{self.folder}/{run.global_step}")
        self.ballots.append(before is None or before._work is None)


def save_and_stop(folder: str) -> list:
    saves = SavesInTheLoop(folder)
    return [*train(Asks("stop", 2), saves), saves.ballots]


def test_a_save_waits_for_the_vote_and_the_decision_is_kept(pool, tmp_path):
    told = [("saved", f"/{step}", step) for step in (1, 2, 3, 4)]
    expected = [told, 4, "stop by 1", False, None, [True] * 4]
    assert pool.run(save_and_stop, str(tmp_path)) == [expected] * 2


def waits_for_nobody() -> list:
    """How many votes were waited for before the next step began."""
    begun, seen = [], []
    reduce = dist.all_reduce

    def reducing(tensor, *args, **kwargs):
        work = reduce(tensor, *args, **kwargs)
        if tensor.shape == (1,):
            begun.append(kwargs.get("async_op", False))
        return work

    class Watches(Asks):
        def on_train_batch_start(self, run, model, batch, batch_idx):
            seen.append(run.votes.pending)

    dist.all_reduce = reducing
    try:
        train(Watches("", 0))
    finally:
        dist.all_reduce = reduce
    return [all(begun), seen]


def test_a_vote_is_under_way_while_the_next_step_runs(pool):
    assert pool.run(waits_for_nobody) == [[True, ([False] + [True] * 5) * 2]] * 2


class TakesBack(Asks):
    """Asks, and takes it back a step later."""

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_step == 2:
            run.stop("too early")
        if run.global_step == 3:
            run.should_stop = False


def taken_back() -> list:
    return train(TakesBack("", 0))


def test_a_request_can_be_taken_back_while_it_is_under_way(pool):
    assert pool.run(taken_back) == [[[], 12, None, False, None]] * 2


def what_a_stop_shows() -> str:
    with redirect_stderr(io.StringIO()) as shown:
        train(Asks("stop", 2))
    return shown.getvalue()


def test_who_asked_for_the_stop_is_shown_once(pool):
    shown = pool.run(what_a_stop_shows)
    assert shown == ["[accel] stopped at step 4, as rank 1 asked: stop by 1\n", ""]


def save(folder: str) -> list:
    saver = Checkpoint(folder, every_n_steps=1000, keep_last=None, async_save=False)
    return train(Asks("save_now", 2), saver)


@pytest.mark.first
def test_a_save(pool, tmp_path):
    told = [("saved", "04", 4), ("saved", "12", 12)]
    assert pool.run(save, str(tmp_path)) == [[told, 12, None, False, None]] * 2


def preempt(folder: str, code: int | None, plain: bool) -> list:
    saver = Checkpoint(folder, every_n_steps=1000)
    return train(Asks("preempt", 2, code=code), saver, plain=plain)


@pytest.mark.parametrize("code", [None, 85])
@pytest.mark.parametrize("plain", [False, True])
def test_a_preemption(pool, tmp_path, code, plain):
    outcomes = pool.run(preempt, str(tmp_path), code, plain)
    for told, *rest in outcomes:
        assert sorted(told, key=str) == [("preempt by 1", 4), ("saved", "04", 4)]
        assert rest == [4, "preempt by 1", True, code]


def without_a_vote() -> list:
    return train(Asks("stop", 2, can_vote=False))


def test_without_a_callback_that_votes_it_is_agreed_on_at_the_end_of_the_epoch(pool):
    assert pool.run(without_a_vote) == [[[], 6, "stop by 1", False, None]] * 2


def in_a_window() -> list:
    return train(Asks("preempt", 1), window=4)


def test_an_open_gradient_window_is_finished_first(pool):
    told = [("preempt by 1", 2)]
    assert pool.run(in_a_window) == [[told, 2, "preempt by 1", True, None]] * 2


class AllAsk(Callback):
    """Every process asks for everything at once."""

    can_vote = True

    def __init__(self) -> None:
        self.told: list = []

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_step == 2:
            for ask in (run.stop, run.preempt, run.save_now):
                ask(f"rank {run.global_rank}")

    def resume_root(self, run):
        return "memory://votes", None

    def save_now(self, run, reason):
        self.told.append(f"save {reason}")

    def on_preempt(self, run, model, reason):
        self.told.append(f"preempt {reason}")


def all_ask() -> list:
    return train(AllAsk())


def test_the_first_reason_counts_and_a_save_comes_first(pool):
    told = ["save rank 0", "preempt rank 0"]
    assert pool.run(all_ask) == [[told, 3, "rank 0", True, None]] * 2


def count_exchanges(kind: str, can_vote: bool) -> list:
    """How many all-reduces of a ballot there were, and how many exchanges of reasons."""
    seen: list[str] = []
    reduce, exchange = dist.all_reduce, collectives.all_objects

    def reducing(tensor, *args, **kwargs):
        seen.append("ballot" if tensor.shape == (1,) else "other")
        return reduce(tensor, *args, **kwargs)

    def exchanging(value, *, operation="", **kwargs):
        seen.append(operation)
        return exchange(value, operation=operation, **kwargs)

    dist.all_reduce, collectives.all_objects = reducing, exchanging
    try:
        train(Asks(kind, 2, can_vote=can_vote))
    finally:
        dist.all_reduce, collectives.all_objects = reduce, exchange
    return [seen.count("ballot"), seen.count("votes")]


@pytest.mark.first
def test_a_vote_is_one_small_exchange_a_step_and_reasons_only_where_there_are_any(pool):
    # Before the epochs, at each step, and at the end of each epoch.
    assert pool.run(count_exchanges, "", True) == [[1 + 12 + 2, 0]] * 2
    assert pool.run(count_exchanges, "", False) == [[1 + 2, 0]] * 2
    assert pool.run(count_exchanges, "stop", True) == [[1 + 3 + 1, 1]] * 2


class SkipsAlike(Callback):
    """All processes leave out the same step."""

    def on_before_optimizer_step(self, run, model, optimizer):
        if run.batch_idx == 1:
            run.skip_step("told to")


def skipping() -> list:
    return train(Asks("", 0), SkipsAlike())


def test_a_step_is_left_out_on_all_processes(pool):
    assert pool.run(skipping) == [[[], 10, None, False, None]] * 2


class Meets(Callback):
    """Hooks that meet the other processes."""

    collective = True


def given_to_one() -> None:
    callbacks = [Meets()] if int(dist.get_rank()) == 0 else []
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=callbacks)
    accel.prepare(torch.nn.Linear(1, 1))


def test_a_collective_callback_that_is_missing_on_one_process_is_an_error(pool):
    for kind, text in pool.outcomes(given_to_one):
        assert "ValueError" in kind + text
        assert "rank 0 has ['Meets'], rank 1 has []" in text


def a_voter_that_is_done_on_one_process() -> int:
    accel = Accelerator(cpu=True, timeout=BOUND)
    accel.on("log", once=True, can_vote=True)(lambda run: None)
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(12, 1)))
    with accel.run("votes", resume=False) as run:
        for _ in run.epochs(1):
            for _ in data:
                if accel.is_main_process:
                    accel.log({"loss": 1.0})
    return run.epochs_done


def test_processes_go_on_to_vote_where_a_voter_is_done_on_one_of_them(pool):
    assert pool.run(a_voter_that_is_done_on_one_process) == [1, 1]
