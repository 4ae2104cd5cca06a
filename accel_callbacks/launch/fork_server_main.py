"""The fork server itself: a worker that has imported what workers need, and forks them on request.

It runs as `worker.py` with the command line of a worker, and returns from `serve` in its forks
only, which then run the script as a worker that was started anew. A module whose import would not
be the same in a fork is left out: one that starts a thread or a process, opens a file, sets up
logging, or reads the rank. A scout finds it, a fork that imports ahead of the server.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import random
import site
import socket
import sys
import sysconfig
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from accel_callbacks.launch_notes import IMPORTS, WARM, leave_note, read_note

assert sys.platform == "linux"

__all__ = ["fork_for_asker", "serve"]

_OURS = ("accel_callbacks", "checkpoint_io", "loggers")
_LARGEST = "torch"
# A process that has not resumed yet has the first, and not what reads a checkpoint for it.
_OF_SHARDS, _OF_RESUMES = "torch.distributed.tensor", "torch.distributed.checkpoint"
_CLEAN, _END = b".", b"!"  # what a scout says
_HARMLESS_FILES = ("/dev/null", "/dev/random", "/dev/urandom")
# Draws where the ids of a terminal's links begin, which forks may share. Scikit-learn imports it.
_HARMLESS_DRAW = "rich.style"
# Of variables that libraries read without Python, when they are loaded.
_READ_BY_LIBRARIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_", "LD_"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "ARROW_", "JE_"),
)
_SEED_OF_OLDER_TORCH = 67280421310721  # of each process; from 2.13 on, it is another for each
_known_states: dict[str, Any] = {}  # of global generators, as their own imports leave them


class _Refused(Exception):
    """A fork would not be what a process that is started anew is."""


class _WatchedEnvironment(os._Environ):  # type: ignore[type-arg]
    """The environment, which notes the names of the variables that are read."""

    read: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        value: str = super().__getitem__(name)
        return value


def serve(variable: str) -> None:
    """Import what the launcher asks for, and fork a worker for each request; return in the forks.

    Args:
        variable: of the environment, with the descriptor of a socket to the launcher.
    """
    descriptor = int(os.environ.pop(variable))
    connection = socket.socket(fileno=descriptor)
    try:
        task, _ = _receive(connection)
        try:
            note = read_note(Path(task["notes"]), IMPORTS)
            _import_all(note["modules"], task["rank_variables"], descriptor)
            _check_variables(note["changed"])
            for name in task["own_variables"]:  # workers that are started anew have none
                os.environ.pop(name, None)
        except _Refused as refusal:
            _send(connection, {"refused": str(refusal)})
            os._exit(1)
        gc.collect()
        gc.freeze()  # forks share the pages of what a collection does not look at
        _send(connection, {"refused": None})
        leave_note(WARM, len(sys.modules))
        while True:
            request, streams = _receive(connection)
            if _fork(connection):
                break
            for stream in streams:
                os.close(stream)
    except (OSError, ValueError, TypeError, EOFError):
        os._exit(0)  # the launcher has ended
    connection.close()
    _become_worker(request["variables"], streams)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message, and the descriptors that came with it."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16) if data else b""
        if not part:
            raise EOFError
        data += part
    message: dict[str, Any] = json.loads(data)
    return message, streams


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


# --- the imports ------------------------------------------------------------------------------


def _import_all(
    modules: Mapping[str, str], rank_variables: Collection[str], descriptor: int
) -> None:
    """Import modules in order, without those that leave what a fork would not share.

    Raises:
        _Refused: a module is another one than for the script, or only here has an effect.
    """
    _known_states["random"] = random.getstate()
    environment: Any = os.environ
    environment.__class__ = _WatchedEnvironment
    roots = _installed_roots()
    noted = [name for name in modules if _is_installed(name, modules, roots)]
    noted.sort(key=lambda name: name != _HARMLESS_DRAW)  # before another one imports it
    try:
        if _LARGEST in noted:  # without a scout, as it takes as long as the others together
            _import_clean(_LARGEST, rank_variables, {descriptor})
        _import_in_order(noted, rank_variables, descriptor)
        if _OF_SHARDS in sys.modules:
            _import_in_order([_OF_RESUMES], rank_variables, descriptor)
    finally:
        environment.__class__ = os._Environ
    for name, path in modules.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin != path:
            raise _Refused(f"{name} is another file ({spec.origin}) than for the script ({path})")


def _import_in_order(
    modules: Iterable[str], rank_variables: Collection[str], descriptor: int
) -> None:
    """Import modules, but for those that a scout cannot."""
    names = deque(modules)
    while names:
        for _ in range(_count_clean(names, rank_variables, descriptor)):
            _import_clean(names.popleft(), rank_variables, {descriptor})
        if names:
            names.popleft()


def _import_clean(name: str, rank_variables: Collection[str], own: Collection[int]) -> None:
    """Import a module, unless it is imported.

    Args:
        name: of the module.
        rank_variables: that are different in each worker.
        own: descriptors that are open.

    Raises:
        _Refused: the import fails, or has an effect that no fork may share.
    """
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except BaseException as error:
        raise _Refused(f"{name} fails: {type(error).__name__}: {error}") from None
    if name == _HARMLESS_DRAW:
        random.setstate(_known_states["random"])
    if effect := _side_effect(own, rank_variables):
        raise _Refused(f"the import of {name} {effect}")


def _count_clean(names: Iterable[str], rank_variables: Collection[str], descriptor: int) -> int:
    """Return how many of the next modules can be imported here, as a fork finds out."""
    reading, writing = os.pipe()
    server, scout = os.getpid(), os.fork()
    if scout == 0:
        try:
            with open(os.devnull, "wb") as null:
                for stream in (1, 2):
                    os.dup2(null.fileno(), stream)  # the server imports the same
            random.setstate(_known_states["random"])  # Python has seeded it in the fork
            for name in names:
                if os.getppid() != server:
                    break  # the launch has ended
                _import_clean(name, rank_variables, {descriptor, reading, writing})
                os.write(writing, _CLEAN)
        finally:
            os.write(writing, _END)  # a process that an import starts may keep the pipe open
            os._exit(0)
    os.close(writing)
    answer = b""
    while not answer.endswith(_END) and (part := os.read(reading, 1 << 12)):
        answer += part
    os.close(reading)
    os.waitpid(scout, 0)
    return answer.count(_CLEAN)


def _installed_roots() -> tuple[str, ...]:
    """Return the folders of Python's library and of installed packages."""
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({f"{folder}{os.sep}" for folder in folders if folder})


def _is_installed(name: str, modules: Mapping[str, str], roots: tuple[str, ...]) -> bool:
    """Return whether a module is no file of the user, which may change before a restart."""
    top = name.partition(".")[0]
    paths = (modules[name], modules.get(top, modules[name]))
    return top in _OURS or all(path.startswith(roots) for path in paths)


def _side_effect(own: Collection[int], rank_variables: Collection[str]) -> str:
    """Return what the last import has done that no fork may share; empty for nothing."""
    if _threads() > 1:
        # OpenBLAS ends its threads before a fork, and starts them again when it computes.
        _fork_and_exit()
        if _threads() > 1:
            return "starts a thread"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "starts a process"
    except ChildProcessError:
        pass
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the one that lists the folder
        if int(number) not in (0, 1, 2, *own) and path not in _HARMLESS_FILES:
            return f"opens {path}"
    if logging.root.handlers:
        return "sets up logging"
    for name, state in _generator_states():
        if _known_states.setdefault(name, state) != state:
            return f"draws from the generator of {name}, or seeds it"
    reads = sorted(_WatchedEnvironment.read.intersection(rank_variables))
    return f"reads {reads[0]}" if reads else ""


def _generator_states() -> Iterator[tuple[str, object]]:
    """Yield the names and states of the global generators that are imported."""
    yield "random", random.getstate()
    if "numpy.random" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy.random"].get_state()
        yield "numpy", (keys.tobytes(), position)
    if "torch" in sys.modules:
        yield "torch", sys.modules["torch"].default_generator.get_state().numpy().tobytes()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_and_exit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, about its threads
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _check_variables(changed: Mapping[str, str | None]) -> None:
    """Raise _Refused for a variable that the script has set, and an import here has missed."""
    for name, value in changed.items():
        if os.environ.get(name) == value:
            continue  # a package has set it, here as well
        if name in _WatchedEnvironment.read or name.startswith(_READ_BY_LIBRARIES):
            raise _Refused(f"the script sets {name}, which packages read when they are imported")


# --- the forks --------------------------------------------------------------------------------


def fork_for_asker(answer: Callable[[int], None]) -> bool:
    """Fork, and return True in the fork. Its parent is who has asked, and can wait for it.

    The process between the two ends at once. The kernel gives its child to the nearest subreaper
    above it, and that is the asker for as long as it waits for the answer.

    Args:
        answer: sends the process id of the fork to the asker.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    pid = os.fork()
    if pid:
        answer(pid)
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    return True


def _fork(connection: socket.socket) -> bool:
    """Fork a worker of the launcher, and return True in it."""
    if not fork_for_asker(lambda pid: _send(connection, {"pid": pid})):
        return False
    os.setsid()  # as torch's launcher starts workers
    _send(connection, {"parent": os.getppid()})
    return True


def _become_worker(variables: Mapping[str, str], streams: Sequence[int]) -> None:
    """Take what is different in each worker."""
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.update(variables)
    importlib.invalidate_caches()
    # Python seeds its own generator in a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules and sys.modules["torch"].initial_seed() != _SEED_OF_OLDER_TORCH:
        sys.modules["torch"].default_generator.seed()
