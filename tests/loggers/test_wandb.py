from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loggers import RunInfo, TrackerHub, WandBTracker, read_jsonl
from loggers.trackers import wandb as wandb_tracker


@pytest.fixture(autouse=True, scope="module")
def no_telemetry() -> None:
    """W&B's own threads would look up its host for the rest of the session.

    A fork that another test makes at that moment inherits the resolver's lock, and waits for ever.
    """
    with suppress(ImportError):  # versions without it
        from wandb.analytics.opentelemetry.opentelemetry_proxy import disable

        disable()


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


def test_another_rank_resumes_a_run_of_its_own(run_info: Callable[..., RunInfo]) -> None:
    """The checkpoint has the id of the main process only."""
    tracker = WandBTracker(all_ranks=True)
    tracker.load_state_dict({"run_id": "a1", "last_step": 3, "row": 3, "rank": 0})
    tracker.start(run_info(3, rank=1))
    assert tracker.raw.id == "a1-rank1"
    tracker.finish()


def test_mode_follows_credentials(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only what would be asked of wandb.init; nothing is sent anywhere."""
    import wandb

    def arguments(tracker: WandBTracker) -> dict[str, Any]:
        tracker._package = wandb
        return tracker._arguments(run_info())

    def mode(tracker: WandBTracker) -> Any:
        return arguments(tracker).get("mode")

    assert mode(WandBTracker()) == "offline"
    assert mode(WandBTracker(mode="disabled")) == "disabled"
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "online")
        assert mode(WandBTracker()) is None
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_DISABLED", "true")
        assert mode(WandBTracker()) == "disabled"
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "x" * 40)
        assert mode(WandBTracker()) is None
    with monkeypatch.context() as patch:
        netrc = tmp_path / "netrc"
        netrc.write_text(f"machine api.wandb.ai login user password {'x' * 40}\n")
        netrc.chmod(0o600)
        patch.setenv("NETRC", str(netrc))
        assert mode(WandBTracker()) is None
    rewind = arguments(WandBTracker(resume_from="a1?_step=3"))
    assert not {"id", "resume"} & rewind.keys()


def test_the_variable_that_disables_does(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    run = run_info()
    with TrackerHub(["wandb"], run=run, strict=True) as hub:
        hub.log_config({"lr": 0.1})
        hub.log({"loss": 0.5}, 1)
        assert hub.get("wandb").raw.disabled
        assert hub.state_dict()["wandb"]["run_id"] == "a1"  # for a resume that is not disabled
    assert not list(Path(run.logging_dir).glob("wandb/*run-*"))


def test_nothing_is_dropped(
    run_info: Callable[..., RunInfo], read_wandb: Any, wandb_records: Any
) -> None:
    """Lower steps and second values, which W&B would drop, have rows of their own."""
    run, tracker = run_info(), WandBTracker()
    logged = [(2, {"a": 1}), (2, {"b": 2}), (7, {"a": 3}), (5, {"a": 4}), (7, {"b": 5}),
              (8, {"a": 6}), (8, {"a": 7}), (100, {"a": 8})]  # fmt: skip
    tracker.start(run)
    for step, values in logged:
        tracker.log(values, step, time=1e9 + step)
    assert tracker.state_dict() == {"run_id": "a1", "last_step": 100, "row": 100, "rank": 0}
    tracker.finish()
    expected = [(2, {"a": 1, "b": 2}), *logged[2:]]
    assert read_wandb(run.logging_dir) == expected
    records = wandb_records(run.logging_dir)
    rows = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    own = [{i.nested_key[0]: json.loads(i.value_json) for i in row.item} for row in rows]
    assert [row["_step"] for row in own] == [2, 7, 8, 9, 10, 11, 100]
    assert own[1]["_timestamp"] == 1e9 + 7
    axes = [r.metric for r in records if r.WhichOneof("record_type") == "metric"]
    assert [axis.step_metric for axis in axes if axis.glob_name == "*"] == ["trainer/global_step"]


def test_a_tracker_that_is_used_twice_has_two_runs(
    run_info: Callable[..., RunInfo], read_wandb: Any
) -> None:
    tracker = WandBTracker()
    for run_id in ("a1", "b2"):
        tracker.start(run_info(run_id=run_id))
        assert tracker.raw.id == run_id
        tracker.log({"a": 1}, 5 if run_id == "a1" else 1)
        tracker.finish()
    assert read_wandb(run_info().logging_dir) == [(5, {"a": 1}), (1, {"a": 1})]


def test_media_are_read_back(
    run_info: Callable[..., RunInfo], read_wandb: Any, wandb_records: Any
) -> None:
    from PIL import Image

    red = np.zeros((2, 3, 4, 3), np.uint8)
    red[..., 0] = 200
    run, tracker = run_info(), WandBTracker()
    tracker.start(run)
    tracker.log({"loss": 0.5}, 3)
    tracker.log_images({"val/red": red}, 3, captions={"val/red": ["a", "b"]})
    tracker.log_audio({"beep": np.zeros((100, 2))}, 3, sample_rate=8000)
    tracker.log_video({"film": np.stack([red[0], red[0] // 2])}, 3)
    tracker.log_histogram({"w": np.array([0, 1.0, math.nan]), "none": np.zeros(0)}, 3)
    tracker.log_text({"said": "a < b"}, 3)
    tracker.log_table("hits", ["name", "n"], [["a", 1], [None, "x"]], 3)
    tracker.log_graph("Linear(1, 2)")
    (artifact := Path(run.logging_dir, "model.bin")).write_bytes(b"x")
    tracker.log_artifact(str(artifact), name="my model", kind="model")
    files = Path(tracker.raw.dir)
    tracker.finish()
    ((step, row),) = read_wandb(run.logging_dir)  # all of it in the row of its step
    assert (step, row["loss"], "none.values" in row) == (3, 0.5, False)
    assert row["val/red.captions"] == ["a", "b"]
    paths = row["val/red.filenames"]
    with Image.open(files / paths[0]) as picture:
        assert np.array_equal(np.asarray(picture.convert("RGB")), red[0])
    with wave.open(str(files / row["beep.path"])) as beep:
        assert beep.getnframes() == 100
    with Image.open(files / row["film.path"]) as film:
        assert film.n_frames == 2
    assert sum(row["w.values"]) == 2
    assert "a &lt; b" in (files / row["said.path"]).read_text()
    assert json.loads((files / row["hits.path"]).read_text())["data"] == [["a", 1], [None, "x"]]
    assert "Linear(1, 2)" in (files / row["graph.path"]).read_text()
    kinds = [(r.WhichOneof("record_type"), r) for r in wandb_records(run.logging_dir)]
    logged = [record.artifact for kind, record in kinds if kind == "artifact"]
    assert ("my-model", "model") in [(one.name, one.type) for one in logged]


def test_a_figure(run_info: Callable[..., RunInfo], read_wandb: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    run, tracker = run_info(), WandBTracker()
    tracker.start(run)
    tracker.log_figure({"curve": figure}, 4)
    tracker.finish()
    ((step, row),) = read_wandb(run.logging_dir)
    assert (step, row["curve.width"], row["curve.height"]) == (4, 100, 50)


UNREACHABLE = """
import http.server, logging, socket, sys, threading
from loggers import RunInfo, TrackerHub, WandBTracker

folder, how = sys.argv[1:]

class Refuses(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(401)
        self.end_headers()

    do_HEAD = do_GET = do_POST = answer
    log_message = lambda *args: None

if how == "refuses":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port
else:
    server = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
    port = server.getsockname()[1]
    if how == "closed":
        server.close()
logging.basicConfig(format="%(levelname)s %(message)s")
settings = {"base_url": f"http://127.0.0.1:{port}", "init_timeout": 3}
tracker = WandBTracker(settings=settings)
with TrackerHub([tracker], run=RunInfo("digits", folder, "a1"), strict=True) as hub:
    assert tracker.raw.offline, "not offline"
    hub.log({"loss": 0.5}, 1)
print(hub.report()["wandb"].rows, hub.state_dict()["wandb"]["run_id"])
"""


@pytest.mark.parametrize(
    "how",
    [
        "closed",
        pytest.param("silent", marks=pytest.mark.slow),
        pytest.param("refuses", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_does_not_answer_makes_the_run_offline(
    how: str, tmp_path: Path, read_wandb: Any
) -> None:
    command = [sys.executable, "-c", UNREACHABLE, str(tmp_path), how]
    environment = {**_own_service(), "WANDB_API_KEY": "x" * 40}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    # After an answer that W&B does not like the id is taken.
    assert done.stdout.split() == ["1", "a1-offline" if how == "refuses" else "a1"], done.stderr
    assert done.stderr.count("WARNING W&B cannot be reached") == 1
    rows = read_wandb(str(tmp_path)) if how != "refuses" else [(1, {"loss": 0.5})]
    assert rows == [(1, {"loss": 0.5})]


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

limits = {"start_timeout_s": 600, "finish_timeout_s": 600}
run = RunInfo("digits", sys.argv[1], "a1")
hub = TrackerHub(["wandb", "jsonl"], run=run, flush_every_s=0.0, **limits)
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
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=_own_service())
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(50))


KILLED = """
import signal, sys
from loggers import RunInfo, TrackerHub

hub = TrackerHub(["wandb"], run=RunInfo("digits", sys.argv[1], "a1"))
hub.start()
for step in range(10):
    hub.log({"loss": 1.0}, step)
print("logged", flush=True)
signal.pause()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the process in /proc")
def test_sigkill_of_trainer_and_service_keeps_all_rows(tmp_path: Path, read_wandb: Any) -> None:
    """The tool's own defaults would keep none of them, and hold the last one for ever."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=_own_service()
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != "logged":
            pass
        while len(read_wandb(str(tmp_path), finished=False)) < 10:
            time.sleep(0.1)
        family = [*_children(child.pid), child.pid]
        for pid in family:  # the service first: it would write what it has when its parent is gone
            os.kill(pid, signal.SIGKILL)
    assert len(family) > 1
    expected = [(step, {"loss": 1.0}) for step in range(10)]
    assert read_wandb(str(tmp_path), finished=False) == expected


def _children(pid: int) -> Iterator[int]:
    """The processes below one."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield from _children(child)
            yield child


def test_a_flush_writes_a_row_that_was_open_for_a_while(
    run_info: Callable[..., RunInfo], read_wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(wandb_tracker.clock, "monotonic", lambda: now[0])
    run, tracker = run_info(), WandBTracker()
    tracker.start(run)
    assert not tracker.unflushed
    tracker.log({"a": 1}, 1)
    tracker.flush()
    assert tracker.unflushed
    tracker.log({"b": 2}, 1)  # soon, so it is one row
    now[0] += 10
    tracker.flush()
    assert not tracker.unflushed
    tracker.log({"c": 3}, 1)
    now[0] += 10
    tracker.flush()
    tracker.log({"d": 4}, 2, commit=False)  # the script asks for it to be held
    now[0] += 10
    tracker.flush()
    tracker.log({"e": 5}, 2)
    tracker.finish()
    expected = [(1, {"a": 1, "b": 2}), (1, {"c": 3}), (2, {"d": 4, "e": 5})]
    assert read_wandb(run.logging_dir) == expected


def test_commit_of_scripts_written_for_accelerate(
    run_info: Callable[..., RunInfo], read_wandb: Callable[..., Any]
) -> None:
    run = run_info()
    with TrackerHub(["wandb"], run=run, strict=True) as hub:
        hub.log({"a": 1}, 3, {"wandb": {"commit": False}})
        hub.log({"b": 2}, 3, {"wandb": {"commit": True}})
        hub.log({"c": 3}, 3)  # the row is written, so this has to go to another
        table = {"wandb": {"commit": True}}
        hub.log_table("t", ["n"], [[1]], 4, log_kwargs=table)
        hub.log_images({"i": np.zeros((2, 2))}, 4, log_kwargs=table)
    names = [(step, {key[0] for key in row}) for step, row in read_wandb(run.logging_dir)]
    assert names == [(3, {"a", "b"}), (3, {"c"}), (4, {"t"}), (4, {"i"})]
