"""Pauses of the garbage collector, which the whole process has only one of."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Iterator

import pytest

from checkpoint_io.threads import collector_paused


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_collector_comes_back_after_an_error() -> None:
    def fail() -> None:
        with collector_paused():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_pauses_nest() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_the_pause_lasts_until_the_last_thread_has_ended_its_own() -> None:
    paused, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            paused.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert paused.wait()
    assert not gc.isenabled()  # the other thread is still in its block
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")
def test_a_process_that_is_forked_meanwhile_collects() -> None:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    with collector_paused():
        child = context.Process(target=lambda: answer.put(gc.isenabled()))
        child.start()
        child.join()
    assert answer.get() is True
