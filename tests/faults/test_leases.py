"""Three jobs that start at once in one folder, on a disk and in a store: no row is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faultkit import breakage as wire
from faultkit.proxy import Proxy, Rule

from accel_callbacks.cli.main import main
from checkpoint_io.storage.lease import LEASE
from tests.servers import KEY, REGION, SECRET, S3Server
from tests.support import warm

FOREVER = None

#: Trains two steps, once a line says so.
JOB = """
import sys
import torch
from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import Checkpoint

folder, name, on_conflict = sys.argv[1:]
accel = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(folder, on_conflict=on_conflict),
    log_with="jsonl",
    callbacks=[Checkpoint(every_n_steps=2, async_save=False)],
)
model, optimizer = accel.prepare(*[m := torch.nn.Linear(1, 1), torch.optim.SGD(m.parameters(), 1)])
with accel.run(name, resume="anyway"):
    print("began", flush=True)
    sys.stdin.readline()
    for _ in range(2):
        with accel.accumulate(model):
            accel.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
        accel.log({name: 1.0})
"""

Job = subprocess.Popen[str]
Start = Callable[[str], list[Job]]


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "run")
    return str(request.getfixturevalue("proxied")[0])


@pytest.fixture
def proxied(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    """A folder of a store whose requests may be refused."""
    proxy = Proxy(moto.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield moto.url(uuid.uuid4().hex), proxy
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    proxy.close()


@pytest.fixture
def start(folder: str) -> Iterator[Start]:
    yield from starts(folder)


def starts(folder: str) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(on_conflict: str) -> list[Job]:
        for number in range(3):
            words = [sys.executable, "-c", JOB, folder, f"job{number}", on_conflict]
            pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            jobs.append(warm.Popen(words, text=True, **pipes))
        return jobs

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def rows(folder: str) -> list[tuple[int, str]]:
    """Step and job of each row."""
    with fsspec.open(f"{folder}/metrics.jsonl", "rt") as file:
        logged = [json.loads(line) for line in file]
    return [
        (row["step"], name)
        for row in logged
        for name in row.get("values") or row
        if name.startswith("job")
    ]


def exists(path: str) -> bool:
    fs, key = fsspec.core.url_to_fs(path)
    fs.invalidate_cache()
    return bool(fs.exists(key))


def test_one_of_three_trains(start: Start, folder: str) -> None:
    jobs = start("refuse")
    began = [job for job in jobs if job.stdout.readline()]
    assert len(began) == 1
    for job in jobs:
        _, errors = job.communicate("\n")
        assert (job.returncode == 0) is (job in began), errors
        if job not in began:
            assert f"LeaseError: {folder}" in errors
            assert f"process {began[0].pid} on " in errors
    name = f"job{jobs.index(began[0])}"
    assert rows(folder) == [(1, name), (2, name)]


def test_three_that_wait_train_one_after_the_other(start: Start, folder: str) -> None:
    jobs = start("wait")
    for job in jobs:
        job.stdin.close()
        job.stdin = None
    for job in jobs:
        _, errors = job.communicate()
        assert job.returncode == 0, errors
    logged = rows(folder)
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert Counter(name for _, name in logged) == {"job0": 2, "job1": 2, "job2": 2}
    assert logged[::2] == [(step - 1, name) for step, name in logged[1::2]]


@pytest.mark.parametrize(
    ("on_conflict", "subfolder"), [("take_over", ""), ("wait", "checkpoints/")]
)
def test_none_of_three_trains_beside_a_damaged_record(
    start: Start, folder: str, on_conflict: str, subfolder: str
) -> None:
    record = f"{folder}/{subfolder}{LEASE}"
    with fsspec.open(record, "wb", auto_mkdir=True) as file:
        file.write(b'["process 7"]')
    for job in start(on_conflict):
        _, errors = job.communicate()
        assert job.returncode == 1
        assert f"LeaseError: {record} says which process writes to its folder" in errors
        assert "it is damaged" in errors
        assert "then remove that file" in errors
    assert not exists(f"{folder}/metrics.jsonl")
    with fsspec.open(record, "rb") as file:
        assert file.read() == b'["process 7"]'


@pytest.mark.s3
@pytest.mark.parametrize("method", ["HEAD", "PUT"])
def test_none_of_three_trains_where_the_record_is_denied(
    proxied: tuple[str, Proxy], method: str
) -> None:
    url, proxy = proxied
    with fsspec.open(f"{url}/{LEASE}", "wb") as file:
        file.write(RELEASED)
    proxy.rules = [Rule(rf"^{method} .*{LEASE}", wire.refuse("AccessDenied"), times=FOREVER)]
    for start in starts(url):
        for job in start("refuse"):
            _, errors = job.communicate()
            assert job.returncode == 1
            assert f"LeaseError: {url}/{LEASE} says which process writes to its folder" in errors
            assert "or allow this user to read and write it" in errors
    assert not exists(f"{url}/metrics.jsonl")


#: Of a run that has ended.
RELEASED = json.dumps(
    {
        **dict.fromkeys(("run_id", "run_name", "host", "machine", "started", "since"), "before"),
        **{"format": 1, "number": 1, "renewals": 3, "pid": 17, "interval": 5.0, "released": True},
    }
).encode()


@pytest.mark.s3
def test_a_store_that_takes_no_record_is_told_once_and_by_accel_runs(
    proxied: tuple[str, Proxy], capsys: pytest.CaptureFixture[str]
) -> None:
    url, proxy = proxied
    proxy.rules = [Rule(rf"^PUT .*{LEASE}", wire.refuse("AccessDenied"), times=FOREVER)]
    words = [sys.executable, "-c", JOB, url, "job0", "refuse"]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    done = warm.Popen(words, text=True, **pipes)
    _, errors = done.communicate("\n")
    assert done.returncode == 0, errors
    for place in (url, f"{url}/checkpoints"):
        assert errors.count(f"UserWarning: {place}: no lease can be had there") == 1
    assert main(["runs", url]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unguarded: ")]
    assert [line.split(" had no lease in ")[1].split(" ")[0] for line in told] == [
        url,
        f"{url}/checkpoints",
    ]
    assert all("AccessDenied" in line for line in told)
