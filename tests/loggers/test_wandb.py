from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo, TrackerHub, WandBTracker, read_jsonl


def test_offline_without_credentials_and_environment_untouched(
    run_info: Callable[..., RunInfo], wandb_records: Callable[[str], list[Any]]
) -> None:
    before, run = dict(os.environ), run_info()
    with TrackerHub([WandBTracker(tags=["t"])], run=run, strict=True) as hub:
        raw = hub.get("wandb").raw
        assert raw.offline
        assert (raw.id, raw.project, raw.tags) == ("a1", "digits", ("t",))
        hub.log_config({"optim": {"lr": 0.5}, "path": Path("x")})
        hub.log({"loss": 0.5}, 1)
    changed = {key for key in os.environ.keys() | before if os.environ.get(key) != before.get(key)}
    assert not {key for key in changed if key != "WANDB_SERVICE"}  # the tool's own
    configs: dict[str, Any] = {}
    for record in wandb_records(run.logging_dir):
        for update in (*record.run.config.update, *record.config.update):
            configs[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
    assert configs["optim"] == {"lr": 0.5}
    assert configs["path"] == "x"


@pytest.mark.parametrize(("status", "code"), [("success", 0), ("failed", 1), ("interrupted", 255)])
def test_exit_code(
    status: Any, code: int, run_info: Callable[..., RunInfo], wandb_records: Any
) -> None:
    run = run_info(run_id="odd/id:1")
    tracker = WandBTracker()
    tracker.start(run)
    assert tracker.state_dict()["run_id"] == "odd-id-1"
    tracker.finish(status)
    kinds = [(r.WhichOneof("record_type"), r) for r in wandb_records(run.logging_dir)]
    assert [record.exit.exit_code for kind, record in kinds if kind == "exit"] == [code]


def test_a_run_that_is_open_already_is_left_alone(
    run_info: Callable[..., RunInfo], tmp_path: Path
) -> None:
    import wandb

    mine = wandb.init(project="mine", mode="offline", dir=str(tmp_path), settings={"silent": True})
    try:
        tracker = WandBTracker()
        tracker.start(run_info())
        assert tracker.raw is not mine
        assert tracker.raw.id == "a1"
        tracker.finish()
        mine.log({"still": "open"})
    finally:
        mine.finish()


def test_mode_follows_credentials(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only what would be asked of wandb.init; nothing is sent anywhere."""
    import wandb

    def mode(tracker: WandBTracker) -> Any:
        return tracker._arguments(wandb, run_info()).get("mode")

    assert mode(WandBTracker()) == "offline"
    assert mode(WandBTracker(mode="disabled")) == "disabled"
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "online")
        assert mode(WandBTracker()) is None
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "x" * 40)
        assert mode(WandBTracker()) is None
    with monkeypatch.context() as patch:
        netrc = tmp_path / "netrc"
        netrc.write_text(f"machine api.wandb.ai login user password {'x' * 40}\n")
        netrc.chmod(0o600)
        patch.setenv("NETRC", str(netrc))
        assert mode(WandBTracker()) is None
    rewind = WandBTracker(resume_from="a1?_step=3")._arguments(wandb, run_info())
    assert not {"id", "resume"} & rewind.keys()


def _own_service() -> dict[str, str]:
    """An environment in which a child starts a wandb service rather than joining this one's."""
    return {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}


SERVICE_DIES = """
import glob, os, signal, sys
from loggers import RunInfo, TrackerHub

def children(pid):
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with open(path) as file:
            for child in map(int, file.read().split()):
                yield child
                yield from children(child)

hub = TrackerHub(["wandb", "jsonl"], run=RunInfo("digits", sys.argv[1], "a1"), flush_every_s=0.0)
hub.start()
hub.log({"loss": 0.0}, 0)
found = []
for pid in children(os.getpid()):
    with open(f"/proc/{pid}/cmdline") as file:
        if "wandb-core" in file.read():
            found.append(pid)
for pid in found:
    os.kill(pid, signal.SIGKILL)
for step in range(1, 50):
    hub.log({"loss": 1.0}, step)
hub.finish()
print(len(found) > 0, hub.report()["wandb"].failures > 0, flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the process in /proc")
def test_death_of_the_wandb_service_does_not_stop_the_run(tmp_path: Path) -> None:
    """The process that wandb runs beside ours is killed; without isolation the loop dies."""
    command = [sys.executable, "-c", SERVICE_DIES, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=_own_service()
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(50))


KILLED = """
import sys, time
from loggers import RunInfo, TrackerHub

hub = TrackerHub(["wandb"], run=RunInfo("digits", sys.argv[1], "a1"), flush_every_s=0.0)
hub.start()
for step in range(10):
    hub.log({"loss": 1.0}, step)
print("logged", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_sigkill_keeps_rows_older_than_the_short_flush(tmp_path: Path, read_wandb: Any) -> None:
    """The tool's own default would keep none of them."""
    import time

    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=_own_service()
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != "logged":
            pass
        time.sleep(4)
        child.send_signal(signal.SIGKILL)
    # the newest step is held until the next begins
    assert len(read_wandb(str(tmp_path), finished=False)) >= 9
