"""What the progress bars show: evaluations, resumed runs, stalls, with tqdm and with rich. The rest
is tested in test_callbacks.py."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import re
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, ProgressBar, RichProgressBar

BARS = [ProgressBar, RichProgressBar]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal to write to, and what stands there as text."""

    def __init__(self) -> None:
        self._leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
        self.file = os.fdopen(follower, "w")

    def text(self) -> str:
        self.file.flush()
        parts = []
        while select.select([self._leader], [], [], 0.2)[0]:
            parts.append(os.read(self._leader, 1 << 16))
        return CODES.sub("", b"".join(parts).decode())

    def close(self) -> None:
        self.file.close()
        os.close(self._leader)


@contextmanager
def terminal() -> Iterator[Terminal]:
    it = Terminal()
    try:
        yield it
    finally:
        it.close()


def show(bar: ProgressBar, *others, epochs: int = 2, fail: bool = False, data=range(6)) -> None:
    accel = Accelerator(cpu=True, callbacks=[bar, *others])
    loader = torch.utils.data.DataLoader(data, 2)
    loader, val, more = accel.prepare(
        loader, torch.utils.data.DataLoader(range(4)), torch.utils.data.DataLoader(range(5))
    )
    with accel.run("show") as run:
        for _ in run.epochs(epochs):
            for _ in loader:
                accel.log({"loss": torch.tensor(0.25), "note": "[hi]"})
            with accel.evaluate():
                for _ in val:
                    if fail:
                        raise ValueError("in the validation")
                for _ in more:
                    pass
            accel.log({"val": 0.5})
        with accel.evaluate(stage="test"):
            for _ in more:
                pass


@pytest.mark.parametrize("kind", BARS)
def test_on_a_terminal_training_validation_and_test_have_bars(kind):
    with terminal() as there:
        bar = kind(refresh_every=0, file=there.file)
        show(bar)
        text = there.text()
    assert bar._bar is None
    assert bar._inner is None
    for title in ("epoch 1/2", "epoch 2/2", "epoch 1/2, validation", "test"):
        assert title in text
    for count in ("3/3", "4/4", "5/5"):
        assert count in text
    assert "loss=0.25 note=[hi]" in text
    assert "val=0.5" in text


@pytest.mark.parametrize("kind", BARS)
def test_an_error_in_an_evaluation_leaves_the_terminal_usable(kind):
    with terminal() as there:
        bar = kind(refresh_every=0, file=there.file)
        with pytest.raises(ValueError, match="in the validation"):
            show(bar, fail=True)
        assert (bar._bar, bar._inner) == (None, None)
        assert there.text().endswith("\n")


@pytest.mark.parametrize("kind", BARS)
def test_a_bar_of_unknown_length_counts(kind):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(6))

    with terminal() as there:
        show(kind(refresh_every=0, file=there.file), data=Stream(), epochs=1)
        text = there.text()
    training = re.sub("epoch 1/1, validation[^\n\r]*", "", text).replace("epoch 1/1", "")
    assert re.search("[: ]3(it| )", training)
    assert "3/3" not in training
    assert "inf" not in text


@pytest.mark.parametrize("kind", BARS)
def test_without_a_terminal_there_are_lines_and_of_inner_evaluations_only_at_intervals(kind):
    out = io.StringIO()
    show(kind(file=out))
    assert [line.partition(":")[0] for line in out.getvalue().splitlines()] == [
        "epoch 1/2",
        "epoch 2/2",
        "test",
    ]
    out = io.StringIO()
    show(kind(seconds_between_lines=0, file=out), epochs=1)
    lines = [
        line.partition(", ")[0] + line.partition(",")[2] for line in out.getvalue().split("\n")
    ]
    assert any("validation: 4/4 batches" in line for line in lines)
    assert any("test: 5/5 batches" in line for line in lines)


@pytest.mark.parametrize("kind", BARS)
def test_a_resumed_run_goes_on_where_it_was(tmp_path, kind):
    def go(bar, stop: bool) -> None:
        accel = Accelerator(cpu=True, callbacks=[bar, Checkpoint(f"memory://{tmp_path}")])
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(5, 1))
        model, optimizer, loader = accel.prepare(model, sgd, loader)
        with accel.run("resumed") as run:
            for _ in run.epochs(1):
                for batch in loader:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    if stop and run.global_step == 2:
                        run.stop("enough")

    go(ProgressBar(file=io.StringIO()), True)
    with terminal() as there:
        go(kind(refresh_every=0, file=there.file), False)
        text = there.text()
    counts = re.findall(r"(\d)/5", text)
    assert counts[0] == "2"
    assert counts[-1] == "5"


def test_a_loader_that_training_waits_for_is_told_of():
    out = io.StringIO()
    bar = ProgressBar(file=out)
    accel = Accelerator(cpu=True, callbacks=[bar])
    loader = accel.prepare(torch.utils.data.DataLoader(range(3)))
    with accel.run("stalls") as run:
        for _ in run.epochs(1):
            for _ in loader:
                bar._started -= 10.0
                run.data_wait_s += 4.0
    assert re.search(r"\(waits for data \d\d%\)$", out.getvalue())


def test_values_are_read_only_when_something_is_drawn():
    reads = []

    class Value:
        def __float__(self):
            reads.append(1)
            return 0.5

    bar = ProgressBar(seconds_between_lines=1000, file=io.StringIO())
    accel = Accelerator(cpu=True, callbacks=[bar])
    loader = accel.prepare(torch.utils.data.DataLoader(range(50)))
    with accel.run("reads") as run:
        for _ in run.epochs(1):
            for _ in loader:
                run.callback_metrics["loss"] = Value()
    assert len(reads) == 1


def test_without_rich_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_rich(name, *args, **options):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(ImportError, match="pip install rich"):
        RichProgressBar()
