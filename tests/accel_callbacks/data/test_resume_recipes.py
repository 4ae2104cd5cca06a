"""Scripts that resume by the recipes of Accelerate, from a save at any place of an epoch."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, ResumeError, skip_first_batches
from tests.support.resume_recipes import PLACES, RECIPES, rest_of, resume, train


@functools.cache
def unbroken() -> list[list[int]]:
    return train(None, "none", alias=False)


@pytest.mark.parametrize("alias", [True, False], ids=["alias", "native"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_batch_is_lost_in_silence(tmp_path, recipe, place, alias):
    expected = rest_of(unbroken(), recipe, place, alias)
    if expected is None:
        with pytest.raises(ResumeError, match="after load_state were not trained on, and are lost"):
            resume(tmp_path, recipe, place, alias)
    elif not expected:  # no step follows
        with pytest.warns(UserWarning, match="after load_state were not trained on, and are lost"):
            assert resume(tmp_path, recipe, place, alias) == []
    else:
        assert resume(tmp_path, recipe, place, alias) == expected


def parts(accel: Accelerator, **options) -> tuple:
    net = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(6.0)[:, None], 2, **options)
    return accel.prepare(net, torch.optim.SGD(net.parameters(), 1e-5), loader)


def step(accel: Accelerator, model, optimizer, batch) -> None:
    accel.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()


def saved_in_the_last_batch(folder, **options) -> list:
    """Save in the last batch of the first epoch; return the samples of the second."""
    accel = Accelerator(cpu=True)
    model, optimizer, loader = parts(accel, **options)
    for batch in loader:
        step(accel, model, optimizer, batch)
        if loader.on_last:
            accel.save_state(folder)
    return [batch.flatten().tolist() for batch in loader]


def test_an_epoch_that_the_script_counts_as_done_has_its_end(tmp_path, training):
    made = training(batches=3)
    for batch in made.train:
        made.step(batch)
        if made.train.on_last:
            made.accel.save_state(tmp_path)
    made = training(batches=3)
    made.accel.load_state(tmp_path)
    made.recorder.take()
    for batch in made.train:
        made.step(batch)
    trace = [line for line in made.recorder.take() if "epoch" in line]
    assert trace == ["train_epoch_end 0", "train_epoch_start 1", "train_epoch_end 1"]
    assert made.accel.current_run.current_epoch == 1


@pytest.mark.parametrize("ask", ["current_epoch", "epochs_done", "first_epoch"])
def test_a_script_that_asks_the_run_for_its_epoch_gets_the_empty_rest(tmp_path, ask):
    expected = saved_in_the_last_batch(tmp_path)
    accel = Accelerator(cpu=True)
    _, _, loader = parts(accel)
    accel.load_state(tmp_path)
    assert getattr(accel.current_run, ask) == 0
    assert list(loader) == []
    assert [batch.flatten().tolist() for batch in loader] == expected


@pytest.mark.parametrize("view", [True, False])
def test_what_a_sampler_draws_at_its_end_is_drawn_where_nothing_is_left(tmp_path, view):
    def options():
        return {"shuffle": True, "generator": torch.Generator().manual_seed(3)}

    expected = saved_in_the_last_batch(tmp_path, **options())
    accel = Accelerator(cpu=True)
    _, _, loader = parts(accel, **options())
    accel.load_state(tmp_path)
    batches = skip_first_batches(loader, 0) if view else loader
    assert [batch.flatten().tolist() for batch in batches] == expected


def test_a_load_and_a_save_keep_that_nothing_is_left(tmp_path):
    expected = saved_in_the_last_batch(tmp_path / "a")
    for source, target in (("a", "b"), ("b", "c")):
        accel = Accelerator(cpu=True)
        _, _, loader = parts(accel)
        accel.load_state(tmp_path / source)
        accel.save_state(tmp_path / target)
    assert [batch.flatten().tolist() for batch in loader] == expected


def test_a_look_at_the_first_batch_by_the_alias_leaves_the_pass_as_it_was(tmp_path):
    from accel_callbacks.compat.names import resolve

    accel = Accelerator(cpu=True)
    model, optimizer, loader = parts(accel)
    for batch in loader:
        step(accel, model, optimizer, batch)
        accel.save_state(tmp_path)
        break
    accel = resolve("accelerate", "Accelerator")(cpu=True)
    model, optimizer, loader = parts(accel)
    accel.load_state(tmp_path)
    assert next(iter(loader)).flatten().tolist() == [0.0, 1.0]
    assert len(list(loader)) == 3


def test_a_skip_in_a_window_that_the_checkpoint_holds_open_is_an_error(tmp_path):
    def loop(done: int) -> None:
        for index, batch in enumerate(loader):
            if index < done:
                continue
            with accel.accumulate(model):
                step(accel, model, optimizer, batch)
            if index == 2 and not done:
                accel.save_state(tmp_path)
                return

    for done in (0, 3):
        accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = torch.nn.Linear(1, 1)
        loader = DataLoader(torch.arange(16.0)[:, None], 2)
        model, optimizer, loader = accel.prepare(
            net, torch.optim.SGD(net.parameters(), 1e-5), loader
        )
        if done:
            accel.load_state(tmp_path)
            with pytest.raises(ResumeError, match="the first 3 batches after load_state"):
                loop(done)
        else:
            loop(done)


def test_batches_without_labels_at_the_end_of_an_epoch_are_no_skip(tmp_path):
    def train(save_at=None):
        torch.manual_seed(0)
        accel = Accelerator(cpu=True)
        net = torch.nn.Linear(1, 1)
        model, optimizer, loader = accel.prepare(
            net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(torch.arange(12.0)[:, None], 1)
        )
        if save_at is None:
            accel.load_state(tmp_path)
        seen = []
        for batch in (batch for _ in range(2) for batch in loader):
            if int(batch) % 4 > 1:  # it has no label
                continue
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(int(batch))
            if len(seen) == save_at:
                accel.save_state(tmp_path)
                break
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(save_at=6) == [0, 1, 4, 5, 8, 9]
        assert train() == [0, 1, 4, 5, 8, 9]
