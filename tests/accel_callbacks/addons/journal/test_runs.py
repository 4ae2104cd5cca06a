"""`accel runs`: the runs below a folder, how they are, and what differs between them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks.addons.journal.runs import journal_folders, summary_of
from accel_callbacks.cli.main import main
from checkpoint_io import Lease
from tests.support import warm
from tests.support.journals import write_attempt, write_run


def end(status: str, step: int, time: float = 1010.0) -> dict[str, Any]:
    return {"kind": "end", "status": status, "step": step, "time": time, "error": None}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four runs in three projects: one ended, one failed, one was killed, one is damaged."""
    tmp_path /= "sweep"
    shared = {"layers": 2, "data": {"name": "digits"}}
    write_run(
        tmp_path / "a",
        range(1, 6),
        run_id="id-a",
        config={**shared, "lr": 0.1},
        marks=[end("success", 5)],
        loss=lambda step: abs(step - 3) + 0.25,
        time=3000.0,
    )
    write_run(
        tmp_path / "b",
        range(1, 4),
        run_id="id-b",
        config={**shared, "lr": 0.01, "warmup": 100},
        marks=[end("failed", 3)],
        time=2000.0,
    )
    write_run(tmp_path / "b", range(1, 10), run_id="id-c", config={**shared, "lr": 0.1})
    killed_lease(tmp_path / "b" / "journal" / "id-c")
    write_run(tmp_path / "c", run_id="id-d")
    (rows,) = (tmp_path / "c").rglob("*.rows")
    rows.write_bytes(b"accelJNL" + rows.read_bytes()[8:40] + b"x" * 200)
    return tmp_path


def killed_lease(folder: Path) -> None:
    """Let a process that ends without a word hold the lease of a folder."""
    take = f"from checkpoint_io import Lease; Lease({str(folder)!r}).acquire()"
    warm.run([sys.executable, "-c", f"import os; {take}; os._exit(9)"])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_run_with_what_differs(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(sweep)]) == 1  # one is damaged
    printed = lines(capsys)
    assert printed[0] == "NAME PROJECT RUN STATE STEPS GOODPUT BEST loss lr warmup"
    text = "\n".join(printed[1:])
    assert "demo a id-a ended 5 " in text
    assert "0.25 at 3 0.1 -" in text
    assert "demo b id-b failed 3 " in text
    assert "0.333333 at 3 0.01 100" in text
    assert "demo b id-c killed 9 " in text
    assert "id-d damaged 0" in text
    assert "layers" not in text
    assert printed[-1].startswith("damaged: ")


def test_one_that_lives_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, run_id="id-a")
    folder = tmp_path / "journal" / "id-a"
    assert summary_of(str(folder)).state == "unknown"
    with Lease(folder):
        assert summary_of(str(folder)).state == "running"
        assert main(["report", str(tmp_path)]) == 0
        assert "running" in capsys.readouterr().out
    assert summary_of(str(folder)).state == "killed"  # released, and no end was written


def test_runs_are_found_from_any_folder(sweep: Path) -> None:
    def ids(folder: Path | str) -> list[str]:
        return [os.path.basename(found) for found in journal_folders(str(folder))]

    assert ids(sweep) == ["id-a", "id-b", "id-c", "id-d"]
    assert ids(sweep.parent) == ["id-a", "id-b", "id-c", "id-d"]
    assert ids(sweep / "b") == ["id-b", "id-c"]
    assert ids(sweep / "b" / "journal") == ["id-b", "id-c"]
    assert ids(sweep / "b" / "journal" / "id-b") == ["id-b"]


def test_runs_in_a_store_are_found() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("x", "y"):
        fs.pipe(f"/sweep/{name}/journal/id-{name}/attempt-0001.jsonl", b'{"kind": "start"}\n')
    assert journal_folders("memory://sweep") == [
        "memory:///sweep/x/journal/id-x",
        "memory:///sweep/y/journal/id-y",
    ]


def write_metrics(project: Path, run_id: str, values: list[float]) -> None:
    records: list[dict[str, Any]] = [{"type": "run", "run_id": run_id, "resumed_step": None}]
    for step, value in enumerate(values, start=1):
        record = {"type": "metrics", "step": step, "time": 0.0, "values": {"val/acc": value}}
        records.append(record)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (project / "metrics.jsonl").write_text(text)


def test_the_best_of_a_metric_is_told_and_sorted_by(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(sweep / "a", "id-a", [0.2, 0.9, 0.4])
    write_metrics(sweep / "b", "id-b", [0.1, 0.95])
    words = ["runs", str(sweep), "--metric", "val/acc", "--highest", "--sort", "best"]
    main([*words, "--descending", "--json"])
    runs = json.loads(capsys.readouterr().out)
    assert [run["run_id"] for run in runs][:2] == ["id-b", "id-a"]
    assert [(run["best"], run["best_step"]) for run in runs] == [
        *((0.95, 2), (0.9, 2)),
        *((None, None), (None, None)),
    ]
    assert runs[1]["config"] == {"layers": 2, "data/name": "digits", "lr": 0.1}
    assert main(["runs", str(sweep), "--metric", "val/ac"]) == 1
    assert "did you mean 'val/acc'?" in capsys.readouterr().err


def test_rows_are_sorted_by_any_column(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def order(*words: str) -> list[str]:
        main(["runs", str(sweep), "--json", *words])
        return [run["run_id"] for run in json.loads(capsys.readouterr().out)]

    assert order()[-2:] == ["id-b", "id-a"]
    assert order("--sort", "steps", "--descending")[0] == "id-c"
    assert order("--sort", "lr")[0] == "id-b"
    assert order("--sort", "lr")[-1] == "id-d"  # it has none
    assert main(["runs", str(sweep), "--sort", "learning_rate"]) == 2
    assert "no column 'learning_rate'" in capsys.readouterr().err


def test_attempts_of_one_run_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "journal" / "id-a"
    write_attempt(folder, 1, range(1, 9), config={"lr": 0.1})
    write_attempt(folder, 2, range(5, 13), step=4, config={"lr": 0.2}, marks=[end("success", 12)])
    summary = summary_of(str(folder))
    assert (summary.attempts, summary.steps, summary.state) == (2, 12, "ended")
    assert summary.config == {"lr": 0.2}


def test_a_folder_without_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path)]) == 1
    assert "has no runs" in capsys.readouterr().err
