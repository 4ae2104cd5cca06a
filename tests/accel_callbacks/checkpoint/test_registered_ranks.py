"""Registered objects and save hooks on two processes: one state for all, one error for all."""

from __future__ import annotations

import os

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value
        self.error: type[Exception] | None = None

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error("not now")

    def state_dict(self):
        self._fail()
        return {"value": torch.tensor([self.value])}

    def load_state_dict(self, state):
        self._fail()
        self.value = int(state["value"])


def outcome(action, *args) -> str:
    try:
        action(*args)
    except Exception as error:
        return type(error).__name__
    return "ok"


def save_and_load(folder: str) -> int:
    accel = accelerator()
    accel.register_for_checkpointing(Counter(accel.process_index + 5))
    accel.save_state(folder)
    restored = Counter(0)
    other = accelerator()
    other.register_for_checkpointing(restored)
    other.load_state(folder, strict=True)
    return restored.value


def test_the_state_of_the_main_process_is_restored_on_all(pool, tmp_path):
    assert pool.run(save_and_load, str(tmp_path / "saved")) == [5, 5]


def fail_while_saving(folder: str, rank: int) -> tuple[str, bool]:
    counter = Counter(1)
    accel = accelerator()
    accel.register_for_checkpointing(counter)
    if accel.process_index == rank:
        counter.error = OSError
    found = outcome(accel.save_state, folder)
    accel.wait_for_everyone()
    return found, os.path.exists(f"{folder}/manifest.json")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_cannot_be_taken_on_one_process_is_an_error_on_all(pool, tmp_path, rank):
    outcomes = pool.run(fail_while_saving, str(tmp_path / "saved"), rank)
    assert outcomes[rank] == ("OSError", False)
    assert outcomes[1 - rank] == ("RemoteError", False)


def fail_while_loading(folder: str, rank: int) -> tuple[str, int, bool]:
    first, second = Counter(1), Counter(2)
    accel = accelerator()
    model = accel.prepare(torch.nn.Linear(1, 1))
    accel.register_for_checkpointing(first=first, second=second)
    accel.save_state(folder)
    first.value = 7
    with torch.no_grad():
        model.module.weight.fill_(7)
    second.load_state_dict = second.load_state_dict if accel.process_index != rank else refuse
    found = outcome(accel.load_state, folder)
    return found, first.value, model.module.weight.item() == 7


def refuse(state):
    raise OSError("not now")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_object_that_refuses_on_one_process_changes_nothing_on_any(pool, tmp_path, rank):
    outcomes = pool.run(fail_while_loading, str(tmp_path / "saved"), rank)
    assert outcomes[rank] == ("OSError", 7, True)
    assert outcomes[1 - rank] == ("RemoteError", 7, True)


def pop_on_the_main_process_only(folder: str) -> tuple:
    """The way of the scripts of diffusers: only the main process takes weights out."""
    accel = accelerator()
    model = accel.prepare(torch.nn.Linear(1, 1))
    path = os.path.join(folder, "model.pt.txt")

    def save(models, weights, output_dir):
        assert output_dir == folder
        assert os.path.isdir(output_dir)
        if accel.is_main_process:
            with open(path, "w") as file:
                file.write(str(weights.pop()["weight"].item()))

    def load(models, input_dir):
        assert models.pop() is model
        with open(path) as file, torch.no_grad():
            model.module.weight.fill_(float(file.read()))

    accel.register_save_state_pre_hook(save)
    accel.register_load_state_pre_hook(load)
    before = model.module.weight.item()
    accel.save_state(folder)
    with torch.no_grad():
        model.module.weight.zero_()
    accel.load_state(folder)
    saved = checkpoint_io.load(folder).state["models"]
    return saved, round(model.module.weight.item() - before, 5)


def test_a_hook_may_take_weights_out_on_the_main_process_only(pool, tmp_path):
    assert pool.run(pop_on_the_main_process_only, str(tmp_path / "saved")) == [({"0": None}, 0)] * 2


def hook_fails(folder: str, kind: str, rank: int) -> list:
    accel = accelerator()
    model = accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(folder)
    kept = model.module.weight.item()

    def fail(*args):
        if accel.process_index == rank:
            raise OSError("quota")

    with torch.no_grad():
        model.module.weight.add_(1)
    with getattr(accel, f"register_{kind}_state_pre_hook")(fail):
        found = [outcome(getattr(accel, f"{kind}_state"), folder)]
    accel.wait_for_everyone()
    checkpoint_io.verify(folder)
    found.append(checkpoint_io.load(folder).state["models"]["0"]["weight"].item() == kept)
    found.append(outcome(accel.save_state, folder))
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_hook_that_raises_on_one_process_raises_on_all(pool, tmp_path, kind, rank):
    outcomes = pool.run(hook_fails, str(tmp_path / "saved"), kind, rank)
    assert outcomes[rank] == ["OSError", True, "ok"]
    assert outcomes[1 - rank] == ["RemoteError", True, "ok"]


def save_a_file(folder: str) -> str:
    accel = accelerator()
    # no meeting: a script may call it on the main process only
    if accel.is_main_process:
        accel.save({"rank": torch.tensor(accel.process_index)}, f"{folder}/one.safetensors")
    accel.save({"rank": torch.tensor(accel.process_index)}, f"{folder}/two.safetensors")
    accel.wait_for_everyone()
    return sorted(os.listdir(folder))


def test_save_writes_on_the_main_process(pool, tmp_path):
    from safetensors.torch import load_file

    assert pool.run(save_a_file, str(tmp_path)) == [["one.safetensors", "two.safetensors"]] * 2
    assert load_file(tmp_path / "two.safetensors")["rank"] == 0


def keys(unwrap: bool) -> list[str]:
    accel = accelerator()
    return sorted(accel.get_state_dict(accel.prepare(torch.nn.Linear(1, 1)), unwrap=unwrap))


def test_get_state_dict_can_keep_the_names_of_the_wrapper(pool):
    assert pool.run(keys, True) == [["bias", "weight"]] * 2
    assert pool.run(keys, False) == [["module.bias", "module.weight"]] * 2
