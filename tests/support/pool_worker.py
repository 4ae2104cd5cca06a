"""One process of a pool: takes functions over a local connection, runs them, sends the result."""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import os
import sys
import threading
import traceback
from multiprocessing.connection import Client

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[0] = ROOT  # for the test modules, which import what tests share


def load(path: str, name: str):
    """A function by file and name: test modules are not importable by name in a new process."""
    module_name = "pool_" + os.path.relpath(path, ROOT)[:-3].replace(os.sep, "_").replace(".", "_")
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(module, name)


def main() -> None:
    faulthandler.enable()
    connection = Client(sys.argv[1], authkey=b"pool")
    connection.send(int(os.environ["RANK"]))
    import torch

    torch.set_num_threads(int(os.environ.get("POOL_THREADS", "1")))
    while (task := connection.recv()) is not None:
        path, name, args = task
        try:
            connection.send(("ok", load(path, name)(*args)))
        except Exception as error:
            connection.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main()
    from accel_callbacks.distributed.topology import destroy_topology

    destroy_topology()
    # What an interpreter does at its end, but for freeing the modules that the fork shares with its
    # server, which copies all their pages. Programs that end as such are those of test_exits.py.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
