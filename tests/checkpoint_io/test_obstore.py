"""Bytes moved by obstore: the same store, and the same promises, behind the same URL."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from checkpoint_io import load, save, verify
from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.parts import process_budget
from tests.checkpoint_io.scripted_s3 import (
    Answer,
    Request,
    ScriptedS3,
    failure,
    piece,
    usual,
)
from tests.servers import S3Server, s3_server

pytestmark = pytest.mark.s3
pytest.importorskip("s3fs")
pytest.importorskip("obstore")

MIB = 1 << 20
PART = 16 * MIB
QUICK = RetryPolicy(
    attempts=4, base_delay=0.01, max_delay=0.02, deadline=5, connect_timeout=2, read_timeout=0.5
)


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with s3_server(request.param) as running:
        yield running


@pytest.fixture
def script(scripts: ScriptedS3) -> ScriptedS3:
    scripts.reset()
    return scripts


def options(server: S3Server | ScriptedS3) -> dict[str, Any]:
    return {**server.options, "transfer": "obstore"}


def place(server: S3Server) -> Store:
    return open_store(server.url(f"b/{uuid.uuid4().hex}"), options(server))


def put(store: Store, name: str, data: bytes, size: int | None = None) -> None:
    with store.create(name, size) as write:
        for at in range(0, len(data), 7 * MIB):
            write(memoryview(data)[at : at + 7 * MIB])


def get(store: Store, name: str, size: int, step: int = 5 * MIB) -> bytes:
    spans = [Span(name, at, min(size, at + step)) for at in range(0, size, step)]
    result = bytearray(size)

    def deliver(index: int, data: memoryview[int]) -> None:
        result[spans[index].begin : spans[index].end] = data

    store.fetch(spans, deliver)
    return bytes(result)


@pytest.mark.parametrize(
    ("announced", "size"),
    [
        *((announced, size) for announced in (True, False) for size in (0, 1)),
        *((True, PART), (False, PART + 1), (True, 2 * PART + 12345)),
        *(
            pytest.param(announced, size, marks=pytest.mark.slow)
            for announced, size in [(False, PART), (True, PART + 1), (False, 2 * PART + 12345)]
        ),
    ],
)
def test_round_trip(server: S3Server, size: int, announced: bool) -> None:
    store, plain = place(server), server.client()
    data = os.urandom(size)
    put(store, "x", data, size if announced else None)
    key = f"{store.url.removeprefix(f's3://{server.bucket}/')}/x"
    assert plain.get_object(Bucket=server.bucket, Key=key)["Body"].read() == data
    assert get(store, "x", size) == data


def test_checkpoint(server: S3Server) -> None:
    url = server.url(f"b/{uuid.uuid4().hex}")
    state = {"w": torch.randn(5_000_000), "b": torch.arange(7)}
    save(url, state, storage_options=options(server))
    verify(url, storage_options=options(server))
    for how in (options(server), server.options):
        loaded = load(url, storage_options=how).state
        assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_block_that_raises_leaves_nothing(server: S3Server) -> None:
    store = place(server)

    def fail(error: BaseException) -> None:
        with store.create("x") as write:
            write(memoryview(bytes(3 * PART)))
            raise error

    for error in (RuntimeError("stop"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
    with pytest.raises(CheckpointError, match="instead of"):
        put(store, "x", bytes(2 * PART), 3 * PART)
    assert store.sizes() == {}
    assert not server.client().list_multipart_uploads(Bucket=server.bucket).get("Uploads")


def test_file_that_is_short_or_missing(server: S3Server) -> None:
    store = place(server)
    put(store, "x", b"0123456789")
    for span in (Span("x", 0, 11), Span("x", 30, 40), Span("x", 11, 11)):
        with pytest.raises(CorruptCheckpointError, match="x: truncated"):
            store.fetch([span], lambda index, data: None)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        store.fetch([Span("x", 0, 1), Span("y", 0, 5)], lambda index, data: None)


def test_error_of_the_receiver_ends_the_fetch(server: S3Server) -> None:
    store = place(server)
    put(store, "x", bytes(MIB))

    def deliver(index: int, data: memoryview[int]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.fetch([Span("x", n, n + 1) for n in range(100)], deliver)


def test_uploads_give_their_memory_back(server: S3Server) -> None:
    store = place(server)

    def fail() -> None:
        with store.create("gone", 3 * PART) as write:
            write(memoryview(bytes(2 * PART)))
            raise RuntimeError("stop")

    threads = [
        threading.Thread(target=put, args=(store, f"f{n}", bytes(2 * PART + n))) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    with pytest.raises(RuntimeError) as kept:  # it refers to what was being written
        fail()
    for thread in threads:
        thread.join()
    budget = process_budget()
    assert (budget._used, budget._uploads, budget._spare) == (0, 0, [])
    assert str(kept.value) == "stop"
    assert store.sizes() == {f"f{n}": 2 * PART + n for n in range(3)}


DATA = os.urandom(300_000)
DATED = {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}


def test_object_that_is_replaced_during_a_fetch(script: ScriptedS3) -> None:
    def respond(request: Request) -> Answer:
        answer = piece(request, DATA, '"new"' if script.count("GET") > 3 else '"old"')
        answer.headers.update(DATED)
        return answer

    script.respond = respond
    with pytest.raises(CorruptCheckpointError, match="replaced while it was being read"):
        get(open_store("s3://bucket/o", options(script), retry=QUICK), "x", len(DATA), 20_000)


def test_transient_errors_are_waited_out(script: ScriptedS3) -> None:
    left = {"part": 2, "GET": 2, "begin": 1}

    def respond(request: Request) -> Answer:
        if left.get(request.what, 0):
            left[request.what] -= 1
            return failure(503, "SlowDown")
        answer = piece(request, DATA) if request.method == "GET" else usual(request)
        answer.headers.update(DATED)
        return answer

    script.respond = respond
    store = open_store("s3://bucket/o", options(script), retry=QUICK)
    put(store, "x", bytes(PART + 1))
    assert get(store, "x", len(DATA)) == DATA


@pytest.mark.parametrize("answer", [failure(503, "SlowDown"), failure(403, "AccessDenied")])
def test_upload_is_given_up_and_taken_back(script: ScriptedS3, answer: Answer) -> None:
    script.respond = lambda request: answer if request.what == "part" else usual(request)
    store = open_store("s3://bucket/o", options(script), retry=QUICK)
    with pytest.raises(CheckpointError, match=r"uploading s3://bucket/o/x .* failed"):
        put(store, "x", bytes(4 * PART))
    assert script.count("complete") == 0
    assert script.count("abort") >= 1


def test_options_that_would_be_lost_are_refused() -> None:
    known = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    for extra, name in (
        ({"fancy": 1}, "fancy"),
        ({"client_kwargs": {"aws_account_id": "1"}}, "client_kwargs.aws_account_id"),
        ({"config_kwargs": {"proxies": {}}}, "config_kwargs.proxies"),
        ({"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}}, "config_kwargs.s3.use_dual"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
    ):
        with pytest.raises(ValueError, match=rf'transfer="obstore" does not know {name}'):
            open_store("s3://bucket/o", {**known, "transfer": "obstore", **extra})
    with pytest.raises(ValueError, match="transfer is one of"):
        open_store("s3://bucket/o", {**known, "transfer": "rsync"})
    with pytest.raises(ValueError, match="for s3:// only"):
        open_store("memory://o", {"transfer": "obstore"})


def test_options_are_translated() -> None:
    from checkpoint_io.storage.s3.obstore import make_store
    from checkpoint_io.storage.s3.store import open_s3

    given = {
        "key": "k",
        "secret": "s",
        "token": "t",
        "client_kwargs": {"region_name": "eu-west-1", "verify": False},
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
        "requester_pays": True,
    }
    opened = open_s3("s3://bucket/o", given, QUICK, "obstore")
    assert opened is not None
    made = make_store(opened._client, given, QUICK)
    assert made.config["region"] == "eu-west-1"
    assert "endpoint" not in made.config  # AWS itself: obstore knows where that is
    assert made.config["server_side_encryption"] == "AES256"
    assert made.client_options["allow_invalid_certificates"] in (True, "true")
    credentials = made.credential_provider()
    assert (credentials["access_key_id"], credentials["token"]) == ("k", "t")
    nobody = make_store(
        open_s3("s3://bucket/o", {"anon": True}, QUICK, "fsspec")._client,  # type: ignore[union-attr]
        {"anon": True},
        QUICK,
    )
    assert nobody.config["skip_signature"] in (True, "true")
