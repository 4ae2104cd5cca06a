"""Start the workers of a restart in milliseconds: as forks of a process that has the imports.

The fork server is started once the script has trained some steps, and has noted its imports. It
forks before anything is computed: it has one thread, no open files and no device. Where that cannot
be had, workers are started anew, and `ForkServer.reason` says why.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from accel_callbacks.launch.report import describe_ending
from accel_callbacks.launch.worker import FORK_SERVER
from accel_callbacks.launch_notes import IMPORTS

assert sys.platform == "linux"

__all__ = ["ForkServer", "ForkedProcess", "start_worker"]

_SET_CHILD_SUBREAPER = 36  # an option of prctl
_PATIENCE = 30.0  # seconds for one fork, on a machine that swaps
_MOST_LOSSES = 3  # of the server itself, such as for want of memory
# The memory pools of pyarrow, which datasets, pandas and so scikit-learn import, start a thread at
# their import. It only returns memory sooner, which allocations do as well.
_WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class ForkedProcess:
    """A forked worker: a child of this process, used like a ``subprocess.Popen``.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 1  # something else in this process has waited for it
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The fork server of a launch, from which the workers of each restart are forked.

    Args:
        notes: the folder in which processes leave notes for the launcher.

    Attributes:
        ready: it has the imports, and forks.
        reason: why it is not.
        forks: number of workers that it has forked.
    """

    def __init__(self, notes: Path) -> None:
        self.reason = "the script has not yet trained some steps of a prepared optimizer"
        self.forks = 0
        self._notes = notes
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._answers: BinaryIO | None = None
        self.ready = self._gave_up = False
        self._losses = 0
        self._command: Sequence[str] = ()
        self._variables: dict[str, str] = {}  # of the server
        self._rank_variables: set[str] = set()  # those that are different in each worker

    def worker_started(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Note how a worker was started: the server is started likewise."""
        if self._process is None:
            self._command, self._variables = tuple(command), dict(os.environ)
            self._rank_variables |= {
                name for name, value in environment.items() if self._variables.get(name) != value
            }

    def look(self) -> None:
        """Start the server once the imports are noted, or it has been lost; read if it is ready."""
        if self.ready and self._process is not None and self._process.poll() is not None:
            self._lose()
        if self._gave_up or self.ready or not self._command:
            return
        if self._process is None:
            if (self._notes / IMPORTS).exists():
                self._start()
        elif self._connection is not None and select.select([self._connection], [], [], 0)[0]:
            self._read_answer()

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], streams: tuple[int, int]
    ) -> ForkedProcess | None:
        """Fork a worker, None if it has to be started anew.

        Args:
            command: that starts it.
            environment: of the worker.
            streams: descriptors of its standard output and error.
        """
        self.look()
        if not self.ready or self._connection is None:
            return None
        variables = {name: environment.get(name, "") for name in self._rank_variables}
        if tuple(command) != self._command or {**self._variables, **variables} != environment:
            self.reason = "the workers of this attempt are started in another way"
            return None
        try:
            with _subreaper():
                self._send({"variables": variables}, streams)
                pid: int = self._receive()["pid"]
                parent = self._receive()["parent"]
        except (OSError, ValueError, KeyError) as error:
            self._lose(error)
            return None
        if parent != os.getpid():
            # The kernel, or a sandbox, knows no subreapers: nothing would tell how it ends.
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
            self._give_up("this system does not let a launcher adopt processes")
            return None
        self.forks += 1
        return ForkedProcess(pid)

    def close(self) -> None:
        """End the server; the workers stay."""
        if self._connection is not None and self._answers is not None:
            self._answers.close()
            self._connection.close()
            self._connection = self._answers = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        connection, its_end = socket.socketpair()
        number = its_end.fileno()
        # What a package prints at its import, each worker has printed.
        streams = [None if os.isatty(stream) else subprocess.DEVNULL for stream in (1, 2)]
        try:
            self._process = subprocess.Popen(
                self._command,
                stdout=streams[0],
                stderr=streams[1],
                env={**_WITHOUT_THREADS, **self._variables, FORK_SERVER: str(number)},
                pass_fds=(number,),
                start_new_session=True,
            )
        except OSError as error:
            connection.close()
            self._give_up(f"the fork server cannot be started: {error}")
            return
        finally:
            its_end.close()
        connection.settimeout(_PATIENCE)
        self._connection, self._answers = connection, connection.makefile("rb")
        if not self._losses:
            self.reason = "the fork server was not ready yet"
        task = {
            "notes": str(self._notes),
            "rank_variables": sorted(self._rank_variables),
            "own_variables": sorted(_WITHOUT_THREADS.keys() - self._variables.keys()),
        }
        try:
            self._send(task)
        except OSError as error:
            self._lose(error)

    def _read_answer(self) -> None:
        try:
            answer = self._receive()
        except (OSError, ValueError) as error:
            self._lose(error)
            return
        if answer["refused"] is None:
            self.ready = True
            return
        self._give_up(f"{answer['refused']}, so a fork would not be what a new process is")

    def _lose(self, error: object = None) -> None:
        """Let another server be started if this one has ended; give up if that comes again."""
        assert self._process is not None
        try:
            ending = f"the fork server {describe_ending(self._process.wait(1))}"
        except subprocess.TimeoutExpired:
            self._give_up(f"the fork server does not answer: {error}")
            return
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            self._give_up(ending)
            return
        self.close()
        self._process, self.ready = None, False
        self.reason = f"{ending}, and another one was not ready yet"

    def _give_up(self, reason: str) -> None:
        self.close()
        self.reason, self.ready, self._gave_up = reason, False, True

    def _send(self, message: Mapping[str, Any], streams: Sequence[int] = ()) -> None:
        assert self._connection is not None
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._connection, [data], streams) if streams else 0
        self._connection.sendall(data[sent:])

    def _receive(self) -> Any:
        """Return the next message of the server."""
        assert self._answers is not None
        line = self._answers.readline()
        if not line:
            raise OSError("it has ended")
        return json.loads(line)


def start_worker(server: ForkServer, *args: Any, **options: Any) -> SubprocessHandler:
    """Start a worker as torch's launcher does, or fork it if the server can.

    Args:
        server: the fork server.
        args: of torch's ``SubprocessHandler``.
        options: of the same.
    """
    return _Handler(server, *args, **options)


class _Handler(SubprocessHandler):
    """A worker of torch's launcher, forked where that can be."""

    def __init__(self, server: ForkServer, *args: Any, **options: Any) -> None:
        self._server = server
        super().__init__(*args, **options)

    def _popen(self, args: Any, env: dict[str, str]) -> Any:
        files = (self._stdout, self._stderr)
        stdout, stderr = (
            number if file is None else file.fileno()
            for number, file in zip((1, 2), files, strict=True)
        )
        process = self._server.fork(args, env, (stdout, stderr))
        if process is not None:
            return process
        self._server.worker_started(args, env)
        return super()._popen(args, env)


@contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process get the children of its descendants that end during the block."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
