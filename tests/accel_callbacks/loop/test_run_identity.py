"""A run resumes only from checkpoints of its own name and config, unless it is told to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, Callback, ResumeError
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.loop.run_identity import RunIdentity


def go(folder, name="run", config=None, *, epochs=1, callbacks=(), **options):
    """One start of a script; returns the run and the weight in the end."""
    accel = Accelerator(cpu=True, project_dir=folder, callbacks=[Checkpoint(), *callbacks])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run(name, config, **options) as run:
        before = model.weight.item()
        for _ in run.epochs(epochs):
            for batch in data:
                accel.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return run, before


def test_another_name_or_config_is_refused_with_the_difference(tmp_path):
    config = {"lr": 0.1, "optimizer": {"kind": "adam", "betas": (0.9, 0.99)}, "fold": 1}
    go(tmp_path, "fold-1", config)
    other = {"lr": 0.2, "optimizer": {"kind": "adam", "betas": (0.9, 0.95)}, "drop": 0.5}
    with pytest.raises(ResumeError) as error:
        go(tmp_path, "fold-2", other)
    text = str(error.value)
    assert "name: 'fold-1' -> 'fold-2'" in text
    assert "config lr: 0.1 -> 0.2" in text
    assert "config optimizer.betas: [0.9, 0.99] -> [0.9, 0.95]" in text
    assert "config fold: 1 -> (absent)" in text
    assert "config drop: (absent) -> 0.5" in text
    assert "kind" not in text
    assert "resume=False" in text
    assert "folder of its own" in text
    assert "resume='anyway'" in text


def test_a_refused_checkpoint_changes_nothing_and_sets_no_callback_up(tmp_path):
    class Seen(Callback):
        hooks: list = []  # noqa: RUF012

        def setup(self, run, model, stage):
            self.hooks.append("setup")

        def on_load_checkpoint(self, run, model, checkpoint):
            self.hooks.append("load")

    go(tmp_path, "a")
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[Checkpoint(), Seen()])
    model = accel.prepare(torch.nn.Linear(1, 1, bias=False))
    before = model.weight.item()
    with pytest.raises(ResumeError), accel.run("b"):
        pass
    assert model.weight.item() == before
    assert Seen.hooks == []
    with accel.run("b", resume=False) as run:  # the Accelerator is as good as new
        assert run.global_step == 0


def test_k_folds_in_one_folder_do_not_report_the_first_ones_weights(tmp_path):
    steps = []
    for fold in range(3):
        run, before = go(tmp_path, f"fold-{fold}", {"fold": fold}, resume=False)
        steps.append((run.global_step, before))
    assert steps == [(2, 1.0)] * 3


def test_anyway_resumes_with_a_notice_of_the_difference(tmp_path, capsys):
    first, _ = go(tmp_path, "a", {"lr": 0.1})
    capsys.readouterr()
    run, before = go(tmp_path, "b", {"lr": 0.2}, epochs=2, resume="anyway")
    assert (run.global_step, before) == (4, pytest.approx(0.8))
    assert "'a' -> 'b'; config lr: 0.1 -> 0.2" in capsys.readouterr().err
    assert run.run_id == first.run_id
    go(tmp_path, "b", {"lr": 0.2})  # its checkpoints are its own from there on


def test_a_path_is_a_choice_and_resumes_with_a_notice(tmp_path, capsys):
    go(tmp_path, "a", {"lr": 0.1})
    capsys.readouterr()
    path = str(tmp_path / "checkpoints" / "step-00000002")
    run, _ = go(tmp_path, "b", {"lr": 0.2}, epochs=2, resume=path)
    assert run.global_step == 4
    assert "config lr: 0.1 -> 0.2" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["epochs", "max_epochs", "num-train-epochs", "max_steps", "resume"])
def test_the_number_of_epochs_and_flags_of_the_start_are_no_difference(tmp_path, key):
    go(tmp_path, "a", {"trainer": {key: 1}})
    assert go(tmp_path, "a", {"trainer": {key: 2}}, epochs=2)[0].global_step == 4
    with pytest.raises(ResumeError, match="warmup_epochs"):
        go(tmp_path, "a", {"trainer": {key: 2}, "warmup_epochs": 1})


def test_settings_that_may_change_are_listed(tmp_path):
    go(tmp_path, "a", {"out": "x", "data": {"workers": 1, "root": "y"}, "lr": 0.1})
    other = {"out": "z", "data": {"workers": 2, "root": "w"}, "lr": 0.1}
    assert go(tmp_path, "a", other, may_change=["out", "data"])[0].resumed_from
    assert go(tmp_path, "a", {**other, "out": "v"}, may_change=["o*", "da*"])[0].resumed_from
    with pytest.raises(ResumeError, match=r"config data\.workers: 1 -> 2"):
        go(tmp_path, "a", other, may_change=["out", "data.root"])


def test_a_run_without_a_name_or_config_is_not_compared_in_it(tmp_path):
    go(tmp_path, config={"lr": 0.1})
    assert go(tmp_path, "named", epochs=2)[0].resumed_from  # and saves once more
    assert go(tmp_path, "named", {"lr": 0.3})[0].resumed_from
    with pytest.raises(ResumeError, match="name"):
        go(tmp_path, "other", {"lr": 0.3})


def test_a_checkpoint_from_before_resumes_as_before(tmp_path):
    run, _ = go(tmp_path, "a", {"lr": 0.1})
    folder = Path(run.resumed_from or tmp_path / "checkpoints" / "step-00000002")
    for path in folder.glob("objects-*-shared.json"):
        assert "identity" in path.read_text()
    accel = Accelerator(cpu=True, project_dir=tmp_path / "old", callbacks=[Checkpoint()])
    model = accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(tmp_path / "old" / "checkpoints" / "step-00000000")  # outside of a run
    with accel.run("another", {"lr": 0.5}) as again:
        assert again.resumed_from is not None
    assert model is not None


def test_the_config_is_that_of_the_start_of_the_run(tmp_path):
    args = argparse.Namespace(lr=0.1, model={"width": 4})
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[Checkpoint()])
    accel.prepare(torch.nn.Linear(1, 1))
    with accel.run("a", args) as run:
        assert run.config["lr"] == 0.1
        args.model["depth"] = 3  # what the script finds out
        accel.save_state(tmp_path / "checkpoints" / "step-00000000")
    with accel.run("a", argparse.Namespace(lr=0.1, model={"width": 4})) as run:
        assert run.resumed_from is not None


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    betas: tuple = (0.9, 0.99)
    folder: Path = Path("data")
    limit: float = math.nan
    act: object = torch.nn.functional.relu
    kind: type = torch.nn.Linear
    dtype: object = torch.float32
    names: frozenset = frozenset({"b", "a"})


def test_values_of_any_type_are_compared_by_a_stable_text():
    saved = json.loads(json.dumps(RunIdentity.of("a", Settings()).state_dict()))
    assert RunIdentity.of("a", Settings()).differences(saved) == []
    as_dict = {one.name: getattr(Settings(), one.name) for one in dataclasses.fields(Settings)}
    as_dict["betas"] = [0.9, 0.99]
    assert RunIdentity.of("a", as_dict).differences(saved) == []
    assert RunIdentity.of("a", argparse.Namespace(**as_dict)).differences(saved) == []
    changed = dataclasses.replace(Settings(), dtype=torch.float16, folder=Path("other"))
    assert RunIdentity.of("a", changed).differences(saved) == [
        "config folder: 'data' -> 'other'",
        "config dtype: 'torch.float32' -> 'torch.float16'",
    ]
    assert RunIdentity.of("a", {**as_dict, "act": object()}).differences(saved)


def test_many_and_long_differences_are_abbreviated(tmp_path):
    old = {f"k{i}": "x" * 500 for i in range(20)}
    identity = RunIdentity.of("a", dict.fromkeys(old, "y"))
    text = identity.refusal("there", identity.differences({"name": "a", "config": old}))
    assert "and 12 more" in text
    assert max(map(len, text.splitlines()[1:-1])) < 100
