"""What the progress bar shows on a terminal, drawn by tqdm and by rich, and in a log."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks import Accelerator, Callback, callbacks
from accel_callbacks.callbacks import Checkpoint, ProgressBar, RichProgressBar, progress_bar
from loggers import ConsoleTracker

BARS = [partial(ProgressBar, rich=False), partial(ProgressBar, rich=True)]  # drawn by tqdm, by rich
END = b"\x00"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal to write to, and what stands there as text."""

    def __init__(self, columns: int) -> None:
        self._leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.file = os.fdopen(follower, "w")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)  # what nobody reads blocks who writes
        self._reader.start()

    def _read(self) -> None:
        while not (self._parts and self._parts[-1].endswith(END)):
            self._parts.append(os.read(self._leader, 1 << 16))

    def written(self) -> str:
        if self._reader.is_alive():
            self.file.write(END.decode())
            self.file.flush()
            self._reader.join()
        return b"".join(self._parts).removesuffix(END).decode()

    def text(self) -> str:
        return CODES.sub("", self.written())

    def screen(self) -> list[str]:
        """What a person sees in the end."""
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", self.written()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif part.endswith("A") and len(part) > 1:
                row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                rows[row] = ""
            elif len(part) == 1:
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
                column += 1
        return [text.rstrip() for text in rows]

    def close(self) -> None:
        self.written()
        self.file.close()
        os.close(self._leader)


@contextmanager
def terminal(columns: int = 160) -> Iterator[Terminal]:
    it = Terminal(columns)
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
    assert (bar._display, bar._training, bar._evaluation) == (None, None, None)
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
        assert (bar._display, bar._training, bar._evaluation) == (None, None, None)
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
    assert re.search(r" 3 +[\d.]+/s \d:", training)
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


def test_without_a_terminal_there_is_one_plain_line_an_epoch():
    out = io.StringIO()
    show(ProgressBar(file=out))
    rate = r"batches, +[\d.]+/s, \d:\d\d:\d\d<0:00:00"
    *epochs, test = out.getvalue().splitlines()
    assert len(epochs) == 2
    assert re.fullmatch(f"epoch 1/2: 3/3 {rate} loss=0.25 note=\\[hi\\] val=0.5", epochs[0])
    assert re.fullmatch(f"test: 5/5 {rate}", test)


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
                bar._training._started -= 10.0
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


def test_without_rich_tqdm_draws_unless_rich_is_asked_for(monkeypatch):
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install rich"):
        ProgressBar(rich=True)
    with terminal() as there:
        show(ProgressBar(file=there.file), epochs=1)
        assert "█" in there.text()


# --- what fits in a line ----------------------------------------------------------------------


class Probe(Callback):
    """Logs under its own names, before and after the loop does."""

    def __init__(self, count: int = 8) -> None:
        self.values = {f"probe/layers.{i}.attention.weight": float(i) for i in range(count)}

    def on_train_start(self, run, model):
        run.accelerator.log(self.values)

    def on_log(self, run, model, values, step):
        if "train/loss" in values:
            run.accelerator.log({"probe/nested": 1.0})


def everything(folder) -> list:
    """Sixteen callbacks, to which the bar is added."""
    return [
        callbacks.Checkpoint(str(folder), every_n_epochs=1),
        callbacks.DeviceStats(every_n_steps=1),
        callbacks.EMA(0.5),
        callbacks.EarlyStopping("val/loss"),
        callbacks.Freeze({"bias": 1}),
        callbacks.GradientAccumulationScheduler({1: 2}),
        callbacks.GradientNorm(per_layer=True),
        callbacks.LearningRateMonitor(log_momentum=True),
        callbacks.NonFinite(),
        callbacks.Preemption(),
        callbacks.SampleLogger(lambda run, model, batch, outputs: {"text": "a"}, n=1),
        callbacks.Throughput(window=4, log_every_n_steps=1),
        callbacks.Timer(),
        callbacks.WeightAveraging(),
        Probe(),
        Callback(),
    ]


def train(bar: ProgressBar, *others, metrics: int = 3, epochs: int = 2) -> Accelerator:
    """Two epochs of four batches, with a validation, in which the loop logs some metrics."""
    accel = Accelerator(cpu=True, callbacks=[*others, bar])
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaders = [torch.utils.data.DataLoader(torch.ones(4, 2)) for _ in range(2)]
    names = ["train/loss", "train/accuracy", *(f"train/classification_{i}" for i in range(99))]
    model, sgd, loader, val = accel.prepare(model, sgd, *loaders)
    with accel.run("bars") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(model):
                    accel.backward(model(batch).square().mean())
                    sgd.step()
                    sgd.zero_grad()
                accel.log(dict.fromkeys(names[:metrics], 0.125))
            with accel.evaluate(model):
                for batch in val:
                    model(batch)
            accel.log({"val/loss": 0.5})
    return accel


def last_lines(screen: list[str], begin: str = "epoch 2/2") -> list[str]:
    """The lines of a pass at the end of a run."""
    at = max(n for n, line in enumerate(screen) if line.startswith(begin))
    return [screen[at], *(line for line in screen[at + 1 : at + 2] if line.startswith("  "))]


@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize("kind", BARS)
def test_bar_epoch_count_speed_and_time_never_give_way_to_metrics(tmp_path, kind, columns):
    with terminal(columns) as there:
        bar = kind(refresh_every=1000, file=there.file)
        accel = train(bar, *everything(tmp_path), metrics=6)
        first, second = last_lines(there.screen())
    assert len(accel.callbacks) == 17
    assert max(len(first), len(second)) < columns
    head = re.match(r"epoch 2/2 ([█━]{10,}) 4/4 +[\d.]+/s \d:\d\d:\d\d<0:00:00 train/loss=", first)
    assert head
    assert len(head[1]) == max(10, (columns - 1) // 8)
    hidden = re.search(r" \+(\d+)$", second)
    shown = (first + second).count("=")
    total = len(accel.current_run.callback_metrics)
    assert shown + (int(hidden[1]) if hidden else 0) == total > 20


@pytest.mark.parametrize("kind", BARS)
def test_columns_keep_their_places(monkeypatch, kind):
    clock = [0.0]
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with terminal(100) as there:
        accel = Accelerator(cpu=True, callbacks=[kind(refresh_every=0, file=there.file)])
        for index, _ in enumerate(accel.prepare(torch.utils.data.DataLoader(range(120)))):
            accel.log({"loss": 0.12 if index % 2 else 0.1234, "last": 1})
            clock[0] += 0.001 if index < 50 else 7.0
        accel.end_training()
        lines = [line for line in re.split("[\r\n]", there.text()) if "loss=" in line]
    assert len(lines) > 110
    for mark in ("/120 ", "<", "loss=", "last="):
        assert len({line.index(mark) for line in lines}) == 1
    assert lines[-1].endswith("120/120 4.1s/batch 0:08:10<0:00:00 loss=0.12   last=1")


@pytest.mark.parametrize("kind", BARS)
def test_what_has_no_room_is_on_a_second_line_and_nothing_is_left_over(kind):
    with terminal(100) as there:
        train(kind(refresh_every=0, file=there.file), Probe(3), metrics=3)
        screen = there.screen()
    assert [bool(re.match("epoch [12]/2 [█━]+ 4/4 ", line)) for line in screen] == [
        *(True, False, True, False, False)
    ]
    assert screen[1] == screen[3]
    assert screen[3].startswith("  train/c..ation_0=0.125 val/loss=0.5 probe/")
    assert screen[4] == ""


@pytest.mark.parametrize(("term", "shown"), [("dumb", ":"), ("xterm", " ")])
def test_a_terminal_that_only_scrolls_gets_lines(monkeypatch, term, shown):
    monkeypatch.setenv("TERM", term)
    with terminal() as there:
        show(ProgressBar(file=there.file), epochs=1)
        assert there.screen()[0].startswith(f"epoch 1/1{shown}")


def test_a_narrow_terminal_is_never_overrun():
    with terminal(14) as there:
        show(ProgressBar(file=there.file, refresh_every=0, rich=False), epochs=1)
        assert max(map(len, there.screen())) <= 13


def test_rich_is_the_one_that_draws_where_it_is_installed():
    assert RichProgressBar is ProgressBar
    with terminal() as there:
        show(ProgressBar(file=there.file), epochs=1)
        assert "━" in there.text()


@pytest.mark.parametrize("kind", BARS)
def test_what_the_loop_logs_stands_before_what_callbacks_log(kind):
    with terminal(160) as there:
        train(kind(refresh_every=1000, file=there.file), Probe(1), metrics=2)
        lines = last_lines(there.screen())
    names = re.findall(r"([\w/.]+)=", " ".join(lines))
    assert names[:3] == ["train/loss", "train/accuracy", "val/loss"]
    assert names[3:] == ["probe/laye..ttention.weight", "probe/nested"] or names[3:] == [
        "probe/layers.0.attention.weight",
        "probe/nested",
    ]


@pytest.mark.parametrize("kind", BARS)
def test_metrics_are_chosen_by_names_and_patterns_in_their_order(monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "")
    for metrics, shown in [
        (["val/*", "train/loss"], "val/loss=0.5 train/loss=0.125"),
        (["*/loss"], "train/loss=0.125 val/loss=0.5"),
        ([], ""),
    ]:
        out = io.StringIO()
        train(kind(file=out, metrics=metrics), Probe())
        line = out.getvalue().splitlines()[-1]
        assert re.split(r"/s, |s/batch, ", line)[1][15:].strip() == shown
        with terminal(80) as there:
            train(kind(refresh_every=1000, file=there.file, metrics=metrics), Probe())
            text = " ".join(line.strip() for line in last_lines(there.screen()))
            assert text.endswith(shown or "<0:00:00")
    with pytest.raises(TypeError, match=r"metrics=\['loss'\]"):
        kind(metrics="loss")


@pytest.mark.parametrize(("columns", "width"), [("", 100), ("72", 72), ("160", 160)])
@pytest.mark.parametrize("kind", BARS)
def test_without_a_terminal_a_line_stays_within_a_width(monkeypatch, kind, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    train(kind(file=out, seconds_between_lines=0), Probe(), metrics=40)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) in range(width - 28, width + 1)
    assert re.match(r"epoch 2/2: 4/4 batches, +[\d.]+/s, \d:\d\d:\d\d<0:00:00", lines[-2])
    assert re.match("  train/.*", lines[-1])
    assert re.search(r" \+\d\d$", lines[-1])


def test_long_names_are_shortened_from_the_middle_unless_that_makes_them_equal():
    text = progress_bar.MetricText({"val/classification/top_5_accuracy": 0.5, "loss": 1})
    assert text.fit(80) == ["val/classification/top_5_accuracy=0.5 loss=1"]
    assert text.fit(40) == ["val/classif.._5_accuracy=0.5 loss=1"]
    assert text.fit(30) == ["val/cla..ccuracy=0.5 loss=1"]
    assert text.fit(18) == ["val/..racy=0.5 +1"]
    assert text.fit(5) == ["+2"]
    assert text.fit(1) == [""]
    assert text.fit(5, 40) == ["", "val/classif.._5_accuracy=0.5 loss=1"]
    assert progress_bar.MetricText({"train/loss_of_all": 0.5}).fit(20) == ["train/l.._of_all=0.5"]
    layers = {f"gradients/layers.{i}.attention.weight": i for i in range(2)}
    shown = progress_bar.MetricText(layers).fit(60)
    assert shown == ["gradients/layers.0.attention.weight=0 +1"]


def test_a_wait_for_data_is_told_whatever_is_logged():
    text = progress_bar.MetricText({f"m{i}": i for i in range(99)}, "(waits for data 40%)")
    assert text.fit(40) == ["m0=0 m1=1 m2=2 +96 (waits for data 40%)"]
    assert text.fit(29, 15) == ["m0=0 (waits for data 40%)", "m1=1 m2=2 +96"]


def test_braces_in_values_are_no_template():
    with terminal() as there:
        bar = ProgressBar(refresh_every=1000, file=there.file)
        accel = Accelerator(cpu=True, callbacks=[bar])
        for _ in accel.prepare(torch.utils.data.DataLoader(range(2))):
            accel.log({"{n}": "{bar} {0}"})
        accel.end_training()
        assert "{n}={bar} {0}" in there.text()


def test_the_console_tracker_shows_what_the_loop_logs_first(tmp_path):
    out = io.StringIO()
    accel = Accelerator(
        cpu=True, project_dir=tmp_path, callbacks=[Probe()], log_with=ConsoleTracker(0, file=out)
    )
    with accel.run("console") as run:
        for _ in run.epochs(1):
            for _ in accel.prepare(torch.utils.data.DataLoader(range(2))):
                accel.log({"train/loss": 0.125, "train/accuracy": 0.5})
    header = [line.split() for line in out.getvalue().splitlines() if "step" in line][-1]
    assert header[:3] == ["step", "train/loss", "train/accuracy"]
    assert header[-1].startswith("+")
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_a_resumed_run_tells_its_epoch_counted_from_one(tmp_path, capsys):
    for epochs in (1, 2):
        train(ProgressBar(file=io.StringIO()), Checkpoint(str(tmp_path)), epochs=epochs)
    assert "(step 4, epoch 1); resume=False" in capsys.readouterr().err
