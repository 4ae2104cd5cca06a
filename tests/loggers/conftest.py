"""Readers that use each tool's own format, and a run to write."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo

History = list[tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B must not find an account on the machine that runs the tests."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DISABLED", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))


@pytest.fixture
def run_info(tmp_path: Path) -> Callable[..., RunInfo]:
    def make(resumed_step: int | None = None, **kwargs: Any) -> RunInfo:
        fields = {"name": "digits", "logging_dir": str(tmp_path / "runs"), "run_id": "a1"}
        return RunInfo(**{**fields, **kwargs}, resumed_step=resumed_step)

    return make


@pytest.fixture
def s3_environment(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables by which an S3 client finds the server on loopback without options."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    return s3_options


def _wandb_records(path: Path) -> Iterator[Any]:
    """Decode a .wandb file: LevelDB log framing around protobuf records."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, pos, parts = path.read_bytes(), 7, b""
    while pos + 7 <= len(data):
        left = 32768 - pos % 32768
        if left < 7:
            pos += left
            continue
        _, size, kind = struct.unpack("<IHB", data[pos : pos + 7])
        if pos + 7 + size > len(data):  # the service is writing it
            return
        parts += data[pos + 7 : pos + 7 + size]
        pos += 7 + size
        if size == 0 and kind == 0:
            return
        if kind in (1, 4):  # a full record, or the last part of one
            record = pb.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.fixture
def wandb_records() -> Callable[..., list[Any]]:
    def read(folder: str, finished: bool = True) -> list[Any]:
        """All records; of a finished run its last one is waited for, as a service writes them."""
        while True:
            files = sorted(Path(folder).glob("wandb/*run-*/run-*.wandb"))
            runs = [list(_wandb_records(file)) for file in files]
            ended = [any(r.WhichOneof("record_type") == "exit" for r in run) for run in runs]
            if not finished or (runs and all(ended)):
                return [record for run in runs for record in run]
            time.sleep(0.05)

    return read


@pytest.fixture
def read_wandb(wandb_records: Callable[..., list[Any]]) -> Callable[..., History]:
    def read(folder: str, finished: bool = True) -> History:
        rows = []
        for record in wandb_records(folder, finished):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                values = {key: value for key, value in row.items() if not key.startswith("_")}
                rows.append((values.pop("trainer/global_step", None), values))
        return [row for row in rows if row[1]]

    return read


@pytest.fixture
def accumulator() -> Callable[[str], Any]:
    def load(folder: str) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{folder}/tensorboard", size_guidance={"scalars": 0})
        return events.Reload()

    return load


@pytest.fixture
def read_tensorboard(accumulator: Callable[[str], Any]) -> Callable[[str], History]:
    def read(folder: str) -> History:
        events, rows = accumulator(folder), {}
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                row = rows.setdefault(event.step, {})
                assert tag not in row, f"{tag} is drawn twice at step {event.step}"
                row[tag] = event.value
        for tag in events.Tags()["tensors"]:
            if tag.endswith("/text_summary") and not tag.startswith("config"):
                for event in events.Tensors(tag):
                    text = event.tensor_proto.string_val[0].decode()
                    rows.setdefault(event.step, {})[tag.removesuffix("/text_summary")] = text
        return sorted(rows.items())

    return read
