"""Optimizers and the random numbers of a GPU, which a device that stands in for one cannot show."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Throughput
from accel_callbacks.distributed.rng import capture_rng, restore_rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def step(model, optimizer, device="cpu"):
    model(torch.ones(1, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        ("Adagrad", {}, "cpu"),
        ("AdamW", {}, "cpu"),
        ("AdamW", {"fused": True}, "cuda"),
        ("NAdam", {}, "cpu"),
        ("SGD", {"momentum": 0.9}, None),
    ],
    ids=["Adagrad", "AdamW", "fused AdamW", "NAdam", "SGD"],
)
def test_an_optimizer_with_a_state_on_the_host_steps_after_prepare(kind, options, count):
    model = torch.nn.Linear(8, 8)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    step(model, optimizer)  # as one that was loaded
    accel = Accelerator()
    model, optimizer = accel.prepare(model, optimizer)
    for _ in range(2):
        accel.backward(model(torch.ones(1, 8, device=accel.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    states = list(optimizer.state.values())
    assert len(states) == 2
    tensors = {name: one for name, one in states[0].items() if isinstance(one, torch.Tensor)}
    tensors.pop("mu_product", None)
    assert tensors.pop("step", torch.tensor(0.0)).device.type in (count, "cpu")
    assert {one.device for one in tensors.values()} == {accel.device}
    if count is not None:
        assert float(states[0]["step"]) == 3.0
        assert states[0]["step"].device.type == count


def test_a_moved_state_gives_the_weights_of_one_that_was_always_on_the_gpu():
    def train(moved):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        if not moved:
            model.cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        if moved:
            model, optimizer = Accelerator().prepare(model, optimizer)
        for _ in range(3):
            step(model, optimizer, "cuda")
        return [one.detach().cpu() for one in model.parameters()]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)


def test_throughput_where_tf32_was_set_by_the_newer_name():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older setting only")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        speed = Throughput(log_every_n_steps=1)
        accel = Accelerator(callbacks=[speed])
        model = torch.nn.Linear(64, 64)
        model, optimizer, loader = accel.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(64, 64), 8)
        )
        with accel.run("speed"):
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert speed.rates
    finally:
        matmul.fp32_precision = before


def test_the_generator_of_the_device_goes_on_where_it_was():
    accel = Accelerator()
    state = capture_rng(accel.device)
    drawn = torch.rand(4, device=accel.device)
    restore_rng(state, accel.device)
    assert torch.equal(torch.rand(4, device=accel.device), drawn)


def test_no_context_is_made_on_a_device_without_parameters():
    accel = Accelerator()
    state = capture_rng(accel.device, {accel.device, torch.device("cpu")})
    assert "other_devices" not in state


def test_a_model_on_two_devices_resumes_with_the_generators_of_both(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    accel = Accelerator()
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, device=f"cuda:{n}") for n in range(2))
    model.hf_device_map = {"0": 0, "1": 1}
    accel.prepare(model)
    accel.save_state(tmp_path / "c")
    drawn = [torch.rand(4, device=f"cuda:{n}").tolist() for n in range(2)]
    accel.load_state(tmp_path / "c")
    assert [torch.rand(4, device=f"cuda:{n}").tolist() for n in range(2)] == drawn
