"""Start Python in milliseconds: like `subprocess`, but forked from a process that has torch.

`Popen` and `run` take what those of `subprocess` take. The process is real, and a child of the
caller: its id, its exit code, signals, streams, environment and session are its own. Not fresh is
what it has imported, and it has one thread. A test of imports, of the memory of a process, of the
number of threads or of what ``/proc`` shows starts a fresh Python, with `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Popen", "run"]

HEADER = 8  # bytes that hold the length of a request, or a process id
_SERVER = Path(__file__).with_name("warm_server.py")
_SET_CHILD_SUBREAPER = 36
# The memory pool of pyarrow, which pandas and so scikit-learn import, would start one at import.
_NO_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclass
class Request:
    """A command line of Python's and where to run it."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    new_session: bool
    unbuffered: bool
    warm_children: bool
    destructors: bool
    streams: list[int] = field(default_factory=list)


def listen() -> socket.socket:
    """Return a socket for requests, at an address that no file names."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0warm-python-{os.urandom(8).hex()}")
    listener.listen(64)
    return listener


def receive(connection: socket.socket) -> Request:
    """Return the request that a client has sent, with the streams that came along."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while len(data) < HEADER + int.from_bytes(data[:HEADER], "little"):
        data += connection.recv(1 << 16)
    request = Request(*pickle.loads(data[HEADER:]))
    request.streams = streams
    return request


class _Server:
    """The warm process from which this one starts others. It ends when this one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._address = b""
        self._alive = -1

    def use(self, address: bytes, alive: int) -> None:
        """Use a server that is there; it ends when the pipe ``alive`` is closed."""
        self._owner, self._address, self._alive = os.getpid(), address, alive

    def fork(self, request: Request, streams: list[int]) -> int | None:
        """Return the id of a new child that runs the request, None if the server could not start.

        What is imported may start a thread, on a machine unlike those that this was tried on.
        """
        words = (request.argv, request.cwd, request.env)
        how = (request.new_session, request.unbuffered, request.warm_children, request.destructors)
        body = pickle.dumps((*words, *how))
        with self._lock:
            if self._owner != os.getpid():
                self._start()
            if self._process is not None and self._process.poll() is not None:
                return None
            with socket.socket(socket.AF_UNIX) as connection:
                libc = ctypes.CDLL(None)
                libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                try:
                    connection.connect(self._address)
                    return self._ask(connection, body, streams)
                except ConnectionError:
                    return None
                finally:
                    libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    @staticmethod
    def _ask(connection: socket.socket, body: bytes, streams: list[int]) -> int:
        data = len(body).to_bytes(HEADER, "little") + body
        sent = socket.send_fds(connection, [data], streams)
        connection.sendall(data[sent:])
        answer = b""
        while len(answer) < HEADER + 1:
            part = connection.recv(HEADER + 1 - len(answer))
            if not part:
                raise ConnectionError
            answer += part
        return int.from_bytes(answer[:HEADER], "little")

    def _start(self) -> None:
        with listen() as listener:
            read_end, alive = os.pipe()
            numbers = [listener.fileno(), read_end]
            process = subprocess.Popen(
                [sys.executable, str(_SERVER), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
                env={**os.environ, **_NO_THREADS},
            )
            os.close(read_end)
            self.use(listener.getsockname(), alive)
            self._process = process
            atexit.register(self._end, os.getpid(), process, alive)

    @staticmethod
    def _end(owner: int, process: subprocess.Popen[bytes], alive: int) -> None:
        if os.getpid() == owner:
            os.close(alive)
            process.wait()


_server = _Server()
_start_fresh: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _same_python(environment: dict[str, str]) -> bool:
    """Return whether a fork behaves as a fresh Python would with these variables."""

    def steering(variables: Any) -> dict[str, str]:
        free = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONUNBUFFERED")  # a fork obeys them
        return {k: v for k, v in variables.items() if k.startswith("PYTHON") and k not in free}

    threads = environment.get("OMP_NUM_THREADS", "1")  # which a fork obeys, too
    return threads.isdecimal() and steering(environment) == steering(os.environ)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks the warm Python where that can stand for the command.

    With ``warm_children``, the process starts Python in the same way: a launcher its ranks. The
    static destructors of torch, which take longer than all the rest, run with ``destructors`` only.
    """

    def __init__(
        self,
        *args: Any,
        warm_children: bool = False,
        destructors: bool = False,
        **options: Any,
    ) -> None:
        self.warm_children, self.destructors = warm_children, destructors
        super().__init__(*args, **options)

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, *process_group,
    ):  # fmt: skip
        words = list(map(os.fsdecode, args)) if isinstance(args, (list, tuple)) else []
        environment = dict(os.environ if env is None else env)
        unbuffered = words[1:2] == ["-u"]
        argv = words[2:] if unbuffered else words[1:]
        can_be_forked = (
            sys.platform == "linux"
            and words[:1] == [sys.executable]
            and (argv[:1] in (["-c"], ["-m"]) or not "".join(argv[:1] or "-").startswith("-"))
            and not (executable or preexec_fn or pass_fds or shell or creationflags)
            and (gid, gids, uid, umask, *process_group) in _NO_OTHER_USER
            and _same_python(environment)
        )
        pid = None
        if can_be_forked:
            request = Request(
                argv,
                os.path.abspath(os.fsdecode(cwd or ".")),
                environment,
                bool(start_new_session),
                unbuffered,
                getattr(self, "warm_children", False),  # not of a plain Popen in a launcher
                getattr(self, "destructors", False),
            )
            given = enumerate((p2cread, c2pwrite, errwrite))
            streams = [number if stream == -1 else stream for number, stream in given]
            pid = _server.fork(request, streams)
        if pid is None:
            _start_fresh(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, *process_group,
            )  # fmt: skip
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


_NO_OTHER_USER = ((None, None, None, -1), (None, None, None, -1, -1))


def use_for_all(address: bytes, alive: int) -> None:
    """Start each Python of this process from the server at an address."""
    _server.use(address, alive)
    subprocess.Popen._execute_child = Popen._execute_child  # type: ignore[attr-defined]


def run(
    words: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, with the `Popen` of this module."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(words, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
