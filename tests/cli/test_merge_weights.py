"""``accel merge-weights``: what comes out is bit by bit what went in, wherever it was stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import checkpoint_io
from accel_callbacks.cli.main import main
from checkpoint_io.weights.foreign.inert_pickle import Record, read_inert
from checkpoint_io.weights.merge import merge_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.PReLU())


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    alike = all(torch.equal(got[key], wanted[key]) for key in wanted if key in got)
    return got.keys() == wanted.keys() and alike


def merged(source: str | Path, place: str | Path, *words: str) -> dict[str, torch.Tensor]:
    assert main(["merge-weights", str(source), str(place), *words]) == 0
    return checkpoint_io.load_model_state(place)


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def with_optimizer(net: torch.nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}


# --- the sources ----------------------------------------------------------------------------


def test_a_checkpoint_of_ours_by_url(capsys: pytest.CaptureFixture[str]) -> None:
    nets = [model().state_dict(), torch.nn.Linear(2, 2).state_dict()]
    checkpoint_io.save("memory://merge/step-1", {"models": {"0": nets[0], "1": nets[1]}})
    assert same(merged("memory://merge/step-1", "memory://merge/out"), nets[0])
    words = ["--model_index", "1"]
    assert same(merged("memory://merge/step-1", "memory://merge/two", *words), nets[1])
    assert "2 tensors, 24 B in memory://merge/two: model.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nested", "flat", "app"])
def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path, kind: str) -> None:
    net = model()
    state = with_optimizer(net)
    shapes = {"nested": state, "flat": net.state_dict(), "app": {"app": state}}
    folder = save_dcp(shapes[kind], tmp_path / "dcp")
    assert same(merged(folder, tmp_path / "out"), net.state_dict())


def test_a_part_of_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"ema": {"w": torch.ones(3), "decay": 0.9}, "model": {"w": torch.zeros(3)}}
    folder = save_dcp(state, tmp_path / "dcp")
    assert merged(folder, tmp_path / "out", "--part", "ema")["w"].tolist() == [1, 1, 1]
    assert "not tensors, left out: decay" in capsys.readouterr().err
    assert main(["merge-weights", str(folder), str(tmp_path / "no"), "--part", "emma"]) == 1
    assert "no part 'emma'; it has ema, model" in capsys.readouterr().err
    words = [str(tmp_path / "out"), str(tmp_path / "no"), "--part", "ema"]
    assert main(["merge-weights", *words]) == 1
    assert "has no .metadata of torch.distributed.checkpoint, so no part 'ema'" in (
        capsys.readouterr().err
    )


SHARDED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
import checkpoint_io
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(5, 7)
state = {"rows": distribute_tensor(whole, mesh, [Shard(0)]),
         "columns": distribute_tensor(whole, mesh, [Shard(1)]),
         "all": distribute_tensor(whole, mesh, [Replicate()]), "plain": torch.tensor(4.0)}
dcp.save({"model": state}, checkpoint_id="dcp")
checkpoint_io.save("ours", {"model": state}, group=checkpoint_io.TorchGroup())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow  # checkpoint/test_model_weights.py reads both formats by default
@pytest.mark.distributed
def test_shards_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    launch = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes=2"]
    done = subprocess.run(
        [*launch, "sharded.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    whole = torch.arange(35.0).reshape(5, 7)
    wanted = {"rows": whole, "columns": whole, "all": whole, "plain": torch.tensor(4.0)}
    for source in ("dcp", "ours"):
        assert same(merged(tmp_path / source, tmp_path / f"{source}-out"), wanted)


def write_torch_shards(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Two files and an index, as older models of transformers are."""
    folder.mkdir()
    weight_map = {}
    for number, keys in enumerate((list(state)[::2], list(state)[1::2]), 1):
        name = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({key: state[key] for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_torch_shards_and_tied_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = model().state_dict()
    write_torch_shards(tmp_path / "shards", state)
    assert same(merged(tmp_path / "shards", tmp_path / "out"), state)
    weight = torch.randn(8, 4)
    torch.save({"embed": weight, "head": weight}, tmp_path / "tied.bin")
    got = merged(tmp_path / "tied.bin", tmp_path / "tied")
    assert same(got, {"embed": weight, "head": weight})
    assert got["embed"].data_ptr() == got["head"].data_ptr()
    assert "1 tensors, 1 tied names, 128 B" in capsys.readouterr().out


def test_safetensors_shards_get_another_size_and_dtype(tmp_path: Path) -> None:
    state = model().state_dict()
    checkpoint_io.save_model(state, tmp_path / "many", max_shard_size=20)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    words = ["--dtype", "bf16", "--max_shard_size", "30"]
    got = merged(tmp_path / "many", tmp_path / "few", *words)
    assert (tmp_path / "few/model.safetensors.index.json").is_file()
    for key, tensor in state.items():
        floating = tensor.is_floating_point()
        assert torch.equal(got[key], tensor.bfloat16() if floating else tensor)
        assert got[key].dtype == (torch.bfloat16 if floating else torch.int64)
    again = merged(tmp_path / "few", tmp_path / "one", "--dtype", "fp32")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert same(again, {key: value.to(again[key].dtype) for key, value in got.items()})


def test_only_one_tensor_is_in_memory(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(40)}  # 4 MB each
    save_dcp({"model": state}, tmp_path / "dcp")
    del state
    code = (
        "import resource, sys, torch\n"
        "from checkpoint_io.weights.merge import merge_weights\n"
        "top = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = top()\n"
        "merge_weights(sys.argv[1], sys.argv[2])\n"
        "print(top() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "dcp"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60_000  # kB, of 164,000


# --- the destination ------------------------------------------------------------------------


def test_an_existing_model_stays_without_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        torch.save({"w": torch.full((2,), float(number))}, tmp_path / f"{number}.bin")
    assert merged(tmp_path / "0.bin", tmp_path / "out")["w"][0] == 0
    words = ["merge-weights", str(tmp_path / "1.bin"), str(tmp_path / "out")]
    assert main(words) == 1
    assert "add --overwrite" in capsys.readouterr().err
    assert checkpoint_io.load_model_state(tmp_path / "out")["w"][0] == 0
    assert merged(*words[1:], "--overwrite")["w"][0] == 1


def test_nothing_is_written_into_the_source_or_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_io.save(tmp_path / "step-1", {"model": model().state_dict()})
    save_dcp(model().state_dict(), tmp_path / "dcp")
    (tmp_path / "link").symlink_to(tmp_path / "dcp")
    for source, place, message in (
        ("dcp", "link", "is the folder that is read"),
        ("dcp", "step-1", "holds a checkpoint"),
        ("step-1", "dcp", "holds a checkpoint"),
        ("dcp", "out.safetensors", "is the name of a file"),
    ):
        before = sorted(tmp_path.rglob("*"))
        words = [str(tmp_path / source), str(tmp_path / place), "--overwrite"]
        assert main(["merge-weights", *words]) in (1, 2)
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["dcp", "step-1"])
def test_a_model_is_written_beside_the_folder_that_is_read(tmp_path: Path, kind: str) -> None:
    state = model().state_dict()
    if kind == "dcp":
        save_dcp(state, tmp_path / kind)
    else:
        checkpoint_io.save(tmp_path / kind, {"model": state})
    assert same(merged(tmp_path / kind, tmp_path), state)
    assert {path.name for path in tmp_path.iterdir()} == {kind, "model.safetensors"}


def test_a_model_is_not_written_over_the_file_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.bin")
    words = [str(tmp_path / "w.bin"), str(tmp_path), "--overwrite"]
    assert main(["merge-weights", *words]) == 1
    assert "is the folder that is read" in capsys.readouterr().err


def test_what_is_near_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_dcp(model().state_dict(), tmp_path / "a" / "pytorch_model_fsdp_0")
    checkpoint_io.save(tmp_path / "b" / "step-00000001", {"model": model().state_dict()})
    for folder, message in (
        ("a", "weights in its pytorch_model_fsdp_0"),
        ("b", "b/step-00000001 is"),
    ):
        assert main(["merge-weights", str(tmp_path / folder), str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert main(["merge-weights", str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


# --- hostile and damaged folders ------------------------------------------------------------


def test_metadata_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_dcp({"w": torch.ones(2)}, tmp_path / "dcp")
    told = tmp_path / "told"
    call = f"cos\nsystem\n(S'touch {told}'\ntR.".encode()
    (folder / ".metadata").write_bytes(call)
    assert isinstance(read_inert(call, "x"), Record)
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 1
    assert "is not the metadata of torch.distributed.checkpoint" in capsys.readouterr().err
    assert not told.exists()


def test_damage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_dcp({"model": {"weight": torch.randn(6, 4)}}, tmp_path / "dcp")
    whole = (folder / ".metadata").read_bytes()
    data = (folder / "__0_0.distcp").read_bytes()

    def refused(metadata: bytes, held: bytes | None) -> str:
        (folder / ".metadata").write_bytes(metadata)
        (folder / "__0_0.distcp").unlink(missing_ok=True)
        if held is not None:
            (folder / "__0_0.distcp").write_bytes(held)
        assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 1
        assert not (tmp_path / "out/model.safetensors").exists()
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        return err

    assert "is cut off" in refused(whole, data[:-200])
    assert "is missing" in refused(whole, None)
    assert "torch cannot read it" in refused(whole, bytes(len(data)))
    assert "cannot be read as the metadata" in refused(whole[: len(whole) // 2], data)
    assert "cannot be read as the metadata" in refused(b"", data)
    outside = whole.replace(b"__0_0.distcp", b"../../passwd")
    assert "not a plain folder name" in refused(outside, data)
    larger = whole.replace(b"K\x06K\x04\x86", b"K\xffK\x04\x86")
    assert larger != whole
    assert "a piece is longer than its bytes" in refused(larger, data)


@pytest.mark.parametrize("step", range(8))
def test_any_broken_byte_is_an_error_or_the_same_weights(tmp_path: Path, step: int) -> None:
    state = {"model": {"weight": torch.arange(12.0).reshape(3, 4)}}
    folder = save_dcp(state, tmp_path / "dcp")
    whole = (folder / ".metadata").read_bytes()
    for at in range(step, len(whole), 24):
        (folder / ".metadata").write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            merge_weights(folder, tmp_path / "out", overwrite=True)
        except (checkpoint_io.CheckpointError, ValueError):
            continue
        got = checkpoint_io.load_model_state(tmp_path / "out")
        assert [v.tolist() for v in got.values()] == [state["model"]["weight"].tolist()]


def test_a_torch_file_with_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2), "net": model()}, tmp_path / "whole.bin")
    assert main(["merge-weights", str(tmp_path / "whole.bin"), str(tmp_path / "out")]) == 1
    assert "was refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--max_shard_size", "5 apples"], 1, 'a positive number of bytes or text like "5GB"'),
        (["--dtype", "fp8"], 2, "invalid choice"),
        (["--storage_option", "x"], 2, "takes KEY=VALUE"),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    source = str(tmp_path / "w.safetensors")
    assert main(["merge-weights", source, str(tmp_path / "out"), *words]) == code
    assert message in capsys.readouterr().err
