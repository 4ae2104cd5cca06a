"""One of many writers puts the manifest in place; the others learn that they were late."""

from __future__ import annotations

import sys
import threading
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint_io.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointWarning,
    UnsettledWriteError,
)
from checkpoint_io.storage.open import Store, open_store
from checkpoint_io.storage.retry import RetryPolicy
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

pytestmark = pytest.mark.s3
pytest.importorskip("s3fs")

QUICK = RetryPolicy(attempts=4, base_delay=0.01, max_delay=0.02, read_timeout=600.0)


OBEYING = ["moto", "seaweedfs"]


@pytest.fixture(scope="module", params=OBEYING)
def obeying(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with s3_server(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ignoring() -> Iterator[S3Server]:
    with s3_server("rclone") as running:
        yield running


def place(server: S3Server) -> Store:
    return open_store(server.url(f"c/{uuid.uuid4().hex}"), server.options)


def content(store: Store, name: str = "m") -> bytes:
    with store.open(name) as reader:
        return bytes(reader.read(0, reader.size))


def test_only_over_what_was_seen(obeying: S3Server) -> None:
    store = place(obeying)
    assert store.token("m") == ""
    store.replace("m", b"1", "t", expected="")
    first = store.token("m")
    with pytest.raises(CheckpointConflictError, match="changed by another save"):
        store.replace("m", b"2", "t", expected="")
    store.replace("m", b"2", "t", expected=first)
    for stale in (first, ""):
        with pytest.raises(CheckpointConflictError):
            store.replace("m", b"3", "t", expected=stale)
    assert content(store) == b"2"
    seen = store.token("m")
    store.remove("m")
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"3", "t", expected=seen)
    store.replace("m", b"4", "t")
    store.replace("m", b"5", "t")
    assert content(store) == b"5"
    assert set(store.sizes()) == {"m"}  # the probe has cleaned up


@pytest.mark.parametrize(
    ("obeying", "exists"), zip(OBEYING, [False, True], strict=True), indirect=["obeying"]
)
def test_of_many_writers_one_wins(obeying: S3Server, exists: bool) -> None:
    store = place(obeying)
    if exists:
        store.replace("m", b"before", "t")
    seen = store.token("m")
    outcomes: list[Any] = []
    start = threading.Barrier(4)

    def write(number: int) -> None:
        mine = open_store(store.url, obeying.options)
        start.wait()
        try:
            mine.replace("m", b"%d" % number, "t", expected=seen)
            outcomes.append(number)
        except CheckpointConflictError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(outcomes) == 4
    assert [b"%d" % winner for winner in winners] == [content(store)]


RACE = """
import json, sys
from checkpoint_io.errors import CheckpointConflictError
from checkpoint_io.storage.open import open_store
url, options, number = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
store = open_store(url, options)
store.probe()
print("ready", flush=True)
sys.stdin.readline()
won = 0
for turn in range(10):
    try:
        store.replace(f"m{turn}", number.encode(), "t", expected="")
        won += 1
    except CheckpointConflictError:
        pass
print(won)
"""


@pytest.mark.slow
def test_of_two_processes_one_wins_each_time(obeying: S3Server) -> None:
    import json

    store = place(obeying)
    command = [sys.executable, "-c", RACE, store.url, json.dumps(obeying.options)]
    racers = [warm.Popen([*command, str(n)], stdin=-1, stdout=-1, text=True) for n in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    results = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        results.append(int(racer.communicate()[0]))
    assert sum(results) == 10
    wins = [content(store, f"m{turn}") for turn in range(10)]
    assert [wins.count(b"0"), wins.count(b"1")] == results


# --- a store that ignores conditions -------------------------------------------------------


def test_store_that_ignores_conditions_is_found_out(ignoring: S3Server) -> None:
    from checkpoint_io.storage.s3 import conditional

    conditional._conditions_cache.cache_clear()
    store = place(ignoring)
    with pytest.warns(CheckpointWarning, match="ignores conditional writes"):
        store.replace("m", b"1", "t", expected="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once is enough
        first = store.token("m")
        for stale in ("", '"another"'):
            with pytest.raises(CheckpointConflictError):
                store.replace("m", b"2", "t", expected=stale)
        store.replace("m", b"2", "t", expected=first)
        assert content(store) == b"2"
        assert set(store.sizes()) == {"m"}


def test_without_conditions_the_last_look_finds_the_other_writer(ignoring: S3Server) -> None:
    """Another job's put lands between ours and the look that follows."""
    from checkpoint_io.storage.s3 import conditional

    store = place(ignoring)
    other = place(ignoring)
    other_put = conditional._put

    async def put_then_other(client: Any, key: str, data: bytes, *rest: Any) -> None:
        await other_put(client, key, data, *rest)
        await other_put(client, key, b"theirs", *rest)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        other.probe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conditional, "_put", put_then_other)
            with pytest.raises(CheckpointConflictError):
                store.replace("m", b"ours", "t", expected="")
    assert content(store) == b"theirs"


# --- answers that get lost -----------------------------------------------------------------


class Keeper:
    """Keeps one object and obeys conditions, but loses or refuses what it is told to."""

    def __init__(self, *harm: Answer | None) -> None:
        self.harm = list(harm)
        self.data: bytes | None = None
        self.before: dict[int, bytes] = {}
        self.lost = False  # what is not answered does not arrive either
        self.puts = 0
        self.tag = ""  # of what is there, if not the usual one

    def __call__(self, request: Request) -> Answer:
        if not request.key.endswith("/m"):
            return self._probe(request)
        if request.method == "PUT":
            return self._put(request)
        if self.data is None:
            return failure(404, "NoSuchKey")
        tag = f'"{hash(self.data)}"'
        if request.method == "HEAD":
            return Answer(headers={"ETag": tag, "Content-Length": str(len(self.data))})
        if "range" in request.headers:
            return piece(request, self.data, tag)
        return Answer(body=self.data, headers={"ETag": tag})

    def _probe(self, request: Request) -> Answer:
        conditional = {"if-none-match", "if-match"} & set(request.headers)
        return failure(412, "PreconditionFailed") if conditional else usual(request)

    def _put(self, request: Request) -> Answer:
        self.data = self.before.get(self.puts, self.data)
        harm = self.harm[self.puts] if self.puts < len(self.harm) else None
        self.puts += 1
        if harm is not None and harm.headers:  # another tag: it took something else than was sent
            self.data = b"garbled"
        if harm is not None and (self.lost or not harm.drop):
            return harm
        if "if-none-match" in request.headers and self.data is not None:
            return failure(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        known = self.tag or f'"{hash(self.data)}"'
        if wanted and (self.data is None or wanted != known):
            return failure(412, "PreconditionFailed")
        self.data = request.body
        return harm or usual(request)


@pytest.fixture
def script(scripts: ScriptedS3) -> ScriptedS3:
    scripts.reset()
    return scripts


def keep(script: ScriptedS3, *harm: Answer | None) -> tuple[Store, Keeper]:
    from checkpoint_io.storage.s3 import conditional

    conditional._conditions_cache.cache_clear()  # the port may be that of an earlier server
    script.respond = keeper = Keeper(*harm)
    return open_store("s3://bucket/o", script.options, retry=QUICK), keeper


LOST = Answer(drop=True)


@pytest.mark.parametrize("exists", [False, True])
def test_our_own_put_is_no_conflict_when_its_answer_got_lost(
    script: ScriptedS3, exists: bool
) -> None:
    store, keeper = keep(script, LOST)
    keeper.data = b"old" if exists else None
    store.replace("m", b"ours", "t", expected=store.token("m"))
    assert (keeper.data, keeper.puts) == (b"ours", 2)


def test_put_whose_every_answer_got_lost(script: ScriptedS3) -> None:
    store, keeper = keep(script, LOST, LOST, LOST, LOST)
    store.replace("m", b"ours", "t", expected="")
    assert keeper.data == b"ours"


def test_bytes_that_arrived_wrong_are_replaced_and_nothing_else(script: ScriptedS3) -> None:
    """A store that does not check keeps them, under a tag that the next try asks for."""
    wrong = Answer(headers={"ETag": f'"{"0" * 32}"'})
    store, keeper = keep(script, wrong)
    keeper.before[1] = b"theirs"
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"ours", "t", expected="")
    assert keeper.data == b"theirs"
    store, keeper = keep(script, wrong)
    keeper.tag = f'"{"0" * 32}"'
    store.replace("m", b"ours", "t", expected="")
    assert (keeper.data, keeper.puts) == (b"ours", 2)


def test_put_of_another_writer_is_a_conflict_also_after_a_retry(script: ScriptedS3) -> None:
    store, keeper = keep(script, failure(503, "SlowDown"))
    keeper.before[1] = b"theirs"  # arrives between our first try and our second
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"ours", "t", expected="")
    assert keeper.data == b"theirs"


def test_request_under_way_elsewhere_is_waited_for(script: ScriptedS3) -> None:
    busy = failure(409, "ConditionalRequestConflict")
    store, keeper = keep(script, busy, busy)
    store.replace("m", b"ours", "t", expected="")
    assert (keeper.data, keeper.puts) == (b"ours", 3)
    store, keeper = keep(script, busy)
    keeper.before[0] = b"theirs"
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"ours", "t", expected="")
    store, keeper = keep(script, *[busy] * 9)
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"ours", "t", expected="")


@pytest.mark.parametrize(
    "harm",
    [
        [failure(504, "504"), *[failure(409, "ConditionalRequestConflict")] * 9],  # with our first
        [failure(504, "504")] * 9,
        [failure(502, "502"), failure(403, "AccessDenied")],
    ],
    ids=["busy", "gateway", "refused_later"],
)
def test_put_that_may_still_arrive_is_said_to(script: ScriptedS3, harm: list[Answer]) -> None:
    """Else its files would be removed, and then the manifest that names them appears."""
    store, keeper = keep(script, *harm)
    keeper.lost = True
    with pytest.raises(UnsettledWriteError, match="may still arrive"):
        store.replace("m", b"ours", "t", expected="")


def test_put_that_never_arrives_is_an_error(script: ScriptedS3) -> None:
    store, keeper = keep(script, *[failure(500, "InternalError")] * 9)
    with pytest.raises(CheckpointError, match=r"writing s3://bucket/o/m .*tried 4 times"):
        store.replace("m", b"ours", "t", expected="")
    assert keeper.data is None


def test_conditions_are_probed_once(script: ScriptedS3) -> None:
    store, keeper = keep(script)
    store.replace("m", b"1", "t", expected="")
    asked = len(script.asked)
    keeper.data = None
    open_store("s3://bucket/elsewhere/o", script.options, retry=QUICK).token("m")
    store.child("x").replace("m", b"1", "t", expected="")
    assert len(script.asked) == asked + 2
