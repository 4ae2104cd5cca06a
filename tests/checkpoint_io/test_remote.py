from __future__ import annotations

import uuid
from typing import Any

import fsspec
import pytest
import torch

from checkpoint_io import (
    CheckpointError,
    CheckpointFolder,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    UnsupportedStateError,
    keep_last,
    load,
    load_model_state,
    save,
    save_model,
    verify,
)
from checkpoint_io.store import FsspecStore, open_store


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.s3)])
def remote(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", {}
    return f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue("s3_options")


Remote = tuple[str, dict[str, Any]]


def contents(remote: Remote) -> set[str]:
    url, options = remote
    return set(open_store(url, options).sizes())


def test_round_trip_overwrite_and_damage(remote: Remote, state: dict[str, Any]) -> None:
    url, options = remote
    save(url, state, local_state={"n": 1}, storage_options=options)
    second = save(url, {**state, "step": 8}, storage_options=options)
    assert contents(remote) == {"manifest.json", *(entry.name for entry in second.files)}
    checkpoint = load(url, storage_options=options)
    assert checkpoint.state["step"] == 8
    assert torch.equal(checkpoint.state["model"]["w"], state["model"]["w"])
    assert second.generation == 2
    filesystem, path = fsspec.core.url_to_fs(url, **options)
    for entry in second.files:
        whole = filesystem.cat_file(f"{path}/{entry.name}")
        for bad in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            filesystem.pipe_file(f"{path}/{entry.name}", bad)
            with pytest.raises(CorruptCheckpointError, match=entry.name):
                verify(url, storage_options=options)
        filesystem.rm_file(f"{path}/{entry.name}")
        with pytest.raises(CorruptCheckpointError, match="missing"):
            load(url, storage_options=options)
        filesystem.pipe_file(f"{path}/{entry.name}", whole)
    verify(url, storage_options=options)


def test_failed_save_leaves_the_old_one_and_no_litter(remote: Remote, state: Any) -> None:
    url, options = remote
    save(url, state, storage_options=options)
    before = contents(remote)
    with pytest.raises(UnsupportedStateError):
        save(url, {**state, "bad": object()}, storage_options=options)
    assert contents(remote) == before
    assert load(url, storage_options=options).state["step"] == 7


def test_folder_discovery_and_retention(remote: Remote) -> None:
    url, options = remote
    folder = CheckpointFolder(url, storage_options=options)
    assert folder.list() == []
    with pytest.raises(CheckpointNotFoundError):
        folder.load_latest()
    for step in (1, 2, 3):
        folder.save(step, {"step": step, "w": torch.ones(3)}, metadata={"run_id": "r"})
    # another client, so that no cache of ours can tell it
    other = CheckpointFolder(url, storage_options={**options, "skip_instance_cache": True})
    assert [info.name for info in other.list()] == [f"step-{n:08d}" for n in (1, 2, 3)]
    assert folder.prune(keep_last(2), run_id="r") == [folder.path(1)]
    assert [info.name for info in other.list()] == ["step-00000002", "step-00000003"]
    open_store(folder.path(3), options).remove("manifest.json")
    with pytest.warns(CheckpointWarning, match="never finished"):
        assert folder.load_latest().state["step"] == 2
    with pytest.warns(CheckpointWarning):
        folder.prune(keep_last(2), run_id="r")
    assert contents((folder.path(3), options)) == set()


def test_model_layout(remote: Remote) -> None:
    url, options = remote
    weights = {f"w{i}": torch.randn(100) for i in range(5)}
    save_model(weights, url, max_shard_size=900, storage_options=options)
    save_model(weights, url, max_shard_size=1300, storage_options=options)
    assert len(contents(remote)) == 3
    loaded = load_model_state(url, storage_options=options)
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)
    assert save_model(weights, url, storage_options=options) == ["model.safetensors"]
    assert contents(remote) == {"model.safetensors"}


@pytest.mark.s3
def test_aborted_upload_publishes_nothing(s3_options: dict[str, Any]) -> None:
    """The driver's own with-block would publish the truncated object, and so would a gc."""
    store = open_store("s3://bucket/aborted", s3_options)
    assert isinstance(store, FsspecStore)
    piece = memoryview(bytearray(60 * 2**20))

    def fail() -> None:
        with store.create("part") as write:
            write(piece)  # more than one block: the multipart upload has begun
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert store.sizes() == {}
    filesystem = fsspec.filesystem("s3", **s3_options)
    uploads = filesystem.call_s3("list_multipart_uploads", Bucket="bucket")
    assert not uploads.get("Uploads")


@pytest.mark.s3
def test_bucket_that_does_not_exist(s3_options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="nothing was committed"):
        save("s3://no-such-bucket/x", {"w": torch.ones(2)}, storage_options=s3_options)
    with pytest.raises(CheckpointNotFoundError):
        load("s3://no-such-bucket/x", storage_options=s3_options)


def test_missing_driver_says_what_to_install() -> None:
    pytest.importorskip("fsspec")
    try:
        import gcsfs  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r'pip install "accel-callbacks\[gcs\]"'):
            save("gs://bucket/x", {})
    else:
        pytest.skip("gcsfs is installed here")
