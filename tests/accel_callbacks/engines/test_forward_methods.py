"""Several forward methods of a model on two processes: gradients are averaged after each."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from accel_callbacks import Accelerator, DistributedDataParallelKwargs
from tests.support.bound import BOUND
from tests.support.rounding import ABSOLUTE, reordered

pytestmark = pytest.mark.distributed


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = 2
        self.inside = torch.nn.Linear(2, 2)
        self.outside = torch.nn.Linear(2, 1)
        self.seen: list[torch.dtype] = []

    def encode(self, x):
        y = self.inside(x)
        self.seen.append(y.dtype)
        return y

    def decode(self, y):
        return self.outside(y)

    def forward(self, x):
        return self.decode(self.encode(x))

    def training_step(self, x, *, power):
        return self(x).pow(power).mean()

    @torch.no_grad()
    def generate(self, x):
        return self(x)

    def sizes(self):
        return [parameter.numel() for parameter in self.parameters()]

    def join(self):
        return "DDP has one too"


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def unused_allowed() -> DistributedDataParallelKwargs:
    return DistributedDataParallelKwargs(find_unused_parameters=True)


DATA = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


def loss_of(model, way: str, x: torch.Tensor) -> torch.Tensor:
    if way == "encode":
        return model.encode(x).square().mean()
    if way == "encode and decode":
        return model.decode(model.encode(x)).square().mean()
    return model.training_step(x, power=2)


def gradients(way: str, precision: str, **options) -> list[list[float]]:
    """Of two steps, so that a reducer that is left in a wrong state is noticed."""
    handlers = [unused_allowed()] if way == "encode" else []
    accel = accelerator(mixed_precision=precision, kwargs_handlers=handlers, **options)
    marks = ["encode", "decode", "training_step"]
    net = Coder()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = accel.prepare(net, optimizer, forward_methods=marks)
    mine = DATA[accel.process_index :: accel.num_processes]
    found = []
    for _ in range(2):
        accel.backward(loss_of(model, way, mine))
        found += [p.grad.flatten().tolist() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    expected = {"no": torch.float32, "bf16": torch.bfloat16}[precision]
    assert set(net.seen) == {expected}
    return found


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("way", ["encode", "encode and decode", "training_step"])
def test_b6_gradients_through_marked_methods_are_those_of_one_process(pool, alone, way, precision):
    (expected,) = alone.run(gradients, way, precision)
    first, second = pool.run(gradients, way, precision)
    assert first == second
    tolerance = ABSOLUTE if precision == "no" else 3e-2
    for found, wanted in zip(first, expected, strict=True):
        assert found == pytest.approx(wanted, rel=tolerance, abs=tolerance)


def compiled() -> list[list[float]]:
    return gradients("training_step", "no", dynamo_backend="eager")


def test_b6_compiled_models_average_through_marked_methods(pool, alone):
    (expected,) = alone.run(gradients, "training_step", "no")
    for found in pool.run(compiled):
        for one, wanted in zip(found, expected, strict=True):
            assert one == reordered(wanted)


def warned(way: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(way, "no")
    return [str(one.message) for one in caught]


def test_b6_steps_after_marked_methods_are_no_mistake(pool):
    assert pool.run(warned, "encode and decode") == [[], []]


def unmarked(name: str) -> str:
    model = accelerator().prepare(Coder())
    with pytest.raises(RuntimeError) as caught:
        getattr(model, name)(DATA)
    model.generate(DATA)
    with torch.no_grad():
        model.encode(DATA)
    with model.no_sync():
        model.encode(DATA).sum().backward()
    return str(caught.value)


def partly_frozen(frozen: tuple[str, ...]) -> bool:
    coder = Coder()
    for name in frozen:
        coder.get_parameter(f"inside.{name}").requires_grad_(False)
    model = accelerator().prepare(coder)
    try:
        model.encode(DATA)
    except RuntimeError as error:
        return "past Distributed" not in str(error)
    return True


def test_b6_a_layer_is_trained_if_one_of_its_parameters_is(pool):
    for frozen, runs in (("bias",), False), (("weight",), False), (("weight", "bias"), True):
        assert pool.run(partly_frozen, frozen) == [runs, runs]


def test_b6_an_unmarked_method_that_would_train_is_refused_with_what_to_do(pool):
    for text in pool.run(unmarked, "encode"):
        assert text.startswith("Coder.encode() runs layers of the model past Distributed")
        assert "accel.prepare(model, forward_methods=['encode'])" in text


def plain_ones() -> list:
    model = accelerator().prepare(Coder(), forward_methods=["encode"])
    with pytest.raises(AttributeError, match="'Coder' object has no attribute 'nothing'"):
        _ = model.nothing
    generated = model.generate(DATA)
    assert torch.equal(generated, model.module.generate(DATA))
    return [model.sizes(), model.width, hasattr(model, "nothing"), type(model).__name__]


def test_b6_plain_methods_and_attributes_are_those_of_the_model(pool):
    expected = [[4, 2, 2, 1], 2, False, "DistributedDataParallel"]
    assert pool.run(plain_ones) == [expected, expected]


def after_an_error() -> list[float]:
    model = accelerator().prepare(Coder(), forward_methods=["training_step"])
    with pytest.raises(RuntimeError):
        model.training_step(torch.ones(1, 5), power=2)
    with pytest.raises(TypeError):
        model.training_step(DATA)
    return model(DATA).flatten().tolist()


def test_b6_after_an_error_in_a_marked_method_the_model_is_called_as_before(pool):
    assert pool.run(after_an_error) == [Coder()(DATA).flatten().tolist()] * 2


def hidden() -> str:
    with pytest.raises(ValueError, match="forward_methods") as caught:
        accelerator().prepare(Coder(), forward_methods=["join"])
    return str(caught.value)


def test_b6_a_name_that_ddp_has_too_is_refused(pool):
    for text in pool.run(hidden):
        assert "give it another name" in text


def wrapped_already() -> str:
    accel = accelerator()
    wrapped = torch.nn.parallel.DistributedDataParallel(Coder())
    with pytest.raises(ValueError, match="forward_methods") as caught:
        accel.prepare(wrapped, forward_methods=["encode"])
    accel.free_memory()
    return type(accel.prepare(wrapped)).__name__ + str(caught.value)


def test_b6_methods_of_a_model_that_is_wrapped_already_are_refused(pool):
    for text in pool.run(wrapped_already):
        assert text.startswith("DistributedDataParallel")
        assert "pass the model itself to prepare()" in text


def windows() -> list[float]:
    accel = accelerator(gradient_accumulation_steps=2)
    net = Coder()
    model = accel.prepare(net, forward_methods=["training_step"])
    seen = []
    for _ in range(2):
        with accel.accumulate(model):
            x = DATA[accel.process_index :: accel.num_processes]
            accel.backward(model.training_step(x, power=2))
        seen.append(net.outside.bias.grad.item())
    return seen


def test_b6_in_a_window_gradients_of_marked_methods_stay_until_its_end(pool):
    (first, after), (second, same) = pool.run(windows)
    assert first != second
    assert after == same


def copied() -> bool:
    model = accelerator().prepare(Coder(), forward_methods=["encode"])
    inner = copy.deepcopy(model.module)
    pickle.dumps(model.module.state_dict())
    return torch.equal(inner.encode(DATA), model.module.encode(DATA))


def test_b6_the_model_inside_is_copied_as_before(pool):
    assert pool.run(copied) == [True, True]
