"""States that Accelerate saved, written here as it writes them, and orders as it draws them."""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader

from accel_callbacks import ResumeError
from accel_callbacks.compat.names import resolve
from checkpoint_io import CorruptCheckpointError
from checkpoint_io.storage.local import folder_lock
from tests.support import warm


def name(key: str):
    return resolve("accelerate", key)


class Counted:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def prepared():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5], gamma=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def written(folder) -> list[torch.Tensor]:
    """Write a state as Accelerate does; return what its generators draw next."""
    folder.mkdir()
    model, optimizer, scheduler = prepared()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"number": 7}, folder / "custom_checkpoint_0.pkl")
    states = {
        **{"step": 1, "random_state": random.getstate()},
        **{"numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()},
    }
    torch.save(states, folder / "random_states_0.pkl")
    return [*model.state_dict().values(), torch.rand(2)]


def test_a_state_of_accelerate_is_restored(tmp_path):
    expected = written(tmp_path / "state")
    draws = random.random(), np.random.rand()
    accelerator = name("Accelerator")(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5], gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counted = Counted()
    accelerator.register_for_checkpointing(counted)
    assert accelerator.load_state(tmp_path / "state") == str(tmp_path / "state")
    for parameter, saved in zip(model.state_dict().values(), expected, strict=False):
        assert torch.equal(parameter, saved)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert scheduler.get_last_lr() == [0.25]
    assert counted.number == 7
    assert torch.equal(torch.rand(2), expected[-1])
    assert (random.random(), np.random.rand()) == draws


def test_nothing_changes_where_a_file_lacks_or_holds_objects(tmp_path):
    written(tmp_path / "state")
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    before = model.weight.detach().clone()
    accelerator.register_for_checkpointing(Counted(), Counted())
    with pytest.raises(ResumeError, match=r"custom_checkpoint_1.pkl is not there"):
        accelerator.load_state(tmp_path / "state")
    torch.save(Counted(), tmp_path / "state" / "custom_checkpoint_1.pkl")
    with pytest.raises(CorruptCheckpointError, match="only full unpickling can create"):
        accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, before)


def test_own_states_are_loaded_as_before(tmp_path):
    accelerator = name("Accelerator")(cpu=True, project_dir=str(tmp_path))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    path = accelerator.save_state()
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state() == path
    assert torch.equal(model.weight, saved)


def test_a_seed_of_the_data_is_that_of_the_seedable_sampler_alone():
    torch.manual_seed(3)
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    plain = [batch.tolist() for batch in loader]
    options = name("DataLoaderConfiguration")(data_seed=5)
    accelerator = name("Accelerator")(cpu=True, dataloader_config=options)
    torch.manual_seed(3)
    assert [batch.tolist() for batch in accelerator.prepare(loader)] == plain


# --- names of weights -------------------------------------------------------------------------


def deep() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 1)))


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)
        self.head = torch.nn.Linear(2, 1)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager")


def with_compiled_block(model: torch.nn.Module) -> torch.nn.Module:
    model[1] = compiled(model[1])
    return model


def written_weights(folder, *states) -> None:
    """Write the state of models alone, as Accelerate does."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, state in enumerate(states):
        save_file(state, folder / f"model{f'_{index}' * bool(index)}.safetensors")
    save_random(folder)


def save_random(folder, rank: int = 0) -> None:
    states = {
        **{"step": 1, "random_state": random.getstate()},
        **{"numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()},
    }
    torch.save(states, folder / f"random_states_{rank}.pkl")


@pytest.mark.parametrize("wrap", [lambda model: model, compiled, with_compiled_block])
@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name,
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: name.replace("1.0.", "1._orig_mod.0."),
    ],
)
def test_wrappers_of_then_and_of_now_may_differ(renamed, wrap, tmp_path):
    saved = deep().state_dict()
    written_weights(tmp_path, {renamed(key): tensor for key, tensor in saved.items()})
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(wrap(deep()))
    accelerator.load_state(tmp_path)
    for parameter, tensor in zip(model.parameters(), saved.values(), strict=True):
        assert torch.equal(parameter, tensor)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_a_module_of_the_name_of_a_wrapper_keeps_it(prefix, tmp_path):
    saved = Outer().state_dict()
    written_weights(tmp_path, {f"{prefix}{key}": tensor for key, tensor in saved.items()})
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(Outer())
    accelerator.load_state(tmp_path)
    assert torch.equal(model.module.weight, saved["module.weight"])
    assert torch.equal(model.head.weight, saved["head.weight"])


# --- parts ------------------------------------------------------------------------------------


def test_several_models_and_optimizers_are_those_of_their_numbers(tmp_path):
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)]
    written_weights(tmp_path, *(model.state_dict() for model in models))
    for index, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 + index)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{f'_{index}' * index}.bin")
    written_weights(tmp_path, *(model.state_dict() for model in models))
    fresh = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 3)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in fresh]
    accelerator = name("Accelerator")(cpu=True)
    *ready, first, second = accelerator.prepare(*fresh, *optimizers)
    accelerator.load_state(tmp_path)
    for model, saved in zip(ready, models, strict=True):
        assert torch.equal(model.weight, saved.weight)
    assert [o.param_groups[0]["lr"] for o in (first, second)] == [1.0, 2.0]
    assert second.state_dict()["state"][0]["exp_avg"].shape == (3, 2)


def test_what_is_not_read_is_said(tmp_path, recwarn):
    written_weights(tmp_path, deep().state_dict(), deep().state_dict())
    for file in ("optimizer.bin", "sampler.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl"):
        torch.save({}, tmp_path / file)
    torch.save({}, tmp_path / "random_states_1.pkl")
    (tmp_path / "notes.txt").write_text("of the user")
    accelerator = name("Accelerator")(cpu=True)
    accelerator.prepare(deep(), DataLoader(range(4)))
    accelerator.load_state(tmp_path)
    texts = [str(warning.message) for warning in recwarn]
    assert [text for text in texts if "skip_first_batches(loader, ...)" in text]
    (text,) = [text for text in texts if "not read" in text]
    read, _, unread = text.partition(", and not read ")
    assert read == f"{tmp_path}: read model.safetensors, random_states_0.pkl"
    assert unread == (
        "custom_checkpoint_0.pkl, model_1.safetensors, optimizer.bin (nothing that is prepared or "
        "registered has them); dl_state_dict.bin (the place in the data, which loaders read that "
        "are prepared with DataLoaderConfiguration(use_stateful_dataloader=True), unless one "
        "process reads for all); random_states_1.pkl (of processes that are not there now); "
        "sampler.bin (an object of Accelerate, which only unpickling makes)."
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_fsdp_saved(tmp_path):
    saved = deep().state_dict()
    save_random(tmp_path)
    dcp.save({"model": saved}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": {"a": torch.ones(1)}}, checkpoint_id=tmp_path / "optimizer_0",
             no_dist=True)  # fmt: skip
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(deep())
    with pytest.warns(UserWarning, match=r"read pytorch_model_fsdp_0.*not read optimizer_0 "):
        accelerator.load_state(tmp_path)
    assert torch.equal(model[0].weight, saved["0.weight"])


def written_by_name(folder, is_sharded, optimizer_of=torch.optim.AdamW):
    """Write the state of a model and its optimizer as FSDP of Accelerate does; return both."""
    model = deep()
    optimizer = optimizer_of(
        [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters()}], lr=0.5
    )
    model(torch.ones(2, model[0].in_features)).sum().backward()
    optimizer.step()
    save_random(folder)
    state = get_optimizer_state_dict(model, optimizer)
    if is_sharded:
        for part, content, place in (
            ("model", model.state_dict(), "pytorch_model_fsdp_0"),
            ("optimizer", state, "optimizer_0"),
        ):
            dcp.save({part: content}, checkpoint_id=folder / place, no_dist=True)
    else:
        torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
        torch.save(state, folder / "optimizer.bin")
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_states_by_names_of_parameters_are_read_in_any_order(tmp_path, is_sharded, optimizer_of):
    model, saved = written_by_name(tmp_path, is_sharded, optimizer_of)
    accelerator, fresh = name("Accelerator")(cpu=True), deep()
    groups = [[*part.parameters()][::-1] for part in fresh]
    optimizer = optimizer_of([{"params": group} for group in groups], lr=1.0)
    fresh, optimizer = accelerator.prepare(fresh, optimizer)
    accelerator.load_state(tmp_path)
    for parameter, own in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter, own)
        kept, read = saved.state[parameter], optimizer.optimizer.state[own]
        assert kept.keys() == read.keys()
        assert all(torch.equal(kept[key], read[key]) for key in kept)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_by_names_of_other_parameters_change_nothing(tmp_path):
    written_by_name(tmp_path, is_sharded=True)
    accelerator, fresh = name("Accelerator")(cpu=True), deep()
    before = fresh[0].weight.detach().clone()
    groups = [{"params": [fresh[0].weight]}, {"params": fresh[1].parameters()}]
    fresh, _ = accelerator.prepare(fresh, torch.optim.AdamW(groups))
    with pytest.raises(ResumeError, match=r"'0\.0\.bias' is only in the checkpoint's parameter"):
        accelerator.load_state(tmp_path)
    dcp.save({"optimizer": {"a": torch.ones(1)}}, checkpoint_id=tmp_path / "optimizer_0",
             no_dist=True)  # fmt: skip
    with pytest.raises(ResumeError, match="no state of an optimizer where that of optimizer 0 is"):
        accelerator.load_state(tmp_path)
    assert torch.equal(fresh[0].weight, before)


@pytest.mark.parametrize("place", ["pytorch_model_fsdp{}_rank0.bin", "optimizer{}_rank0.bin"])
def test_pieces_of_each_process_are_named(tmp_path, place):
    save_random(tmp_path)
    for index in ("", "_0"):
        model = torch.nn.Linear(1, 1)
        accelerator = name("Accelerator")(cpu=True)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        if place.startswith("optimizer"):
            torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
        torch.save({}, tmp_path / place.format(index))
        with pytest.raises(ResumeError, match=f"{place.format(index)}.*SHARDED_STATE_DICT"):
            accelerator.load_state(tmp_path)
        (tmp_path / place.format(index)).unlink()


# --- numbered states --------------------------------------------------------------------------


def numbered(root):
    project = name("ProjectConfiguration")(str(root), automatic_checkpoint_naming=True)
    accelerator = name("Accelerator")(cpu=True, project_config=project)
    return accelerator, accelerator.prepare(torch.nn.Linear(1, 1, bias=False))


def test_the_newest_numbered_state_may_be_of_either_library(tmp_path):
    places = tmp_path / "checkpoints"
    for number in (0, 2, 10):
        state = {"weight": torch.full((1, 1), float(number))}
        written_weights(places / f"checkpoint_{number}", state)
    accelerator, model = numbered(tmp_path)
    assert accelerator.load_state() == str(places / "checkpoint_10")
    assert model.weight.item() == 10.0
    with torch.no_grad():
        model.weight.fill_(11.0)
    assert accelerator.save_state() == str(places / "checkpoint_11")
    accelerator, model = numbered(tmp_path)
    assert accelerator.load_state() == str(places / "checkpoint_11")
    assert model.weight.item() == 11.0
    written_weights(places / "checkpoint_12", {"weight": torch.full((1, 1), 12.0)})
    assert accelerator.load_state() == str(places / "checkpoint_12")
    assert model.weight.item() == 12.0


def test_a_numbered_state_that_was_not_finished_is_not_skipped(tmp_path):
    for number in (1, 2):
        place = tmp_path / f"checkpoints/checkpoint_{number}"
        written_weights(place, {"weight": torch.full((1, 1), float(number))})
    accelerator, model = numbered(tmp_path)
    accelerator.prepare(torch.optim.SGD(model.parameters(), 1.0))
    os.unlink(tmp_path / "checkpoints/checkpoint_2/random_states_0.pkl")
    before = model.weight.item()
    message = r"checkpoint_2/optimizer\.bin is not there.*if that save was killed, load an older"
    with pytest.raises(ResumeError, match=message):
        accelerator.load_state()
    assert model.weight.item() == before


# --- the place in the data --------------------------------------------------------------------

AT_3 = {"_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False}
AT_3_OF_WORKERS = {
    "_snapshot": {"_snapshot_step": 2, "_main_snapshot": {"_num_workers": 2}},
    **{"_steps_since_snapshot": 1, "_iterator_finished": False},
}
AT_END = {"_sampler_iter_yielded": 5, "_num_yielded": 5, "_iterator_finished": True}


def resumed(folder, *loaders, stateful: bool = True):
    options = name("DataLoaderConfiguration")(use_stateful_dataloader=stateful)
    accelerator = name("Accelerator")(cpu=True, dataloader_config=options)
    _, *ready = accelerator.prepare(deep(), *loaders)
    accelerator.load_state(folder)
    return ready


@pytest.mark.parametrize(
    ("state", "first"), [(AT_3, 3), (AT_3_OF_WORKERS, 3), (AT_END, 0), ({"_num_yielded": 0}, 0)]
)
def test_a_stateful_loader_goes_on_where_it_was(state, first, tmp_path, recwarn):
    written_weights(tmp_path, deep().state_dict())
    torch.save({"_num_yielded": 1}, tmp_path / "dl_state_dict.bin")
    torch.save(state, tmp_path / "dl_state_dict_1.bin")
    one, two = resumed(tmp_path, DataLoader(range(4)), DataLoader(range(10), batch_size=2))
    assert [batch.item() for batch in one] == [1, 2, 3]
    whole = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [batch.tolist() for batch in two] == whole[first:]
    assert [batch.tolist() for batch in two] == whole
    assert [str(warning.message) for warning in recwarn] == []


def test_a_random_order_is_drawn_anew_and_said_so(tmp_path):
    written_weights(tmp_path, deep().state_dict())
    torch.save(AT_3, tmp_path / "dl_state_dict.bin")
    with pytest.warns(UserWarning, match="some samples of that epoch come again"):
        (loader,) = resumed(tmp_path, DataLoader(range(10), batch_size=2, shuffle=True))
    assert len(list(loader)) == 2


def test_the_place_is_said_to_be_unread_where_no_stateful_loader_is_asked_for(tmp_path):
    written_weights(tmp_path, deep().state_dict())
    torch.save(AT_3, tmp_path / "dl_state_dict.bin")
    with (
        pytest.warns(UserWarning, match=r"not read dl_state_dict\.bin \(the place in the data"),
        pytest.warns(UserWarning, match=r"skip_first_batches\(loader, \.\.\.\)"),
    ):
        (loader,) = resumed(tmp_path, DataLoader(range(4)), stateful=False)
    assert len(list(loader)) == 4


KILLED = """
import os, signal, sys
import torch
from accel_callbacks.compat import beside
from accel_callbacks.compat.names import resolve
from checkpoint_io.storage import local

accelerator = resolve("accelerate", "Accelerator")(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))
assert accelerator.save_state("step_1") == "step_1"
where = {"manifest": local, "name": beside}[sys.argv[1]]
where.replace = lambda old, new: os.kill(os.getpid(), signal.SIGKILL)
accelerator.save_state("step_2")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("moment", ["manifest", "name"])
def test_a_listing_never_has_half_a_state(moment, tmp_path, monkeypatch):
    killed = warm.run([sys.executable, "-c", KILLED, moment], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["_accel_saving-step_2", "step_1"]
    monkeypatch.chdir(tmp_path)
    with folder_lock(str(tmp_path / "_accel_saving-step_2")):  # another process saves there
        name("Accelerator")(cpu=True)
        assert sorted(os.listdir(tmp_path)) == ["_accel_saving-step_2", "step_1"]
    accelerator = name("Accelerator")(cpu=True)
    assert os.listdir(tmp_path) == ["step_1"]
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.load_state("step_1")
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert accelerator.save_state(tmp_path / "step_2") == str(tmp_path / "step_2")
    assert accelerator.save_state("step_1") == "step_1"  # one that there is, in place
    accelerator.load_state(tmp_path / "step_1")
    assert model.weight.item() == 3.0
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2"]
