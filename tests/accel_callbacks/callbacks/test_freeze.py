"""Freeze in real runs: what does not move, when it begins to, and at which rate."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, Freeze, freeze


@pytest.fixture(params=[False, True], ids=["switched off", "dropped"])
def drops(request, monkeypatch):
    """Both ways: that of one process, and that of DDP."""
    monkeypatch.setattr(freeze, "_can_change_requires_grad", lambda run: not request.param)
    return request.param


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
        )
        self.head = torch.nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(batch))


class Moves(Callback):
    """Which parameters each step has moved, and with which rates."""

    def __init__(self) -> None:
        self.moved: list[set[str]] = []
        self.rates: list[list[float]] = []
        self.held: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, run, model, optimizer):
        self.held = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_after_optimizer_step(self, run, model, optimizer):
        now = dict(model.named_parameters())
        self.moved.append({n for n in now if not torch.equal(now[n], self.held[n])})


ALL = {name for name, _ in Net().named_parameters()}
HEAD = {"head.weight", "head.bias"}


class Setup:
    def __init__(self, *callbacks, net=None, sgd=None, scheduler=None, batches=4, **options):
        self.moves = Moves()
        self.accel = Accelerator(cpu=True, callbacks=[*callbacks, self.moves], **options)
        torch.manual_seed(0)
        self.net = Net() if net is None else net
        sgd = sgd or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
        optimizer = sgd(self.net.parameters())
        data = torch.randn(4 * batches, 2, generator=torch.Generator().manual_seed(1))
        parts = [self.net, optimizer, torch.utils.data.DataLoader(data, batch_size=4)]
        self.scheduler = None
        if scheduler is not None:
            *parts, self.scheduler = self.accel.prepare(*parts, scheduler(optimizer))
            self.model, self.optimizer, self.data = parts
        else:
            self.model, self.optimizer, self.data = self.accel.prepare(*parts)

    def train(self, epochs=1, stop_at=None, **options):
        with self.accel.run("freeze", **options) as run:
            for _ in run.epochs(epochs):
                self.model.train()
                for batch in self.data:
                    self.step(batch)
                    if run.global_step == stop_at:
                        run.stop("cut")
        return self.moves.moved

    def step(self, batch):
        self.accel.backward(self.model(batch).square().mean())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()


def test_until_a_step(drops):
    moved = Setup(Freeze({"backbone.*": 2})).train()
    assert moved == [HEAD, HEAD, ALL, ALL]


def test_until_an_epoch(drops):
    moved = Setup(Freeze({"backbone.*": "1 epoch"}), batches=2).train(2)
    assert moved == [HEAD, HEAD, ALL, ALL]


def test_for_ever_and_by_module(drops):
    net = Net()
    moved = Setup(Freeze({net.backbone: None}), net=net).train()
    assert moved == [HEAD] * 4


def test_several_phases_of_which_the_last_that_matches_counts(drops):
    schedule = {"backbone.*": 3, "backbone.2.*": "1 steps", "*.bias": None}
    moved = Setup(Freeze(schedule)).train()
    weights = {name for name in ALL if name.endswith("weight")}
    late = {"head.weight", "backbone.2.weight"}
    assert moved == [{"head.weight"}, late, late, weights]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_neither_decay_nor_momentum_move_what_is_frozen(make, drops):
    """Momentum of an earlier training is there when the second one begins frozen."""
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    setup = Setup(sgd=partial(make, lr=0.1, weight_decay=0.5, **options))
    setup.train()
    with setup.accel.add_callback(Freeze({"backbone.*": 2})):
        setup.moves.moved.clear()
        moved = setup.train()
    assert moved == [HEAD, HEAD, ALL, ALL]


def test_backward_is_saved_the_work_where_it_can_be():
    setup = Setup(Freeze({"backbone.*": 1}))
    with setup.accel.run("off"):
        assert not setup.net.backbone[0].weight.requires_grad
        assert setup.net.head.weight.requires_grad
        setup.step(torch.randn(4, 2))
        assert setup.net.backbone[0].weight.requires_grad


def test_dropped_gradients_do_not_count_for_clipping(monkeypatch):
    monkeypatch.setattr(freeze, "_can_change_requires_grad", lambda run: False)
    norms = []
    for setup in (Setup(Freeze({"backbone.*": None})), Setup()):
        with setup.accel.run("clip"):
            setup.accel.backward(setup.model(torch.ones(4, 2)).square().mean())
            parameters = setup.net.parameters() if not norms else setup.net.head.parameters()
            norms.append(setup.accel.clip_grad_norm_(parameters, 1.0))
            setup.optimizer.zero_grad()
    assert norms[0] == norms[1]


def test_what_was_frozen_before_stays_so(drops):
    net = Net()
    net.backbone[0].requires_grad_(False)
    moved = Setup(Freeze({"backbone.*": 1}), net=net).train()
    assert moved[-1] == {name for name in ALL if not name.startswith("backbone.0.")}
    net = Net()
    net.backbone.requires_grad_(False)
    with pytest.raises(ValueError, match="prepare the model unfrozen"):
        Setup(Freeze({"backbone.*": 1}), net=net).train()


def test_a_second_run_freezes_again(drops):
    setup = Setup(Freeze({"backbone.*": 2}, lr_factor=0.1))
    first = list(setup.train())
    setup.moves.moved.clear()
    assert setup.train() == first == [HEAD, HEAD, ALL, ALL]
    assert [group["lr"] for group in setup.optimizer.param_groups] == pytest.approx([0.1, 0.01])


# --- BatchNorm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_eval", [True, False])
def test_statistics_of_frozen_layers_stay(norm_eval):
    setup = Setup(Freeze({"backbone.*": 2}, norm_eval=norm_eval))
    norm = setup.net.backbone[1]
    seen = []

    class Counts(Callback):
        def on_after_optimizer_step(self, run, model, optimizer):
            seen.append(norm.num_batches_tracked.item())

    setup.accel.add_callback(Counts())
    with setup.accel.run("norms") as run:
        for _ in run.epochs(1):
            setup.model.train()
            for batch in setup.data:
                with setup.accel.evaluate(setup.model):
                    setup.model(batch)
                setup.step(batch)
    assert seen == ([0, 0, 1, 2] if norm_eval else [1, 2, 3, 4])


def test_layers_without_parameters_are_found_by_their_buffers():
    net = Net()
    net.backbone[1] = torch.nn.BatchNorm1d(3, affine=False)
    setup = Setup(Freeze({"backbone.*": None}, norm_eval=True), net=net)
    setup.train()
    assert net.backbone[1].num_batches_tracked == 0


# --- rates --------------------------------------------------------------------------------------


def test_a_part_of_the_rate_for_what_is_unfrozen(drops):
    setup = Setup(Freeze({"backbone.*": 2}, lr_factor=0.5))
    setup.train()
    assert setup.moves.rates == [[0.1, 0.05]] * 4
    held = [{id(p) for p in group["params"]} for group in setup.optimizer.param_groups]
    assert held == [
        {id(p) for p in setup.net.head.parameters()},
        {id(p) for p in setup.net.backbone.parameters()},
    ]
    assert setup.optimizer.param_groups[1]["weight_decay"] == 0.1


def test_groups_of_their_own_stay_as_they_are():
    net = Net()
    groups = [
        {"params": net.backbone.parameters(), "lr": 0.2},
        {"params": net.head.parameters(), "lr": 0.1},
    ]
    setup = Setup(
        Freeze({"backbone.*": 2}, lr_factor=0.5), net=net, sgd=lambda _: torch.optim.SGD(groups)
    )
    setup.train()
    assert setup.moves.rates == [[0.1, 0.1]] * 4


def test_what_no_optimizer_has_is_added(drops):
    net = Net()
    setup = Setup(
        Freeze({"backbone.*": 2}),
        net=net,
        sgd=lambda _: torch.optim.SGD(net.head.parameters(), lr=0.1, weight_decay=0.1),
    )
    assert setup.train() == [HEAD, HEAD, ALL, ALL]


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.4, total_steps=12),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_move_the_new_group_too(name):
    setup = Setup(Freeze({"backbone.*": 2}, lr_factor=0.5), scheduler=SCHEDULERS[name], batches=8)
    setup.train()
    whole, part = zip(*setup.moves.rates, strict=True)
    assert part == pytest.approx([0.5 * rate for rate in whole])
    plain = Setup(scheduler=SCHEDULERS[name], batches=8)
    plain.train()
    assert whole == pytest.approx([rates[0] for rates in plain.moves.rates])


@pytest.mark.parametrize("until", [6, "1 epoch", "2 epochs"])
def test_a_resumed_run_goes_on_exactly(until, tmp_path):
    def make(folder):
        return Setup(
            Freeze({"backbone.*": until}, lr_factor=0.5, norm_eval=True),
            Checkpoint(tmp_path / folder, every_n_steps=2),
            scheduler=SCHEDULERS["cosine"],
        )

    whole = make("whole")
    expected = whole.train(3)
    cut = make("cut")
    first = cut.train(3, stop_at=6)  # in the middle of the second epoch
    resumed = make("cut")
    assert first + resumed.train(3) == expected
    for one, other in zip(
        resumed.net.state_dict().values(), whole.net.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "options", "error", "says"),
    [
        ({}, {}, ValueError, "empty"),
        ("backbone.*", {}, TypeError, "must be a dict"),
        ({"a": "10 min"}, {}, ValueError, "number of steps"),
        ({"a": "2 lightyears"}, {}, ValueError, "not a unit"),
        ({"a": 0}, {}, ValueError, "above 0"),
        ({"a": 1}, {"lr_factor": 0}, ValueError, "lr_factor"),
    ],
)
def test_bad_options_are_refused(schedule, options, error, says):
    with pytest.raises(error, match=says):
        Freeze(schedule, **options)


def test_a_pattern_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match=r"Did you mean 'backbone\."):
        Setup(Freeze({"bakcbone.0.weight": 1})).train()


def test_one_of_several_models():
    accel = Accelerator(cpu=True, callbacks=[Freeze({"1/*": None})])
    nets = accel.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    with accel.run("several"):
        assert [net.weight.requires_grad for net in nets] == [True, False]


def test_steps_without_a_run_around_them_are_frozen_too(drops):
    setup = Setup(Freeze({"backbone.*": None}))
    for batch in torch.randn(2, 4, 2):
        setup.step(batch)
    assert setup.moves.moved == [HEAD, HEAD]


def test_what_was_frozen_is_free_after_the_run():
    net = Net()
    for _ in range(2):  # the second Accelerator meets the model as it was built
        Setup(Freeze({"backbone.*": None}), net=net).train()
        assert all(p.requires_grad for p in net.parameters())
