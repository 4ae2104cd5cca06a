"""A proxy on loopback that breaks chosen requests between an S3 client and its server."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PIECE = 64 * 1024


@dataclass
class Message:
    """A request or an answer: its first line, its headers as they came, its body."""

    first: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def header(self, name: str) -> str:
        """Return a header's value, "" without it."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def head(self) -> bytes:
        """Return the bytes before the body."""
        lines = [self.first, *(f"{key}: {value}" for key, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Exchange:
    """One request on its way: what an action may look at and do."""

    def __init__(self, proxy: Proxy, client: socket.socket, request: Message) -> None:
        self.proxy = proxy
        self.client = client
        self.request = request

    def ask(self, request: Message | None = None) -> Message:
        """Pass the request on and return the whole answer."""
        request = request or self.request
        with socket.create_connection(self.proxy.target) as server:
            server.sendall(request.head() + request.body)
            stream = server.makefile("rb")
            answer = read_head(stream)
            empty = request.first.startswith("HEAD") or answer.first.split()[1] in ("204", "304")
            if not empty:
                answer.body = read_body(stream, answer, until_close=True)
        return answer

    def answer(self, message: Message) -> None:
        """Send an answer to the client."""
        self.client.sendall(message.head() + message.body)

    def reset(self) -> None:
        """End the connection as a crashed peer does, with RST."""
        with suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.client.shutdown(socket.SHUT_RDWR)
        self.client.close()
        raise EndOfConnectionError


class EndOfConnectionError(Exception):
    """Nothing more is to be read from this client."""


Action = Callable[[Exchange], None]


def forward(exchange: Exchange) -> None:
    """Do no harm."""
    exchange.answer(exchange.ask())


@dataclass
class Rule:
    """Which requests an action is for: by first line (method and path), some of the matching ones.

    Attributes:
        pattern: regular expression searched in "PUT /bucket/key?query".
        action: what to do with such a request.
        skip: how many matching requests go unharmed first.
        times: how many are harmed after that; None: all.
        early: act when the head is read, before the body is.
    """

    pattern: str
    action: Action
    skip: int = 0
    times: int | None = 1
    early: bool = False
    seen: int = field(default=0, init=False)
    done: int = field(default=0, init=False)

    def takes(self, first: str) -> bool:
        """Count a request and say whether it is to be harmed."""
        if not re.search(self.pattern, first):
            return False
        self.seen += 1
        due = self.seen > self.skip and (self.times is None or self.done < self.times)
        self.done += due
        return due


class Proxy:
    """Listens on loopback; `rules` may be changed at any time, the first that takes it wins."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        self.target = (parts.hostname, parts.port)
        self.rules: list[Rule] = []
        self.log: list[str] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def harmed(self) -> int:
        """Return how many requests were harmed."""
        return sum(rule.done for rule in self.rules)

    def clients(self) -> list[socket.socket]:
        """Return the connections that are open."""
        with self._lock:
            return list(self._clients)

    def close(self) -> None:
        """Stop, stalled requests included."""
        self.closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serve the requests of one connection."""
        stream = client.makefile("rb")
        try:
            while not self.closing.is_set():
                self._one(client, stream)
        except (EndOfConnectionError, OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._clients.discard(client)
            stream.close()
            with suppress(OSError):
                client.close()

    def _one(self, client: socket.socket, stream: Any) -> None:
        request = read_head(stream)
        with self._lock:
            self.log.append(request.first)
            rule = next((rule for rule in self.rules if rule.takes(request.first)), None)
        exchange = Exchange(self, client, request)
        if rule is not None and rule.early:
            rule.action(exchange)
            return
        if request.header("expect").lower() == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.headers = [(k, v) for k, v in request.headers if k.lower() != "expect"]
        request.body = read_body(stream, request, until_close=False)
        (forward if rule is None else rule.action)(exchange)


def read_head(stream: Any) -> Message:
    """Read a first line and headers."""
    first = stream.readline().decode("latin-1").rstrip("\r\n")
    if not first:
        raise EndOfConnectionError
    headers = []
    while line := stream.readline().decode("latin-1").rstrip("\r\n"):
        key, _, value = line.partition(":")
        headers.append((key, value.strip()))
    return Message(first, headers)


def read_body(stream: Any, message: Message, until_close: bool) -> bytes:
    """Read the body that the headers announce; a chunked one is kept as it comes."""
    if length := message.header("content-length"):
        body: bytes = stream.read(int(length))
        return body
    if message.header("transfer-encoding").lower() != "chunked":
        return bytes(stream.read()) if until_close else b""
    raw = bytearray()
    while True:
        line = stream.readline()
        raw += line
        size = int(line.split(b";")[0], 16)
        raw += stream.read(size + 2) if size else b""
        if not size:
            while (line := stream.readline()) not in (b"\r\n", b""):
                raw += line
            return bytes(raw + b"\r\n")


@contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    proxy = Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
