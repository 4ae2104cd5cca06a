"""Copies of the Trainer's checkpoints on S3, and what a new disk gets of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from accel_callbacks.compat.mirror import VARIABLE, Mirror, folder_of, mirror_of
from accel_callbacks.compat.trainer import newest_whole
from checkpoint_io import CheckpointFolder
from checkpoint_io.folder.sealed import check_seal, seal_folder


def checkpoint(folder, step, optimizer=b"state"):
    path = folder / f"checkpoint-{step}"
    (path / "shards").mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "shards" / "rank_0").write_bytes(optimizer * 1000)
    (path / "empty").write_bytes(b"")
    seal_folder(path, {"step": step})
    return path


@pytest.mark.s3
def test_a_new_disk_gets_the_newest_from_s3(tmp_path, s3_options, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    mirror, place = Mirror("s3://bucket/mirror"), tmp_path / "new"
    mirror.put(str(checkpoint(tmp_path, 7)), 7, limit=2, best=None)
    mirror.wait()
    Mirror("s3://bucket/mirror").fetch(place, None)
    assert newest_whole(place) == str(place / "checkpoint-7")


def test_a_new_disk_gets_the_newest(tmp_path):
    mirror, place = Mirror("memory://mirror-new"), tmp_path / "new"
    mirror.fetch(place, None)
    assert not place.exists()
    for step in (2, 4, 6):
        mirror.put(str(checkpoint(tmp_path, step)), step, limit=2, best=None)
    mirror.wait()
    names = CheckpointFolder("memory://mirror-new").names()
    assert names == ["step-00000004", "step-00000006"]
    mirror.fetch(place, 6)
    assert not place.exists()
    mirror.fetch(place, 4)
    assert newest_whole(place) == str(place / "checkpoint-6")
    assert [path.name for path in place.iterdir()] == ["checkpoint-6"]
    assert check_seal(place / "checkpoint-6") == {"step": 6}
    assert (place / "checkpoint-6" / "shards" / "rank_0").read_bytes() == b"state" * 1000


def test_the_best_is_kept_and_without_a_limit_all(tmp_path):
    mirror = Mirror("memory://mirror-best")
    for step, limit in ((1, None), (2, None), (3, 1)):
        mirror.put(str(checkpoint(tmp_path, step)), step, limit=limit, best=1)
        mirror.wait()
        if limit is None:
            assert len(CheckpointFolder("memory://mirror-best").names()) == step
    names = CheckpointFolder("memory://mirror-best").names()
    assert names == ["step-00000001", "step-00000003"]


def test_a_copy_that_fails_is_warned_about(tmp_path):
    (tmp_path / "file").write_text("no folder")
    mirror = Mirror(f"file://{tmp_path}/file/mirror")
    mirror.put(str(checkpoint(tmp_path, 1)), 1, limit=None, best=None)
    with pytest.warns(UserWarning, match=rf"mirror lacks a checkpoint: .* check {VARIABLE}"):
        mirror.wait()


def test_each_output_dir_has_a_folder_of_its_name(monkeypatch, tmp_path):
    assert mirror_of(tmp_path) is None
    monkeypatch.setenv(VARIABLE, "memory://mirrors/")
    mirror = mirror_of(tmp_path / "run")
    assert mirror is not None
    assert mirror.url == "memory://mirrors/run"
    assert mirror_of(f"{tmp_path}/run/") is mirror


def test_an_output_dir_that_is_a_url_is_a_folder_with_a_mirror(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    place = folder_of("s3://bucket/runs/digits/")
    assert place == os.path.join("accel_remote", "s3", "bucket", "runs", "digits")
    mirror = mirror_of(place)
    assert mirror is not None
    assert mirror.url == "s3://bucket/runs/digits"
    for url in ("s3://", "s3://bucket/../other", "s3://bucket//run"):
        with pytest.raises(ValueError, match="names no folder: give one such as"):
            folder_of(url)


def test_new_files_beside_the_checkpoints_are_copied_as_files(tmp_path):
    checkpoint(tmp_path, 3)
    (tmp_path / "_accel_saving").mkdir()
    (tmp_path / "_accel_saving" / "half").write_text("half")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "events").write_text("1")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").write_text("")
    mirror, filesystem = Mirror("memory://mirror-files"), fsspec.filesystem("memory")
    mirror.put_files(tmp_path)
    files = ["/mirror-files/config.json", "/mirror-files/empty", "/mirror-files/runs/first/events"]
    assert filesystem.find("/mirror-files") == files
    filesystem.rm("/mirror-files/empty")
    (tmp_path / "config.json").write_text('{"a": 1}')
    mirror.put_files(tmp_path)
    assert filesystem.find("/mirror-files") == [files[0], files[2]]
    assert filesystem.cat(files[0]) == b'{"a": 1}'


def test_a_file_that_cannot_be_copied_is_warned_about_and_tried_again(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    mirror = Mirror(f"file://{taken}")
    with pytest.warns(UserWarning, match=r"taken lacks config.json: .* It is still at"):
        mirror.put_files(tmp_path / "run")
    taken.unlink()
    mirror.put_files(tmp_path / "run")
    assert (taken / "config.json").read_text() == "{}"


REMOTE = """
import shutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers import set_seed

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        control.should_training_stop = state.global_step == 4

def train(place, resume=None, callbacks=()):
    set_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (12, 8))]
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, **sizes))
    arguments = TrainingArguments(
        place, save_steps=2, num_train_epochs=1, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    return arguments.output_dir

train("plain")
shutil.rmtree(train("s3://bucket/runs/gpt", callbacks=[Stop()]))
train("s3://bucket/runs/gpt", resume=True)
"""


@pytest.mark.s3
@pytest.mark.timeout(240)
def test_a_trainer_with_a_url_as_output_dir_goes_on_from_it_on_a_new_disk(tmp_path, s3_options):
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(REMOTE)
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": str(s3_options["endpoint_url"]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.as_accelerate", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint-4 is fetched from s3://bucket/runs/gpt" in done.stdout + done.stderr
    filesystem = fsspec.filesystem("s3", **s3_options)
    filesystem.invalidate_cache()
    weights = filesystem.cat("bucket/runs/gpt/model.safetensors")
    assert weights == (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert filesystem.exists("bucket/runs/gpt/trainer_state.json")
