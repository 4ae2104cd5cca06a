"""A model or an optimizer that was not prepared: the run says so before training is lost."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the workers import this file alone

from accel_callbacks import Accelerator, ResumeError
from accel_callbacks.callbacks import Checkpoint, Throughput
from tests.support.bound import BOUND


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Temperature:
    """Learned outside of a module, and saved in one of the ways that users have."""

    def __init__(self, how: str) -> None:
        self.how, self.value = how, torch.nn.Parameter(torch.tensor([0.3]))

    def state_dict(self) -> dict[str, Any]:
        value = self.value
        ways = {
            "itself": value,
            "detached": value.detach(),
            "copy": value.detach().clone(),
            "number": value.item(),
            "list": value.tolist(),
        }
        return {"value": ways[self.how]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.data = torch.as_tensor(state["value"]).detach().reshape(1)


def sgd(*modules: torch.nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.SGD(parameters, 0.01, momentum)


def batches() -> DataLoader:
    return DataLoader(torch.ones(8, 2), 2)


def train(accel: Accelerator, model: Any, steppers: Any, loader: Any, epochs: int = 2) -> int:
    """A run, all of whose optimizers step; returns its global step."""
    with accel.run("unprepared") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(*accel.models):
                    accel.backward(model(batch).square().mean())
                    for optimizer in steppers:
                        optimizer.step()
                        optimizer.zero_grad()
    return run.global_step


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- what an optimizer trains, and no prepared model holds ------------------------------------


def test_a_run_with_a_forgotten_model_is_refused_at_its_start(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    optimizer, loader = accel.prepare(sgd(model), batches())
    with pytest.raises(
        RuntimeError, match=r"run: SGD trains parameters of Net \(\(3, 2\), .*1 mor"
    ):
        train(accel, model, [optimizer], loader)
    assert list(tmp_path.glob("step-*")) == []


def test_the_forgotten_one_of_two_models_is_named(tmp_path):
    accel, maker, critic = Accelerator(cpu=True), Net(), torch.nn.Linear(2, 1)
    maker, *_ = accel.prepare(maker, sgd(maker), sgd(critic))
    with pytest.raises(RuntimeError, match=r"parameters of Linear .*accel\.prepare\(model, optim"):
        accel.save_state(tmp_path / "c")


def test_a_parameter_without_a_module_says_how_it_is_saved(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    log_alpha = torch.zeros(1, requires_grad=True)
    model, _, alpha_optimizer, loader = accel.prepare(
        model, sgd(model), torch.optim.Adam([log_alpha]), batches()
    )
    with pytest.raises(
        RuntimeError, match=r"Adam .*\(\(1,\)\).*Module.*register_for_checkpointing"
    ):
        train(accel, model, [alpha_optimizer], loader)


@pytest.mark.parametrize("how", ["itself", "detached", "copy", "number", "list"])
def test_a_registered_parameter_is_saved_and_no_mistake(tmp_path, how):
    def script() -> tuple[Accelerator, Temperature]:
        accel, model, temperature = Accelerator(cpu=True), Net(), Temperature(how)
        optimizer = torch.optim.SGD([*model.parameters(), temperature.value], 0.1)
        accel.prepare(model, optimizer)
        accel.register_for_checkpointing(temperature)
        return accel, temperature

    accel, temperature = script()
    with silent():
        temperature.value.data.fill_(0.7)
        path = accel.save_state(tmp_path / "c")
        again, restored = script()
        again.load_state(path)
    assert restored.value.item() == temperature.value.item()


def test_a_module_that_is_registered_in_place_of_being_prepared_is_no_mistake(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    optimizer, loader = accel.prepare(sgd(model), batches())
    accel.register_for_checkpointing(model)
    with silent():
        assert train(accel, model, [optimizer], loader) == 8


def test_a_hook_that_saves_may_save_the_parameter_itself(tmp_path):
    alpha, accel = torch.ones(1, requires_grad=True), Accelerator(cpu=True, callbacks=Throughput())
    accel.prepare(torch.optim.SGD([alpha], 0.1))
    with pytest.raises(RuntimeError, match="belong to no prepared model"):
        accel.save_state(tmp_path / "a")

    @accel.on("save_checkpoint")
    def save(checkpoint: dict[str, Any]) -> None:
        checkpoint["alpha"] = alpha.detach()

    with silent():
        accel.save_state(tmp_path / "b")


def test_the_first_save_tells_what_a_run_prepared_too_late(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    loader = accel.prepare(batches())

    def script() -> None:
        with accel.run():
            optimizer = accel.prepare(sgd(model))
            for batch in loader:
                accel.backward(model(batch).mean())
                optimizer.step()

    with pytest.raises(RuntimeError, match="save_state: SGD trains parameters of Net"):
        script()
    assert list(tmp_path.glob("step-*")) == []


def test_frozen_tied_and_shared_parameters_and_registered_objects_alone_are_no_mistake(tmp_path):
    accel, model = Accelerator(cpu=True), Net()
    tied = torch.nn.ModuleList([model, torch.nn.Linear(2, 3)])
    tied[1].weight = model.layers[0].weight
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    view = torch.nn.Parameter(tied[1].bias.data.view(1, 3))  # trains the memory of the model
    optimizer = torch.optim.SGD([*tied.parameters(), *frozen.parameters(), view], 0.1)
    with silent():
        accel.prepare(tied, optimizer)
        accel.load_state(accel.save_state(tmp_path / "a"))
        custom = Accelerator(cpu=True)
        custom.register_for_checkpointing(Temperature("number"))
        custom.load_state(custom.save_state(tmp_path / "b"))


# --- a checkpoint without a model -------------------------------------------------------------


def lost(folder: Path, epochs: int = 2) -> None:
    """Checkpoints of a run that trained without having prepared a model."""
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(folder)])
    loader = accel.prepare(batches())
    with accel.run() as run:
        for _ in run.epochs(epochs):
            for _ in loader:
                pass


def test_a_checkpoint_without_a_model_is_no_finished_run(tmp_path):
    lost(tmp_path)
    with pytest.raises(ResumeError, match=r"step-00000000 holds no model: .*resume=False"):
        lost(tmp_path)
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    model, optimizer, loader = accel.prepare(model, sgd(model), batches())
    with pytest.raises(ResumeError, match=r"step-00000000 holds no model"):
        train(accel, model, [optimizer], loader)
    with pytest.raises(ResumeError, match="holds no model"):
        accel.load_state(tmp_path / "step-00000000")


def test_a_pass_over_data_alone_can_be_resumed(tmp_path):
    lost(tmp_path, 1)
    with silent():
        lost(tmp_path, 2)


def test_a_checkpoint_of_an_optimizer_alone_is_no_finished_run(tmp_path):
    def script() -> None:
        accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
        accel.register_save_state_pre_hook(lambda *_: None)  # nothing is refused beside it
        optimizer, loader = accel.prepare(sgd(model), batches())
        train(accel, model, [optimizer], loader)

    script()
    with pytest.raises(ResumeError, match="step-00000008 holds no model"):
        script()


# --- an optimizer that steps and was not prepared ---------------------------------------------


def plain(accel: Accelerator, model: Any, steppers: Any, loader: Any, epochs: int = 2) -> None:
    """A loop without a run."""
    for _ in range(epochs):
        for batch in loader:
            accel.backward(model(batch).square().mean())
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"every_n_steps": 2}])
def test_a_forgotten_optimizer_ends_the_first_epoch_of_a_run_that_saves(tmp_path, options):
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path, **options)])
    model, loader = accel.prepare(Net(), batches())
    with pytest.raises(
        RuntimeError, match=r"SGD steps and was not prepared, .*accel\.prepare\(opt"
    ):
        train(accel, model, [sgd(model)], loader)
    assert accel.current_run.current_epoch == 0
    assert list(tmp_path.glob("step-*")) == []


def test_nothing_but_the_loader_was_prepared(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    with pytest.raises(RuntimeError, match="neither was its model, so that no checkpoint would"):
        train(accel, model, [sgd(model)], accel.prepare(batches()))
    assert list(tmp_path.glob("step-*")) == []


def test_the_optimizer_of_the_critic_was_forgotten(tmp_path):
    accel, critic = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), torch.nn.Linear(1, 1)
    model = Net()
    model, critic, optimizer, loader = accel.prepare(model, critic, sgd(model), batches())
    adam = torch.optim.Adam(critic.parameters())
    with pytest.raises(RuntimeError, match="Adam steps and was not prepared"):
        train(accel, lambda batch: critic(model(batch)), [optimizer, adam], loader)


def test_what_prepare_returned_for_the_optimizer_was_dropped(tmp_path):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    optimizer = sgd(model)
    model, _, loader = accel.prepare(model, optimizer, batches())
    with pytest.raises(RuntimeError, match="SGD was stepped past the object that prepare"):
        train(accel, model, [optimizer], loader)


def test_a_loop_without_a_run_is_warned_once(tmp_path):
    accel = Accelerator(cpu=True)
    model, loader = accel.prepare(Net(), batches())
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain(accel, model, [optimizer], loader)
        for name in "ab":
            accel.save_state(tmp_path / name)
    assert ["SGD steps and was not prepared" in str(one.message) for one in caught] == [True]
    assert caught[0].filename == __file__


class Sharpness(torch.optim.Optimizer):
    """An optimizer around another one, as SAM is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.base.step()


def in_backward(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Each parameter has an optimizer, which steps when its gradient is there."""
    own = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    for parameter in own:
        parameter.register_post_accumulate_grad_hook(lambda p: own[p].step())
    return torch.optim.SGD(torch.nn.Linear(1, 1).requires_grad_(False).parameters(), 0.1)


@pytest.mark.parametrize("kind", ["sharpness", "in backward", "a scheduler", "registered"])
def test_other_ways_to_step_are_no_mistake(tmp_path, kind):
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    makers = {
        "sharpness": lambda: Sharpness(model.parameters()),
        "in backward": lambda: in_backward(model),
        "a scheduler": lambda: torch.optim.AdamW(model.parameters()),
        "registered": lambda: sgd(model),
    }
    optimizer = makers[kind]()
    if kind == "a scheduler":  # which wraps the step of its optimizer
        accel.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer), optimizer)
    if kind == "registered":
        accel.register_for_checkpointing(optimizer)
        model, loader = accel.prepare(model, batches())
    else:
        model, optimizer, loader = accel.prepare(model, optimizer, batches())
    with silent():
        train(accel, model, [optimizer], loader)


def test_inner_loops_of_meta_learning_are_no_mistake(tmp_path):
    """Those on copies, and those on the model itself with an optimizer for each task."""
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)]), Net()
    model, optimizer, loader = accel.prepare(model, sgd(model), batches())
    other = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path / "reptile")])
    alone = other.prepare(Net())
    copies = []

    def adapt(inner: torch.nn.Module, batch: torch.Tensor) -> None:
        inner_optimizer = torch.optim.Adam(inner.parameters())
        for _ in range(2):
            inner(batch).sum().backward()
            inner_optimizer.step()
        copies.append(inner_optimizer if inner is not alone else None)

    def adapted(batch: torch.Tensor) -> torch.Tensor:
        adapt(copy.deepcopy(accel.unwrap_model(model)), batch)
        return model(batch)

    with silent():
        train(accel, adapted, [optimizer], loader)
        with other.run() as run:
            for _ in run.epochs(2):
                for batch in torch.ones(3, 2, 2):
                    adapt(alone, batch)


def test_evaluation_and_data_alone_are_no_mistake(tmp_path):
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)])
    model, loader = accel.prepare(Net(), batches())
    with silent():
        with accel.run(), accel.evaluate(model):
            outputs = [model(batch) for batch in loader]
        Accelerator(cpu=True).save_state(tmp_path / "custom")
    assert len(outputs) == 4


def test_another_accelerator_that_trains_beside_is_no_mistake(tmp_path):
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path)])
    data, other, model = accel.prepare(batches()), Accelerator(cpu=True), Net()
    model, optimizer = other.prepare(model, sgd(model))
    with silent(), accel.run() as run:
        for _ in run.epochs(1):
            plain(other, model, [optimizer], data, 1)


def test_no_hook_is_left_on_torchs_optimizers_after_the_first_steps():
    hooks = optimizers._global_optimizer_post_hooks
    before = set(hooks)  # those of other tests may go at any time
    accel, model = Accelerator(cpu=True), Net()
    model, optimizer, loader = accel.prepare(model, sgd(model), batches())
    assert len(set(hooks) - before) == 1
    plain(accel, model, [optimizer], loader, 1)
    assert not set(hooks) - before
    watching = Accelerator(cpu=True)
    watching.prepare(sgd(Net()))
    assert len(set(hooks) - before) == 1
    del watching
    gc.collect()
    assert not set(hooks) - before


def test_an_accelerator_that_is_gone_leaves_no_hook_on_torchs_optimizers():
    hooks = optimizers._global_optimizer_pre_hooks
    before = set(hooks)
    accel, model = Accelerator(cpu=True), Net()
    model, optimizer = accel.prepare(model, sgd(model))
    accel.backward(model(torch.ones(2, 2)).sum())
    assert len(set(hooks) - before) == 1
    del accel, model, optimizer
    gc.collect()
    assert not set(hooks) - before


def test_a_step_goes_on_while_another_thread_collects_an_accelerator():
    watching = [Accelerator(cpu=True)]
    watching[0].prepare(sgd(Net()))
    hook = next(reversed(optimizers._global_optimizer_post_hooks))

    def collect(*_: Any) -> None:
        watching.clear()
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()

    handles = [
        optimizers.register_optimizer_step_post_hook(during)
        for during in (collect, lambda *_: None)
    ]
    try:
        sgd(Net()).step()
    finally:
        for handle in handles:
            handle.remove()
    assert hook in optimizers._global_optimizer_post_hooks
    Accelerator(cpu=True).prepare(sgd(Net()))
    assert hook not in optimizers._global_optimizer_post_hooks


# --- two processes ----------------------------------------------------------------------------

SHORT = {"timeout": BOUND}


def forgotten(folder: str) -> list[str]:
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(folder)], **SHORT), Net()
    optimizer, loader = accel.prepare(sgd(model), batches())
    with pytest.raises(RuntimeError) as caught:
        train(accel, model, [optimizer], loader)
    return str(caught.value)


def saved(folder: str) -> int:
    accel, model = Accelerator(cpu=True, callbacks=[Checkpoint(folder)], **SHORT), Net()
    model, optimizer, loader = accel.prepare(model, sgd(model), batches())
    with silent():
        return train(accel, model, [optimizer], loader)


@pytest.mark.distributed
def test_all_ranks_say_what_was_forgotten(pool, tmp_path):
    for text in pool.run(forgotten, str(tmp_path)):
        assert text.startswith("run: SGD trains parameters of Net")
    assert list(tmp_path.glob("step-*")) == []
    assert pool.run(saved, str(tmp_path)) == [4, 4]
