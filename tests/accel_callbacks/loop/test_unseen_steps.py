"""Steps by other methods than `step`, and within backward: counted, saved and resumed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Callback, Checkpoint


class SharpnessAware(torch.optim.Optimizer):
    """The form in which it is known: two methods, the second of which steps another optimizer."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    def first_step(self):
        for parameter in self._parameters():
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.data.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    def second_step(self):
        for parameter in self._parameters():
            parameter.data.copy_(self.state[parameter]["old"])
        self.base.step()
        self.zero_grad()

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]


class Seen(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.steps.append(run.global_step)


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)


def sharpness_aware(accel, model, loader, stop=None):
    model, optimizer, loader = accel.prepare(model, SharpnessAware(model.parameters(), 0.1), loader)
    with accel.run("aware") as run:
        for inputs, labels in loader:
            with accel.accumulate(model):
                accel.backward((model(inputs) - labels).square().mean())
                optimizer.first_step()
                accel.backward((model(inputs) - labels).square().mean())
                optimizer.second_step()
            if run.global_step == stop:
                raise KeyboardInterrupt
    return run


def in_backward(accel, model, loader, stop=None):
    inner = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        inner[parameter].step()
        inner[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model, loader = accel.prepare(model, loader)
    with accel.run("in backward") as run:
        for inputs, labels in loader:
            accel.backward((model(inputs) - labels).square().mean())
            if run.global_step == stop:
                raise KeyboardInterrupt
    return run


@pytest.mark.parametrize("loop", [sharpness_aware, in_backward])
def test_they_count_and_a_run_that_was_killed_resumes(tmp_path, loop):
    torch.manual_seed(0)
    seen, whole = Seen(), torch.nn.Linear(3, 1)
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    run = loop(Accelerator(cpu=True, callbacks=[seen]), whole, data())
    assert (run.global_step, seen.steps) == (8, list(range(1, 9)))
    for stop in (5, None):
        model = torch.nn.Linear(3, 1)
        model.load_state_dict(start)
        saver = Checkpoint(every_n_steps=2, async_save=False)
        accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[saver])
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                loop(accel, model, data(), stop)
        else:
            assert loop(accel, model, data()).global_step == 8
    if loop is in_backward:  # the momentum of the other is of a part, which its state leaves out
        assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_a_method_that_steps_within_a_window_is_an_error():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"if accel.sync_gradients.*accumulation_steps=1"):
        sharpness_aware(accel, torch.nn.Linear(3, 1), data())


def test_state_of_optimizers_in_backward_is_told_at_a_save(tmp_path):
    accel = Accelerator(cpu=True)
    weight = torch.nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9)
    weight.weight.register_post_accumulate_grad_hook(lambda parameter: inner.step())
    model = accel.prepare(weight)
    with accel.run("momentum") as run:
        for _ in range(3):
            accel.backward(model(torch.ones(1, 1)).sum())
        with pytest.warns(UserWarning, match="its state is not saved: accel.register_for"):
            accel.save_state(tmp_path / "a")
        accel.register_for_checkpointing(inner)
        accel.save_state(tmp_path / "b")
    assert run.global_step == 3


def drifting():
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    loader = data()
    with pytest.warns(UserWarning, match="within backward") as told:
        run = in_backward(accel, model, loader)
    texts = [str(warning.message) for warning in told]
    return run.global_step, sum("before gradients are averaged over the 2" in t for t in texts)


@pytest.mark.distributed
def test_steps_before_gradients_are_averaged_are_told_on_all_ranks(pool):
    (steps, first), (others, second) = pool.run(drifting)
    assert steps == others == 4
    assert first + second >= 1
