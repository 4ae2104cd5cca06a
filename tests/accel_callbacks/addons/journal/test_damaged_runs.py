"""Damaged folders of runs: each command tells which run is damaged, and shows the others."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal, JournalError
from checkpoint_io.storage.lease import LEASE

_CASES = 264


def train(folder: Path) -> None:
    """Train a run that is started again once, with a tracker beside its journal."""
    for last in (5, 9):
        torch.manual_seed(0)
        accel = Accelerator(
            cpu=True,
            project_dir=folder,
            log_with="jsonl",
            callbacks=[Checkpoint(every_n_steps=3)],
        )
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(9, 2), batch_size=3, shuffle=True)
        model, optimizer, data = accel.prepare(model, optimizer, data)
        with accel.run("demo", config={"lr": 0.1, "data": {"name": "digits"}}) as run:
            for _ in run.epochs(3):
                for batch in data:
                    loss = model(batch).square().mean()
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    accel.log({"train/loss": loss.item(), "note": "text"}, step=run.global_step)
                    if run.global_step == 4:
                        run.note("remark", text="halfway")
                        accel.log_table("mistakes", ["digit"], [[3]], step=4)
                        accel.log_images({"noise": torch.rand(1, 3, 4, 4)}, step=4)
                    if run.global_step >= last:
                        run.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two projects with a run each; checkpoints are not read by the commands."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("bad", "good"):
        train(folder / name)
        shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
    return folder


def files_of(project: Path) -> list[Path]:
    """All files but the lease: who holds that is waited for."""
    return sorted(path for path in project.rglob("*") if path.is_file() and path.name != LEASE)


# --- damages ------------------------------------------------------------------------------------


def flip_bits(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut_the_end(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def cut_a_line(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().split(b"\n")
    place = draw.randrange(len(lines))
    lines[place] = lines[place][: draw.randrange(len(lines[place]) + 1)]
    file.write_bytes(b"\n".join(lines))


def remove_a_line(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().split(b"\n")
    del lines[draw.randrange(len(lines))]
    file.write_bytes(b"\n".join(lines))


def put_bytes_in(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    place = draw.randrange(len(data))
    more = draw.choice((b"\xff\xfe", b"\0" * 9, b"\n", b"{"))
    file.write_bytes(data[:place] + more + data[place:])


def empty(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"" if draw.random() < 0.5 else bytes(draw.randrange(1, 600)))


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


def put_a_folder_there(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def put_a_file_there(file: Path, draw: random.Random) -> None:
    folder = file.parent
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")


def swap(file: Path, draw: random.Random) -> None:
    other = draw.choice(files_of(file.parent))
    file.write_bytes(other.read_bytes())


def name_oddly(file: Path, draw: random.Random) -> None:
    name = draw.choice(
        ("attempt-99999999999999999999.jsonl", "attempt-1.jsonl", "attempt-٣.jsonl",
         "attempt-0001-rank-99999999999999999999.rows", "attempt-0007-rank-00000.rows",
         "attempt-0003.jsonl")
    )  # fmt: skip
    shutil.copy(file, file.with_name(name))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip_bits, cut_the_end, cut_a_line, remove_a_line, put_bytes_in, empty, remove, swap),
    *(put_a_folder_there, put_a_file_there, name_oddly),
)

COMMANDS = (
    ("runs", "."),
    ("runs", ".", "--metric", "train/loss", "--json"),
    ("report", "bad", "good"),
    ("report", "bad", "good", "--json"),
    ("report", "bad", "good", "--html", "page.html"),
    ("data", "bad", "--step", "2"),
    ("data", "bad", "--step", "8", "--json"),
    ("data", "bad", "--where", "loss > 0"),
    ("watch", "bad", "--once"),
)


_STATES = ("damaged", "unreadable")


def damaged(runs: Path, folder: Path, seed: int) -> str:
    """Copy the runs, damage one, and return how."""
    draw = random.Random(seed)
    shutil.copytree(runs, folder)
    file = draw.choice(files_of(folder / "bad"))
    damage = draw.choice(DAMAGES)
    damage(file, draw)
    return f"seed {seed}: {damage.__name__} of {file.relative_to(folder)}"


def problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield what is wrong with the answers of the commands."""
    for words in COMMANDS:
        try:
            code = main(words)
        except Exception as error:
            yield f"{' '.join(words)}: {type(error).__name__}: {error}"
            capsys.readouterr()
            continue
        out, err = capsys.readouterr()
        if code not in (0, 1) or (code and not err and not any(word in out for word in _STATES)):
            yield f"{' '.join(words)}: code {code}, {err!r}"
        (run_id,) = (path.name for path in (folder / "good" / "journal").iterdir())
        shown = out + page_of(folder)
        if words[0] in ("runs", "report") and "good" not in shown and run_id not in shown:
            yield f"{' '.join(words)}: the good run is hidden: {err!r}"


def page_of(folder: Path) -> str:
    page = folder / "page.html"
    if not page.exists():
        return ""
    text = page.read_text("utf-8")
    page.unlink()
    facts = json.loads(text.partition('id="data">')[2].partition("</script")[0])
    return " ".join(run["folder"] for run in facts["runs"])


@pytest.mark.parametrize("part", range(8))
def test_no_damage_ends_in_a_traceback_or_hides_another_run(
    part: int,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = []
    for seed in range(part, _CASES, 8):
        folder = tmp_path / str(seed)
        told = damaged(runs, folder, seed)
        monkeypatch.chdir(folder)
        wrong += [f"{told}: {problem}" for problem in problems(folder, capsys)]
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)


# --- what is told -------------------------------------------------------------------------------


def marks_of(project: Path, attempt: int = 1) -> Path:
    (file,) = project.glob(f"journal/*/attempt-{attempt:04}.jsonl")
    return file


@pytest.fixture
def pair(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:2] + lines[3:],  # one is gone
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],  # their order has changed
        lambda lines: [*lines[:2], lines[2].replace(b"1", b"7", 1), *lines[3:]],  # still JSON
        lambda lines: [*lines[:2], lines[2].partition(b',"checksum"')[0] + b"}", *lines[3:]],
    ],
    ids=["gone", "swapped", "a digit", "no checksum"],
)
def test_each_line_is_known_by_its_checksum(pair: Path, damage: Any) -> None:
    file = marks_of(pair / "bad")
    whole = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join(damage(whole)))
    with pytest.raises(JournalError, match=r"line [23] is damaged"):
        Journal.read("bad")


def test_a_journal_without_checksums_is_read(pair: Path) -> None:
    marks = Journal.read("bad").marks
    for file in pair.glob("bad/journal/*/*.jsonl"):
        file.write_bytes(re.sub(rb',"checksum":"[0-9a-f]{8}"', b"", file.read_bytes()))
    assert Journal.read("bad").marks == marks


def test_what_cannot_be_shown_is_told_beside_what_can(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = marks_of(pair / "bad")
    file.write_bytes(b'{"kind": "start"}\n')
    problem = "line 1 is damaged (it has no 'time')"
    assert main(["report", "bad", "good"]) == 1
    out, err = capsys.readouterr()
    assert "run demo (good" in out
    assert problem in err
    assert main(["report", "bad", "good", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [fact.get("name") for fact in facts] == ["demo", None]
    assert problem in facts[1]["problem"]
    assert main(["report", "bad", "good", "--html", "page.html"]) == 1
    assert problem in capsys.readouterr().err
    assert page_of(pair).startswith("good")
    assert main(["runs", "."]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("damaged" in line for line in lines) == 2, "in the table, and why"
    assert any("ended" in line and "good" in line for line in lines)


def test_an_older_run_that_is_damaged_hides_no_newer_one(pair: Path) -> None:
    file = marks_of(pair / "bad")
    (newer,) = (pair / "good" / "journal").iterdir()
    shutil.copytree(newer, pair / "bad" / "journal" / "newer")
    file.write_bytes(b"{}\n")
    assert Journal.read("bad").folder.endswith("newer")
    marks_of(pair / "good", 2).write_bytes(b"{}\n")
    shutil.copy(marks_of(pair / "good", 2), pair / "bad" / "journal" / "newer")
    with pytest.raises(JournalError, match="newer"):
        Journal.read("bad")


def test_files_that_are_gone_are_told(pair: Path) -> None:
    (rows,) = pair.glob("bad/journal/*/attempt-0002-*.rows")
    rows.rename(pair / "rows")
    with pytest.raises(JournalError, match="no rows of rank 0 of attempt 2"):
        Journal.read("bad").rows()
    (pair / "rows").rename(rows)
    marks_of(pair / "bad", 2).unlink()
    with pytest.raises(JournalError, match=r"attempt-0002\.jsonl is missing"):
        Journal.read("bad")


def test_a_note_that_no_reader_would_take_is_refused(tmp_path: Path) -> None:
    accel = Accelerator(cpu=True, project_dir=tmp_path)
    with accel.run("demo") as run:
        run.note("remark", value=float("nan"), place=tmp_path, step=3, checksum="mine")
        with pytest.raises(ValueError, match="its 'step' is no count"):
            run.note("remark", step="three")
        with pytest.raises(ValueError, match="the run notes that itself"):
            run.note("end")
    (remark,) = (mark for mark in Journal.read(tmp_path).marks if mark["kind"] == "remark")
    assert (remark["value"], remark["step"], remark["checksum"]) == ("nan", 3, "mine")
