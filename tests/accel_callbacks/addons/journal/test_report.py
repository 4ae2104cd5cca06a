"""The page of a report: what it says of a run, that texts of runs stay texts, and its size."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.addons.journal.format import ROW_SIZE
from accel_callbacks.addons.journal.report import media
from accel_callbacks.addons.journal.report.curves import curve_of
from accel_callbacks.addons.journal.report.page import report_page
from accel_callbacks.callbacks import SpikeGuard
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from tests.support.browser import unavailable
from tests.support.journals import write_attempt, write_run

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {{data}} é"


def facts_of(page: str) -> Any:
    """Return the JSON of a page as a browser reads it: up to the first end of its script."""
    _, _, rest = page.partition('<script type="application/json" id="data">')
    return json.loads(rest.partition("</script")[0])


def page_of(*folders: Path) -> Any:
    return facts_of(report_page([Journal.read(folder) for folder in folders]))


def test_buckets_keep_the_extremes() -> None:
    steps = np.arange(1, 100_001)
    values = np.zeros(100_000)
    values[[777, 50_001, 99_999]] = 9.0, -9.0, 4.0
    curve = curve_of(steps, steps / 10, values, 2000)
    assert curve is not None
    assert {name: len(column) for name, column in curve.items()} == dict.fromkeys(
        ("step", "time", "mean", "low", "high"), 2000
    )
    assert max(curve["high"]) == 9.0
    assert min(curve["low"]) == -9.0
    assert curve["high"][-1] == 4.0
    assert curve["mean"][777 // 50] == 9.0 / 50
    assert curve["step"][-1] == 100_000
    assert curve["time"][-1] == 10_000.0


def test_a_short_curve_is_its_values() -> None:
    curve = curve_of(np.array([1, 2, 4]), np.zeros(3), np.array([1.0, np.nan, np.inf]), 2000)
    assert curve == {"step": [1, 2, 4], "time": [0.0] * 3, "mean": [1.0, None, None]}


def test_values_that_are_not_finite_hide_no_others() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf, np.nan, -np.inf, 1.7e308, 1.7e308])
    curve = curve_of(np.arange(8), np.arange(8.0), values, 4)
    assert curve is not None
    assert curve["mean"] == [1.0, 3.0, None, 1.7e308]
    assert curve["low"] == curve["high"] == [1.0, 3.0, None, 1.7e308]
    assert curve_of(np.arange(2), np.arange(2.0), np.full(2, np.nan), 4) is None


def test_the_page_tells_what_happened(tmp_path: Path) -> None:
    journal = tmp_path / "journal" / "a1"
    began = 1000.0
    save = {"kind": "save", "time": began + 4, "step": 4, "path": "checkpoints/4"}
    rollback = {"kind": "rollback", "time": began + 5, "step": 5, "reason": "the loss is nan"}
    write_attempt(journal, 1, range(1, 7), time=began, marks=[save, rollback])
    preempt = {"kind": "preempt", "time": began + 102, "step": 6, "reason": "SIGTERM"}
    end = {"kind": "end", "time": began + 104, "step": 8, "status": "failed", "error": "E: no"}
    write_attempt(journal, 2, range(5, 9), time=began + 100, step=4, marks=[preempt, end])
    (facts,) = page_of(tmp_path)["runs"]
    assert [(mark["kind"], mark["step"], mark["text"]) for mark in facts["marks"]] == [
        ("checkpoint", 4, "checkpoints/4"),
        ("rollback", 5, "the loss is nan"),
        ("kill", 6, "ended without a word"),
        ("resume", 4, "checkpoints/4"),
        ("preempt", 6, "SIGTERM"),
        ("failure", 8, "E: no"),
    ]
    assert facts["marks"][2]["time"] == 6.0
    assert facts["curves"]["loss"]["step"] == list(range(1, 9))
    assert [attempt["status"] for attempt in facts["attempts"]] == [None, "failed"]
    assert [attempt["repeated"] for attempt in facts["attempts"]] == [2, 0]


def test_thousands_of_checkpoints_do_not_fill_the_axis(tmp_path: Path) -> None:
    saves = [
        {"kind": "save", "time": 1000.0 + n, "step": n, "path": str(n)} for n in range(1, 3001)
    ]
    run_end = {"kind": "end", "time": 5000.0, "step": 3000, "status": "failed", "error": "E"}
    write_run(tmp_path, marks=[*saves, run_end])
    kinds = [mark["kind"] for mark in page_of(tmp_path)["runs"][0]["marks"]]
    assert kinds.count("checkpoint") == 500
    assert kinds.count("failure") == 1


def test_steps_that_were_left_out_are_counted_and_not_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 5), loss=lambda step: math.nan if step == 3 else 1.0, left_out={3})
    (facts,) = page_of(tmp_path)["runs"]
    assert facts["curves"]["loss"]["step"] == [1, 2, 4]
    assert (facts["attempts"][0]["skipped"], facts["attempts"][0]["bad"]) == (1, 1)
    assert "gradient norm" not in facts["curves"]


def test_the_mean_of_each_rank_and_its_wait_for_others_are_told(tmp_path: Path) -> None:
    options = {"step_s": lambda rank: 1.5, "forward_s": lambda rank: 0.25 + rank}
    write_run(tmp_path, range(1, 5), ranks=2, **options)
    ranks = page_of(tmp_path)["runs"][0]["ranks"]
    names = ("rank", "step_s", "own_s", "wait_s")
    assert [tuple(rank[name] for name in names) for rank in ranks] == [
        (0, 1.5, 0.25, 1.0),
        (1, 1.5, 1.25, 0.0),
    ]


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    write_run(tmp_path, name=HOSTILE, config={"note": HOSTILE, "nested": {"lr": 0.1, "none": None}})
    page = report_page([Journal.read(tmp_path)])
    (facts,) = facts_of(page)["runs"]
    assert facts["label"] == HOSTILE
    assert facts["config"] == {
        "config/note": HOSTILE,
        "config/nested/lr": "0.1",
        "config/nested/none": "None",
    }
    assert "alert(1)</script>" not in page
    assert "<img src=x" not in page
    assert len(re.findall(r"<script\b", page)) == len(re.findall("</script", page)) == 3


def test_any_name_is_a_name(tmp_path: Path) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        unavailable("there is no chromium: on Debian and Ubuntu, apt-get install chromium")
    names = ("constructor", "__proto__", "toString", "hasOwnProperty")
    marks = [{"kind": name, "time": 1002.0, "step": 2} for name in names]
    write_run(tmp_path / "a", name=names[1], marks=marks, config=dict.fromkeys(names, 1))
    lines: list[dict[str, Any]] = [{"type": "run", "run_id": "a1", "resumed_step": None}]
    for step in (1, 2):
        values = dict.fromkeys(names, step / 4)
        lines.append({"type": "metrics", "step": step, "time": 1001.0, "values": values})
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    write_run(tmp_path / "b", name=names[0], config={"lr": 0.1})
    page = report_page([Journal.read(tmp_path / name) for name in "ab"])
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
    shown = subprocess.run(
        [program, *options, "--dump-dom", (tmp_path / "page.html").as_uri()],
        check=True,
        capture_output=True,
        encoding="utf-8",
    ).stdout
    titles = re.findall(r"<h[23]>([^<]*)</h", shown)
    assert titles[:3] == ["loss", "learning rate", "seconds a step"]
    assert titles[3:7] == list(names)
    assert titles[7:] == ["Where the time went", "What differs", "Attempts"]
    assert [name for name in names if f"◆</span> {name} " in shown] == list(names), "as any mark"


def test_a_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = report_page([Journal.read(tmp_path)])
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:link|img|iframe)\b|\bsrc=|@import|url\(", page)
    assert "Permission is hereby granted" in page  # the licence of uPlot goes with it


def test_metrics_of_the_tracker_are_those_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="a1")
    lines = [
        {"type": "run", "run_id": "a1", "time": 1000.0, "resumed_step": None},
        {"type": "metrics", "step": 1, "time": 1002.0, "values": {"val/loss": 0.5, "bad": "NaN"}},
        {"type": "metrics", "step": 2, "time": 1004.0, "values": {"val/loss": 0.25}},
        {"type": "run", "run_id": "b2", "time": 2000.0, "resumed_step": None},
        {"type": "metrics", "step": 1, "time": 2002.0, "values": {"val/loss": 7.0}},
    ]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    curves = page_of(tmp_path)["runs"][0]["curves"]
    assert curves["val/loss"] == {"step": [1, 2], "time": [2.0, 4.0], "mean": [0.5, 0.25]}
    assert "bad" not in curves


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", name="digits", run_id="a1")
    write_run(tmp_path / "b", name="digits", run_id="b1")
    write_run(tmp_path / "c", name="other", run_id="c1")
    labels = [run["label"] for run in page_of(*(tmp_path / name for name in "abc"))["runs"]]
    assert labels == ["digits (a)", "digits (b)", "other"]
    write_run(tmp_path / "a", name="digits", run_id="a2")
    runs = [tmp_path / "a" / "journal" / name for name in ("a1", "a2")]
    assert [run["label"] for run in page_of(*runs)["runs"]] == ["digits (a1)", "digits (a2)"]


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    write_run(tmp_path, range(0))
    (facts,) = page_of(tmp_path)["runs"]
    assert facts["curves"] == {}
    assert facts["attempts"][0]["steps"] is None


def test_ten_long_runs_make_a_page_that_a_browser_opens_at_once(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 100_001), loss=lambda step: 2.0 + math.sin(step))
    journal = Journal.read(tmp_path)
    rows = journal.rows()
    journal.rows = lambda *_, **__: rows  # type: ignore[method-assign]  # read once, told ten times
    page = report_page([journal] * 10)
    assert len(page) < 6_000_000
    assert [len(run["curves"]["loss"]["mean"]) for run in facts_of(page)["runs"]] == [2000] * 10


def test_the_command_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", name="demo \udcff", config={"lr": 0.1})
    write_run(tmp_path / "b", config={"lr": 0.2})
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b", "--html", "page.html"]) == 0
    assert capsys.readouterr().out.startswith("wrote page.html (")
    facts = facts_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [run["config"] for run in facts["runs"]] == [{"config/lr": "0.1"}, {"config/lr": "0.2"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "page.html"]
    assert main(["report", "a", "b", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out.count("run demo") == 2
    assert main(["report", "a", "nowhere", "--html", "page.html"]) == 1
    assert "nowhere has no journal" in capsys.readouterr().err
    assert len(facts_of((tmp_path / "page.html").read_text(encoding="utf-8"))["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("nowhere", "--html", "page.html"), 1, "nowhere has no journal"),
        (("a", "--html", "absent/page.html"), 1, "give --html a file in a folder that exists"),
        (("a", "--html", "page.html", "--json"), 2, "leave --json out"),
        (("a", "a", "--run_id", "a1"), 2, "RUN/journal/ID"),
    ],
)
def test_what_cannot_be_written_is_an_error(
    words: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_damaged_journal_is_named_and_a_torn_one_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", range(1, 5))
    monkeypatch.chdir(tmp_path)
    (file,) = (tmp_path / "a").rglob("*.rows")
    whole = file.read_bytes()
    file.write_bytes(whole[: -ROW_SIZE // 2])
    assert page_of(tmp_path / "a")["runs"][0]["curves"]["loss"]["step"] == [1, 2, 3]
    file.write_bytes(whole[: -2 * ROW_SIZE] + bytes(ROW_SIZE) + whole[-ROW_SIZE:])
    assert main(["report", "a", "--html", "page.html"]) == 1
    assert "row 2 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_pictures_and_tables_of_the_tracker_are_in_the_page(tmp_path: Path) -> None:
    accel = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    with accel.run("media"):
        for step in range(10):
            captions = {"noise": [HOSTILE, "second"]}
            accel.log_images({"noise": torch.rand(2, 3, 4, 4)}, step=step, captions=captions)
        accel.log_images({"late": torch.rand(1, 3, 4, 4)}, step=9)
        accel.log_table("mistakes", columns=["digit"], data=[[HOSTILE], [3]], step=1)
        accel.log_table("mistakes", columns=["digit"], data=[[n] for n in range(60)], step=2)
    page = report_page([Journal.read(tmp_path)])
    (facts,) = facts_of(page)["runs"]
    pictures = facts["pictures"]
    assert [picture["name"] for picture in pictures] == ["late"] + ["noise"] * 8
    assert [picture["step"] for picture in pictures] == [9, 9, 9, 8, 8, 7, 7, 6, 6]
    assert [picture["caption"] for picture in pictures] == ["", *[HOSTILE, "second"] * 4]
    for picture in pictures:
        head, _, data = picture["source"].partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    (table,) = facts["tables"]
    assert (table["step"], table["columns"], table["count"]) == (2, ["digit"], 60)
    assert table["rows"] == [[str(number)] for number in range(50)]
    assert "img-src data:" in page


@pytest.mark.parametrize(
    "path", ["../secret.png", "metrics-media/../../secret.png", "/etc/passwd", "secret.png", 7]
)
def test_a_record_brings_no_file_from_elsewhere(tmp_path: Path, path: Any) -> None:
    project = tmp_path / "project"
    write_run(project)
    for folder in (tmp_path, project):
        (folder / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    records: list[dict[str, Any]] = [{"type": "run", "run_id": "a1", "resumed_step": None}]
    records.append({"type": "images", "step": 1, "time": 0.0, "values": {"x": [path]}})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (project / "metrics.jsonl").write_text(lines)
    assert page_of(project)["runs"][0]["pictures"] == []
    folder = project / "metrics-media"
    folder.mkdir()
    (folder / "text.png").write_bytes(b"no picture")
    inside = lines.replace(json.dumps(path), '"metrics-media/text.png"')
    (project / "metrics.jsonl").write_text(inside)
    assert page_of(project)["runs"][0]["pictures"] == []


def test_records_without_their_fields_are_passed_over(tmp_path: Path) -> None:
    write_run(tmp_path)
    whole: dict[str, dict[str, Any]] = {
        "metrics": {"values": {"loss": 1.0}},
        "images": {"values": {"x": ["metrics-media/x.png"]}, "captions": {"x": ["a"]}},
        "figure": {"values": {"y": "metrics-media/y.png"}},
        "table": {"name": "t", "columns": ["c"], "rows": [["cell"]]},
    }
    records: list[dict[str, Any]] = [{"type": "run", "run_id": "a1", "resumed_step": None}]
    for kind, fields in whole.items():
        for name in ("step", "time", *fields):
            record = {"type": kind, "step": 1, "time": 0.0, **fields}
            if name != "time":
                records.append({field: value for field, value in record.items() if field != name})
            records += [{**record, name: value} for value in (None, "text", [7], {"x": 7})]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    (facts,) = page_of(tmp_path)["runs"]
    assert facts["pictures"] == []
    # A name may be any text, columns and rows any lists.
    assert {table["name"]: table["rows"] for table in facts["tables"]} == {
        "t": [[]],
        "text": [["cell"]],
    }
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"type": "table", "step": 2, "time": 0.0, **whole["table"]}) + "\n")
    (facts,) = page_of(tmp_path)["runs"]
    assert [table["rows"] for table in facts["tables"]] == [[["cell"]], [["cell"]]]


def test_pictures_that_do_not_fit_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accel = Accelerator(cpu=True, project_dir=tmp_path, log_with="jsonl")
    with accel.run("media"):
        for step in range(3):
            accel.log_images({"noise": torch.rand(1, 3, 8, 8)}, step=step)
    sizes = {len(file.read_bytes()) for file in tmp_path.rglob("*.png")}
    monkeypatch.setattr(media, "_MOST_BYTES", 2 * max(sizes) + 1)
    steps = [picture["step"] for picture in page_of(tmp_path)["runs"][0]["pictures"]]
    assert steps == [2, 1]


def test_a_spike_and_a_command_are_marks(tmp_path: Path) -> None:
    spike = {"kind": "rollback", "cause": "spike", "reason": "the loss is 9", "path": "step 4"}
    command = {"kind": "control", "command": "set lr=0.1"}
    place = {"time": 1002.0, "step": 2}
    marks = [{**spike, **place}, {**command, **place}, {"kind": "commands", **place, "number": 0}]
    write_run(tmp_path, marks=marks)
    (facts,) = page_of(tmp_path)["runs"]
    assert [(mark["kind"], mark["text"]) for mark in facts["marks"]] == [
        ("spike", "the loss is 9"),
        ("control", "set lr=0.1"),
    ]


def test_a_rollback_of_a_spike_guard_is_a_spike(tmp_path: Path) -> None:
    guard = SpikeGuard(warmup=5, snapshot_every_n_steps=2)
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[guard])
    inputs = torch.ones(12, 1)
    inputs[8] = 1e4
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(inputs)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run("spiky"):
        for batch in data:
            accel.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    (facts,) = page_of(tmp_path)["runs"]
    ((kind, text),) = [(mark["kind"], mark["text"]) for mark in facts["marks"]]
    assert kind == "spike"
    assert text.startswith("step 9: the loss is ")
