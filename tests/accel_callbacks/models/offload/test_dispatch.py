"""Models over devices, host memory and disk compute what they compute in memory."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_callbacks
import accel_callbacks.utils
from accel_callbacks import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_callbacks.compat.folder import stored_in_index
from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError
from accel_callbacks.models.offload.residence import OffloadOptions
from accel_callbacks.models.offload.source import WeightReadError
from checkpoint_io import StateMismatchError, save_model
from tests.accel_callbacks.models.offload.small_model import Small, empty, saved, tokens, trained

PARTS = ("emb", "position", "blocks.0", "head")
PLACES = list(itertools.product(("cpu", "disk"), repeat=len(PARTS)))


def map_of(places: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(PARTS, places, strict=True)), "blocks.1": "cpu", "blocks.2": "disk"}


@torch.no_grad()
def same(model: torch.nn.Module, other: torch.nn.Module | None = None) -> bool:
    """Return whether two forwards are those of the model in memory, bit by bit."""
    wanted = (other or trained())(tokens())
    return all(torch.equal(model(tokens()), wanted) for _ in range(2))


def absent(model: torch.nn.Module) -> list[str]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return [name for name, one in named if isinstance(one, AbsentWeight)]


def files(folder: Path) -> dict[str, int]:
    return {
        os.path.join(place, name): os.stat(os.path.join(place, name)).st_ino
        for place, _, names in os.walk(folder)
        for name in names
    }


def test_they_are_where_scripts_look_for_them() -> None:
    for name in (
        *("cpu_offload", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"),
    ):
        assert getattr(accel_callbacks.utils, name) is getattr(accel_callbacks, name)


@pytest.mark.parametrize("places", PLACES, ids=lambda places: "-".join(places))
def test_every_placement_equals_the_model_in_memory(
    tmp_path: Path, places: tuple[str, ...]
) -> None:
    checkpoint = saved(tmp_path / "checkpoint")
    loaded = load_checkpoint_and_dispatch(empty(), checkpoint, map_of(places))
    assert same(loaded)
    assert not (tmp_path / "folder").exists()
    dispatched = dispatch_model(trained(), map_of(places), offload_dir=tmp_path / "folder")
    assert same(dispatched)
    assert absent(loaded) == absent(dispatched)
    on_disk = {part for part, place in map_of(places).items() if place == "disk"}
    tied_is_resident = not {"emb", "head"} <= on_disk
    for name, tensor in dispatched.named_parameters(remove_duplicate=False):
        part = next(part for part in map_of(places) if f"{name}.".startswith(f"{part}."))
        resident = part not in on_disk
        if name in ("emb.weight", "head.weight"):
            resident = tied_is_resident
        assert isinstance(tensor, AbsentWeight) is not resident, name
    assert dispatched.hf_device_map == map_of(places)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_all_on_disk(tmp_path: Path, direct: bool, offload_buffers: bool) -> None:
    checkpoint = saved(tmp_path)
    options = OffloadOptions(direct=direct)
    before = files(tmp_path)
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "disk"}, offload_buffers=offload_buffers, options=options
    )
    assert same(model)
    assert ("blocks.0.norm.running_mean" in absent(model)) is offload_buffers
    assert "scale" not in absent(model)
    assert files(tmp_path) == before


def test_host_memory(tmp_path: Path) -> None:
    model = cpu_offload(trained(), preload_module_classes=["Block"])
    assert same(model)
    assert len(absent(model)) == len(list(model.named_parameters(remove_duplicate=False)))
    others = trained()
    torch.nn.init.ones_(others.position)
    model = cpu_offload(
        trained(), "cpu", state_dict=others.state_dict(), preload_module_classes=["Block"]
    )
    with torch.no_grad():
        assert torch.equal(model(tokens()), others(tokens()))


def test_weights_in_memory_are_written_once(tmp_path: Path) -> None:
    model = disk_offload(trained(), tmp_path, preload_module_classes=["Block"])
    assert same(model)
    first = files(tmp_path)
    nbytes = sum(one.nbytes for one in trained().parameters())
    assert nbytes <= sum(os.path.getsize(path) for path in first) <= nbytes + 8192
    assert same(disk_offload(trained(), tmp_path))
    assert same(disk_offload(model, tmp_path))
    assert files(tmp_path) == first


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    """Accelerate's second model computes with the first one's weights."""
    torch.manual_seed(1)
    other = Small().eval()
    first = disk_offload(trained(), tmp_path)
    second = disk_offload(deepcopy(other), tmp_path)
    assert same(first)
    assert same(second, other)


def test_a_write_that_was_killed_is_not_used(tmp_path: Path) -> None:
    model = disk_offload(trained(), tmp_path)
    (folder,) = tmp_path.iterdir()
    del model
    for path in files(tmp_path):
        os.truncate(path, 100)
    assert same(disk_offload(trained(), tmp_path))
    assert [one.name for one in tmp_path.iterdir()] == [folder.name]


def test_a_write_that_fails_leaves_the_model_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import checkpoint_io

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    model = trained()
    monkeypatch.setattr(checkpoint_io, "save_model", fail)
    with pytest.raises(OSError, match="No space"):
        disk_offload(model, tmp_path)
    assert absent(model) == []
    assert same(model)
    assert list(tmp_path.iterdir()) == []


def accelerates_folder(folder: Path, model: torch.nn.Module) -> None:
    """Write what Accelerate writes: raw bytes of each tensor, and an index."""
    folder.mkdir()
    index = {}
    for name, tensor in model.state_dict().items():
        tensor.numpy().tofile(folder / f"{name}.dat")
        dtype = str(tensor.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "shape": list(tensor.shape)}
    (folder / "index.json").write_text(json.dumps(index))


def test_a_folder_of_accelerate_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    accelerates_folder(folder, trained())
    before = files(folder)
    model = disk_offload(empty(), folder, offload_buffers=True, preload_module_classes=["Block"])
    assert same(model)
    model = dispatch_model(
        empty(),
        {"": "disk"},
        offload_dir=folder,
        offload_buffers=True,
        preload_module_classes="Block",
    )
    assert same(model)
    assert files(folder) == before
    os.truncate(folder / "head.bias.dat", 79)
    with pytest.raises(WeightReadError, match=r"head\.bias\.dat has 79 bytes, and by the index 80"):
        disk_offload(empty(), folder, offload_buffers=True)


@pytest.mark.parametrize(
    ("shape", "size", "fits"),
    [
        ([4], 4, True),
        ([4], 3, False),
        ([4], 5, False),
        ([], 1, True),
        ([1], 0, False),
        ([0], 0, True),
        ([0], 1, True),  # no empty file can be mapped, so Accelerate writes one byte
        ([0], 2, False),
    ],
)
def test_a_raw_file_has_the_size_of_its_tensor(
    tmp_path: Path, shape: list[int], size: int, fits: bool
) -> None:
    (tmp_path / "a.dat").write_bytes(bytes(size))
    index = {"a": {"dtype": "int8", "shape": shape}}
    if fits:
        weights = stored_in_index(index, tmp_path)
        assert weights is not None
        assert weights.tensors["a"].shape == tuple(shape)
    else:
        with pytest.raises(WeightReadError, match=rf"a\.dat has {size} bytes, and by the index"):
            stored_in_index(index, tmp_path)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    """Weights in memory are what counts; of an absent one at least the shape must fit."""
    folder = tmp_path / "folder"
    torch.manual_seed(1)
    accelerates_folder(folder, Small())
    assert same(disk_offload(trained(), folder))
    with init_empty_weights():
        wider = Small(width=16)
    with pytest.raises(ValueError, match=r"position is \[16\], and \[8\] in .*another"):
        disk_offload(wider, folder, offload_buffers=True)


def test_an_index_of_places_in_safetensors_files(tmp_path: Path) -> None:
    """As transformers passes it, with other names in the file; tied names need one entry."""
    file = tmp_path / "model.safetensors"
    state = {f"old.{name}": one for name, one in trained().state_dict().items()}
    del state["old.head.weight"]
    save_model(state, tmp_path)
    index = {
        name.removeprefix("old."): {
            "safetensors_file": str(file),
            "weight_name": name,
            "dtype": str(one.dtype).removeprefix("torch."),
        }
        for name, one in state.items()
    }
    model = dispatch_model(empty(), {"": "disk"}, offload_index=index, offload_buffers=True)
    assert same(model)
    index["position"]["weight_name"] = "nothing"
    with pytest.raises(WeightReadError, match="has no tensor 'nothing'"):
        dispatch_model(empty(), {"": "disk"}, offload_index=index)


def test_loading_and_dispatching_are_two_calls_too(tmp_path: Path) -> None:
    device_map = {"": "disk", "blocks.0": "cpu"}
    model = empty()
    checkpoint = saved(tmp_path / "checkpoint")
    load_checkpoint_in_model(model, checkpoint, device_map, offload_folder=tmp_path / "folder")
    assert not model.blocks[0].up.weight.is_meta
    with pytest.raises(AbsentWeightError, match=r"emb\.weight is on disk"):
        model(tokens())
    assert same(dispatch_model(deepcopy(model), device_map))
    assert same(dispatch_model(model, device_map, offload_dir=tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


def test_dispatched_again(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path / "one"), {"": "disk"})
    for device_map in (
        {"": "cpu", "blocks": "disk"},
        {"": "disk", "blocks": "cpu"},
        {"": "disk"},
    ):
        assert same(dispatch_model(model, device_map, offload_dir=tmp_path / "folder"))
    outer = torch.nn.Sequential(model)  # other names, as of an adapter
    assert same(dispatch_model(outer, {"": "disk"}, offload_dir=tmp_path / "folder"))
    model = dispatch_model(model, {"": "cpu"})
    assert absent(model) == []
    assert model.head.weight is model.emb.weight
    assert "to" not in vars(model)
    assert same(model)


def test_loaded_again_by_the_map_that_it_has(tmp_path: Path) -> None:
    device_map = {"": "cpu", "blocks.0": "disk"}
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path), device_map)
    names, wanted = absent(model), trained()
    torch.nn.init.ones_(wanted.blocks[0].up.bias)
    Accelerator(cpu=True).save_model(wanted, tmp_path)  # the files that it reads
    model = load_checkpoint_and_dispatch(model, tmp_path)
    assert absent(model) == names
    assert same(model, wanted)


def test_checkpoints_of_save_state_are_streamed(tmp_path: Path) -> None:
    accel = Accelerator(cpu=True)
    prepared = accel.prepare(trained())
    accel.save_state(tmp_path / "state")
    model = load_checkpoint_and_dispatch(empty(), tmp_path / "state", {"": "disk"})
    assert same(model, prepared.eval())


def test_other_formats_are_converted_once(tmp_path: Path) -> None:
    torch.save(trained().state_dict(), tmp_path / "pytorch_model.bin")
    device_map = {"": "disk", "head": "cpu"}
    model = empty()
    with pytest.raises(ValueError, match=r"blocks\.0.*give an offload_folder="):
        load_checkpoint_and_dispatch(model, tmp_path / "pytorch_model.bin", device_map)
    assert model.head.bias.is_meta
    folder = tmp_path / "folder"
    for _ in range(2):
        model = load_checkpoint_and_dispatch(
            empty(), tmp_path / "pytorch_model.bin", device_map, offload_folder=folder
        )
        assert same(model)
        assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_dtypes(tmp_path: Path, place: str) -> None:
    """Of all placements the model decides, or `dtype=`; Accelerate's on disk had the stored one."""
    stored = trained().bfloat16()
    wanted = deepcopy(stored).float()
    checkpoint = saved(tmp_path, stored)
    device_map = {"": place, "position": "disk"}
    assert same(load_checkpoint_and_dispatch(empty(), checkpoint, device_map), wanted)
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map, dtype="float16", keep_in_fp32_modules=["norm"]
    )
    kinds = {name: one.dtype for name, one in model.named_parameters()}
    assert kinds.pop("blocks.0.norm.weight") is torch.float32
    assert kinds["emb.weight"] is kinds["position"] is torch.float16
    state = model.state_dict()
    assert torch.equal(state["blocks.0.up.bias"], stored.blocks[0].up.bias.half())


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    state = trained().state_dict()
    state["more"] = state.pop("blocks.1.up.bias")
    save_model(state, tmp_path)
    model = empty()
    with pytest.raises(StateMismatchError, match=r"missing blocks\.1\.up\.bias.*unexpected more"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, strict=True)
    assert all(type(one) is torch.nn.Parameter for one in model.parameters())
    for place in ("disk", "cpu"):
        with pytest.warns(UserWarning, match=r"did not have blocks\.1\.up\.bias"):
            model = load_checkpoint_and_dispatch(empty(), tmp_path, {"": place})
        with pytest.raises(AbsentWeightError, match=r"blocks\.1\.up\.bias is not in .*no values"):
            model(tokens())
        with torch.no_grad():
            assert torch.equal(model.head(torch.ones(8)), trained().head(torch.ones(8)))
    with pytest.warns(UserWarning, match="did not have"):  # values that the model has are kept
        model = load_checkpoint_and_dispatch(
            trained(), tmp_path, {"": "disk"}, offload_folder=tmp_path / "folder"
        )
    assert same(model)


def test_shapes_that_do_not_fit(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    model = Small(width=16)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"emb\.weight is \[20, 16\], stored is \[20, 8\]"):
        load_checkpoint_and_dispatch(model, checkpoint, {"": "disk", "blocks": "cpu"})
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    save_model({"x": torch.ones(1)}, tmp_path)
    with pytest.raises(ValueError, match="has none of the names"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})


def test_tied_weights_of_which_different_ones_are_stored(tmp_path: Path) -> None:
    state = trained().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    save_model(state, tmp_path)
    with pytest.raises(StateMismatchError, match=r"emb\.weight and head\.weight are tied"):
        load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"})
    state["head.weight"] = state["emb.weight"].clone()
    save_model(state, tmp_path)
    assert same(load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}))


def test_a_tied_weight_stored_under_its_other_name(tmp_path: Path) -> None:
    state = trained().state_dict()
    del state["emb.weight"]
    save_model(state, tmp_path)
    assert same(load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}))


def test_what_no_checkpoint_has(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    with torch.device("meta"):
        model = Small()
    with pytest.raises(ValueError, match=r"no checkpoint has scale \(non-persistent"):
        load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"})
    with pytest.raises(ValueError, match=r"position.*: on the meta device, without values"):
        dispatch_model(empty(), {"": "cpu"})


def test_maps_are_checked(tmp_path: Path) -> None:
    model = trained()
    with pytest.raises(ValueError, match=r"no device for 'head\.weight', 'head\.bias'"):
        dispatch_model(model, dict.fromkeys((*PARTS[:-1], "blocks.1", "blocks.2"), "cpu"))
    with pytest.warns(UserWarning, match="no module and no tensor of the model: 'tail'"):
        dispatch_model(model, {"": "cpu", "tail": "cpu"})
    with pytest.raises(ValueError, match="there is no accelerator 0"):
        dispatch_model(model, {"": 0, "head": "disk"})
    with pytest.raises(ValueError, match='only load_checkpoint_and_dispatch takes "auto"'):
        dispatch_model(model, "auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"offload_dir= is needed: head\.bias are in memory"):
        dispatch_model(model, {"": "cpu", "head.bias": "disk"})
    assert absent(model) == []
    assert same(model)


def test_one_device_needs_no_hooks(tmp_path: Path) -> None:
    model = dispatch_model(trained(), {"": "cpu"})
    assert not model._forward_pre_hooks
    assert model.hf_device_map == {"": "cpu"}
    assert dispatch_model(trained(), {"": "cpu"}, force_hooks=True)._forward_pre_hooks
    # Without a map it is only loaded.
    model = load_checkpoint_and_dispatch(Small().eval(), saved(tmp_path))
    assert same(model)
    assert not hasattr(model, "hf_device_map")


def test_what_trains_stays(tmp_path: Path) -> None:
    """In a model that is frozen for the most part; else nobody has frozen it, to run it."""
    checkpoint = saved(tmp_path)

    def frozen(model: Small) -> Small:
        model.requires_grad_(False)
        model.position.requires_grad_(True)
        return model

    model = load_checkpoint_and_dispatch(frozen(empty()), checkpoint, {"": "disk"})
    assert "position" not in absent(model)
    assert len(absent(model)) > 10
    reference = frozen(trained())  # torch folds products of weights that require a gradient
    assert same(model, reference)
    model(tokens()).sum().backward()
    reference(tokens()).sum().backward()
    assert model.position.grad is not None
    assert torch.equal(model.position.grad, reference.position.grad)
    follow = load_checkpoint_and_dispatch(
        frozen(empty()), checkpoint, {"": "disk"}, keep_trainable=False
    )
    assert "position" in absent(follow)
    assert "position" in absent(load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"}))
    kept = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"}, keep_trainable=True)
    assert absent(kept) == []


def test_moves(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path), {"": "disk", "head": "cpu"})
    for move in ("cpu", "half", "float", "bfloat16", "double"):
        with pytest.raises(AbsentWeightError, match="can neither be moved nor converted"):
            getattr(model, move)()
    with pytest.raises(RuntimeError, match="You can't move"):
        model.to(torch.float16)
    assert model.head.bias.dtype is torch.float32
    assert same(model)
    copy = deepcopy(model)
    assert same(copy)
    with pytest.raises(RuntimeError, match="You can't move"):
        copy.to("cpu")
    assert same(pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("function", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_policies(tmp_path: Path, function: str) -> None:
    nbytes = sum(one.nbytes for one in trained().parameters())
    model = load_checkpoint_and_dispatch(
        empty(),
        saved(tmp_path),
        function,
        max_memory={"cpu": nbytes * 2 // 3},
        no_split_module_classes=["Block"],
    )
    assert absent(model)
    assert same(model)


def test_an_unknown_policy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'best' is no policy: use 'auto', 'balanced'"):
        load_checkpoint_and_dispatch(empty(), saved(tmp_path), "best")


#: Of Accelerate 1.15.
ARGUMENTS = {
    "dispatch_model": "model device_map main_device state_dict offload_dir offload_index "
    "offload_buffers skip_keys preload_module_classes force_hooks",
    "load_checkpoint_and_dispatch": "model checkpoint device_map max_memory "
    "no_split_module_classes offload_folder offload_buffers dtype offload_state_dict skip_keys "
    "preload_module_classes force_hooks strict full_state_dict broadcast_from_rank0",
    "load_checkpoint_in_model": "model checkpoint device_map offload_folder dtype "
    "offload_state_dict offload_buffers keep_in_fp32_modules offload_8bit_bnb strict "
    "full_state_dict broadcast_from_rank0",
    "cpu_offload": "model execution_device offload_buffers state_dict preload_module_classes",
    "disk_offload": "model offload_dir execution_device offload_buffers preload_module_classes",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_accelerate(name: str) -> None:
    parameters = inspect.signature(getattr(accel_callbacks, name)).parameters.values()
    positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    assert positional == ARGUMENTS[name].split()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_buffer_that_a_forward_in_training_writes_is_kept(tmp_path: Path, place: str) -> None:
    torch.manual_seed(0)
    wanted = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    wanted.requires_grad_(False)
    model = dispatch_model(
        deepcopy(wanted), {"": place, "0": "disk"}, offload_dir=tmp_path, offload_buffers=True
    )
    norm = model[1] if place == "disk" else cpu_offload(deepcopy(wanted[1]), offload_buffers=True)
    for inputs in torch.rand(2, 4, 3):
        assert torch.equal(norm.train()(inputs), wanted[1].train()(inputs))
    for name, value in wanted[1].state_dict().items():
        assert torch.equal(norm.state_dict()[name], value), name
    assert torch.equal(norm.eval()(inputs), wanted[1].eval()(inputs))
    assert torch.equal(deepcopy(norm)(inputs), norm(inputs))
    assert isinstance(norm.running_mean, AbsentWeight)
    state = norm.state_dict()
    state["running_mean"] = torch.ones(3)
    for name in ("weight", "bias"):  # which may be in files
        del state[name]
    norm.load_state_dict(state, strict=False)
    assert norm.state_dict()["running_mean"].tolist() == [1, 1, 1]
