"""The lease of a folder, held by real processes: who gets it, who waits, who learns of its loss."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from checkpoint_io import CheckpointWarning, Lease, LeaseError
from checkpoint_io.storage import lease as lease_module
from checkpoint_io.storage.lease import LEASE
from checkpoint_io.storage.open import Store, open_store
from tests.support import warm

INTERVAL = 0.1  # of renewals; without six of them a holder on another machine is dead

#: Takes a method of a lease and its arguments from each line, and answers with what came of it.
HOLDER = """
import datetime, json, os, sys, time
from checkpoint_io import Lease
from checkpoint_io.storage import lease as module

url, how = sys.argv[1], json.loads(sys.argv[2])
if how["user"]:
    os.setgroups([])
    os.setgid(how["user"])
    os.setuid(how["user"])

if how["machine"]:
    module._pid_namespace = lambda: how["machine"]

class Clock(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return super().now(zone) + datetime.timedelta(days=how["days"])

module.datetime = Clock
time.time = lambda at=time.time: at() + 86400 * how["days"]

if how["stands"]:
    from types import SimpleNamespace
    module.time = SimpleNamespace(**vars(time))
    module.time.monotonic = lambda at=time.monotonic(): at

if how["lag"]:
    class Eventual:
        compares = False

        def __init__(self, store):
            self._store, self._seen = store, {}

        def __getattr__(self, name):
            return getattr(self._store, name)

        def _stale(self, name, look):
            at, value = self._seen.get(name, (0.0, None))
            if time.monotonic() - at > how["lag"]:
                value = look()
                self._seen[name] = time.monotonic(), value
            if isinstance(value, Exception):
                raise value
            return value

        def token(self, name):
            return self._stale("token", lambda: self._store.token(name))

        def open(self, name):
            def look():
                try:
                    with self._store.open(name) as reader:
                        return bytes(reader.read(0, reader.size))
                except FileNotFoundError as error:
                    return error
            data = self._stale("data", look)
            from contextlib import nullcontext
            from types import SimpleNamespace
            return nullcontext(SimpleNamespace(size=len(data), read=lambda a, b: data[a:b]))

        def replace(self, name, data, temporary, expected=None):
            self._store.replace(name, data, temporary)

    module.open_store = lambda url, options, at=module.open_store: Eventual(at(url, options))
    module._SETTLE = 3 * how["lag"]

lease = Lease(url, run_name=how["name"], storage_options=how["options"], interval=how["interval"])
print("ready", flush=True)
for line in sys.stdin:
    method, *words = line.split()
    try:
        value = getattr(lease, method)(*words)
        answer = "done" if value is None or value is lease else f"in the way: {value}"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(answer, flush=True)
"""


class Holder:
    """A process with a lease."""

    def __init__(self, url: str, name: str, **how: Any) -> None:
        given = {"machine": "", "days": 0, "lag": 0, "options": None, "stands": False}
        given |= {"interval": INTERVAL, "user": 0}
        words = json.dumps({**given, "name": name, **how})
        self.process = warm.Popen(
            [sys.executable, "-c", HOLDER, url, words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        assert self.answer() == "ready"

    def ask(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return str(self.process.stdout.readline()).strip()

    def tell(self, line: str) -> str:
        self.ask(line)
        return self.answer()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)


Start = Callable[..., Holder]


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Start holders of one folder, on a disk and in a bucket."""
    url, options = str(tmp_path / "run"), None
    if request.param == "s3":
        options = request.getfixturevalue("s3_options")
        url = f"s3://bucket/{uuid.uuid4().hex}"
    yield from holders(url, options)


@pytest.fixture
def start_on_disk(tmp_path: Path) -> Iterator[Start]:
    yield from holders(str(tmp_path / "run"), None)


def holders(url: str, options: Any) -> Iterator[Start]:
    started: list[Holder] = []

    def begin(name: str, **how: Any) -> Holder:
        started.append(Holder(url, name, options=options, **how))
        return started[-1]

    yield begin
    for holder in started:
        holder.process.kill()
        holder.process.communicate()


@pytest.mark.first
def test_a_living_holder_is_named_and_its_end_frees_the_folder(start: Start) -> None:
    first, second = start("digits"), start("other")
    # By its clock no renewal is late.
    away = start("away", machine="another", stands=True)
    assert first.tell("acquire") == "done"
    for rival in (second, away):  # of another machine, only its renewals are seen
        refusal = rival.tell("acquire")
        assert refusal.startswith("LeaseError: ")
        for word in ("run 'digits'", f"process {first.pid} on {os.uname().nodename} since 20"):
            assert word in refusal
        assert 'on_conflict="wait"' in refusal
    away.ask("acquire wait")
    time.sleep(3 * INTERVAL)
    assert first.tell("check") == "done"
    first.tell("release")
    assert away.answer() == "done"
    assert second.tell("acquire").startswith("LeaseError: ")


@pytest.mark.parametrize("days", [-400, 400])
def test_a_killed_holder_is_dead_at_once_here_and_after_some_renewals_elsewhere(
    start_on_disk: Start, days: int
) -> None:
    """Whatever the clocks of the two say: none is compared with another."""
    first, second = start_on_disk("digits", days=days), start_on_disk("again")
    away = start_on_disk("away", machine="another")
    assert first.tell("acquire") == "done"
    first.send(signal.SIGKILL)
    while second.tell("attempt").startswith("LeaseError"):  # until the kill has arrived
        time.sleep(0.01)
    assert second.tell("check") == "done"
    second.send(signal.SIGKILL)
    assert away.tell("attempt").startswith("in the way: run 'again'")
    began = time.monotonic()
    assert away.tell("acquire") == "done"
    assert time.monotonic() - began >= 5 * INTERVAL
    assert away.tell("check") == "done"


def test_a_stopped_holder_that_comes_back_has_lost(start: Start) -> None:
    first, here = start("digits"), start("here")
    away = start("away", machine="another")
    assert first.tell("acquire") == "done"
    first.send(signal.SIGSTOP)
    assert here.tell("acquire").startswith("LeaseError")  # its process may go on any time
    assert away.tell("acquire") == "done"
    first.send(signal.SIGCONT)
    assert f"was taken over by run 'away' in process {away.pid}" in first.tell("check")
    time.sleep(3 * INTERVAL)
    assert away.tell("check") == "done"
    first.tell("release")
    assert away.tell("check") == "done"
    assert first.tell("check") == "done"  # it holds nothing that it could have lost


def test_taking_over_from_a_living_holder(start_on_disk: Start) -> None:
    first, second = start_on_disk("digits"), start_on_disk("other")
    assert first.tell("acquire") == "done"
    assert second.tell("acquire take_over") == "done"
    assert "was taken over by run 'other'" in first.tell("check")
    second.tell("release")
    # whoever wakes up after all is over learns it too
    assert "which has ended" in first.tell("check")


@pytest.mark.first
def test_of_several_that_start_at_once_one_wins(start: Start) -> None:
    race([start(f"job {number}", machine=f"host {number}") for number in range(4)], 0)


def test_one_wins_in_a_store_without_conditions_whose_reads_lag(start_on_disk: Start) -> None:
    lag = 0.2
    race([start_on_disk(f"job {n}", machine=f"host {n}", lag=lag) for n in range(4)], lag)


def race(jobs: list[Holder], lag: float) -> None:
    for number in range(2):
        for job in jobs:
            job.ask("attempt")
        won = [job for job in jobs if job.answer() == "done"]
        assert len(won) == 1, number
        time.sleep(2 * lag)
        assert won[0].tell("check") == "done"
        assert won[0].tell("release") == "done"
        time.sleep(2 * lag)


def test_leases_of_one_process_are_one(tmp_path: Path, start_on_disk: Start) -> None:
    rival = start_on_disk("rival")
    leases = [Lease(tmp_path / "run", run_name="sweep", interval=INTERVAL) for _ in range(2)]
    for lease in leases:
        lease.acquire()
    assert leases[0].holder == leases[1].holder
    leases[0].release()
    assert rival.tell("attempt").startswith("LeaseError")
    leases[1].check()
    leases[1].release()
    assert rival.tell("attempt") == "done"
    with pytest.raises(LeaseError, match="run 'rival'"):
        leases[0].acquire()
    number = json.loads((tmp_path / "run" / LEASE).read_text())["number"]
    assert number == 2  # it grows with each holder


def test_the_fork_of_a_holder_may_have_what_it_held(tmp_path: Path) -> None:
    """As a launcher in a notebook forks the processes that train."""
    lease = Lease(tmp_path).acquire()
    if (child := os.fork()) == 0:
        try:
            lease.release()  # which is the parent's to give back
            Lease(tmp_path).acquire()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(LeaseError, match=f"process {child} on"):
        lease.check()
    lease.release()


def test_a_removed_folder_is_not_made_again_until_it_is_written_to(tmp_path: Path) -> None:
    with Lease(tmp_path / "run", interval=0.02) as lease:
        shutil.rmtree(tmp_path / "run")
        time.sleep(0.2)
        assert not (tmp_path / "run").exists()
        lease.check()
        assert (tmp_path / "run" / LEASE).exists()


def test_a_record_without_a_word_holds_nothing(tmp_path: Path) -> None:
    """As a kill before the first word leaves it, or a power cut."""
    with Lease(tmp_path):
        pass
    for data in (b"", b"\0" * 2048, b"\n"):
        (tmp_path / LEASE).write_bytes(data)
        Lease(tmp_path).acquire().release()


def change(name: str, value: Any) -> Callable[[bytes], bytes]:
    """Return what gives a record another value."""
    return lambda whole: json.dumps({**json.loads(whole), name: value}).encode()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda whole: whole[:40],
    "object": lambda whole: b"{}",
    "list": lambda whole: b"[1]",
    "number": lambda whole: b"7",
    "deep": lambda whole: b"[" * 2000,
    "binary": lambda whole: b"\xff\xfe\x00\x80",
    "number_as_text": change("number", "3"),
    "pid_as_text": change("pid", "17"),
    "pid_of_none": change("pid", -1),
    "pid_too_large": change("pid", 1 << 40),
    "list_as_text": change("host", ["node"]),
    "null": change("machine", None),
    "not_a_truth": change("released", "yes"),
    "never": change("interval", float("nan")),
    "another_version": change("format", 2),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_a_damaged_record_is_no_free_folder(tmp_path: Path, name: str, store: str) -> None:
    url = str(tmp_path) if store == "disk" else f"memory://{uuid.uuid4().hex}"
    Lease(url).acquire().release()
    path = f"{url.rstrip('/')}/{LEASE}"
    with fsspec.open(path) as file:
        damaged = DAMAGE[name](file.read())
    with fsspec.open(path, "wb") as file:
        file.write(damaged)
    for action in (
        lambda: Lease(url).acquire(),
        lambda: Lease(url).acquire("wait"),
        lambda: Lease(url).acquire("take_over"),
        lambda: Lease(url).find_holder(),
    ):
        with pytest.raises(LeaseError, match=r"it is damaged .* then remove that file") as caught:
            action()
        assert str(caught.value).startswith(path)
    with fsspec.open(path) as file:
        assert file.read() == damaged
    fs, key = fsspec.core.url_to_fs(path)
    fs.rm_file(key)
    Lease(url).acquire().release()


def test_its_holder_mends_a_damaged_record(tmp_path: Path) -> None:
    with Lease(tmp_path, interval=60) as lease:
        for write in (lease.check, lambda: lease.describe("", "digits")):
            (tmp_path / LEASE).write_bytes(b"[1]")
            write()
            assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("kind", ["dangling link", "link", "folder", "pipe"])
def test_what_is_no_record_is_no_free_folder(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "folder":
        (folder / LEASE).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / LEASE)
    else:
        (folder / LEASE).symlink_to(tmp_path / "elsewhere")
    if kind == "link":
        (tmp_path / "elsewhere").touch()
    why = "it is a link" if "link" in kind else "it is no regular file|Is a directory"
    for action in (lambda: Lease(folder).acquire(), lambda: Lease(folder).find_holder()):
        with pytest.raises(LeaseError, match=f"{LEASE} says .*: ({why})\\. Make sure"):
            action()
    assert (tmp_path / "elsewhere").exists() is (kind == "link")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can setuid")
def test_the_record_of_another_user_is_no_free_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        ordinary = Holder(folder, "other", user=65534)
        assert ordinary.tell("acquire").startswith("PermissionError: ")
        with Lease(folder):
            os.chmod(f"{folder}/{LEASE}", 0o600)
        refusal = ordinary.tell("acquire")
        ordinary.process.kill()
        ordinary.process.communicate()
    assert refusal.startswith(f"LeaseError: {folder}/{LEASE} says which process writes ")
    assert "Permission denied. Make sure that no other run writes there; then remove " in refusal


def test_a_disk_without_locks_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_on_disk: Start
) -> None:
    """Two that start at once both write there, and the later one has it."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    def overtake(seconds: float) -> None:
        assert rival.tell("acquire take_over") == "done"

    rival = start_on_disk("rival")
    monkeypatch.setattr(lease_module, "lock_file", fail)
    clock = SimpleNamespace(**{**vars(time), "sleep": overtake})
    monkeypatch.setattr(lease_module, "time", clock)
    with pytest.raises(LeaseError, match="is in use by run 'rival'"):
        Lease(tmp_path / "run").acquire()


def test_names_are_cut_to_the_room_of_a_record(tmp_path: Path) -> None:
    with Lease(tmp_path, run_name="\u00e9" * 5000, run_id="x" * 100) as lease:
        written = json.loads((tmp_path / LEASE).read_text())
        assert written["format"] == 1, "other versions read it too"
        assert written["run_name"].startswith("\u00e9" * 100)
        assert len((tmp_path / LEASE).read_bytes()) == 2048
        lease.check()
        assert lease.find_holder() is not None


def test_a_lease_that_is_out_of_reach_for_long_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lease_module, "_now", clock.monotonic)
    lease = Lease(tmp_path, interval=60).acquire()
    (tmp_path / LEASE).unlink()
    (tmp_path / LEASE).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clock.now += 360
        lease.check()
    clock.now += 1
    with pytest.warns(CheckpointWarning, match="could not be renewed for 361 s .* no regular file"):
        lease.check(recent=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease.check()
    lease.release()


def test_who_may_be_found(
    tmp_path: Path, start_on_disk: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Lease(tmp_path / "run", interval=INTERVAL)
    assert reader.find_holder() is None
    assert not (tmp_path / "run").exists()  # whoever only looks writes nothing
    for machine in ("", "another"):
        holder = start_on_disk("digits", machine=machine)
        holder.tell("acquire")
        with monkeypatch.context() as patch:
            patch.setattr(lease_module, "time", Clock())  # by which no renewal is late
            found = reader.find_holder()
        assert found is not None
        assert found.pid == holder.pid
        holder.process.kill()
        holder.process.wait()
        reader.find_holder()  # may see the last renewal before the kill, as that of one that lives
        assert reader.find_holder() is None


# --- what is concluded from a record -------------------------------------------------------------


class Clock:
    """A clock that moves where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.mark.parametrize(
    "looks",
    [
        # seconds since the look before, number, renewals: lives, None if not known yet
        [(0, 1, 5, None), (1, 1, 6, True), (1, 1, 6, None), (1, 1, 7, True)],
        [(0, 1, 5, None), *[(2, 1, 5, None)] * 3, (0.5, 1, 5, False)],
        [(0, 1, 5, None), *[(2, 1, 5, None)] * 3, (1, 1, 6, True), (2, 1, 6, None)],
        # this process was stopped, and saw no renewals that there may have been
        [(0, 1, 5, None), *[(100, 1, 5, None)] * 3, (1, 1, 5, False)],
        # a renewal may have been the last one before a kill
        [(0, 1, 5, None), (100, 1, 6, None), (1, 1, 7, True)],
        [(0, 1, 5, None), (2, 1, 6, None), (1.9, 1, 7, True)],
        # an old record, as a read that lags shows it, is no renewal
        [(0, 2, 5, None), (1, 1, 9, None), (1, 2, 4, None), (1, 3, 0, True)],
    ],
)
def test_a_holder_elsewhere_is_judged_by_what_was_seen(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[float, int, int, bool | None]]
) -> None:
    clock, watch = Clock(), lease_module._Watch()
    monkeypatch.setattr(lease_module, "time", clock)
    own = lease_module._this_process()
    for seconds, number, renewals, lives in looks:
        clock.now += seconds
        holder = replace(own, machine="another", interval=1, number=number, renewals=renewals)
        assert watch.lives(holder) is lives
        assert watch.lives(replace(holder, released=True)) is False


def test_an_id_that_another_process_has_got_is_not_the_holder(tmp_path: Path) -> None:
    pid = os.getppid()
    status = lease_module._process_status(pid)
    if status is None:
        pytest.skip("this system does not tell when a process started")
    with Lease(tmp_path):
        whole = json.loads((tmp_path / LEASE).read_text())
    for started, lives in ((status[1], True), ("", True), ("1", False)):
        record = {**whole, "pid": pid, "started": started, "released": False}
        (tmp_path / LEASE).write_text(json.dumps(record))
        if lives:
            with pytest.raises(LeaseError, match=f"process {pid} on .* which is alive"):
                Lease(tmp_path).acquire()
        else:
            Lease(tmp_path).acquire().release()


@pytest.mark.parametrize(
    ("above", "other", "lost"),
    [(-1, True, False), (-1, False, False), (0, False, False), (0, True, True), (1, True, True)],
)
def test_the_higher_number_of_two_records_wins(
    tmp_path: Path, above: int, other: bool, lost: bool
) -> None:
    """A lower one is what a read that lags shows, or a process that was stopped as it renewed."""
    Lease(tmp_path).acquire().release()
    with Lease(tmp_path, interval=60) as lease:
        record = json.loads((tmp_path / LEASE).read_text())
        record["number"] += above
        record["pid"] += other
        (tmp_path / LEASE).write_text(json.dumps(record))
        lease.describe("", "renewed")
        written = json.loads((tmp_path / LEASE).read_text())
        assert (written["run_name"] == "renewed") is not lost
        if lost:
            with pytest.raises(LeaseError, match="was taken over by"):
                lease.check()
        else:
            lease.check()


def test_a_check_that_is_frequent_looks_again_after_a_moment_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(lease_module, "_now", clock.monotonic)
    with Lease(tmp_path, interval=60) as lease:
        record = json.loads((tmp_path / LEASE).read_text())
        (tmp_path / LEASE).unlink()
        clock.now += 1
        lease.check(recent=True)
        assert not (tmp_path / LEASE).exists()
        record["number"] += 1
        (tmp_path / LEASE).write_text(json.dumps(record))
        clock.now += 0.1
        lease.check(recent=True)
        clock.now += 0.15
        with pytest.raises(LeaseError, match="was taken over by"):
            lease.check(recent=True)


@pytest.mark.skipif(sys.platform == "win32", reason="another lock")
def test_a_record_that_another_process_changes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    looks, unlocked_after = [0], 1000

    def look_again(seconds: float) -> None:
        looks[0] += 1
        if looks[0] > unlocked_after:
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)

    clock = SimpleNamespace(**{**vars(time), "sleep": look_again})
    monkeypatch.setattr(lease_module, "time", clock)

    Lease(tmp_path).acquire().release()
    with (tmp_path / LEASE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LeaseError, match=r"another process has locked it .*`fuser`.* remove"):
            Lease(tmp_path).acquire()
        unlocked_after = looks[0] + 5
        Lease(tmp_path).acquire().release()


class Overtaken:
    """A store in which another process writes between each look and each write."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def token(self, name: str) -> str:
        return f"before {self._store.token(name)}"


def test_a_record_that_others_always_change_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_module, "_PAUSE", 0.0)
    url = f"memory://{uuid.uuid4().hex}"
    Lease(url).acquire().release()
    record = lease_module._ObjectRecord(Overtaken(open_store(url)))  # type: ignore[arg-type]
    with pytest.raises(LeaseError, match="other processes change it all the time"):
        record.change(lambda holder: holder, create=False)


def test_an_unknown_way_to_act_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_conflict='steal' is unknown: use 'refuse'"):
        Lease(tmp_path).acquire("steal")  # type: ignore[arg-type]
