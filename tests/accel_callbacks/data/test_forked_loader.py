"""A fork that collects its copy of a loader leaves the workers alone, and prints nothing."""

from __future__ import annotations

import sys

import pytest

from tests.support import warm

FORKED = """
import gc, os, sys
from torch.utils.data import DataLoader
from accel_callbacks import Accelerator

accel = Accelerator(cpu=True)
loader = accel.prepare(DataLoader(range(4), num_workers=1, persistent_workers=True))
list(loader)
if (pid := os.fork()) == 0:
    if sys.argv[1] == "freed":
        accel.free_memory()
    else:
        accel.loaders.clear()
        accel.loop.position.used_loaders.clear()
    del loader, accel
    gc.collect()
    os._exit(0)
os.waitpid(pid, 0)
print([batch.item() for batch in loader])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
@pytest.mark.parametrize("how", ["freed", "collected"])
def test_a_fork_that_collects_a_loader_is_silent_and_ends_no_worker(how):
    command = [sys.executable, "-c", FORKED, how]
    run = warm.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, ["[0,", "1,", "2,", "3]"], "")
