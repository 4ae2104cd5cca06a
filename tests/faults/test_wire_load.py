"""The wire breaks while a checkpoint is read: read again, or said; nothing wrong is believed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faultkit import breakage as wire
from faultkit.places import Place, broken_place, cases
from faultkit.proxy import Exchange, Message, Rule, forward
from faultkit.states import state_of, whole

from checkpoint_io import (
    CheckpointError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from checkpoint_io.format.manifest import PART_SIZE

pytestmark = [pytest.mark.s3]

LARGE = 1_500_000  # 6 MB a tensor: more than one span, if they are short
SMALL = 1000
FOREVER = None
slow = pytest.mark.slow


@pytest.fixture
def place(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("checkpoint_io.storage.base.ObjectStore.span_bytes", 5 << 20)
    with broken_place(s3) as made:
        yield made


DATA = r"^GET .*/(tensors|objects)-"
TENSORS = r"^GET .*/tensors-"
READ_MANIFEST = r"^GET .*/manifest\.json"

LOADED: dict[str, Callable[[], list[Rule]]] = {
    "500": lambda: [Rule(DATA, wire.refuse("InternalError"), times=2)],
    "503": lambda: [Rule(DATA, wire.refuse("ServiceUnavailable"), skip=1)],
    "slow_down": lambda: [Rule("^(GET|HEAD)", wire.refuse("SlowDown"), times=2)],
    "500_on_manifest": lambda: [Rule(READ_MANIFEST, wire.refuse("InternalError"), times=2)],
    "reset_before": lambda: [Rule(DATA, wire.reset_before, early=True)],
    "reset_in_the_middle": lambda: [Rule(TENSORS, wire.cut_download(0.5), times=2)],
    "body_that_ends_early": lambda: [Rule(TENSORS, wire.cut_download(0.5, orderly=True))],
    "body_that_is_short": lambda: [Rule(TENSORS, wire.shorten_download)],
    "stall": lambda: [Rule(DATA, wire.stall)],
    "stall_in_the_middle": lambda: [Rule(TENSORS, wire.stall_download)],
    "slow_but_alive": lambda: [Rule(TENSORS, wire.drip(1.0), times=3)],
}


@pytest.mark.parametrize(
    "name",
    cases(LOADED, {"reset_in_the_middle", "body_that_is_short"}),
)
def test_load_survives(place: Place, name: str) -> None:
    place.save(1, LARGE, through=False)
    place.proxy.rules = LOADED[name]()
    if name.startswith("stall"):
        place.give_up_soon()
    assert place.load(through=True) == 1
    assert place.proxy.harmed()


OBJECTS = r"^GET .*/objects-"


@pytest.mark.parametrize("pattern", [TENSORS, OBJECTS, READ_MANIFEST], ids=["t", "o", "manifest"])
def test_one_flipped_bit_on_the_way_down_is_read_again(place: Place, pattern: str) -> None:
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(pattern, wire.flip_download)]
    assert place.load(through=True) == 1
    assert place.proxy.harmed() == 1


def test_only_the_part_with_the_flipped_bit_is_read_again(place: Place) -> None:
    place.save(1, LARGE, through=False)
    asked: list[tuple[str, int, int]] = []
    flipped: list[tuple[str, int, int]] = []

    def flip_and_note(exchange: Exchange) -> None:
        first, last = map(int, exchange.request.header("range").removeprefix("bytes=").split("-"))
        asked.append((exchange.request.first, first, last + 1 - first))
        harm = last - first > PART_SIZE and not flipped
        flipped.extend(asked[-1:] * harm)
        (wire.flip_download if harm else forward)(exchange)

    place.proxy.rules = [Rule(TENSORS, flip_and_note, times=FOREVER)]
    assert place.load(through=True) == 1
    (first, begin, length), *_ = flipped
    inside = [a for a in asked if a[0] == first and begin <= a[1] < begin + length]
    assert len(inside) == 2
    assert inside[1][2] <= PART_SIZE, "the whole span was read again"


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(TENSORS, id="t"),
        pytest.param(OBJECTS, id="o", marks=slow),
        pytest.param(READ_MANIFEST, id="manifest"),
    ],
)
def test_a_connection_that_flips_each_answer_is_not_asked_again(place: Place, pattern: str) -> None:
    place.save(1, SMALL, through=False)
    bad: list[Any] = []  # the client may keep several open, and take any of them for the next

    def flip_on_the_first_connections(exchange: Exchange) -> None:
        def keep_open(message: Message, answer: Any = exchange.answer) -> None:
            # moto closes each connection, so that there would be a new one anyway
            message.headers = [one for one in message.headers if one[0].lower() != "connection"]
            answer(message)

        exchange.answer = keep_open  # type: ignore[method-assign]
        asked = re.search(pattern, exchange.request.first) is not None
        if asked:
            bad[:] = bad or place.proxy.clients()
        (wire.flip_download if asked and exchange.client in bad else forward)(exchange)

    place.proxy.rules = [Rule("", flip_on_the_first_connections, times=FOREVER)]
    assert place.load(through=True) == 1
    assert bad


@pytest.mark.parametrize("pattern", [TENSORS, OBJECTS, READ_MANIFEST], ids=["t", "o", "manifest"])
def test_bits_that_flip_each_time_are_damage(place: Place, pattern: str) -> None:
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(pattern, wire.flip_download, times=FOREVER)]
    with pytest.raises(CorruptCheckpointError, match=place.prefix) as caught:
        place.load(through=True)
    assert type(caught.value) is CorruptCheckpointError  # a public name, also in messages


@pytest.mark.parametrize("pattern", [TENSORS, READ_MANIFEST], ids=["tensors", "manifest"])
def test_one_flipped_bit_is_no_reason_to_take_an_older_one(place: Place, pattern: str) -> None:
    folder = CheckpointFolder(place.url, storage_options=place.server.options)
    for step in (1, 2):
        folder.save(step, state_of(step, SMALL), metadata={"run_id": "wire"})
    newest = pattern.replace(".*", ".*step-00000002")
    place.proxy.rules = [Rule(newest, wire.flip_download)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = CheckpointFolder(place.url, storage_options=place.through).load_latest()
    assert whole(found)[0] == 2
    assert place.proxy.harmed() == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [("ExpiredToken", "expired"), pytest.param("AccessDenied", "permissions", marks=slow)],
)
def test_refused_load_says_why(place: Place, code: str, said: str) -> None:
    place.save(1, SMALL, through=False)
    place.proxy.rules = [Rule(DATA, wire.refuse(code), times=FOREVER)]
    with pytest.raises(CheckpointError, match=said) as caught:
        place.load(through=True)
    assert code in str(caught.value)
    assert not isinstance(caught.value, (CorruptCheckpointError, CheckpointNotFoundError))


@pytest.mark.parametrize("code", ["InternalError", pytest.param("ExpiredToken", marks=slow)])
def test_a_store_that_is_down_is_no_reason_to_take_an_older_one(place: Place, code: str) -> None:
    folder = CheckpointFolder(place.url, storage_options=place.server.options)
    for step in (1, 2):
        folder.save(step, state_of(step, SMALL), metadata={"run_id": "wire"})
    place.proxy.rules = [Rule("^GET .*step-00000002/.*", wire.refuse(code), times=FOREVER)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError) as caught:
            CheckpointFolder(place.url, storage_options=place.through).load_latest()
    assert not isinstance(caught.value, CorruptCheckpointError)
