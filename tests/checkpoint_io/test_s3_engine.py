"""The S3 engine: what is written comes back, whole or not at all, and whatever breaks is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from checkpoint_io.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError
from checkpoint_io.format.names import tensors_name
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.storage.retry import RetryPolicy
from checkpoint_io.storage.s3.client import STEP
from checkpoint_io.storage.s3.parts import PartBudget, part_size, process_budget
from tests.checkpoint_io.scripted_s3 import (
    Answer,
    Request,
    ScriptedS3,
    failure,
    piece,
    usual,
)
from tests.servers import S3Server, s3_server
from tests.support import warm
from tests.support.bound import patience

pytestmark = pytest.mark.s3
pytest.importorskip("s3fs")

MIB = 1 << 20
PART = 5 * MIB  # the least that stores take for a part
SHORT = 64 << 10
QUICK = RetryPolicy(attempts=4, base_delay=0.01, max_delay=0.02, read_timeout=600.0)
#: For what is stalled; it also gives up what is only slow, but not that often.
HASTY = replace(QUICK, attempts=20, read_timeout=patience(0.5))


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with s3_server(request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is sent than in parts of the usual size."""
    monkeypatch.setattr("checkpoint_io.storage.s3.parts.part_size", lambda size: PART)


@pytest.fixture
def script(scripts: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> ScriptedS3:
    """A server for which parts are short, so that it is sent many of them soon."""
    monkeypatch.setattr("checkpoint_io.storage.s3.parts.part_size", lambda size: SHORT)
    scripts.reset()
    return scripts


def place(server: S3Server, **options: Any) -> Store:
    return open_store(server.url(f"o/{uuid.uuid4().hex}"), {**server.options, **options})


def scripted(script: ScriptedS3, retry: RetryPolicy = QUICK) -> Store:
    return open_store("s3://bucket/o", script.options, retry=retry)


def put(store: Store, name: str, data: bytes, size: int | None = None, step: int = 2 * MIB) -> None:
    with store.create(name, size) as write:
        for at in range(0, len(data), step):
            write(memoryview(data)[at : at + step])


def get(store: Store, name: str, size: int, step: int = 3 * MIB) -> bytes:
    spans = [Span(name, at, min(size, at + step)) for at in range(0, size, step)]
    result = bytearray(size)

    def deliver(index: int, data: memoryview[int]) -> None:
        result[spans[index].begin : spans[index].end] = data

    store.fetch(spans, deliver)
    return bytes(result)


# --- whole, or not at all ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "announced"),
    [
        *((size, True) for size in (0, 1, PART, 2 * PART + 12345)),
        *((size, False) for size in (0, 1, PART)),
        *(
            pytest.param(size, announced, marks=pytest.mark.slow)
            for size, announced in [
                (PART - 1, True),
                (PART + 1, True),
                (PART + 1, False),
                (2 * PART, False),
            ]
        ),
    ],
)
def test_round_trip(server: S3Server, size: int, announced: bool) -> None:
    store = place(server)
    data = os.urandom(size)
    put(store, "x", data, size if announced else None)
    assert store.sizes() == {"x": size}
    assert get(store, "x", size) == data
    with store.open("x") as reader:
        assert reader.size == size
        assert bytes(reader.read(size // 3, size)) == data[size // 3 :]


def test_what_is_written_may_change_at_once(server: S3Server) -> None:
    store = place(server)
    piece_ = bytearray(MIB)
    with store.create("x", 15 * MIB) as write:
        for number in range(15):
            piece_[:] = bytes([number]) * len(piece_)
            write(memoryview(piece_))
    assert get(store, "x", 15 * MIB) == b"".join(bytes([n]) * MIB for n in range(15))


@pytest.mark.parametrize("written", [0, PART // 2, 3 * PART])
@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_block_that_raises_leaves_nothing(
    server: S3Server, written: int, error: BaseException
) -> None:
    store = place(server)

    def fail() -> None:
        with store.create("x") as write:
            write(memoryview(bytes(written)))
            raise error

    with pytest.raises(type(error)):
        fail()
    assert store.sizes() == {}
    assert not server.client().list_multipart_uploads(Bucket=server.bucket).get("Uploads")


@pytest.mark.parametrize("announced", [PART - 1, 3 * PART])
def test_another_size_than_announced_is_refused(server: S3Server, announced: int) -> None:
    store = place(server)
    with pytest.raises(CheckpointError, match="announced"):
        put(store, "x", bytes(2 * PART), announced)
    assert store.sizes() == {}
    assert not server.client().list_multipart_uploads(Bucket=server.bucket).get("Uploads")


def test_several_files_at_once_stay_within_the_budget(server: S3Server) -> None:
    store = place(server)
    data = {f"f{n}": os.urandom(2 * PART + n) for n in range(3)}
    threads = [threading.Thread(target=put, args=(store, *item)) for item in data.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(get(store, name, len(whole)) == whole for name, whole in data.items())
    budget = process_budget()
    assert (budget._used, budget._uploads, budget._spare) == (0, 0, [])


def test_parts_suffice_for_any_size() -> None:
    assert part_size(None) == part_size(0) == part_size(10_000 * STEP) == STEP
    for size in (10_000 * STEP + 1, 5 << 40):
        assert part_size(size) * 10_000 >= size
        assert part_size(size) % MIB == 0


def test_requests_at_once_are_bounded(script: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def respond(request: Request) -> Answer:
        if request.what == "part":
            while script.most_at_once < 2:
                time.sleep(0.01)
            gate.wait(0.05)
        return usual(request)

    script.respond = respond
    monkeypatch.setattr(
        "checkpoint_io.storage.s3.upload.process_budget", lambda: PartBudget(8 * SHORT)
    )
    put(scripted(script), "x", bytes(40 * SHORT), step=SHORT)
    assert script.count("part") == 40
    assert script.most_at_once <= 8


@pytest.mark.parametrize(
    "prefix", ["a b+c", "é%20ü", "x?y=z#w", "two//slashes", "dots/../kept", "quote'\"<&>", "日本"]
)
def test_odd_keys(server: S3Server, prefix: str) -> None:
    if server.kind == "seaweedfs" and prefix in ("two//slashes", "dots/../kept"):
        pytest.skip("SeaweedFS keeps files, whose paths it normalizes")
    url = server.url(f"{uuid.uuid4().hex}/{prefix}")
    store = open_store(url, server.options)
    data = os.urandom(PART + 5)
    put(store, "x", data)
    put(store.child("sub"), "y", b"y")
    assert get(store, "x", len(data)) == data
    assert (store.sizes(), store.folders()) == ({"x": len(data)}, ["sub"])
    keys = server.client().list_objects_v2(Bucket=server.bucket)["Contents"]
    assert f"{url.removeprefix(f's3://{server.bucket}/')}/x" in {entry["Key"] for entry in keys}
    store.remove_many(["x"])
    assert store.sizes() == {}


# --- listing and removing ------------------------------------------------------------------


def test_bulk_removal_and_the_folder_below(server: S3Server) -> None:
    store = place(server)
    names = ["manifest.json", *(f"f{n}" for n in range(5))]
    for name in names:
        put(store, name, b"x")
    put(store.child("f0"), "kept", b"x")
    store.remove_many([*names, "never-there"])
    assert (store.sizes(), store.folders()) == ({}, ["f0"])
    assert store.child("f0").sizes() == {"kept": 1}


@pytest.mark.slow
def test_more_than_a_thousand_objects(server: S3Server) -> None:
    store = place(server)
    names = [f"f{n:05}" for n in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(store, name, b"x"), names))
        list(pool.map(lambda name: put(store.child(name), "x", b""), names))
    assert (len(store.sizes()), store.folders()) == (1005, names)
    store.remove_many(names)
    assert store.sizes() == {}


def test_removal_reports_what_stayed(script: ScriptedS3) -> None:
    def respond(request: Request) -> Answer:
        if "delete" in request.query:
            return Answer(body=b"<R><Error><Key>o/b</Key><Code>AccessDenied</Code></Error></R>")
        return failure(403, "AccessDenied") if request.method == "DELETE" else usual(request)

    script.respond = respond
    with pytest.raises(
        CheckpointError, match=r"could not delete 1 of 2 objects.*o/b.*AccessDenied"
    ):
        scripted(script).remove_many(["a", "b"])


def test_store_without_bulk_removal(script: ScriptedS3) -> None:
    script.respond = lambda request: (
        failure(501, "NotImplemented") if "delete" in request.query else usual(request)
    )
    scripted(script).remove_many(["a", "b", "c"])
    assert script.count("DELETE") == 3


def test_uploads_of_killed_saves_are_aborted(server: S3Server) -> None:
    store, client = place(server), server.client()
    prefix = store.url.removeprefix(f"s3://{server.bucket}/")
    old, other = "a" * 16, "b" * 16
    for save_id, folder in ((old, ""), (old, "child/"), (other, "")):
        name = tensors_name(save_id, 0, 1)
        client.create_multipart_upload(Bucket=server.bucket, Key=f"{prefix}/{folder}{name}")
    store.abort_uploads(old)
    left = client.list_multipart_uploads(Bucket=server.bucket, Prefix=f"{prefix}/")["Uploads"]
    keys = sorted(upload["Key"] for upload in left)
    assert keys == [
        f"{prefix}/child/{tensors_name(old, 0, 1)}",
        f"{prefix}/{tensors_name(other, 0, 1)}",
    ]
    for upload in left:
        client.abort_multipart_upload(
            Bucket=server.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
        )


# --- what breaks ---------------------------------------------------------------------------


def first(times: int, what: str, harm: Answer) -> Callable[[Request], Answer]:
    """Harm the first requests of one kind."""
    left = [times]

    def respond(request: Request) -> Answer:
        if request.what == what and left[0]:
            left[0] -= 1
            return harm
        return usual(request)

    return respond


HARM = [
    failure(500, "InternalError"),
    failure(503, "SlowDown"),
    failure(400, "BadDigest"),
    failure(400, "RequestTimeout"),
    Answer(drop=True),
    Answer(hang=True),
    Answer(headers={"ETag": '"00000000000000000000000000000000"'}),  # another MD5 than was sent
]


# Each harm to a part, and of each kind for the other requests.
@pytest.mark.parametrize(
    ("what", "harm"),
    [
        *(("part", harm) for harm in HARM[:-1]),
        *(("begin", HARM[0]), ("begin", HARM[4]), ("complete", HARM[1]), ("complete", HARM[4])),
        *(("PUT", HARM[2]), ("PUT", HARM[4])),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one.status}{one.body[13:23]!r}",
)
def test_upload_goes_on_after(script: ScriptedS3, what: str, harm: Answer) -> None:
    script.respond = first(2, what, harm)
    store = scripted(script, HASTY if harm.hang else QUICK)
    put(store, "x", bytes(10 if what == "PUT" else SHORT + 5))
    assert script.count(what) >= 3


@pytest.mark.parametrize("what", ["part", "PUT"])
def test_bytes_that_changed_on_the_way_are_sent_again(script: ScriptedS3, what: str) -> None:
    script.respond = first(2, what, HARM[-1])
    put(scripted(script), "x", bytes(10 if what == "PUT" else SHORT))
    assert script.count(what) == 3


def test_upload_is_given_up_and_taken_back(script: ScriptedS3) -> None:
    script.respond = first(1000, "part", failure(503, "SlowDown"))
    text = r"part 1 of s3://bucket/o/x .*tried 4 times.*SlowD"
    with pytest.raises(CheckpointError, match=text) as caught:
        put(scripted(script), "x", bytes(SHORT))
    assert (script.count("part"), script.count("complete"), script.count("abort")) == (4, 0, 1)
    assert "SlowDown" in str(caught.value.__cause__)
    assert caught.value.__cause__ is not caught.value


def test_upload_whose_beginning_got_lost_is_taken_back(script: ScriptedS3) -> None:
    """The first answer to CreateMultipartUpload was lost: its id is only known by listing."""
    ordinary = first(1, "begin", Answer(drop=True))
    listed = b"<R><Upload><Key>o/x</Key><UploadId>lost</UploadId></Upload></R>"
    aborted: list[str] = []

    def respond(request: Request) -> Answer:
        if request.what == "abort":
            aborted.append(request.query["uploadId"])
        return Answer(body=listed) if request.what == "list uploads" else ordinary(request)

    script.respond = respond
    put(scripted(script), "x", bytes(SHORT))
    assert aborted == ["lost"]


def test_upload_whose_beginning_was_interrupted_is_taken_back(script: ScriptedS3) -> None:
    def respond(request: Request) -> Answer:
        if request.what == "begin":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return usual(request)

    script.respond = respond
    with pytest.raises(KeyboardInterrupt):
        put(scripted(script), "x", bytes(SHORT))
    assert script.count("list uploads") + script.count("abort") > 0


def test_uploads_that_cannot_be_listed_harm_no_upload(script: ScriptedS3) -> None:
    """One beginning got lost, the object is there all the same."""
    begin = first(1, "begin", Answer(drop=True))
    script.respond = lambda request: (
        failure(500, "InternalError") if request.what == "list uploads" else begin(request)
    )
    with pytest.warns(CheckpointWarning, match="may be left"):
        put(scripted(script), "x", bytes(SHORT))
    assert script.count("abort") == 0


def test_list_of_uploads_that_does_not_go_on_ends(script: ScriptedS3) -> None:
    more = b"<R><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker></R>"
    script.respond = lambda request: (
        Answer(body=more) if script.count("list uploads") < 9 else failure(403, "AccessDenied")
    )
    scripted(script).abort_uploads("a" * 16)
    assert script.count("list uploads") == 2


def test_failed_abort_is_told(script: ScriptedS3) -> None:
    script.respond = lambda request: (
        failure(403, "AccessDenied") if request.what in ("part", "abort") else usual(request)
    )
    store = scripted(script)
    with (
        pytest.warns(CheckpointWarning, match="may be left"),
        pytest.raises(CheckpointError, match="part 1"),
    ):
        put(store, "x", bytes(SHORT))


@pytest.mark.parametrize("tag", ['"whole"', '"d41d8cd98f00b204e9800998ecf8427e-1"', None])
def test_lost_answer_to_the_completion(script: ScriptedS3, tag: str | None) -> None:
    """The object is there: with the expected tag, one that says nothing, or another's."""
    from checkpoint_io.storage.s3.parts import tag_of_parts

    part_tag = '"d41d8cd98f00b204e9800998ecf8427e"'
    found = tag or f'"{tag_of_parts([part_tag])}"'

    def respond(request: Request) -> Answer:
        if request.what == "complete":
            lost = script.count("complete") == 1
            return Answer(drop=True) if lost else failure(404, "NoSuchUpload")
        if request.what == "HEAD":
            return Answer(headers={"ETag": found, "Content-Length": str(SHORT)})
        answer = usual(request)
        if request.what == "part":
            answer.headers["ETag"] = part_tag
        return answer

    script.respond = respond
    if tag == '"d41d8cd98f00b204e9800998ecf8427e-1"':
        with pytest.raises(CheckpointError, match="NoSuchUpload"):
            put(scripted(script), "x", bytes(SHORT))
    else:
        put(scripted(script), "x", bytes(SHORT))
        assert script.count("abort") == 0


def test_error_inside_of_a_good_answer(script: ScriptedS3) -> None:
    body = failure(200, "InternalError").body
    script.respond = first(1, "complete", Answer(200, body))
    put(scripted(script), "x", bytes(SHORT))
    assert script.count("complete") == 2
    script.respond = first(1000, "complete", Answer(200, body))
    with pytest.raises(CheckpointError, match="InternalError"):
        put(scripted(script), "x", bytes(SHORT))


DATA = os.urandom(300_000)


@pytest.mark.parametrize(
    "harm",
    [*HARM[:2], *HARM[4:6], Answer(cut=70_000), Answer(cut=70_000, hang=True)],
    ids=["500", "503", "drop", "hang", "cut", "stalled"],
)
def test_download_goes_on_after(script: ScriptedS3, harm: Answer) -> None:
    left, ranges = [2], []

    def respond(request: Request) -> Answer:
        ranges.append(request.headers["range"])
        if left[0]:
            left[0] -= 1
            if harm.cut is None:
                return harm
            return replace(piece(request, DATA), cut=harm.cut, hang=harm.hang)
        return piece(request, DATA)

    script.respond = respond
    assert get(scripted(script, HASTY if harm.hang else QUICK), "x", len(DATA)) == DATA
    if harm.cut and harm.hang:  # what arrived is not asked for again
        assert ranges[:3] == [f"bytes={at}-299999" for at in (0, 70_000, 140_000)]


def test_download_is_given_up(script: ScriptedS3) -> None:
    script.respond = lambda request: failure(503, "SlowDown")
    with pytest.raises(CheckpointError, match=r"reading s3://bucket/o/x .*tried 4 times"):
        get(scripted(script), "x", 10)
    assert script.count("GET") == 4


def test_object_that_is_replaced_during_a_fetch(script: ScriptedS3) -> None:
    script.respond = lambda request: piece(
        request, DATA, '"new"' if script.count("GET") > 3 else '"old"'
    )
    with pytest.raises(CorruptCheckpointError, match="replaced while it was being read"):
        get(scripted(script), "x", len(DATA), step=20_000)


def test_object_that_is_replaced_behind_a_reader(server: S3Server) -> None:
    store = place(server)
    put(store, "x", b"old" * 1000)
    with store.open("x") as reader:
        assert bytes(reader.read(0, 3)) == b"old"
        put(store, "x", b"new" * 1000)
        with pytest.raises(CorruptCheckpointError, match="replaced"):
            reader.read(3, 6)


@pytest.mark.parametrize("span", [(0, 11), (5, 20), (10, 11), (30, 40), (11, 11)])
def test_file_that_is_too_short(server: S3Server, span: tuple[int, int]) -> None:
    store = place(server)
    put(store, "x", b"0123456789")
    with pytest.raises(CorruptCheckpointError, match="x: truncated"):
        store.fetch([Span("x", *span)], lambda index, data: None)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        store.fetch([Span("y", 0, 0)], lambda index, data: None)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        store.fetch([Span("x", 0, 1), Span("y", *span)], lambda index, data: None)


def test_error_of_the_receiver_ends_the_fetch(server: S3Server) -> None:
    store = place(server)
    put(store, "x", bytes(4 * MIB))
    calls = []

    def deliver(index: int, data: memoryview[int]) -> None:
        calls.append(index)
        raise ZeroDivisionError

    spans = [Span("x", n * 1000, n * 1000 + 1000) for n in range(1000)]
    with pytest.raises(ZeroDivisionError):
        store.fetch(spans, deliver)
    assert len(calls) == 1
    assert get(store, "x", 100) == bytes(100)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (failure(403, "AccessDenied"), "s3://bucket/o/told .*AccessDenied.*permissions"),
        (failure(400, "ExpiredToken"), "ExpiredToken.*expired: get new ones"),
        (failure(403, "InvalidAccessKeyId"), "key.* is wrong"),
        (failure(403, "RequestTimeTooSkewed"), "clock"),
        (failure(404, "NoSuchBucket"), "no bucket 'bucket'; check its name"),
        (failure(400, "AuthorizationHeaderMalformed"), "another region.*region_name"),
    ],
)
def test_what_will_not_pass_is_told_at_once(script: ScriptedS3, answer: Answer, text: str) -> None:
    asked: list[str] = []  # without late requests of the test before

    def respond(request: Request) -> Answer:
        if request.key.endswith("told"):
            asked.append(request.what)
        return answer

    script.respond = respond
    store = scripted(script)
    for action in (
        lambda: put(store, "told", b"1"),
        lambda: put(store, "told", bytes(SHORT)),
        lambda: get(store, "told", 10),
        lambda: store.replace("told", b"1", "t"),
    ):
        asked.clear()
        with pytest.raises(CheckpointError, match=text):
            action()
        assert len(asked) == 1, asked


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, script: ScriptedS3) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {k: v for k, v in script.options.items() if k not in ("key", "secret")}
    store = open_store("s3://bucket/o", {**options, "skip_instance_cache": True}, retry=QUICK)
    with pytest.raises(CheckpointError, match=r"credentials.*set the environment"):
        store.sizes()
    assert script.asked == []


def test_nobody_listens() -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(CheckpointError, match=r"127.0.0.1:9 failed, tried 4 times"):
        open_store("s3://bucket/o", options, retry=QUICK).sizes()


def test_options_of_botocore_are_kept_and_bound_the_tries(script: ScriptedS3) -> None:
    config = {
        **script.options["config_kwargs"],
        "retries": {"max_attempts": 1},
        "read_timeout": 0.3,
        "request_checksum_calculation": "when_required",
    }
    seen: list[dict[str, str]] = []

    def respond(request: Request) -> Answer:
        seen.append(request.headers)
        return Answer(hang=True) if script.count("PUT") == 1 else failure(503, "SlowDown")

    script.respond = respond
    store = open_store("s3://bucket/o", {**script.options, "config_kwargs": config})
    with pytest.raises(CheckpointError, match="tried 2 times"):
        put(store, "x", b"1")
    assert not [name for name in seen[0] if name.startswith("x-amz-checksum")]
    assert seen[0]["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"


# --- other threads, forks, the end ---------------------------------------------------------


def test_after_a_fork(server: S3Server) -> None:
    store = place(server)
    put(store, "parent", bytes(PART + 1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            put(store, "child", bytes(PART + 1))
            code = 0 if get(store, "child", PART + 1) == bytes(PART + 1) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert get(store, "parent", PART + 1) == bytes(PART + 1)
    assert set(store.sizes()) == {"parent", "child"}


LATE = """
import sys, threading
from checkpoint_io.storage.open import open_store
options = {"key": "test", "secret": "test-secret", "endpoint_url": sys.argv[2],
           "client_kwargs": {"region_name": "eu-west-1"}}
main = threading.main_thread()
def save():
    main.join()  # the interpreter has begun to end: its executors take no work any more
    store = open_store(sys.argv[1], options)
    with store.create("late", 17 << 20) as write:
        write(memoryview(bytes(17 << 20)))
    store.replace("manifest.json", b"{}", "t", expected="")
threading.Thread(target=save).start()
"""


def test_a_save_may_outlive_the_main_thread(server: S3Server) -> None:
    store = place(server)
    endpoint = server.endpoint.replace("127.0.0.1", "localhost")  # a name, to be looked up
    done = warm.run(
        [sys.executable, "-c", LATE, store.url, endpoint],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert store.sizes() == {"late": 17 * MIB, "manifest.json": 2}
