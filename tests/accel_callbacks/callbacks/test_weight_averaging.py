"""EMA and WeightAveraging in real runs: against torch's AveragedModel, in evaluations, resumed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from accel_callbacks import Accelerator, Callback, ResumeError
from accel_callbacks.callbacks import EMA, Checkpoint, WeightAveraging
from accel_callbacks.callbacks.averaged_weights import Averages


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
    )


def batches(count: int = 6) -> torch.utils.data.DataLoader:
    data = torch.randn(4 * count, 3, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


class Setup:
    def __init__(self, *callbacks, count: int = 6, net=None, **options) -> None:
        self.accel = Accelerator(cpu=True, callbacks=callbacks, **options)
        self.net = network() if net is None else net
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.data = self.accel.prepare(self.net, sgd, batches(count))

    def step(self, batch) -> None:
        self.accel.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, epochs: int = 1, name: str = "run") -> None:
        with self.accel.run(name) as run:
            for _ in run.epochs(epochs):
                for batch in self.data:
                    self.step(batch)


class Follows(Callback):
    """Updates torch's own AveragedModel after the same steps."""

    def __init__(self, averaged: AveragedModel, every: int = 1, start: int = 0) -> None:
        self.averaged, self.every, self.start = averaged, every, start

    def on_after_optimizer_step(self, run, model, optimizer):
        step = run.global_step
        if step >= self.start and (step - self.start) % self.every == 0:
            self.averaged.update_parameters(model)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def alike(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, 0), (3, 2)])
@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_the_average_is_that_of_torch(kind, every, start):
    if kind == "ema":
        callback = EMA(0.8, every, start)
        rule = get_ema_multi_avg_fn(0.8)
    else:
        callback = WeightAveraging(every_n_steps=every, start_step=start)
        rule = get_swa_multi_avg_fn()
    net = network()
    # torch's mean divides whole numbers, and fails with the counter of a BatchNorm.
    theirs = AveragedModel(net, multi_avg_fn=rule, use_buffers=kind == "ema")
    run = Setup(callback, Follows(theirs, every, start), net=net)
    run.train(2)
    with callback.applied():
        ours = values(run.net)
    expected = values(theirs.module)
    assert ours.pop("1.num_batches_tracked") == 12  # a whole number, which is not averaged
    compared = [name for name in ours if kind == "ema" or "running" not in name]
    assert alike({n: ours[n] for n in compared}, {n: expected[n] for n in compared})
    assert not any(torch.equal(ours[n], values(run.net)[n]) for n in ours)


def test_buffers_are_copied_where_that_is_asked_for():
    ema = EMA(0.5, use_buffers="copy")
    run = Setup(ema)
    run.train()
    live = values(run.net)
    with ema.applied():
        averaged = values(run.net)
    assert torch.equal(averaged["1.running_mean"], live["1.running_mean"])
    assert not torch.equal(averaged["0.weight"], live["0.weight"])


def test_warmup_lets_early_weights_go_sooner():
    """The decay of update n is (1 + n) / (10 + n) while that is below the one that was given."""
    ema = EMA(0.999, warmup=True)
    net = torch.nn.Linear(1, 1, bias=False)
    expected, seen = None, []

    class Notes(Callback):
        def on_after_optimizer_step(self, run, model, optimizer):
            seen.append(model.weight.item())

    run = Setup(Notes(), ema, net=net, count=2)
    with run.accel.run("warmup"):
        for _ in range(4):
            run.step(torch.ones(2, 1))
    expected = seen[0]
    for number, value in enumerate(seen[1:], start=1):
        decay = (1 + number) / (10 + number)
        expected = decay * expected + (1 - decay) * value
    with ema.applied():
        assert net.weight.item() == pytest.approx(expected)


def test_epochs_are_averaged_before_their_validation():
    swa = WeightAveraging(start_epoch=1)
    run = Setup(swa)
    ends, evaluated = [], []
    with run.accel.run("swa") as training:
        for epoch in training.epochs(3):
            for number, batch in enumerate(run.data):
                run.step(batch)
                if epoch == 2 and number == 2:
                    break  # this epoch has no last batch
            ends.append(run.net[0].weight.detach().clone())
            with run.accel.evaluate():
                evaluated.append(run.net[0].weight.detach().clone())
    assert torch.equal(evaluated[0], ends[0])  # there is no average yet
    assert torch.equal(evaluated[1], ends[1])  # the mean of one
    with swa.applied():
        assert torch.allclose(run.net[0].weight, (ends[1] + ends[2]) / 2)
    assert swa.updates == 2


# --- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_evaluations_see_the_average_in_place(stage):
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    live = values(run.net)
    pointer = run.net[0].weight.data_ptr()
    with ema.applied():
        average = values(run.net)
    with run.accel.evaluate(run.model, stage=stage):
        assert alike(values(run.net), average)
        assert run.net[0].weight.data_ptr() == pointer
        with run.accel.evaluate(run.model):
            assert alike(values(run.net), average)
        assert alike(values(run.net), average)
    assert alike(values(run.net), live)
    assert run.net[0].weight.data_ptr() == pointer


def test_evaluations_may_leave_the_weights_alone():
    run = Setup(EMA(0.5, evaluate_with_average=False))
    run.train()
    live = values(run.net)
    with run.accel.evaluate(run.model):
        assert alike(values(run.net), live)


def test_a_plain_loop_evaluates_with_the_average():
    ema = EMA(0.5)
    run = Setup(ema)
    for batch in run.data:
        run.step(batch)
    live, inside = values(run.net), []
    run.model.eval()
    for _ in run.data:
        inside.append(values(run.net))
    assert not torch.equal(inside[0]["0.weight"], live["0.weight"])
    assert alike(values(run.net), live)
    run.accel.end_training()


@pytest.mark.parametrize("how", ["caught", "ends the run", "interrupt"])
def test_an_evaluation_that_breaks_off_gives_the_weights_back(how):
    ema = EMA(0.5)
    run = Setup(ema)
    error = KeyboardInterrupt if how == "interrupt" else ValueError
    live = {}

    def evaluate() -> None:
        live.update(values(run.net))
        with run.accel.evaluate(run.model):
            assert not alike(values(run.net), live)
            raise error("broken")

    def train() -> None:
        with run.accel.run("broken") as training:
            for _ in training.epochs(2):
                for number, batch in enumerate(run.data):
                    if number == 3 and not live:
                        try:
                            evaluate()
                        except ValueError:
                            if how != "caught":
                                raise
                            continue
                    if number == 4 and how == "caught":
                        assert live
                        assert alike(values(run.net), live)
                        return
                    run.step(batch)

    if how == "caught":
        train()
    else:
        with pytest.raises(error):
            train()
    assert alike(values(run.net), live)


def test_a_backward_after_a_broken_evaluation_is_told_about():
    """In a loop without a prepared loader nothing says earlier that training goes on."""
    ema = EMA(0.5)
    run = Setup(ema)
    with run.accel.run("hand") as _:
        run.step(torch.randn(4, 3))
        run.step(torch.randn(4, 3))
        live = run.net[0].weight.detach().clone()
        with pytest.raises(ValueError, match="broken"), run.accel.evaluate():
            raise ValueError("broken")
        with pytest.warns(UserWarning, match="averaged weights"):
            run.accel.backward(run.model(torch.randn(4, 3)).mean())
        assert torch.equal(run.net[0].weight, live)


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_an_exchange_that_is_interrupted_loses_nothing(fails_at, monkeypatch):
    """Ctrl-C may come between any two operations."""
    net = network()
    averages = Averages([net], use_buffers=True)
    averages.update(lambda *_: None)
    live = values(net)
    for parameter in net.parameters():
        parameter.data.add_(1.0)
    moved = values(net)
    calls = 0
    copy_, to = torch.Tensor.copy_, torch.Tensor.to

    def interrupt(original):
        def call(*args, **kwargs):
            nonlocal calls
            result = original(*args, **kwargs)
            calls += 1
            if calls == fails_at:
                raise KeyboardInterrupt
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupt(copy_))
        patch.setattr(torch.Tensor, "to", interrupt(to))
        with pytest.raises(KeyboardInterrupt):
            averages.apply()
    assert alike(values(net), moved)
    assert not averages.applied
    averages.apply()
    assert alike(values(net), live)


def test_half_precision_is_averaged_in_full():
    """A decay of 0.999 would never move an average in bfloat16."""
    net = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    averages = Averages([net], use_buffers=True)
    torch.nn.init.constant_(net.weight, 1.0)
    rule = get_ema_multi_avg_fn(0.999)
    averages.update(lambda a, b: rule(a, b, None))
    torch.nn.init.constant_(net.weight, 2.0)
    for _ in range(1000):
        averages.update(lambda a, b: rule(a, b, None))
    assert averages.state()["0.weight"].dtype == torch.float32
    assert averages.state()["0.weight"].item() == pytest.approx(2 - 0.999**1000, abs=1e-3)
    averages.apply()
    assert net.weight.dtype == torch.bfloat16
    assert 1.5 < net.weight.item() < 1.8
    averages.restore()
    assert net.weight.item() == 2.0


def test_tied_weights_are_averaged_once():
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(2, 2, bias=False)
            self.second = torch.nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, batch):
            return self.second(self.first(batch))

    ema = EMA(0.5)
    run = Setup(ema, net=Tied())
    with run.accel.run("tied"):
        for _ in range(2):
            run.step(torch.ones(2, 2))
    assert list(ema.state_dict()["average"]) == ["0.first.weight"]
    live = run.net.first.weight.detach().clone()
    with run.accel.evaluate():
        run.accel.save_state("memory://tied/c")
    run.accel.load_state("memory://tied/c")
    assert torch.equal(run.net.second.weight, live)


def test_optimizers_that_take_turns_are_averaged_in_step():
    """The second of them has not stepped yet when the first one's step is counted."""
    ema = EMA(0.5)
    accel = Accelerator(cpu=True, callbacks=[ema])
    nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    prepared = accel.prepare(
        *nets,
        *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets),
        torch.utils.data.DataLoader(torch.ones(4, 1)),
    )
    models, optimizers, data = prepared[:2], prepared[2:4], prepared[4]
    expected = [None, None]
    with accel.run("turns") as run:
        for batch in data:
            for number in range(2):
                accel.backward(models[number](batch).square().sum())
                optimizers[number].step()
                optimizers[number].zero_grad()
                new = nets[number].weight.item()
                old = expected[number]
                expected[number] = new if old is None else 0.5 * old + 0.5 * new
        assert run.global_step == 4
        assert ema.updates == 4
    with ema.applied():
        assert [net.weight.item() for net in nets] == pytest.approx(expected)


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_of_an_evaluation_holds_weights_and_average():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    live = values(run.net)
    with ema.applied():
        average = values(run.net)
        run.accel.save_state("memory://ema-evaluation/applied")
    with run.accel.evaluate(run.model):
        run.accel.save_state("memory://ema-evaluation/evaluated")
        assert alike(values(run.net), average)
    assert alike(values(run.net), live)
    for place in ("applied", "evaluated"):
        other = EMA(0.5)
        fresh = Setup(other)
        with fresh.accel.run("other", resume=f"memory://ema-evaluation/{place}"):
            assert alike(values(fresh.net), live)
            with other.applied():
                assert alike(values(fresh.net), average)


@pytest.mark.parametrize("kind", [EMA, WeightAveraging])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(kind, by_hand, tmp_path):
    def make(folder: str) -> tuple[Setup, Callback]:
        callback = kind(decay=0.7, every_n_steps=2) if kind is EMA else kind()
        return Setup(callback, Checkpoint(tmp_path / folder, every_n_steps=4)), callback

    def train(run: Setup, stop_at: int | None = None) -> None:
        with run.accel.run("resume") as training:
            for _ in training.epochs(3):
                for batch in run.data:
                    run.step(batch)
                    if training.global_step == stop_at:
                        training.stop("cut")

    whole, expected = make("whole")
    train(whole)
    train(make("cut")[0], stop_at=8)  # in the middle of the second epoch
    resumed, callback = make("cut")
    if by_hand:  # before the callback has seen the model
        resumed.accel.load_state(tmp_path / "cut" / "step-00000008")
    train(resumed)
    assert alike(values(resumed.net), values(whole.net))
    assert callback.updates == expected.updates
    with callback.applied(), expected.applied():
        assert alike(values(resumed.net), values(whole.net))


def test_an_evaluation_after_the_run_still_uses_the_average():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    with ema.applied():
        average = values(run.net)
    for _ in range(2):
        with run.accel.evaluate(stage="test"):
            assert alike(values(run.net), average)
    assert ema.updates == 6


def test_a_second_run_resets_the_state():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    assert ema.updates == 6
    with run.accel.run("second"):
        with pytest.raises(RuntimeError, match="no average yet"), ema.applied():
            pass
        run.step(torch.randn(4, 3))
        assert ema.updates == 1


def test_several_averages_leave_the_weights_and_each_other_alone():
    first, second = EMA(0.5, name="a"), WeightAveraging(every_n_steps=1)
    several = Setup(first, second)
    apart = [Setup(EMA(0.5)), Setup(WeightAveraging(every_n_steps=1)), Setup()]
    for run in (several, *apart):
        with run.accel.run("run"):
            for batch in run.data:
                run.step(batch)
                with run.accel.evaluate(run.model):
                    run.seen = values(run.net)
    assert all(alike(values(several.net), values(run.net)) for run in apart)
    assert alike(several.seen, apart[0].seen)  # the first one that has an average is lent
    for mine, run in zip((first, second), apart, strict=False):
        (theirs,) = run.accel.callbacks
        assert alike(mine.state_dict()["average"], theirs.state_dict()["average"])


def test_steps_without_a_run_around_them_are_averaged_too():
    ema = EMA(0.5)
    run = Setup(ema)
    run.step(torch.randn(4, 3))
    first = values(run.net)
    with ema.applied():
        assert alike(values(run.net), first)
    assert ema.updates == 1


def test_a_model_that_was_frozen_meanwhile_keeps_its_average():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    average = ema.state_dict()["average"]
    run.net.requires_grad_(False)
    with run.accel.evaluate(run.model):
        assert alike(ema.state_dict()["average"], average)


def test_state_survives_a_save_that_comes_before_training():
    first = EMA(0.5)
    run = Setup(first)
    run.train()
    run.accel.save_state("memory://ema-early/one")
    second = EMA(0.5)
    run = Setup(second)
    run.accel.load_state("memory://ema-early/one")
    run.accel.save_state("memory://ema-early/two")
    third = EMA(0.5)
    run = Setup(third)
    with run.accel.run("third", resume="memory://ema-early/two"):
        assert third.updates == 6
        assert alike(third.state_dict()["average"], first.state_dict()["average"])


def test_loading_restores_in_place_and_checks_names():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    state = copy.deepcopy(ema.state_dict())
    held = ema.state_dict()["average"]["0.0.weight"]
    run.train(name="more")
    ema.load_state_dict(state)
    assert torch.equal(ema.state_dict()["average"]["0.0.weight"], held)
    state["average"]["0.0.wieght"] = state["average"].pop("0.0.weight")
    with pytest.raises(ResumeError, match=r"'0\.0\.weight'.*Did you mean"):
        ema.load_state_dict(state)
    state["average"] = {**held_average(ema), "0.0.weight": torch.ones(1)}
    with pytest.raises(ResumeError, match="shape"):
        ema.load_state_dict(state)


def test_the_average_of_a_weight_that_no_model_has_is_an_error():
    weights = {f"0.{name}": value for name, value in torch.nn.Linear(2, 1).named_parameters()}
    averages = Averages([torch.nn.Linear(2, 1)], use_buffers=False)
    with pytest.raises(ResumeError, match=r"'0\.wieght' is only in the .*Did you mean"):
        averages.load({**weights, "0.wieght": torch.ones(1, 2)})
    assert not averages.available


@pytest.mark.parametrize(
    ("make", "updates"),
    [
        (lambda: EMA(0.5, every_n_steps=2), 2),  # after steps 2 and 4 of 5
        (lambda: EMA(0.5, every_n_steps=2, start_step=1), 3),
        (lambda: WeightAveraging(every_n_steps=2), 2),
        (lambda: WeightAveraging(start_step=5), 1),  # the first epoch ends with step 5
        (lambda: WeightAveraging(start_step=6), 0),
    ],
)
def test_intervals_are_counted_from_the_first_step_or_the_one_that_is_given(make, updates):
    averaging = make()
    Setup(averaging, count=5).train()
    assert averaging.updates == updates


def test_a_checkpoint_without_averages_has_none_to_evaluate_with():
    net = torch.nn.Linear(1, 1)
    assert EMA(0.5).saved_averages({}, [net]) == {}
    assert EMA(0.5, evaluate_with_average=False).saved_averages({"average": {"x": 1}}, [net]) == {}


def held_average(ema: EMA) -> dict[str, torch.Tensor]:
    return copy.deepcopy(ema.state_dict()["average"])


def test_copy_to():
    ema = EMA(0.5)
    run = Setup(ema)
    run.train()
    other = network()
    ema.copy_to(other)
    with ema.applied():
        averaged = {n: v for n, v in values(run.net).items() if "tracked" not in n}
    assert alike({n: v for n, v in values(other).items() if "tracked" not in n}, averaged)
    ema.copy_to(run.model)
    assert alike({n: v for n, v in values(run.net).items() if "tracked" not in n}, averaged)
    with pytest.raises(ValueError, match="built like"):
        ema.copy_to(torch.nn.Linear(3, 4))
    with pytest.raises(ValueError, match="number=1"):
        ema.copy_to(other, number=1)


def test_a_model_that_is_not_trained_is_left_alone():
    ema = EMA(0.5)
    run = Setup(ema)
    run.accel.prepare_model(torch.nn.Linear(2, 2).requires_grad_(False))
    run.train()
    assert all(name.startswith("0.") for name in ema.state_dict()["average"])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EMA(1.5), "decay"),
        (lambda: EMA(every_n_steps=0), "every_n_steps"),
        (lambda: EMA(start_step=-1), "start_step"),
        (lambda: EMA(use_buffers=False), "use_buffers"),
        (lambda: WeightAveraging(1, 1), "one of the two"),
        (lambda: WeightAveraging(every_n_epochs=0), "every_n_epochs"),
    ],
)
def test_bad_options_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_c7_two_of_one_class_need_no_names_and_may_have_them():
    Accelerator(cpu=True, callbacks=[EMA(0.9), EMA(0.99)])
    Accelerator(cpu=True, callbacks=[EMA(0.9), EMA(0.99, name="slow")])
