"""DeviceStats: what it reads, and that it does without what is not there."""

from __future__ import annotations

import sys

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import DeviceStats

PROCESS = {"device/process_rss_gib", "device/process_cpu_percent"}
MACHINE = {"device/cpu_percent", "device/host_memory_percent"}


def test_it_logs_every_few_steps(training):
    kit = training(DeviceStats(every_n_steps=2), batches=5)
    with kit.accel.run("stats") as run:
        for batch in kit.train:
            kit.step(batch)
    logged = [line.split() for line in kit.recorder.take() if line.startswith("log ")]
    assert [line[-1] for line in logged] == ["2", "4"]
    assert set(run.callback_metrics) >= PROCESS


def test_figures_of_the_process_are_those_of_the_system():
    psutil = pytest.importorskip("psutil")
    stats = DeviceStats()
    stats.read(torch.device("cpu"))
    held = torch.ones(64 << 20)  # 256 MiB
    values = stats.read(torch.device("cpu"))
    rss = psutil.Process().memory_info().rss / (1 << 30)
    assert held.numel()
    assert values["device/process_rss_gib"] == pytest.approx(rss, rel=0.1)
    assert values["device/process_cpu_percent"] >= 0
    assert 0 < values["device/host_memory_percent"] <= 100


def test_without_psutil_the_process_is_read_and_the_machine_is_not(monkeypatch):
    with_it = DeviceStats().read(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    values = DeviceStats().read(torch.device("cpu"))
    assert set(values) >= PROCESS
    assert not MACHINE & set(values)
    rss = "device/process_rss_gib"
    assert values[rss] == pytest.approx(with_it[rss], rel=0.1)
    with pytest.raises(ImportError, match="pip install psutil"):
        DeviceStats(cpu=True)


def test_only_what_was_asked_for(tmp_path):
    assert DeviceStats(cpu=False).read(torch.device("cpu")) == {}
    values = DeviceStats(cpu=False, disk=tmp_path).read(torch.device("cpu"))
    assert list(values) == ["device/disk_free_gib"]
    assert values["device/disk_free_gib"] > 0


def test_a_reading_that_does_not_answer_is_left_out(tmp_path):
    values = DeviceStats(cpu=False, disk=tmp_path / "nowhere").read(torch.device("cpu"))
    assert values == {}


def test_a_reading_that_fails_later_ends_nothing(tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    stats = DeviceStats(cpu=False, disk=folder)
    assert list(stats.read(torch.device("cpu"))) == ["device/disk_free_gib"]
    folder.rmdir()
    with pytest.warns(UserWarning, match="disk_free_gib cannot be read any more"):
        assert stats.read(torch.device("cpu")) == {}
    assert stats.read(torch.device("cpu")) == {}


def test_no_step_is_no_interval():
    with pytest.raises(ValueError, match="every_n_steps=0"):
        DeviceStats(every_n_steps=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_device():
    accel = Accelerator(callbacks=[DeviceStats()])
    before = DeviceStats(cpu=False).read(accel.device)
    held = torch.ones(256 << 20, device=accel.device)  # 1 GiB
    values = DeviceStats(cpu=False).read(accel.device)
    name = "device/memory_allocated_gib"
    assert held.numel()
    assert values[name] - before[name] == pytest.approx(1, abs=0.01)
    assert values["device/memory_peak_gib"] >= values[name]
    assert values["device/memory_reserved_gib"] >= values[name]
    assert values["device/alloc_retries"] >= 0
