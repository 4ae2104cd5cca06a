"""The examples of trackers, as a user starts them; their files are read back."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks.distributed.topology import destroy_topology
from loggers import read_csv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="what is expected is of the CPU"
)


@pytest.fixture
def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], tuple[str, str]]]:
    """Runs an example as the main module of this process; returns what it wrote."""
    pytest.importorskip("sklearn")

    def play(example: str) -> tuple[str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [example, "--project_dir", str(tmp_path)])
        destroy_topology()
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        written = capsys.readouterr()
        return written.out, written.err

    yield play
    destroy_topology()


@pytest.mark.filterwarnings("ignore:trackers? .* not record")
def test_local_files_and_the_screen(tmp_path: Path, played: Any) -> None:
    out, err = played("trackers_local.py")
    assert "the same in" in out
    assert "metrics.jsonl: True" in out
    assert len(read_csv(tmp_path / "metrics.csv")) == 90
    assert re.search(r"^ +step +train/loss +val/accuracy$", err, re.M)
    assert (tmp_path / out.rpartition("first picture: ")[2].strip()).stat().st_size > 50


def test_tensorboard(tmp_path: Path, played: Any, accumulator: Callable[[str], Any]) -> None:
    out, _ = played("trackers_tensorboard.py")
    assert float(re.findall(r"accuracy ([\d.]+)%", out)[0]) > 85
    events = accumulator(str(tmp_path))
    tags = events.Tags()
    assert {"train/loss", "val/accuracy", "epoch"} <= set(tags["scalars"])
    assert set(tags["images"]) == {"weights", *(f"digits/{i}" for i in range(4))}
    assert events.Histograms("weights")[-1].step == 87
    assert events.Graph().node
    assert {"notes/text_summary", "val/by digit/text_summary"} <= set(tags["tensors"])


def test_wandb(tmp_path: Path, played: Any, read_wandb: Callable[[str], Any]) -> None:
    out, _ = played("trackers_wandb.py")
    assert "upload it with: wandb sync" in out
    rows = read_wandb(str(tmp_path))
    assert [step for step, _ in rows] == [*range(1, 59)]
    last = rows[-1][1]
    assert {"train/loss", "val/accuracy", "val/wrong.filenames", "val/mistakes.path"} <= last.keys()
