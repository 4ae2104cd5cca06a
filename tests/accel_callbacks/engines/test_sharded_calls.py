"""What a script does with a sharded model that torch does not expect works, or says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from accel_callbacks import FullyShardedDataParallelPlugin
from tests.support.sharded import WIDTH, Network, accelerator, batch_of, flat, quiet, step

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def units(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **options)


def trained(layout: str = "fsdp", make: Any = torch.optim.SGD, **options: Any) -> tuple[Any, ...]:
    quiet()
    accel, model = accelerator(layout, units()), Network()
    return accel, *accel.prepare(model, make(model.parameters(), lr=0.1, **options))


def share(accel: Any, samples: int = 8) -> torch.Tensor:
    return batch_of(samples).chunk(accel.num_processes)[accel.process_index].clone()


def message(call: Any) -> str:
    """The error of a call, with its class."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# --- layers and units that are called by themselves -----------------------------------------------


def layers_alone() -> list[str]:
    accel, model, optimizer = trained()
    texts = [message(lambda: model.first(torch.ones(2, 7)))]
    step(accel, model, optimizer, share(accel))
    texts.append(message(lambda: model.blocks[1].linear(torch.ones(2, WIDTH))))
    step(accel, model, optimizer, share(accel))  # and training goes on
    return texts


def test_a_layer_that_is_called_by_itself_says_what_to_call(pool):
    for first, inner in pool.run(layers_alone):
        assert first.startswith("RuntimeError: 'first' of Network met sharded weights")
        assert inner.startswith("RuntimeError: 'blocks.1.linear' of Network met sharded weights")
        assert "prepare(model, forward_methods=[...])" in first
        assert "got mixed torch.Tensor and DTensor" in first  # torch's own text stays


class Borrowing(Network):
    """A model that computes with a weight of a unit, outside of that unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.first(x), self.blocks[0].linear.weight)


def borrowed() -> str:
    quiet()
    model: Any = accelerator(plugin=units()).prepare(Borrowing())
    return message(lambda: model(torch.ones(2, 7)))


def test_a_weight_that_is_used_outside_of_its_unit_says_so_too(pool):
    for text in pool.run(borrowed):
        assert text.startswith("RuntimeError: the forward of Borrowing met sharded weights")


def after_a_unit(before: bool) -> list[float]:
    accel, model, optimizer = trained()
    if before:
        accel.backward(model.blocks[0](torch.ones(2, WIDTH)).sum())
        optimizer.zero_grad()
    for _ in range(2):
        step(accel, model, optimizer, share(accel))
    return flat(model)


def test_a_unit_that_is_called_before_its_model_leaves_it_the_root(pool):
    assert pool.run(after_a_unit, True) == pool.run(after_a_unit, False)


# --- copies ---------------------------------------------------------------------------------------


def copies() -> list[Any]:
    quiet()
    accel, model = accelerator(plugin=units()), Network()
    teacher = copy.deepcopy(model)
    student: Any = accel.prepare(model)
    texts = [message(lambda: copy.deepcopy(student)), message(lambda: copy.deepcopy(student.last))]
    texts.insert(1, message(lambda: copy.deepcopy(student.blocks[0])))
    return [*texts, torch.equal(teacher(batch_of(2)), student(batch_of(2)))]


def test_a_copy_of_shards_is_refused_and_one_from_before_prepare_is_whole(pool):
    for whole, unit, layer, alike in pool.run(copies):
        assert whole.startswith("ValueError: copy.deepcopy of a sharded Network")
        assert "before prepare()" in whole
        assert unit == whole
        assert layer == "nothing was raised"
        assert alike


# --- gradients of gradients -----------------------------------------------------------------------


def penalty(create_graph: bool) -> str:
    accel, model, _ = trained()
    inputs = share(accel).requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(
        outputs.sum(), inputs, create_graph=create_graph, retain_graph=True
    )
    return message(lambda: accel.backward(outputs.mean() + slope.square().mean()))


def test_a_gradient_penalty_is_told(pool):
    for text in pool.run(penalty, True):
        assert "gradients of gradients (create_graph=True)" in text
        assert "Train with DistributedDataParallel" in text


def test_gradients_of_inputs_are_not(pool):
    assert pool.run(penalty, False) == ["nothing was raised"] * 2


# --- types ----------------------------------------------------------------------------------------


class Shifted(torch.nn.Module):
    """A model with a buffer between two layers."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(7, 7), torch.nn.Linear(7, 1)
        self.register_buffer("shift", torch.ones(7))
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + (self.shift.to(x.dtype) if self.cast else self.shift))


def shifted(cast: bool, policy: str | None) -> str:
    quiet()
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accel = accelerator(plugin=plugin, mixed_precision="bf16")
    model: Any = accel.prepare(Shifted(cast))
    return message(lambda: accel.backward(model(share(accel)).square().mean()))


def test_a_buffer_of_another_type_is_named(pool):
    for text in pool.run(shifted, False, None):
        assert "the forward of Shifted met tensors of two types" in text
        assert "'shift' of its buffers are float32" in text
        assert "mixed_precision_policy='fp32'" in text


@pytest.mark.parametrize(("cast", "policy"), [(True, None), (False, "fp32")])
def test_what_it_says_to_do_works(pool, cast, policy):
    assert pool.run(shifted, cast, policy) == ["nothing was raised"] * 2


# --- optimizers -----------------------------------------------------------------------------------


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return getattr(torch.optim, name)(matrices, lr=0.1)


def refused(name: str) -> str:
    quiet()
    model = Network()
    optimizer = optimizer_of(name, model)
    accel = accelerator(plugin=units())
    return message(lambda: accel.prepare(model, optimizer))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Rprop"])
def test_optimizers_that_need_whole_weights_are_refused(pool, name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for text in pool.run(refused, name):
        assert text.startswith(f"ValueError: {name} does not work with sharded models")


def on_whole_weights() -> list[float]:
    quiet()
    accel = accelerator(plugin=units(ignored_modules=["first", "blocks.*", "last"]))
    model = Network()
    optimizer = optimizer_of("Rprop", model)
    model.spare = torch.nn.Linear(2, 2)  # is sharded, and has no optimizer
    model, optimizer = accel.prepare(model, optimizer)
    step(accel, model, optimizer, share(accel))
    return flat(model.first)


def test_they_step_with_weights_that_are_kept_whole(pool):
    plain = Network()
    optimizer = optimizer_of("Rprop", plain)
    plain(batch_of(8)).square().mean().backward()
    optimizer.step()
    for weights in pool.run(on_whole_weights):
        assert weights == pytest.approx(flat(plain.first), abs=1e-6)


def with_optimizer(name: str) -> list[float]:
    accel, model, optimizer = trained(make=getattr(torch.optim, name))
    for number in range(3):
        step(accel, model, optimizer, share(accel) + number)
    return flat(model)


@pytest.mark.parametrize("name", ["Adadelta", "ASGD", "RAdam", "SGD"])
def test_others_step_as_on_one_process(pool, name):
    plain = Network()
    optimizer = getattr(torch.optim, name)(plain.parameters(), lr=0.1)
    for number in range(3):
        plain(batch_of(8) + number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in pool.run(with_optimizer, name):
        assert weights == pytest.approx(flat(plain), abs=1e-6)
