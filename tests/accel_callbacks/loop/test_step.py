"""The options of a step: what a window ends with, what a scheduler counts, what a loss weighs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    Callback,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
)


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, **options)


def line(accel: Accelerator, weight: float = 0.0, lr: float = 1.0):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr))


# --- a normalizer ---------------------------------------------------------------------------

TOKENS = torch.arange(1.0, 25.0).unsqueeze(1)


def one_big_batch(steps: int = 2) -> float:
    weight = torch.zeros(1, 1, requires_grad=True)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad((TOKENS @ weight - TOKENS).square().mean(), weight)
        weight = (weight - 1e-3 * gradient).detach().requires_grad_()
    return weight.item()


def split(sizes: list[int], as_tensor: bool = False, **options) -> float:
    accel = accelerator(gradient_accumulation_steps=len(sizes), **options)
    model, optimizer = line(accel, lr=1e-3)
    for _ in range(2):
        for part in TOKENS.split(sizes):
            with accel.accumulate(model):
                loss = (model(part) - part).square().sum()
                count = torch.tensor(len(part)) if as_tensor else len(part)
                accel.backward(loss, normalizer=count)
                optimizer.step()
                optimizer.zero_grad()
    return accel.unwrap_model(model).weight.item()


@pytest.mark.parametrize("sizes", [[24], [12, 12], [1, 23], [7, 8, 9], [5] * 4 + [4], [1] * 24])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_normalizer_averages_exactly_however_the_batch_is_split(sizes, as_tensor):
    assert split(sizes, as_tensor) == pytest.approx(one_big_batch(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_normalizer_works_in_every_precision(precision):
    options = {"mixed_precision": precision, "kwargs_handlers": [GradScalerKwargs(init_scale=16.0)]}
    assert split([7, 8, 9], **options) == pytest.approx(one_big_batch(), rel=0.02)


def test_the_tail_window_is_averaged_by_its_own_count():
    accel = accelerator(gradient_accumulation_steps=4)
    model, optimizer = line(accel)
    loader = accel.prepare(DataLoader(torch.ones(6, 1), batch_size=1))
    seen = []
    for batch in loader:
        with accel.accumulate(model):
            accel.backward(model(batch).sum() * 3, normalizer=3)
            if accel.sync_gradients:
                accel.clip_grad_norm_(model.parameters(), 100.0)
                seen.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [1.0, 1.0]


def test_hooks_and_clipping_see_the_gradient_of_the_mean():
    class Sees(Callback):
        gradient = None

        def on_before_optimizer_step(self, run, model, optimizer):
            self.gradient = model.weight.grad.item()

    sees = Sees()
    accel = accelerator(callbacks=[sees])
    model, optimizer = line(accel)
    accel.backward(model(torch.ones(5, 1)).sum(), normalizer=10)
    assert accel.clip_grad_norm_(model.parameters(), 100.0).item() == 0.5
    optimizer.step()
    assert sees.gradient == 0.5


def test_unscale_gradients_takes_one_optimizer_several_or_all():
    accel = accelerator(mixed_precision="fp16")
    pairs = [line(accel, weight=0.5) for _ in range(3)]
    accel.backward(sum(model(torch.ones(1, 1)).sum() for model, _ in pairs) / 4)
    scale = accel.scaler.get_scale()

    def gradients() -> list[float]:
        return [model.weight.grad.item() for model, _ in pairs]

    accel.unscale_gradients(pairs[0][1])
    assert gradients() == [0.25, 0.25 * scale, 0.25 * scale]
    accel.unscale_gradients([pairs[1][1].optimizer])
    assert gradients() == [0.25, 0.25, 0.25 * scale]
    accel.unscale_gradients()
    assert gradients() == [0.25] * 3


def test_two_optimizers_step_with_the_gradients_of_one_normalized_loss():
    accel = accelerator()
    first, first_optimizer = line(accel)
    second, second_optimizer = line(accel)
    for _ in range(2):
        x = torch.ones(4, 1)
        accel.backward((first(x) + second(x)).sum(), normalizer=4)
        first_optimizer.step()
        first_optimizer.zero_grad()
        second_optimizer.step()
        second_optimizer.zero_grad()
    assert [first.weight.item(), second.weight.item()] == [-2.0, -2.0]


def test_losses_that_take_turns_have_counts_of_their_own():
    accel = accelerator()
    first, first_optimizer = line(accel)
    second, second_optimizer = line(accel)
    for _ in range(2):
        with accel.accumulate(first, second):
            turns = ((first, first_optimizer, 4), (second, second_optimizer, 2))
            for model, optimizer, size in turns:
                optimizer.zero_grad()
                accel.backward(model(torch.ones(size, 1)).sum(), normalizer=size)
                optimizer.step()
    assert [first.weight.item(), second.weight.item()] == [-2.0, -2.0]


def test_a_plain_loss_after_a_normalized_step_is_a_plain_loss():
    accel = accelerator()
    first, first_optimizer = line(accel)
    second, second_optimizer = line(accel)
    accel.backward(first(torch.ones(4, 1)).sum(), normalizer=4)
    first_optimizer.step()
    accel.backward(second(torch.ones(4, 1)).sum())
    second_optimizer.step()
    assert [first.weight.item(), second.weight.item()] == [-1.0, -4.0]


def test_gradients_that_were_given_up_do_not_count():
    accel = accelerator()
    model, optimizer = line(accel)
    accel.backward(model(torch.ones(100, 1)).sum(), normalizer=100)
    optimizer.zero_grad()
    accel.backward(model(torch.ones(4, 1)).sum(), normalizer=4)
    optimizer.step()
    assert model.weight.item() == -1.0


def test_a_window_left_by_an_error_does_not_count():
    accel = accelerator(gradient_accumulation_steps=2)
    model, optimizer = line(accel)

    def micro_batch(size: int, fails: bool = False) -> None:
        with accel.accumulate(model):
            accel.backward(model(torch.ones(size, 1)).sum(), normalizer=size)
            if fails:
                raise RuntimeError("bad batch")
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="bad batch"):
        micro_batch(100, fails=True)
    micro_batch(1)
    micro_batch(3)
    assert model.weight.item() == -1.0


def test_a_count_of_nothing_leaves_the_weights_alone():
    accel = accelerator()
    model, optimizer = line(accel, weight=2.0)
    for count in (0, torch.tensor(0)):
        accel.backward(model(torch.ones(1, 1)).sum() * 0, normalizer=count)
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == 2.0


def normalized(accel, model, normalizer) -> None:
    accel.backward(model(torch.ones(1, 1)).sum(), normalizer=normalizer)


@pytest.mark.parametrize("pair", [(1, None), (None, 1)])
def test_mixed_losses_in_a_window_are_an_error(pair):
    accel = accelerator(gradient_accumulation_steps=2)
    model, _ = line(accel)
    with accel.accumulate(model):
        normalized(accel, model, pair[0])

    def second() -> None:
        with accel.accumulate(model):
            normalized(accel, model, pair[1])

    with pytest.raises(ValueError, match="with a normalizer and without"):
        second()


def test_mixed_losses_in_a_window_are_an_error_also_where_each_is_of_its_own_optimizer():
    accel = accelerator(gradient_accumulation_steps=2)
    first, second = (line(accel)[0] for _ in range(2))
    with accel.accumulate():
        normalized(accel, first, None)

    def mixed() -> None:
        with accel.accumulate():
            normalized(accel, second, 1)

    with pytest.raises(ValueError, match="with a normalizer and without"):
        mixed()


def test_two_normalized_losses_before_a_step_are_an_error():
    accel = accelerator()
    model, _ = line(accel)
    normalized(accel, model, 1)
    with pytest.raises(ValueError, match="add the losses"):
        normalized(accel, model, 1)


def test_a_negative_count_is_an_error():
    accel = accelerator()
    model, _ = line(accel)
    with pytest.raises(ValueError, match="must not be negative"):
        normalized(accel, model, -1)


def tokens_with_a_save(folder: str, interrupted: bool) -> float:
    """Three micro-batches of a window of four, a save, perhaps a new start, and the rest."""

    def start():
        accel = accelerator(gradient_accumulation_steps=4, project_dir=folder)
        return accel, *line(accel, lr=1e-3)

    accel, model, optimizer = start()
    parts = TOKENS.split([3, 5, 7, 9])
    for number, part in enumerate(parts * 2):
        if number == 3:
            path = accel.save_state()
            if interrupted:
                accel, model, optimizer = start()
                accel.load_state(path)
        with accel.accumulate(model):
            loss = (model(part) - part).square().sum()
            accel.backward(loss, normalizer=len(part))
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.item()


def test_a_resume_in_the_middle_of_a_normalized_window_is_bitwise_the_same(tmp_path):
    straight = tokens_with_a_save(str(tmp_path / "a"), interrupted=False)
    assert straight == tokens_with_a_save(str(tmp_path / "b"), interrupted=True)
    assert straight == pytest.approx(one_big_batch(), rel=1e-5)


# --- the plugin of the window ---------------------------------------------------------------


def steps_of(plugin: GradientAccumulationPlugin, epochs: int = 2, samples: int = 3):
    """(optimizer steps, scheduler steps) after some epochs."""
    accel = accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer = line(accel)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)
    loader, scheduler = accel.prepare(DataLoader(torch.ones(samples, 1)), scheduler)
    for _ in range(epochs):
        for batch in loader:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return accel.current_run.global_step, scheduler.last_epoch


def test_num_steps_is_the_length_of_a_window():
    assert steps_of(GradientAccumulationPlugin(1)) == (6, 6)
    assert steps_of(GradientAccumulationPlugin(3)) == (2, 2)


def test_sync_with_dataloader_ends_a_window_with_the_epoch():
    assert steps_of(GradientAccumulationPlugin(2)) == (4, 4)
    assert steps_of(GradientAccumulationPlugin(2, sync_with_dataloader=False)) == (3, 3)


def test_adjust_scheduler_counts_windows_and_not_micro_batches():
    assert steps_of(GradientAccumulationPlugin(3)) == (2, 2)
    assert steps_of(GradientAccumulationPlugin(3, adjust_scheduler=False)) == (2, 6)


def test_a_window_across_epochs_keeps_its_gradients():
    plugin = GradientAccumulationPlugin(4, sync_with_dataloader=False)
    accel = accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer = line(accel)
    loader = accel.prepare(DataLoader(torch.tensor([[1.0], [2.0]])))
    for _ in range(2):
        for batch in loader:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert model.weight.item() == -1.5


def test_an_evaluation_inside_of_training_does_not_end_the_window():
    accel = accelerator(gradient_accumulation_steps=4)
    model, optimizer = line(accel)
    train, val = accel.prepare(DataLoader(torch.ones(8, 1)), DataLoader(torch.ones(2, 1)))
    synced = []
    for index, batch in enumerate(train):
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            synced.append(accel.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        if index in (1, 5):
            with accel.evaluate(model):
                for _ in val:
                    pass
    assert synced == [False, False, False, True] * 2


def test_plugin_and_steps_exclude_each_other_and_are_checked():
    with pytest.raises(ValueError, match="not both"):
        accelerator(
            gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin()
        )
    with pytest.raises(ValueError, match="at least 1"):
        GradientAccumulationPlugin(0)


def test_the_plugin_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "8")
    assert accelerator().gradient_accumulation_steps == 8
    accel = accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(2))
    assert accel.gradient_accumulation_steps == 2


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_by_value_is_of_the_unscaled_gradients(precision):
    accel = accelerator(mixed_precision=precision)
    model, optimizer = line(accel)
    accel.backward(model(torch.ones(1, 1)).sum() / 4)
    accel.clip_grad_value_(model.parameters(), 0.5)  # which the scaled gradient is far above
    assert model.weight.grad.item() == 0.25
    optimizer.step()
    assert model.weight.item() == -0.25


# --- schedulers -----------------------------------------------------------------------------


def overflowing(accel: Accelerator, *, at: int, per_epoch: bool, samples: int = 2) -> list[int]:
    """Train in fp16, with an infinite loss at one step; the scheduler's count after each epoch."""
    model, optimizer = line(accel, weight=0.5, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)
    loader, scheduler = accel.prepare(DataLoader(torch.ones(samples, 1)), scheduler)
    counts, number = [], 0
    for _ in range(2):
        for batch in loader:
            factor = float("inf") if number == at else 1e-3
            accel.backward(model(batch).sum() * factor)
            optimizer.step()
            if not per_epoch:
                scheduler.step()
            optimizer.zero_grad()
            number += 1
        if per_epoch:
            scheduler.step()
        counts.append(scheduler.last_epoch)
    return counts


def test_the_scheduler_does_not_move_with_a_step_that_overflowed():
    accel = accelerator(mixed_precision="fp16")
    assert overflowing(accel, at=1, per_epoch=False) == [1, 3]
    accel = accelerator(mixed_precision="fp16", step_scheduler_with_optimizer=False)
    assert overflowing(accel, at=1, per_epoch=False) == [2, 4]


def test_a_scheduler_that_counts_epochs_counts_one_whose_last_step_overflowed():
    accel = accelerator(mixed_precision="fp16")
    assert overflowing(accel, at=1, per_epoch=True) == [1, 2]


def test_step_scheduler_with_optimizer_off_counts_every_call():
    accel = accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    model, optimizer = line(accel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    scheduler = accel.prepare(scheduler)
    with accel.accumulate(model):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_reduce_on_plateau_takes_its_metric():
    accel = accelerator()
    _, optimizer = line(accel)
    inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, factor=0.5, patience=0)
    scheduler = accel.prepare(inner)
    rates = []
    for metric in (1.0, 2.0, 0.5, 3.0):
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


# --- unknown options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("mixed_precison", "Did you mean 'mixed_precision'"),
        ("split_batches", "DataLoaderConfiguration(split_batches=...)"),
        ("logging_dir", "project_config=ProjectConfiguration(logging_dir=...)"),
        ("sync_each_batch", "GradientAccumulationPlugin(sync_each_batch=...)"),
        ("find_unused_parameters", "[DistributedDataParallelKwargs(find_unused_parameters=...)]"),
        ("hf_ds_config", "deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...)"),
        ("deepspeed_config", "Did you mean 'deepspeed_plugin'?"),
        ("zzz", "has no option 'zzz'."),
    ],
)
def test_an_unknown_option_is_an_error_with_a_suggestion(option, hint):
    with pytest.raises(TypeError) as raised:
        accelerator(**{option: 1})
    assert hint in str(raised.value)


def test_a_window_that_a_run_leaves_open_does_not_reach_the_next_run():
    accel = accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(3, True, False))
    model, optimizer = line(accel, lr=0.0)
    loader = accel.prepare(DataLoader(torch.ones(2, 1)))
    gradients = []
    for _ in range(2):
        with accel.run("demo", resume=False) as run:
            for _ in run.epochs(1):
                for batch in loader:
                    with accel.accumulate(model):
                        accel.backward(model(batch).sum())
                        gradients.append(round(float(model.weight.grad) * 3))
                        optimizer.step()
                        optimizer.zero_grad()
    assert gradients == [1, 2, 1, 2]


@pytest.mark.parametrize(
    "option", [{"gradient_accumulation_plugin": {"num_steps": 2}}, {"project_config": "runs"}]
)
def test_a_part_of_another_kind_is_an_error_that_names_the_right_one(option):
    with pytest.raises(TypeError, match=r"must be a (GradientAccumulationPlugin|ProjectConfig)"):
        accelerator(**option)


def test_a_handler_of_another_kind_is_refused_where_it_is_given():
    with pytest.raises(TypeError, match="must be an AutocastKwargs"):
        accelerator().autocast(GradScalerKwargs())
    with pytest.raises(TypeError, match=r"use accel\.gradient_state"):
        GradientState()
