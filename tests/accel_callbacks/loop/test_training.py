"""The loop on two real processes, against the same loop on one."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping
from tests.support.bound import BOUND
from tests.support.rounding import reordered

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def dataset(count: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def weights_after(count: int, batch_size: int, window: int, epochs: int = 2) -> list:
    """Train a linear model by SGD; returns the weights."""
    accel = accelerator(gradient_accumulation_steps=window)
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(dataset(count), batch_size, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for inputs, targets in loader:
            with accel.accumulate(model):
                accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    bare = accel.unwrap_model(model)
    return [*bare.weight[0].tolist(), bare.bias.item(), accel.current_run.global_step]


@pytest.mark.first
@pytest.mark.parametrize(
    ("alone", "together"),
    [((32, 8, 1), (32, 4, 1)), ((32, 8, 1), (32, 2, 2)), ((48, 24, 1), (48, 4, 3))],
    ids=["split over ranks", "ranks and micro-batches", "window of three"],
)
def test_the_same_global_batch_gives_the_same_weights_however_it_is_split(pool, alone, together):
    expected = weights_after(*alone)
    for rank_weights in pool.run(weights_after, *together):
        assert rank_weights == reordered(expected)


@pytest.mark.first
def test_a_short_window_at_the_end_of_an_epoch_is_averaged_by_its_real_size(pool):
    # 24 samples in micro-batches of 2 x 2: six of them, so windows of four and of two.
    first, second = pool.run(weights_after, 24, 2, 4, 1)
    assert first == second
    assert first[-1] == 2
    accel = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    order = torch.utils.data.DataLoader(dataset(24), 4, shuffle=True)
    batches = list(accel.prepare(order))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for window in (batches[:4], batches[4:]):
        inputs = torch.cat([x for x, _ in window])
        targets = torch.cat([y for _, y in window])
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first[:-1] == reordered([*model.weight[0].tolist(), model.bias.item()])


def learning_rate() -> list:
    accel = accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(dataset(16), 2)
    model, optimizer, loader, scheduler = accel.prepare(model, optimizer, loader, scheduler)
    rates = []
    for inputs, _ in loader:
        with accel.accumulate(model):
            accel.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


@pytest.mark.first
def test_the_scheduler_steps_once_an_optimizer_step_not_once_a_process(pool):
    assert pool.run(learning_rate) == [[1.0, 0.5, 0.5, 0.25]] * 2


def metrics(count: int, batch_size: int) -> list:
    accel = accelerator()
    loader = accel.prepare(torch.utils.data.DataLoader(range(count), batch_size))
    model = accel.prepare(torch.nn.Linear(1, 1))
    seen, nested, as_objects, means = [], [], [], 0
    with accel.evaluate(model):
        for batch in loader:
            seen += accel.gather_for_metrics(batch).tolist()
            nested += accel.gather_for_metrics({"a": (batch, batch * 2)})["a"][1].tolist()
            as_objects += accel.gather_for_metrics([f"n{i}" for i in batch.tolist()])
            means += len(accel.gather_for_metrics(batch.float().mean()))
    return [seen, nested, as_objects, means, len(loader)]


@pytest.mark.first
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 13])
def test_gather_for_metrics_returns_every_sample_exactly_once(pool, count):
    results = pool.run(metrics, count, 4)
    expected = list(range(count))
    for seen, nested, as_objects, means, length in results:
        assert seen == expected
        assert nested == [2 * n for n in expected]
        assert as_objects == [f"n{n}" for n in expected]
        assert length == -(-count // 8)
        assert means == 2 * length


class VoteAtStep(Callback):
    """One rank asks for a stop in the middle of an epoch."""

    can_vote = True

    def __init__(self, voter: int, step: int) -> None:
        self.voter, self.step = voter, step

    def on_after_optimizer_step(self, run, model, optimizer):
        if run.global_step == self.step and run.accelerator.process_index == self.voter:
            run.stop(f"rank {self.voter} has had enough")


def stops() -> list:
    accel = accelerator(callbacks=[VoteAtStep(voter=1, step=3)])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(dataset(16), 1)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    with accel.run("vote", resume=False) as run:
        for _ in run.epochs(5):
            for inputs, _ in loader:
                accel.backward(model(inputs).sum())
                optimizer.step()
                optimizer.zero_grad()
    return [run.global_step, run.current_epoch, run.stop_reason]


def test_a_stop_asked_for_by_one_rank_ends_all_at_the_same_step(pool):
    assert pool.run(stops) == [[4, 0, "rank 1 has had enough"]] * 2


def early_stop_on_local_values() -> list:
    accel = accelerator(callbacks=[EarlyStopping("loss", patience=2)])
    with accel.run("early", resume=False) as run:
        for epoch in run.epochs(10):
            # rank 0 improves for ever, rank 1 never does
            accel.log({"loss": -epoch if accel.is_main_process else 1.0})
    return [run.current_epoch, run.stop_reason]


@pytest.mark.first
def test_early_stopping_on_values_that_differ_by_rank_does_not_split_the_ranks(pool):
    assert (
        pool.run(early_stop_on_local_values) == [[2, "loss did not improve on 1 in 2 checks"]] * 2
    )


def early_stop_by_one_rank_resumed(folder: str) -> list:
    """Epochs until the stop that only rank 1 asked for, and those of the run that goes on."""
    done = []
    for goes_on in (False, True):
        accel = accelerator(callbacks=[EarlyStopping("loss", patience=2)])
        model = accel.prepare(torch.nn.Linear(1, 1))
        if goes_on:
            accel.load_state(folder)
        with accel.run("early", resume=False) as run:
            for epoch in run.epochs(10):
                done.append(epoch)
                accel.log({"loss": -epoch if accel.is_main_process else 1.0})
        accel.save_state(folder)
        del model
    return [done, run.stop_reason]


def test_a_stop_that_another_rank_asked_for_lasts_through_a_resume(pool, tmp_path):
    expected = [[0, 1, 2], "loss did not improve on 1 in 2 checks"]
    assert pool.run(early_stop_by_one_rank_resumed, str(tmp_path / "state")) == [expected] * 2


def sweep(path: str) -> list:
    """Several Accelerators in one process: nothing of the first shows in the second."""
    first = accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    second = accelerator()
    loader = second.prepare(torch.utils.data.DataLoader(range(4)))
    with first.accumulate():
        inside = (first.sync_gradients, second.sync_gradients)
        list(loader)
    return [inside, first.mixed_precision, second.mixed_precision]


def test_two_accelerators_side_by_side(pool, tmp_path):
    assert pool.run(sweep, str(tmp_path)) == [[(False, True), "bf16", "no"]] * 2


def exact_weights(folder: str, load: bool) -> list:
    accel = accelerator(callbacks=[Checkpoint(folder, every_n_steps=7, keep_last=None)])
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(range(20), 2, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    torch.manual_seed(1000 * load + accel.process_index)
    resume = f"{folder}/step-00000007" if load else False
    with accel.run("exact", resume=resume) as run:
        for _ in run.epochs(3):
            for batch in loader:
                accel.backward(model(batch[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
    parameters = accel.unwrap_model(model).parameters()
    return [run.global_step, [p.detach().flatten().tolist() for p in parameters]]


@pytest.mark.first
def test_a_resumed_run_with_dropout_ends_with_bitwise_the_same_weights(pool, tmp_path):
    whole = pool.run(exact_weights, str(tmp_path / "c"), False)
    resumed = pool.run(exact_weights, str(tmp_path / "c"), True)
    assert whole == resumed
    assert whole[0][0] == 15


def samples_seen(folder: str, save_after: int | None) -> list:
    accel = accelerator()
    torch.manual_seed(9)
    loader = accel.prepare(torch.utils.data.DataLoader(range(24), 2, shuffle=True))
    if save_after is None:
        accel.load_state(folder)
    seen = []
    for _ in range(2):
        for index, batch in enumerate(loader):
            seen += accel.gather(batch).tolist()
            if index + 1 == save_after:
                accel.save_state(folder)
                return seen
    return seen


@pytest.mark.first
@pytest.mark.parametrize("first", ["one", "two"])
def test_a_resume_on_another_number_of_processes_keeps_the_order(pool, tmp_path, first):
    folder = str(tmp_path / "c")
    torch.manual_seed(9)
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(range(24), 2, shuffle=True))
    epochs = [n for _ in range(2) for batch in loader for n in batch.tolist()]
    if first == "one":
        seen = samples_seen(folder, 3)
        rest = pool.run(samples_seen, folder, None)[1]
    else:
        seen = pool.run(samples_seen, folder, 3)[0]
        with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
            rest = samples_seen(folder, None)
    assert seen + rest[: 48 - len(seen)] == epochs


def truncated_read(folder: str) -> None:
    accelerator().load_state(folder)


def test_a_checkpoint_that_is_broken_is_refused_on_every_rank(pool, tmp_path):
    folder = tmp_path / "c"
    pool.run(samples_seen, str(folder), 1)
    local = next(folder.glob("objects-*-r00001.json"))
    local.write_bytes(local.read_bytes()[:-2])
    (first, first_text), (second, second_text) = pool.outcomes(truncated_read, str(folder))
    assert "CorruptCheckpointError" in first_text + first
    assert "CorruptCheckpointError" in second_text + second
    assert local.name in second_text
