"""DeviceStats: what it reads, and that it does without what is not there."""

from __future__ import annotations

import sys
import threading

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


class Driver:
    """Stands in for NVML: readings that note their thread, and can hang or fail."""

    def __init__(self, monkeypatch) -> None:
        self.threads: list[threading.Thread] = []
        self.calls = 0
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False
        monkeypatch.setattr(
            "accel_callbacks.callbacks.device_stats._driver_readings",
            lambda device: {"power_w": self.power, "absent": self.absent},
        )

    def power(self) -> float:
        self.threads.append(threading.current_thread())
        self.calls += 1
        assert self.answers.wait()
        if self.fails:
            raise RuntimeError("driver lost")
        return 300.0

    def absent(self) -> float:
        raise RuntimeError("not supported")

    def settle(self) -> None:
        for thread in self.threads:
            if thread is not threading.main_thread():
                thread.join()


def logged_rows(kit, driver: Driver | None, steps: int = 6) -> list[bool]:
    """Train, and return for each log whether the driver's figure was in it."""
    rows, log = [], kit.accel.log
    kit.accel.log = lambda values, *args, **kwargs: (
        rows.append("device/power_w" in values),
        log(values, *args, **kwargs),
    )[-1]
    with kit.accel.run("stats"):
        for index, batch in enumerate(kit.train):
            if index < steps:
                kit.step(batch)
                if driver is not None:
                    driver.settle()
    return rows


def test_the_driver_is_asked_a_step_before_and_never_on_the_training_thread(training, monkeypatch):
    driver = Driver(monkeypatch)
    assert logged_rows(training(DeviceStats(every_n_steps=3), batches=6), driver) == [True, True]
    assert driver.threads
    assert threading.main_thread() not in driver.threads
    assert driver.calls == 3  # once more at first, to see whether it answers


def test_a_driver_that_hangs_holds_no_step(training, monkeypatch):
    driver = Driver(monkeypatch)
    driver.answers.clear()
    try:
        rows = logged_rows(training(DeviceStats(every_n_steps=2), batches=6), None)
        assert rows == [False] * 3
        assert len(set(driver.threads)) == 1  # it is not asked again meanwhile
    finally:
        driver.answers.set()
        driver.settle()


def test_a_driver_that_fails_later_is_said_once_and_left_out(training, monkeypatch):
    driver = Driver(monkeypatch)
    kit = training(DeviceStats(every_n_steps=2), batches=6)
    power = driver.power

    def failing() -> float:
        driver.fails = driver.calls >= 2
        return power()

    driver.power = failing
    with pytest.warns(UserWarning, match="power_w cannot be read any more") as seen:
        assert logged_rows(kit, driver) == [True, False, False]
    assert sum("cannot be read" in str(one.message) for one in seen) == 1
    assert "absent" not in "".join(str(one.message) for one in seen)


def test_only_the_main_process_asks_the_driver(training, monkeypatch):
    driver = Driver(monkeypatch)
    kit = training(DeviceStats(every_n_steps=2), batches=6)
    monkeypatch.setattr(type(kit.accel.current_run), "is_global_zero", False)
    assert logged_rows(kit, driver) == [False] * 3
    assert driver.calls == 0


def test_read_has_the_figures_of_the_driver_too(monkeypatch):
    driver = Driver(monkeypatch)
    values = DeviceStats(cpu=False).read(torch.device("cpu"))
    assert values == {"device/power_w": 300.0}
    assert threading.main_thread() in driver.threads


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
