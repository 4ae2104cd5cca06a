"""What a script calls around its loops: memory, triggers, seeds; and what a sweep leaves behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, ProjectConfiguration, set_seed
from accel_callbacks.callbacks import EarlyStopping


def one_training(accel: Accelerator, **options) -> tuple:
    """Two epochs on four samples; the prepared objects."""
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    parts = accel.prepare(
        model,
        sgd,
        DataLoader(torch.ones(4, 1), 1, **options),
        torch.optim.lr_scheduler.StepLR(sgd, 1),
    )
    model, optimizer, data, scheduler = parts
    for _ in range(2):
        for batch in data:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return parts


def state_of(accel: Accelerator) -> list[int]:
    groups = (accel.models, accel.optimizers, accel.schedulers, accel.loaders)
    return [*map(len, groups), accel.current_run.global_step]


@pytest.mark.parametrize("method", ["free_memory", "clear"])
def test_freed_is_all_that_was_prepared_and_it_can_be_prepared_anew(method):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = one_training(accel)
    accel.register_for_checkpointing(torch.nn.Linear(1, 1))
    assert state_of(accel) == [1, 1, 1, 1, 4]
    refs = [weakref.ref(part) for part in parts]
    model, optimizer, data, scheduler = getattr(accel, method)(*parts)
    del parts
    gc.collect()
    assert (model, optimizer, data, scheduler) == (None,) * 4
    assert [ref() for ref in refs] == [None] * 4
    assert state_of(accel) == [0, 0, 0, 0, 0]
    assert accel.training_state.registered.names == []
    assert accel.free_memory() == []
    one_training(accel)
    assert state_of(accel) == [1, 1, 1, 1, 4]


def test_a_window_that_was_left_open_does_not_reach_the_next_training():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accel.prepare(torch.nn.Linear(1, 1, bias=False))
    with accel.accumulate(model):
        accel.backward(model(torch.ones(1, 1)).sum(), normalizer=3)
    assert not accel.sync_gradients
    accel.free_memory()
    assert accel.sync_gradients
    model = accel.prepare(torch.nn.Linear(1, 1, bias=False))
    for _ in range(4):
        assert model.weight.grad is None or not accel.sync_gradients
        with accel.accumulate(model):
            accel.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 1.0


def test_a_loop_that_was_left_open_fires_no_hook_afterwards(recorder):
    callback = recorder()
    accel = Accelerator(cpu=True, callbacks=[callback])
    model, data = accel.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(4, 1), 1))
    for batch in data:
        accel.backward(model(batch).sum())
        break
    callback.take()
    accel.free_memory()
    assert accel.callbacks == [callback]
    assert callback.take() == []
    model, data = accel.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(1, 1), 1))
    list(data)
    assert callback.take()[0] == "train_epoch_start 0"


def test_a_training_that_was_stopped_does_not_stop_the_next():
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("loss", patience=1)])
    accel.current_run.stop("enough")
    data = accel.prepare(DataLoader(range(3)))
    assert list(data) == []
    run = accel.current_run
    accel.free_memory()
    assert accel.current_run is run
    assert not run.should_stop
    assert len(list(accel.prepare(DataLoader(range(3))))) == 3


def test_the_loss_scale_of_a_freed_optimizer_is_forgotten():
    accel = Accelerator(cpu=True, mixed_precision="fp16")
    for _ in range(2):
        model = torch.nn.Linear(1, 1)
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
        accel.backward(model(torch.ones(1, 1)).sum())
        accel.clip_grad_norm_(model.parameters(), 1.0)  # unscaled, and no step is taken
        model, optimizer = accel.free_memory(model, optimizer)
    assert accel.scaler._per_optimizer_states == {}


def workers() -> int:
    return len(multiprocessing.active_children())


def test_freeing_ends_the_workers_that_a_loader_keeps():
    accel = Accelerator(cpu=True)
    parts = one_training(accel, num_workers=1, persistent_workers=True)
    assert workers() == 1
    accel.free_memory()
    assert workers() == 0
    assert len(parts) == 4


def test_a_broken_off_loop_ends_its_workers():
    accel = Accelerator(cpu=True)
    data = accel.prepare(DataLoader(torch.ones(4, 1), 1, num_workers=1))
    for _ in data:
        assert workers() == 1
        break
    assert workers() == 0


SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in ("free_memory", "del")]


@pytest.mark.parametrize("way", [*SLOW_WAYS, "end_training"])
def test_a_sweep_of_ten_runs_in_one_process_leaves_nothing(way, tmp_path):
    one_training(Accelerator(cpu=True))  # torch itself sets a variable with its first optimizer
    gc.collect()
    environment, threads = dict(os.environ), threading.active_count()
    shared = Accelerator(cpu=True) if way == "free_memory" else None
    for trial in range(10):
        options = {"log_with": "jsonl", "project_dir": tmp_path / str(trial)}
        accel = shared or Accelerator(cpu=True, gradient_accumulation_steps=1 + trial, **options)
        parts = one_training(accel, num_workers=trial % 2)
        accel.log({"loss": 1.0})
        refs = [weakref.ref(part) for part in (*parts, accel)]
        if way == "free_memory":
            refs.pop()
            parts = accel.free_memory(*parts)
        if way == "end_training":
            accel.end_training()
        del accel, parts
        # Not at once: a call does nothing while another thread collects.
        while any(ref() is not None for ref in refs):
            gc.collect()
    assert workers() == 0
    while threading.active_count() > threads:
        time.sleep(0.01)  # trackers of an Accelerator that was collected end in a thread
    for trial in range(10) if way != "free_memory" else ():
        assert (tmp_path / str(trial) / "metrics.jsonl").read_text().count("loss") == 1
    assert {k: v for k, v in os.environ.items() if k not in environment} == {}


def test_a_trigger_is_seen_once_and_by_its_own_accelerator():
    accel, other = Accelerator(cpu=True), Accelerator(cpu=True)
    assert not accel.check_trigger()
    accel.set_trigger()
    accel.set_trigger()
    assert not other.check_trigger()
    assert accel.check_trigger()
    assert not accel.check_trigger()


def test_where_logs_go_and_whether_there_are_several_devices():
    accel = Accelerator(cpu=True, project_config=ProjectConfiguration("runs", logging_dir="logs"))
    assert accel.logging_dir == os.path.abspath("logs")
    assert Accelerator(cpu=True, project_dir="runs").logging_dir == os.path.abspath("runs")
    assert accel.multi_device is False


def test_a_seed_repeats_all_generators():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_seed(3)
    first = draw()
    assert draw() != first
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert draw() != first


def test_deterministic_algorithms_are_asked_for_only_when_wanted():
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        set_seed(0)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before
