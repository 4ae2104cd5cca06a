"""The samples of a step, drawn again from the journal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)

from accel_callbacks import Accelerator, DataLoaderConfiguration
from accel_callbacks.addons.journal.format import FIELDS
from accel_callbacks.addons.journal.row_filter import chosen_rows
from accel_callbacks.addons.journal.samples import samples_of
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal, JournalError


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their index."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(8, 1))


class OwnOrder(Sampler[int]):
    """Draws from Python's generator, a sample at a time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield random.randrange(self.length)


def train(
    folder: Path, loader: DataLoader[Any], *, fail_at: int = 0, epochs: int = 2, **options: Any
) -> dict[int, list[list[int]]]:
    """Train with dropout's draws between; return the samples of each step, by micro-batch."""
    accel = Accelerator(cpu=True, project_dir=folder, gradient_accumulation_steps=2, **options)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    seen: dict[int, list[list[int]]] = {}
    with accel.run("samples") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                seen.setdefault(run.global_step + 1, []).append(batch.flatten().int().tolist())
                with accel.accumulate(model):
                    accel.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if fail_at and run.global_step == fail_at:
                    raise RuntimeError("planted")
    return seen


def loaders() -> dict[str, DataLoader[Any]]:
    data = Numbers()
    own = torch.Generator().manual_seed(3)
    batches = BatchSampler(RandomSampler(data), 4, drop_last=True)
    return {
        "in order": DataLoader(data, batch_size=2),
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "generator": DataLoader(data, batch_size=2, shuffle=True, generator=own),
        "replacement": DataLoader(data, 2, sampler=RandomSampler(data, True, 15)),
        "drop_last": DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        "batches": DataLoader(data, batch_sampler=batches),
        "workers": DataLoader(data, batch_size=2, shuffle=True, num_workers=1),
    }


@pytest.mark.parametrize("kind", list(loaders()))
def test_the_indices_are_those_that_the_loop_saw(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(5)
    seen = train(tmp_path, loaders()[kind])
    journal = Journal.read(tmp_path)
    steps = journal.rows()["step"].tolist()
    assert len(steps) > 4
    for step in steps:
        batches = [ranks[0] for ranks in samples_of(journal, step).batches]
        assert batches == seen[step], step


def test_with_an_order_that_follows_from_the_seed(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(seeded_order=True)
    seen = train(tmp_path, loaders()["shuffled"], dataloader_config=config)
    journal = Journal.read(tmp_path)
    for step in (1, 6, 9):
        assert [ranks[0] for ranks in samples_of(journal, step).batches] == seen[step]


def test_after_a_resume_they_are_those_of_the_attempt_that_counts(tmp_path: Path) -> None:
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, loaders()["shuffled"], fail_at=5, callbacks=[Checkpoint(every_n_steps=3)])
    seen = train(tmp_path, loaders()["shuffled"], callbacks=[Checkpoint(every_n_steps=3)])
    journal = Journal.read(tmp_path)
    assert samples_of(journal, 3).attempt == 1
    for step in range(4, 12):
        samples = samples_of(journal, step)
        assert samples.attempt == 2
        assert [ranks[0] for ranks in samples.batches] == seen[step], step


def test_a_sampler_of_the_users_is_drawn_from_again_with_its_loader(tmp_path: Path) -> None:
    random.seed(4)
    loader = DataLoader(Numbers(), batch_size=2, sampler=OwnOrder(14))
    seen = train(tmp_path, loader)
    journal = Journal.read(tmp_path)
    with pytest.raises(JournalError, match=r"OwnOrder.*--script"):
        samples_of(journal, 2)
    again = DataLoader(Numbers(), batch_size=2, sampler=OwnOrder(14))
    for step in (1, 4, 7):
        assert [ranks[0] for ranks in samples_of(journal, step, again).batches] == seen[step]
    shorter = DataLoader(Numbers(), batch_size=2, sampler=OwnOrder(13))
    with pytest.raises(JournalError, match="has changed"):
        samples_of(journal, 2, shorter)
    other = DataLoader(Numbers(), batch_size=2, sampler=SubsetRandomSampler(range(14)))
    with pytest.raises(JournalError, match="has a SubsetRandomSampler, and the run had a OwnOrder"):
        samples_of(journal, 2, other)


def test_what_has_no_indices_says_so(tmp_path: Path) -> None:
    train(tmp_path, DataLoader(Stream(), batch_size=2))
    journal = Journal.read(tmp_path)
    with pytest.raises(JournalError, match="the place alone"):
        samples_of(journal, 1)
    with pytest.raises(JournalError, match="has no step 99: it has 1 to"):
        samples_of(journal, 99)


SCRIPT = """
from tests.accel_callbacks.addons.journal.test_samples import Numbers

def make():
    return Numbers()

class Text:
    def __getitem__(self, index):
        return {"input_ids": [index]}

text = Text()
assert __name__ != "__main__"
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    run = str(tmp_path / "run")
    seen = train(tmp_path / "run", loaders()["shuffled"])
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    assert main(["data", run, "--step", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"batch 2, rank 0: {', '.join(map(str, seen[4][1]))}" in printed
    assert main(["data", run, "--step", "4", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert [ranks[0] for ranks in answer["batches"]] == seen[4]
    assert main(["data", run, "--step", "4", "--script", f"{script}:make"]) == 0
    assert f"  {seen[4][0][0]}: tensor([{seen[4][0][0]}.])" in capsys.readouterr().out
    assert main(["data", run, "--where", "step > 3 and step <= 5"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["STEP", "4", "5"]
    for words, message in [
        (["--step", "999"], "has no step 999"),
        (["--where", "los > 3"], "did you mean 'loss'"),
        (["--step", "1", "--script", f"{script}:gone"], "has no 'gone'"),
        (["--step", "1", "--script", str(script)], "name what is in it"),
    ]:
        assert main(["data", run, *words]) in (1, 2)
        assert message.lower() in capsys.readouterr().err.lower()


ROWS = np.zeros(4, list(FIELDS))
ROWS["loss"] = [1.0, 9.0, np.nan, 20.0]
ROWS["step"] = [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("loss > 8", [2, 4]),
        ("loss != loss", [3]),
        ("not loss > 8 and step < 2", [1]),
        ("1 < step <= 3", [2, 3]),
        ("loss / 2 > 8 or step == 1", [1, 4]),
        ("-loss < -8", [2, 4]),
        ("step - 1 >= 2", [3, 4]),
    ],
)
def test_conditions(expression: str, steps: list[int]) -> None:
    assert chosen_rows(ROWS, expression)["step"].tolist() == steps


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "loss.__class__",
        "[x for x in (1,)]",
        "loss",
        "",
        "loss >",
        "lambda: 1",
        "'a' == 'a'",
        "2 ** 9 ** 9 ** 9 > 1",
        "(" * 400 + "1" + ")" * 400,
        "x" * 600,
    ],
)
def test_conditions_that_are_none(expression: str) -> None:
    with pytest.raises(JournalError):
        chosen_rows(ROWS, expression)
