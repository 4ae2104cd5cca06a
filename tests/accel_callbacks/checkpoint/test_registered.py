"""Objects of the user's in checkpoints: kept apart by name, all or nothing, never pickled."""

from __future__ import annotations

import warnings

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback, ResumeError


class Counter:
    def __init__(self, value=0) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value, "mean": torch.full((2,), float(self.value))}

    def load_state_dict(self, state):
        self.value = state["value"]


class Renamed(Counter): ...


class Picky(Counter):
    def load_state_dict(self, state):
        raise KeyError("window")


@pytest.fixture
def save(tmp_path):
    """Saves with these objects registered; returns the path."""

    def saved(*objects, **named) -> str:
        accel = Accelerator(cpu=True)
        accel.register_for_checkpointing(*objects, **named)
        return accel.save_state(tmp_path / "saved")

    return saved


def load(path, *objects, strict=False, **named) -> Accelerator:
    accel = Accelerator(cpu=True)
    accel.register_for_checkpointing(*objects, **named)
    accel.load_state(path, strict=strict)
    return accel


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_objects_come_back_by_their_class_and_number(save, quiet):
    path = save(Counter(1), Counter(2), Renamed(3))
    first, second, other = Counter(), Counter(), Renamed()
    load(path, other, first, second, strict=True)
    assert (first.value, second.value, other.value) == (1, 2, 3)


def test_objects_come_back_by_name_in_any_order(save, quiet):
    path = save(a=Counter(1), b=Counter(2))
    a, b = Counter(), Counter()
    load(path, b=b, a=a, strict=True)
    assert (a.value, b.value) == (1, 2)


def test_a_torch_module_and_an_optimizer_can_be_registered(save):
    layer = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(layer.parameters(), lr=0.5)
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    path = save(layer, adam=adam)
    other = torch.nn.Linear(2, 1)
    other_adam = torch.optim.Adam(other.parameters(), lr=0.1)
    load(path, other, adam=other_adam)
    assert torch.equal(other.weight, layer.weight)
    assert other_adam.param_groups[0]["lr"] == 0.5
    assert other_adam.state[other.weight]["step"] == 1


def test_a_renamed_class_is_found_by_position_with_a_warning(save):
    path = save(Counter(1), Counter(2), named=Counter(9))
    first, second, named = Renamed(), Renamed(), Counter()
    with pytest.warns(UserWarning, match="'Renamed-2' is not in the checkpoint and gets .*'Count"):
        load(path, first, second, named=named)
    assert (first.value, second.value, named.value) == (1, 2, 9)


def test_position_is_not_for_named_objects(save):
    path = save(old=Counter(1))
    renamed = Counter(7)
    with pytest.warns(UserWarning, match="no state of 'new'"):
        load(path, new=renamed)
    assert renamed.value == 7


def test_positions_that_do_not_match_are_not_guessed(save):
    path = save(Counter(1))
    first, second = Renamed(5), Renamed(6)
    with pytest.warns(UserWarning, match="no state of 'Renamed"):
        load(path, first, second)
    assert (first.value, second.value) == (5, 6)


@pytest.mark.parametrize("here", [Renamed(5), None], ids=["by position", "missing"])
def test_strict_takes_nothing_but_the_name(save, here):
    path = save(*([Counter(1)] if here else []))
    here = here or Counter(5)
    with pytest.raises(ResumeError, match="pass strict=False"):
        load(path, here, strict=True)
    assert here.value == 5


def test_a_checkpoint_from_before_there_were_registered_objects_can_be_loaded(save):
    class Forgets(Callback):
        def on_save_checkpoint(self, run, model, checkpoint):
            del checkpoint["registered"]

    accel = Accelerator(cpu=True, callbacks=[Forgets()])
    path = accel.save_state(save().removesuffix("saved") + "old")
    with pytest.warns(UserWarning, match="no state of 'Counter'"):
        load(path, Counter())


def test_states_without_an_object_survive_a_load_and_a_save(save, tmp_path, quiet):
    path = save(Counter(1), Counter(2), ema=Counter(3))
    halfway = load(path, Counter()).save_state(tmp_path / "halfway")
    first, second, ema = Counter(), Counter(), Counter()
    load(halfway, first, second, ema=ema, strict=True)
    assert (first.value, second.value, ema.value) == (1, 2, 3)


def test_an_object_that_comes_after_its_state_was_loaded_is_told(save):
    accel = load(save(ema=Counter(3)))
    with pytest.warns(UserWarning, match="register objects before load_state"):
        accel.register_for_checkpointing(ema=Counter())


def test_nothing_changes_if_one_object_refuses_its_state(save, tmp_path):
    path = save(a=Counter(1), b=Counter(2), c=Counter(3))
    a, c = Counter(5), Counter(6)
    accel = Accelerator(cpu=True)
    model = accel.prepare(torch.nn.Linear(1, 1))
    accel.register_for_checkpointing(a=a, b=Counter(), c=c)
    path = accel.save_state(tmp_path / "with a model")
    other = Accelerator(cpu=True)
    a, c = Counter(8), Counter(9)
    other.register_for_checkpointing(a=a, b=Picky(), c=c)
    unlike = other.prepare(torch.nn.Linear(1, 1))
    weight = unlike.weight.detach().clone()
    with pytest.raises(KeyError, match="window"):
        other.load_state(path)
    assert (a.value, c.value) == (8, 9)
    assert torch.equal(unlike.weight, weight)
    assert not torch.equal(unlike.weight, model.weight)
    assert other.training_state.registered.state_dict()["objects"].keys() == {"a", "b", "c"}


def test_nothing_changes_if_the_checkpoint_does_not_fit(save):
    path = save(Counter(1))
    accel, here = Accelerator(cpu=True), Counter(5)
    accel.register_for_checkpointing(here)
    accel.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(ResumeError, match="0 models"):
        accel.load_state(path)
    assert here.value == 5


def test_one_object_is_saved_once(save):
    one = Counter(1)
    accel = Accelerator(cpu=True)
    accel.register_for_checkpointing(one, one)
    accel.register_for_checkpointing(one)
    assert accel.training_state.registered.names == ["Counter"]
    accel.register_for_checkpointing(mine=one)
    accel.register_for_checkpointing(mine=one)
    accel.register_for_checkpointing(one)
    assert accel.training_state.registered.names == ["mine"]
    with pytest.raises(ValueError, match="registered as 'mine' already"):
        accel.register_for_checkpointing(yours=one)


def test_a_name_is_for_one_object():
    accel = Accelerator(cpu=True)
    accel.register_for_checkpointing(ema=Counter())
    with pytest.raises(ValueError, match="'ema' is taken by Counter"):
        accel.register_for_checkpointing(ema=Renamed())


def test_all_objects_that_cannot_be_registered_are_listed_and_none_is_registered():
    class OnlySaves:
        def state_dict(self): ...

    accel = Accelerator(cpu=True)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        accel.register_for_checkpointing(Counter(), 7, Counter, half=OnlySaves())
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].split()[-1] for line in lines] == ["1", "2", "half"]
    assert "int lacks state_dict and load_state_dict" in lines[0]
    assert "the class Counter" in lines[1]
    assert lines[2].endswith("OnlySaves lacks load_state_dict")
    assert accel.training_state.registered.names == []


def test_an_object_that_would_need_pickle_is_named_at_save_time(tmp_path):
    class Holds(Counter):
        def state_dict(self):
            return {"inner": {"lock": object()}}

    accel = Accelerator(cpu=True)
    accel.register_for_checkpointing(cache=Holds())
    with pytest.raises(
        checkpoint_io.UnsupportedStateError, match=r"\['cache'\]\['inner'\]\['lock'"
    ):
        accel.save_state(tmp_path / "saved")
    assert not (tmp_path / "saved" / "manifest.json").exists()


def test_objects_belong_to_one_accelerator(tmp_path):
    one, other = Accelerator(cpu=True), Accelerator(cpu=True)
    one.register_for_checkpointing(Counter())
    assert one.training_state.registered.names == ["Counter"]
    assert other.training_state.registered.names == []


def test_a_run_restores_registered_objects(tmp_path):
    from accel_callbacks.callbacks import Checkpoint

    def train() -> tuple[int, int]:
        counter = Counter()
        accel = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)])
        accel.register_for_checkpointing(counter)
        with accel.run("counted") as run:
            before = counter.value
            for _ in run.epochs(3 if before else 2):
                counter.value += 1
        return before, counter.value

    assert train() == (0, 2)
    assert train() == (2, 3)
