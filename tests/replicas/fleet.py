"""Replicas and their lighthouse as processes, and what their ledgers say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.cli.conftest import clean_environment
from tests.replicas.job import BATCH, SAMPLES, Numbers, loss_of, network, optimizer_of
from tests.support import warm
from tests.support.ports import free_port

JOB = str(Path(__file__).with_name("job.py"))


class Fleet:
    """A lighthouse and replicas in a folder; all are ended by `close`."""

    def __init__(self, root: Path, **options) -> None:
        self.root = root
        self.port = free_port()
        self.options = {
            "lighthouse": f"127.0.0.1:{self.port}",
            "epochs": 2,
            "mark": str(root / "struck"),
            **options,
        }
        self.processes: dict[str, subprocess.Popen] = {}
        self.lighthouse: subprocess.Popen | None = None
        self.light()

    def light(self) -> None:
        command = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        self.lighthouse = subprocess.Popen(
            [
                *(command, "--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1"),
                *("--heartbeat_timeout_ms", "1500", "--join_timeout_ms", "5000"),
            ],
            env={**os.environ, "RUST_LOG": "error"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._is_lit)

    def _is_lit(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def start(self, name: str, **options) -> subprocess.Popen:
        text = json.dumps({**self.options, **options})
        number = len(list(self.root.glob(f"{name}.*.out")))
        with (self.root / f"{name}.{number}.out").open("w") as out:
            process = warm.Popen(
                [sys.executable, JOB, str(self.root), name, text],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RUST_LOG": "error"},
            )
        self.processes[name] = process
        return process

    def launch(self, name: str, **options) -> subprocess.Popen:
        """Start a replica by a launcher, which starts it again when it is lost."""
        text = json.dumps({**self.options, **options})
        command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
        command += ["--num_processes", "1", "--max_restarts", "3"]
        with (self.root / f"{name}.0.out").open("w") as out:
            process = warm.Popen(
                [*command, JOB, str(self.root), name, text],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**clean_environment(self.root / "home"), "RUST_LOG": "error"},
                warm_children=True,
            )
        self.processes[name] = process
        return process

    def output(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.root.glob(f"{name}.*.out")))

    def wait(self, *names: str, timeout: float = 100) -> list[int]:
        codes = []
        for name in names:
            try:
                codes.append(self.processes[name].wait(timeout))
            except subprocess.TimeoutExpired as error:
                texts = [f"--- {one}\n{self.output(one)}" for one in self.processes]
                raise AssertionError(f"{name} hangs:\n" + "\n".join(texts)) from error
        return codes

    def close(self) -> None:
        for process in [*self.processes.values(), self.lighthouse]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()  # a launcher ends its replica
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(20)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for what processes that go on bring about."""

        def came_about() -> bool:
            if condition():
                return True
            codes = [process.poll() for process in self.processes.values()]
            assert None in codes, self.output("*")
            return False

        until(came_about)

    def rows(self, name: str = "*") -> list[dict]:
        paths = sorted(self.root.glob(f"{name}.*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def until(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def committed(fleet: Fleet) -> list[list[list[list[int]]]]:
    """Return the samples of each committed window: by window, place and micro-batch."""
    drawn: dict[str, dict[int, list]] = {}
    order: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for row in fleet.rows():
        if "drawn" in row:
            drawn.setdefault(row["attempt"], {})[row["place"]] = row["drawn"]
            sizes[row["attempt"]] = row["replicas"]
        elif row.get("committed"):
            assert order.setdefault(row["step"], row["attempt"]) == row["attempt"]
    assert sorted(order) == list(range(len(order)))
    windows = []
    for step in sorted(order):
        attempt = order[step]
        assert sorted(drawn[attempt]) == list(range(sizes[attempt])), "a place is missing"
        windows.append([drawn[attempt][place] for place in range(sizes[attempt])])
    return windows


def refused(fleet: Fleet) -> int:
    """Return the number of attempts that no replica has committed."""
    voted = [row for row in fleet.rows() if "committed" in row]
    good = {row["attempt"] for row in voted if row["committed"]}
    return len({row["attempt"] for row in voted} - good)


def assert_each_sample_once(windows: list, epochs: int) -> None:
    """Compare the windows with orders of the data; the last of an epoch may be filled up."""
    samples, epoch = [], 0
    for window in windows:
        for micro in range(len(window[0])):
            samples += [index for place in window for index in place[micro]]
        if len(samples) >= SAMPLES:
            assert sorted(samples[:SAMPLES]) == list(range(SAMPLES)), f"epoch {epoch}"
            assert len(samples) - SAMPLES < len(window)
            samples, epoch = [], epoch + 1
    assert (epoch, samples) == (epochs, [])


def replayed(fleet: Fleet, windows: list) -> dict[str, torch.Tensor]:
    """Return the weights that one process trains from the same weights and batches."""
    first = sorted(fleet.root.glob("*.first"))
    states = [torch.load(path, weights_only=True) for path in first]
    model = network(0)
    model.load_state_dict(states[0])
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    data = Numbers()
    for window in windows:
        for place in window:
            for batch in place:
                rows = [data[index] for index in batch]
                _, inputs, targets = zip(*rows, strict=True)
                tensors = [batch, torch.stack(inputs), torch.stack(targets)]
                (loss_of(model, tensors) / len(window) / len(place)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_replayed(fleet: Fleet, epochs: int, *names: str) -> list:
    """Check samples and weights of a training that has ended on these replicas."""
    windows = committed(fleet)
    assert_each_sample_once(windows, epochs)
    expected = replayed(fleet, windows)
    ended = [torch.load(fleet.root / f"{name}.last", weights_only=True) for name in names]
    for weights in ended:
        for key, tensor in weights.items():
            assert torch.equal(tensor, ended[0][key])
            assert (tensor - expected[key]).abs().max() <= 1e-6
    return windows


assert SAMPLES % BATCH == 0
