"""The wire between us and an object store breaks: retried within a bound, or the old one stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faultkit import breakage as wire
from faultkit.litter import keys_below, litter_s3, uploads_below
from faultkit.places import Place, broken_place, cases
from faultkit.proxy import Action, Exchange, Message, Rule, forward

from checkpoint_io import (
    CheckpointError,
    CheckpointWarning,
)
from tests.servers import S3Server, s3_server

pytestmark = [pytest.mark.s3]

LARGE = 1_500_000  # 6 MB a tensor: two parts of an upload, if they are as short as a store takes
SMALL = 1000
FOREVER = None

PART = r"^PUT .*partNumber="
FIRST_PART = r"^PUT .*partNumber=1"
BEGIN = r"^POST .*[?&]uploads"
COMPLETE = r"^POST .*[?&]uploadId="
OBJECTS = r"^PUT .*/objects-"
MANIFEST = r"^PUT .*/manifest\.json"
ABORT = r"^DELETE .*uploadId="


@pytest.fixture
def place(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("checkpoint_io.storage.s3.parts.part_size", lambda size: 5 << 20)
    with broken_place(s3) as made:
        yield made


slow = pytest.mark.slow

# What must be survived: name to rules. Made anew for each test, because rules count.
SURVIVED: dict[str, Callable[[], list[Rule]]] = {
    "500_on_two_parts": lambda: [Rule(PART, wire.refuse("InternalError"), times=2)],
    "503_on_a_part": lambda: [Rule(PART, wire.refuse("ServiceUnavailable"), skip=1)],
    "slow_down_everywhere": lambda: [Rule(".", wire.refuse("SlowDown"), skip=k) for k in (0, 6)],
    "500_on_begin": lambda: [Rule(BEGIN, wire.refuse("InternalError"))],
    "500_on_complete": lambda: [Rule(COMPLETE, wire.refuse("InternalError"))],
    "500_on_small_file": lambda: [Rule(OBJECTS, wire.refuse("InternalError"), times=2)],
    "500_on_manifest": lambda: [Rule(MANIFEST, wire.refuse("InternalError"))],
    "500_on_looking": lambda: [Rule("^(GET|HEAD) ", wire.refuse("InternalError"), times=2)],
    "reset_before_a_part": lambda: [Rule(PART, wire.reset_before, early=True)],
    "reset_in_a_part": lambda: [Rule(PART, wire.reset_mid_upload, early=True)],
    "lost_answer_to_a_part": lambda: [Rule(PART, wire.lose_answer)],
    "lost_answer_to_begin": lambda: [Rule(BEGIN, wire.lose_answer)],
    "lost_answer_to_complete": lambda: [Rule(COMPLETE, wire.lose_answer)],
    "lost_answer_to_small_file": lambda: [Rule(OBJECTS, wire.lose_answer)],
    "lost_answer_to_manifest": lambda: [Rule(MANIFEST, wire.lose_answer)],
    "error_in_a_complete_that_says_200": lambda: [
        Rule(COMPLETE, wire.ok_with_error("InternalError"))
    ],
    "stalled_part": lambda: [Rule(PART, wire.stall)],
    "stalled_manifest": lambda: [Rule(MANIFEST, wire.stall)],
    "slow_answers": lambda: [Rule("^(GET|POST)", wire.drip(0.3), times=3)],
}
# The tests of the S3 engine harm one request at a time, in more ways than these.
IN_SHORT = {
    "500_on_two_parts",
    "reset_in_a_part",
    "lost_answer_to_complete",
    "lost_answer_to_manifest",
}


@pytest.mark.parametrize("name", cases(SURVIVED, IN_SHORT))
def test_save_survives(place: Place, name: str) -> None:
    place.save(1, SMALL, through=False)
    place.proxy.rules = SURVIVED[name]()
    if name.startswith("stalled"):
        place.give_up_soon()
    place.save(2, LARGE)
    assert place.proxy.harmed(), f"no request was harmed: {place.proxy.log}"
    assert place.load() == 2
    # an upload whose begin was answered into the void is known to nobody but its key's prefix
    assert litter_s3(place.server, place.prefix) == set()


FAILED: dict[str, Callable[[], list[Rule]]] = {
    "500_on_parts": lambda: [Rule(PART, wire.refuse("InternalError"), times=FOREVER)],
    "slow_down_on_parts": lambda: [Rule(PART, wire.refuse("SlowDown"), skip=1, times=FOREVER)],
    "500_on_complete": lambda: [Rule(COMPLETE, wire.refuse("InternalError"), times=FOREVER)],
    "200_on_complete": lambda: [Rule(COMPLETE, wire.ok_with_error("InternalError"), times=FOREVER)],
    "500_on_manifest": lambda: [Rule(MANIFEST, wire.refuse("InternalError"), times=FOREVER)],
    "resets_of_parts": lambda: [
        Rule(PART, wire.reset_mid_upload, skip=1, times=FOREVER, early=True)
    ],
    "stalled_parts": lambda: [Rule(PART, wire.stall, skip=1, times=FOREVER)],
    "expired_in_the_middle": lambda: [
        Rule("^PUT ", wire.refuse("ExpiredToken"), skip=2, times=FOREVER)
    ],
    "no_right_to_write": lambda: [Rule("^PUT ", wire.refuse("AccessDenied"), times=FOREVER)],
    "no_right_to_commit": lambda: [Rule(MANIFEST, wire.refuse("AccessDenied"), times=FOREVER)],
}
SAID = {
    "expired_in_the_middle": "expired",
    "no_right_to_write": "AccessDenied|permissions",
    "no_right_to_commit": "AccessDenied|permissions",
}


@pytest.mark.parametrize(
    "name",
    cases(FAILED, {"500_on_parts", "500_on_manifest", "expired_in_the_middle"}),
)
def test_save_fails_in_order(place: Place, name: str) -> None:
    place.save(1, SMALL, through=False)
    before = keys_below(place.server, place.prefix)
    place.proxy.rules = FAILED[name]()
    if name.startswith("stalled"):
        place.give_up_soon()
    with pytest.raises(CheckpointError, match=SAID.get(name, place.prefix)):
        place.save(2, LARGE)
    assert place.proxy.harmed()
    assert place.load() == 1
    assert uploads_below(place.server, place.prefix) == []
    assert keys_below(place.server, place.prefix) == before
    place.proxy.rules = []
    place.save(3, SMALL)
    assert place.load() == 3


@pytest.mark.parametrize(
    "pattern", [pytest.param(PART, id="part"), pytest.param(OBJECTS, id="small", marks=slow)]
)
def test_flipped_bit_on_the_way_up_is_not_stored(place: Place, pattern: str) -> None:
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(pattern, wire.flip_upload)]
    try:
        place.save(2, LARGE)
        expected = 2
    except CheckpointError:
        expected = 1
    assert place.proxy.harmed()
    assert place.load() == expected
    assert uploads_below(place.server, place.prefix) == []


@slow
def test_flipped_bit_in_the_manifest_is_not_committed(place: Place) -> None:
    """A store that checks refuses it; moto keeps it, and gets it again over just that."""
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(MANIFEST, wire.flip_upload)]
    place.save(2, SMALL)
    assert place.proxy.harmed()
    assert place.load() == 2


def test_manifests_that_arrive_damaged_each_time_are_undone(place: Place) -> None:
    """moto obeys conditions and keeps what arrives: the old one is back after each try."""
    seen: list[int | str] = []

    def harm_and_look(exchange: Exchange) -> None:
        def look_and_answer(message: Message, answer: Any = exchange.answer) -> None:
            try:
                seen.append(place.load())
            except CheckpointError:
                seen.append("damaged")
            answer(message)

        exchange.answer = look_and_answer  # type: ignore[method-assign]
        copying = bool(exchange.request.header("x-amz-copy-source"))
        (forward if copying else wire.flip_upload)(exchange)

    place.save(1, SMALL, through=False)
    before = keys_below(place.server, place.prefix)
    place.proxy.rules = [Rule(MANIFEST, harm_and_look, times=FOREVER)]
    with pytest.raises(CheckpointError, match="tried 4 times"):
        place.save(2, SMALL)
    # a store that checks has kept the old one all the time, and is asked for no copies
    assert seen in ([1] * 4, ["damaged", 1] * 4)
    assert place.load() == 1
    assert keys_below(place.server, place.prefix) == before
    place.proxy.rules = [Rule(MANIFEST, wire.flip_upload)]
    place.save(3, SMALL)
    assert place.proxy.harmed() == 1
    assert place.load() == 3
    assert litter_s3(place.server, place.prefix) == set()


@pytest.mark.parametrize("times", [1, FOREVER])
def test_a_manifest_that_arrives_damaged_without_an_answer_is_undone(
    place: Place, times: int | None
) -> None:
    """The next try is refused, as the damaged bytes are in place: they are not another save's."""

    def flip_and_lose(exchange: Exchange) -> None:
        copying = bool(exchange.request.header("x-amz-copy-source"))
        exchange.answer = lambda answer: exchange.reset()  # type: ignore[method-assign]
        (wire.lose_answer if copying else wire.flip_upload)(exchange)

    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(MANIFEST, flip_and_lose, times=times)]
    if times:
        place.save(2, SMALL)
        assert place.load() == 2
    else:
        with pytest.raises(CheckpointError):
            place.save(2, SMALL)
        place.proxy.rules = []
        assert place.load() == 1
        place.save(3, SMALL)
        assert place.load() == 3
    assert litter_s3(place.server, place.prefix) == set()


@pytest.fixture(scope="module")
def rclone() -> Iterator[S3Server]:
    with s3_server("rclone") as server:
        yield server


@pytest.fixture
def unchecked(rclone: S3Server) -> Iterator[Place]:
    """A store that keeps what arrives, compares no CRC and ignores conditions."""
    with broken_place(rclone) as made:
        yield made


IGNORES = pytest.mark.filterwarnings("ignore:.*ignores conditional writes")
PUBLISH = r"^POST .*/manifest\.json.*uploadId="


@IGNORES
def test_lost_answer_to_the_manifest_that_replaces_another(unchecked: Place) -> None:
    place = unchecked
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(PUBLISH, wire.lose_answer)]
    place.save(2, SMALL)
    assert place.proxy.harmed()
    assert place.load() == 2
    assert litter_s3(place.server, place.prefix) == set()


@IGNORES
def test_manifest_that_may_still_arrive_keeps_both(unchecked: Place) -> None:
    place = unchecked
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(PUBLISH, wire.refuse("InternalError"), times=FOREVER)]
    with pytest.raises(CheckpointError, match="may still arrive"):
        place.save(2, SMALL)
    assert place.load() == 1
    hanging = place.server.client().create_multipart_upload(  # as a kill leaves it
        Bucket=place.server.bucket, Key=f"{place.prefix}/manifest.json"
    )
    assert hanging["UploadId"]
    place.proxy.rules = []
    place.save(3, SMALL)
    assert place.load() == 3
    assert litter_s3(place.server, place.prefix) == set()


@IGNORES
def test_manifests_that_arrive_damaged_each_time_leave_the_old_one(unchecked: Place) -> None:
    """Whatever moment a kill picks: after each request the old checkpoint is there, or the new."""
    place = unchecked
    seen: list[int] = []
    looking = threading.Lock()

    def look_after(action: Action) -> Action:
        def act(exchange: Exchange) -> None:
            action(exchange)
            # The next request may be answered by now, on another thread, which looks too.
            with looking:
                seen.append(place.load())

        return act

    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(MANIFEST, look_after(wire.flip_upload), times=FOREVER)]
    with pytest.raises(CheckpointError, match="tried 4 times"):
        place.save(2, SMALL)
    assert place.proxy.harmed()
    assert set(seen) == {1}
    assert place.load() == 1
    assert litter_s3(place.server, place.prefix) == set()
    seen.clear()
    place.proxy.rules = [
        Rule(MANIFEST, look_after(wire.flip_upload), times=2),
        Rule(r"^(PUT|POST) .*/manifest\.json", look_after(forward), times=FOREVER),
    ]
    place.save(2, SMALL)
    assert place.load() == 2
    assert sorted(seen) == seen
    assert set(seen) <= {1, 2}
    assert litter_s3(place.server, place.prefix) == set()


def test_deaf_after_the_commit_is_said_and_harms_nothing(place: Place) -> None:
    """Nobody can know what became of the commit: an error, and neither checkpoint is removed."""
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(MANIFEST, wire.lose_answer_to_all_later)]
    with pytest.raises(CheckpointError, match="verify"):
        place.save(2, SMALL)
    assert place.load() == 2
    place.save(3, SMALL, through=False)
    assert place.load() == 3
    assert litter_s3(place.server, place.prefix) == set()


@slow
def test_clean_up_that_fails_is_only_a_warning(place: Place) -> None:
    place.save(1, SMALL, through=False)
    deletion = r"^(DELETE .*/(tensors|objects)-|POST .*[?&]delete)"
    place.proxy.rules = [Rule(deletion, wire.refuse("AccessDenied"), times=FOREVER)]
    with pytest.warns(CheckpointWarning, match="remove"):
        place.save(2, SMALL)
    assert place.load() == 2
    place.proxy.rules = []
    place.save(3, SMALL)
    assert litter_s3(place.server, place.prefix) == set()


def test_a_commit_that_arrives_late_harms_nothing(place: Place) -> None:
    """The request is held up on its way and gets through when the client has long given up."""
    place.save(1, SMALL, through=False)
    late, place.attempts = wire.Late(), 2
    place.proxy.rules = [Rule(MANIFEST, late.hold, times=FOREVER)]
    with pytest.raises(CheckpointError):
        place.save(2, SMALL)
    assert place.load() == 1
    assert late.deliver() in (200, 412, 409)
    assert place.load() in (1, 2)


def test_first_save_that_fails_leaves_nothing(place: Place) -> None:
    place.proxy.rules = FAILED["500_on_complete"]()
    with pytest.raises(CheckpointError):
        place.save(1, LARGE)
    assert keys_below(place.server, place.prefix) == set()
    assert uploads_below(place.server, place.prefix) == []
