"""SIGKILL at any moment of a save to an object store: afterwards the old or the new, whole."""

from __future__ import annotations

import itertools
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from faultkit import victims as do
from faultkit.forking import ForkServer
from faultkit.killing import Kills
from faultkit.litter import litter_s3, uploads_below
from faultkit.states import whole

from checkpoint_io import CheckpointFolder, CheckpointWarning, keep_last, load

pytestmark = pytest.mark.s3

LARGE = 5_000_000  # a weight of 20 MB: more than one part, so a kill leaves a multipart upload
LONG = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(1, 2), pytest.param(1, 30, marks=LONG), pytest.param(2, 30, marks=LONG)],
)
def test_overwritten_prefix(
    victims: ForkServer, tmp_path: Path, s3: Any, ranks: int, count: int
) -> None:
    prefix = uuid.uuid4().hex
    kills = Kills(victims, tmp_path, do.overwrite, ranks, s3.options, LARGE)
    doomed = itertools.cycle([(0,), (ranks - 1,), tuple(range(ranks))])
    dangling = 0
    for fraction in kills.fractions(count):
        saved, begun = kills.once(s3.url(prefix), fraction, next(doomed))
        for rank in range(ranks):
            found = load(s3.url(prefix), rank=rank, storage_options=s3.options)
            step, _ = whole(found, rank)
            assert saved <= step <= begun, f"saved {saved}, began {begun}, found {step}"
        dangling += len(uploads_below(s3, prefix))
    assert dangling or count < 10, "no kill left an upload: the test proves nothing"
    victims.run(do.once, s3.url(prefix), kills.next_step, s3.options)
    assert litter_s3(s3, prefix) == set(), "the next save leaves what the killed ones left"


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=LONG)])
def test_folder_on_s3(victims: ForkServer, tmp_path: Path, s3: Any, count: int) -> None:
    prefix = uuid.uuid4().hex
    folder = CheckpointFolder(s3.url(prefix), storage_options=s3.options)
    kills = Kills(victims, tmp_path, do.fill_folder, 1, s3.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # of the killed save's folder
        for fraction in kills.fractions(count):
            saved, begun = kills.once(s3.url(prefix), fraction)
            step, _ = whole(folder.load_latest())
            assert saved <= step <= begun, f"saved {saved}, began {begun}, found {step}"
        folder.prune(keep_last(2), run_id=do.RUN)
    kept = [info.name for info in folder.list()]
    assert len(kept) == 2
    assert not any(litter_s3(s3, f"{prefix}/{name}") for name in kept)
    assert uploads_below(s3, prefix) == []
