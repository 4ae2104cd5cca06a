"""One big batch, split any way over processes, micro-batches and the tail: the same weights."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, GradientAccumulationPlugin
from tests.support.bound import BOUND
from tests.support.rounding import reordered

pytestmark = pytest.mark.distributed

SAMPLES = 24


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def flat(*models: torch.nn.Module) -> list[float]:
    """All weights, as numbers: tensors do not travel out of a pool."""
    return [
        number for model in models for p in model.parameters() for number in p.flatten().tolist()
    ]


def one_big_batch(steps: int) -> list[float]:
    """Plain torch: each step with all samples."""
    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def own_part(sizes: list[list[int]], rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This process's micro-batches; ``sizes[micro-batch][process]`` cuts the samples up."""
    ends = torch.tensor(sizes).flatten().cumsum(0).tolist()
    pieces = list(zip(*(part.tensor_split(ends[:-1]) for part in data()), strict=True))
    return [pieces[number * len(sizes[0]) + rank] for number in range(len(sizes))]


def split_by_hand(sizes: list[list[int]], steps: int) -> list[float]:
    accel = accelerator(gradient_accumulation_steps=len(sizes))
    model = network()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for _ in range(steps):
        for inputs, targets in own_part(sizes, accel.process_index):
            with accel.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum")
                accel.backward(loss, normalizer=len(inputs))
                optimizer.step()
                optimizer.zero_grad()
    return flat(accel.unwrap_model(model))


SPLITS_FOR_TWO = [
    [[12, 12]],
    [[1, 23]],
    [[6, 6], [6, 6]],
    [[3, 9], [5, 7]],
    [[10, 1], [1, 10], [1, 1]],
    [[4, 4], [4, 4], [5, 3]],
    [[0, 12], [12, 0]],
]


@pytest.mark.parametrize("sizes", SPLITS_FOR_TWO)
def test_token_exact_averaging_over_the_window_and_two_processes(pool, sizes):
    for weights in pool.run(split_by_hand, sizes, 3):
        assert weights == reordered(one_big_batch(3))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[[6, 6, 6, 6]], [[1, 2, 3, 4], [5, 6, 2, 1]]])
def test_token_exact_averaging_over_four_processes(pool_of_4, sizes):
    for weights in pool_of_4.run(split_by_hand, sizes, 3):
        assert weights == reordered(one_big_batch(3))


def split_by_the_loader(batch_size: int, num_steps: int, epochs: int) -> list[float]:
    """The tail of the epoch is a shorter window of a shorter batch; the loss is a mean."""
    accel = accelerator(gradient_accumulation_steps=num_steps)
    model = network()
    loader = DataLoader(torch.utils.data.TensorDataset(*data()), batch_size)
    model, optimizer, loader = accel.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), loader
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            with accel.accumulate(model):
                accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return flat(accel.unwrap_model(model))


def windows_in_plain_torch(per_step: list[int], epochs: int) -> list[float]:
    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for x, y in zip(inputs.split(per_step), targets.split(per_step), strict=True):
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize(
    ("batch_size", "num_steps", "per_step"),
    [(12, 1, [24]), (6, 2, [24]), (1, 12, [24]), (2, 4, [16, 8]), (1, 5, [10, 10, 4])],
)
def test_the_tail_window_is_averaged_by_its_real_size(pool, batch_size, num_steps, per_step):
    expected = windows_in_plain_torch(per_step, 2)
    for weights in pool.run(split_by_the_loader, batch_size, num_steps, 2):
        assert weights == reordered(expected)


# --- when processes meet --------------------------------------------------------------------


def line(accel: Accelerator) -> tuple:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), 1.0))


def value_of(accel: Accelerator) -> torch.Tensor:
    """1 on the first process, 2 on the second, ..."""
    return torch.full((1, 1), accel.process_index + 1.0)


def gradients_in_a_window(sync_each_batch: bool) -> list[float]:
    plugin = GradientAccumulationPlugin(2, sync_each_batch=sync_each_batch)
    accel = accelerator(gradient_accumulation_plugin=plugin)
    model, _ = line(accel)
    seen = []
    for _ in range(2):
        with accel.accumulate(model):
            accel.backward(model(value_of(accel)).sum())
        seen.append(accel.unwrap_model(model).weight.grad.item())
    return seen


def test_sync_each_batch_averages_after_every_micro_batch(pool):
    assert pool.run(gradients_in_a_window, False) == [[0.5, 1.5], [1.0, 1.5]]
    assert pool.run(gradients_in_a_window, True) == [[0.75, 1.5]] * 2


def gradients_with_contexts_that_are_kept() -> list[float]:
    """The program keeps a name for each context, so that only their ends can end `no_sync`."""
    accel = accelerator(gradient_accumulation_steps=2)
    model, _ = line(accel)
    kept, seen = [], []
    for _ in range(2):
        with accel.accumulate(model) as context:
            kept.append(context)
            accel.backward(model(value_of(accel)).sum())
        seen.append(accel.unwrap_model(model).weight.grad.item())
    assert kept[0] is not kept[1] is not None
    return seen


def test_the_last_micro_batch_synchronizes_although_the_contexts_are_kept(pool):
    assert pool.run(gradients_with_contexts_that_are_kept) == [[0.5, 1.5], [1.0, 1.5]]


def one_backward_for_three_forwards(trigger: bool) -> tuple[float, float]:
    accel = accelerator()
    model, _ = line(accel)
    with accel.no_sync(model):
        loss = sum(model(value_of(accel)).sum() for _ in range(3))
    if trigger:
        with accel.trigger_sync_in_backward(model):
            accel.backward(loss)
    else:
        accel.backward(loss)
    first = accel.unwrap_model(model).weight.grad.item()
    accel.backward(model(value_of(accel)).sum())  # and an ordinary one after it
    return first, accel.unwrap_model(model).weight.grad.item()


def test_trigger_sync_in_backward_synchronizes_forwards_of_no_sync(pool):
    assert pool.run(one_backward_for_three_forwards, True) == [(4.5, 6.0)] * 2
    assert [first for first, _ in pool.run(one_backward_for_three_forwards, False)] == [3.0, 6.0]


def schedule(**options) -> float:
    accel = accelerator(**options)
    model, optimizer = line(accel)
    scheduler = accel.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    accel.backward(model(value_of(accel)).sum())
    optimizer.step()
    scheduler.step()
    return scheduler.get_last_lr()[0]


def test_the_scheduler_is_not_stepped_world_size_times(pool):
    assert pool.run(schedule) == [0.5, 0.5]


def scheduled_for_accelerate() -> float:
    return schedule(scheduler_steps_per_process=True)


def test_a_schedule_written_for_accelerate_can_step_once_a_process(pool):
    assert pool.run(scheduled_for_accelerate) == [0.25, 0.25]


# --- several models -------------------------------------------------------------------------


def adversaries(rank: int, world: int, accel: Accelerator | None) -> list[float]:
    """A tiny GAN whose two sides take turns in each batch; in plain torch without ``accel``."""
    torch.manual_seed(5)
    critic, maker = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
    critic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    maker_optimizer = torch.optim.Adam(maker.parameters(), 0.1)
    bare = (critic, maker)
    if accel is not None:
        critic, maker, critic_optimizer, maker_optimizer = accel.prepare(
            critic, maker, critic_optimizer, maker_optimizer
        )
    backward = torch.Tensor.backward if accel is None else accel.backward
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        noise = torch.randn(8, 2, generator=generator).chunk(world)[rank]
        real = torch.randn(8, 3, generator=generator).chunk(world)[rank]
        fake = maker(noise)
        backward((critic(fake.detach()) - critic(real)).mean() + critic(real).square().mean())
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        backward(-critic(maker(noise)).mean())
        maker_optimizer.step()
        maker_optimizer.zero_grad()
        critic_optimizer.zero_grad()
    return flat(*bare)


def prepared_adversaries() -> list[float]:
    accel = accelerator()
    return adversaries(accel.process_index, accel.num_processes, accel)


def test_two_models_and_two_optimizers_that_take_turns(pool):
    for weights in pool.run(prepared_adversaries):
        assert weights == reordered(adversaries(0, 1, None))


def accumulated_side_by_side(num_steps: int) -> list[float]:
    """Two models under one loss, each with its own optimizer, in one window."""
    accel = accelerator(gradient_accumulation_steps=num_steps)
    torch.manual_seed(2)
    pair = [torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in pair]
    first, second, *optimizers = accel.prepare(*pair, *optimizers)
    loader = accel.prepare(DataLoader(torch.utils.data.TensorDataset(*data()), 12 // num_steps))
    for _ in range(2):
        for inputs, targets in loader:
            with accel.accumulate(first, second):
                loss = torch.nn.functional.mse_loss(second(first(inputs)), targets)
                accel.backward(loss)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return flat(*pair)


def test_two_models_in_one_window(pool):
    whole = pool.run(accumulated_side_by_side, 1)
    parts = pool.run(accumulated_side_by_side, 3)
    assert whole[0] == whole[1]
    assert parts[0] == reordered(whole[0])


def adversaries_in_blocks(how: str) -> tuple[list[float], int]:
    """A generator and a critic with a window each step of two micro-batches."""
    accel = accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(2)
    pair = [torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in pair]
    maker, critic, *optimizers = accel.prepare(*pair, *optimizers)
    loader = accel.prepare(DataLoader(torch.utils.data.TensorDataset(data()[0]), 6))
    blocks = {
        "one": [(maker, critic)],
        "nested": [(maker,), (critic,)],
        "the same": [(maker, critic), (critic,), (critic,)],
        "all inside": [(maker,), ()],
    }[how]
    steps = 0
    for (inputs,) in loader:
        with ExitStack() as stack:
            stack.enter_context(accel.accumulate(*blocks[0]))
            accel.backward(critic(maker(inputs)).mean())
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            for models in blocks[1:]:
                stack.enter_context(accel.accumulate(*models))
            accel.backward(critic(maker(inputs).detach()).square().mean())
            optimizers[1].step()
            optimizers[1].zero_grad()
            steps += accel.sync_gradients
    return flat(*pair), steps


@pytest.mark.parametrize("how", ["nested", "the same", "all inside"])
def test_a_block_inside_of_a_block_is_of_the_same_micro_batch(pool, how):
    expected = pool.run(adversaries_in_blocks, "one")
    assert expected[0] == expected[1]
    assert expected[0][1] == 1
    assert pool.run(adversaries_in_blocks, how) == expected
