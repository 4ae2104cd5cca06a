"""``accel ckpt cp`` and ``rm`` with an S3 server, and beside a save that is under way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel_callbacks.cli.main import main
from checkpoint_io import save, verify
from checkpoint_io.storage.open import open_store
from tests.servers import S3Server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    save(path, {"w": torch.arange(600_000.0), "v": torch.ones(300)}, max_shard_size="1MB")
    return path


def options(flag: str, server: S3Server) -> list[str]:
    words = {name: value if isinstance(value, str) else json.dumps(value)
             for name, value in server.options.items()}  # fmt: skip
    return [word for name, value in words.items() for word in (flag, f"{name}={value}")]


@pytest.mark.s3
def test_a_checkpoint_goes_to_s3_and_back_and_is_removed_there(
    place: Path, moto: S3Server, tmp_path: Path
) -> None:
    there, back = moto.url("copies/one"), tmp_path / "back"
    source, target = options("--storage_option", moto), options("--target_option", moto)
    assert main(["ckpt", "cp", str(place), there, *target, "--read_back"]) == 0
    verify(there, storage_options=moto.options)
    assert main(["ckpt", "cp", there, str(back), *source]) == 0
    assert {file.name: file.read_bytes() for file in back.iterdir()} == {
        file.name: file.read_bytes() for file in place.iterdir()
    }
    assert main(["ckpt", "rm", there, "--yes", *source]) == 0
    assert open_store(there, moto.options).sizes() == {}


def test_a_checkpoint_that_is_being_written_is_not_removed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(str(place), {}).lock():
        assert main(["ckpt", "rm", str(place), "--yes"]) != 0
    assert "Traceback" not in capsys.readouterr().err
    verify(place)
