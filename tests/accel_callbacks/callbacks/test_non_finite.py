"""NonFinite in real loops: what is found, what follows, and that a checkpoint stays clean."""

from __future__ import annotations

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, Freeze, NonFinite, freeze
from accel_callbacks.callbacks.non_finite import FiniteCheck

NAN = float("nan")
BATCHES = 8


@pytest.fixture(params=[False, True], ids=["at once", "one step later"])
def late(request, monkeypatch):
    """Both ways: what the CPU does, and what a device does whose results arrive later."""
    monkeypatch.setattr(FiniteCheck, "waits", property(lambda self: request.param))
    return request.param


class Setup:
    """Trains on numbers, some of which are bad."""

    def __init__(self, *callbacks, bad=(), value=NAN, epochs=1, lr=0.01, **options) -> None:
        self.accel = Accelerator(cpu=True, callbacks=callbacks, **options)
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        data = torch.linspace(0.5, 1.5, BATCHES).reshape(-1, 1)
        for index in bad:
            data[index] = value
        self.epochs = epochs
        optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        self.model, self.optimizer, self.data, self.scheduler = self.accel.prepare(
            self.net, optimizer, torch.utils.data.DataLoader(data), self.scheduler
        )
        self.seen: list[float] = []

    def train(self, clip=True):
        with self.accel.run("bad") as run:
            for _ in run.epochs(self.epochs):
                for batch in self.data:
                    with self.accel.accumulate(self.model):
                        self.seen.append(batch.item())
                        self.accel.backward(self.model(batch).square().mean())
                        if clip:
                            self.accel.clip_grad_norm_(self.model.parameters(), 1.0)
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
        return run

    @property
    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.net.parameters())


# --- raise and warn -----------------------------------------------------------------------------


def test_an_error_says_where_and_what(late):
    setup = Setup(NonFinite(), bad=[3])
    with pytest.raises(FloatingPointError) as error:
        setup.train()
    assert str(error.value).startswith("step 4: the loss is nan, and the gradients of '0.weight'")
    assert "'0.bias'" in str(error.value)
    assert "1 more" in str(error.value)
    assert setup.finite == (not late)  # on the CPU it is known before the step


def test_the_last_step_is_known_before_the_run_ends(late):
    setup = Setup(NonFinite(), bad=[BATCHES - 1])
    with pytest.raises(FloatingPointError, match=f"step {BATCHES}: "):
        setup.train()


def test_a_bad_step_is_not_saved(late, tmp_path):
    """Known late or not: no checkpoint holds weights that are not finite."""
    saver = Checkpoint(tmp_path, every_n_steps=1)
    setup = Setup(NonFinite(), saver, bad=[4])
    with pytest.raises(FloatingPointError):
        setup.train()
    infos = checkpoint_io.CheckpointFolder(tmp_path).list()
    assert infos[-1].name == "step-00000004"
    weights = checkpoint_io.load(infos[-1].path).state["models"]["0"]
    assert all(bool(value.isfinite().all()) for value in weights.values())


def test_a_save_by_hand_is_refused_after_a_bad_step(late, tmp_path):
    setup = Setup(NonFinite(), bad=[0])

    def train_and_save() -> None:
        for batch in setup.data:
            setup.accel.backward(setup.model(batch).mean())
            setup.optimizer.step()
            setup.accel.save_state(tmp_path / "c")

    with setup.accel.run("hand"), pytest.raises(FloatingPointError):
        train_and_save()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_the_text_of_a_bad_loss_has_its_value(value):
    check = FiniteCheck(3, torch.tensor(value), None)
    assert check.is_bad()
    assert check.describe({}) == f"step 3: the loss is {value}"


def test_only_gradients_may_be_bad():
    """The loss of sqrt at 0 is 0, its slope is not finite; the layer behind it is fine."""

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1, bias=False)
            self.outer = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(self.inner.weight)

        def forward(self, batch):
            return self.outer(self.inner(batch).abs().sqrt())

    for check, raises in ((("gradients",), True), ("loss", False)):
        accel = Accelerator(cpu=True, callbacks=[NonFinite(check)])
        net = Root()
        model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accel.backward(model(torch.zeros(1, 1)).sum() + model.inner(torch.zeros(1, 1)).sum())
        assert not net.inner.weight.grad.isfinite().all()
        if raises:
            with pytest.raises(
                FloatingPointError, match=r"step 1: the gradients of 'inner.weight' "
            ):
                optimizer.step()
        else:
            optimizer.step()


def test_huge_gradients_are_finite():
    """The square of 1e30 is infinite in float32."""
    weight = torch.nn.Parameter(torch.zeros(2))
    accel = Accelerator(cpu=True, callbacks=[NonFinite("gradients")])
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.1))
    accel.backward((weight * 1e30).sum())
    optimizer.step()
    accel.backward((weight * torch.inf).sum())
    with pytest.raises(FloatingPointError, match="a parameter of no prepared model"):
        optimizer.step()


def test_one_bad_micro_batch_of_a_window_is_found():
    setup = Setup(NonFinite("loss"), bad=[4], gradient_accumulation_steps=4)
    with pytest.raises(FloatingPointError, match="step 2: the loss is nan"):
        setup.train()


def test_a_warning_goes_on_until_patience_is_over(late):
    watch = NonFinite(action="warn", patience=2, check="loss")
    setup = Setup(watch, bad=[5, 6, 7])
    ended = pytest.raises(FloatingPointError, match="3 steps in a row")
    with pytest.warns(UserWarning, match="loss") as told, ended:
        setup.train()
    texts = [str(one.message) for one in told if "loss" in str(one.message)]
    assert [text.split(":")[0] for text in texts] == ["step 6", "step 7"]


def test_intervals_still_find_what_stays_bad():
    """A NaN in the weights stays there, so a look now and then is enough to find it."""
    setup = Setup(NonFinite(every_n_steps=3), bad=[3])
    with pytest.raises(FloatingPointError, match="step 6: "):
        setup.train()


def test_a_batch_that_was_given_up_does_not_count(late):
    setup = Setup(NonFinite())
    with setup.accel.run("given up"):
        setup.accel.backward(setup.model(torch.full((1, 1), NAN)).mean())
        setup.optimizer.zero_grad()
        for _ in range(2):
            step(setup, torch.ones(1, 1))


# --- skip ---------------------------------------------------------------------------------------


def test_bad_steps_are_left_out(late):
    watch = NonFinite(action="skip")
    setup = Setup(watch, bad=[2, 5])
    run = setup.train()
    clean = Setup()
    for index, batch in enumerate(clean.data):
        if index not in (2, 5):
            clean.accel.backward(clean.model(batch).square().mean())
            clean.accel.clip_grad_norm_(clean.model.parameters(), 1.0)
            clean.optimizer.step()
            clean.scheduler.step()
            clean.optimizer.zero_grad()
    clean.accel.end_training()
    assert run.global_step == BATCHES - 2
    assert watch.bad_steps == 2
    assert watch.in_a_row == 0
    assert torch.equal(setup.net[0].weight, clean.net[0].weight)
    assert setup.scheduler.get_last_lr() == clean.scheduler.get_last_lr()


def test_a_bad_loss_is_that_of_all_optimizers_that_step_with_it():
    accel = Accelerator(cpu=True, callbacks=[NonFinite("loss", "skip", every_n_steps=2)])
    nets = [torch.nn.Linear(1, 1) for _ in range(2)]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    *models, first, second = accel.prepare(*nets, *sgds)
    for value in (1.0, NAN, 1.0):
        accel.backward(sum(model(torch.full((1, 1), value)).sum() for model in models))
        first.step()
        second.step()
        assert (first.step_was_skipped, second.step_was_skipped) == (value != 1, value != 1)
        first.zero_grad()
        second.zero_grad()
    assert accel.current_run.global_step == 2
    assert all(p.isfinite().all() for net in nets for p in net.parameters())


def test_too_many_in_a_row_end_the_run():
    setup = Setup(NonFinite(action="skip", patience=1), bad=[3, 4])
    with pytest.raises(FloatingPointError, match=r"step 4: .* 2 steps in a row"):
        setup.train()
    assert setup.finite
    Setup(NonFinite(action="skip", patience=None), bad=range(BATCHES)).train()


def test_counts_survive_a_resume_and_not_a_second_run(tmp_path):
    watch = NonFinite(action="skip")
    Setup(watch, Checkpoint(tmp_path), bad=[6, 7]).train()
    again = NonFinite(action="skip", patience=2)
    setup = Setup(again, Checkpoint(tmp_path), bad=[0], epochs=2)
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        setup.train()
    with setup.accel.run("fresh", resume=False):
        assert (again.bad_steps, again.in_a_row) == (0, 0)


# --- fp16 ---------------------------------------------------------------------------------------


class Scales(Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_before_optimizer_step(self, run, model, optimizer):
        self.scales.append(run.accelerator.scaler.get_scale())


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_overflows_are_left_to_the_scaler(action):
    """The scale falls from 65536 until the gradients fit."""
    watch = NonFinite(action=action, patience=0)
    setup = Setup(watch, mixed_precision="fp16")
    for batch in setup.data:
        setup.accel.backward(setup.model(batch).float().sum() * 1e35)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    assert setup.optimizer.step_was_skipped  # in each of these steps
    assert watch.bad_steps == 0
    setup.accel.end_training()


def test_what_no_scale_helps_is_found():
    """Below a scale of 1 it is no overflow: the gradients are bad themselves."""
    scales = Scales()
    setup = Setup(NonFinite("gradients"), scales, mixed_precision="fp16")

    def train() -> None:
        for batch in [*setup.data] * 5:
            setup.accel.backward(setup.model(batch).float().sum() * torch.inf)
            setup.optimizer.step()
            setup.optimizer.zero_grad()

    with pytest.raises(FloatingPointError, match="the gradients of"):
        train()
    assert scales.scales[-1] > 1
    assert len(scales.scales) == 16


def test_a_loss_that_is_bad_is_no_overflow():
    setup = Setup(NonFinite("loss"), mixed_precision="fp16", bad=[2])
    with pytest.raises(FloatingPointError, match="step 3: the loss is nan"):
        setup.train()


# --- rollback -----------------------------------------------------------------------------------


def test_a_rollback_takes_weights_back_and_leaves_the_bad_batches_behind(late, tmp_path, capsys):
    watch, ema = NonFinite(action="rollback"), EMA(0.5)
    setup = Setup(ema, watch, Checkpoint(tmp_path, every_n_steps=2), bad=[4])
    run = setup.train()
    assert len(setup.seen) == BATCHES
    assert setup.finite
    assert watch.rollbacks == 1
    assert watch.bad_steps == 1
    assert run.global_step == BATCHES - 1  # its step is left out, or the next one
    notice = capsys.readouterr().err
    assert "step 5: the loss is nan" in notice
    assert "rollback 1 of at most 3" in notice
    assert "step-00000004" in notice
    assert ema.state_dict()["average"]["0.0.weight"].isfinite().all()
    last = setup.optimizer.param_groups[0]["lr"]
    assert last == pytest.approx(0.01 * 0.9**run.global_step)  # schedules do not go back
    for info in checkpoint_io.CheckpointFolder(tmp_path).list():
        weights = checkpoint_io.load(info.path).state["models"]["0"]
        assert all(bool(value.isfinite().all()) for value in weights.values()), info.name


def test_a_rollback_restores_exactly_what_was_saved(tmp_path):
    """The moments of the optimizer too, so that the same batches lead to the same weights."""
    watch = NonFinite(action="rollback")
    setup = Setup(watch, Checkpoint(tmp_path, every_n_steps=100), bad=[0])
    with setup.accel.run("exact") as run:
        setup.optimizer.zero_grad()
        good = list(setup.data.origin)[1:4]
        for batch in good:
            step(setup, batch)
        run.accelerator.loop.dispatch.savers[0].save_now(run, "test")
        for batch in good:
            step(setup, batch)
        expected = setup.net[0].weight.detach().clone()
        step(setup, torch.full((1, 1), NAN))  # without a prepared loader: at zero_grad
        assert watch.rollbacks == 1
        for batch in good:
            step(setup, batch)
        assert torch.equal(setup.net[0].weight, expected)
        assert run.global_step == 9


def step(setup: Setup, batch: torch.Tensor) -> None:
    setup.accel.backward(setup.model(batch).square().mean())
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def test_rollbacks_are_counted(late, tmp_path):
    watch = NonFinite(action="rollback", max_rollbacks=2)
    bad = [2, 4, 6] if late else [2, 4, 5]
    setup = Setup(watch, Checkpoint(tmp_path, every_n_steps=1), bad=bad)
    with pytest.raises(FloatingPointError, match="after 2 rollbacks"):
        setup.train()
    assert watch.rollbacks == 2


def test_a_checkpoint_that_was_saved_too_late_is_passed_over(monkeypatch, tmp_path):
    """A save that nobody foresaw can be under way before the step before it is judged."""
    monkeypatch.setattr(FiniteCheck, "waits", property(lambda self: True))
    watch = NonFinite(action="rollback")

    class Saves(Callback):
        def on_before_zero_grad(self, run, model, optimizer):
            run.save_now("after each step")

    setup = Setup(watch, Checkpoint(tmp_path, keep_last=None), Saves(), bad=[3])
    setup.train()
    assert watch.rollbacks == 1
    assert setup.finite
    poisoned = [
        info.manifest.metadata["step"]
        for info in checkpoint_io.CheckpointFolder(tmp_path).list()
        if not checkpoint_io.load(info.path).state["models"]["0"]["0.weight"].isfinite().all()
    ]
    assert poisoned == [4]


def test_nothing_to_go_back_to(tmp_path):
    setup = Setup(NonFinite(action="rollback"), Checkpoint(tmp_path), bad=[1])
    with pytest.raises(FloatingPointError, match="no earlier checkpoint"):
        setup.train()
    with pytest.raises(ValueError, match="Checkpoint callback"):
        Setup(NonFinite(action="rollback")).train()


# --- options ------------------------------------------------------------------------------------


def test_frozen_parameters_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(freeze, "_can_change_requires_grad", lambda run: False)  # as under DDP
    setup = Setup(NonFinite("gradients"), Freeze({"0.*": None}))
    torch.nn.init.constant_(setup.net[1].weight, torch.finfo().max)
    torch.nn.init.constant_(setup.net[0].bias, 0.0)
    with setup.accel.run("frozen"):
        setup.accel.backward(setup.model(torch.full((1, 1), 1e30)).sum() * 1e10)
        assert setup.net[0].weight.grad is None
        setup.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": "weights"}, "check="),
        ({"check": ()}, "check="),
        ({"action": "rolback"}, "Did you mean 'rollback'"),
        ({"patience": -1}, "patience"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"max_rollbacks": 0}, "max_rollbacks"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        NonFinite(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    accel = Accelerator(callbacks=[NonFinite(), EMA(0.5)])
    net = torch.nn.Linear(8, 8)
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.ones(4, 8, device=accel.device)
    for step_number in range(4):
        torch.cuda.set_sync_debug_mode("error" if step_number else "default")
        try:
            accel.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    accel.backward(model(batch * torch.nan).mean())
    optimizer.step()
    optimizer.zero_grad()
    accel.backward(model(batch).mean())
    with pytest.raises(FloatingPointError, match="step 5: the loss is nan"):
        optimizer.step()
