"""A metadata address on loopback that answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AWS = "/latest/meta-data/spot/instance-action"
GCE = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Metadata:
    """Answers by path: a status and a body, or a function of the handler; else 404."""

    def __init__(self) -> None:
        self.answers: dict = {}
        self.requests: list[str] = []
        self.address = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        headers = handler.headers
        if handler.path == "/latest/api/token":
            asked = "X-aws-ec2-metadata-token-ttl-seconds" in headers and handler.command == "PUT"
            return reply(handler, *((200, b"token") if asked else (400, b"")))
        if handler.path == AWS and headers.get("X-aws-ec2-metadata-token") != "token":
            return reply(handler, 401, b"")
        if handler.path == GCE and headers.get("Metadata-Flavor") != "Google":
            return reply(handler, 403, b"")
        if handler.path.startswith("/metadata/") and headers.get("Metadata") != "true":
            return reply(handler, 400, b"")
        answer = self.answers.get(handler.path, (404, b""))
        return answer(handler) if callable(answer) else reply(handler, *answer)

    def announce(self, seconds: float = 118.0) -> None:
        """Answer with the notice of each cloud."""
        at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        action = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        event = {"EventType": "Preempt", "Resources": ["mine"]}
        event["NotBefore"] = at.strftime("%a, %d %b %Y %H:%M:%S GMT")
        self.answers |= {
            AWS: (200, json.dumps(action).encode()),
            GCE: (200, b"TRUE"),
            AZURE: (200, json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()),
            AZURE_NAME: (200, b"mine"),
        }


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def slow(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte now and then."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


@contextmanager
def metadata_server() -> Iterator[Metadata]:
    """Serve the metadata on loopback."""
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metadata.handle(self)

        do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    metadata.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield metadata
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
