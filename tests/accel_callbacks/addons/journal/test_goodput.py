"""Goodput: parts that add up to the time of the run, and what a kill costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_callbacks import Accelerator
from accel_callbacks.addons.journal import recorder
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Goodput, Journal
from tests.support import warm

JOB = """
import signal, sys, time, torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(2)

accel = Accelerator(cpu=True, project_dir=sys.argv[1], callbacks=[Checkpoint(every_n_steps=3)])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(Slow(), batch_size=1)
model, optimizer, data = accel.prepare(model, optimizer, data)
with accel.run("slow") as run:
    for epoch in run.epochs(1):
        for batch in data:
            time.sleep(0.05)
            accel.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if run.global_step == 5 and len(sys.argv) > 2:
                time.sleep(1.2)
                print("kill", flush=True)
                signal.pause()
        with accel.evaluate(model):
            time.sleep(0.3)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = warm.Popen(
        [sys.executable, "-c", JOB, str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    return process


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run that was killed once and resumed, and its seconds."""
    folder = tmp_path_factory.mktemp("slow")
    began = time.time()
    first = start(folder, "wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "kill\n"
    while len(Journal.read(folder).rows()) < 4:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = start(folder)
    assert second.communicate() is not None
    assert second.returncode == 0
    return folder, time.time() - began


def test_the_parts_add_up_to_the_time_of_the_run(killed: tuple[Path, float]) -> None:
    folder, seconds = killed
    journal = Journal.read(folder)
    goodput = Goodput.of(journal)
    marks = journal.marks
    span = marks[-1]["time"] - journal.attempts[0].start["process_began"]
    assert goodput.wall_s == pytest.approx(span, rel=0.01)
    assert goodput.wall_s < seconds + 0.1
    assert goodput.rank_s == pytest.approx(goodput.wall_s, rel=0.2)


def test_each_part_has_what_belongs_to_it(killed: tuple[Path, float]) -> None:
    goodput = Goodput.of(Journal.read(killed[0]))
    assert goodput.useful_s >= 8 * 0.05
    assert goodput.data_s >= 8 * 0.02
    assert goodput.evaluation_s >= 0.3
    assert goodput.save_s > 0
    assert goodput.repeated_s >= 0.05, "step 4 was taken again"
    assert goodput.recovery_s >= 1.2, "what the killed process did after its last row"
    assert goodput.start_s > 0
    assert goodput.compile_s == 0


def test_the_report_prints_it(
    killed: tuple[Path, float], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(killed[0])
    assert main(["report", folder]) == 0
    printed = capsys.readouterr().out
    assert "killed" in printed
    assert "still running" not in printed
    assert "useful" in printed
    assert main(["report", folder, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["wall_s"])
    goodput = Goodput.of(Journal.read(folder))
    assert goodput.cost(3600) == pytest.approx(goodput.rank_s)
    assert main(["report", folder + "/none"]) == 1
    assert "has no journal" in capsys.readouterr().err


def test_a_long_run_says_it_and_its_trackers_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "_LONG", 0.0)
    with Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl").run():
        pass
    assert "goodput" in capsys.readouterr().err
    assert '"goodput/share"' in (tmp_path / "metrics.jsonl").read_text()
