"""Checkpoints under ZeRO: every layout loads what every other one saved, by parameter name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

import checkpoint_io
from accel_callbacks import load_checkpoint_in_model
from accel_callbacks.gradients import local_part
from tests.deepspeed.jobs import difference, finish, prepared, train, weights
from tests.support.ports import free_port
from tests.support.rounding import ABSOLUTE

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

ZERO = ["zero0", "zero1", "zero2", "zero3"]
LAYOUTS = [*ZERO, "ddp", "fsdp"]


def _saved(layout: str, folder: str, precision: str = "no") -> Any:
    job = prepared(layout, mixed_precision=precision)
    train(job, save=folder)
    found = weights(job)
    finish(job[0])
    return found


def _loaded(layout: str, folder: str, precision: str = "no") -> Any:
    job = prepared(layout, mixed_precision=precision)
    job[0].load_state(folder)
    train(job)
    found = weights(job)
    finish(job[0])
    return found


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of all layouts on two ranks, and their weights at the end."""
    root = tmp_path_factory.mktemp("saved")
    return root, {one: pool.run(_saved, one, str(root / one))[0] for one in LAYOUTS}


@pytest.mark.parametrize("layout", ZERO)
def test_a_resume_is_bitwise(pool, saved, layout: str) -> None:
    root, ends = saved
    assert difference(pool.run(_loaded, layout, str(root / layout))[0], ends[layout]) == 0.0


@pytest.mark.parametrize("source", LAYOUTS)
def test_zero_loads_what_others_saved(pool, saved, source: str) -> None:
    root, ends = saved
    for target in ZERO:
        found = pool.run(_loaded, target, str(root / source))[0]
        assert difference(found, ends["ddp"]) < ABSOLUTE, (source, target)


@pytest.mark.parametrize("source", ZERO)
def test_others_load_what_zero_saved(pool, alone, saved, source: str) -> None:
    root, ends = saved
    for target in ("ddp", "fsdp"):
        found = pool.run(_loaded, target, str(root / source))[0]
        assert difference(found, ends["ddp"]) < ABSOLUTE, (source, target)
    found = alone.run(_loaded, "ddp", str(root / source))[0]
    assert difference(found, ends["ddp"]) < ABSOLUTE, (source, "one process")


def test_names_are_those_of_the_model_and_nothing_is_pickled(saved) -> None:
    root, _ = saved
    for layout in ("zero1", "zero2", "zero3"):
        state = checkpoint_io.load(str(root / layout)).state
        model, optimizer = state["models"]["0"], state["optimizers"]["0"]
        assert model["2.weight"].shape == (30, 30)
        assert model["2.weight"].dtype == torch.float32
        assert optimizer["state"]["0.2.weight"]["exp_avg"].shape == (30, 30)
        assert [len(group["params"]) for group in optimizer["param_groups"]] == [2, 5]
        kinds = {path.suffix for path in (root / layout).rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".json", ""}, kinds


def _other_ranks(layout: str, folder: str, load: str | None) -> Any:
    return _saved(layout, folder) if load is None else _loaded(layout, load)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_four_ranks_save_and_two_load_and_back(
    pool, pool_of_4, saved, tmp_path: Path, layout: str
) -> None:
    root, ends = saved
    pool_of_4.run(_other_ranks, layout, str(tmp_path / "four"), None)
    found = pool.run(_loaded, layout, str(tmp_path / "four"))[0]
    assert difference(found, ends["ddp"]) < ABSOLUTE
    found = pool_of_4.run(_other_ranks, layout, "", str(root / layout))[0]
    assert difference(found, ends["ddp"]) < ABSOLUTE


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_bf16_keeps_the_weights_that_the_optimizer_steps_with(
    pool, tmp_path: Path, layout: str
) -> None:
    path = str(tmp_path / "state")
    end = pool.run(_saved, layout, path, "bf16")[0]
    assert difference(pool.run(_loaded, layout, path, "bf16")[0], end) == 0.0
    assert checkpoint_io.load(path).state["models"]["0"]["2.weight"].dtype == torch.float32
    pool.run(_loaded, "ddp", path, "bf16")  # and another engine goes on


def _bytes_read(layout: str, folder: str) -> tuple[int, int]:
    """Load; return the bytes of the tensors that were read into, and of all that are stored."""
    read = 0
    original = checkpoint_io.CheckpointReader.read

    def counted(self: Any, pairs: Any, **options: Any) -> None:
        nonlocal read
        pairs = list(pairs)
        read += sum(local_part(target).nbytes for _, target in pairs)
        original(self, pairs, **options)

    job = prepared(layout)
    checkpoint_io.CheckpointReader.read = counted
    try:
        job[0].load_state(folder)
    finally:
        checkpoint_io.CheckpointReader.read = original
    finish(job[0])
    manifest = checkpoint_io.read_manifest(folder)
    names = [*manifest.tensors, *manifest.aliases]
    stored = [manifest.tensors[manifest.aliases.get(name, name)] for name in names]
    return read, sum(chunk.end - chunk.begin for entry in stored for chunk in entry.chunks)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_rank_reads_its_rows_and_not_the_whole_model(pool, saved, layout: str) -> None:
    for source in ("zero3", "ddp"):
        for read, stored in pool.run(_bytes_read, layout, str(saved[0] / source)):
            assert 0.4 * stored < read < 0.6 * stored


def _model_saved(layout: str, folder: str) -> Any:
    job = prepared(layout)
    train(job)
    job[0].save_model(job[1], folder)
    found = weights(job)
    finish(job[0])
    return found


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_save_model_gathers(pool, tmp_path: Path, layout: str) -> None:
    found = pool.run(_model_saved, layout, str(tmp_path))[0]
    held = load_file(tmp_path / "model.safetensors")
    for name, one in held.items():
        assert one.flatten().tolist() == found[name]
    assert {"2.weight", "0.bias", "seen"} <= held.keys()


def _inside(layout: str, folder: str) -> None:
    job = prepared(layout, 4)
    accel = job[0]
    if layout == "ddp":
        train(job, save=folder)
    elif not os.path.exists(folder):
        with pytest.raises(RuntimeError, match=r"Save after optimizer\.step"):
            train(job, save=folder)
    else:
        with pytest.raises(RuntimeError, match="inside of a gradient window"):
            accel.load_state(folder)
        accel.load_state(folder, only=lambda key: key != "window")
    finish(accel)


def test_an_open_window_is_refused(pool, tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    pool.run(_inside, "zero2", path)
    pool.run(_inside, "ddp", path)
    pool.run(_inside, "zero3", path)


def _loaded_in_model(layout: str, folder: str, precision: str) -> Any:
    job = prepared(layout, mixed_precision=precision)
    accel, model = job[:2]
    place = model if layout != "zero2" else accel.unwrap_model(model)
    load_checkpoint_in_model(place, folder, strict=True)
    found = weights(job)
    accel.backward(model(torch.zeros(2, 7)).sum() * 0)  # a step of nothing but weight decay
    job[2].step()
    after = weights(job)
    kept = {"2.weight": torch.ones(30, 30), "x": torch.ones(1)}
    if accel.is_main_process:
        checkpoint_io.save_model(kept, f"{folder}/part-{layout}")
    accel.wait_for_everyone()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has unused x|.*did not have")
        load_checkpoint_in_model(model, f"{folder}/part-{layout}")
    part = weights(job)
    if layout != "zero0":
        with pytest.raises(ValueError, match="dtype does not go with a model that DeepSpeed"):
            load_checkpoint_in_model(model, folder, dtype="bfloat16")
    finish(accel)
    return found, after, part


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("zero0", "no"), ("zero1", "bf16"), ("zero2", "no"), ("zero3", "no"), ("zero3", "bf16")],
)
def test_weights_of_a_model_are_loaded_into_a_prepared_one(
    pool, tmp_path: Path, layout: str, precision: str
) -> None:
    wanted = pool.run(_model_saved, "ddp", str(tmp_path))[0]
    found, after, part = pool.run(_loaded_in_model, layout, str(tmp_path), precision)[0]
    assert difference(found, wanted) == 0.0
    assert difference(after, wanted) < 1e-2  # it stepped from what was loaded
    assert part == after | {"2.weight": [1.0] * 900, "4.weight": [1.0] * 900}


KILLED = """
    import os, signal, sys, torch
    sys.path.insert(0, {root!r})
    from tests.deepspeed.jobs import prepared, weights

    job = prepared("zero3")
    accel, model, optimizer, loader, _ = job
    for step, (inputs, targets) in enumerate(loader):
        accel.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            accel.save_state({good!r})
        if step == 1:
            if accel.process_index == {rank}:
                def dies(*args, **kwargs):
                    os.kill(os.getpid(), signal.SIGKILL)
                os.fsync = os.fdatasync = os.replace = dies
            accel.save_state({bad!r})
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_in_a_save_leaves_the_one_before(pool, tmp_path: Path, rank: int) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    script = tmp_path / "script.py"
    root = str(Path(__file__).parents[2])
    text = textwrap.dedent(KILLED).format(root=root, good=str(good), bad=str(bad), rank=rank)
    script.write_text(text, encoding="utf-8")
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**env, "RANK": str(one), "LOCAL_RANK": str(one)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for one in range(2)
    ]  # fmt: skip
    printed = [process.communicate()[0] for process in processes]
    assert processes[rank].returncode == -signal.SIGKILL, printed[rank]
    assert processes[1 - rank].returncode != 0, printed[1 - rank]
    with pytest.raises(checkpoint_io.CheckpointError):
        checkpoint_io.read_manifest(str(bad))
    pool.run(_loaded, "zero2", str(good))
