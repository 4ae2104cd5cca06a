"""MB/s to and from S3 servers on loopback: checkpoint_io against s3fs and boto3.

    pip install "accel-callbacks[test]"
    python benchmarks/checkpoint_s3.py [--mib 512] [--rounds 5] [--servers sink,moto,seaweedfs]

The sink is a server of this script that takes what it is sent and returns zeros: it shows what the
client costs. moto and SeaweedFS are real servers, usually the limit themselves; they share the
cores with the clients. Methods run in rounds in a shuffled order; the ratio is to the median of
the best s3fs method, and the one to boto3's transfer manager stands beside it. What checkpoint_io
sends carries a checksum that the server verifies, and so does what the others send.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 1 << 20
BUCKET = "bucket"
Method = Callable[[], None]


# --- the sink ------------------------------------------------------------------------------


def serve_sink(port: int) -> None:
    """Accept every upload, answer every download with zeros, until killed."""
    with socket.create_server(("127.0.0.1", port), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve_one, args=(connection,), daemon=True).start()


def serve_one(connection: socket.socket) -> None:
    """Answer the requests of one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    scratch = memoryview(bytearray(4 * MIB))
    pending = b""
    with connection, contextlib.suppress(OSError):
        while True:
            while b"\r\n\r\n" not in pending:
                if not (more := connection.recv(65536)):
                    return
                pending += more
            head, _, pending = pending.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {
                k.strip().lower(): v.strip() for k, _, v in (x.partition(":") for x in lines[1:])
            }
            if headers.get("expect"):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = int(headers.get("content-length", 0)) - len(pending)
            pending = pending[len(pending) + left :] if left < 0 else b""
            while left > 0:
                if not (count := connection.recv_into(scratch, min(left, len(scratch)))):
                    return
                left -= count
            answer(connection, lines[0].split(" ")[:2], headers)


def answer(connection: socket.socket, line: list[str], headers: dict[str, str]) -> None:
    """Send what a client needs to go on."""
    method, path = line
    if method in ("GET", "HEAD"):
        return send_zeros(connection, method, path, headers)
    body = b""
    if method == "POST" and "uploadId=" not in path:
        body = (
            b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
        )
    elif method == "POST":
        body = b'<CompleteMultipartUploadResult><ETag>"e-1"</ETag></CompleteMultipartUploadResult>'
    echo = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if k.startswith("x-amz-checksum-"))
    text = f'HTTP/1.1 200 OK\r\nETag: "etag"\r\n{echo}Content-Length: {len(body)}\r\n\r\n'
    connection.sendall(text.encode("latin-1") + body)


def send_zeros(connection: socket.socket, method: str, path: str, headers: dict[str, str]) -> None:
    """Send a range of an object whose name ends with its size."""
    size = int(match[1]) if (match := re.search(r"-(\d+)$", path.partition("?")[0])) else 0
    begin, end = 0, size
    if wanted := re.match(r"bytes=(\d+)-(\d*)", headers.get("range", "")):
        begin, end = int(wanted[1]), min(size, int(wanted[2] or size - 1) + 1)
    status = "206 Partial Content" if wanted else "200 OK"
    span = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n" if wanted else ""
    text = (
        f'HTTP/1.1 {status}\r\nETag: "etag"\r\nContent-Length: {end - begin}\r\n{span}'
        "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n\r\n"
    )
    connection.sendall(text.encode("latin-1"))
    zeros = memoryview(bytes(4 * MIB))
    while method == "GET" and begin < end:
        count = min(len(zeros), end - begin)
        connection.sendall(zeros[:count])
        begin += count


@dataclass
class Server:
    """Where the methods connect to."""

    kind: str
    options: dict[str, Any]

    def boto3(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.options["endpoint_url"],
            region_name=self.options["client_kwargs"]["region_name"],
            aws_access_key_id=self.options["key"],
            aws_secret_access_key=self.options["secret"],
        )


@contextlib.contextmanager
def server(kind: str) -> Iterator[Server]:
    """Start a server in a process of its own."""
    from tests.servers import free_port, s3_server

    if kind != "sink":
        with s3_server(kind, BUCKET) as real:
            yield Server(kind, real.options)
        return
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, "--sink", str(port)])
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        options = {
            "key": "k",
            "secret": "s",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "eu-west-1"},
        }
        yield Server(kind, options)
    finally:
        process.kill()
        process.wait()


# --- the methods ---------------------------------------------------------------------------


def uploads(place: Server, data: np.ndarray) -> dict[str, Method]:
    """Ways to send the data, a name for each; those that are not installed are left out."""
    import fsspec

    from checkpoint_io.storage import open_store

    size, key = len(data), f"up-{len(data)}"
    view = memoryview(data)
    s3fs = fsspec.filesystem("s3", **place.options, skip_instance_cache=True)
    store = open_store(f"s3://{BUCKET}/ours", place.options)

    def ours() -> None:
        with store.create(f"ours-{key}", size) as write:
            for at in range(0, size, 8 * MIB):
                write(view[at : at + 8 * MIB])

    def s3fs_open() -> None:
        with s3fs.open(f"{BUCKET}/open-{key}", "wb") as file:
            for at in range(0, size, 8 * MIB):
                file.write(view[at : at + 8 * MIB])

    def s3fs_pipe() -> None:
        s3fs.pipe_file(f"{BUCKET}/pipe-{key}", data.tobytes())

    methods = {"ours": ours, "s3fs open": s3fs_open, "s3fs pipe_file": s3fs_pipe}
    with contextlib.suppress(ImportError):
        client = place.boto3()
        raw = data.tobytes()
        methods["boto3 upload_fileobj"] = lambda: client.upload_fileobj(
            io.BytesIO(raw), BUCKET, f"boto3-{key}"
        )
    return methods


def downloads(place: Server, data: np.ndarray) -> dict[str, Method]:
    """Ways to read the data back into memory."""
    import fsspec

    from checkpoint_io.storage import open_store
    from checkpoint_io.storage.base import Span

    size, name = len(data), f"down-{len(data)}"
    target = np.empty(size, dtype=np.uint8)
    target[:] = 1
    s3fs = fsspec.filesystem("s3", **place.options, skip_instance_cache=True)
    spans = [Span(name, at, min(size, at + 16 * MIB)) for at in range(0, size, 16 * MIB)]
    begins, ends = [s.begin for s in spans], [s.end for s in spans]
    path = f"{BUCKET}/ours/{name}"
    store = open_store(f"s3://{BUCKET}/ours", place.options)

    def deliver(index: int, part: memoryview) -> None:
        target[spans[index].begin : spans[index].end] = np.frombuffer(part, dtype=np.uint8)

    def s3fs_open() -> None:
        with s3fs.open(path, "rb") as file:
            at = 0
            while piece := file.read(16 * MIB):
                target[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                at += len(piece)

    methods = {
        "ours": lambda: store.fetch(spans, deliver),
        "s3fs open": s3fs_open,
        "s3fs cat_file": lambda: s3fs.cat_file(path),
        "s3fs cat_ranges": lambda: s3fs.cat_ranges([path] * len(begins), begins, ends),
    }
    with store.create(name, size) as write:
        write(memoryview(data))
    with contextlib.suppress(ImportError):
        client = place.boto3()
        methods["boto3 download_fileobj"] = lambda: client.download_fileobj(
            BUCKET, f"ours/{name}", io.BytesIO()
        )
    return methods


# --- the table -----------------------------------------------------------------------------


def measure(methods: dict[str, Method], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of each method in each round, after one that does not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name in random.sample(list(methods), len(methods)):
            begin = time.perf_counter(), time.process_time()
            methods[name]()
            if number:
                times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return times


def report(title: str, times: dict[str, list[tuple[float, float]]], mib: int) -> None:
    """Print MB/s, the client's CPU seconds for a GB, and the ratios of speed within the rounds."""
    size = mib * MIB / 1e6
    speed = {name: [size / t for t, _ in found] for name, found in times.items()}
    middle = {name: statistics.median(found) for name, found in speed.items()}
    best = max((name for name in speed if name.startswith("s3fs")), key=middle.__getitem__)
    boto3 = next((name for name in speed if name.startswith("boto3")), best)
    print(f"\n{title}, {mib} MiB")
    print(f"  {'':24} MB/s (worst, best)   CPU s/GB   speed / {best}   / {boto3}")
    for name, found in sorted(speed.items()):
        cpu = statistics.median(t for _, t in times[name]) / size * 1e3
        ratios = [
            statistics.median(a / b for a, b in zip(found, speed[other], strict=True))
            for other in (best, boto3)
        ]
        print(
            f"  {name:24} {middle[name]:5.0f} ({min(found):4.0f},{max(found):5.0f}) {cpu:12.2f}"
            f"{ratios[0]:15.2f} {ratios[1]:15.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", default="sink,moto,seaweedfs")
    parser.add_argument("--sink", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sink:
        serve_sink(arguments.sink)
    for kind in arguments.servers.split(","):
        # a real server is slow, so it gets less
        mib = arguments.mib if kind == "sink" else max(32, arguments.mib // 4)
        data = np.random.default_rng(0).integers(0, 256, mib * MIB, dtype=np.uint8)
        with server(kind) as place:
            for way, methods in (("up to", uploads), ("down from", downloads)):
                report(f"{way} {kind}", measure(methods(place, data), arguments.rounds), mib)


if __name__ == "__main__":
    main()
