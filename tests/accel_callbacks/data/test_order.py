"""The order is the user's own: a prepared loop is bitwise the plain one, and so is a resume."""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from accel_callbacks import Accelerator, DataLoaderConfiguration, ResumeError
from accel_callbacks.data.order import Draws
from tests.support.samplers import (
    BATCH,
    COUNT,
    SAMPLERS,
    Buckets,
    Custom,
    Rounds,
    Told,
    dataset,
    own,
    seed,
)

EPOCHS = 3


# --- one loop, plain and prepared -----------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training, but for who runs it."""

    sampler: str = "shuffle"
    workers: dict[str, Any] | None = None
    own_generator: bool = False
    optimizer: str = "SGD"
    window: int = 1
    evaluate: bool = True
    precision: str = "no"
    compiled: bool = False
    stop_after: int | None = None

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], DataLoader[Any]]:
        seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        if self.optimizer == "SGD":
            optimizer: Any = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        loader = self.loader()
        return model, optimizer, loader, DataLoader(dataset(), 8, shuffle=True)

    def loader(self) -> DataLoader[Any]:
        options = SAMPLERS[self.sampler]() | (self.workers or {})
        if self.own_generator:
            options["generator"] = own()
        return DataLoader(dataset(), **options)


@dataclass
class Outcome:
    """What a training leaves behind."""

    weights: list[Any]
    losses: list[float]
    generators: tuple[Any, ...]


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def outcome(model: nn.Module, losses: list[float]) -> Outcome:
    return Outcome([p.tolist() for p in model.parameters()], losses, generators())


def tell(loader: Any, epoch: int) -> None:
    """Call set_epoch where the sampler has it, as a plain loop does."""
    for sampler in (loader.sampler, loader.batch_sampler):
        if isinstance(getattr(loader, "origin", loader).batch_sampler, Told) or isinstance(
            sampler, Told
        ):
            sampler.set_epoch(epoch) if hasattr(sampler, "set_epoch") else None


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs).float() - inputs.sum(dim=1, keepdim=True)).square().mean()


def plain(case: Case) -> Outcome:
    """Train with torch alone."""
    model, optimizer, loader, held_out = case.parts()
    forward: Any = torch.compile(model, backend="eager") if case.compiled else model
    autocast = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else nullcontext()
    losses: list[float] = []
    for epoch in range(EPOCHS):
        tell(loader, epoch)
        model.train()
        for index, (_, inputs) in enumerate(loader):
            with autocast:
                loss = loss_of(forward, inputs)
            if case.window > 1:
                opened = index - index % case.window
                loss = loss / min(case.window, len(loader) - opened)
            loss.backward()
            losses.append(loss.item())
            if (index + 1) % case.window == 0 or index + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
            if index + 1 == case.stop_after:
                break
        if case.evaluate:
            model.eval()
            with torch.no_grad(), autocast:
                losses += [float(loss_of(model, inputs)) for _, inputs in held_out]
    return outcome(model, losses)


def prepared(case: Case, *, save: str | None = None, resume: str | None = None) -> Outcome:
    """Train through an Accelerator; save at each place of the second epoch, or resume at one."""
    model, optimizer, loader, held_out = case.parts()
    if resume:
        seed(99)
    accel = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.window,
        dynamo_backend="eager" if case.compiled else None,
    )
    bare = model
    model, optimizer, loader, held_out = accel.prepare(model, optimizer, loader, held_out)
    losses: list[float] = []
    places = (f"{save}/{number}" for number in itertools.count())

    def keep(epoch: int) -> None:
        if save and epoch == 1:
            accel.save_state(next(places))

    @accel.on("train_epoch_end")
    def keep_at_end(run: Any) -> None:
        keep(run.current_epoch)

    with accel.run("order", resume=resume or False) as run:
        for epoch in run.epochs(EPOCHS):
            tell(loader, epoch)
            model.train()
            for index, (_, inputs) in enumerate(loader):
                with accel.accumulate(model):
                    loss = loss_of(model, inputs)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                keep(epoch)
                if index + 1 == case.stop_after:
                    break
            keep(epoch)
            if case.evaluate:
                with accel.evaluate(model), torch.no_grad():
                    losses += [float(loss_of(model, inputs)) for _, inputs in held_out]
    return outcome(bare, losses)


def check_same(case: Case) -> None:
    expected, found = plain(case), prepared(case)
    if case.window == 1:
        assert found.losses == expected.losses
    assert found.weights == expected.weights
    assert found.generators == expected.generators


two_workers = {"num_workers": 2}
persistent = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}


SOME = ("shuffle", "batches", "python, one by one", "own replacement")


# Each sampler once, with or without a generator and with one of the optimizers; some both with
# and without.
@pytest.mark.parametrize(
    ("sampler", "optimizer", "own_generator"),
    [
        (sampler, ("AdamW", "SGD")[(number + own) % 2], own)
        for number, sampler in enumerate(SAMPLERS)
        for own in (False, True)
        if sampler in SOME or number // 2 % 2 != own
    ],
)
def test_a_prepared_loop_is_bitwise_the_plain_one(sampler, optimizer, own_generator):
    check_same(Case(sampler, optimizer=optimizer, own_generator=own_generator))


# Both kinds of workers take turns, with and without a generator.
with_workers = pytest.mark.parametrize(
    ("sampler", "workers", "own_generator"),
    [
        pytest.param("shuffle", two_workers, True, id="shuffle, 2 workers, own generator"),
        pytest.param("batches", persistent, False, id="batches, persistent"),
        pytest.param("python, one by one", two_workers, False, id="one by one, 2 workers"),
        pytest.param("own replacement", persistent, True, id="own replacement, persistent"),
    ],
)


@with_workers
def test_a_prepared_loop_with_workers_is_bitwise_the_plain_one(sampler, workers, own_generator):
    optimizer = "AdamW" if own_generator else "SGD"
    check_same(Case(sampler, workers, own_generator=own_generator, optimizer=optimizer))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(window=2), id="accumulation"),
        pytest.param(Case(window=4, optimizer="AdamW"), id="long windows"),
        pytest.param(Case(evaluate=False), id="no evaluation"),
        pytest.param(Case(precision="bf16"), id="bf16"),
        pytest.param(Case("rounds", precision="bf16", optimizer="AdamW"), id="bf16, rounds"),
        pytest.param(Case(compiled=True), id="compile"),
        pytest.param(Case(stop_after=3), id="break"),
        pytest.param(Case("batches", stop_after=3), id="break, batches"),
        pytest.param(Case("own replacement", stop_after=3), id="break, own generator"),
    ],
)
def test_a_prepared_loop_of_another_kind_is_bitwise_the_plain_one(case):
    check_same(case)


def steps(loaders: Any, batches: Any, count: int | None) -> Outcome:
    """Take steps over batches, which come from prepared loaders or from plain ones."""
    seed(4)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    bare = model
    if isinstance(loaders, Accelerator):
        model, optimizer = loaders.prepare(model, optimizer)
    losses = []
    for batch in itertools.islice(batches(), count):
        pair = batch if isinstance(batch[0], list) else [batch]
        loss = sum(loss_of(model, inputs) for _, inputs in pair)
        loaders.backward(loss) if isinstance(loaders, Accelerator) else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return outcome(bare, losses)


@pytest.mark.parametrize("shared", [False, True], ids=["", "one generator for both"])
def test_a_zip_of_prepared_loaders_is_bitwise_that_of_plain_ones(shared):
    def pairs(wrap: Callable[[Any], Any]) -> Callable[[], Iterator[Any]]:
        generator = own() if shared else None
        replacing = RandomSampler(range(COUNT), True, 70, generator)
        first = wrap(DataLoader(dataset(), 3, shuffle=True, generator=generator))
        second = wrap(DataLoader(dataset(), 5, sampler=replacing, generator=generator))
        return lambda: itertools.chain.from_iterable(
            zip(first, second, strict=False) for _ in range(3)
        )

    accel = Accelerator(cpu=True)
    assert steps(accel, pairs(accel.prepare), None) == steps(None, pairs(lambda one: one), None)


@pytest.mark.parametrize("sampler", ["shuffle", "torch, one by one"])
def test_a_cycle_over_a_prepared_loader_is_bitwise_that_over_a_plain_one(sampler):
    accel = Accelerator(cpu=True)
    loader, bare = accel.prepare(Case(sampler).loader()), Case(sampler).loader()
    found = steps(accel, lambda: itertools.cycle(loader), 20)
    assert found == steps(None, lambda: itertools.cycle(bare), 20)


def test_workers_draw_the_noise_that_they_draw_in_a_plain_loop():
    def noise(wrap: Callable[[Any], Any]) -> list[Any]:
        seed(3)
        loader = wrap(DataLoader(Noisy(), 3, shuffle=True, num_workers=2))
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert noise(Accelerator(cpu=True).prepare) == noise(lambda loader: loader)


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *torch.rand(2).tolist(), random.random(), np.random.rand()])


# --- resumes --------------------------------------------------------------------------------


def check_resumes(case: Case, places: Callable[[int], bool] = lambda place: True) -> None:
    """Save at each place of the second epoch, and end each time as the unbroken run."""
    url = f"memory://{uuid.uuid4().hex}"
    unbroken = prepared(case, save=url)
    if case.window == 1:
        assert unbroken.weights == plain(case).weights
    number = per_epoch(case) + 2  # also before the evaluation, and after it
    for place in filter(places, range(number)):
        resumed = prepared(case, resume=f"{url}/{place}")
        assert resumed.losses == unbroken.losses[-len(resumed.losses) :], place
        assert resumed.weights == unbroken.weights, place
        assert resumed.generators == unbroken.generators, place


def per_epoch(case: Case) -> int:
    whole = sum(1 for _ in case.loader())
    return whole if case.stop_after is None else min(case.stop_after, whole)


# Some at each place, with or without a generator; the others at every third place in turn.
@pytest.mark.parametrize(
    ("sampler", "own_generator", "turn"),
    [
        pytest.param(sampler, own, number, id=f"{sampler}, own generator" if own else sampler)
        for number, sampler in enumerate(SAMPLERS)
        for own in (False, True)
        if sampler in SOME or own == bool(number % 2)
    ],
)
def test_a_resume_at_each_place_of_an_epoch_is_bitwise_the_unbroken_run(
    sampler, own_generator, turn
):
    every = 1 if sampler in SOME else 3
    every *= 5 if per_epoch(Case(sampler)) > 10 else 1
    check_resumes(
        Case(sampler, own_generator=own_generator, optimizer="AdamW"),
        lambda place: place % every == turn % every,
    )


@pytest.mark.slow
@with_workers
def test_a_resume_with_workers_is_bitwise_the_unbroken_run_at_each_place(
    sampler, workers, own_generator
):
    check_resumes(Case(sampler, workers, own_generator, "AdamW"))


@pytest.mark.parametrize(
    ("case", "places"),
    [
        pytest.param(Case("shuffle", two_workers), (0, 6, 8), id="2 workers"),
        pytest.param(Case("batches", persistent), (3, 7), id="batches, persistent"),
        pytest.param(Case("torch, one by one", persistent), (1,), id="one by one, persistent"),
        pytest.param(Case(window=2), (0, 1, 5, 6, 8), id="accumulation"),
        pytest.param(Case(evaluate=False), (0, 3, 6, 8), id="no evaluation"),
        pytest.param(Case("rounds", precision="bf16"), range(0, 9, 2), id="bf16"),
        pytest.param(Case(compiled=True), (2, 7), id="compile"),
    ],
)
def test_a_resume_of_another_kind_is_bitwise_the_unbroken_run(case, places):
    check_resumes(case, lambda place: place in places)


@pytest.mark.parametrize("count", [7, 8])
def test_a_resume_counts_batches_on_from_where_it_begins(tmp_path, count):
    def make() -> tuple[Accelerator, Any]:
        accel = Accelerator(cpu=True)
        return accel, accel.prepare(DataLoader(range(count), 2, shuffle=True))

    accel, loader = make()
    for _ in loader:
        path = accel.save_state(tmp_path / "c")
        break
    accel, loader = make()
    accel.load_state(path)
    assert [accel.current_run.batch_idx for _ in loader] == [1, 2, 3]


def test_a_resume_reads_no_sample_twice():
    class Counted(TensorDataset):
        read: list[int] = []  # noqa: RUF012

        def __getitem__(self, index: int) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

    data = Counted(torch.arange(COUNT))
    first = Accelerator(cpu=True).prepare(DataLoader(data, BATCH, shuffle=True))
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))  # it is plain JSON
    before = list(data.read)
    second = Accelerator(cpu=True).prepare(DataLoader(data, BATCH, shuffle=True))
    second.load_state_dict(state)
    assert len(list(second)) == 4
    assert sorted(data.read) == list(range(COUNT))
    assert data.read[: len(before)] == before


# --- what cannot be exact is said -----------------------------------------------------------


def state_in_an_epoch(loader: Any) -> dict[str, Any]:
    iterator = iter(loader)
    next(iterator)
    return dict(loader.state_dict())


def test_a_sampler_that_draws_otherwise_after_a_resume_is_told():
    class Growing(Custom):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(torch.arange(COUNT).roll(self.passes).tolist())

    def make() -> Any:
        return Accelerator(cpu=True).prepare(DataLoader(range(COUNT), BATCH, sampler=Growing()))

    loader = make()
    list(loader)
    second = make()
    second.load_state_dict(state_in_an_epoch(loader))
    with pytest.warns(UserWarning, match="Growing does not draw again what it drew"):
        list(second)


def test_a_dataset_of_another_size_is_a_problem_that_a_strict_resume_refuses(tmp_path):
    def make(count: int) -> tuple[Accelerator, Any]:
        accel = Accelerator(cpu=True)
        return accel, accel.prepare(DataLoader(range(count), BATCH, shuffle=True))

    accel, loader = make(COUNT)
    for _ in loader:
        accel.save_state(tmp_path / "c")
        break
    accel, loader = make(COUNT + 1)
    accel.load_state(tmp_path / "c", strict=True)
    with pytest.raises(ResumeError, match=r"had 26 samples and has 27.*strict=False"):
        next(iter(loader))
    accel.load_state(tmp_path / "c")
    with pytest.warns(UserWarning, match="had 26 samples and has 27"):
        next(iter(loader))


def test_a_dataset_that_grows_up_to_the_pass_goes_on_exactly_by_a_strict_resume(tmp_path, recwarn):
    def make() -> tuple[Accelerator, Any, list[int]]:
        torch.manual_seed(0)
        accel, data = Accelerator(cpu=True), list(range(COUNT))
        return accel, accel.prepare(DataLoader(data, BATCH, shuffle=True)), data

    accel, loader, data = make()
    list(loader)
    data += range(COUNT, 2 * COUNT)
    batches = iter(loader)
    next(batches)
    accel.save_state(tmp_path / "c")
    expected = [batch.tolist() for batch in batches]
    accel, loader, data = make()
    accel.load_state(tmp_path / "c", strict=True)
    data += range(COUNT, 2 * COUNT)
    assert [batch.tolist() for batch in loader] == expected
    assert not recwarn.list


def test_a_sampler_that_is_not_told_the_epoch_is_warned_of_once(recwarn):
    loader = Accelerator(cpu=True).prepare(Case("told").loader())
    orders = [[ids.tolist() for ids, _ in loader] for _ in range(4)]
    assert orders[0] == orders[3]  # as in a plain loop
    assert sum("set_epoch" in str(one.message) for one in recwarn) == 1
    recwarn.clear()
    loader = Accelerator(cpu=True).prepare(Case("told").loader())
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders[epoch] = [ids.tolist() for ids, _ in loader]
    assert orders[0] != orders[1] != orders[2]
    assert not recwarn.list


def test_a_wrong_length_of_a_batch_sampler_is_told_and_then_not_trusted():
    class Wrong(Buckets):
        def __len__(self) -> int:
            return 9

    loader = Accelerator(cpu=True).prepare(DataLoader(dataset(), batch_sampler=Wrong(late=True)))
    with pytest.warns(UserWarning, match="said that 9 batches were left and gave 6"):
        list(loader)
    assert [loader.end_of_dataloader for _ in loader] == [False] * 5 + [True]


def test_the_end_of_a_sampler_without_a_length_is_known():
    loader = Accelerator(cpu=True).prepare(Case("unsized batches").loader())
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False] * 5 + [True]


class Unsized(torch.utils.data.Sampler):
    """A sampler of single samples that does not say how many there are."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 4, 0, 5, 2, 6])


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_of_samples_without_a_length_is_read_as_in_a_plain_loop(drop_last):
    bare = DataLoader(range(7), 2, sampler=Unsized(), drop_last=drop_last)
    loader = Accelerator(cpu=True).prepare(bare)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in bare]
    ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False] * (len(ends) - 1) + [True]


# --- the other orders -----------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"seeded_order": True}, {"data_seed": 7}])
def test_a_seeded_order_is_independent_of_every_other_draw(config):
    def orders(draws: int) -> list[Any]:
        seed(3)
        accel = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        loader = accel.prepare(Case("weighted").loader())
        torch.rand(draws)
        before = generators()
        found = [[ids.tolist() for ids, _ in loader] for _ in range(2)]
        assert generators() == before
        return found

    assert orders(0) == orders(5)


def test_a_switch_between_recorded_and_seeded_orders_finishes_the_open_epoch_as_begun():
    def make(seeded: bool) -> Any:
        config = DataLoaderConfiguration(seeded_order=seeded)
        accel = Accelerator(cpu=True, dataloader_config=config)
        return accel.prepare(DataLoader(range(COUNT), BATCH, shuffle=True))

    for seeded in (False, True):
        seed(3)
        whole = [batch.tolist() for batch in make(seeded)]
        seed(3)
        state = state_in_an_epoch(make(seeded))
        second = make(not seeded)
        second.load_state_dict(state)
        assert [batch.tolist() for batch in second] == whole[1:]


# --- the record itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [np.random.RandomState, np.random.default_rng, random.Random, lambda n: own(),
     lambda n: np.random.Generator(np.random.SFC64(n)),
     lambda n: np.random.Generator(np.random.MT19937(n)),
     lambda n: np.random.Generator(np.random.Philox(n))],
)  # fmt: skip
def test_any_generator_of_a_sampler_is_recorded(make):
    class Own(Custom):
        def __init__(self) -> None:
            self.rng = make(5)

        def __iter__(self) -> Iterator[int]:
            for _ in range(COUNT):
                if isinstance(self.rng, torch.Generator):
                    yield int(torch.randint(100, (), generator=self.rng))
                elif isinstance(self.rng, np.random.Generator):
                    yield int(self.rng.integers(100))
                else:
                    yield int(self.rng.uniform(0, 100))

    sampler = Own()
    draws = Draws(sampler)
    first = draws.take(7)
    record = json.loads(json.dumps(draws.record()))
    again = Draws(sampler, record)
    assert (again.take(7), again.differs) == (first, False)


def test_draws_in_between_are_recorded_where_the_sampler_draws_again():
    seed(3)
    draws = Draws(Rounds())
    order = draws.take(5)
    torch.rand(3)
    order += draws.take(15)
    record = draws.record()
    assert len(record["entries"]) == 2
    seed(99)
    before = generators()
    again = Draws(Rounds(), record)
    assert generators() == before
    assert (again.take(20), again.differs) == (order, False)
