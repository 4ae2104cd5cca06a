"""ProjectConfiguration: numbered checkpoints, how many stay, and where they are."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.project import number_of


def numbered(folder: Path | str, seed: int = 0, **options):
    config = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    torch.manual_seed(seed)
    accel = Accelerator(cpu=True, project_config=config)
    model = accel.prepare(torch.nn.Linear(2, 1))
    return accel, model


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("[!.]*"))


def test_checkpoints_are_numbered_and_the_newest_is_found(tmp_path):
    accel, model = numbered(tmp_path)
    assert accel.save_iteration == 0
    assert accel.save_state() == f"{tmp_path}/checkpoints/checkpoint_0"
    model.weight.data += 1
    assert accel.save_state() == f"{tmp_path}/checkpoints/checkpoint_1"
    assert accel.save_iteration == 2
    manifest = checkpoint_io.read_manifest(tmp_path / "checkpoints" / "checkpoint_1")
    assert manifest.metadata["iteration"] == 1
    other, its = numbered(tmp_path, seed=1)
    assert other.load_state().endswith("checkpoint_1")
    assert torch.equal(its.weight, model.weight)


def test_after_a_resume_saving_goes_on_behind_what_is_there(tmp_path):
    accel, _ = numbered(tmp_path)
    for _ in range(3):
        accel.save_state()
    other, _ = numbered(tmp_path, seed=1)
    other.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert other.save_iteration == 2
    assert other.save_state().endswith("checkpoint_3")  # checkpoint_2 is somebody's work
    assert other.save_iteration == 4
    third, _ = numbered(tmp_path)
    assert third.load_state().endswith("checkpoint_3")
    assert third.save_iteration == 4


def test_a_run_that_begins_afresh_in_an_old_folder_overwrites_nothing(tmp_path):
    accel, _ = numbered(tmp_path)
    accel.save_state()
    other, _ = numbered(tmp_path, total_limit=1)
    assert other.save_state().endswith("checkpoint_1")
    assert other.save_state().endswith("checkpoint_2")
    assert there(tmp_path) == ["checkpoint_0", "checkpoint_2"]  # the first is another run's


def test_a_foreign_folder_of_that_name_is_passed_and_stays(tmp_path):
    foreign = tmp_path / "checkpoints" / "checkpoint_7"
    foreign.mkdir(parents=True)
    (foreign / "optimizer.bin").write_bytes(b"theirs")
    accel, _ = numbered(tmp_path, total_limit=1)
    assert accel.save_state().endswith("checkpoint_8")
    assert accel.save_state().endswith("checkpoint_9")
    assert there(tmp_path) == ["checkpoint_7", "checkpoint_9"]


def test_numbers_begin_where_they_are_told_to(tmp_path):
    accel, _ = numbered(tmp_path, iteration=10)
    assert accel.save_state().endswith("checkpoint_10")
    accel.project_configuration.iteration = 20
    assert accel.save_state().endswith("checkpoint_20")


def test_a_path_that_is_given_is_where_it_goes(tmp_path):
    accel, _ = numbered(tmp_path, total_limit=1)
    path = accel.save_state(tmp_path / "mine")
    accel.save_state()
    accel.save_state()
    assert accel.save_iteration == 2
    assert Path(path).exists()
    assert "iteration" not in checkpoint_io.read_manifest(path).metadata


@pytest.mark.parametrize("naming", [True, False])
def test_the_oldest_go_once_the_new_one_is_there(tmp_path, naming):
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=naming, total_limit=2)
    accel = Accelerator(cpu=True, project_config=config)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        accel.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        accel.save_state()
    names = ["checkpoint_2", "checkpoint_3"] if naming else ["step-00000003", "step-00000004"]
    assert there(tmp_path) == names


def test_the_checkpoint_that_a_run_was_resumed_from_stays(tmp_path):
    accel, _ = numbered(tmp_path, total_limit=1)
    accel.save_state()
    other, _ = numbered(tmp_path, total_limit=1)
    other.load_state()
    for _ in range(3):
        other.save_state()
    assert there(tmp_path) == ["checkpoint_0", "checkpoint_3"]


def test_the_checkpoint_that_a_run_was_resumed_from_stays_on_windows(tmp_path, monkeypatch):
    accel, _ = numbered(tmp_path, total_limit=1)
    accel.save_state()
    other, _ = numbered(tmp_path, total_limit=1)
    other.load_state()
    run = other.current_run
    monkeypatch.setattr(run, "resumed_from", r"C:\runs\checkpoints\checkpoint_0")
    monkeypatch.setattr(os, "sep", "\\")
    for _ in range(3):
        other.save_state()
    assert there(tmp_path) == ["checkpoint_0", "checkpoint_3"]


def test_a_number_is_found_in_a_path_of_windows(monkeypatch):
    assert number_of(r"C:\runs\checkpoint_12") is None
    monkeypatch.setattr(os, "sep", "\\")
    assert number_of(r"C:\runs\checkpoint_12") == 12
    assert number_of("C:\\runs\\checkpoint_12\\") == 12


def test_a_checkpoint_callback_keeps_a_path_of_windows(tmp_path, monkeypatch):
    folder = checkpoint_io.CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(step, {}, metadata={"run_id": "r1"})
    monkeypatch.setattr(os, "sep", "\\")
    retention = Checkpoint(tmp_path, keep_last=1).retention
    retention.prune(folder, "r1", r"C:\runs\step-00000001")
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_a_run_resumed_from_another_folder_prunes_without_a_word(tmp_path):
    accel, _ = numbered(tmp_path / "a")
    path = accel.save_state()
    other, _ = numbered(tmp_path / "b", total_limit=1)
    other.load_state(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            other.save_state()
    assert there(tmp_path / "b") == ["checkpoint_3"]


class Breaks:
    """Cannot be saved any more, from some time on."""

    value: object = 1

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def test_a_save_that_fails_removes_nothing_and_takes_no_number(tmp_path):
    accel, _ = numbered(tmp_path, total_limit=1)
    breaks = Breaks()
    accel.register_for_checkpointing(breaks=breaks)
    accel.save_state()
    breaks.value = object()
    for background in (False, True):
        with pytest.raises(checkpoint_io.CheckpointError):
            accel.save_state(async_save=background)
    assert there(tmp_path) == ["checkpoint_0"]
    assert accel.save_iteration == 1
    assert accel.load_state().endswith("checkpoint_0")


def test_what_the_checkpoint_callback_keeps_does_not_count(tmp_path):
    saver = Checkpoint(every_n_steps=1, keep_last=None)
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    accel = Accelerator(cpu=True, project_config=config, callbacks=[saver])
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(3, 1))
    model, optimizer, data = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    with accel.run("both") as run:
        for _ in run.epochs(1):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                accel.save_state()
    names = there(tmp_path)
    assert [name for name in names if name.startswith("checkpoint_")] == ["checkpoint_2"]
    assert len([name for name in names if name.startswith("step-")]) == 3


@pytest.mark.parametrize("where", ["local", "memory"])
def test_in_the_background_and_on_an_object_store(tmp_path, where):
    folder = str(tmp_path) if where == "local" else "memory://project-background"
    accel, model = numbered(folder, total_limit=2)
    for number in range(4):
        model.weight.data.fill_(number)
        assert accel.save_state(async_save=True).endswith(f"checkpoint_{number}")
        model.weight.data.fill_(-1)
    accel.wait_for_save()
    found = checkpoint_io.CheckpointFolder(f"{folder}/checkpoints").list()
    assert [info.name for info in found] == ["checkpoint_2", "checkpoint_3"]
    other, its = numbered(folder, seed=1)
    other.load_state()
    assert its.weight.tolist() == [[3.0, 3.0]]
    assert other.save_iteration == 4


def test_a_damaged_newest_is_passed_over_and_its_number_is_not_used_again(tmp_path, capsys):
    accel, _ = numbered(tmp_path)
    accel.save_state()
    newest = Path(accel.save_state())
    (newest / "manifest.json").write_bytes(b"{}")
    other, _ = numbered(tmp_path)
    assert other.load_state().endswith("checkpoint_0")
    assert "[accel] skipped checkpoint_1: " in capsys.readouterr().err
    assert other.save_iteration == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert other.save_state().endswith("checkpoint_2")


def test_a_folder_that_vanished_is_made_again(tmp_path):
    accel, _ = numbered(tmp_path, total_limit=1)
    accel.save_state()
    shutil.rmtree(tmp_path / "checkpoints")
    assert accel.save_state().endswith("checkpoint_1")


# --- the configuration itself ----------------------------------------------------------------


def test_directories():
    config = ProjectConfiguration("runs")
    assert (config.project_dir, config.logging_dir) == ("runs", "runs")
    config = ProjectConfiguration(logging_dir="logs")
    config.set_directories("runs")
    here = Path.cwd()
    assert (config.root, config.log_folder) == (f"{here / 'runs'}", f"{here / 'logs'}")
    config = ProjectConfiguration()
    assert (config.root, config.log_folder) == (str(here), str(here))
    config = ProjectConfiguration("memory://runs")
    assert (config.root, config.log_folder) == ("memory://runs", "memory://runs")


def test_an_accelerator_has_a_copy_and_completes_it():
    config = ProjectConfiguration(total_limit=3)
    accel = Accelerator(cpu=True, project_dir="runs", project_config=config)
    assert accel.project_dir == accel.logging_dir == str(Path.cwd() / "runs")
    assert accel.project_configuration.total_limit == 3
    assert config.project_dir is None
    same = ProjectConfiguration("runs")
    both = Accelerator(cpu=True, project_dir="runs", project_config=same)
    assert both.project_dir == accel.project_dir


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"total_limit": 0}, ValueError),
        ({"total_limit": "3"}, TypeError),
        ({"iteration": -1}, ValueError),
        ({"iteration": True}, TypeError),
    ],
)
def test_values_that_make_no_sense_are_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        ProjectConfiguration(**options)


def test_on_each_node_changes_nothing_where_there_is_one(tmp_path):
    accel = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
    accel.load_state(accel.save_state(tmp_path / "state"))
    accel.save_model(torch.nn.Linear(1, 1), tmp_path / "model")
    accel.save({"mean": torch.ones(1)}, tmp_path / "mean.safetensors")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "mean.safetensors").exists()
