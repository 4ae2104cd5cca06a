from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_io import (
    CheckpointConflictError,
    CheckpointError,
    CorruptCheckpointError,
)
from checkpoint_io.storage import local, local_read, local_write
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.buffers import BUFFER_BYTES, BufferPool, aligned
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.local_write import DirectOutput, switch_direct
from tests.support import warm
from tests.support.pairs import pairwise

PIECE = 64 * 1024  # small pieces, so that every boundary is met without much data
SIZES = [0, 1, 4095, 4096, 4097]
SIZES += [n * PIECE + extra for n in (1, 2, 3, 7) for extra in (-1, 0, 1, 4096)]
STORES = ["direct", "no-direct", "tmpfs", "no-buffers", "no-threads"]


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def small_ring(limit: int = 64 * PIECE) -> BufferPool:
    return BufferPool(limit, PIECE)


def put(store: LocalStore, name: str, data: bytes, *steps: int, size: int | None = None) -> None:
    """Write data in pieces of these lengths, again and again."""
    view, at, turn = memoryview(data), 0, 0
    with store.create(name, size) as write:
        while at < len(view):
            step = steps[turn % len(steps)] if steps else len(view)
            write(view[at : at + step])
            at, turn = at + step, turn + 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t for t in threading.enumerate() if t.name == "checkpoint_io"] == []


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalStore]:
    pool = small_ring()
    folder = tmp_path / "c"
    if request.param == "no-direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "tmpfs":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm")
        folder = Path("/dev/shm") / f"checkpoint-io-{os.getpid()}-{tmp_path.name}"
    if request.param == "no-buffers":
        pool = small_ring(0)
    if request.param == "no-threads":
        monkeypatch.setattr(threading.Thread, "start", cannot_start)
    yield LocalStore(str(folder), buffers=pool)
    shutil.rmtree(folder, ignore_errors=True)


def cannot_start(self: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


# --- writing -------------------------------------------------------------------------------


# Each size where pages and pieces matter; the other ways to write differ from it in neither.
@pytest.mark.parametrize(
    ("store", "size"),
    [("direct", size) for size in SIZES]
    + [(kind, size) for kind in STORES[1:] for size in (0, 4097, 3 * PIECE, 7 * PIECE + 4096)],
    indirect=["store"],
)
def test_bytes_are_exact_on_every_path(store: LocalStore, size: int) -> None:
    data = content(size)
    put(store, "whole", data)
    put(store, "known", data, size=size)
    put(store, "odd", data, 1000, 3, PIECE + 1)
    for name in ("whole", "known", "odd"):
        assert Path(store.url, name).read_bytes() == data
    assert store.sizes() == dict.fromkeys(("whole", "known", "odd"), size)


@pytest.mark.parametrize("extra", [-4097, -1, 0, 1, 5000])
def test_real_buffers_and_a_known_size(tmp_path: Path, extra: int) -> None:
    store = LocalStore(str(tmp_path))
    data = content(local_write.RING * BUFFER_BYTES + extra)
    put(store, "f", data, 2**20, size=len(data))
    assert (tmp_path / "f").read_bytes() == data


def test_bytes_are_copied_before_write_returns(store: LocalStore) -> None:
    piece = bytearray(3 * PIECE)
    with store.create("f") as write:
        for value in range(1, 9):
            piece[:] = bytes([value]) * len(piece)
            write(memoryview(piece))
            piece[:] = bytes(len(piece))
    written = Path(store.url, "f").read_bytes()
    assert written == b"".join(bytes([v]) * len(piece) for v in range(1, 9))


def new_file(folder: Path) -> int:
    return os.open(folder / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_direct_io_is_used_up_to_the_tail(tmp_path: Path) -> None:
    descriptor = new_file(tmp_path)
    file = DirectOutput(descriptor)
    if not file.direct:
        pytest.skip("the filesystem of the tests has no direct IO")
    buffer = aligned(PIECE)
    buffer[:] = content(PIECE)
    file.write(buffer)
    assert file.direct
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    file.write(buffer[:5000])
    assert not file.direct
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    file.write(buffer[:100])
    os.close(descriptor)
    data = content(PIECE)
    assert (tmp_path / "f").read_bytes() == data + data[:5000] + data[:100]


def test_filesystem_that_refuses_only_at_the_write(tmp_path: Path) -> None:
    """Memory that is not aligned makes the kernel itself refuse."""
    descriptor = new_file(tmp_path)
    file = DirectOutput(descriptor)
    buffer = aligned(PIECE)
    buffer[:] = content(PIECE)
    file.write(buffer[1:8193])
    file.write(buffer)
    os.close(descriptor)
    assert not file.direct
    assert (tmp_path / "f").read_bytes() == content(PIECE)[1:8193] + content(PIECE)


def test_existing_file_and_link_are_not_touched(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    (tmp_path / "victim").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for name in ("victim", "link"):
        with pytest.raises(FileExistsError, match="not overwritten"):
            put(store, name, b"new")
    assert (tmp_path / "victim").read_bytes() == b"old"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("store", "written", "error"),
    pairwise(STORES, [0, 10, 10 * PIECE], [ValueError("no"), KeyboardInterrupt()]),
    indirect=["store"],
)
def test_block_that_raises_removes_the_file(
    store: LocalStore, error: BaseException, written: int
) -> None:
    open_before = descriptors()

    def fail() -> None:
        with store.create("f") as write:
            write(memoryview(bytes(written)))
            raise error

    with pytest.raises(type(error)):
        fail()
    assert store.sizes() == {}
    assert descriptors() == open_before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def test_many_open_files_stay_inside_the_bound(tmp_path: Path) -> None:
    taken: list[int] = []

    class Counting(BufferPool):
        out = 0

        def take(self) -> memoryview[int] | None:
            buffer = super().take()
            self.out += buffer is not None
            taken.append(self.out)
            return buffer

        def give(self, buffers: list[memoryview[int]]) -> None:
            self.out -= len(buffers)
            super().give(buffers)

    pool = Counting(4 * PIECE, PIECE)
    store = LocalStore(str(tmp_path), buffers=pool)
    data = {f"f{i}": content(5 * PIECE + i, i) for i in range(7)}

    def nested(names: list[str]) -> None:
        if names:
            with store.create(names[0]) as write:
                write(memoryview(data[names[0]])[: 2 * PIECE])
                nested(names[1:])
                write(memoryview(data[names[0]])[2 * PIECE :])

    nested(list(data))
    assert max(taken) == 4
    assert pool.out == 0
    assert pool.take() is not None
    assert all((tmp_path / name).read_bytes() == expected for name, expected in data.items())


def test_buffers_are_kept_during_a_save_and_freed_after_it(tmp_path: Path) -> None:
    pool = small_ring()
    store = LocalStore(str(tmp_path), buffers=pool)
    with store.lock():
        put(store, "a", bytes(2 * PIECE))
        first = pool.take()
        assert first is not None
        mark = first.obj
        pool.give([first])
        put(store.child("sub"), "b", bytes(PIECE))
        assert any(buffer.obj is mark for buffer in pool._free)
    assert pool._free == []


MEMORY = """
import sys
from checkpoint_io.storage.local import LocalStore

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

piece, store = memoryview(bytearray(2**20)), LocalStore(sys.argv[1])
with store.create("warm", 2**20) as write:
    write(piece)
before = peak()
with store.create("f", 80 * 2**20) as write:
    for _ in range(80):
        write(piece)
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux' /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    run = warm.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < local_write.RING * BUFFER_BYTES / 2**20 + 8


# --- what the disk may do ------------------------------------------------------------------

LIMITED = """
import errno, resource, signal, sys, threading
from checkpoint_io.storage.local import LocalStore

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 2**20 + 100,) * 2)
store, piece, written = LocalStore(sys.argv[1]), memoryview(bytes(2**20)), 0
try:
    with store.create("f", int(sys.argv[2]) * 2**20) as write:
        for _ in range(int(sys.argv[2])):
            write(piece)
            written += 1
except OSError as error:
    print(error.errno == errno.EFBIG, written, threading.active_count(), store.sizes())
    print(error)
"""


@pytest.mark.parametrize("megabytes", [200, 41])
def test_error_of_the_writing_thread_is_raised(tmp_path: Path, megabytes: int) -> None:
    """A limit on file size makes the kernel refuse; met in the middle, or when all is written."""
    run = warm.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(megabytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    facts, text = run.stdout.splitlines()
    same, written, threads, left = facts.split(maxsplit=3)
    assert (same, threads, left) == ("True", "1", "{}")
    assert int(written) == 41 if megabytes == 41 else int(written) < 100
    assert f"{tmp_path}/f" in text
    assert "max_shard_size" in text


@pytest.fixture(params=["tmpfs", "ext4", "xfs"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of its own, with room for little."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(folder)]]
    if request.param != "tmpfs":
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate((24 if request.param == "ext4" else 320) * 2**20)
        make = ["mkfs.ext4", "-q", "-F"] if request.param == "ext4" else ["mkfs.xfs", "-q"]
        commands = [[*make, str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    if os.name == "nt" or os.getuid() != 0 or not all(shutil.which(c[0]) for c in commands):
        pytest.skip("this machine does not let the test mount a filesystem")
    for command in commands:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine does not let the test mount a filesystem")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_explained_and_takes_nothing_with_it(tiny: Path) -> None:
    store = LocalStore(str(tiny), buffers=BufferPool(buffer_bytes=2**20))
    store.replace("manifest.json", b"old", "manifest.tmp")
    with pytest.raises(OSError, match="the disk is full: make room") as caught:
        put(store, "f", bytes(60 * 2**20), 3 * 2**20 + 5)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tiny / "f")
    assert store.sizes() == {"manifest.json": 3}
    put(store, "g", bytes(2**20 + 1))  # the room was given back
    assert (tiny / "manifest.json").read_bytes() == b"old"
    read_only = ["mount", "-o", "remount,ro", str(tiny)]
    if subprocess.run(read_only, capture_output=True).returncode:
        return
    with pytest.raises(CheckpointError, match="read-only"):
        store.probe()
    with pytest.raises(OSError, match="read-only"):
        store.remove("g")


@pytest.mark.parametrize("size", [10, 5 * PIECE])
def test_folder_removed_in_the_middle(store: LocalStore, size: int) -> None:
    def write_and_remove(again: bool) -> None:
        with store.create("f") as write:
            write(memoryview(bytes(size)))
            shutil.rmtree(store.url)
            if again:
                os.mkdir(store.url)
            write(memoryview(bytes(size)))

    for again in (False, True):
        with pytest.raises(FileNotFoundError, match="folder is gone"):
            write_and_remove(again)


def test_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot save to {tmp_path}/c/d"):
        LocalStore(str(tmp_path / "c" / "d")).probe()


# --- names ---------------------------------------------------------------------------------


def test_probe_leaves_nothing(store: LocalStore) -> None:
    store.probe()
    assert store.sizes() == {}


def test_token_tells_versions_apart(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    tokens = [store.token("m"), LocalStore(str(tmp_path / "none")).token("m")]
    assert tokens == ["", ""]
    for _ in range(50):
        store.replace("m", b"same", "m.tmp", tokens[-1])
        tokens.append(store.token("m"))
    assert len(set(tokens)) == 51
    for stale in ("", tokens[-2]):
        with pytest.raises(CheckpointConflictError, match="changed by another save"):
            store.replace("m", b"late", "m.tmp", stale)
    times = (tmp_path / "m").stat()
    (tmp_path / "m").write_bytes(b"SAME")
    os.utime(tmp_path / "m", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.token("m") not in tokens
    store.remove("m")
    with pytest.raises(CheckpointConflictError):
        store.replace("m", b"late", "m.tmp", tokens[-1])
    assert store.sizes() == {}


def test_removal_is_durable_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    names = ["manifest.json", "b", "a", "c"]
    for name in names:
        put(store, name, b"1")
    events: list[str] = []
    unlink, sync = os.unlink, local.sync_folder

    def note_unlink(path: str) -> None:
        unlink(path)
        events.append(os.path.basename(path))

    def note_sync(path: str) -> None:
        events.append("sync")
        sync(path)

    monkeypatch.setattr(os, "unlink", note_unlink)
    monkeypatch.setattr(local, "sync_folder", note_sync)
    store.remove_many(["absent", *names])
    assert events == ["manifest.json", "sync", "b", "a", "c", "sync"]
    events.clear()
    store.remove_many(names)
    LocalStore(str(tmp_path / "none")).remove("a")
    assert events == []


def test_removal_stops_at_what_cannot_be_removed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    put(store, "a", b"1")
    put(store, "b", b"1")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        store.remove_many(["a", "folder", "b"])
    assert store.sizes() == {"b": 1}


def test_listing_while_files_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stays").write_bytes(b"12")
    (tmp_path / "goes").write_bytes(b"1")
    (tmp_path / "sub").mkdir()
    scan = LocalStore._scan

    def scan_then_remove(store: LocalStore) -> list[os.DirEntry[str]]:
        entries = scan(store)
        (tmp_path / "goes").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(LocalStore, "_scan", scan_then_remove)
    assert LocalStore(str(tmp_path)).sizes() == {"stays": 2}
    assert LocalStore(str(tmp_path)).folders() == ["sub"]
    assert LocalStore(str(tmp_path / "none")).sizes() == {}
    assert LocalStore(str(tmp_path / "stays")).folders() == []


# --- reading -------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    found = {f"f{i}": content(size, i) for i, size in enumerate([0, 10, 3 * 2**20 + 7, 9 * 2**20])}
    for name, data in found.items():
        (tmp_path / name).write_bytes(data)
    return found


def some_spans(files: dict[str, bytes], count: int) -> list[Span]:
    generator = random.Random(3)
    spans = []
    for _ in range(count):
        name = generator.choice(sorted(files))
        begin, end = sorted(generator.randint(0, len(files[name])) for _ in range(2))
        spans.append(Span(name, begin, end))
    return spans


@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize("threads", [True, False])
def test_fetch_delivers_every_span_once(
    tmp_path: Path,
    files: dict[str, bytes],
    count: int,
    threads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", cannot_start)
    spans = some_spans(files, count)
    got: list[tuple[int, bytes]] = []
    LocalStore(str(tmp_path)).fetch(spans, lambda index, data: got.append((index, bytes(data))))
    assert sorted(index for index, _ in got) == list(range(count))
    assert all(data == files[spans[i].name][spans[i].begin : spans[i].end] for i, data in got)


def test_fetch_uses_threads_for_much_and_none_for_little(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    store = LocalStore(str(tmp_path))
    callers: set[int] = set()
    met = threading.Barrier(local_read.THREADS)

    def deliver(index: int, data: memoryview[int]) -> None:
        callers.add(threading.get_ident())
        if index < local_read.THREADS:
            met.wait()  # each of the first spans on a thread of its own, or this never ends

    store.fetch([Span("f3", n * 2**20, (n + 1) * 2**20) for n in range(9)], deliver)
    assert len(callers) == local_read.THREADS
    callers.clear()
    store.fetch([Span("f2", 0, 100)] * 20, lambda index, data: callers.add(threading.get_ident()))
    assert callers == {threading.get_ident()}


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_error_in_deliver_stops_the_others(
    tmp_path: Path, files: dict[str, bytes], error: BaseException
) -> None:
    delivered: list[int] = []

    def deliver(index: int, data: memoryview[int]) -> None:
        if index == 5:
            raise error
        delivered.append(index)

    open_before = descriptors()
    with pytest.raises(type(error)) as caught:
        LocalStore(str(tmp_path)).fetch([Span("f3", 0, 2**20)] * 5000, deliver)
    assert caught.value is error
    assert 5 <= len(delivered) < 4000
    assert descriptors() == open_before


@pytest.mark.parametrize("damage", ["truncated", "missing", "link", "fifo", "folder"])
@pytest.mark.parametrize("length", [4, 2**20])
def test_file_that_is_not_what_it_was(
    tmp_path: Path, files: dict[str, bytes], damage: str, length: int
) -> None:
    bad = tmp_path / "f3"
    if damage == "truncated":
        os.truncate(bad, 5 * length + length // 2)
    else:
        bad.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(files["f3"])
        bad.symlink_to(tmp_path / "elsewhere")
    if damage == "fifo":
        os.mkfifo(bad)
    if damage == "folder":
        bad.mkdir()
    spans = [Span("f3", n * length, (n + 1) * length) for n in range(9)]
    with pytest.raises(CorruptCheckpointError, match="f3"):
        LocalStore(str(tmp_path)).fetch(spans, lambda index, data: None)


def test_absurd_span_is_damage_and_takes_no_memory(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(CorruptCheckpointError, match="f1: truncated"):
        LocalStore(str(tmp_path)).fetch([Span("f1", 0, 2**50)], lambda index, data: None)


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    names = [f"g{number:03}" for number in range(200)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100_000))
    before = descriptors()
    seen: list[int] = []
    spans = [Span(name, 0, 100_000) for name in names]
    LocalStore(str(tmp_path)).fetch(spans, lambda index, data: seen.append(descriptors()))
    assert len(seen) == 200
    assert max(seen) <= before + 2 * local_read.THREADS  # a count opens one in each thread too


def test_interrupt_waits_for_what_still_uses_the_memory(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    ended = []
    readers = threading.Barrier(local_read.THREADS)

    def deliver(index: int, data: memoryview[int]) -> None:
        if index < local_read.THREADS:  # which all read at once
            if readers.wait() == 0:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        ended.append(len(bytes(data)))

    with pytest.raises(KeyboardInterrupt):
        LocalStore(str(tmp_path)).fetch([Span("f3", 0, 2**20)] * 60, deliver)
    assert len(ended) >= local_read.THREADS


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(2**20))
    with LocalStore(str(tmp_path)).open("f") as reader:
        assert bytes(reader.read(10, 10)) == b""
        assert len(reader.read(0, 2**20)) == reader.size == 2**20
        os.truncate(tmp_path / "f", 1000)
        with pytest.raises(CorruptCheckpointError, match="truncated"):
            reader.read(0, 2**20)


# --- reads straight into their targets -----------------------------------------------------

needs_preadv = pytest.mark.skipif(not local_read.can_read_into(), reason="there is no preadv here")


@needs_preadv
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("begin", [0, 1, 4095, 4096, 70_001])
def test_views_are_filled_past_the_page_cache_and_through_it(
    tmp_path: Path, begin: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random.Random(0).randbytes(3 * 2**20 + 123)
    (tmp_path / "f").write_bytes(content)
    monkeypatch.setattr(local_read.LocalReader, "_first_reader", lambda *_: cold)
    for end in (len(content), len(content) - 1, 2 * 2**20):  # of the file, or in a block
        cuts = [begin, begin + 3, begin + 3, begin + 2**20 + 7, end]
        memory = [bytearray(high - low) for low, high in itertools.pairwise(cuts)]
        LocalStore(str(tmp_path)).fetch_into(
            [Span("f", begin, end)], [[memoryview(part) for part in memory]], lambda index: None
        )
        assert b"".join(memory) == content[begin:end]


@needs_preadv
@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct IO")
def test_a_filesystem_that_refuses_direct_reads_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, read, refused = random.Random(0).randbytes(2**20), os.preadv, []

    def preadv(descriptor: int, views: Any, *rest: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, views, *rest)

    (tmp_path / "f").write_bytes(content)
    monkeypatch.setattr(local_read.LocalReader, "_first_reader", lambda *_: True)
    monkeypatch.setattr(local_read, "switch_direct", direct_or_skip)
    monkeypatch.setattr(os, "preadv", preadv)
    memory = bytearray(2**20)
    LocalStore(str(tmp_path)).fetch_into(
        [Span("f", 0, 2**20)], [[memoryview(memory)]], lambda index: None
    )
    assert refused
    assert memory == content


def direct_or_skip(descriptor: int, on: bool) -> bool:
    if not switch_direct(descriptor, on):
        pytest.skip("this filesystem has no direct IO")
    return True


@needs_preadv
def test_only_the_first_reader_goes_past_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(3 * 2**20))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    LocalStore(str(tmp_path)).forget("f")
    with LocalStore(str(tmp_path)).open("f") as reader:
        if not reader._first_reader(2**21 + 2**19):
            pytest.skip("this filesystem does not tell what it has cached")
        reader.read_into(2**20 + 5, [memoryview(bytearray(2**20))])
        assert not reader._first_reader(2**20 + 5)  # the next one fills the cache
        assert reader._first_reader(2**20 + 400_000)  # what was read directly is not in it


@needs_preadv
@pytest.mark.parametrize("cold", [True, False])
def test_file_that_shrinks_while_views_are_filled(
    tmp_path: Path, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(bytes(2**21))
    monkeypatch.setattr(local_read.LocalReader, "_first_reader", lambda *_: cold)
    with LocalStore(str(tmp_path)).open("f") as reader:
        os.truncate(tmp_path / "f", 1000)
        with pytest.raises(CorruptCheckpointError, match="truncated, ends at byte 1000"):
            reader.read_into(0, [memoryview(bytearray(2**21))])
