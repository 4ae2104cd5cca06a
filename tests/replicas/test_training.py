"""Replicas as processes are killed, stopped, started again; `scripts/test_torchft` has torchft."""

from __future__ import annotations

import json
import signal
from datetime import timedelta

import pytest

from tests.replicas.fleet import Fleet, assert_replayed, committed, refused

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture
def fleet_of(tmp_path):
    fleets = []

    def start(**options) -> Fleet:
        fleets.append(Fleet(tmp_path, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.close()


def has_trained_on(fleet: Fleet, replicas: int) -> bool:
    return any(row.get("committed") and row["replicas"] == replicas for row in fleet.rows())


def test_replicas_train_as_one_process_does(fleet_of):
    fleet = fleet_of(replicas=2)
    fleet.start("a")
    fleet.start("b")
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    windows = assert_replayed(fleet, 2, "a", "b")
    assert [len(window) for window in windows] == [2] * 24
    assert refused(fleet) == 0
    assert [path.name for path in fleet.root.glob("model-*")] == ["model-a"]


@pytest.mark.parametrize(
    ("phase", "lost_attempts"),
    [("before_sum", 1), ("after_vote", 0), ("before_quorum", 0)],
)
def test_a_killed_replica_costs_an_attempt_and_comes_back(fleet_of, phase, lost_attempts):
    fleet = fleet_of(replicas=3, hold_at=14, hold_for=4, pause=0.2, pause_from=14)
    for name in "abc":
        fleet.start(name, **({"phase": phase, "at": 6} if name == "b" else {}))
    assert fleet.wait("b") == [-signal.SIGKILL], fleet.output("*")
    fleet.until(lambda: has_trained_on(fleet, 2))
    fleet.start("b")
    assert fleet.wait("a", "b", "c") == [0, 0, 0], fleet.output("*")
    windows = assert_replayed(fleet, 2, "a", "b", "c")
    sizes = [len(window) for window in windows]
    assert (sizes[0], sizes[-1]) == (3, 3), sizes
    assert refused(fleet) == lost_attempts
    assert "took over the state of" in fleet.output("b")


def test_the_first_replica_is_lost_within_a_window_of_several_batches(fleet_of):
    options = {"replicas": 2, "accumulate": 2, "workers": 1, "hold_at": 9, "hold_for": 3}
    options |= {"pause": 0.2, "pause_from": 9}
    fleet = fleet_of(**options)
    fleet.start("a", phase="before_sum", at=4)
    fleet.start("b")
    assert fleet.wait("a") == [-signal.SIGKILL], fleet.output("*")
    fleet.until(lambda: has_trained_on(fleet, 1))
    fleet.start("a")
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    windows = assert_replayed(fleet, 2, "a", "b")
    # When the newcomer comes decides whether the last window of an epoch is a short one.
    short = [window for window in windows if {len(place) for place in window} != {2}]
    assert len(short) <= 2 < len(windows)


def test_a_stopped_replica_is_left_behind_and_takes_over_the_state(fleet_of):
    fleet = fleet_of(replicas=2, timeout=3, hold_at=14, hold_for=3, pause=0.2, pause_from=14)
    fleet.start("a")
    fleet.start("b", phase="before_sum", at=5, stop=True)
    fleet.until(lambda: has_trained_on(fleet, 1))
    fleet.processes["b"].send_signal(signal.SIGCONT)
    assert fleet.wait("b") == [1]
    assert "ReplicaBehindError" in fleet.output("b")
    fleet.start("b")
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    assert_replayed(fleet, 2, "a", "b")


def test_training_waits_for_a_lighthouse_that_is_lost(fleet_of):
    fleet = fleet_of(replicas=2, pause=0.1)
    fleet.start("a")
    fleet.start("b")
    fleet.until(lambda: len([row for row in fleet.rows() if row.get("committed")]) > 8)
    fleet.lighthouse.kill()
    fleet.lighthouse.wait()
    fleet.until(lambda: all("does not answer" in fleet.output(name) for name in "ab"))
    fleet.light()
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    windows = assert_replayed(fleet, 2, "a", "b")
    assert {len(window) for window in windows} == {2}
    assert "is back" in fleet.output("a")


def test_a_replica_that_comes_after_the_end_does_not_train_alone(fleet_of):
    fleet = fleet_of(replicas=2, epochs=1)
    fleet.start("a")
    fleet.start("b")
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    before = committed(fleet)
    fleet.start("b", wait=4)
    assert fleet.wait("b") == [1]
    assert "does not train alone" in fleet.output("b")
    assert committed(fleet) == before


def test_training_waits_below_the_least_number_of_replicas(fleet_of):
    fleet = fleet_of(replicas=2, min_replicas=2)
    fleet.start("a")
    fleet.until(lambda: fleet.output("a").count("waiting for 1 more of 2") == 1)
    fleet.start("b", phase="before_quorum", at=5)
    assert fleet.wait("b") == [-signal.SIGKILL], fleet.output("*")
    fleet.until(lambda: fleet.output("a").count("waiting for 1 more of 2") == 2)
    fleet.start("b")
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    windows = assert_replayed(fleet, 2, "a", "b")
    assert {len(window) for window in windows} == {2}


def test_one_replica_saves_and_logs_and_another_follows_it(fleet_of):
    fleet = fleet_of(replicas=2, checkpoints=True, log=True)
    fleet.start("a", phase="before_quorum", at=8)
    fleet.start("b")
    assert fleet.wait("a", "b") == [-signal.SIGKILL, 0], fleet.output("*")
    assert [row["writes"] for row in fleet.rows() if "joined" in row] == [True, False]
    steps = len(committed(fleet))
    saved = sorted(path.name for path in fleet.root.glob("project/**/step-*"))
    assert saved, "nothing was saved"
    assert saved[-1] == f"step-{steps:08d}"
    log = fleet.root / "project" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    logged = [row["step"] for row in rows if row["type"] == "metrics"]
    journals = list(fleet.root.glob("project/journal/*/attempt-*.jsonl"))
    assert len(journals) == 2, "one of each replica that wrote"
    assert logged == list(range(1, steps + 1))
    for name in "ab":  # all are gone: the training goes on from the disk
        fleet.start(name, epochs=3)
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    joined = sorted(row["joined"] for row in fleet.rows() if "joined" in row)
    assert joined == [0, 0, steps, steps]
    assert_replayed(fleet, 3, "a", "b")


def test_a_launcher_starts_a_killed_replica_again(fleet_of):
    fleet = fleet_of(replicas=2, hold_at=14, hold_for=3, pause=0.2, pause_from=14)
    fleet.launch("a")
    fleet.launch("b", phase="before_sum", at=5)
    assert fleet.wait("a", "b") == [0, 0], fleet.output("*")
    assert_replayed(fleet, 2, "a", "b")
    assert len(list(fleet.root.glob("b.*.jsonl"))) == 2


def test_another_program_at_the_lighthouse_is_named(fleet_of):
    from torchft.coordination import LighthouseClient

    fleet = fleet_of(replicas=2, wait=20)
    fleet.start("a")
    fleet.until(lambda: "waiting for 1 more" in fleet.output("a"))
    client = LighthouseClient(f"http://127.0.0.1:{fleet.port}", timedelta(seconds=5))
    client.quorum("other", timedelta(seconds=20), data={"program": 7})
    assert fleet.wait("a") == [1]
    assert "a lighthouse for each training" in fleet.output("a")
