"""Changes that are planted between a run and its replay, each of which the replay names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks.cli.main import main
from tests.support import warm

JOB = """
import json, os, random, sys
from pathlib import Path
import numpy
import torch
import job_model
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

def main(folder):
    config = json.loads((folder / "config.json").read_text())
    secret = json.loads((folder / "not_in_config.json").read_text())
    torch.set_num_threads(config["threads"])
    torch.use_deterministic_algorithms(config["deterministic"])
    torch.set_float32_matmul_precision(config["matmul"])
    torch.manual_seed(config["seed"])
    random.seed(secret["python_seed"])
    numpy.random.seed(0)
    saver = Checkpoint(f"{folder}/checkpoints", every_n_steps=4)
    accel = Accelerator(cpu=True, project_dir=f"{folder}/project", callbacks=[saver],
                        mixed_precision=config["precision"],
                        gradient_accumulation_steps=config["accumulate"])
    model = job_model.build(config["dropout"])
    with torch.no_grad():
        model[0].weight[0, 0] += secret["weight"]
    lr = config["lr"] * float(os.environ.get("TORCH_PLANTED", "1"))
    optimizer = getattr(torch.optim, config["optimizer"])(
        model.parameters(), lr=lr, weight_decay=config["weight_decay"])
    lines = (folder / "data.txt").read_text().splitlines()
    samples = torch.tensor([[float(number) for number in line.split()] for line in lines])
    generator = torch.Generator().manual_seed(secret["order"])
    data = torch.utils.data.DataLoader(samples, config["batch_size"], shuffle=config["shuffle"],
                                       generator=generator)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    scheduler = accel.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, config["gamma"]))
    with accel.run("job", config=config, may_change=list(config)) as run:
        for epoch in run.epochs(2):
            for batch in data:
                with accel.accumulate(model):
                    loss = model(batch).square().mean()
                    accel.backward(loss)
                    if secret["flip"] and accel.sync_gradients:
                        bits = model[0].weight.grad.view(torch.int32)
                        bits[0, 0] ^= 1 << secret["flip"]
                    accel.clip_grad_norm_(model.parameters(), config["norm"])
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

if __name__ == "__main__":
    main(Path(sys.argv[1]))
"""
MODEL = """
import torch

def build(dropout):
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
"""
CONFIG = {
    **{"lr": 0.01, "gamma": 0.9, "weight_decay": 0.01, "optimizer": "AdamW", "norm": 1.0},
    **{"batch_size": 2, "accumulate": 2, "shuffle": True, "dropout": 0.5, "seed": 0},
    **{"threads": 1, "deterministic": False, "matmul": "highest", "precision": "no"},
}
NOT_IN_CONFIG = {"weight": 0.0, "order": 0, "flip": 0, "python_seed": 0}
FILES = "files that the script reads"

Plant = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps, in windows of 2 batches with a tail."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    (folder / "job_model.py").write_text(MODEL)
    lines = [" ".join(f"{(i * 7 + j * 3) % 11 / 10:.1f}" for j in range(4)) for i in range(21)]
    (folder / "data.txt").write_text("\n".join(lines))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "not_in_config.json").write_text(json.dumps(NOT_IN_CONFIG))
    done = warm.run(
        [sys.executable, str(folder / "job.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the replay's processes in milliseconds."""
    monkeypatch.setattr(subprocess, "run", warm.run)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def config(**changes: Any) -> Plant:
    """Change values of the config, which the run records."""
    return _json("config.json", CONFIG, changes)


def unseen(**changes: Any) -> Plant:
    """Change values of a file that the script reads, and the journal does not know."""
    return _json("not_in_config.json", NOT_IN_CONFIG, changes)


def _json(name: str, values: dict[str, Any], changes: dict[str, Any]) -> Plant:
    return lambda folder, _: _write(folder / name, json.dumps({**values, **changes}))


def edit(name: str, before: str, after: str) -> Plant:
    """Replace text of a file."""

    def plant(folder: Path, _: pytest.MonkeyPatch) -> None:
        text = (folder / name).read_text()
        assert before in text
        _write(folder / name, text.replace(before, after))

    return plant


def add(name: str, text: str) -> Plant:
    """Add text to the end of a file."""
    return lambda folder, _: _write(folder / name, (folder / name).read_text() + text)


def variable(name: str, value: str) -> Plant:
    """Set an environment variable."""
    return lambda _, monkeypatch: monkeypatch.setenv(name, value)


def mark(pattern: str, text: str) -> Plant:
    """Change the first mark of the run, in a file without checksums."""

    def plant(folder: Path, _: pytest.MonkeyPatch) -> None:
        (file,) = folder.glob("project/journal/*/attempt-0001.jsonl")
        changed, count = re.subn(pattern, text, file.read_text(), count=1)
        assert count == 1
        _write(file, re.sub(r',"checksum":"[0-9a-f]{8}"', "", changed))

    return plant


def flip_in_checkpoint(folder: Path, _: pytest.MonkeyPatch) -> None:
    """Flip a bit of the weights in the checkpoint before the step."""
    file = next(folder.glob("checkpoints/step-00000008/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


# What is planted, the step that is replayed, and what is printed.
PLANTED: dict[str, tuple[Plant, int, tuple[str, ...]]] = {
    "learning rate": (config(lr=0.02), 2, ("learning rate differs", "config lr: 0.01 -> 0.02")),
    "schedule": (config(gamma=0.8), 2, ("step 2, rank 0: the learning rate", "config gamma")),
    "weight decay": (config(weight_decay=0.1), 3, ("loss differs", "config weight_decay")),
    "optimizer": (config(optimizer="NAdam"), 3, ("step 2, rank 0: the loss", "config optimizer")),
    "clipping": (config(norm=0.01), 3, ("step 2, rank 0: the loss", "config norm: 1.0 -> 0.01")),
    "batch size": (config(batch_size=3), 2, ("data differ", "config batch_size: 2 -> 3")),
    "accumulation": (
        *(config(accumulate=3), 2),
        ("data differ", "gradient_accumulation_steps: 2 -> 3"),
    ),
    "no shuffling": (config(shuffle=False), 2, ("data differ", "RandomSampler", "config shuffle")),
    "dropout": (config(dropout=0.25), 2, ("loss differs", "config dropout: 0.5 -> 0.25")),
    "seed": (config(seed=1), 2, ("random numbers differ", "config seed: 0 -> 1")),
    "threads": (config(threads=2), 2, ("numerics threads: 1 -> 2",)),
    "deterministic": (config(deterministic=True), 2, ("numerics deterministic: False -> True",)),
    "matmul": (config(matmul="medium"), 2, ("numerics float32_matmul_precision",)),
    "dtype": (config(precision="bf16"), 2, ("loss differs", "mixed_precision: no -> bf16")),
    "another order": (unseen(order=1), 2, ("data differ", "generator of the order", FILES)),
    "initial weights": (unseen(weight=0.1), 2, ("step 1, rank 0: the loss differs", FILES)),
    "flipped bit": (unseen(flip=28), 2, ("step 1, rank 0: the gradient differs", FILES)),
    "Python's generator": (unseen(order=1, python_seed=1), 2, ("generators of Python or NumPy",)),
    "values of the data": (
        *(edit("data.txt", "0.", "0.0"), 2),
        ("step 1, rank 0: the data differ first: content of the batch", FILES),
    ),
    "values of the data, behind a checkpoint": (
        *(edit("data.txt", "0.", "0.0"), 6),
        ("step 5, rank 0: the data differ first: content of the batch", FILES),
    ),
    "a sample more": (add("data.txt", "\n1 1 1 1"), 2, ("data differ", FILES)),
    "script": (
        edit("job.py", "loss = model", "torch.rand(1); loss = model"),
        *(2, ("random numbers differ", "script digest")),
    ),
    "draws between two looks at the generators": (
        edit("job.py", "loss = model", "run.global_step == 5 and torch.rand(1); loss = model"),
        *(8, ("step 6, rank 0: the random numbers differ first: generators at step 8", "script")),
    ),
    "module of the script": (
        edit("job_model.py", "Linear(8, 1)", "Linear(8, 1, bias=False)"),
        *(2, ("differ", "script job_model.py")),
    ),
    "library version": (
        *(mark(r'"torch":"[^"]*"', '"torch":"0.1"'), 2),
        ("all bits are as they were", "versions torch: 0.1 ->"),
    ),
    "processor": (
        *(mark(r'"processor":"[^"]*"', '"processor":"abacus"'), 2),
        ("all bits are as they were", "hardware processor: abacus ->"),
    ),
    "variable": (
        *(variable("TORCH_PLANTED", "2"), 2),
        ("learning rate differs", "environment TORCH_PLANTED: (absent) -> 2"),
    ),
    "bit of a checkpoint": (
        flip_in_checkpoint,
        11,
        ("did not come to step 11", "checksum differs"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(
    job: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, step, expected = PLANTED[name]
    before = {path: path.read_bytes() for path in job.rglob("*") if path.is_file()}
    plant(job, monkeypatch)
    try:
        main(["replay", str(job / "project"), "--step", str(step)])
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    for text in expected:
        assert text in printed, printed


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY"])
def test_a_variable_that_changes_what_is_computed_is_as_it_was(
    job: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "default"}[name]
    monkeypatch.setenv(name, value)
    assert main(["replay", str(job / "project"), "--step", "2"]) == 0
    assert "changed since" not in capsys.readouterr().out
