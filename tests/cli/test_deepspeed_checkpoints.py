"""Checkpoints that DeepSpeed has written: shown and merged, and no pickle is executed.

The files are made here as DeepSpeed makes them; tests/deepspeed reads real ones.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import checkpoint_io
from accel_callbacks.cli.main import main


class LossScaler:
    """An object that only full unpickling could create."""


class Payload:
    """A pickle of this would make a folder when it is read by plain pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def model_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (4, 5), "frozen": (3, 3), "seen": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


GROUPS = [["a.weight", "a.bias"], ["b.weight"]]


def write(
    folder: Path, stage: int, ranks: int = 2, step: int = 7, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a checkpoint as DeepSpeed does; return the weights.

    Args:
        changes: entries of the model states or of the optimizer states, in place of the real ones.
    """
    state = model_state()
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = [OrderedDict((name, state[name].shape) for name in names) for names in GROUPS]
    model: dict[str, Any] = {
        "module": OrderedDict({**state, "tied": state["b.weight"]}),
        "buffer_names": ["seen"],
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict(frozen=state["frozen"].shape),
        "shared_params": {"tied": "b.weight"},
        "global_steps": step,
        "ds_version": "0.19.8",
    }
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        optimizer: dict[str, Any] = {
            "loss_scaler": LossScaler(),
            "partition_count": ranks if stage == 3 else [ranks] * 2,
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
        }
        if stage == 3:
            parts = [[part(state[name], rank, ranks) for name in names] for names in GROUPS]
            optimizer[key] = [torch.cat(group) for group in parts]
            fragments = OrderedDict(frozen=part(state["frozen"], rank, ranks))
            empty = OrderedDict((name, torch.empty(0)) for name in [*state, "tied"])
            module = empty | {"seen": state["seen"]}
            own = {**model, "module": module, "frozen_param_fragments": fragments, **changes}
            own = {name: value for name, value in own.items() if name not in optimizer}
            torch.save(own, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            flats = [torch.cat([state[name].flatten() for name in names]) for names in GROUPS]
            optimizer[key] = [part(flat, rank, ranks) for flat in flats]
        optimizer |= {name: value for name, value in changes.items() if name not in model}
        torch.save(
            {"optimizer_state_dict": optimizer},
            tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    if stage < 3:
        torch.save(
            {**model, **{name: value for name, value in changes.items() if name in model}},
            tag / "mp_rank_00_model_states.pt",
        )
    return state


def part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return one rank's part of a flat tensor, padded."""
    size = -(-tensor.numel() // ranks)
    padded = torch.cat([tensor.flatten(), torch.zeros(size * ranks - tensor.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) for name, value in wanted.items()
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_pieces_of_all_ranks_are_merged(tmp_path: Path, stage: int, ranks: int) -> None:
    state = write(tmp_path / "zero", stage, ranks)
    for place in ("zero", "zero/global_step7"):
        out = tmp_path / "out"
        assert main(["merge-weights", str(tmp_path / place), str(out), "--overwrite"]) == 0
        assert same(load_file(out / "model.safetensors"), state)
    loaded = checkpoint_io.load_model_state(tmp_path / "zero")
    assert loaded["tied"] is loaded["b.weight"]
    assert same(loaded, {**state, "tied": state["b.weight"]})


def test_without_zero_the_module_is_whole(tmp_path: Path) -> None:
    state = write(tmp_path / "zero", 2)
    for file in (tmp_path / "zero/global_step7").glob("*optim_states.pt"):
        file.unlink()
    loaded = checkpoint_io.load_model_state(tmp_path / "zero")
    assert same(loaded, {**state, "tied": state["b.weight"]})


def test_parameters_may_be_aligned_with_gaps(tmp_path: Path) -> None:
    state = model_state()
    flat = torch.cat([state["a.weight"].flatten(), torch.zeros(1), state["a.bias"], torch.zeros(3)])
    groups = [flat, torch.cat([state["b.weight"].flatten(), torch.zeros(4)])]
    write(
        tmp_path / "zero",
        2,
        ranks=1,
        single_partition_of_fp32_groups=groups,
        param_alignment_paddings=[[1, 3], [4]],
    )
    assert same(
        checkpoint_io.load_model_state(tmp_path / "zero"), {**state, "tied": state["b.weight"]}
    )


def test_they_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "zero", 3, step=12)
    assert main(["ckpt", "show", str(tmp_path / "zero/global_step12")]) == 0
    assert "tied      float32  [4, 5]  -> b.weight" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_rank_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    write(tmp_path / "zero", stage)
    (tmp_path / "zero/global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert main(["merge-weights", str(tmp_path / "zero"), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 ranks have written it, and files of 1 are there" in line


def test_models_that_are_split_otherwise_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "zero", 2)
    tag = tmp_path / "zero/global_step7"
    for name in ("mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt"):
        shutil.copy(tag / "mp_rank_00_model_states.pt", tag / name)
        assert main(["merge-weights", str(tmp_path / "zero"), str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"({name})" in line
        assert "ds_to_universal" in line
        (tag / name).unlink()


def test_nothing_is_written_into_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 3)
    assert main(["merge-weights", str(tmp_path / "a"), str(tmp_path / "b"), "--overwrite"]) == 1
    assert "holds a checkpoint" in capsys.readouterr().err
    shutil.move(tmp_path / "a/global_step7", tmp_path / "a/best")
    assert main(["merge-weights", str(tmp_path / "a"), str(tmp_path / "out")]) == 1
    assert "there are weights in its best" in capsys.readouterr().err


# --- hostile files ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_no_pickle_is_executed(tmp_path: Path, stage: int) -> None:
    planted = tmp_path / "planted"
    state = write(tmp_path / "zero", stage, loss_scaler=Payload(planted))
    loaded = checkpoint_io.load_model_state(tmp_path / "zero")  # it is not of the weights
    assert same(loaded, {**state, "tied": state["b.weight"]})
    assert not planted.exists()


@pytest.mark.parametrize(
    ("stage", "name"),
    [(2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups"), (2, "param_shapes"),
     (3, "partition_count"), (2, "module"), (3, "frozen_param_shapes")],
)  # fmt: skip
def test_an_object_in_place_of_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int, name: str
) -> None:
    planted = tmp_path / "planted"
    for value in (Payload(planted), [Payload(planted)] * 2, {"a.weight": Payload(planted)}):
        shutil.rmtree(tmp_path / "zero", ignore_errors=True)
        write(tmp_path / "zero", stage, **{name: value})
        assert main(["merge-weights", str(tmp_path / "zero"), str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "not as DeepSpeed writes them" in line
        assert not planted.exists()
        assert not (tmp_path / "out").exists()


def nested(depth: int) -> list[Any]:
    value: list[Any] = [3]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "changes",
    [
        {"param_shapes": [OrderedDict({"a.weight": (2**31, 2**31), "a.bias": (5,)})] * 2},
        {"param_shapes": [OrderedDict({"a.weight": (5, 3)})] * 2},
        {"param_shapes": [OrderedDict({"a.weight": (5, 3)}), OrderedDict({"b.weight": (-4,)})]},
        {"single_partition_of_fp32_groups": [torch.zeros(1).expand(20)] * 2},
        {"single_partition_of_fp32_groups": [torch.zeros(20, dtype=torch.int64)] * 2},
        {"single_partition_of_fp32_groups": nested(60)},
        {"param_alignment_paddings": nested(60)},
        {"partition_count": 2**40},
        {"partition_count": [[2]]},
    ],
    ids=["huge", "twice", "negative", "expanded", "integers", "nested", "gaps", "ranks", "list"],
)
def test_what_is_described_is_compared_with_what_is_stored(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write(tmp_path / "zero", 2, **changes)
    with pytest.raises(checkpoint_io.CorruptCheckpointError):
        checkpoint_io.load_model_state(tmp_path / "zero")


def test_latest_stays_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "other", 2)
    (tmp_path / "zero").mkdir()
    for tag in ("../other/global_step7", str(tmp_path / "other/global_step7"), "none", "", "\0"):
        (tmp_path / "zero/latest").write_text(tag)
        with pytest.raises(checkpoint_io.CheckpointNotFoundError):
            checkpoint_io.load_model_state(tmp_path / "zero")


@pytest.mark.parametrize("step", range(4))
def test_any_broken_byte_is_an_error_or_the_same_weights(tmp_path: Path, step: int) -> None:
    state = write(tmp_path / "zero", 3)
    wanted = {**state, "tied": state["b.weight"]}
    file = tmp_path / "zero/global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = file.read_bytes()
    weights = part(state["b.weight"], 0, 2)
    place = whole.index(weights.numpy().tobytes())
    for at in range(step, len(whole), 28):
        if place <= at < place + weights.nbytes:
            continue  # in the weights, whose checksum only verify compares
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            loaded = checkpoint_io.load_model_state(tmp_path / "zero")
        except checkpoint_io.CheckpointError:
            continue
        names = {name for name in wanted if not torch.equal(loaded[name], wanted[name])}
        assert names <= {"a.weight", "a.bias"}, at  # the rest of the weights


@pytest.mark.parametrize("cut", [0, 10, 500, 2000])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    write(tmp_path / "zero", 2)
    os.truncate(tmp_path / "zero/global_step7/mp_rank_00_model_states.pt", cut)
    with pytest.raises(checkpoint_io.CorruptCheckpointError, match="cut off or damaged"):
        checkpoint_io.load_model_state(tmp_path / "zero")
