"""The heartbeat over a store in this process, and what it learns of threads and processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_callbacks.collectives.store import BoundedStore, read_keys
from accel_callbacks.distributed import heartbeat, stack
from accel_callbacks.distributed.heartbeat import Heartbeat, LostRank, is_disconnect, remote_failure
from accel_callbacks.distributed.processes import fate_of, host_id
from accel_callbacks.distributed.stack import StuckCalls, is_saving, place_of, stacks
from checkpoint_io import Lease

EVER = float("inf")


def until(condition):
    """Wait for a condition that comes, sooner or later."""
    while not condition():
        time.sleep(0.01)


class Clock:
    """The clock of heartbeats, which moves where a test or a sleep of theirs says so."""

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(heartbeat, "time", clock := Clock())
    return clock


@pytest.fixture
def store():
    store = BoundedStore(dist.HashStore())
    store.patience = 600.0
    return store


def beat(store, rank, **values):
    known = {"count": 1, "place": "train.py:3 in main", "process": ["elsewhere", 1]}
    known |= {"left": None, "stuck": 0.0, "time": 0.0, **values}
    store.set(f"heartbeat/{rank}", json.dumps(known))


@contextmanager
def watching(store, world=2, timeout=600):
    aborted = threading.Event()
    watch = Heartbeat(store, 0, world, timeout=timeout, abort=aborted.set)
    watch.start()
    try:
        yield watch, aborted
    finally:
        watch.stop()
        for thread in threading.enumerate():
            if thread.name == "accel-end":  # it would move the clock of the next test
                thread.join()


def test_a_rank_without_a_heartbeat_is_lost_and_all_others_are_told(store, capfd, clock):
    beat(store, 1)
    with watching(store, timeout=10) as (watch, aborted):
        for _ in range(6):  # in steps that are no pause of this process
            watch._refresh(EVER)
            assert watch.lost is None
            clock.now += 2
        watch._refresh(EVER)
        aborted.wait()
    assert watch.lost == LostRank(1, "has not answered for 12 s", "train.py:3 in main")
    assert LostRank(**json.loads(store.get("lost"))) == watch.lost
    assert f"[accel] {watch.lost}" in capfd.readouterr().err


def test_a_rank_with_a_heartbeat_that_left_or_has_not_come_yet_is_not_lost(store, clock):
    beat(store, 1)
    beat(store, 2, left="")
    with watching(store, world=4, timeout=10) as (watch, aborted):
        for count in range(2, 32):  # rank 1 lives for three times the timeout
            beat(store, 1, count=count)
            clock.now += 1
            watch._refresh(EVER)
        assert watch.lost is None
    assert not aborted.is_set()


def test_a_stop_of_this_process_between_question_and_answer_is_no_silence(store, clock):
    beat(store, 1)
    talk, stops = Heartbeat._talk, [0.0]

    def stopped(watch, store, ranks):
        texts = talk(watch, store, ranks)
        clock.now += stops.pop() if stops else 0.0
        return texts

    with watching(store, timeout=10) as (watch, _):
        watch._refresh(EVER)
        watch._talk = stopped.__get__(watch)
        stops.append(177.0)
        watch._refresh(EVER)
        assert not stops
        assert watch.lost is None


def test_what_one_rank_finds_all_others_believe(store):
    found = LostRank(3, "has not answered for 60 s", "train.py:9 in main")
    with watching(store, world=8) as (watch, aborted):
        store.set("lost", json.dumps(vars(found)))
        until(lambda: watch.lost)
        assert watch.lost == found
        aborted.wait()


def test_a_save_that_makes_no_progress_is_lost_only_after_minutes(store):
    beat(store, 1, stuck=599.0)
    with watching(store, timeout=5) as (watch, _):
        watch._refresh(EVER)
        assert watch.lost is None
        beat(store, 1, count=2, stuck=601.0)
        watch._refresh(EVER)
    assert "has been in one call of a save for 601 s" in str(watch.lost)


def test_a_report_of_another_rank_is_kept_and_one_of_this_rank_is_not(store):
    with watching(store) as (watch, _):
        store.set("failure", json.dumps({"rank": 0, "where": "a run", "details": "own"}))
        watch._refresh(EVER)
        assert watch.report is None
        store.set("failure", json.dumps({"rank": 1, "where": "a run", "details": "disk"}))
        watch._refresh(EVER)
        assert watch.report["details"] == "disk"


class Late(Dataset):
    """A sample that its worker has at a signal, or never, as the worker is stopped."""

    def __init__(self, ready=None):
        self.ready = ready

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if self.ready is None:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self.ready.wait()
        return index


@pytest.mark.parametrize(
    "left", [" with ValueError: broken", " after another rank, with RuntimeError: timed out"]
)
def test_a_stopped_loader_worker_is_ended_once_another_rank_has_failed(store, capfd, left):
    beat(store, 1, left=left)
    ended = r"exited unexpectedly|killed by signal"
    with watching(store, timeout=1.0), pytest.raises(RuntimeError, match=ended):
        next(iter(DataLoader(Late(), num_workers=1)))
    told = capfd.readouterr().err
    assert f"rank 1 has ended{left}" in told
    assert "rank 0 has waited" in told
    remote_failure.forget()


def test_a_slow_loader_worker_goes_on_where_another_rank_has_left_in_order(store):
    beat(store, 1, left="")
    ready = multiprocessing.Event()

    def wait_long_enough(watch):
        until(lambda: watch._loading > 0.5 or watch._stopped.is_set())
        watch._refresh(EVER)  # and judge it
        ready.set()

    with watching(store, timeout=1.0) as (watch, _):
        threading.Thread(target=wait_long_enough, args=(watch,), daemon=True).start()
        assert next(iter(DataLoader(Late(ready), num_workers=1))).item() == 0


def test_the_error_of_a_collective_is_that_of_the_rank_which_left_first(store):
    beat(store, 1, left=" after another rank, with RemoteError", time=1.0)
    beat(store, 2, left=" with ValueError: broken", time=2.0)
    beat(store, 3, left="", time=3.0)
    with watching(store, world=4) as (watch, _):
        lost = watch.find_lost(RuntimeError("Connection closed by peer"))
    assert str(lost) == "rank 2 has ended with ValueError: broken; last seen at train.py:3 in main"


def test_the_process_of_a_peer_on_this_machine_is_watched(store):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    beat(store, 1, process=[host_id(), child.pid])
    with watching(store) as (watch, _):
        until(watch._pidfds)
        child.kill()
        until(lambda: watch.lost)
    child.wait()
    assert str(watch.lost) == "rank 1 was killed by SIGKILL; last seen at train.py:3 in main"


def test_of_many_ranks_each_reads_the_next_one_and_rank_0(store):
    watch = Heartbeat(store, 99, 100, timeout=60, abort=print)
    assert watch._peers_to_read() == [0]
    watch = Heartbeat(store, 7, 100, timeout=60, abort=print)
    assert watch._peers_to_read() == [0, 8]
    assert len(Heartbeat(store, 7, 64, timeout=60, abort=print)._peers_to_read()) == 63


# --- the store -----------------------------------------------------------------------------------


def test_a_call_of_a_host_that_does_not_answer_raises_and_so_do_all_until_it_answers(store):
    answers = threading.Event()
    with pytest.raises(dist.DistNetworkError, match="has not answered for 0 s"):
        store.call(lambda _: answers.wait(), patience=0.05)
    assert store.is_silent
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        store.set("key", "value")
    answers.set()
    until(lambda: not store.is_silent)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_after_a_closed_connection_no_call_is_tried_again(store):
    def closed(_):
        raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(dist.DistNetworkError, match="reset"):
        store.call(closed)
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        store.call(lambda _: pytest.fail("called"))


def test_keys_are_read_in_one_pass_also_if_some_do_not_exist():
    store = dist.HashStore()
    store.set("a", "1")
    store.set("b", "2")
    assert read_keys(store, ["a", "b"]) == ["1", "2"]
    assert read_keys(store, ["a", "missing", "b"]) == ["1", None, "2"]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RuntimeError("NCCL error"), True),
        (dist.DistStoreError("wait timeout"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("Broken pipe"), False),  # of the script's own sockets
    ],
)
def test_errors_of_broken_collectives_are_told_from_others(error, expected):
    assert is_disconnect(error) is expected
    outer = ValueError("outer")
    outer.__cause__ = error
    assert is_disconnect(outer) is expected


# --- threads -------------------------------------------------------------------------------------


@contextmanager
def running(function):
    """A thread within a function, that ends with the block."""
    over = threading.Event()
    thread = threading.Thread(target=function, args=(over,))
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def place(thread):
    return place_of(stacks().get(thread.ident, ()))


def saves(thread):
    return is_saving(stacks().get(thread.ident, ()))


def test_the_place_of_a_thread_is_the_line_of_the_script():
    def wait_in_the_script(over):
        over.wait()

    with running(wait_in_the_script) as thread:
        until(lambda: "wait_in_the_script" in place(thread))
        line = wait_in_the_script.__code__.co_firstlineno + 1
        assert place(thread) == f"test_heartbeat.py:{line} in wait_in_the_script"


def within_a_save(body):
    """Return the function ``work`` of a body, as if it stood in a file of the storage."""
    names = {"time": time}
    exec(compile(body, f"{stack._SAVING[1]}made_up.py", "exec"), names)
    return names["work"]


def test_a_thread_in_one_call_of_a_save_makes_no_progress():
    calls = StuckCalls(is_saving)
    assert calls.seconds(stacks()) == 0.0
    with running(within_a_save("def work(over):\n    over._cond._lock and over.wait()")) as thread:
        until(lambda: saves(thread))
        until(lambda: calls.seconds(stacks()) > 0.3)
    assert calls.seconds(stacks()) == 0.0


def test_a_thread_that_copies_in_one_line_makes_progress():
    busy = "def work(over):\n    while not over.is_set(): bytes(50_000_000)"
    calls = StuckCalls(is_saving)
    with running(within_a_save(busy)) as thread:
        until(lambda: saves(thread))
        for _ in range(5):
            calls.seconds(stacks())
            ticks, since = stack._processor_ticks(thread), calls._since[thread.ident][1]
            until(lambda ticks=ticks: stack._processor_ticks(thread) > ticks)
            calls.seconds(stacks())
            assert calls._since[thread.ident][1] > since


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_processor_time_of_a_forked_process_is_its_own():
    pid = os.fork()
    if not pid:
        os._exit(stack._processor_ticks(threading.main_thread()) is None)
    assert os.waitpid(pid, 0)[1] == 0


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfds")
@pytest.mark.parametrize(
    ("code", "fate"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
def test_how_a_process_ended_is_known_before_its_parent_waits_and_mostly_after(code, fate):
    child = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(child.pid)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert fate_of(child.pid, pidfd) == fate
        child.wait()
        assert fate_of(child.pid, pidfd).startswith((fate, "ended without a word"))
    finally:
        os.close(pidfd)


def test_a_thread_that_renews_a_lease_is_in_no_save(tmp_path):
    """It waits most of the time, and would pass for a call that makes no progress."""
    with Lease(str(tmp_path)):
        (thread,) = (thread for thread in threading.enumerate() if "lease of" in thread.name)
        while not stacks().get(thread.ident, ()):
            time.sleep(0.01)
        assert not is_saving(stacks()[thread.ident])


def test_a_watch_that_is_stopped_is_woken_when_it_can_see_that(store):
    watch = Heartbeat(store, 0, 1, timeout=60, abort=print)
    woken: list[bool] = []

    class Stopped(threading.Event):
        def set(self) -> None:
            woken.append(bool(select.select([watch._wake_read], [], [], 0)[0]))
            super().set()

    watch._stopped = Stopped()
    watch.start()
    watch.stop()
    assert woken == [False]


def test_a_process_that_has_joined_another_group_is_not_ended(store, monkeypatch):
    watch, later = (Heartbeat(store, 0, 1, timeout=0.1, abort=print) for _ in range(2))
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(heartbeat, "stacks", dict)
    monkeypatch.setattr(heartbeat, "call_of_torch", lambda calls: True)
    monkeypatch.setattr(heartbeat.os, "_exit", end)
    monkeypatch.setattr(heartbeat, "_current", (later, None))
    watch._end_process()
    monkeypatch.setattr(heartbeat, "_current", (watch, None))
    with pytest.raises(SystemExit):
        watch._end_process()
    assert ended == [1]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_device_does_not_notice_by_itself_that_a_peer_has_ended(store, monkeypatch, on_device):
    monkeypatch.setattr(heartbeat.collectives, "default_group", lambda: "stands for a group")
    monkeypatch.setattr(heartbeat.collectives, "has_device_backend", lambda group: on_device)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    beat(store, 1, process=[host_id(), child.pid])
    with watching(store) as (watch, aborted):
        until(watch._pidfds)
        child.kill()
        until(lambda: watch.lost)
    child.wait()
    assert aborted.is_set() == on_device
