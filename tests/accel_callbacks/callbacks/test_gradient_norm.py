"""GradientNorm in real loops: before clipping, at the true size, by layer."""

from __future__ import annotations

import math

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Freeze, GradientNorm
from accel_callbacks.callbacks.gradient_norm import total_norm


class Logged(Callback):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_log(self, run, model, metrics, step):
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def last(self) -> dict[str, float]:
        return self.rows[-1][1]


def setup(*callbacks, net=None, **options):
    logged = Logged()
    accel = Accelerator(cpu=True, callbacks=[*callbacks, logged], **options)
    torch.manual_seed(0)
    if net is None:
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return accel, logged, *accel.prepare(net, sgd)


def plain_gradients(net, batch) -> dict[str, torch.Tensor]:
    grads = torch.autograd.grad(net(batch).square().mean(), list(net.parameters()))
    return {name: grad for (name, _), grad in zip(net.named_parameters(), grads, strict=True)}


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_the_norm_is_taken_before_clipping(norm_type):
    accel, logged, model, optimizer = setup(GradientNorm(norm_type=norm_type))
    batch = torch.randn(4, 3)
    grads = plain_gradients(model, batch)
    expected = torch.cat([grad.flatten() for grad in grads.values()]).norm(norm_type)
    accel.backward(model(batch).square().mean())
    accel.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert logged.rows == [(1, {"grad_norm": pytest.approx(expected.item())})]


@pytest.mark.parametrize(
    ("per_layer", "layers"),
    [
        (True, {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}),
        (1, {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}),
        (2, {name: [name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}),
    ],
)
def test_norms_by_layer(per_layer, layers):
    accel, logged, model, optimizer = setup(GradientNorm(per_layer=per_layer, log_name="g"))
    batch = torch.randn(4, 3)
    grads = plain_gradients(model, batch)
    accel.backward(model(batch).square().mean())
    optimizer.step()
    expected = {
        f"g/{layer}": torch.cat([grads[name].flatten() for name in names]).norm().item()
        for layer, names in layers.items()
    }
    expected["g"] = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    assert logged.last() == pytest.approx(expected)


def test_a_window_counts_once_and_at_its_true_size():
    accel, logged, model, optimizer = setup(GradientNorm(), gradient_accumulation_steps=2)
    batches = torch.randn(2, 4, 3)
    both = [plain_gradients(model, batch) for batch in batches]
    mean = torch.cat([(both[0][n] + both[1][n]).flatten() / 2 for n in both[0]]).norm()
    for batch in batches:
        with accel.accumulate(model):
            accel.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert logged.rows == [(1, {"grad_norm": pytest.approx(mean.item())})]


def test_a_normalizer_is_taken_into_account():
    net = torch.nn.Linear(1, 1, bias=False)
    accel, logged, model, optimizer = setup(GradientNorm(), net=net, gradient_accumulation_steps=2)
    for tokens in (torch.ones(3, 1), torch.ones(1, 1) * 5):
        with accel.accumulate(model):
            accel.backward(model(tokens).sum(), normalizer=tokens.numel())
            optimizer.step()
    assert logged.last() == {"grad_norm": 2.0}


def test_a_window_that_ends_early_is_taken_into_account():
    """A stream does not know its length, so its last window is shorter than was planned."""
    accel, logged, model, optimizer = setup(GradientNorm(), gradient_accumulation_steps=4)
    data = torch.randn(5, 4, 3)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    loader = accel.prepare(torch.utils.data.DataLoader(Stream(), batch_size=None))
    seen = []
    for batch in loader:
        expected = plain_gradients(model, batch)
        with accel.accumulate(model):
            accel.backward(model(batch).square().mean())
            optimizer.step()
            if accel.sync_gradients:
                seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            optimizer.zero_grad()
    assert [row["grad_norm"] for _, row in logged.rows] == pytest.approx(seen)
    last = torch.cat([grad.flatten() for grad in expected.values()]).norm().item()
    assert seen[-1] == pytest.approx(last)
    accel.end_training()


def test_fp16_gradients_are_measured_unscaled():
    accel, logged, model, optimizer = setup(GradientNorm(), mixed_precision="fp16")
    batch = torch.randn(4, 3)
    grads = plain_gradients(accel.unwrap_model(model), batch)
    expected = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    accel.backward(model(batch).square().mean())
    optimizer.step()
    assert logged.last()["grad_norm"] == pytest.approx(expected, rel=1e-2)
    optimizer.zero_grad()
    accel.backward(model(batch * torch.inf).square().mean())
    optimizer.step()
    assert optimizer.step_was_skipped
    assert len(logged.rows) == 1


def test_a_backward_of_ones_own_is_measured_before_the_step():
    _accel, logged, model, optimizer = setup(GradientNorm())
    model(torch.randn(4, 3)).square().mean().backward()
    expected = total_norm(model.parameters()).item()
    optimizer.step()
    assert logged.last() == {"grad_norm": pytest.approx(expected)}


def test_intervals():
    accel, logged, model, optimizer = setup(GradientNorm(every_n_steps=3))
    for _ in range(7):
        accel.backward(model(torch.randn(4, 3)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert [step for step, _ in logged.rows] == [3, 6]


def test_each_optimizer_has_its_own():
    logged = Logged()
    accel = Accelerator(cpu=True, callbacks=[GradientNorm(per_layer=True), logged])
    nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    first, second, *optimizers = accel.prepare(*nets, *sgds)
    for factor, model, optimizer in ((2.0, first, optimizers[0]), (3.0, second, optimizers[1])):
        accel.backward(factor * model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert [row for _, row in logged.rows] == [
        {"grad_norm/0": 2.0, "grad_norm/optimizer0": 2.0},
        {"grad_norm/1": 3.0, "grad_norm/optimizer1": 3.0},
    ]


@pytest.mark.parametrize("turns", [False, True], ids=["one loss", "a loss each"])
def test_intervals_of_several_optimizers(turns):
    logged = Logged()
    accel = Accelerator(cpu=True, callbacks=[GradientNorm(every_n_steps=2), logged])
    nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    *models, first, second = accel.prepare(*nets, *sgds)
    for step in (1.0, 2.0, 3.0, 4.0):
        losses = [step * model(torch.ones(1, 1)).sum() for model in models]
        for number, optimizer in enumerate((first, second)):
            if turns or number == 0:
                accel.backward(losses[number] if turns else sum(losses))
            accel.clip_grad_norm_([p for net in nets for p in net.parameters()], 0.1)
            optimizer.step()
        first.zero_grad()
        second.zero_grad()
    assert [(step, *row.items()) for step, row in logged.rows] == [
        (step, (f"grad_norm/optimizer{number}", float(step)))
        for step in (2, 4)
        for number in (0, 1)
    ]


def test_frozen_parameters_do_not_count():
    accel, logged, model, optimizer = setup(GradientNorm(per_layer=1), Freeze({"0.*": None}))
    with accel.run("frozen"):
        accel.backward(model(torch.randn(4, 3)).mean())
        optimizer.step()
    assert logged.last().keys() == {"grad_norm", "grad_norm/2"}


def test_sparse_gradients_count():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert total_norm(embedding.parameters()).item() == pytest.approx(math.sqrt(10))
    assert total_norm([]).item() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"norm_type": 0}, "norm_type"),
        ({"per_layer": 0}, "per_layer"),
        ({"per_layer": -1}, "per_layer"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        GradientNorm(**options)
