"""Frames of other threads are looked at while these threads go on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from accel_callbacks.distributed.stack import place_of, stacks
from tests.support import warm

GARBAGE = """
import gc, threading, time
from accel_callbacks.distributed.stack import stacks

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0001)  # another thread goes on

gc.set_threshold(1)
"""

LOCK = """
def start_threads():
    while not ended.is_set():
        threads = [threading.Thread(target=int) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

ended = threading.Event()
starter = threading.Thread(target=start_threads, daemon=True)
starter.start()
for _ in range(1500):
    Garbage()
    stacks()
ended.set()
starter.join()
assert gc.isenabled()
gc.disable()
stacks()
assert not gc.isenabled()
"""

# Functions with frames of many sizes, so that what is left of a frame is soon something else.
FRAMES = """
source = "functions = []"
for size in range(1, 12):
    names = " = ".join(f"x{number}" for number in range(size))
    source += f'''
def leave(depth):
    {names} = 3
    if depth:
        return functions[{size - 1}](depth - 1)
    time.sleep(0)
functions.append(leave)
'''
space = {"time": time}
exec(compile(source, "<a library>", "exec"), space)

def train():
    while not ended.is_set():
        for function in space["functions"]:
            function(3)

ended = threading.Event()
thread = threading.Thread(target=train, daemon=True)
thread.start()
for _ in range(3000):
    Garbage()
    calls = stacks()[thread.ident]
    names = [call.name for call in calls]
    assert names[-3:] == ["run", "_bootstrap_inner", "_bootstrap"], names
    assert set(names[:-3]) <= {"train", "leave", "is_set"}, names
ended.set()
thread.join()
"""


@pytest.mark.parametrize("scene", [LOCK, FRAMES], ids=["lock", "frames"])
def test_a_collection_of_garbage_meanwhile_does_no_harm(scene):
    command = [sys.executable, "-c", GARBAGE + scene]
    done = warm.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


THREADS = """
import ctypes, threading, time
from accel_callbacks.distributed import stack

# Threads of C that enter Python, as those of gloo and autograd do: each is new to it.
libc = ctypes.CDLL(None)
enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

def begin_threads():
    number = ctypes.c_ulong()
    while not over.is_set():
        libc.pthread_create(ctypes.byref(number), None, enter, None)
        libc.pthread_join(number, None)

over = threading.Event()
threads = [threading.Thread(target=begin_threads) for _ in range(3)]
for thread in threads:
    thread.start()
end = time.monotonic() + 4
while time.monotonic() < end:
    stack.stacks()
over.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="starts threads by the C library of Linux")
def test_threads_that_enter_python_meanwhile_do_no_harm():
    command = [sys.executable, "-c", THREADS]
    done = warm.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_frames_have_paths_with_any_letters(tmp_path):
    path = tmp_path / "é 世\U0001f600"
    path.mkdir()
    file = path / "my train.py"
    entered, over = threading.Event(), threading.Event()
    source = "def train():\n    entered.set()\n    over.wait()\n"
    space = {"entered": entered, "over": over}
    exec(compile(source, str(file), "exec"), space)
    thread = threading.Thread(target=space["train"])
    thread.start()
    try:
        assert entered.wait()
        calls = stacks()[thread.ident]
    finally:
        over.set()
        thread.join()
    own = next(call for call in calls if call.name == "train")
    assert own == (str(file), own.line, "train")
    assert own.line in (2, 3)
    assert place_of(calls).startswith("my train.py:")
