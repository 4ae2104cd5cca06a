"""Copies of the Trainer's checkpoints on S3, and what a new disk gets of them."""

from __future__ import annotations

import pytest

from accel_callbacks.compat.mirror import VARIABLE, Mirror, mirror_of
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
