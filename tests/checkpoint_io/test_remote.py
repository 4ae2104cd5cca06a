from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint_io import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    UnsupportedStateError,
    keep_last,
    load,
    load_model_state,
    save,
    save_model,
    verify,
)
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.fsspec_store import Driver
from checkpoint_io.storage.open import FsspecStore, open_store
from checkpoint_io.storage.retry import RetryPolicy
from tests.servers import sftp_server
from tests.support import warm
from tests.support.bound import patience


@pytest.fixture(scope="module")
def sftp() -> Iterator[tuple[str, dict[str, Any]]]:
    pytest.importorskip("paramiko")
    with sftp_server() as running:
        yield running[:2]


@pytest.fixture(params=["memory", "sftp", pytest.param("s3", marks=pytest.mark.s3)])
def remote(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", {}
    if request.param == "sftp":
        url, options = request.getfixturevalue("sftp")
        return f"{url}/{uuid.uuid4().hex}", options
    return f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue("s3_options")


Remote = tuple[str, dict[str, Any]]


def contents(remote: Remote) -> set[str]:
    url, options = remote
    return set(open_store(url, options).sizes())


@pytest.mark.first
def test_round_trip_overwrite_and_damage(remote: Remote, state: dict[str, Any]) -> None:
    url, options = remote
    save(url, state, local_state={"n": 1}, storage_options=options)
    second = save(url, {**state, "step": 8}, storage_options=options)
    assert contents(remote) == {"manifest.json", *(entry.name for entry in second.files)}
    checkpoint = load(url, storage_options=options)
    assert checkpoint.state["step"] == 8
    assert torch.equal(checkpoint.state["model"]["w"], state["model"]["w"])
    assert second.generation == 2
    filesystem, path = fsspec.core.url_to_fs(url, **options)
    for entry in second.files:
        whole = filesystem.cat_file(f"{path}/{entry.name}")
        for bad in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            filesystem.pipe_file(f"{path}/{entry.name}", bad)
            with pytest.raises(CorruptCheckpointError, match=entry.name):
                verify(url, storage_options=options)
        filesystem.rm_file(f"{path}/{entry.name}")
        with pytest.raises(CorruptCheckpointError, match="missing"):
            load(url, storage_options=options)
        filesystem.pipe_file(f"{path}/{entry.name}", whole)
    verify(url, storage_options=options)


@pytest.mark.first
def test_failed_save_leaves_the_old_one_and_no_litter(remote: Remote, state: Any) -> None:
    url, options = remote
    save(url, state, storage_options=options)
    before = contents(remote)
    with pytest.raises(UnsupportedStateError):
        save(url, {**state, "bad": object()}, storage_options=options)
    assert contents(remote) == before
    assert load(url, storage_options=options).state["step"] == 7


def test_folder_discovery_and_retention(remote: Remote) -> None:
    url, options = remote
    folder = CheckpointFolder(url, storage_options=options)
    assert folder.list() == []
    with pytest.raises(CheckpointNotFoundError):
        folder.load_latest()
    for step in (1, 2, 3):
        folder.save(step, {"step": step, "w": torch.ones(3)}, metadata={"run_id": "r"})
    # another client, so that no cache of ours can tell it
    other = CheckpointFolder(url, storage_options={**options, "skip_instance_cache": True})
    assert [info.name for info in other.list()] == [f"step-{n:08d}" for n in (1, 2, 3)]
    assert folder.prune(keep_last(2), run_id="r") == [folder.path(1)]
    assert [info.name for info in other.list()] == ["step-00000002", "step-00000003"]
    open_store(folder.path(3), options).remove("manifest.json")
    with pytest.warns(CheckpointWarning, match="never finished"):
        assert folder.load_latest().state["step"] == 2
    folder.prune(keep_last(2), run_id="r")
    assert contents((folder.path(3), options)) == set()


def test_model_layout(remote: Remote) -> None:
    url, options = remote
    weights = {f"w{i}": torch.randn(100) for i in range(5)}
    save_model(weights, url, max_shard_size=900, storage_options=options)
    save_model(weights, url, max_shard_size=1300, storage_options=options)
    assert len(contents(remote)) == 3
    loaded = load_model_state(url, storage_options=options)
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)
    assert save_model(weights, url, storage_options=options) == ["model.safetensors"]
    assert contents(remote) == {"model.safetensors"}


def test_store_of_each_kind(remote: Remote) -> None:
    url, options = remote
    store = open_store(url, options)
    store.probe()
    assert (store.sizes(), store.token("manifest.json")) == ({}, "")
    store.replace("manifest.json", b"1", "manifest-aaaaaaaa.tmp", expected="")
    seen = store.token("manifest.json")
    store.replace("manifest.json", b"two", "manifest-aaaaaaaa.tmp", expected=seen)
    for stale in (seen, ""):
        with pytest.raises(CheckpointConflictError, match="changed by another save"):
            store.replace("manifest.json", b"3", "manifest-aaaaaaaa.tmp", expected=stale)
    store.replace("manifest.json", b"four", "manifest-aaaaaaaa.tmp")
    assert store.sizes() == {"manifest.json": 4}
    data = bytes(range(256)) * 100
    with store.create("x", len(data)) as write:
        for at in range(0, len(data), 10_000):
            write(memoryview(data)[at : at + 10_000])
    got: dict[int, bytes] = {}
    spans = [Span("x", 0, 0), Span("x", 7, 9), Span("manifest.json", 0, 4), Span("x", 0, 25_600)]
    store.fetch(spans, lambda index, part: got.__setitem__(index, bytes(part)))
    assert [got[n] for n in range(4)] == [b"", data[7:9], b"four", data]
    for bad in (Span("x", 1, 25_601), Span("gone", 0, 1)):
        with pytest.raises(CorruptCheckpointError, match=r"truncated|missing"):
            store.fetch([bad], lambda index, part: None)
    store.child("below").replace("manifest.json", b"", "t")
    assert store.folders() == ["below"]
    store.remove_many(["manifest.json", "x", "gone"])
    assert store.sizes() == {}
    assert store.child("below").sizes() == {"manifest.json": 0}
    with pytest.raises(ValueError, match="plain folder name"):
        store.child("../up")


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "run"])
@pytest.mark.parametrize("value", ["auto", "fsspec", None])
def test_the_option_that_chose_who_moves_bytes_is_refused(url: str, value: str | None) -> None:
    with pytest.raises(ValueError, match="transfer") as caught:
        open_store(url, {"transfer": value})
    assert str(caught.value) == (
        "storage_options: transfer was removed in 0.2.0: s3fs moves the bytes of s3:// URLs, so "
        "leave it out"
    )


def test_block_that_raises_publishes_nothing(remote: Remote) -> None:
    """The drivers' own with-blocks would publish the truncated object, and so would a gc."""
    url, options = remote
    store = open_store(url, options)

    def fail(size: int | None, wrong: BaseException | None) -> None:
        with store.create("x", size) as write:
            write(memoryview(bytes(200_000)))
            if wrong is not None:
                raise wrong

    for wrong in (RuntimeError("stop"), KeyboardInterrupt()):
        with pytest.raises(type(wrong)):
            fail(None, wrong)
    with pytest.raises(CheckpointError, match="200000"):
        fail(300_000, None)
    gc.collect()
    assert store.sizes() == {}


@pytest.mark.first
def test_of_many_writers_in_memory_one_wins() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    start, won = threading.Barrier(8), []

    def write(number: int) -> None:
        start.wait()
        with suppress(CheckpointConflictError):
            open_store(url).replace("m", b"%d" % number, "t", expected="")
            won.append(b"%d" % number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_store(url).open("m") as reader:
        assert won == [bytes(reader.read(0, reader.size))]


class Shaky(MemoryFileSystem):
    """Fails before each request as often as it is told to, as a store does."""

    cachable = False
    errors: ClassVar[list[Exception]] = []

    def _shake(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def info(self, path: str, **kwargs: Any) -> Any:
        self._shake()
        return super().info(path, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._shake()
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        super().pipe_file(path, *args, **kwargs)
        self._shake()  # it arrived, but the answer did not


class StatusError(Exception):
    """What drivers raise for an HTTP status."""

    def __init__(self, status: int) -> None:
        self.status = status


def shaky() -> FsspecStore:
    policy = RetryPolicy(attempts=3, base_delay=0.01)
    return FsspecStore(Driver(Shaky(), policy), f"/{uuid.uuid4().hex}", "shaky://x")


@pytest.mark.parametrize("make", [TimeoutError, ConnectionResetError, partial(StatusError, 503)])
def test_transient_errors_of_a_driver_are_waited_out(make: Callable[[], Exception]) -> None:
    store = shaky()
    for name, expected in (("a", None), ("b", "")):
        Shaky.errors[:] = [make(), make()]
        store.replace(name, b"1", "t", expected=expected)
    with store.open("b") as reader:
        Shaky.errors[:] = [make(), make()]
        assert bytes(reader.read(0, 1)) == b"1"
    Shaky.errors[:] = [make(), make(), make(), make()]
    with pytest.raises(type(make())):
        store.token("a")
    assert len(Shaky.errors) == 1


def test_lost_answer_to_an_exclusive_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrived; the second try finds our own object there."""
    store = shaky()
    monkeypatch.setattr(Shaky, "info", MemoryFileSystem.info)
    monkeypatch.setattr(Shaky, "cat_file", MemoryFileSystem.cat_file)
    Shaky.errors[:] = [TimeoutError()]
    store.replace("m", b"ours", "t", expected="")
    assert Shaky.errors == []
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"theirs", "t", expected="")


def test_other_errors_of_a_driver_are_raised_at_once() -> None:
    Shaky.errors[:] = [StatusError(403)]
    with pytest.raises(StatusError):
        shaky().token("m")
    assert Shaky.errors == []


def test_sftp_connection_that_broke_is_made_anew(sftp: Remote) -> None:
    """Servers close what is idle, and an hour may lie between two saves."""
    url, options = f"{sftp[0]}/{uuid.uuid4().hex}", sftp[1]
    save(url, {"w": torch.ones(2)}, storage_options=options)
    fsspec.filesystem("sftp", host="127.0.0.1", **options).client.close()
    save(url, {"w": torch.zeros(2)}, storage_options=options)
    assert load(url, storage_options=options).state["w"].tolist() == [0, 0]


@pytest.mark.slow
def test_sftp_server_that_stalls_is_given_up() -> None:
    pytest.importorskip("paramiko")
    policy = RetryPolicy(attempts=1, read_timeout=patience(3))
    with sftp_server() as (url, options, process):
        store = open_store(f"{url}/x", options, retry=policy)
        store.probe()
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            store.token("m")


@pytest.mark.s3
def test_bucket_that_does_not_exist(s3_options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="no bucket 'no-such-bucket'"):
        save("s3://no-such-bucket/x", {"w": torch.ones(2)}, storage_options=s3_options)
    with pytest.raises(CheckpointNotFoundError):
        load("s3://no-such-bucket/x", storage_options=s3_options)


def test_threads_take_turns_in_the_files_of_memory_that_they_share() -> None:
    inside, other = threading.Event(), threading.Event()
    seen: list[Any] = []

    def driver() -> Driver:
        return Driver(fsspec.filesystem("memory"), RetryPolicy())

    def hold(fs: Any) -> None:
        inside.set()
        seen.extend([fs, other.wait(0.2)])

    holder = threading.Thread(target=lambda: driver().request_once(hold))
    holder.start()
    assert inside.wait()
    own = driver()
    own.request_once(lambda fs: other.set())
    holder.join()
    assert seen[0] is not own.fs, "fsspec has a filesystem for each thread"
    assert seen[1] is False


DRIVERS = {"gs": "gcsfs", "abfs": "adlfs", "s3": "s3fs", "sftp": "paramiko"}
WITHOUT = """
import sys
from checkpoint_io.storage.open import open_store
for argument in sys.argv[1:]:
    protocol, module = argument.split("=")
    sys.modules[module] = None
    try:
        open_store(f"{protocol}://place/x")
    except ImportError as error:
        print(error)
"""


def test_missing_driver_says_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT, *(f"{k}={v}" for k, v in DRIVERS.items())]
    done = warm.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for line, extra in zip(lines, ("gcs", "azure", "s3", "sftp"), strict=True):
        assert f'pip install "accel-callbacks[{extra}]"' in line


def test_a_file_in_memory_that_goes_while_the_folder_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store("memory://listed-while-removed")
    store.replace("m", b"1", "t")
    usual, tries = MemoryFileSystem.ls, []

    def ls(self: Any, path: str, detail: bool = True, **kwargs: Any) -> Any:
        tries.append(path)
        if len(tries) < 3:
            raise KeyError(path)
        return usual(self, path, detail=detail, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    assert set(store.sizes()) == {"m"}
