"""fp16 with a fused optimizer: nothing reads the device in a step, and all counts stay exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from accel_callbacks.host_copy import HostCopy
from accel_callbacks.precision.base import StepFinding
from tests.support.contract import host_syncs

HUGE = 1e36  # times the initial scale it is infinite in fp32
FACTORS = [1.0, HUGE, 1.0, 1.0, HUGE, HUGE, 1.0]
COUNTS = [1, 1, 2, 3, 3, 3, 4]


def fp16(*callbacks: Callback, fused: bool = True):
    accel = Accelerator(cpu=True, mixed_precision="fp16", callbacks=callbacks)
    weight = torch.nn.Parameter(torch.ones(2))
    accel.register_for_checkpointing(torch.nn.ParameterList([weight]))
    return accel, weight, accel.prepare(torch.optim.AdamW([weight], lr=0.5, fused=fused))


def step(accel, weight, optimizer, factor: float) -> None:
    accel.backward((weight * factor).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_a_fused_step_reads_nothing_until_somebody_asks():
    accel, weight, optimizer = fp16()
    for _ in range(3):
        step(accel, weight, optimizer, 1.0)
    with host_syncs() as found:
        accel.backward((weight * HUGE).sum())
        optimizer.step()
        optimizer.zero_grad()
        # One reading: that of the step before, which the device is done with.
        assert len(found) <= 1
        before = len(found)
        assert optimizer.step_was_skipped
        assert len(found) == before + 1
        assert optimizer.step_was_skipped  # known by now
        assert len(found) == before + 1
    assert accel.current_run.global_step == 3


def test_the_finding_of_a_step_is_read_after_the_next_one_is_queued(monkeypatch):
    order = []
    init, read = HostCopy.__init__, HostCopy.read

    def made(self, tensor):
        order.append(f"made {sum(one.startswith('made') for one in order)}")
        self.number = order[-1].split()[1]
        init(self, tensor)

    def asked(self):
        order.append(f"read {self.number}")
        return read(self)

    monkeypatch.setattr(HostCopy, "__init__", made)
    monkeypatch.setattr(HostCopy, "read", asked)
    accel, weight, optimizer = fp16()
    for _ in range(3):
        step(accel, weight, optimizer, 1.0)
    assert order == ["made 0", "made 1", "read 0", "made 2", "read 1"]
    assert accel.current_run.global_step == 3
    assert order[-1] == "read 2"


@pytest.mark.parametrize("fused", [True, False])
def test_counts_and_weights_are_those_of_torch(fused):
    accel, weight, optimizer = fp16(fused=fused)
    plain = torch.nn.Parameter(torch.ones(2))
    other = torch.optim.AdamW([plain], lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    for factor, count in zip(FACTORS, COUNTS, strict=True):
        step(accel, weight, optimizer, factor)
        scaler.scale((plain * factor).sum()).backward()
        scaler.step(other)
        scaler.update()
        other.zero_grad()
        assert torch.equal(weight, plain)
        assert optimizer.step_was_skipped is (factor == HUGE)
        assert accel.current_run.global_step == count
    assert accel.precision.state_dict() == scaler.state_dict()


def test_steps_that_nobody_asked_about_are_counted_in_the_end():
    accel, weight, optimizer = fp16()
    for factor in FACTORS:
        step(accel, weight, optimizer, factor)
    assert accel.current_run.global_step == COUNTS[-1]


def test_a_scheduler_moves_with_the_steps_that_were_taken():
    accel, weight, optimizer = fp16()
    scheduler = accel.prepare(StepLR(optimizer.optimizer, 1, 0.5))
    for factor in FACTORS:
        step(accel, weight, optimizer, factor)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5 * 0.5 ** COUNTS[-1]]


def test_a_callback_hears_of_steps_that_were_taken_only():
    class Heard(Callback):
        steps: list[int] = []  # noqa: RUF012

        def on_after_optimizer_step(self, run, model, optimizer):
            self.steps.append(run.global_step)

    heard = Heard()
    heard.steps = []
    accel, weight, optimizer = fp16(heard)
    for factor in FACTORS:
        step(accel, weight, optimizer, factor)
    assert heard.steps == [1, 2, 3, 4]


def test_optimizers_that_take_turns_in_a_batch_count_as_one_step():
    accel = Accelerator(cpu=True, mixed_precision="fp16")
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    made = [torch.optim.AdamW([weight], lr=0.5, fused=True) for weight in weights]
    *optimizers, loader = accel.prepare(*made, DataLoader(torch.ones(4, 1), 1))
    # In each batch, which of the two overflow: a step counts if one of them was taken.
    overflows = [(False, False), (True, False), (False, True), (True, True)]
    for _, pair in zip(loader, overflows, strict=True):
        for weight, optimizer, overflow in zip(weights, optimizers, pair, strict=True):
            step(accel, weight, optimizer, HUGE if overflow else 1.0)
    assert accel.current_run.global_step == 3


def test_a_saved_run_has_all_its_steps_and_an_end_settles_them(tmp_path):
    accel, weight, optimizer = fp16()
    with accel.run("findings") as run:
        for factor in FACTORS[:4]:
            step(accel, weight, optimizer, factor)
        accel.save_state(str(tmp_path / "saved"))
        step(accel, weight, optimizer, FACTORS[4])
    assert run.global_step == 3
    again, weight, optimizer = fp16()
    step(again, weight, optimizer, 1.0)  # not counted yet, and overwritten
    again.load_state(str(tmp_path / "saved"))
    assert again.current_run.global_step == 3


class Fails(Callback):
    """Writes down the step at which a run failed."""

    step: int | None = None

    def on_exception(self, run, model, exception):
        self.step = run.global_step


def failing(monkeypatch, **findings) -> Fails:
    """A run that fails after some steps, whose findings have these attributes."""
    fails = Fails()
    accel, weight, optimizer = fp16(fails)

    def train() -> None:
        with accel.run("fails"):
            for factor in FACTORS[:4]:
                step(accel, weight, optimizer, factor)
            for name, value in findings.items():
                monkeypatch.setattr(StepFinding, name, value)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert accel.loop.run.settle_steps is None
    return fails


def test_an_error_counts_the_steps_before_it(monkeypatch):
    assert failing(monkeypatch).step == 3


def test_an_error_of_the_device_hides_no_other_and_stops_no_hook(monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA error: device-side assert triggered")

    # Without the last step, of which nobody knows.
    assert failing(monkeypatch, stepped=property(broken)).step == 2


def test_a_device_that_hangs_holds_no_failing_run(monkeypatch):
    monkeypatch.setattr("accel_callbacks.loop.step_state._PATIENCE", 0.05)

    def hangs(self):
        raise AssertionError("this would wait for ever")

    found = failing(monkeypatch, is_ready=property(lambda self: False), stepped=property(hangs))
    assert found.step == 2


def test_a_prepared_optimizer_is_copied_with_its_finding():
    accel, weight, optimizer = fp16()
    step(accel, weight, optimizer, HUGE)
    for same in (copy.copy(optimizer), copy.deepcopy(optimizer)):
        assert same.outcome is False
        assert same.step_was_skipped


def test_a_host_copy_keeps_the_values_of_its_moment():
    values = torch.tensor([1.0, 2.0])
    kept = HostCopy(values)
    values.zero_()
    assert kept.read().tolist() == [1.0, 2.0]
    assert kept.read().tolist() == [1.0, 2.0]


class Device:
    """Stands in for a GPU: copies to pinned memory arrive when their event is waited for."""

    def __init__(self, monkeypatch) -> None:
        self.waited = 0
        device = self
        empty = torch.empty

        class Event:
            def __init__(self, *_args) -> None:
                self.recorded = False

            def record(self) -> None:
                self.recorded = True

            def query(self) -> bool:
                return device.waited > 0

            def synchronize(self) -> None:
                assert self.recorded
                device.waited += 1

        def pinned(*args, pin_memory=False, **kwargs):
            assert pin_memory
            return empty(*args, **kwargs)

        monkeypatch.setattr("accel_callbacks.host_copy._ASYNC_DEVICES", ("cpu",))
        monkeypatch.setattr("accel_callbacks.host_copy.torch.Event", Event)
        monkeypatch.setattr("accel_callbacks.host_copy.torch.empty", pinned)


def test_a_copy_of_a_gpu_is_waited_for_once_and_only_when_read(monkeypatch):
    with monkeypatch.context() as patch:
        device = Device(patch)
        kept = HostCopy(torch.tensor([3.0]))
        assert device.waited == 0
        assert not kept.is_ready
        assert kept.read().tolist() == [3.0]
        assert kept.read().tolist() == [3.0]
        assert device.waited == 1
        assert kept.is_ready
