"""A folder of checkpoints, and model weights, on a store that speaks S3."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_io import (
    CheckpointFolder,
    CheckpointWarning,
    keep_last,
    load_model,
    save_model,
)

pytest.importorskip("s3fs")
pytestmark = pytest.mark.s3


def _servers() -> Any:
    """The module of the test servers, which lies one folder up."""
    path = Path(__file__).resolve().parent.parent / "servers.py"
    spec = importlib.util.spec_from_file_location("folder_s3_servers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with _servers().s3_server("moto") as running:
        yield running


def fill(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        state = {"step": step, "w": torch.full((5,), float(step))}
        folder.save(step, state, metadata={"run_id": "r1"})


def test_a_killed_save_leaves_nothing_behind(server: Any) -> None:
    folder = CheckpointFolder(server.url("runs"), storage_options=server.options)
    folder.probe()
    fill(folder, 1, 2, 3)
    client = server.client()
    # what a SIGKILL leaves: the small file that says whose it is, and an upload under way
    objects = {entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]}
    shared = next(key for key in objects if "step-00000003/objects-" in key)
    save_id = shared.rsplit("objects-", 1)[1].split("-")[0]
    for step, killed in ((4, save_id), (3, "0" * 16)):
        place = f"runs/step-{step:08d}"
        source = {"Bucket": "bucket", "Key": shared}
        client.copy_object(
            Bucket="bucket", Key=f"{place}/objects-{killed}-shared.json", CopySource=source
        )
        name = f"tensors-{killed}-r00000-00001.safetensors"
        client.create_multipart_upload(Bucket="bucket", Key=f"{place}/{name}")
    with pytest.warns(CheckpointWarning, match="never finished"):
        assert [info.name for info in folder.list()][-1] == "step-00000003"
    assert folder.prune(keep_last(2), run_id="r1") == [folder.path(1)]
    left = client.list_objects_v2(Bucket="bucket", Prefix="runs/")["Contents"]
    assert {entry["Key"].split("/")[1] for entry in left} == {"step-00000002", "step-00000003"}
    assert not [entry for entry in left if "0" * 16 in entry["Key"]]
    assert not client.list_multipart_uploads(Bucket="bucket").get("Uploads")
    assert folder.load_latest().state["step"] == 3


def test_weights_stream(server: Any) -> None:
    model, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    url = server.url("model")
    names = save_model(
        model.state_dict(), url, max_shard_size="10KB", storage_options=server.options
    )
    assert len(names) == 3
    load_model(other, url, storage_options=server.options)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


@pytest.fixture
def requests_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that were requested, in turn."""
    from checkpoint_io.storage.s3.client import S3Client

    sent: list[str] = []
    once = S3Client.once

    async def counted(client: S3Client, operation: str, *args: Any, **arguments: Any) -> Any:
        sent.append(operation)
        return await once(client, operation, *args, **arguments)

    monkeypatch.setattr(S3Client, "once", counted)
    return sent


def test_one_listing_tells_what_changed(server: Any, requests_sent: list[str]) -> None:
    folder = CheckpointFolder(server.url("listed"), storage_options=server.options)
    fill(folder, 2, 1)
    assert folder.next_generation() == 3
    del requests_sent[:]
    assert folder.next_generation() == 3
    assert requests_sent == ["list_objects_v2"]
    fill(CheckpointFolder(folder.url, storage_options=server.options), 2)
    del requests_sent[:]
    assert folder.next_generation() == 4
    assert requests_sent == ["list_objects_v2", "head_object", "get_object"]
    latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000002"


def test_a_folder_of_more_than_a_listing_holds(
    server: Any, requests_sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpoint_io.storage.s3.client import S3Client

    folder = CheckpointFolder(server.url("large"), storage_options=server.options)
    fill(folder, 3, 2, 1)
    server.client().put_object(Bucket="bucket", Key="large/logs/step.txt", Body=b"x")
    once = S3Client.once

    async def short(client: S3Client, operation: str, *args: Any, **arguments: Any) -> Any:
        if operation == "list_objects_v2":
            arguments["MaxKeys"] = 2
        return await once(client, operation, *args, **arguments)

    monkeypatch.setattr(S3Client, "once", short)
    assert folder.next_generation() == 4
    del requests_sent[:]
    assert folder.next_generation() == 4
    # `logs` has no manifest, and may have one whenever it is looked at
    assert requests_sent.count("head_object") == 5
    assert "get_object" not in requests_sent
    latest = folder.latest()
    assert latest is not None
    assert latest.name == "step-00000001"
