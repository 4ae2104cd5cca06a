"""Frames of other threads are looked at while garbage is collected."""

from __future__ import annotations

import subprocess
import sys

from tests.support import warm

PROGRAM = """
import gc, threading, time
from accel_callbacks.distributed.stack import place_of

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0001)  # another thread goes on

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
gc.set_threshold(1)
for _ in range(1500):
    Garbage()
    place_of(threading.main_thread())
ended.set()
starter.join()
assert gc.isenabled()
gc.disable()
place_of(threading.main_thread())
assert not gc.isenabled()
"""


def test_a_collection_of_garbage_meanwhile_does_not_block_the_process():
    done = warm.run([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
