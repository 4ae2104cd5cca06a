"""What answers in place of a store: a redirect, a web page, an old token; told as what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkpoint_io import CheckpointError, load, save
from checkpoint_io.storage.open import open_store
from tests.checkpoint_io.scripted_s3 import (
    Answer,
    Request,
    ScriptedS3,
    failure,
    scripted_s3,
    usual,
)

pytestmark = pytest.mark.s3
pytest.importorskip("s3fs")

URL = "s3://bucket/run"
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Welcome</body></html>"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ScriptedS3]:
    """Another server, which nobody has named."""
    with scripted_s3() as running:
        yield running


@pytest.fixture
def script(scripts: ScriptedS3, elsewhere: ScriptedS3) -> ScriptedS3:
    scripts.reset()
    elsewhere.reset()
    return scripts


def page(request: Request) -> Answer:
    return Answer(200, PAGE, {"Content-Type": "text/html; charset=utf-8"})


def texts(script: ScriptedS3) -> list[str]:
    """Return the errors of a small save, a large one and a load, by one cause each."""
    calls: list[Callable[[], Any]] = [
        lambda: save(URL, {"w": torch.zeros(3)}, storage_options=script.options),
        lambda: save(URL, {"w": torch.zeros(3_000_000)}, storage_options=script.options),
        lambda: load(URL, storage_options=script.options),
    ]
    found = []
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            call()
        found.append(str(caught.value))
        assert caught.value.__cause__ is None or str(caught.value.__cause__) not in found[-1]
    return found


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(script: ScriptedS3, elsewhere: ScriptedS3, status: int) -> None:
    port = elsewhere.server.server_address[1]
    target = f"http://me:password@127.0.0.1:{port}/login?token=secret"
    script.respond = lambda request: Answer(status, b"", {"Location": target})
    for text in texts(script):
        assert f"{URL}/manifest.json at http://127.0.0.1" in text
        assert f"a redirect to http://127.0.0.1:{port}/login, which is not followed" in text
        assert "endpoint_url" in text
    assert elsewhere.asked == []


def test_a_web_page_is_no_store(script: ScriptedS3) -> None:
    script.respond = page
    for text in texts(script):
        assert f"{URL}/manifest.json at http://127.0.0.1" in text
        assert "the answer is a web page (text/html)" in text
        assert "endpoint_url" in text


def test_an_upload_that_a_page_answers(script: ScriptedS3) -> None:
    """The store is there for small requests, and something between takes the large ones."""

    def respond(request: Request) -> Answer:
        if request.what in ("begin", "part"):
            return Answer(200, PAGE)
        return failure(404, "NoSuchKey") if request.method in ("HEAD", "GET") else usual(request)

    script.respond = respond
    store = open_store(URL, script.options)

    def upload() -> None:
        with store.create("x") as write:
            for _ in range(20):
                write(memoryview(bytes(1 << 20)))

    with pytest.raises(CheckpointError, match="the answer has no UploadId; what answers there"):
        upload()


def test_an_expired_token_is_named_where_a_head_has_no_body(script: ScriptedS3) -> None:
    script.respond = lambda request: failure(400, "ExpiredToken", "The provided token has expired.")
    for text in texts(script):
        assert "ExpiredToken: The provided token has expired." in text
        assert "get new ones and start again" in text
        assert URL in text


def test_errors_show_no_password_of_the_endpoint(script: ScriptedS3) -> None:
    script.respond = page
    named = {**script.options, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    named["endpoint_url"] = named["endpoint_url"].replace("//", "//user:password@")
    with pytest.raises(CheckpointError) as caught:
        load(URL, storage_options=named)
    assert "at http://127.0.0.1:" in str(caught.value)
    assert "password" not in str(caught.value)


def test_a_page_that_somebody_keeps_in_a_bucket_is_read(script: ScriptedS3) -> None:
    def respond(request: Request) -> Answer:
        return Answer(200, PAGE, {"Content-Type": "text/html", "ETag": '"tag"'})

    script.respond = respond
    with open_store(URL, script.options).open("index.html") as reader:
        assert bytes(reader.read(0, reader.size)) == PAGE
