"""Several callbacks of one class: their keys, and a resume that gives each its own state."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, SampleLogger


class Says(Callback):
    def __init__(self, word="hello"):
        self.word = word


class Watch(Callback):
    """Counts batches in steps of its own."""

    def __init__(self, step=1):
        self.step = step
        self.seen = 0

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.seen += self.step

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def trained(place, *callbacks):
    """Train two batches, and save."""
    accel = Accelerator(cpu=True, callbacks=callbacks)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(2, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for batch in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
    accel.save_state(place)
    return accel


def resumed(place, *callbacks):
    accel = Accelerator(cpu=True, callbacks=callbacks)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accel.prepare(model, optimizer, DataLoader(torch.ones(2, 1)))
    accel.load_state(place)
    return accel


def states(place):
    return checkpoint_io.load(place).state["callbacks"]


def test_c7_two_stateless_callbacks_of_one_class_are_fine(tmp_path, capsys):
    trained(tmp_path / "c", Says(), Says("world"))
    assert states(tmp_path / "c") == {}
    resumed(tmp_path / "c", Says("world"))
    assert "Says" not in capsys.readouterr().err


def test_c7_two_stateful_ones_get_keys_by_position(tmp_path, capsys):
    trained(tmp_path / "c", Watch(1), Watch(10))
    assert states(tmp_path / "c") == {"Watch": {"seen": 2}, "Watch#2": {"seen": 20}}
    one, ten = Watch(1), Watch(10)
    resumed(tmp_path / "c", one, ten)
    assert (one.seen, ten.seen) == (2, 20)
    assert "Watch" not in capsys.readouterr().err


def test_c7_a_changed_order_restores_each_in_place_and_says_so(tmp_path, capsys):
    trained(tmp_path / "c", Watch(1), Watch(10), Watch(100))
    one, ten, hundred = Watch(1), Watch(10), Watch(100)
    resumed(tmp_path / "c", hundred, one, ten)
    assert (one.seen, ten.seen, hundred.seen) == (2, 20, 200)
    err = capsys.readouterr().err
    assert "Watch(step=100) takes the state that was saved as 'Watch#3'" in err
    assert "give each its own `state_key`" in err


def test_c7_one_that_is_removed_leaves_the_other_its_state(tmp_path, capsys):
    trained(tmp_path / "1", Watch(1), Watch(10))
    ten = Watch(10)
    accel = resumed(tmp_path / "1", ten)
    assert ten.seen == 20
    err = capsys.readouterr().err
    assert "Watch(step=10) takes the state that was saved as 'Watch#2'" in err
    assert "no callback for 'Watch' (step=1), whose state is kept" in err
    accel.save_state(tmp_path / "2")
    one, ten = Watch(1), Watch(10)
    resumed(tmp_path / "2", ten, one)
    assert (one.seen, ten.seen) == (2, 20)


def test_c7_one_that_is_new_begins_without_a_state(tmp_path, capsys):
    trained(tmp_path / "1", Watch(1), Watch(10))
    one, new, ten = Watch(1), Watch(5), Watch(10)
    accel = resumed(tmp_path / "1", one, new, ten)
    assert (one.seen, new.seen, ten.seen) == (2, 0, 20)
    assert "Watch(step=5) has no saved state" in capsys.readouterr().err
    accel.save_state(tmp_path / "2")
    assert states(tmp_path / "2")["Watch#3"] == {"seen": 0}


def test_c7_alike_ones_are_told_apart_by_position_and_a_changed_option_is_named(tmp_path, capsys):
    trained(tmp_path / "c", Watch(1), Watch(1))
    first, second = Watch(1), Watch(1)
    resumed(tmp_path / "c", first, second)
    assert "Watch" not in capsys.readouterr().err
    resumed(tmp_path / "c", Watch(1), Watch(7))
    assert "Watch(step=7) takes the state that was saved as 'Watch#2' (step=1)" in (
        capsys.readouterr().err
    )


def test_c7_a_second_one_of_a_class_that_was_saved_alone_is_named(tmp_path, capsys):
    trained(tmp_path / "c", Watch(1))
    first, second = Watch(10), Watch(1)
    resumed(tmp_path / "c", first, second)
    assert (first.seen, second.seen) == (2, 0)
    assert "Watch(step=1) has no saved state" in capsys.readouterr().err


def test_c7_the_message_names_the_option_that_gives_a_name(tmp_path, capsys):
    trained(tmp_path / "c", EMA(0.5), EMA(0.9))
    resumed(tmp_path / "c", EMA(0.9))
    err = capsys.readouterr().err
    assert "EMA(decay=0.9) takes the state that was saved as 'EMA#2'" in err
    assert "EMA(name=...)" in err
    makes = [SampleLogger(lambda *given: {}, n=n) for n in (1, 2)]
    trained(tmp_path / "d", *makes)
    resumed(tmp_path / "d", makes[1], makes[0])
    assert "SampleLogger(prefix=...)" in capsys.readouterr().err


def test_c7_two_that_save_into_one_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Checkpoint.* same place.*Checkpoint\(dirpath=...\)"):
        Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path), Checkpoint(tmp_path)])


def test_c7_one_object_given_twice_is_refused():
    watch = Watch()
    with pytest.raises(ValueError, match="Watch is given twice"):
        Accelerator(cpu=True, callbacks=[watch, watch])


def test_c7_one_that_joins_a_resumed_run_takes_the_state_that_is_most_like_it(tmp_path):
    trained(tmp_path / "c", Watch(1), Watch(10))
    accel = resumed(tmp_path / "c")
    ten = accel.add_callback(Watch(10))
    assert [one.seen for one in accel.callbacks] == [20]
    del ten
