"""Hooks that save and load some models in their own way, and what else can be saved by hand."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint_io
import checkpoint_io.local_files
from accel_callbacks import Accelerator, AcceleratorState, ResumeError
from accel_callbacks.callbacks import Checkpoint


def two_models() -> tuple[Accelerator, torch.nn.Module, torch.nn.Module]:
    accel = Accelerator(cpu=True)
    return accel, *accel.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(3, 1))


def weights_in(path) -> dict:
    return checkpoint_io.load(path).state["models"]


class Adapter:
    """Saves and loads the models of one width in a file of its own, as diffusers does."""

    def __init__(self, width: int) -> None:
        self.width = width

    def save(self, models, weights, output_dir) -> None:
        index = next(i for i, model in enumerate(models) if model.in_features == self.width)
        save_file(weights.pop(index), os.path.join(output_dir, f"adapter-{self.width}.safetensors"))
        models.pop(index)

    def load(self, models, input_dir) -> None:
        index = next(i for i, model in enumerate(models) if model.in_features == self.width)
        path = os.path.join(input_dir, f"adapter-{self.width}.safetensors")
        models.pop(index).load_state_dict(load_file(path))


@pytest.mark.parametrize("width", [2, 3])
def test_a_model_that_hooks_save_and_load_is_not_saved_here(tmp_path, width):
    adapter = Adapter(width)
    accel, *models = two_models()
    accel.register_save_state_pre_hook(adapter.save)
    path = accel.save_state(tmp_path / "saved")
    saved = weights_in(path)
    assert [saved[index] is None for index in "01"] == [width == 2, width == 3]
    checkpoint_io.verify(path)
    assert len(accel.models) == 2  # the hook had lists of its own

    other, *empty = two_models()
    other.register_load_state_pre_hook(adapter.load)
    other.load_state(path)
    for model, loaded in zip(models, empty, strict=True):
        assert torch.equal(model.weight, loaded.weight)


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_a_save_hook_draws_is_drawn_for_a_resumed_run_too(tmp_path, shuffle):
    accel, *_ = two_models()
    loader = accel.prepare(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=shuffle))
    accel.register_save_state_pre_hook(lambda models, weights, folder: torch.rand(3))
    list(loader)
    accel.save_state(tmp_path / "saved")
    whole = [batch.tolist() for batch in loader], torch.rand(1)
    accel.load_state(tmp_path / "saved")
    assert ([batch.tolist() for batch in loader], torch.rand(1)) == whole


def test_weights_alone_can_be_taken_out_as_many_scripts_do(tmp_path):
    def pop_all(models, weights, output_dir):
        for _ in models:
            weights.pop()

    accel, *_ = two_models()
    accel.register_save_state_pre_hook(pop_all)
    assert set(weights_in(accel.save_state(tmp_path / "saved")).values()) == {None}


def test_models_alone_can_be_taken_out(tmp_path):
    accel, *_ = two_models()
    accel.register_save_state_pre_hook(lambda models, weights, output_dir: models.pop(0))
    saved = weights_in(accel.save_state(tmp_path / "saved"))
    assert saved["0"] is None
    assert saved["1"]["weight"].shape == (1, 3)


def test_a_left_out_model_that_no_hook_loads_is_an_error_and_nothing_changes(tmp_path):
    accel, *_ = two_models()
    accel.register_save_state_pre_hook(Adapter(3).save)
    path = accel.save_state(tmp_path / "saved")
    other, first, _ = two_models()
    before = first.weight.detach().clone()
    with pytest.raises(ResumeError, match="register_load_state_pre_hook"):
        other.load_state(path)
    assert torch.equal(first.weight, before)


def test_a_load_hook_may_take_a_model_whose_weights_are_there(tmp_path):
    accel, *_ = two_models()
    path = accel.save_state(tmp_path / "saved")
    other = Accelerator(cpu=True)
    first, wider = other.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(5, 1))
    other.register_load_state_pre_hook(lambda models, input_dir: models.remove(wider))
    other.load_state(path)  # the shapes of the other model are not looked at
    assert torch.equal(first.weight, accel.models[0].weight)


def test_edited_weights_are_what_is_saved(tmp_path):
    def halve(models, weights, output_dir):
        weights[0]["weight"] = weights[0]["weight"] / 2
        weights[1] = {**weights[1], "bias": torch.full((1,), 7.0)}

    accel, first, second = two_models()
    accel.register_save_state_pre_hook(halve)
    saved = weights_in(accel.save_state(tmp_path / "saved"))
    assert torch.equal(saved["0"]["weight"], first.weight / 2)
    assert saved["1"]["bias"].item() == 7
    assert torch.equal(saved["1"]["weight"], second.weight)
    assert second.bias.item() != 7


def test_weights_that_a_hook_drops_stay_as_they_are_in_a_load(tmp_path):
    accel, first, _ = two_models()
    accel.register_save_state_pre_hook(lambda models, weights, output_dir: weights[0].pop("bias"))
    path = accel.save_state(tmp_path / "saved")
    other, here, _ = two_models()
    bias = here.bias.detach().clone()
    other.load_state(path)
    assert torch.equal(here.weight, first.weight)
    assert torch.equal(here.bias, bias)


def test_weights_that_are_missing_for_no_reason_are_an_error(tmp_path):
    accel = Accelerator(cpu=True)
    accel.prepare(torch.nn.Linear(1, 1, bias=False))
    path = accel.save_state(tmp_path / "saved")
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(ResumeError, match="'bias' is only in the model"):
        other.load_state(path)


def test_each_hook_sees_what_the_one_before_left(tmp_path):
    accel, *_ = two_models()
    seen = []
    accel.register_save_state_pre_hook(Adapter(2).save)
    accel.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append([len(models), len(weights)])
    )
    accel.register_save_state_pre_hook(Adapter(3).save)
    accel.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append(sorted(os.listdir(folder)))
    )
    path = accel.save_state(tmp_path / "saved")
    assert seen == [[1, 1], ["adapter-2.safetensors", "adapter-3.safetensors"]]
    order = []
    for width in (3, 2):
        accel.register_load_state_pre_hook(lambda models, folder: order.append(len(models)))
        accel.register_load_state_pre_hook(Adapter(width).load)
    accel.load_state(path)
    assert order == [2, 1]


def test_weights_that_cannot_be_told_apart_are_an_error(tmp_path):
    def confuse(models, weights, output_dir):
        weights[:] = [dict(weights[1])]

    accel, *_ = two_models()
    accel.register_save_state_pre_hook(confuse)
    with pytest.raises(ValueError, match=r"confuse.* left 1 of 2 weights, some of them new"):
        accel.save_state(tmp_path / "saved")


def test_a_hook_is_gone_after_remove_and_after_its_block(tmp_path):
    accel, *_ = two_models()
    calls = []
    saving = accel.register_save_state_pre_hook(lambda *args: calls.append("save"))
    loading = accel.register_load_state_pre_hook(lambda *args: calls.append("load"))
    path = accel.save_state(tmp_path / "saved")
    saving.remove()
    saving.remove()
    accel.save_state(path)
    with loading:
        accel.load_state(path)
    accel.load_state(path)
    assert calls == ["save", "load"]


def test_hooks_belong_to_one_accelerator(tmp_path):
    calls = []
    Accelerator(cpu=True).register_save_state_pre_hook(calls.append)
    Accelerator(cpu=True).save_state(tmp_path / "saved")
    assert calls == []


@pytest.mark.parametrize("kind", ["save", "load"])
def test_what_cannot_be_called_is_no_hook(kind):
    accel = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"pass a function hook\(models, "):
        getattr(accel, f"register_{kind}_state_pre_hook")("peft")


def test_a_hook_that_raises_leaves_the_older_checkpoint_as_it_is(tmp_path):
    accel, first, _ = two_models()
    path = accel.save_state(tmp_path / "saved")
    saved = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.add_(1)

    def fail(models, weights, output_dir):
        raise OSError("quota")

    with accel.register_save_state_pre_hook(fail):
        for place in (path, tmp_path / "new"):
            with pytest.raises(OSError, match="quota"):
                accel.save_state(place)
    checkpoint_io.verify(path)
    assert torch.equal(weights_in(path)["0"]["weight"], saved)
    assert not (tmp_path / "new").exists()


def test_files_of_a_hook_survive_what_is_done_to_the_checkpoint(tmp_path):
    def note(models, weights, output_dir):
        os.makedirs(os.path.join(output_dir, "unet"), exist_ok=True)
        with open(os.path.join(output_dir, "unet", "config.json"), "w") as file:
            file.write("{}")

    accel = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path, every_n_steps=1, keep_last=1)])
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(3, 1)))
    accel.register_save_state_pre_hook(note)
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
    accel.end_training()
    folder = checkpoint_io.CheckpointFolder(tmp_path)
    assert [entry.name for entry in folder.list()] == ["step-00000003"]
    checkpoint_io.verify(folder.list()[0].path)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("config.json"))
    assert "step-00000003/unet/config.json" in files


def test_a_hook_gets_the_url_where_the_checkpoint_is_not_local():
    accel, *_ = two_models()
    seen = []
    accel.register_save_state_pre_hook(lambda models, weights, folder: seen.append(folder))
    accel.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    accel.load_state(accel.save_state("memory://pre-hooks/saved"))
    assert seen == ["memory://pre-hooks/saved"] * 2


def test_a_hook_gets_a_path_where_the_url_is_local(tmp_path):
    accel, *_ = two_models()
    seen = []
    accel.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append((folder, os.path.isdir(folder)))
    )
    accel.save_state(f"file://{tmp_path}/saved")
    assert seen == [(f"{tmp_path}/saved", True)]


# --- what takes Accelerate's arguments -----------------------------------------------------------


def test_pickle_is_refused_with_the_reason(tmp_path):
    accel, first, _ = two_models()
    actions = [
        lambda: accel.save_state(tmp_path / "a", False),
        lambda: accel.save_model(first, tmp_path / "b", safe_serialization=False),
        lambda: accel.save({}, tmp_path / "c", safe_serialization=False),
    ]
    for action in actions:
        with pytest.raises(ValueError, match="runs code when it is loaded"):
            action()
    assert not list(tmp_path.iterdir())
    accel.save_state(tmp_path / "a", True)


def test_load_kwargs_are_refused(tmp_path):
    accel, *_ = two_models()
    path = accel.save_state(tmp_path / "saved")
    with pytest.raises(TypeError, match="weights_only"):
        accel.load_state(path, {"weights_only": True})
    assert accel.load_state(path, None) == path


def test_save_writes_a_file_that_stock_safetensors_reads(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"row": whole[0], "turned": whole.t(), "again": whole, "half": whole.bfloat16()}
    accel = Accelerator(cpu=True)
    accel.save(tensors, tmp_path / "new" / "stats.safetensors")
    read = load_file(tmp_path / "new" / "stats.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "new" / "stats.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    accel.save({"row": whole[1]}, tmp_path / "new" / "stats.safetensors")
    assert os.listdir(tmp_path / "new") == ["stats.safetensors"]


def test_a_saved_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.replace

    def note_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(old, new):
        events.append((Path(old), Path(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_rename)
    target = tmp_path / "new" / "a.safetensors"
    Accelerator(cpu=True).save({"a": torch.ones(2)}, target)
    (made, written, (temporary, name), folder) = events
    assert (made, written, name, folder) == (tmp_path, temporary, target, target.parent)


def test_a_saved_file_that_is_open_elsewhere_stays_as_it_was(tmp_path, monkeypatch):
    accel = Accelerator(cpu=True)
    accel.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")

    def refuses(old, new):
        error = PermissionError(13, "Access is denied", new)
        error.winerror = 5
        raise error

    monkeypatch.setattr(os, "replace", refuses)
    monkeypatch.setattr(checkpoint_io.local_files, "_PAUSES", (0,))
    with pytest.raises(PermissionError, match="another program has the file open"):
        accel.save({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]


def test_save_writes_to_any_store():
    import fsspec

    Accelerator(cpu=True).save({"a": torch.ones(2)}, "memory://pre-hooks/one.safetensors")
    from safetensors.torch import load

    data = fsspec.filesystem("memory").cat_file("/pre-hooks/one.safetensors")
    assert load(data)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("obj", "what"),
    [
        (torch.ones(1), "a Tensor is no dict"),
        ([torch.ones(1)], "a list is no dict"),
        ({"a": {"b": torch.ones(1)}}, r"\['a'\] is a dict"),
        ({"step": 3}, r"\['step'\] is a int"),
        ({0: torch.ones(1)}, r"\[0\] is a Tensor"),
    ],
)
def test_save_says_what_to_use_for_anything_else(tmp_path, obj, what):
    with pytest.raises(TypeError, match=f"{what}.*save_state.*register_for_checkpointing"):
        Accelerator(cpu=True).save(obj, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_save_does_not_write_to_open_files():
    with pytest.raises(TypeError, match="to a path or a URL, not to a BytesIO"):
        Accelerator(cpu=True).save({}, io.BytesIO())


def test_state_knows_the_options_of_its_accelerator():
    one, other = Accelerator(cpu=True, mixed_precision="bf16"), Accelerator(cpu=True)
    assert isinstance(one.state, AcceleratorState)
    assert (one.state.mixed_precision, other.state.mixed_precision) == ("bf16", "no")
    assert one.state.device == one.device


def test_gradient_state_follows_the_loop():
    from accel_callbacks import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(2, adjust_scheduler=False, sync_with_dataloader=False)
    accel = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    data, inner = accel.prepare(
        torch.utils.data.DataLoader(range(5), 2), torch.utils.data.DataLoader(range(2), 2)
    )
    state = accel.gradient_state
    assert state.plugin_kwargs == {
        "num_steps": 2,
        "adjust_scheduler": False,
        "sync_with_dataloader": False,
        "sync_each_batch": False,
    }
    assert "num_steps" in repr(state)
    assert (state.in_dataloader, state.active_dataloader, state.remainder) == (False, None, -1)
    seen = []
    for _ in data:
        with accel.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader, state.remainder))
        for _ in inner:
            assert state.active_dataloader is inner
            assert state.dataloader_references == [None, data, inner]
        assert state.active_dataloader is data
    assert seen == [(False, False, 1), (True, False, 1), (False, True, 1)]
    accel.gradient_state.sync_gradients = True
    assert accel.sync_gradients
