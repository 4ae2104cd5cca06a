"""The gradient window: however the data is cut, the step is that of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from accel_callbacks import Accelerator, Callback
from accel_callbacks.loop.gradient_window import GradientWindow


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def target(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.sum(dim=1, keepdim=True)


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 1)


class Stream(torch.utils.data.IterableDataset):
    """A dataset that does not know its length."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Recorder(Callback):
    """Notes the gradients of each real step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_before_optimizer_step(self, run, model, optimizer):
        self.gradients.append(model.weight.grad.clone())


def weights_by_windows(windows: list[torch.Tensor], lr: float = 0.05) -> torch.Tensor:
    """What plain torch gives with one step for each of these whole batches."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs in windows:
        mse_loss(model(inputs), target(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def prepared(accel: Accelerator, data, batch_size: int, lr: float = 0.05):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = torch.utils.data.DataLoader(data, batch_size)
    return accel.prepare(model, optimizer, loader)


def train(accel: Accelerator, model, optimizer, loader, clip: float | None = None) -> torch.Tensor:
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            if clip is not None:
                accel.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


def test_a_window_is_one_micro_batch_unless_told_otherwise():
    window = GradientWindow()
    window.enter(remaining=None)
    assert (window.num_steps, window.divisor, window.sync) == (1, 1, True)
    loss = window.normalizer.add(torch.tensor(4.0), 2)
    assert loss * window.normalizer.factor() == 2.0


@pytest.mark.parametrize(("size", "window"), [(24, 1), (12, 2), (8, 3), (4, 6), (1, 24)])
def test_any_split_of_a_batch_into_micro_batches_gives_the_step_of_the_whole(size, window):
    rows = samples(48)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=window)
    weight = train(accel, *prepared(accel, rows, size))
    assert accel.current_run.global_step == 2
    torch.testing.assert_close(
        weight, weights_by_windows([rows[:24], rows[24:]]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("clip", [None, 1e9], ids=["plain", "clipped"])
@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
@pytest.mark.parametrize("recorded", [True, False], ids=["with a hook", "without hooks"])
def test_six_micro_batches_with_a_window_of_four(clip, known, recorded):
    rows = samples(12)
    accel = Accelerator(
        cpu=True, gradient_accumulation_steps=4, callbacks=[Recorder()] if recorded else []
    )
    weight = train(accel, *prepared(accel, rows if known else Stream(rows), 2), clip)
    assert accel.current_run.global_step == 2
    torch.testing.assert_close(weight, weights_by_windows([rows[:8], rows[8:]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("clip", [None, 1e9], ids=["plain", "clipped"])
def test_a_short_fp16_window_of_unknown_length_is_corrected_once(clip):
    rows = samples(12)
    recorder = Recorder()
    accel = Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=4, callbacks=[recorder]
    )
    # The first scale of 65536 would overflow these gradients, and the steps be skipped.
    accel.precision.load_state_dict({**accel.precision.state_dict(), "scale": 64.0})
    train(accel, *prepared(accel, Stream(rows), 2, lr=0.0), clip)
    assert accel.current_run.global_step == 2
    model = linear()
    for inputs, gradient in zip((rows[:8], rows[8:]), recorder.gradients, strict=True):
        model.zero_grad()
        mse_loss(model(inputs), target(inputs)).backward()
        torch.testing.assert_close(gradient, model.weight.grad, rtol=0.02, atol=0.02)


def test_clipping_sees_the_corrected_norm_of_a_short_window():
    rows = samples(12)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, Stream(rows), 2)
    norms = []
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            norms.append(accel.clip_grad_norm_(model.parameters(), 1e9))
            optimizer.zero_grad()
    expected = linear()
    mse_loss(expected(rows[8:]), target(rows[8:])).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
    assert norms[:3] == [None] * 3
    assert norms[4] is None
    torch.testing.assert_close(norms[5], norm)


def test_a_short_window_passes_by_an_optimizer_without_gradients():
    rows = samples(2)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, Stream(rows), 1)
    idle = accel.prepare(torch.optim.SGD(accel.prepare(torch.nn.Linear(1, 1)).parameters(), 0.1))
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            for one in (idle, optimizer):
                one.step()
                one.zero_grad()
    torch.testing.assert_close(model.weight.detach(), weights_by_windows([rows]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_is_divided_by_the_window_whatever_its_shape(shape):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.ones(1))
    for factor in (3, 5):
        with accel.accumulate():
            accel.backward((weight * factor).reshape(shape))
    assert weight.grad.tolist() == [4.0]


def test_clipping_by_value_does_nothing_inside_of_a_window():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.ones(1))
    for expected in (5.0, 0.5):
        with accel.accumulate():
            accel.backward((weight * 10).sum())
            accel.clip_grad_value_(weight, 0.5)
        assert weight.grad.item() == expected


def test_every_epoch_begins_a_new_window():
    rows = samples(6)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, rows, 1)
    for _ in range(2):
        train(accel, model, optimizer, loader)
    assert accel.current_run.global_step == 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_break_ends_the_window():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, samples(8), 1)
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(model(inputs).sum())
        break
    assert accel.sync_gradients
    optimizer.zero_grad()
    assert model.weight.grad is None
    signs = []
    for _ in loader:
        with accel.accumulate(model):
            signs.append(accel.sync_gradients)
    assert signs == [False, False, False, True] * 2


def test_gradients_of_a_window_that_was_broken_off_are_not_in_the_next_step():
    rows = samples(8)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, rows, 2)
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)) * 100)
        break
    weight = train(accel, model, optimizer, loader)
    torch.testing.assert_close(weight, weights_by_windows([rows]), atol=1e-6, rtol=0)


def test_an_error_inside_a_window_ends_it_and_the_next_one_is_whole():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _ = prepared(accel, samples(8), 1)

    def fail() -> None:
        with accel.accumulate(model):
            accel.backward(model(samples(1)).sum())
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fail()
    optimizer.zero_grad()
    assert model.weight.grad is None
    signs = []
    for _ in range(4):
        with accel.accumulate(model):
            signs.append(accel.sync_gradients)
    assert signs == [False, True, False, True]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_block_inside_of_a_block_adds_no_micro_batch(steps):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = prepared(accel, samples(6), 1)
    block, signs = accel.accumulate(model), []
    for inputs in loader:
        with accel.accumulate(model), accel.accumulate(), block, block:
            accel.backward(model(inputs).sum())
            with accel.accumulate(model):
                optimizer.step()
            signs.append(accel.sync_gradients)
            optimizer.zero_grad()
    assert signs == ([False] * (steps - 1) + [True]) * (6 // steps)
    assert accel.current_run.global_step == 6 // steps


@pytest.mark.parametrize("steps", [1, 2])
def test_an_error_inside_of_both_blocks_ends_the_window(steps):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, _, _ = prepared(accel, samples(8), 1)

    def fail() -> None:
        with accel.accumulate(model), accel.accumulate(model):
            accel.backward(model(samples(1)).sum())
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fail()
    signs = []
    for _ in range(2 * steps):
        with accel.accumulate(model), accel.accumulate(model):
            signs.append(accel.sync_gradients)
    assert signs == ([False] * (steps - 1) + [True]) * 2


def test_an_evaluation_in_the_middle_of_a_window_leaves_it_alone():
    rows = samples(8)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, rows, 2)
    check = accel.prepare(torch.utils.data.DataLoader(rows, 3))
    for inputs in loader:
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            optimizer.step()
            optimizer.zero_grad()
        with accel.evaluate(model):
            for batch in check:
                model(batch)
    torch.testing.assert_close(model.weight.detach(), weights_by_windows([rows]), atol=1e-6, rtol=0)


def test_accumulate_without_a_prepared_loader_counts_by_itself():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=3)
    signs = []
    for _ in range(7):
        with accel.accumulate():
            signs.append(accel.sync_gradients)
    assert signs == [False, False, True] * 2 + [False]


def test_the_number_of_steps_can_be_changed_between_windows():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(1))

    def gradient(micro_batches: int) -> float:
        weight.grad = None
        for _ in range(micro_batches):
            with accel.accumulate():
                accel.backward(weight.sum())
        assert accel.sync_gradients
        return weight.grad.item()

    assert gradient(2) == 1.0
    accel.gradient_accumulation_steps = 4
    assert accel.gradient_accumulation_steps == 4
    assert gradient(4) == 1.0
    accel.gradient_accumulation_steps = 1
    assert gradient(1) == 1.0


def test_a_change_in_the_middle_of_a_window_holds_from_the_next_one():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    signs = []
    for index in range(6):
        with accel.accumulate():
            if index == 0:
                accel.gradient_accumulation_steps = 4
            signs.append(accel.sync_gradients)
    assert signs == [False, True, False, False, False, True]


@pytest.mark.parametrize("value", [0, -1])
def test_a_window_of_no_micro_batches_is_refused(value):
    with pytest.raises(ValueError, match="at least 1"):
        Accelerator(cpu=True, gradient_accumulation_steps=value)
    accel = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="at least 1"):
        accel.gradient_accumulation_steps = value
    assert accel.gradient_accumulation_steps == 1


def test_backward_outside_of_accumulate_divides_for_loops_that_count_themselves():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = torch.nn.Parameter(torch.zeros(1))
    for _ in range(4):
        accel.backward(weight.sum() * 2)
    assert weight.grad.item() == 2.0


def test_several_backward_calls_of_one_micro_batch_add_up():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    for _ in range(2):
        with accel.accumulate():
            accel.backward(weight.sum())
            accel.backward(weight.sum() * 3)
    assert weight.grad.item() == 4.0


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_gradient_argument_is_divided_too(precision):
    accel = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=1.0))
    seed = torch.tensor([1.0, 4.0])
    for _ in range(2):
        with accel.accumulate():
            accel.backward(weight * 2, gradient=seed)
            accel.unscale_gradients() if accel.sync_gradients else None
    assert weight.grad.tolist() == [2.0, 8.0]
    assert seed.tolist() == [1.0, 4.0]
    optimizer.zero_grad()


def test_retain_graph_reaches_the_backward_pass():
    accel = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    loss = (weight * weight).sum()
    accel.backward(loss, retain_graph=True)
    accel.backward(loss)
    assert weight.grad.item() == 4.0


def test_the_step_takes_a_closure_at_the_end_of_a_window_only():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(weight.item())
        optimizer.optimizer.zero_grad()
        loss = (weight * 1.0).sum()
        loss.backward()
        return loss

    results = []
    for _ in range(2):
        with accel.accumulate():
            results.append(optimizer.step(closure))
    assert calls == [1.0]
    assert results == [None, torch.ones(())]
    assert weight.item() == 0.5


def test_zero_grad_at_the_top_of_the_body_does_not_drop_the_window():
    rows = samples(8)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, torch.cat([rows, rows]), 2)
    for inputs in loader:
        with accel.accumulate(model):
            optimizer.zero_grad()
            accel.backward(mse_loss(model(inputs), target(inputs)))
            optimizer.step()
    torch.testing.assert_close(
        model.weight.detach(), weights_by_windows([rows, rows]), atol=1e-6, rtol=0
    )


def test_two_loaders_side_by_side_end_their_window_with_the_shorter():
    rows = samples(6)
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, short = prepared(accel, rows, 1)
    long = accel.prepare(torch.utils.data.DataLoader(samples(8), 1))
    for inputs, _ in zip(short, long, strict=False):
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            optimizer.step()
            optimizer.zero_grad()
    assert accel.current_run.global_step == 2
    torch.testing.assert_close(
        model.weight.detach(), weights_by_windows([rows[:4], rows[4:]]), atol=1e-6, rtol=0
    )


def test_a_loader_that_is_read_to_its_end_within_each_micro_batch_does_not_end_the_window():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = prepared(accel, samples(6), 1)
    memory = accel.prepare(torch.utils.data.DataLoader(samples(2), 1))
    for inputs in loader:
        assert len(list(memory)) == 2
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            optimizer.step()
            optimizer.zero_grad()
    assert accel.current_run.global_step == 2  # a window of four, and one of the two that are left


def test_a_window_over_a_zip_with_a_stream_of_unknown_length():
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accel, samples(6), 2)
    stream = accel.prepare(torch.utils.data.DataLoader(Stream(samples(9)), batch_size=2))
    synced = []
    for inputs, _ in zip(loader, stream, strict=False):
        with accel.accumulate(model):
            accel.backward(mse_loss(model(inputs), target(inputs)))
            optimizer.step()
            optimizer.zero_grad()
            synced.append(accel.sync_gradients)
    assert synced == [False, True, True]
