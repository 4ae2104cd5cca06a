"""bf16 and fp16 on the CPU: what is cast, what stays fp32, and what an overflow leaves out."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from accel_callbacks import Accelerator, Callback
from accel_callbacks.precision import create_precision

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
HUGE = 1e36  # times the initial scale of 65536 it is infinite in fp32


@dataclass
class Outputs:
    logits: torch.Tensor
    extra: dict


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> Outputs:
        hidden = self.layer(x)
        self.seen = hidden.dtype
        rest = {"pair": (hidden, torch.arange(2)), "name": "x", "double": hidden.double()}
        return Outputs(hidden, rest)


class Counter(Callback):
    def __init__(self) -> None:
        self.before = self.after = 0

    def on_before_optimizer_step(self, run, model, optimizer):
        self.before += 1

    def on_after_optimizer_step(self, run, model, optimizer):
        self.after += 1


def scale_of(accel: Accelerator) -> float:
    return accel.precision.state_dict()["scale"]


def fp16(*callbacks: Callback, **options):
    """An Accelerator with one weight and its optimizer."""
    accel = Accelerator(cpu=True, mixed_precision="fp16", callbacks=callbacks, **options)
    weight = torch.nn.Parameter(torch.ones(2))
    accel.register_for_checkpointing(torch.nn.ParameterList([weight]))
    return accel, weight, accel.prepare(torch.optim.SGD([weight], lr=0.5))


@pytest.mark.parametrize("name", LOW)
def test_work_is_low_precision_and_outputs_parameters_and_gradients_are_fp32(name):
    accel = Accelerator(cpu=True, mixed_precision=name)
    model = accel.prepare(Nested())
    output = model(torch.ones(1, 2))
    assert model.seen is LOW[name]
    assert output.logits.dtype is torch.float32
    assert output.extra["pair"][0].dtype is torch.float32
    assert output.extra["pair"][1].dtype is torch.int64
    assert output.extra["double"].dtype is torch.float64
    assert output.extra["name"] == "x"
    accel.backward(output.logits.sum())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", LOW)
def test_autocast_covers_what_is_computed_outside_of_the_model(name):
    accel = Accelerator(cpu=True, mixed_precision=name)
    with accel.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is LOW[name]
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_full_precision_changes_nothing():
    accel = Accelerator(cpu=True, mixed_precision="no")
    model = accel.prepare(Nested())
    model(torch.ones(1, 2))
    assert model.seen is torch.float32
    assert "forward" not in vars(model)


def test_unwrapping_without_the_wrapper_gives_the_model_its_own_forward_back():
    accel = Accelerator(cpu=True, mixed_precision="bf16")
    model = accel.prepare(Nested())
    assert accel.unwrap_model(model) is model
    accel.unwrap_model(model)(torch.ones(1, 2))
    assert model.seen is torch.bfloat16
    bare = accel.unwrap_model(model, keep_fp32_wrapper=False)
    bare(torch.ones(1, 2))
    assert bare.seen is torch.float32
    assert not [key for key in vars(bare) if "accel" in key]


def test_the_state_of_a_prepared_model_has_the_names_of_the_plain_one():
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Nested())
    assert list(model.state_dict()) == list(Nested().state_dict())


@pytest.mark.parametrize("name", LOW)
def test_a_deep_copy_of_a_prepared_model_computes_with_its_own_weights(name):
    model = Accelerator(cpu=True, mixed_precision=name).prepare(torch.nn.Linear(2, 1))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert average(torch.ones(1, 2)).item() == 0.0
    assert model(torch.ones(1, 2)).item() != 0.0


def test_fp16_training_follows_fp32():
    def weight(precision: str) -> torch.Tensor:
        torch.manual_seed(0)
        accel = Accelerator(cpu=True, mixed_precision=precision)
        model = torch.nn.Linear(2, 1)
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if precision == "fp16":  # the first scale of 65536 overflows, and steps are skipped
            accel.precision.load_state_dict({**accel.precision.state_dict(), "scale": 64.0})
        for _ in range(5):
            accel.backward((model(torch.ones(1, 2)) - 1).pow(2).mean())
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    torch.testing.assert_close(weight("fp16"), weight("no"), atol=2e-3, rtol=0)


def test_an_overflow_skips_the_step_and_all_that_counts_steps():
    counter = Counter()
    accel, weight, optimizer = fp16(counter)
    scheduler = accel.prepare(StepLR(optimizer, 1, 0.5))
    for factor, skipped in ((HUGE, True), (1.0, False)):
        accel.backward((weight * factor).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accel.optimizer_step_was_skipped is skipped
        assert weight.grad is None
    assert weight.tolist() == [0.5, 0.5]
    assert accel.current_run.global_step == 1
    assert counter.after == 1
    assert scheduler.get_last_lr() == [0.25]
    assert scale_of(accel) == 32768.0


def test_clipping_unscales_each_of_two_optimizers_once():
    accel, first, one = fp16()
    second = torch.nn.Parameter(torch.ones(2))
    two = accel.prepare(torch.optim.SGD([second], lr=0.5))
    accel.backward((first * 3).sum() + (second * 5).sum())
    accel.clip_grad_norm_([first], 1e9)
    accel.clip_grad_norm_([second], 1e9)
    assert first.grad.tolist() == [3.0, 3.0]
    assert second.grad.tolist() == [5.0, 5.0]
    one.step()
    two.step()
    assert first.tolist() == [-0.5, -0.5]
    assert second.tolist() == [-1.5, -1.5]


def test_one_optimizer_may_overflow_while_the_other_steps():
    accel, first, one = fp16()
    second = torch.nn.Parameter(torch.ones(2))
    two = accel.prepare(torch.optim.SGD([second], lr=0.5))
    accel.backward((first * HUGE).sum() + second.sum())
    one.step()
    two.step()
    assert (one.step_was_skipped, two.step_was_skipped) == (True, False)
    assert first.tolist() == [1.0, 1.0]
    assert second.tolist() == [0.5, 0.5]
    assert scale_of(accel) == 32768.0


def test_hooks_see_unscaled_gradients_before_the_step():
    seen = []

    class Look(Callback):
        def on_before_optimizer_step(self, run, model, optimizer):
            seen.append(optimizer.param_groups[0]["params"][0].grad.clone())

    accel, weight, optimizer = fp16(Look())
    accel.backward((weight * 3).sum())
    optimizer.step()
    assert seen[0].tolist() == [3.0, 3.0]
    assert weight.tolist() == [-0.5, -0.5]


def test_a_step_that_the_loop_leaves_out_after_clipping_does_not_spoil_the_next():
    accel, weight, optimizer = fp16()
    accel.backward((weight * 100).sum())
    assert accel.clip_grad_norm_([weight], 1.0) > 10
    optimizer.zero_grad()  # the norm is too large: this batch is left out
    accel.backward(weight.sum())
    norm = accel.clip_grad_norm_([weight], 1e9)
    torch.testing.assert_close(norm, torch.tensor(2.0).sqrt())
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


class Skips(Callback):
    def on_before_optimizer_step(self, run, model, optimizer):
        run.skip_step("not this one")


def test_an_overflow_in_a_step_that_a_callback_skips_lowers_the_scale_too():
    accel, weight, optimizer = fp16(Skips())
    accel.backward((weight * HUGE).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert accel.optimizer_step_was_skipped
    assert weight.tolist() == [1.0, 1.0]
    assert scale_of(accel) == 32768.0


def test_a_step_without_gradients_is_allowed():
    accel, weight, optimizer = fp16()
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    assert not accel.optimizer_step_was_skipped


def test_the_loss_scale_goes_through_a_checkpoint(tmp_path):
    accel, weight, optimizer = fp16()
    accel.backward((weight * HUGE).sum())
    optimizer.step()
    accel.save_state(tmp_path / "c")
    fresh, weight, optimizer = fp16()
    fresh.load_state(tmp_path / "c")
    assert scale_of(fresh) == 32768.0
    fresh.backward(weight.sum())
    assert weight.grad.tolist() == [32768.0] * 2


def test_going_back_to_a_checkpoint_gives_its_loss_scale_whatever_came_after(tmp_path):
    accel, weight, optimizer = fp16()
    accel.backward(weight.sum())
    optimizer.step()
    saved = accel.precision.state_dict()
    accel.save_state(tmp_path / "c")
    accel.backward((weight * HUGE).sum())
    optimizer.step()  # an overflow that must not halve the scale of the checkpoint
    accel.load_state(tmp_path / "c")
    assert accel.precision.state_dict() == saved


@pytest.mark.parametrize("prepared", [True, False], ids=["optimizer", "bare optimizer"])
def test_a_checkpoint_loaded_between_clipping_and_the_step_does_not_spoil_the_next(
    tmp_path, prepared
):
    accel, weight, optimizer = fp16()
    accel.save_state(tmp_path / "c")
    accel.backward((weight * 100).sum())
    assert accel.clip_grad_norm_([weight], 1.0) > 10
    accel.load_state(tmp_path / "c")  # the norm is too large: the program goes back
    (optimizer if prepared else optimizer.optimizer).zero_grad()
    accel.backward(weight.sum())
    norm = accel.clip_grad_norm_([weight], 1e9)
    torch.testing.assert_close(norm, torch.tensor(2.0).sqrt())
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


def test_a_closure_with_a_loss_scale_is_refused_with_a_reason():
    accel, weight, optimizer = fp16()

    def closure() -> torch.Tensor:
        loss = weight.sum()
        accel.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        optimizer.step(closure)
    assert weight.tolist() == [1.0, 1.0]


def test_an_accelerator_of_another_precision_prepares_the_same_model_in_its_own():
    model = Nested()
    Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    again = Accelerator(cpu=True, mixed_precision="fp16").prepare(model)
    again(torch.ones(1, 2))
    assert model.seen is torch.float16


def test_a_checkpoint_without_a_loss_scale_leaves_the_first_one(tmp_path):
    accel = Accelerator(cpu=True, mixed_precision="bf16")
    model = accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(tmp_path / "c")
    other = Accelerator(cpu=True, mixed_precision="fp16")
    other.prepare(model)
    other.load_state(tmp_path / "c")
    assert scale_of(other) == 65536.0


@pytest.mark.parametrize("name", LOW)
def test_a_device_that_cannot_is_refused_at_once(name):
    with pytest.raises(ValueError, match=f"'{name}' does not work on meta"):
        create_precision(name, torch.device("meta"))
