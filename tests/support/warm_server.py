"""A Python that has imported torch and forks on request: run and asked by `tests.support.warm`.

A request is a command line of Python's (``-c CODE``, ``-m MODULE`` or a script) with its folder,
environment and standard streams. The fork runs it as a fresh interpreter would: as ``__main__``,
with its own ``sys.argv`` and ``sys.path``, to the interpreter's own end with its exit handlers.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import io
import os
import runpy
import select
import socket
import sys
import time
import types
from typing import Any, NoReturn

import warm  # beside this file

LIBRARIES = (
    "fsspec",
    "lightning.pytorch",
    "multiprocessing.connection",
    "numpy",
    "s3fs",
    "safetensors.torch",
    "pytest",
    "sklearn.datasets",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.nn.parallel.distributed",
    "transformers.modeling_utils",
    "tqdm",
    "xxhash",
    "yaml",
)
PROJECT = ("accel_callbacks", "checkpoint_io", "loggers")


def warm_up() -> None:
    """Import what scripts need. No import may start a thread: a fork would not have it."""
    import gc
    import pkgutil

    gc.disable()
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    for name in PROJECT:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue  # of an optional package that is not installed
    gc.enable()
    gc.freeze()  # a collection in a fork would copy the pages of all these objects
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the imports started {threads - 1} threads"


def next_request(listener: socket.socket, owner: int) -> warm.Request:
    """Fork for each request, until the owner's end of the pipe closes; return in forks only."""
    while True:
        ready, _, _ = select.select([listener, owner], [], [])
        if owner in ready:
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            request = warm.receive(connection)
            if _fork_for_the_caller(connection):
                listener.close()
                os.close(owner)
                return request
            for stream in request.streams:
                os.close(stream)
            connection.sendall(b".")


def _fork_for_the_caller(connection: socket.socket) -> bool:
    """Fork, and return True in the fork. Its parent is the caller, which can wait for it.

    The process between the two ends at once. The kernel gives its child to the nearest subreaper
    above it, and that is the caller for as long as it waits for the answer.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    pid = os.fork()
    if pid:
        connection.sendall(pid.to_bytes(warm.HEADER, "little"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    return True


def become(request: warm.Request) -> NoReturn:
    """Run a request in this fork, as a fresh interpreter would."""
    if request.new_session:
        os.setsid()
    if request.warm_children:
        serve_below(request)
    take_over(request)
    sys.exit(0 if run(request.argv) else 1)


def serve_below(request: warm.Request) -> None:
    """Start the children of this fork from a server of their own."""
    listener = warm.listen()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(write_end)
        for stream in request.streams:
            os.close(stream)
        become(next_request(listener, read_end))
    os.close(read_end)
    warm.use_for_all(listener.getsockname(), write_end)
    listener.close()


def take_over(request: warm.Request) -> None:
    """Set what the request describes: streams, folder, environment, paths."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.cwd)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.env)
    installed = [place for place in sys.path[1:] if place not in before]
    after = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = ["", *after, *installed]
    importlib.invalidate_caches()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _open_streams(unbuffered=request.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.orig_argv[:] = [sys.executable, *request.argv]
    import numpy as np
    import torch

    threads = int(request.env.get("OMP_NUM_THREADS", "1"))
    if threads != torch.get_num_threads():  # a launcher of one rank gives it all cores
        torch.set_num_threads(threads)
    np.random.seed()  # torch begins with the same seed in all processes; a fork seeds random
    if not request.destructors:
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # runs after Python's own end


def _open_streams(unbuffered: bool) -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw: Any = open(number, f"{mode}b", buffering=0, closefd=False)  # noqa: SIM115
        raw.name = f"<{name}>"
        binary = raw
        if mode == "r":
            binary = io.BufferedReader(raw)
        elif not unbuffered:
            binary = io.BufferedWriter(raw)
        stream: Any = io.TextIOWrapper(
            binary,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=mode == "w" and unbuffered,
        )
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(words: list[str]) -> bool:
    """Run Python's command line; return whether it ended without an error."""
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    kind, rest = words[0], words[1:]
    try:
        if kind == "-c":
            sys.argv[:] = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        elif kind == "-m":
            sys.argv[:] = ["-m", *rest[1:]]
            sys.path[0] = os.getcwd()
            start: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
            start(rest[0])
        else:
            sys.argv[:] = words
            sys.path[0] = os.path.dirname(os.path.realpath(kind))
            main.__file__ = os.path.abspath(kind)
            with io.open_code(main.__file__) as file:
                source = file.read()
            exec(compile(source, main.__file__, "exec"), vars(main))
    except Exception as error:
        _show(error)
        return False
    return True


def _show(error: Exception) -> None:
    """Print the traceback without the frames of this file, as the interpreter does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)


def main() -> NoReturn:
    """Serve at the socket whose number is given, until a pipe closes."""
    listener, owner = sys.argv[1:]
    warm_up()
    become(next_request(socket.socket(fileno=int(listener)), int(owner)))


if __name__ == "__main__":
    main()
