"""The window: units come in time, memory is not written to while somebody looks, errors arrive."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from accel_callbacks.models.offload import window as window_module
from accel_callbacks.models.offload.source import WeightReadError
from accel_callbacks.models.offload.window import Window

SIZE = 64


class Filler:
    """Fills units with their numbers, and keeps a record."""

    def __init__(self):
        self.filled = []
        self.fails = {}  # unit: error, once
        self.gate = None  # unit: an event that is waited for

    def __call__(self, unit, memory, after):
        self.filled.append(unit)
        if unit in self.fails:
            raise self.fails.pop(unit)
        if self.gate is not None and unit == self.gate[0]:
            self.gate[1].wait()
        memory.fill_(unit)


def window(filler, units=6, kept=2, **options):
    def allocate(nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    return Window([SIZE] * units, filler, allocate, limit=kept * SIZE, **options)


def use(opened, unit):
    memory = opened.acquire(unit)
    try:
        assert memory.tolist() == [unit] * SIZE
    finally:
        opened.release(unit)


def settle(opened):
    """Wait until nothing is on its way."""
    for unit in list(opened._entries):
        with opened._changed:
            if unit in opened._entries and not opened._entries[unit].ready:
                opened._wait(unit, opened._entries[unit])


def test_a_pass_in_order_is_read_ahead_and_stays_within_its_limit():
    opened = window(Filler())
    for _ in range(3):
        for unit in range(6):
            use(opened, unit)
    traffic = opened.traffic
    assert (traffic.misses, traffic.hits, traffic.escapes) == (1, 17, 0)
    assert traffic.peak <= 2 * SIZE
    assert opened.nbytes <= 2 * SIZE
    opened.close()
    assert opened.nbytes == 0


def test_any_order_is_learnt_in_one_pass():
    opened = window(Filler())
    order = [0, 3, 1, 5, 4, 2, 4, 5, 3, 0, 2]  # forward and backward
    for unit in order * 2:
        use(opened, unit)
    learnt = opened.traffic.misses
    for unit in order * 3:
        use(opened, unit)
    assert opened.traffic.misses == learnt
    opened.close()


def test_memory_that_somebody_looks_at_is_his():
    opened = window(Filler())
    views = [opened.view(unit, lambda memory: memory[:3]) for unit in range(6)]
    assert [view.tolist() for view in views] == [[unit] * 3 for unit in range(6)]
    settle(opened)
    assert opened.traffic.escapes >= 3
    assert opened.escaped_nbytes >= 3 * SIZE
    del views
    assert opened.escaped_nbytes == 0
    opened.close()


def test_an_error_while_reading_ahead_is_not_taken_for_weights():
    filler = Filler()
    opened = window(filler)
    filler.fails[1] = OSError("bad sector")
    use(opened, 0)
    settle_error(opened, 1)
    use(opened, 1)  # once more, and it is there
    assert filler.filled[:3] == [0, 1, 1]
    opened.close()


def settle_error(opened, unit):
    while not opened._entries[unit].ready:
        time.sleep(0.001)


@pytest.mark.parametrize("error", [OSError("bad sector"), WeightReadError("x: gone")])
def test_an_error_is_raised_where_the_unit_is_needed_and_the_next_use_tries_again(error):
    filler = Filler()
    opened = window(filler, describe="weight {}".format)
    filler.fails[2] = error
    with pytest.raises(WeightReadError, match=str(error)) as caught:
        opened.acquire(2)
    assert caught.value.__cause__ is error
    use(opened, 2)
    opened.close()


class Clock:
    """The clock of waits, which goes on by ``step`` seconds with each look."""

    def __init__(self):
        self.now = self.step = 0.0

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(window_module, "_TICK", 0.02)
    monkeypatch.setattr(window_module, "time", clock := Clock())
    return clock


def test_a_hung_read_is_an_error_that_names_it_and_the_window_goes_on(clock):
    filler = Filler()
    gate = threading.Event()
    filler.gate = (3, gate)
    opened = window(filler, patience=50, describe="weight {}".format, reading=lambda: "shard 7")
    use(opened, 2)  # reads 3 ahead
    clock.step = 60
    with pytest.raises(WeightReadError, match=r"weight 3: no byte has come from shard 7 for 50 s"):
        opened.acquire(3)
    clock.step = 0
    filler.gate = None
    use(opened, 4)
    use(opened, 3)
    gate.set()  # the old thread writes to memory that nobody uses
    use(opened, 3)
    use(opened, 5)
    opened.close()


def test_a_slow_read_is_no_hang(clock):
    opened = window(None, patience=50)

    def slow(unit, memory, after):
        for _ in range(6):
            clock.now += 40
            time.sleep(0.05)  # while it is looked at
            opened.progress(1)
        memory.fill_(unit)

    opened._fill = slow
    use(opened, 0)
    assert opened.traffic.bytes_read >= 6
    opened.close()


def test_a_thread_that_ends_is_an_error_and_another_one_begins(monkeypatch):
    monkeypatch.setattr(window_module, "_TICK", 0.02)
    opened = window(Filler())
    real = opened._fill
    opened._work = lambda: None
    with pytest.raises(WeightReadError, match="has ended; the next use begins another one"):
        opened.acquire(0)
    del opened._work
    opened._fill = real
    use(opened, 0)
    opened.close()


def test_after_close_the_next_use_begins_anew():
    opened = window(Filler())
    for _ in range(3):
        use(opened, 0)
        thread = opened._thread
        opened.close()
        thread.join()
        assert opened.nbytes == 0


def test_threads_share_units():
    opened = window(Filler())
    failures = []

    def run(seed):
        try:
            for k in range(200):
                use(opened, (seed + k) % 6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(not entry.pins for entry in opened._entries.values())
    opened.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_reads_has_its_own():
    filler = Filler()
    gate = threading.Event()
    filler.gate = (1, gate)
    opened = window(filler)
    use(opened, 0)  # 1 is on its way now
    held, forked = threading.Event(), threading.Event()

    def hold():
        with opened._changed:  # the child has a lock of its own
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        filler.gate = None
        signal.alarm(1000)
        try:
            use(opened, 1)
            use(opened, 2)
            os._exit(0)
        except BaseException:
            os._exit(1)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    use(opened, 1)
    opened.close()


def test_memory_made_in_inference_mode_serves_outside_of_it():
    opened = window(Filler())
    with torch.inference_mode():
        use(opened, 0)
    memory = opened.acquire(0)
    assert not memory.is_inference()
    opened.release(0)
    opened.close()


def test_an_interrupt_in_a_wait_leaves_the_window_in_order(monkeypatch):
    filler = Filler()
    gate = threading.Event()
    filler.gate = (0, gate)
    opened = window(filler)
    wait = opened._changed.wait

    def interrupted(timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(timeout)

    monkeypatch.setattr(opened._changed, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened.acquire(0)
    monkeypatch.undo()
    gate.set()
    use(opened, 0)
    assert all(not entry.pins for entry in opened._entries.values())
    opened.close()
