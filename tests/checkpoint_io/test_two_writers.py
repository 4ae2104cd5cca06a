"""Two jobs save to one path at the same time, again and again: one wins, or both in turn."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from checkpoint_io import CheckpointConflictError, load, read_manifest, save, verify


def writer(connection: Connection, number: int) -> None:
    """Save at each word from the parent, and tell what came of it."""
    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:
        url, round_number, options = task
        mark = float(10 * round_number + number)
        state = {"w": [torch.full((50_000,), mark) for _ in range(4)], "mark": mark}
        try:
            save(url, state, max_shard_size=300_000, storage_options=options)
        except CheckpointConflictError as error:
            connection.send(("conflict", str(error)))
        except BaseException as error:
            connection.send((type(error).__name__, str(error)))
        else:
            connection.send(("saved", mark))


@pytest.fixture(scope="module")
def writers() -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    ends = []
    processes = []
    for number in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=writer, args=(theirs, number)))
        processes[-1].start()
        ends.append(ours)
    yield ends
    for end in ends:
        end.send(None)
    for process in processes:
        process.join(20)
        process.kill()


def race(writers: list[Connection], url: str, rounds: int, options: dict[str, Any]) -> list[str]:
    """Let both save at once; after each round what is there is one of theirs, whole."""
    seen = []
    for number in range(1, rounds + 1):
        for end in writers:
            end.send((url, number, options))
        answers = [end.recv() for end in writers if end.poll(60)]
        assert len(answers) == 2, f"a writer hangs in round {number}"
        kinds = sorted(kind for kind, _ in answers)
        assert kinds in (["conflict", "saved"], ["saved", "saved"]), answers
        winners = [value for kind, value in answers if kind == "saved"]
        verify(url, storage_options=options)
        state = load(url, storage_options=options).state
        assert state["mark"] in winners
        assert all(torch.equal(w, torch.full((50_000,), state["mark"])) for w in state["w"])
        seen.append(kinds[0])
    return seen


def litter(url: str, options: dict[str, Any]) -> set[str]:
    filesystem, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    names = {name.rsplit("/", 1)[-1] for name in filesystem.ls(path, detail=False)}
    manifest = read_manifest(url, storage_options=options)
    return names - {"manifest.json", *(entry.name for entry in manifest.files)}


def test_two_jobs_on_a_local_path(writers: list[Connection], tmp_path: Path) -> None:
    seen = race(writers, str(tmp_path), 25, {})
    assert "conflict" in seen, "they never met: the test proves nothing"
    assert litter(str(tmp_path), {}) == set()


@pytest.mark.slow
def test_two_jobs_on_a_local_path_for_long(writers: list[Connection], tmp_path: Path) -> None:
    race(writers, str(tmp_path), 200, {})
    assert litter(str(tmp_path), {}) == set()


@pytest.mark.s3
def test_two_jobs_on_an_object_store(
    writers: list[Connection], s3_options: dict[str, object]
) -> None:
    """No locks there: the commit is conditional, and the loser takes its files back."""
    url = "s3://bucket/two-writers"
    seen = race(writers, url, 8, dict(s3_options))
    assert "conflict" in seen, "they never met: the test proves nothing"
    assert litter(url, dict(s3_options)) == set()
