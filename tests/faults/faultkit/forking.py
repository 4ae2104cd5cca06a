"""Processes to be killed, forked from one that has torch in memory: milliseconds, not seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.support import warm

KEY = b"faults"
_HERE = str(Path(__file__).resolve().parent.parent)


class VictimError(AssertionError):
    """A victim raised or died where it should not have."""


class Victim:
    """One forked process: it sends messages, and dies when told to."""

    def __init__(self, pid: int, link: Connection, server: ForkServer) -> None:
        self.pid = pid
        self._link = link
        self._server = server
        self.messages: list[Any] = []
        self.status: int | None = None

    def receive(self) -> Any:
        """Return the next message; EOFError when the victim is gone."""
        try:
            message = self._link.recv()
        except OSError as error:  # a reset is an end as well
            raise EOFError from error
        self.messages.append(message)
        return message

    def wait_for(self, kind: str) -> Any:
        """Return the next message of a kind; its first element names it."""
        while True:
            try:
                message = self.receive()
            except EOFError:
                raise VictimError(f"victim ended before {kind!r}: {self.messages}") from None
            if message[0] == kind:
                return message
            if message[0] == "raised":
                raise VictimError(f"victim raised instead of {kind!r}: {message[2]}\n{message[3]}")

    def send(self, message: Any) -> None:
        """Say something to a victim that listens."""
        self._link.send(message)

    def ask(self, *question: Any) -> Any:
        """Send a question and return its answer."""
        self.send(question)
        return self.wait_for("answer")[1]

    def works(self) -> bool:
        """Say whether the victim is still at work; what it says meanwhile is kept."""
        while self._link.poll():
            try:
                self.receive()
            except EOFError:
                return False
        return not (self.messages and self.messages[-1][0] in ("returned", "raised"))

    def kill(self) -> None:
        """Kill it as the out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)

    def drain(self) -> list[Any]:
        """Take what is left to receive, until the victim is gone; reap it; return all messages."""
        with suppress(EOFError):
            while True:
                self.receive()
        self._link.close()
        self.status = self._server.reap(self.pid)
        return self.messages

    def result(self) -> tuple[str, Any]:
        """Wait for the end: ("returned", value) or (name of the exception, its text)."""
        for message in reversed(self.drain()):
            if message[0] == "returned":
                return "returned", message[1]
            if message[0] == "raised":
                return message[1], message[2]
        return "killed", self.status


class ForkServer:
    """A warm process that forks victims; a victim runs `function(link, *args)` of this kit."""

    def __init__(self, folder: Path) -> None:
        self._listener = Listener(str(folder / "victims.sock"), authkey=KEY, backlog=16)
        control = str(folder / "control.sock")
        with Listener(control, authkey=KEY) as listener:
            self._process = warm.Popen(
                [sys.executable, "-c", _START, str(self._listener.address), control],
                cwd=folder,  # "-c" puts it on the path, where it must not hide a package
                env={
                    **os.environ,
                    # A test may have put back a path from before the kit was on it.
                    "PYTHONPATH": os.pathsep.join([_HERE, *(path for path in sys.path if path)]),
                    "OMP_NUM_THREADS": "1",
                },
            )
            while not wait([listener._listener._socket], 1.0):  # type: ignore[attr-defined]
                assert self._process.poll() is None, "the fork server ended at its start"
            self._control = listener.accept()
        self._alive: set[int] = set()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in list(self._alive):
            os.kill(pid, signal.SIGKILL)
        self._control.close()
        self._process.wait()
        self._listener.close()

    def spawn(self, function: Callable[..., Any], *args: Any) -> Victim:
        """Fork one victim."""
        self._control.send(("spawn", function, args))
        pid = self._control.recv()
        self._alive.add(pid)
        link = self._listener.accept()
        while link.recv() != pid:  # a victim of an earlier server at the same path
            link.close()
            link = self._listener.accept()
        return Victim(pid, link, self)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a victim to its end and return what it returns."""
        kind, value = self.spawn(function, *args).result()
        if kind != "returned":
            raise VictimError(f"{function.__name__} ended with {kind}: {value}")
        return value

    def ranks(self, size: int, function: Callable[..., Any], *args: Any) -> list[Victim]:
        """Fork a group: each runs `function(link, rank, *args)` of its own."""
        return [self.spawn(function, rank, *args) for rank in range(size)]

    def reap(self, pid: int) -> int:
        """Return the exit status of a victim that has ended or is about to."""
        while True:
            self._control.send(("reap", pid))
            status = self._control.recv()
            if status is not None:
                self._alive.discard(pid)
                return int(status)
            time.sleep(0.005)


_START = "import sys; from faultkit.forking import serve; serve(sys.argv[1], sys.argv[2])"


def serve(address: str, control_address: str) -> None:
    """Run the fork server: everything dear is imported once, no thread is started before a fork."""
    control = Client(control_address, authkey=KEY)
    import faultkit.warm  # noqa: F401

    children: set[int] = set()
    while True:
        try:
            kind, *request = control.recv()
        except EOFError:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return
        if kind == "reap":
            pid, status = os.waitpid(request[0], os.WNOHANG)
            children.discard(pid)
            control.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_victim(address, *request)
        children.add(pid)
        control.send(pid)


def _be_victim(address: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run in the child: report what happens and leave without the parent's exit handlers."""
    import traceback

    code = 1
    try:
        link = Client(address, authkey=KEY)
        link.send(os.getpid())
        try:
            link.send(("returned", function(link, *args)))
            code = 0
        except BaseException as error:
            link.send(("raised", type(error).__name__, str(error), traceback.format_exc()))
    finally:
        os._exit(code)
