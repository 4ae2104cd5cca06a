"""Copies of the Trainer's checkpoints on S3, and what a new disk gets of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from accel_callbacks.addons.trainer.hosted_checkpoint import HostedCheckpoint
from accel_callbacks.addons.trainer.trainer_folder import newest_whole
from accel_callbacks.addons.trainer.trainer_mirror import VARIABLE, Mirror, folder_of, mirror_of
from accel_callbacks.callbacks import Checkpoint
from checkpoint_io import CheckpointFolder, keep_last
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
    mirror.put(str(checkpoint(tmp_path, 7)), 7, keep_last(2), None)
    mirror.wait()
    Mirror("s3://bucket/mirror").fetch(place)
    assert newest_whole(place) == str(place / "checkpoint-7")


def test_a_new_disk_gets_the_newest(tmp_path):
    mirror, place = Mirror("memory://mirror-new"), tmp_path / "new"
    mirror.fetch(place)
    assert not place.exists()
    for step in (2, 4, 6):
        mirror.put(str(checkpoint(tmp_path, step)), step, keep_last(2), None)
        mirror.wait()
    names = CheckpointFolder("memory://mirror-new").names()
    assert names == ["step-00000004", "step-00000006"]
    mirror.fetch(tmp_path)  # it has the newest
    assert not list(tmp_path.glob("_accel*"))
    assert not place.exists()
    checkpoint(place, 4)
    mirror.fetch(place)
    assert newest_whole(place) == str(place / "checkpoint-6")
    assert {path.name for path in place.iterdir()} == {"checkpoint-4", "checkpoint-6"}
    assert check_seal(place / "checkpoint-6") == {"step": 6}
    assert (place / "checkpoint-6" / "shards" / "rank_0").read_bytes() == b"state" * 1000


def test_the_best_is_kept_and_without_a_limit_all(tmp_path):
    mirror = Mirror("memory://mirror-best")
    for step, keep in ((1, None), (2, None), (3, keep_last(1))):
        mirror.put(str(checkpoint(tmp_path, step)), step, keep, 1)
        mirror.wait()
        if keep is None:
            assert len(CheckpointFolder("memory://mirror-best").names()) == step
    names = CheckpointFolder("memory://mirror-best").names()
    assert names == ["step-00000001", "step-00000003"]


def test_a_copy_that_fails_is_warned_about(tmp_path):
    (tmp_path / "file").write_text("no folder")
    mirror = Mirror(f"file://{tmp_path}/file/mirror")
    mirror.put(str(checkpoint(tmp_path, 1)), 1, None, None)
    with pytest.warns(UserWarning, match="mirror lacks a checkpoint: .* check the URL"):
        mirror.wait_and_warn()


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
import os
import shutil
import sys
import torch
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.callbacks.adapters import to_transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers import set_seed

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        control.should_training_stop = state.global_step == 4

def train(place, resume=None, callbacks=(), saver=None):
    set_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (12, 8))]
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, **sizes))
    arguments = TrainingArguments(
        place, save_steps=2 if saver is None else 100, num_train_epochs=1, use_cpu=True,
        per_device_train_batch_size=2 // processes, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
    if saver is not None:
        trainer.add_callback(to_transformers(saver, trainer=trainer))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    if callbacks and trainer.is_world_process_zero():
        shutil.rmtree(arguments.output_dir)
    trainer.accelerator.wait_for_everyone()

bucket, processes = sys.argv[1], int(os.environ.get("WORLD_SIZE", "1"))
train("plain")
train(bucket + "/gpt", callbacks=[Stop()])
train(bucket + "/gpt", resume=True)

saver = Checkpoint(bucket + "/copies", every="3 steps", keep_last=1)
train("other", callbacks=[Stop()], saver=saver)
train("other", resume=True, saver=saver)
"""
LAUNCH = ("-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes", "2", "--as_accelerate")
STARTS = {1: ("-m", "accel_callbacks.as_accelerate"), 2: LAUNCH}


@pytest.mark.s3
@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.distributed)],
)
def test_a_trainer_goes_on_from_a_url_on_a_new_disk(processes, tmp_path, s3_options):
    pytest.importorskip("transformers")
    script, place = tmp_path / "script.py", f"bucket/on-{processes}"
    script.write_text(REMOTE)
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": str(s3_options["endpoint_url"]),
    }
    done = subprocess.run(
        [sys.executable, *STARTS[processes], str(script), f"s3://{place}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Either process may fetch, and the first one says so. Without a copy, resume=True is an error.
    says = done.stdout + done.stderr
    assert processes == 2 or f"checkpoint-4 is fetched from s3://{place}/gpt" in says
    filesystem = fsspec.filesystem("s3", **s3_options)
    filesystem.invalidate_cache()
    weights = filesystem.cat(f"{place}/gpt/model.safetensors")
    assert weights == (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert filesystem.exists(f"{place}/gpt/trainer_state.json")
    assert f"checkpoint-3 is fetched from s3://{place}/copies" in says
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == weights
    copies = filesystem.ls(f"{place}/copies")
    assert [path.rpartition("/")[2] for path in copies] == ["step-00000006"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"monitor": "loss"}, r"\(monitor=...\) needs accel.run: give metric_for_best_model"),
        ({"on_exception": True}, r"\(on_exception=...\) needs accel.run: .* give an interval"),
        ({"trainable_only": True}, "the Trainer decides what a checkpoint holds"),
        ({"dirpath": None}, "beside the Trainer's output_dir: give dirpath"),
    ],
)
def test_what_a_trainer_cannot_do_for_a_checkpoint_is_refused(options, advice, tmp_path):
    with pytest.raises(ValueError, match=advice):
        HostedCheckpoint(Checkpoint(**({"dirpath": tmp_path} | options)), object())
