"""Callbacks that touch weights and gradients, on two processes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_callbacks import Accelerator, Callback, DistributedDataParallelKwargs
from accel_callbacks.callbacks import EMA, Checkpoint, Freeze, GradientNorm, NonFinite, SpikeGuard
from accel_callbacks.callbacks.averaged_weights import Averages
from accel_callbacks.callbacks.gradient_norm import total_norm
from accel_callbacks.callbacks.non_finite import FiniteCheck, measure_gradients
from accel_callbacks.callbacks.spike_guard import _SpikeCheck
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

SHORT = BOUND
BAD = float("nan")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))


def flat_weights(net: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


class Setup:
    """Each process trains on half of the data; at `bad` (rank, batch) there is a NaN."""

    def __init__(self, *callbacks, bad=None, bad_factor=BAD, **options) -> None:
        self.accel = Accelerator(cpu=True, timeout=SHORT, callbacks=callbacks, **options)
        self.net, self.bad, self.bad_factor = network(), bad, bad_factor
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        data = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        self.model, self.optimizer, self.data = self.accel.prepare(self.net, sgd, loader)

    def train(self, each=lambda run: None):
        with self.accel.run("weights") as run:
            for index, batch in enumerate(self.data):
                if self.bad == (self.accel.process_index, index):
                    batch = batch * self.bad_factor
                with self.accel.accumulate(self.model):
                    self.accel.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                each(run)
        return run

    def weights(self) -> list[float]:
        return flat_weights(self.net)


# --- averages -----------------------------------------------------------------------------------


def average_and_save(folder: str):
    ema = EMA(0.5)
    setup = Setup(ema)
    setup.train()
    live = setup.weights()
    with setup.accel.evaluate(setup.model):
        inside = setup.weights()
        setup.accel.save_state(folder)
    again = EMA(0.5)
    other = Setup(again)
    other.accel.load_state(folder)
    with other.accel.run("resumed"):
        loaded = other.weights()
        with again.applied():
            averaged = other.weights()
    return live == loaded, inside == averaged, inside


def test_averages_are_alike_and_saved_once(pool, tmp_path):
    (first, second) = pool.run(average_and_save, str(tmp_path / "c"))
    assert first[:2] == second[:2] == (True, True)
    assert first[2] == second[2]


def average_spread():
    accel = Accelerator(cpu=True, timeout=SHORT)
    mesh = init_device_mesh("cpu", (accel.num_processes,))
    whole = torch.arange(6.0).reshape(3, 2)
    layer = torch.nn.Linear(2, 3)
    layer.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    averages = Averages([layer], use_buffers=True)

    def halve(averaged, current):
        torch._foreach_lerp_(averaged, current, 0.5)

    averages.update(halve)
    with torch.no_grad():
        layer.weight.add_(2.0)
    averages.update(halve)
    seen = []
    for _ in range(2):
        averages.apply()
        seen.append(layer.weight.full_tensor().tolist())
        averages.restore()
        seen.append(layer.weight.full_tensor().tolist())
    state = averages.state()["0.weight"]
    averages.load({**averages.state(), "0.weight": whole * 10})
    reloaded = averages.state()["0.weight"]
    spread = isinstance(state, DTensor) and isinstance(reloaded, DTensor)
    return seen, spread, reloaded.full_tensor().tolist()


def test_spread_weights_are_averaged_element_by_element(pool):
    whole = torch.arange(6.0).reshape(3, 2)
    for seen, spread, reloaded in pool.run(average_spread):
        assert seen == [(whole + 1).tolist(), (whole + 2).tolist()] * 2
        assert spread
        assert reloaded == (whole * 10).tolist()


# --- norms --------------------------------------------------------------------------------------


class Logged(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, run, model, metrics, step):
        self.values.append(float(metrics["grad_norm"]))


def norms():
    logged = Logged()
    setup = Setup(GradientNorm(), logged, gradient_accumulation_steps=2)
    expected = []

    class Measures(Callback):
        def on_before_optimizer_step(self, run, model, optimizer):
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            expected.append(flat.norm().item())

    setup.accel.add_callback(Measures())
    setup.train()
    return logged.values, expected


def test_norms_are_those_of_averaged_gradients(pool):
    (first, expected), (second, _) = pool.run(norms)
    assert first == second == pytest.approx(expected)
    assert len(first) == 3


def spread_norms():
    accel = Accelerator(cpu=True, timeout=SHORT)
    mesh = init_device_mesh("cpu", (accel.num_processes,))
    whole = torch.arange(1.0, 7.0).reshape(3, 2)
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)
    found = [total_norm([weight, plain], p).item() for p in (1.0, 2.0, float("inf"))]
    whole[2, 1] = BAD  # which is on the second process
    weight.grad = distribute_tensor(whole, mesh, [Shard(0)])
    finding = FiniteCheck(1, None, measure_gradients(torch.optim.SGD([weight, plain])))
    return found, finding.is_bad(), finding.describe({id(weight): "weight"})


def test_norms_of_spread_gradients_are_those_of_the_whole(pool):
    flat = torch.tensor([1.0, 2, 3, 4, 5, 6, 1, 1])
    expected = [flat.norm(p).item() for p in (1, 2, float("inf"))]
    (first, bad, here), (second, also_bad, there) = pool.run(spread_norms)
    assert first == second == pytest.approx(expected)
    assert bad
    assert also_bad
    assert here == "step 1: gradients of another rank are not finite"
    assert there == "step 1: the gradients of 'weight' are not finite"


# --- what is not finite -------------------------------------------------------------------------


def non_finite(options: dict, late: bool, folder: str):
    """A NaN on the second process only, in its third batch."""
    waits, FiniteCheck.waits = FiniteCheck.waits, property(lambda self: late)
    watch = NonFinite(**options)
    setup = Setup(watch, EMA(0.5), Checkpoint(folder, every_n_steps=2), bad=(1, 2))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = setup.train()
    except FloatingPointError as error:
        setup.accel.end_training()
        return str(error)
    finally:
        FiniteCheck.waits = waits
    return run.global_step, watch.bad_steps, watch.rollbacks, setup.weights()


@pytest.mark.parametrize("late", [False, True])
def test_one_bad_process_ends_it_for_all(pool, tmp_path, late):
    first, second = pool.run(non_finite, {"check": "loss"}, late, str(tmp_path))
    assert first.startswith("step 3: the loss of another rank is bad")
    assert second.startswith("step 3: the loss is nan")


@pytest.mark.parametrize("check", ["loss", "gradients"])
def test_all_processes_leave_the_step_out(pool, tmp_path, check):
    options = {"check": check, "action": "skip"}
    first, second = pool.run(non_finite, options, False, str(tmp_path))
    assert first == second
    assert first[:3] == (5, 1, 0)
    assert torch.tensor(first[3]).isfinite().all()


@pytest.mark.parametrize("late", [False, True])
def test_all_processes_go_back(pool, tmp_path, late):
    options = {"check": "loss", "action": "rollback"}
    first, second = pool.run(non_finite, options, late, str(tmp_path))
    assert first == second
    assert first[:3] == (5, 1, 1)
    assert torch.tensor(first[3]).isfinite().all()


def spike(late: bool):
    """A huge sample on the second process only, in its fifth batch of six."""
    waits, _SpikeCheck.waits = _SpikeCheck.waits, property(lambda self: late)
    guard = SpikeGuard(warmup=3, snapshot_every_n_steps=1, gradient_threshold=None)
    setup = Setup(guard, EMA(0.5), bad=(1, 4), bad_factor=1e4)
    try:
        run = setup.train()
    finally:
        _SpikeCheck.waits = waits
    return run.global_step, guard.story, setup.weights()


@pytest.mark.parametrize("late", [False, True])
def test_all_processes_go_back_before_a_spike_of_one(pool, late):
    first, second = pool.run(spike, late)
    assert first == second
    steps, (sentence,), weights = first
    assert sentence.startswith("step 5: the loss is ")
    assert sentence.endswith("went back to the weights of step 4 in host memory")
    # Where it is known late, the step after is left out too, with gradients of bad weights.
    assert steps == 5
    assert max(map(abs, weights)) < 2


# --- freezing -----------------------------------------------------------------------------------


def freeze(options: dict):
    """After each step: whether the frozen layer moved, and requires gradients; then all weights."""
    handler = DistributedDataParallelKwargs(**options)
    setup = Setup(Freeze({"0.*": 2}), kwargs_handlers=[handler])
    moved, requires, before = [], [], setup.net[0].weight.detach().clone()

    def look(run):
        nonlocal before
        now = setup.net[0].weight.detach().clone()
        moved.append(not torch.equal(now, before))
        requires.append(setup.net[0].weight.requires_grad)
        before = now

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DDP: no parameter is unused, later on
        setup.train(look)
    return moved, requires, setup.weights()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_what_is_unfrozen_is_averaged(pool, options):
    """The processes see different data, so weights that were not averaged would part."""
    (moved, requires, first), (_, _, second) = pool.run(freeze, options)
    assert moved == [False, False, True, True, True, True]
    # Switched off only where DDP expects that.
    assert requires == [not options.get("find_unused_parameters"), *[True] * 5]
    assert first == second == pytest.approx(trained_alone())


def trained_alone() -> list[float]:
    """The same training on one process, with the batches of both."""
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    data = torch.randn(24, 2, generator=torch.Generator().manual_seed(1)).split(2)
    for step in range(6):
        loss = sum(net(batch).square().mean() / 2 for batch in data[2 * step : 2 * step + 2])
        sgd.zero_grad()
        loss.backward()
        if step < 2:
            net[0].weight.grad = net[0].bias.grad = None
        sgd.step()
    return flat_weights(net)


def writers_with(callback, folder):
    """Which processes wrote tensors of a model, with this callback there."""
    from checkpoint_io import read_manifest

    accel = Accelerator(cpu=True, timeout=SHORT, callbacks=[callback])
    accel.prepare(torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(2)]))
    manifest = read_manifest(accel.save_state(folder))
    chunks = [c for k, t in manifest.tensors.items() if k.startswith("models") for c in t.chunks]
    return sorted({manifest.files[chunk.file].rank for chunk in chunks})


class Edits(Callback):
    def on_save_checkpoint(self, run, model, checkpoint):
        """May put anything in its place."""


def ema_writers(folder):
    return writers_with(EMA(0.9), folder)


def editing_writers(folder):
    return writers_with(Edits(), folder)


def test_an_average_leaves_all_processes_writing(pool, tmp_path):
    assert pool.run(ema_writers, str(tmp_path / "ema"))[0] == [0, 1]
    assert pool.run(editing_writers, str(tmp_path / "edits"))[0] == [0]
