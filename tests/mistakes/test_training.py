"""Mistakes in the loop: each is told once, at the user's line, and correct loops are silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from tests.support.bound import BOUND

X = torch.ones(2, 1)
Loop = Callable[[Accelerator], None]


@contextmanager
def all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def messages(loop: Loop, accel: Accelerator) -> list[str]:
    """The warnings of a loop at lines of this file; torch's own are of its files or of ours."""
    with all_warnings() as caught:
        loop(accel)
    ours = [warning for warning in caught if "lr_scheduler" not in str(warning.message)]
    assert {warning.filename for warning in ours} <= {__file__}
    return [str(warning.message) for warning in ours]


def assert_told_once(loop: Loop, words: str, **options: Any) -> None:
    (message,) = messages(loop, Accelerator(cpu=True, **options))
    assert words in message


def assert_silent(loop: Loop, **options: Any) -> None:
    assert messages(loop, Accelerator(cpu=True, **options)) == []


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1)


def prepared(accel: Accelerator) -> tuple[Any, Any]:
    model = torch.nn.Linear(1, 1)
    return accel.prepare(model, sgd(model))


def accumulated_steps(
    accel: Accelerator, model: Any, optimizer: Any, scheduler: Any = None
) -> None:
    for _ in range(12):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()


# --- 1. an optimizer or a scheduler that is not prepared --------------------------------------


def bare_optimizer(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    accumulated_steps(accel, accel.prepare(model), optimizer)


def returned_optimizer_not_used(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    model, _ = accel.prepare(model, optimizer)
    accumulated_steps(accel, model, optimizer)


@pytest.mark.parametrize("loop", [bare_optimizer, returned_optimizer_not_used])
def test_an_optimizer_that_is_not_prepared_is_told(loop):
    assert_told_once(
        loop, "SGD steps after each micro-batch, not once in 4", gradient_accumulation_steps=4
    )


@pytest.mark.parametrize("loop", [bare_optimizer, returned_optimizer_not_used])
def test_an_optimizer_that_steps_with_scaled_gradients_is_told(loop):
    assert_told_once(loop, "still scaled for fp16", mixed_precision="fp16")


@pytest.mark.parametrize("loop", [bare_optimizer, returned_optimizer_not_used])
def test_an_optimizer_that_is_not_prepared_is_right_without_a_window(loop):
    assert_silent(loop)


def guarded_by_hand(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    model = accel.prepare(model)
    for _ in range(12):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            if accel.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


class SAM(torch.optim.Optimizer):
    """Two steps with an optimizer inside, as in the implementation that is mostly copied."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, 0.1)
        self.param_groups = self.base.param_groups

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.base.step()


def sharpness_aware(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, SAM(model.parameters()))
    for _ in range(12):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            if accel.sync_gradients:
                optimizer.first_step()
                accel.backward(model(X).sum())
                optimizer.second_step()


def optimizer_in_backward(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model = accel.prepare(model)
    for _ in range(6):
        with accel.accumulate(model):
            accel.backward(model(X).sum())


def model_of_the_script_beside(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    probe = torch.nn.Linear(1, 1)
    bare = sgd(probe)
    for _ in range(12):
        with accel.accumulate(model):
            outputs = model(X)
            accel.backward(outputs.sum())
            probe(outputs.detach()).sum().backward()
            bare.step()
            bare.zero_grad()
            optimizer.step()
            optimizer.zero_grad()


def second_loss_begins_later(accel: Accelerator) -> None:
    """As a critic's, after a warm-up of the generator."""
    first, second = prepared(accel), prepared(accel)
    for index in range(12):
        for model, optimizer in (first, second):
            if model is first[0] or index > 8:
                accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


def test_an_optimizer_whose_loss_begins_later_is_silent():
    assert_silent(second_loss_begins_later)


@pytest.mark.parametrize("loop", [guarded_by_hand, sharpness_aware, model_of_the_script_beside])
def test_optimizers_that_step_at_the_right_time_are_silent(loop):
    assert_silent(loop, gradient_accumulation_steps=4)


def test_an_optimizer_in_backward_is_told_in_a_window_alone():
    assert_silent(optimizer_in_backward)
    assert_told_once(
        optimizer_in_backward,
        "in each micro-batch of a gradient window",
        gradient_accumulation_steps=4,
    )


def scheduled(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = accel.prepare(model, optimizer)
    accumulated_steps(accel, model, optimizer, scheduler)


def scheduler_of_prepared(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accumulated_steps(accel, model, optimizer, scheduler)


@pytest.mark.parametrize("loop", [scheduled, scheduler_of_prepared])
def test_a_scheduler_that_is_not_prepared_is_told(loop):
    assert_told_once(
        loop, "a scheduler of SGD is not prepared, and steps", gradient_accumulation_steps=4
    )


def scheduler_prepared(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accumulated_steps(accel, *accel.prepare(model, optimizer, scheduler))


def scheduler_guarded_by_hand(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(12):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()
            if accel.sync_gradients:
                scheduler.step()


def scheduler_once_an_epoch(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        accumulated_steps(accel, model, optimizer)
        scheduler.step()


def rates_by_hand(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    for number in range(12):
        with accel.accumulate(model):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            accel.backward(model(X).sum())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [scheduler_prepared, scheduler_guarded_by_hand, scheduler_once_an_epoch, rates_by_hand],
)
def test_schedulers_that_step_at_the_right_time_are_silent(loop):
    assert_silent(loop, gradient_accumulation_steps=4)


def test_a_scheduler_that_counts_micro_batches_on_purpose_is_silent():
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False)
    assert_silent(scheduled, gradient_accumulation_plugin=plugin)


# --- 2. nothing prepared ----------------------------------------------------------------------


def nothing_prepared(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    accumulated_steps(accel, model, sgd(model))


def test_accumulation_without_anything_prepared_is_told():
    assert_told_once(
        nothing_prepared,
        "`model, optimizer = accel.prepare(model, optimizer)`",
        gradient_accumulation_steps=4,
    )


def test_nothing_prepared_is_right_on_one_process():
    assert_silent(nothing_prepared)


def test_the_hook_on_all_optimizers_is_removed():
    for loop in (nothing_prepared, scheduler_prepared, returned_optimizer_not_used):
        before = set(_global_optimizer_pre_hooks)  # those of other tests may go at any time
        accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
        messages(loop, accel)
        assert not set(_global_optimizer_pre_hooks) - before


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_an_accelerator_that_is_not_used_any_more_is_silent(mixed_precision):
    options = {"mixed_precision": mixed_precision, "gradient_accumulation_steps": 2}
    for prepare in (lambda model: model, Accelerator(cpu=True, **options).prepare):
        stale = Accelerator(cpu=True, **options)
        with stale.accumulate():
            stale.backward(prepare(torch.nn.Linear(1, 1))(X).sum())
        assert_silent(own_backward)
        assert_silent(scheduler_prepared, **options)
        assert stale.window.is_open


def averaged_by_hand(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    for _ in range(3):
        accel.backward(model(X + accel.process_index).square().sum())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def clipped_without_a_prepared_model(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    for _ in range(3):
        accel.backward(model(X).sum())
        accel.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def averaged_by_hand_and_clipped(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    for _ in range(3):
        accel.backward(model(X + accel.process_index).square().sum())
        for parameter in model.parameters():
            parameter.grad = accel.reduce(parameter.grad, "mean")
        accel.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def wrapped_by_hand(accel: Accelerator) -> None:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    accumulated_steps(accel, model, sgd(model))


def own_backward(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = sgd(model)
    for _ in range(6):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def prepared_on_ranks(accel: Accelerator) -> None:
    accumulated_steps(accel, *prepared(accel))


def on_rank(name: str, options: dict[str, Any]) -> list[str]:
    accel = Accelerator(cpu=True, timeout=BOUND, **options)
    try:
        return messages(globals()[name], accel)
    finally:
        accel.end_training()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["nothing_prepared", "clipped_without_a_prepared_model"])
def test_a_model_that_is_not_prepared_is_told_to_both_ranks(pool, name):
    (message,), second = pool.run(on_rank, name, {})
    assert "no model is prepared, so that the 2 processes do not average" in message
    assert second == [message]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        "averaged_by_hand",
        "averaged_by_hand_and_clipped",
        "wrapped_by_hand",
        "own_backward",
        "prepared_on_ranks",
    ],
)
def test_gradients_that_are_averaged_anyhow_are_silent(pool, name):
    assert pool.run(on_rank, name, {}) == [[], []]


# --- 3. gradients clipped while they are scaled -----------------------------------------------

Clip = Callable[[Accelerator, Any, Any], None]


def clipped_steps(accel: Accelerator, clip: Clip) -> None:
    model, optimizer = prepared(accel)
    for number in range(1, 9):
        with accel.accumulate(model):
            accel.backward(model(X).square().mean() * number / 32)
            if accel.sync_gradients:
                clip(accel, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


def torch_norm(accel: Accelerator, model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def torch_value(accel: Accelerator, model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)


def own_clip(accel: Accelerator, model: Any, optimizer: Any) -> None:
    accel.clip_grad_norm_(model.parameters(), 0.5)


def unscaled_before(accel: Accelerator, model: Any, optimizer: Any) -> None:
    accel.unscale_gradients(optimizer)
    torch_norm(accel, model, optimizer)


def halved(accel: Accelerator, model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def centralized(accel: Accelerator, model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.sub_(parameter.grad.mean() / 2)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("clip", [torch_norm, torch_value])
def test_scaled_gradients_clipped_by_torch_are_told(clip, steps):
    def loop(accel: Accelerator) -> None:
        clipped_steps(accel, clip)

    words = "while they were scaled for fp16"
    assert_told_once(loop, words, mixed_precision="fp16", gradient_accumulation_steps=steps)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("clip", [own_clip, unscaled_before, halved, centralized])
def test_what_is_right_on_scaled_gradients_is_silent(clip, steps):
    def loop(accel: Accelerator) -> None:
        clipped_steps(accel, clip)

    assert_silent(loop, mixed_precision="fp16", gradient_accumulation_steps=steps)


def test_gradients_that_are_not_scaled_may_be_clipped_by_torch():
    assert_silent(lambda accel: clipped_steps(accel, torch_norm))


# --- 4. a model left in eval mode -------------------------------------------------------------


def evaluated_epochs(accel: Accelerator, begin: Callable[[Any], None], *, context: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    train, val = DataLoader(torch.ones(8, 1), 2), DataLoader(torch.ones(4, 1), 2)
    model, optimizer, train, val = accel.prepare(model, sgd(model), train, val)
    for _ in range(3):
        begin(model)
        for batch in train:
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        if context:
            with accel.evaluate(model):
                for batch in val:
                    model(batch)
        else:
            model.eval()
            with torch.no_grad():
                for batch in val:
                    model(batch)


def frozen_statistics(model: Any) -> None:
    model.train()
    model[1].eval()


def always_eval(model: Any) -> None:
    model.eval()


def as_it_is(model: Any) -> None:
    pass


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_that_validation_left_in_eval_mode_is_told(steps):
    loop = partial(evaluated_epochs, begin=as_it_is, context=False)
    assert_told_once(loop, "trained in eval mode", gradient_accumulation_steps=steps)


@pytest.mark.parametrize("begin", [torch.nn.Module.train, frozen_statistics, always_eval])
@pytest.mark.parametrize("context", [True, False])
def test_modes_that_are_set_on_purpose_are_silent(begin, context):
    assert_silent(partial(evaluated_epochs, begin=begin, context=context))


def test_evaluate_restores_the_mode_in_silence():
    assert_silent(partial(evaluated_epochs, begin=as_it_is, context=True))


def test_an_evaluation_on_the_training_data_is_silent():
    def loop(accel: Accelerator) -> None:
        model = torch.nn.Linear(1, 1)
        model, optimizer, train = accel.prepare(model, sgd(model), DataLoader(torch.ones(8, 1), 2))
        for epoch in range(4):
            model.train(epoch % 2 == 0)
            for batch in train:
                loss = model(batch).sum()
                if model.training:
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    assert_silent(loop)


# --- 5. parameters added after prepare --------------------------------------------------------


def grown(accel: Accelerator, grow: Callable[..., None], *, epoch: int = 0) -> None:
    """Train three epochs of four steps, and let the model grow before one of them."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model, optimizer, train = accel.prepare(model, sgd(model), DataLoader(torch.ones(16, 1), 2))
    for number in range(3):
        if number == epoch:
            grow(accel, accel.unwrap_model(model), optimizer)
        for batch in train:
            accel.backward(model(batch).square().sum() / 8)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def clear_before(accel: Accelerator, grow: Callable[..., None], *, epoch: int = 0) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model, optimizer, train = accel.prepare(model, sgd(model), DataLoader(torch.ones(16, 1), 2))
    for number in range(3):
        if number == epoch:
            grow(accel, accel.unwrap_model(model), optimizer)
        for batch in train:
            optimizer.zero_grad()
            accel.backward(model(batch).square().sum() / 8)
            optimizer.step()


def new_layer(accel: Accelerator, model: Any, optimizer: Any) -> None:
    model.append(torch.nn.Linear(1, 1))


class Adapter(torch.nn.Module):
    """As of peft: what was there is frozen, and the addition is trained."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) * self.scale


def adapter(accel: Accelerator, model: Any, optimizer: Any) -> None:
    model[0] = Adapter(model[0].requires_grad_(False))


def new_layer_with_group(accel: Accelerator, model: Any, optimizer: Any) -> None:
    new_layer(accel, model, optimizer)
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def new_layer_with_optimizer(accel: Accelerator, model: Any, optimizer: Any) -> None:
    """Of the script's own: it steps at each backward."""
    new_layer(accel, model, optimizer)
    own = sgd(model[-1])

    def step(parameter: torch.Tensor) -> None:
        own.step()

    model[-1].bias.register_post_accumulate_grad_hook(step)


def frozen_layer(accel: Accelerator, model: Any, optimizer: Any) -> None:
    model.append(torch.nn.Linear(1, 1).requires_grad_(False))


def unfrozen(accel: Accelerator, model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)


def unused_layer(accel: Accelerator, model: Any, optimizer: Any) -> None:
    model[0].probe = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("loop", [grown, clear_before])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("grow", [new_layer, adapter])
def test_parameters_added_after_prepare_are_told(loop, grow, epoch):
    assert_told_once(partial(loop, grow=grow, epoch=epoch), "came after prepare() and is in no")


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    "grow",
    [new_layer_with_group, new_layer_with_optimizer, frozen_layer, unfrozen, unused_layer],
)
def test_additions_that_are_trained_or_not_meant_to_be_are_silent(grow, epoch):
    assert_silent(partial(clear_before, grow=grow, epoch=epoch))
    assert_silent(partial(grown, grow=grow, epoch=epoch))


def test_a_lazy_layer_is_no_addition():
    def loop(accel: Accelerator) -> None:
        model = torch.nn.Sequential(torch.nn.LazyLinear(1), torch.nn.Linear(1, 1))
        model(X)
        model, optimizer = accel.prepare(model, sgd(model))
        accumulated_steps(accel, model, optimizer)

    assert_silent(loop)


def grown_on_ranks(accel: Accelerator) -> None:
    grown(accel, new_layer_with_group)


@pytest.mark.distributed
def test_added_parameters_that_ranks_do_not_average_are_told(pool):
    (message,), second = pool.run(on_rank, "grown_on_ranks", {})
    assert "the processes do not average its gradients" in message
    assert second == [message]


# --- 6. parameters of an iterator that is used up ---------------------------------------------


def clipped_parameters(accel: Accelerator, of: Callable[[Any], Any], *, once: bool) -> None:
    model, optimizer = prepared(accel)
    parameters = of(model)
    for _ in range(3):
        accel.backward(model(X).sum())
        accel.clip_grad_norm_(parameters if once else of(model), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def generator_of(model: torch.nn.Module) -> Any:
    return model.parameters()


def filter_of(model: torch.nn.Module) -> Any:
    return filter(lambda parameter: parameter.requires_grad, model.parameters())


def list_of(model: torch.nn.Module) -> Any:
    return list(model.parameters())


def frozen_of(model: torch.nn.Module) -> Any:
    return filter(lambda parameter: not parameter.requires_grad, model.parameters())


@pytest.mark.parametrize("of", [generator_of, filter_of])
def test_an_iterator_that_is_used_up_is_told(of):
    loop = partial(clipped_parameters, of=of, once=True)
    assert_told_once(loop, "come from an iterator that was used before")


@pytest.mark.parametrize("of", [generator_of, filter_of, list_of, frozen_of])
def test_parameters_that_are_given_anew_are_silent(of):
    assert_silent(partial(clipped_parameters, of=of, once=False))
    assert_silent(partial(clipped_parameters, of=list_of, once=True))


def test_clipping_is_the_strategys_after_the_first_steps():
    accel = Accelerator(cpu=True)
    clipped_parameters(accel, list_of, once=True)
    assert accel.first_steps.clipping is accel.strategy.gradients


# --- 7. gradients that are never cleared ------------------------------------------------------


def trained_steps(accel: Accelerator, clear: Callable[[Any, Any], None], *, first: bool) -> None:
    model, optimizer = prepared(accel)
    for _ in range(6):
        if first:
            clear(model, optimizer)
        accel.backward(model(X).square().sum())
        accel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not first:
            clear(model, optimizer)


def never_cleared(accel: Accelerator) -> None:
    trained_steps(accel, lambda model, optimizer: None, first=True)


def never_cleared_in_windows(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    for _ in range(8):
        with accel.accumulate(model):
            accel.backward(model(X).sum())
            optimizer.step()


@pytest.mark.parametrize("loop", [never_cleared, never_cleared_in_windows])
def test_gradients_that_are_never_cleared_are_told(loop):
    assert_told_once(loop, "SGD took 3 steps, and nothing cleared", gradient_accumulation_steps=1)


def test_gradients_that_are_never_cleared_after_windows_are_told():
    assert_told_once(
        never_cleared_in_windows, "optimizer.zero_grad()", gradient_accumulation_steps=2
    )


def by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zeroed_by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARS = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    by_hand,
    zeroed_by_hand,
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_that_are_cleared_anyhow_are_silent(clear, first):
    assert_silent(lambda accel: trained_steps(accel, clear, first=first))


def adversarial(accel: Accelerator) -> None:
    maker, step_maker = prepared(accel)
    critic, step_critic = prepared(accel)
    for _ in range(6):
        step_critic.zero_grad()
        made = maker(X)
        accel.backward(critic(made.detach()).sum() - critic(X).sum())
        step_critic.step()
        step_maker.zero_grad()
        accel.backward(critic(made).sum())
        step_maker.step()


def second_order(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    for _ in range(6):
        loss = model(X).square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        optimizer.zero_grad()
        accel.backward(loss + sum(gradient.square().sum() for gradient in gradients))
        optimizer.step()


def decayed(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    for _ in range(6):
        accel.backward(model(X).square().sum())
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.9)


def with_closure(accel: Accelerator) -> None:
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(X) - 3).square().sum()
        accel.backward(loss)
        return loss

    for _ in range(6):
        optimizer.step(compute)


def same_gradients_twice(accel: Accelerator) -> None:
    model, optimizer = prepared(accel)
    for _ in range(3):
        accel.backward(model(X).sum())
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop", [adversarial, second_order, decayed, with_closure, same_gradients_twice]
)
def test_loops_that_clear_at_other_places_are_silent(loop):
    assert_silent(loop)


def cleared_in_place(accel: Accelerator) -> None:
    trained_steps(accel, zeroed_by_hand, first=True)


def cleared(accel: Accelerator) -> None:
    trained_steps(accel, lambda model, optimizer: optimizer.zero_grad(), first=False)


def sharded_on_rank(name: str) -> list[str]:
    return on_rank(name, {"fsdp_plugin": FullyShardedDataParallelPlugin()})


@pytest.mark.distributed
@pytest.mark.parametrize("run", [on_rank, sharded_on_rank])
def test_gradients_of_ranks_that_are_never_cleared_are_told(pool, run):
    options = [{}] if run is on_rank else []
    (message,), second = pool.run(run, "never_cleared", *options)
    assert "SGD took 3 steps" in message
    assert second == [message]


@pytest.mark.distributed
@pytest.mark.parametrize("run", [on_rank, sharded_on_rank])
@pytest.mark.parametrize("name", ["cleared", "cleared_in_place"])
def test_gradients_of_ranks_that_are_cleared_are_silent(pool, run, name):
    options = [{}] if run is on_rank else []
    assert pool.run(run, name, *options) == [[], []]
