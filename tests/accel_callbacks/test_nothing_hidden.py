"""Two Accelerators in one process: what one is told is not heard by the other."""

from __future__ import annotations

import os

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    AutocastKwargs,
    Callback,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    LocalSGD,
    ProfileKwargs,
    ProjectConfiguration,
    set_seed,
)
from accel_callbacks.callbacks import Checkpoint, EarlyStopping, ProgressBar
from loggers import read_jsonl
from tests.support.bound import BOUND


class Counts(Callback):
    def __init__(self) -> None:
        self.batches = self.steps = self.logs = 0

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.batches += 1

    def on_after_optimizer_step(self, run, model, optimizer):
        self.steps += 1

    def on_log(self, run, model, metrics, step):
        self.logs += 1


class Side:
    """One training, which can be run batch by batch."""

    def __init__(self, project_dir, shuffle: bool = True, **options) -> None:
        self.counts = Counts()
        self.accel = Accelerator(
            cpu=True, callbacks=[self.counts], project_dir=project_dir, log_with="jsonl", **options
        )
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        data = torch.utils.data.DataLoader(torch.rand(14, 4), 2, shuffle=shuffle)
        self.model, self.optimizer, self.scheduler, self.data = self.accel.prepare(
            model, optimizer, scheduler, data
        )
        self.seen: list[torch.Tensor] = []

    def batches(self):
        """Trains on one batch at each step of this generator."""
        accel = self.accel
        for batch in self.data:
            with accel.accumulate(self.model):
                output = self.model(batch)
                self.dtype = (output @ torch.ones(1, 1)).dtype
                with accel.autocast():
                    self.dtype = (batch @ torch.ones(4, 1)).dtype
                accel.backward(output.square().mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            accel.log({"loss": 0.0})
            self.seen.append(batch)
            yield
        accel.end_training()

    def outcome(self) -> tuple:
        """All that a training has to show."""
        accel, counts = self.accel, self.counts
        return (
            [parameter.tolist() for parameter in self.model.parameters()],
            torch.cat(self.seen).tolist(),
            self.scheduler.get_last_lr(),
            (counts.batches, counts.steps, counts.logs, accel.current_run.global_step),
            (accel.mixed_precision, accel.gradient_accumulation_steps, self.dtype),
        )


FIRST = {"mixed_precision": "bf16", "gradient_accumulation_steps": 3}
SECOND = {
    "shuffle": False,
    "gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_with_dataloader=False),
    "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True),
    "rng_types": ["torch"],
}


def run_alone(folder, options) -> tuple:
    side = Side(folder, **options)
    for _ in side.batches():
        pass
    return side.outcome()


def test_accelerators_side_by_side_train_as_each_does_alone(tmp_path):
    alone = [run_alone(tmp_path / "a", FIRST), run_alone(tmp_path / "b", SECOND)]
    first, second = Side(tmp_path / "c", **FIRST), Side(tmp_path / "d", **SECOND)
    left = [first.batches(), second.batches()]
    while left:
        left = [one for one in left if next(one, "over") != "over"]
    assert [first.outcome(), second.outcome()] == alone
    assert first.outcome()[4] == ("bf16", 3, torch.bfloat16)
    assert second.outcome()[4] == ("no", 2, torch.float32)
    for folder, side in (("c", first), ("d", second)):
        (log,) = (tmp_path / folder).rglob("metrics.jsonl")
        assert len(read_jsonl(log)) == side.counts.steps == 3


def test_accelerators_one_after_another_do_not_know_of_each_other(tmp_path):
    alone = run_alone(tmp_path / "alone", SECOND)
    run_alone(tmp_path / "before", FIRST)
    assert run_alone(tmp_path / "after", SECOND) == alone


def test_a_loop_that_was_broken_off_is_not_seen_by_the_next_accelerator(tmp_path):
    first = Side(tmp_path / "first", **FIRST)
    steps = first.batches()
    for _ in range(7):  # the last batch, in an open loop
        next(steps)
    assert first.accel.gradient_state.end_of_dataloader
    second = Accelerator(cpu=True)
    assert not second.gradient_state.in_dataloader
    assert not second.gradient_state.end_of_dataloader
    gathered = second.gather_for_metrics(torch.arange(3))
    assert gathered.tolist() == [0, 1, 2]


def prepared_by_both(tmp_path, **options) -> tuple[Side, Side]:
    """What one Accelerator has prepared is handed to another."""
    first, second = Side(tmp_path / "first", **FIRST), Side(tmp_path / "second", **options)
    second.model, second.optimizer, second.scheduler, second.data = second.accel.prepare(
        first.model, first.optimizer, first.scheduler, first.data
    )
    return first, second


def test_prepared_objects_follow_the_accelerator_that_prepares_them_anew(tmp_path):
    first, second = prepared_by_both(tmp_path)
    for _ in second.batches():
        assert second.accel.gradient_state.in_dataloader
        assert not first.accel.gradient_state.in_dataloader
    assert (second.counts.batches, second.counts.steps) == (7, 7)
    assert (first.counts.batches, first.counts.steps) == (0, 0)
    assert second.scheduler.get_last_lr() == pytest.approx([0.1 * 0.9**7])


def test_prepared_objects_are_known_again_by_their_own_accelerator(tmp_path):
    side = Side(tmp_path)
    again = side.accel.prepare(side.model, side.optimizer, side.scheduler, side.data)
    assert [a is b for a, b in zip(again, (side.model, side.optimizer), strict=False)] == [True] * 2
    assert again[2] is side.scheduler
    assert again[3] is side.data


def test_a_scheduler_made_of_a_prepared_optimizer_can_be_prepared_anew(tmp_path):
    first, second = Side(tmp_path / "first"), Side(tmp_path / "second")
    scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer, 1, gamma=0.5)
    optimizer, prepared = second.accel.prepare(first.optimizer, scheduler)
    optimizer.step()
    prepared.step()
    assert prepared.get_last_lr() == [0.05]


def test_a_model_runs_in_the_precision_that_prepared_it_last(tmp_path):
    seen = []

    class Sees(torch.nn.Linear):
        def forward(self, batch):
            output = super().forward(batch)
            seen.append(output.dtype)
            return output

    model = Sees(1, 1)
    for precision, expected in (("bf16", torch.bfloat16), ("no", torch.float32)) * 2:
        prepared = Accelerator(cpu=True, mixed_precision=precision).prepare(model)
        prepared(torch.ones(1, 1))
        assert seen.pop() is expected


def test_a_callback_may_serve_two_accelerators():
    counts = Counts()
    for _ in range(2):
        accel = Accelerator(cpu=True, callbacks=[counts])
        for _ in accel.prepare(torch.utils.data.DataLoader(range(3))):
            pass
    assert counts.batches == 6


def test_nested_trainings_keep_their_windows_apart():
    outer = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = outer.prepare(torch.utils.data.DataLoader(range(4)))
    flags = []
    for _ in data:
        with outer.accumulate():
            inner = Accelerator(cpu=True, gradient_accumulation_steps=3)
            for _ in inner.prepare(torch.utils.data.DataLoader(range(3))):
                with inner.accumulate():
                    flags.append(inner.sync_gradients)
            flags.append(outer.sync_gradients)
    inner_flags = [False, False, True]
    assert flags == [*inner_flags, False, *inner_flags, True] * 2


def train_with_every_option(folder) -> int:
    """A full training with all that can be asked for on a CPU."""
    set_seed(1, device_specific=True)
    accel = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=True),
        device_placement=True,
        log_with=["jsonl", "tensorboard"],
        project_config=ProjectConfiguration(folder, os.path.join(folder, "logs")),
        step_scheduler_with_optimizer=True,
        scheduler_steps_per_process=True,
        kwargs_handlers=[
            AutocastKwargs(cache_enabled=False),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook="bf16"),
            InitProcessGroupKwargs(backend="gloo", timeout=BOUND),
            ProfileKwargs(activities=["cpu"], output_trace_dir=folder),
        ],
        dynamo_backend="eager",
        dataloader_config=DataLoaderConfiguration(data_seed=3, even_batches=True),
        rng_types=["torch", "generator"],
        callbacks=[
            ProgressBar(),
            EarlyStopping("loss", patience=3),
            Checkpoint(os.path.join(folder, "saved"), every_n_steps=2, keep_last=1),
        ],
        strict_trackers=True,
        debug=True,
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.rand(16, 4), 2, shuffle=True, num_workers=1)
    model, optimizer, scheduler, data = accel.prepare(model, optimizer, scheduler, loader)
    accel.register_for_checkpointing(average=torch.optim.swa_utils.AveragedModel(model))
    with accel.run("every option", config={"lr": 0.1}) as run, accel.profile():
        with LocalSGD(accelerator=accel, model=model, local_sgd_steps=2) as local:
            for _ in run.epochs(2):
                for batch in data:
                    with accel.accumulate(model):
                        accel.backward(model(batch).mean())
                        accel.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    local.step()
                with accel.evaluate(model):
                    for batch in data:
                        accel.gather_for_metrics(model(batch))
                accel.log({"loss": 1.0})
    steps = run.global_step
    accel.load_state(os.path.join(folder, "saved", f"step-{steps:08d}"))
    accel.save_model(model, os.path.join(folder, "model"))
    accel.free_memory()
    accel.end_training()
    return steps


def test_no_environment_variable_changes_whatever_is_asked_for(tmp_path):
    before = dict(os.environ)
    assert train_with_every_option(str(tmp_path)) == 8
    assert dict(os.environ) == before
