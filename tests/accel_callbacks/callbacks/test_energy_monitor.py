"""EnergyMonitor over a stand-in for codecarbon, and over the real one where it is installed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, EnergyMonitor, energy_monitor
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from tests.support.energy import stand_in


def train(folder: Path, monitor: EnergyMonitor, fails: bool = False) -> None:
    accel = Accelerator(
        cpu=True,
        project_dir=folder,
        callbacks=[Checkpoint(every_n_steps=2), monitor],
        log_with="jsonl",
    )
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2)
    model, optimizer, data = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    with accel.run("energy") as run:
        for epoch in run.epochs(2):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            if fails and epoch == 0:
                raise RuntimeError("lost")


def test_attempts_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers = stand_in(monkeypatch)
    monitor = EnergyMonitor(country="DEU")
    with pytest.raises(RuntimeError, match="lost"):
        train(tmp_path / "run", monitor, fails=True)
    train(tmp_path / "run", monitor)
    assert [tracker.options["country_iso_code"] for tracker in trackers] == ["DEU", "DEU"]
    assert all(tracker.stopped == 1 for tracker in trackers)
    # The stand-in reads 1 kWh when it starts and when it stops.
    assert monitor.kwh == 2.0
    marks = [mark for mark in Journal.read(tmp_path / "run").marks if mark["kind"] == "energy"]
    newest = {mark["attempt"]: (mark["kwh"], mark["co2_kg"]) for mark in marks}
    assert newest == {1: (1.0, 0.5), 2: (2.0, 1.0)}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line).get("values", {}) for line in lines]
    assert {"energy/kwh": 2.0, "energy/co2_kg": 1.0} in values
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "energy 3 kWh, 1.5 kg of CO2" in capsys.readouterr().out
    assert main(["report", "--json", str(tmp_path / "run")]) == 0
    assert '"energy_kwh": 3.0' in capsys.readouterr().out


def test_sensors_that_hang_do_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, stop=lambda: time.sleep(60))
    monkeypatch.setattr(energy_monitor, "_STOP_TIMEOUT", 0.01)
    monitor = EnergyMonitor()
    with pytest.warns(UserWarning, match="sensors of energy do not answer"):
        train(tmp_path / "run", monitor)
    assert monitor.kwh == 1.0


def test_without_codecarbon_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon.output", None)
    with pytest.raises(ImportError, match="pip install accel-callbacks\\[energy\\]"):
        EnergyMonitor()


def test_the_real_package_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("codecarbon")
    monkeypatch.setattr(energy_monitor, "_MEASURE_EVERY", 1)
    monitor = EnergyMonitor()
    train(tmp_path / "run", monitor)
    assert 0 < monitor.kwh < 1
