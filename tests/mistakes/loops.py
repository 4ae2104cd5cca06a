"""Correct training loops of all kinds, as people write them: none is to be warned of.

Each takes an Accelerator and trains; it returns the number of optimizer steps that it took.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from accel_callbacks import Accelerator

LOOPS: dict[str, Callable[[Accelerator], int]] = {}
WINDOWED: set[str] = set()  # loops that use `accumulate`, and so run under any window


def loop(function: Callable[[Accelerator], int]) -> Callable[[Accelerator], int]:
    LOOPS[function.__name__] = function
    return function


def windowed(function: Callable[[Accelerator], int]) -> Callable[[Accelerator], int]:
    WINDOWED.add(function.__name__)
    return loop(function)


def epochs(accel: Accelerator, number: int) -> Iterator[int]:
    """Yield epochs, inside of a run where the Accelerator has a project folder."""
    if not accel.project_dir:
        yield from range(number)
        return
    with accel.run("correct") as run:
        yield from run.epochs(number)


class Rows(Dataset):
    def __init__(self, count: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = (self.inputs.sum(1, keepdim=True) > 0).float()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset):
    """Rows one after the other, without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = Rows()
        return ((rows.inputs[index], rows.targets[index]) for index in range(len(rows)))


def network(width: int = 8, inputs: int = 4, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def adam(*modules: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=lr)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.binary_cross_entropy_with_logits(model(inputs).float(), targets)


def step(accel: Accelerator, model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    accel.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def taken(accel: Accelerator, batches: int, number: int = 1) -> int:
    """Return the steps of passes over so many batches each, with windows that end with a pass."""
    return number * -(-batches // accel.gradient_accumulation_steps)


# --- one model, one loader ----------------------------------------------------------------------


@loop
def plain(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@windowed
def accumulated(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for batch in data:
            with accel.accumulate(model):
                step(accel, model, optimizer, batch)
    return taken(accel, 4, 2)


@windowed
def the_tail_of_an_epoch_is_a_shorter_window(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(20), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            with accel.accumulate(model):
                step(accel, model, optimizer, batch)
    return taken(accel, 5, 2)


@windowed
def clipped_and_scheduled(accel: Accelerator) -> int:
    model = network()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    model, optimizer, data, scheduler = accel.prepare(
        model, optimizer, DataLoader(Rows(), 4), scheduler
    )
    for _ in epochs(accel, 2):
        for batch in data:
            with accel.accumulate(model):
                loss = loss_of(model, batch)
                accel.backward(loss)
                if accel.sync_gradients:
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return taken(accel, 4, 2)


@loop
def a_scheduler_of_epochs(accel: Accelerator) -> int:
    model = network()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, data, scheduler = accel.prepare(
        model, optimizer, DataLoader(Rows(), 4), scheduler
    )
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
        scheduler.step()
    return 8


@loop
def a_scheduler_on_a_plateau(accel: Accelerator) -> int:
    model = network()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, data, val, scheduler = accel.prepare(
        model, optimizer, DataLoader(Rows(), 4), DataLoader(Rows(), 8), scheduler
    )
    for _ in epochs(accel, 3):
        for batch in data:
            step(accel, model, optimizer, batch)
        with accel.evaluate(model):
            losses = [accel.gather_for_metrics(loss_of(model, batch)) for batch in val]
        scheduler.step(torch.stack(losses).mean().item())
    return 12


@loop
def zero_grad_first(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            optimizer.zero_grad()
            accel.backward(loss_of(model, batch))
            optimizer.step()
    return 8


@loop
def gradients_dropped_by_the_model(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            accel.backward(loss_of(model, batch))
            optimizer.step()
            model.zero_grad(set_to_none=True)
    return 8


@loop
def gradients_dropped_by_hand(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            accel.backward(loss_of(model, batch))
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
    return 8


@loop
def every_nth_batch_counted_by_hand(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for number, batch in enumerate(data, 1):
            accel.backward(loss_of(model, batch) / 2)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return 4


@loop
def validated_by_hand(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data, val = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(10), 4)
    )
    for _ in epochs(accel, 3):
        model.train()
        for batch in data:
            step(accel, model, optimizer, batch)
        model.eval()
        hits, count = 0, 0
        with torch.no_grad():
            for inputs, targets in val:
                logits, targets = accel.gather_for_metrics((model(inputs), targets))
                hits += ((logits > 0) == targets.bool()).sum().item()
                count += len(targets)
        assert count == 10
    return 12


@loop
def validated_in_the_middle_of_an_epoch(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data, val = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(), 8)
    )
    for _ in epochs(accel, 2):
        for number, batch in enumerate(data):
            step(accel, model, optimizer, batch)
            if number == 1:
                with accel.evaluate(model):
                    for inputs, _ in val:
                        accel.gather_for_metrics(model(inputs))
    return 8


@loop
def batch_norm_frozen_by_eval(accel: Accelerator) -> int:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def always_in_eval_mode(accel: Accelerator) -> int:
    model = network().eval()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_frozen_backbone(accel: Accelerator) -> int:
    model = network()
    model[0].requires_grad_(False)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, head, data = accel.prepare(model, head, DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, head, batch)
    return 8


@loop
def unfrozen_at_the_second_epoch(accel: Accelerator) -> int:
    model = network()
    model[0].requires_grad_(False)
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for epoch in epochs(accel, 2):
        if epoch == 1:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def tied_weights(accel: Accelerator) -> int:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            accel.backward((model(inputs).mean(1, keepdim=True) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def groups_of_parameters(accel: Accelerator) -> int:
    model = network()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    model, optimizer, data = accel.prepare(model, optimizer, DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_group_added_while_training(accel: Accelerator) -> int:
    model = network()
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(model, head, DataLoader(Rows(), 4))
    for epoch in epochs(accel, 2):
        if epoch == 1:
            first = next(iter(accel.unwrap_model(model).children()))
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def lbfgs_with_a_closure(accel: Accelerator) -> int:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    model, optimizer, data = accel.prepare(model, optimizer, DataLoader(Rows(), 16))
    for _ in epochs(accel, 3):
        for batch in data:

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                accel.backward(loss)
                return loss

            optimizer.step(closure)
    return 3


@loop
def its_own_autocast(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def autocast_of_the_accelerator(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            with accel.autocast():
                loss = loss_of(model, batch)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def a_loss_that_is_a_module(accel: Accelerator) -> int:
    model, criterion = network(), nn.BCEWithLogitsLoss()
    model, criterion, optimizer, data = accel.prepare(
        model, criterion, adam(model), DataLoader(Rows(), 4)
    )
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            accel.backward(criterion(model(inputs).float(), targets))
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def two_losses_backward_one_after_the_other(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            accel.backward(loss_of(model, (inputs, targets)), retain_graph=True)
            accel.backward(model(inputs * 0.5).float().square().mean() * 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def a_gradient_penalty(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            inputs = inputs.requires_grad_()
            loss = loss_of(model, (inputs, targets))
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            accel.backward(loss + slope.square().sum())
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def noise_added_to_gradients(accel: Accelerator) -> int:
    model = network()
    torch.manual_seed(0)  # after the gradients are averaged, all ranks have to add the same
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            accel.backward(loss_of(model, batch))
            for parameter in model.parameters():
                parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def recomputed_activations(accel: Accelerator) -> int:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = network(8, 4, 4), nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, inputs, use_reentrant=False))

    model = Recomputed()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_compiled_model(accel: Accelerator) -> int:
    model = network()
    optimizer = adam(model)
    model = torch.compile(model, backend="eager")
    model, optimizer, data = accel.prepare(model, optimizer, DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_recurrent_network_cut_in_time(accel: Accelerator) -> int:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(1, 8), nn.Linear(8, 1)

        def forward(self, inputs: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
            for moment in inputs.unbind(1):
                state = self.cell(moment[:, None], state)
            return self.head(state), state

    model = Recurrent()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    steps = 0
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            state = None
            for piece in inputs.split(2, 1):
                logits, state = model(piece, state)
                state = state.detach()
                accel.backward(F.binary_cross_entropy_with_logits(logits.float(), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


# --- several models and optimizers --------------------------------------------------------------


@loop
def a_gan(accel: Accelerator) -> int:
    generator, critic = network(8, 2, 4), network()
    generator, critic, of_generator, of_critic, data = accel.prepare(
        generator, critic, adam(generator), adam(critic), DataLoader(Rows(), 4)
    )
    for _ in epochs(accel, 2):
        for real, _ in data:
            fake = generator(torch.randn(len(real), 2))
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            of_critic.zero_grad()
            accel.backward(loss)
            of_critic.step()
            of_generator.zero_grad()
            accel.backward(F.softplus(-critic(fake)).mean())
            of_generator.step()
    return 8


@loop
def a_gan_whose_critic_trains_more(accel: Accelerator) -> int:
    generator, critic = network(8, 2, 4), network()
    generator, critic, of_generator, of_critic, data = accel.prepare(
        generator, critic, adam(generator), adam(critic), DataLoader(Rows(), 4)
    )
    for _ in epochs(accel, 2):
        for number, (real, _) in enumerate(data):
            fake = generator(torch.randn(len(real), 2))
            of_critic.zero_grad()
            accel.backward(critic(fake.detach()).mean() - critic(real).mean())
            of_critic.step()
            if number % 2 == 1:
                for parameter in critic.parameters():
                    parameter.requires_grad_(False)
                of_generator.zero_grad()
                accel.backward(-critic(fake).mean())
                of_generator.step()
                for parameter in critic.parameters():
                    parameter.requires_grad_(True)
    return 8


@loop
def one_optimizer_for_two_models(accel: Accelerator) -> int:
    encoder, decoder = network(8, 4, 2), network(8, 2, 4)
    optimizer = adam(encoder, decoder)
    encoder, decoder, optimizer, data = accel.prepare(
        encoder, decoder, optimizer, DataLoader(Rows(), 4)
    )
    for _ in epochs(accel, 2):
        for inputs, _ in data:
            accel.backward(F.mse_loss(decoder(encoder(inputs)).float(), inputs))
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def two_optimizers_of_one_model(accel: Accelerator) -> int:
    model = network()
    body, head = torch.optim.SGD(model[0].parameters(), 0.01), adam(model[2])
    model, body, head, data = accel.prepare(model, body, head, DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            accel.backward(loss_of(model, batch))
            for optimizer in (body, head):
                optimizer.step()
                optimizer.zero_grad()
    return 8


@loop
def distilled_from_a_teacher(accel: Accelerator) -> int:
    teacher, student = network(16).eval().requires_grad_(False), network()
    student, optimizer, data = accel.prepare(student, adam(student), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for inputs, _ in data:
            with torch.no_grad():
                wanted = teacher(inputs)
            accel.backward(F.mse_loss(student(inputs).float(), wanted))
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def a_teacher_that_is_an_average(accel: Accelerator) -> int:
    student = network()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, optimizer, data = accel.prepare(student, adam(student), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            loss = loss_of(student, (inputs, targets))
            loss = loss + F.mse_loss(student(inputs).float(), teacher(inputs))
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                own = accel.unwrap_model(student).parameters()
                for average, parameter in zip(teacher.parameters(), own, strict=True):
                    average.lerp_(parameter, 0.1)
    return 8


@loop
def weights_averaged_by_torch(accel: Accelerator) -> int:
    from torch.optim.swa_utils import SWALR, AveragedModel

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    scheduler = SWALR(optimizer, swa_lr=0.05)
    model, optimizer, data, scheduler = accel.prepare(
        model, optimizer, DataLoader(Rows(), 4), scheduler
    )
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
        average.update_parameters(accel.unwrap_model(model))
        scheduler.step()
    return 8


@loop
def sharpness_aware(accel: Accelerator) -> int:
    """SAM by hand: a step up, the gradient there, back, and the step with it."""
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            accel.backward(loss_of(model, batch))
            climbed = []
            with torch.no_grad():
                for parameter in model.parameters():
                    rise = 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
                    parameter.add_(rise)
                    climbed.append(rise)
            optimizer.zero_grad()
            accel.backward(loss_of(model, batch))
            with torch.no_grad():
                for parameter, rise in zip(model.parameters(), climbed, strict=True):
                    parameter.sub_(rise)
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def model_agnostic_meta_learning(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 8))
    for _ in epochs(accel, 2):
        for inputs, targets in data:
            weights = dict(model.named_parameters())
            logits = torch.func.functional_call(model, weights, (inputs[:4],))
            loss = F.binary_cross_entropy_with_logits(logits.float(), targets[:4])
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            adapted = {
                name: weight - 0.1 * slope
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
            logits = torch.func.functional_call(model, adapted, (inputs[4:],))
            accel.backward(F.binary_cross_entropy_with_logits(logits.float(), targets[4:]))
            optimizer.step()
            optimizer.zero_grad()
    return 4


@loop
def deep_q_learning(accel: Accelerator) -> int:
    """No loader at all: batches are drawn from what was played."""
    model = network(8, 4, 2)
    target = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = accel.prepare(model, adam(model))
    played: deque[tuple[torch.Tensor, int, float, torch.Tensor]] = deque(maxlen=64)
    draw, state = random.Random(0), torch.randn(4)
    for moment in range(24):
        with torch.no_grad():
            action = int(model(state[None]).argmax()) if draw.random() > 0.2 else draw.randrange(2)
        after = torch.randn(4)
        played.append((state, action, float(action), after))
        state = after
        if len(played) >= 8:
            states, actions, rewards, nexts = zip(*draw.sample(list(played), 8), strict=True)
            with torch.no_grad():
                wanted = torch.tensor(rewards) + 0.9 * target(torch.stack(nexts)).amax(1)
            values = model(torch.stack(states)).float()
            values = values.gather(1, torch.tensor(actions)[:, None])[:, 0]
            accel.backward(F.smooth_l1_loss(values, wanted))
            optimizer.step()
            optimizer.zero_grad()
        if moment % 8 == 0:
            target.load_state_dict(accel.unwrap_model(model).state_dict())
    return 17


@loop
def policy_gradients(accel: Accelerator) -> int:
    policy, value = network(8, 4, 2), network(8, 4, 1)
    policy, value, optimizer = accel.prepare(policy, value, adam(policy, value))
    for _ in range(4):
        states, rewards = torch.randn(8, 4), torch.rand(8)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=policy(states)).sample()
        for _ in range(2):  # several passes over what was played, as PPO does
            chances = torch.distributions.Categorical(logits=policy(states).float())
            worth = value(states).float()[:, 0]
            loss = -(chances.log_prob(actions) * (rewards - worth.detach())).mean()
            accel.backward(loss + F.mse_loss(worth, rewards))
            accel.clip_grad_norm_(itertools.chain(policy.parameters(), value.parameters()), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return 8


# --- data of all kinds --------------------------------------------------------------------------


@loop
def a_stream(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Stream(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_stream_with_workers(accel: Accelerator) -> int:
    model = network()
    loader = DataLoader(Rows(), 4, num_workers=1, shuffle=True)
    model, optimizer, data = accel.prepare(model, adam(model), loader)
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def two_loaders_zipped(accel: Accelerator) -> int:
    model = network()
    model, optimizer, first, second = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(), 2, shuffle=True)
    )
    for _ in epochs(accel, 2):
        for labelled, more in zip(first, second, strict=False):
            accel.backward(loss_of(model, labelled) + loss_of(model, more))
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def a_small_loader_cycled(accel: Accelerator) -> int:
    model = network()
    model, optimizer, large, small = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(8), 4)
    )
    for _ in epochs(accel, 2):
        again = itertools.cycle(small)
        for batch in large:
            accel.backward(loss_of(model, batch) + loss_of(model, next(again)))
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def so_many_steps_of_an_endless_pass(accel: Accelerator) -> int:
    def endless(data: Any) -> Iterator[Any]:
        while True:
            yield from data

    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for batch in itertools.islice(endless(data), 10):
        step(accel, model, optimizer, batch)
    return 10


@loop
def only_the_first_batches_of_each_epoch(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for batch in itertools.islice(data, 3):
            step(accel, model, optimizer, batch)
    return 6


@loop
def next_of_an_iterator(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    batches = iter(data)
    for _ in range(6):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(data)
            batch = next(batches)
        step(accel, model, optimizer, batch)
    return 6


@loop
def a_break_in_each_epoch(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for number, batch in enumerate(data):
            if number == 2:
                break
            step(accel, model, optimizer, batch)
    return 4


@loop
def batches_that_are_skipped_by_the_loop(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for number, batch in enumerate(data):
            if number % 2 == 0:
                continue
            step(accel, model, optimizer, batch)
    return 4


@loop
def a_loader_whose_first_batches_are_skipped_once(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    for epoch in epochs(accel, 2):
        rest = accel.skip_first_batches(data, 1) if epoch == 0 else data
        for batch in rest:
            step(accel, model, optimizer, batch)
    return 7


@loop
def batches_of_like_length(accel: Accelerator) -> int:
    class Buckets(Sampler):
        """Batches of indices, those of one length together."""

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9, 11]])

        def __len__(self) -> int:
            return 4

    model = network()
    loader = DataLoader(Rows(), batch_sampler=Buckets())
    model, optimizer, data = accel.prepare(model, adam(model), loader)
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_curriculum_with_a_loader_each_epoch(accel: Accelerator) -> int:
    model = network()
    model, optimizer = accel.prepare(model, adam(model))
    steps = 0
    for size in (8, 16):
        data = accel.prepare(DataLoader(Subset(Rows(), range(size)), 4, shuffle=True))
        for batch in data:
            step(accel, model, optimizer, batch)
            steps += 1
    return steps


@loop
def weighted_samples(accel: Accelerator) -> int:
    model = network()
    sampler = WeightedRandomSampler([1.0] * 8 + [3.0] * 8, 16)
    loader = DataLoader(Rows(), 4, sampler=sampler)
    model, optimizer, data = accel.prepare(model, adam(model), loader)
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def parts_of_datasets_joined(accel: Accelerator) -> int:
    first, second = random_split(Rows(), [8, 8], torch.Generator().manual_seed(0))
    loader = DataLoader(ConcatDataset([first, second]), 4, shuffle=True, drop_last=True)
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), loader)
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def a_batch_sampler_of_torch(accel: Accelerator) -> int:
    sampler = BatchSampler(torch.utils.data.RandomSampler(Rows()), 4, drop_last=True)
    model = network()
    model, optimizer, data = accel.prepare(
        model, adam(model), DataLoader(Rows(), batch_sampler=sampler)
    )
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def ragged_text_padded_by_collate(accel: Accelerator) -> int:
    texts = [torch.arange(1 + index % 4) for index in range(16)]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"tokens": padded, "mask": padded > 0}

    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))
    loader = DataLoader(texts, 4, shuffle=True, collate_fn=collate)
    model, optimizer, data = accel.prepare(model, adam(model), loader)
    for _ in epochs(accel, 2):
        for batch in data:
            logits = model(batch["tokens"]).float()
            losses = F.cross_entropy(
                logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none"
            )
            accel.backward((losses * batch["mask"].flatten()).mean())
            optimizer.step()
            optimizer.zero_grad()
    return 8


@loop
def noise_drawn_by_the_dataset(accel: Accelerator) -> int:
    class Noisy(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = super().__getitem__(index)
            return inputs + 0.1 * torch.randn(4), targets

    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Noisy(), 4, shuffle=True))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    return 8


@loop
def moved_to_the_device_by_hand(accel: Accelerator) -> int:
    model = network().to(accel.device)
    model, optimizer = accel.prepare(model, adam(model))
    loader = DataLoader(TensorDataset(Rows().inputs, Rows().targets), 4)
    if accel.num_processes > 1:
        loader = accel.prepare(loader)
    for _ in range(2):
        for batch in loader:
            step(accel, model, optimizer, [tensor.to(accel.device) for tensor in batch])
    return 8


# --- around the loop ----------------------------------------------------------------------------


@loop
def saved_and_loaded_in_between(accel: Accelerator) -> int:
    import tempfile

    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4, shuffle=True))
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            for batch in data:
                step(accel, model, optimizer, batch)
            if accel.num_processes == 1 and epoch == 1:
                accel.save_state(f"{folder}/state")
                accel.load_state(f"{folder}/state")
    return 12


@loop
def weights_only_saved_at_the_end(accel: Accelerator) -> int:
    import tempfile

    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    if accel.num_processes == 1:
        with tempfile.TemporaryDirectory() as folder:
            accel.save_model(model, folder)
            torch.save(accel.unwrap_model(model).state_dict(), f"{folder}/weights.pt")
    return 8


@loop
def losses_logged_and_reduced(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    for _ in epochs(accel, 2):
        for batch in data:
            loss = step(accel, model, optimizer, batch)
            accel.log({"train/loss": accel.reduce(loss, "mean")})
    return 8


@loop
def a_best_model_kept_by_hand(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data, val = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(), 8)
    )
    best, weights = float("inf"), None
    for _ in epochs(accel, 3):
        for batch in data:
            step(accel, model, optimizer, batch)
        with accel.evaluate(model):
            losses = torch.stack([accel.reduce(loss_of(model, batch), "mean") for batch in val])
        if losses.mean().item() < best:
            best, weights = losses.mean().item(), copy.deepcopy(accel.get_state_dict(model))
    accel.unwrap_model(model).load_state_dict(weights)
    return 12


@loop
def inference_after_training(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data, test = accel.prepare(
        model, adam(model), DataLoader(Rows(), 4), DataLoader(Rows(10), 4)
    )
    for _ in epochs(accel, 2):
        for batch in data:
            step(accel, model, optimizer, batch)
    model.eval()
    with torch.inference_mode():
        logits = torch.cat([accel.gather_for_metrics(model(inputs)) for inputs, _ in test])
    assert len(logits) == 10
    return 8


@loop
def only_inference(accel: Accelerator) -> int:
    model, data = accel.prepare(network().eval(), DataLoader(Rows(10), 4))
    with torch.no_grad():
        logits = torch.cat([accel.gather_for_metrics(model(inputs)) for inputs, _ in data])
    assert len(logits) == 10
    return 0


@loop
def a_step_left_out_for_a_bad_loss(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    steps = 0
    for _ in epochs(accel, 2):
        for number, batch in enumerate(data):
            loss = loss_of(model, batch)
            accel.backward(loss)
            if number != 2:
                optimizer.step()
                steps += 1
            optimizer.zero_grad()
    return steps


@loop
def a_learning_rate_warmed_up_by_hand(accel: Accelerator) -> int:
    model = network()
    model, optimizer, data = accel.prepare(model, adam(model), DataLoader(Rows(), 4))
    number = 0
    for _ in epochs(accel, 2):
        for batch in data:
            number += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, number / 4)
            step(accel, model, optimizer, batch)
    return 8


@loop
def an_optimizer_that_steps_within_backward(accel: Accelerator) -> int:
    """One for each parameter, by a hook, as it is done to save the memory of gradients."""
    model, data = accel.prepare(network(), DataLoader(Rows(), 4))
    optimizers = {}
    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)

        def at_once(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        parameter.register_post_accumulate_grad_hook(at_once)
    for _ in range(2):
        for batch in data:
            accel.backward(loss_of(model, batch))
    return 2 * len(data)
