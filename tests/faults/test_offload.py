"""A dispatched model on disks and in processes that fail: right weights, or an error that says."""

from __future__ import annotations

import _thread
import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks.models.offload import source
from accel_callbacks.models.offload import window as window_module
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.models.offload.source import WeightReadError
from tests.accel_callbacks.models.offload.adapted import pretrained, saved, words
from tests.accel_callbacks.models.offload.attached import attached

BATCH = torch.stack(words(3))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plain():
    return pretrained().requires_grad_(False)


def is_in_order(model, offload):
    """Return whether nothing is left in slots, and nothing is pinned."""
    absent = [one for one in model.parameters() if isinstance(one, AbsentWeight)]
    pins = [entry.pins for entry in offload.window._entries.values()]
    return len(absent) == len(list(model.parameters())) and not any(pins)


def same(model, plain):
    with torch.no_grad():
        return torch.equal(model(BATCH), plain(BATCH))


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_shards_that_are_replaced_by_others_while_it_runs(plain, tmp_path, direct):
    model, offload = attached(plain, saved(tmp_path / "base"), direct=direct)
    assert same(model, plain)
    saved(tmp_path / "other", seed=9)
    for path in (tmp_path / "other").glob("*.safetensors"):
        os.replace(path, tmp_path / "base" / path.name)
    assert same(model, plain)  # the files are still open
    with pytest.raises(WeightReadError, match="has changed since the model was dispatched"):
        torch.nn.Sequential(*[pickled(model)])(BATCH)
    assert is_in_order(model, offload)


def pickled(model):
    import pickle

    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("how", ["written", "truncated"])
def test_shards_that_are_changed_in_place_while_it_runs(plain, tmp_path, how, direct):
    model, offload = attached(plain, saved(tmp_path), direct=direct)
    assert same(model, plain)
    for path in tmp_path.glob("*.safetensors"):
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(size // 2)
            file.write(b"\x40" * 100) if how == "written" else file.truncate()
    offload.window.trim()  # what is there already is right
    with pytest.raises(WeightReadError, match=r"start: .*safetensors has changed since"):
        model(BATCH)
    assert is_in_order(model, offload)


def before_reads(monkeypatch, happens):
    """Let something happen before each read."""
    really = source._pread_into

    def first(*args):
        happens()
        return really(*args)

    monkeypatch.setattr(source, "_pread_into", first)


def test_a_disk_that_answers_slowly_is_no_hang(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(window_module, "_TICK", 0.01)
    monkeypatch.setattr(source, "_PIECE", 512)
    now = [0.0]
    monkeypatch.setattr(window_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def take_a_while():
        now[0] += 10.0
        time.sleep(0.01)

    before_reads(monkeypatch, take_a_while)
    model, offload = attached(plain, saved(tmp_path), patience=100.0)
    assert same(model, plain)
    assert offload.traffic.waited > 100.0


def test_a_disk_with_a_bad_sector_and_a_second_try(plain, tmp_path, monkeypatch):
    bad = [True]

    def sometimes():
        if bad[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    model, offload = attached(plain, saved(tmp_path))
    before_reads(monkeypatch, sometimes)
    with pytest.raises(WeightReadError, match=r"start in .*: Input/output error at byte \d+"):
        model(BATCH)
    assert is_in_order(model, offload)
    bad[0] = False
    assert same(model, plain)


def test_a_reader_that_hangs_is_an_error_and_the_model_goes_on(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(window_module, "_TICK", 0.01)
    gate, hung, now = threading.Event(), [], [0.0, 0.0]

    def look():
        now[0] += now[1]
        return now[0]

    monkeypatch.setattr(window_module, "time", SimpleNamespace(monotonic=look))

    def hangs_once():
        if threading.current_thread() in hung or not hung:
            hung.append(threading.current_thread())
            now[1] = 60.0  # from one look of whoever waits to the next
            gate.wait()

    model, offload = attached(plain, saved(tmp_path), patience=50.0)
    before_reads(monkeypatch, hangs_once)
    with pytest.raises(WeightReadError, match=r"start: no byte has come from .*safetensors for"):
        model(BATCH)
    now[1] = 0.0
    assert is_in_order(model, offload)
    assert same(model, plain)
    gate.set()
    hung[0].join()
    assert same(model, plain)


def test_ctrl_c_while_it_waits(plain, tmp_path, monkeypatch):
    gate = threading.Event()

    def waits():
        if not gate.is_set():
            _thread.interrupt_main()
            gate.wait()

    model, offload = attached(plain, saved(tmp_path))
    before_reads(monkeypatch, waits)
    with pytest.raises(KeyboardInterrupt):
        model(BATCH)
    gate.set()
    assert is_in_order(model, offload)
    assert same(model, plain)


class Embedded(torch.utils.data.Dataset):
    """Runs the model in the worker."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(BATCH[index % 3 : index % 3 + 1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_workers_run_it_while_it_is_read_ahead_here(plain, tmp_path):
    model, _ = attached(plain, saved(tmp_path))
    assert same(model, plain)
    loader = torch.utils.data.DataLoader(
        Embedded(model), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    for index, found in enumerate(loader):
        torch.testing.assert_close(found, plain(BATCH[index % 3 : index % 3 + 1]))
        assert same(model, plain)


def child(program, *arguments):
    start = """
        import sys, torch
        from tests.accel_callbacks.models.offload.adapted import pretrained, saved, words
        from tests.accel_callbacks.models.offload.attached import attached
        from accel_callbacks.models.offload import source
        from accel_callbacks.models.offload import window
        plain = pretrained().requires_grad_(False)
        batch = torch.stack(words(3))
    """
    text = textwrap.dedent(start) + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_process_whose_reader_hangs_for_good_ends_with_the_error(tmp_path):
    done = child(
        """
        import threading
        model, _ = attached(plain, saved(sys.argv[1]), patience=0.2)
        source._pread_into = lambda *args: threading.Event().wait()
        model(batch)
        """,
        tmp_path,
    )
    assert done.returncode == 1
    assert "no byte has come from" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_process_without_file_descriptors(tmp_path):
    done = child(
        """
        import os, resource
        model, offload = attached(plain, saved(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            model(batch)
        except source.WeightReadError as error:
            print(error)
        for descriptor in taken[-8:]:
            os.close(descriptor)
        with torch.no_grad():
            print(torch.equal(model(batch), plain(batch)))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    error, right = done.stdout.splitlines()
    assert "Too many open files: raise the limit with `ulimit -n`" in error
    assert right == "True"
