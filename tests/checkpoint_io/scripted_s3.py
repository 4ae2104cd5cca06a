"""A server that answers as a test says: for what no well-behaved S3 server does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BEGUN = b"<R><UploadId>u1</UploadId></R>"
COMPLETED = b'<R><ETag>"whole"</ETag></R>'


@dataclass
class Request:
    """What came; `query` has a key for each parameter, also for those without a value."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def what(self) -> str:
        """The name of the operation, as far as the tests tell them apart."""
        if "uploads" in self.query:
            return "list uploads" if self.method == "GET" else "begin"
        if "uploadId" in self.query:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[self.method]
        return self.method


@dataclass
class Answer:
    """What goes back; `cut` sends less than announced, `hang` nothing, or no more, for a while."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    hang: bool = False
    drop: bool = False


Respond = Callable[[Request], Answer]


def failure(status: int, code: str, message: str = "") -> Answer:
    """An error as S3 sends it."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, text.encode())


def usual(request: Request) -> Answer:
    """What a store says when all is well; it keeps nothing."""
    checksums = {k: v for k, v in request.headers.items() if k.startswith("x-amz-checksum-")}
    if request.what in ("begin", "complete"):
        return Answer(body=BEGUN if request.what == "begin" else COMPLETED)
    if request.what == "list uploads":
        return Answer(body=b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
    if request.method == "DELETE":
        return Answer(204)
    return Answer(headers={"ETag": '"tag"', **checksums})


def piece(request: Request, data: bytes, tag: str = '"tag"') -> Answer:
    """The range of an object that a request asks for."""
    begin, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
    span = data[int(begin) : int(last) + 1]
    where = f"bytes {begin}-{int(begin) + len(span) - 1}/{len(data)}"
    return Answer(206, span, {"ETag": tag, "Content-Range": where})


class ScriptedS3:
    """Answers with `respond`, and keeps what was asked."""

    def __init__(self) -> None:
        self.respond: Respond = usual
        self.asked: list[str] = []
        self.most_at_once = 0
        self.over = threading.Event()
        self._now = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                owner.handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            # A connection beyond the backlog is accepted seconds later, with the request of a
            # client that has given up since, and so is counted in another test.
            request_queue_size = 256

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def reset(self) -> None:
        """Begin anew; one server for many tests, because a client for each takes its time."""
        self.over.set()
        self.over = threading.Event()
        self.respond = usual
        self.asked.clear()
        self.most_at_once = 0

    @property
    def options(self) -> dict[str, Any]:
        """Storage options, with timeouts and pauses that suit a test."""
        return {
            "key": "k",
            "secret": "s",
            "endpoint_url": f"http://127.0.0.1:{self.server.server_address[1]}",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
        }

    def count(self, what: str) -> int:
        """How often something was asked."""
        return self.asked.count(what)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        headers = {k.lower(): v for k, v in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        key = parts.path.removeprefix("/bucket").lstrip("/")
        request = Request(handler.command, key, query, headers, body)
        with self._lock:
            self.asked.append(request.what)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.respond(request)
            with suppress(OSError):
                self._send(handler, answer)
        finally:
            with self._lock:
                self._now -= 1

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.close_connection = answer.drop or answer.hang or answer.cut is not None
        if answer.hang and answer.cut is None:
            self.over.wait()
        if handler.close_connection and answer.cut is None:
            return
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if "Content-Length" not in answer.headers:
            handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer.body[: answer.cut])
        if answer.hang:
            handler.wfile.flush()
            self.over.wait()


@contextmanager
def scripted_s3() -> Iterator[ScriptedS3]:
    """Run a scripted server."""
    server = ScriptedS3()
    try:
        yield server
    finally:
        server.over.set()
        server.server.shutdown()
        server.server.server_close()
