"""What a call does at once and what the thread that saves does: snapshot, JSON, one thread."""

from __future__ import annotations

import collections
import os
import random
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_io
from checkpoint_io import BackgroundSaver, UnsupportedStateError, prepare_save
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.tree import TreeEncoder
from checkpoint_io.saver.collect import TensorCollector, untied
from checkpoint_io.saver.plan import RankPlan
from checkpoint_io.saver.snapshot import Snapshot
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.open import open_store

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

from gated_files import Gate  # noqa: E402


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@pytest.fixture
def saver():
    saver = BackgroundSaver()
    yield saver
    saver.abandon()


def training() -> dict[str, Any]:
    """Twelve layers with Adam, and what else a training state holds."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(12)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": {"0": {str(k): v for k, v in optimizer.state_dict()["state"].items()}},
        "groups": optimizer.state_dict()["param_groups"],
        "random": random.getstate(),
        "seen": list(range(5000)),
        "run": {"step": 3, "epoch": 0, "metrics": {"loss": 0.5}, "name": "a"},
    }


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, (list, tuple)) else 0


# --- how much is done --------------------------------------------------------------------------


def test_a_list_of_numbers_is_encoded_as_one_value(tmp_path, monkeypatch):
    calls = collections.Counter()
    encode = TreeEncoder.encode

    def counting(self: TreeEncoder, value: Any, path: Any = ()) -> Any:
        calls[type(value).__name__] += 1
        return encode(self, value, path)

    monkeypatch.setattr(TreeEncoder, "encode", counting)
    state = training()
    checkpoint_io.save(tmp_path, state)
    tensors = 24 + 72
    # The optimizer's options are a few dozen numbers.
    assert tensors < calls.total() < tensors + containers(state) + 60
    assert calls["int"] < 30


def test_the_calling_thread_leaves_the_encoding_to_the_one_that_saves(saver, gate, monkeypatch):
    """It neither encodes the state, nor names tensors, nor makes JSON, nor packs files."""
    seen: set[tuple[str, bool]] = set()

    def watched(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            metadata = getattr(args[0], "_root", "") == "metadata"
            if not metadata:
                seen.add((name, threading.current_thread() is threading.main_thread()))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (TreeEncoder, "encode"),
        (TensorCollector, "add"),
        (jsonio, "dumps"),
        (RankPlan, "files"),
    ):
        watched(owner, name)
    gate.shut()
    handle = saver.save(
        f"{gate.root}/c", training(), metadata={"run_id": "r"}, storage_options=gate.options
    )
    gate.open()
    handle.wait()
    assert seen == {(name, False) for name in ("encode", "add", "dumps", "files")}


def test_a_save_of_one_process_syncs_each_file_once_and_the_folder_twice(tmp_path, monkeypatch):
    """Once for the names of the files, before the commit, and once for the commit."""
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    (tmp_path / "c").mkdir()
    manifest = checkpoint_io.save(tmp_path / "c", {"w": torch.ones(3)}, local_state={"rank": 0})
    names = [entry.name for entry in manifest.files]
    assert len(names) == 3
    assert sorted(synced[:3]) == sorted(names)
    assert synced[3:] == ["c", f"manifest-{manifest.id}.tmp", "c"]


# --- a snapshot is the state of the call -------------------------------------------------------


def usual() -> dict[str, Any]:
    weight = torch.randn(3, 2)
    return {
        "w": weight,
        "tied": weight,
        "view": weight[0],
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": [torch.empty(0), torch.empty(0, 3)],
        "conj": [torch.ones(2, dtype=torch.complex64).conj()] * 2,
        "a/b~c": {"x/y": torch.zeros(1), "__metadata__": torch.zeros(1)},
        "__metadata__": torch.zeros(2),
        "ranks": {"0": torch.zeros(3)},
        "tuple": (1, torch.ones(1), ("a", None)),
        "floats": [0.5, float("nan"), float("inf"), -0.0],
        "numbers": [1, -5, 2**70, True],
        "more": (2**9999, 3),
        "data": b"\0\1",
        "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict(b=1, a=[[], (), {}]),
        "default": collections.defaultdict(list, k=[1]),
    }


def encoded(state: dict[str, Any]) -> tuple[Any, list[str], dict[str, str]]:
    collector = TensorCollector()
    tree = TreeEncoder("state", collector.add, sharded=True).encode(state)
    return tree, list(untied(collector)), collector.tied


def test_a_snapshot_encodes_to_what_the_state_encodes_to():
    state = usual()
    snapshot, collector = Snapshot.of(state), TensorCollector()
    tensors = snapshot.take_tensors()
    tree = snapshot.encode("state", collector, tensors)
    assert jsonio.dumps(tree, "") == jsonio.dumps(encoded(state)[0], "")
    assert (list(untied(collector)), collector.tied) == encoded(state)[1:]
    assert collector.tied == {"tied": "w"}
    # Of copies too, which share no memory.
    copies, again = [t.detach().clone() for t in tensors], TensorCollector()
    assert jsonio.dumps(snapshot.encode("state", again, copies), "") == jsonio.dumps(tree, "")
    assert (list(again.tensors), again.tied) == (list(collector.tensors), collector.tied)


@pytest.mark.parametrize(
    "value",
    [
        1j,
        {1: "int key"},
        {"a", "b"},
        bytearray(b"x"),
        np.float32(1),
        np.ones(3),
        2**10_001,
        [2**10_001],
        torch.Size([1]),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.empty(0, device="meta"),
        torch.ones(2, dtype=torch.complex128),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_unusual_is_left_to_the_encoder(value):
    assert Snapshot.of({"a": [{"b": value}]}) is None


def test_what_is_changed_after_the_call_is_saved_as_it_was(saver, gate):
    state: dict[str, Any] = {
        "list": [1, [2]],
        "dict": {"a": {"b": [0.5]}},
        "tuple": ([1],),
        "w": torch.ones(2),
    }
    for name, extra in (
        ("usual", {}),
        ("unusual", {"array": np.ones(2), "ints": {1: [1]}, "set": {1}, "raw": bytearray(b"a")}),
    ):
        now = {**state, **extra}
        own: dict[str, Any] = {"seen": [1]}
        gate.shut()
        save = {"local_state": own, "storage_options": gate.options}
        handle = saver.save(f"{gate.root}/{name}", now, **save)
        now["list"].append(3)
        now["list"][1].append(3)
        now["dict"]["a"]["b"][0] = 1.5
        now["tuple"][0].clear()
        now["w"].zero_()
        own["seen"].append(2)
        for value in extra.values():
            if isinstance(value, np.ndarray):
                value[:] = 7
            elif isinstance(value, dict):
                value[1].append(2)
            elif isinstance(value, set):
                value.add(2)
            else:
                value.extend(b"b")
        gate.open()
        handle.wait()
        found = checkpoint_io.load(f"{gate.root}/{name}", storage_options=gate.options)
        assert found.state["list"] == [1, [2]]
        assert found.state["dict"] == {"a": {"b": [0.5]}}
        assert found.state["tuple"] == ([1],)
        assert found.state["w"].tolist() == [1, 1]
        assert found.local_state == {"seen": [1]}
        if extra:
            assert found.state["array"].tolist() == [1, 1]
            assert (found.state["ints"], found.state["set"]) == ({1: [1]}, {1})
            assert found.state["raw"] == b"a"
        now["list"][:], now["dict"]["a"]["b"], now["tuple"][0][:] = [1, [2]], [0.5], [1]
        now["w"].fill_(1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), r"state\['a'\]\[0\] is a builtins.object"),
        (torch.ones(2).to_sparse(), r"state\['a'\]\[0\] is a torch.Tensor"),
        (torch.ones(2, device="meta"), r"state\['a'\]\[0\] is a torch.Tensor"),
        (torch.ones(2, dtype=torch.complex128), "has dtype torch.complex128"),
        (2**10_001, "an integer of 10002 bits"),
    ],
    ids=["object", "sparse", "meta", "complex", "large"],
)
def test_what_cannot_be_saved_is_refused_by_the_call(saver, tmp_path, value, text):
    with pytest.raises(UnsupportedStateError, match=text):
        saver.save(tmp_path / "c", {"a": [value], "w": torch.ones(1)})
    assert not (tmp_path / "c").exists()


def test_a_state_that_contains_itself_or_is_too_deep_is_refused_by_the_call(saver, tmp_path):
    loop: dict[str, Any] = {"w": torch.ones(1)}
    loop["self"] = [loop]
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    fits: dict[str, Any] = {"deep": deep[0]}
    for state in (loop, {"deep": deep}):
        with pytest.raises(UnsupportedStateError, match="nested deeper than 100"):
            saver.save(tmp_path / "c", state)
    saver.save(tmp_path / "c", fits).wait()
    assert checkpoint_io.load(tmp_path / "c").state == fits


def test_tied_tensors_are_copied_once_and_stay_tied(saver, gate):
    weight = torch.ones(8)
    state = {"embedding": weight, "head": weight, "other": weight[:4]}
    job = prepare_save("memory://tied", state, next_generation=lambda old: 1)
    assert len(job.tensors) == 2
    gate.shut()
    handle = saver.save(f"{gate.root}/c", state, storage_options=gate.options)
    weight.zero_()
    gate.open()
    manifest = handle.wait()
    assert manifest.aliases == {"head": "embedding"}
    found = checkpoint_io.load(f"{gate.root}/c", storage_options=gate.options).state
    assert found["head"] is found["embedding"]
    assert found["other"].tolist() == [1, 1, 1, 1]


def test_a_save_under_way_does_not_keep_the_tensors_of_the_call(saver, gate):
    weight = torch.ones(8)
    alive = weakref.ref(weight)
    gate.shut()
    handle = saver.save(f"{gate.root}/c", {"w": weight}, storage_options=gate.options)
    del weight
    assert alive() is None
    assert not handle.done()
    gate.open()
    handle.wait()


# --- one thread ----------------------------------------------------------------------------------


def test_saves_run_on_one_thread_which_close_ends(saver, tmp_path):
    threads: list[threading.Thread] = []
    for number in range(3):
        job = prepare_save(tmp_path / str(number), {"n": number}, next_generation=lambda old: 1)
        saver.submit(job, afterwards=lambda: threads.append(threading.current_thread()))
        saver.wait()
    assert len(set(threads)) == 1
    assert threads[0].is_alive()
    saver.close()
    threads[0].join()
    assert not threads[0].is_alive()
    saver.save(tmp_path / "again", {"n": 4}).wait()
    assert checkpoint_io.load(tmp_path / "again").state == {"n": 4}


def test_a_saver_that_is_dropped_ends_its_thread(tmp_path):
    threads: list[threading.Thread] = []
    saver = BackgroundSaver()
    job = prepare_save(tmp_path, {"n": 1}, next_generation=lambda old: 1)
    saver.submit(job, afterwards=lambda: threads.append(threading.current_thread()))
    saver.wait()
    del saver
    threads[0].join()
    assert not threads[0].is_alive()


def test_after_a_save_that_was_abandoned_the_next_one_does_not_wait_for_it(saver, tmp_path):
    going_on = threading.Event()
    job = prepare_save(tmp_path / "slow", {"n": 1}, next_generation=lambda old: 1)
    saver.submit(job, afterwards=lambda: going_on.wait())
    slow = saver.abandon()
    try:
        saver.save(tmp_path / "next", {"n": 2}).wait()
        assert not slow.done()
    finally:
        going_on.set()
    slow.wait()


# --- a local path is opened without fsspec ------------------------------------------------------


@pytest.mark.parametrize("path", ["c", "./a/../c", "~/c", "a//c/", "/", "/tmp/a b", "ü"])
def test_a_path_is_opened_as_fsspec_would(path, tmp_path, monkeypatch):
    from fsspec.core import url_to_fs

    monkeypatch.chdir(tmp_path)
    assert open_store(path).url == LocalStore(url_to_fs(path)[1]).url
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert open_store(f"file:{tmp_path}").url == str(tmp_path)
