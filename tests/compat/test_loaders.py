"""Members of prepared loaders that scripts for Accelerate reach into."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks.compat import members
from accel_callbacks.compat.names import resolve
from accel_callbacks.data.prepare import prepare_data_loader


def name(key: str, module: str = "accelerate"):
    return resolve(module, key)


def lists(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


class Doubled(DataLoader):
    """A loader of the script's, which changes its batches."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


class Stateful(DataLoader):
    """As torchdata's: a loader of torch's that reads by iterators of its own."""

    def _get_iterator(self):
        raise AssertionError("torchdata's own way of reading is not that of a prepared loader")

    def state_dict(self):
        raise AssertionError("nor is its state")


@pytest.fixture
def torchdata(monkeypatch):
    """A module in place of torchdata's, which need not be installed."""
    module = ModuleType("torchdata.stateful_dataloader")
    module.StatefulDataLoader = Stateful
    monkeypatch.setitem(sys.modules, "torchdata", ModuleType("torchdata"))
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", module)
    monkeypatch.setattr(members, "is_torchdata_stateful_dataloader_available", lambda: True)
    members._with_state.cache_clear()
    yield
    members._with_state.cache_clear()


def accelerator_of(stateful: bool):
    options = name("DataLoaderConfiguration", "accelerate.utils")(use_stateful_dataloader=stateful)
    return name("Accelerator")(cpu=True, dataloader_config=options)


@pytest.mark.filterwarnings("ignore:the view of skip_first_batches is trained on")
@pytest.mark.parametrize("kind", [DataLoader, Doubled])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_keeps_its_state_is_one_of_torchdatas_too(torchdata, stateful, kind):
    prepared = accelerator_of(stateful).prepare(kind(range(5), batch_size=2))
    view = name("SkipDataLoader", "accelerate.data_loader")(
        range(5), 1, batch_size=2, use_stateful_dataloader=stateful
    )
    whole = [[0, 1], [2, 3], [4]] if kind is DataLoader else [[0, 2], [4, 6], [8]]
    for loader, batches in ((prepared, whole), (view, [[2, 3], [4]])):
        assert loader.use_stateful_dataloader is stateful
        assert isinstance(loader.base_dataloader, Stateful if stateful else DataLoader)
        assert isinstance(loader, Stateful) is stateful
        assert lists(loader) == lists(loader) == batches
        assert lists(pickle.loads(pickle.dumps(loader))) == batches
        assert loader.state_dict()["epoch"] == 1


def test_without_torchdata_a_loader_knows_that_it_keeps_its_state(monkeypatch):
    monkeypatch.setattr(members, "is_torchdata_stateful_dataloader_available", lambda: False)
    members._with_state.cache_clear()
    prepared = accelerator_of(True).prepare(DataLoader(range(3)))
    assert prepared.use_stateful_dataloader
    assert lists(prepared) == [[0], [1], [2]]
    members._with_state.cache_clear()


@pytest.mark.parametrize("maker", ["DataLoaderShard", "DataLoaderDispatcher"])
def test_a_loader_goes_on_from_a_state_that_the_script_keeps(torchdata, maker):
    def made(**options):
        generator = torch.Generator().manual_seed(3)
        return name(maker, "accelerate.data_loader")(
            range(8), batch_size=2, shuffle=True, generator=generator,
            use_stateful_dataloader=True, **options,
        )  # fmt: skip

    name("GradientState", "accelerate.state")._reset_state()  # no Accelerator counts the passes
    loader = made()
    assert isinstance(loader, Stateful)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = loader.state_dict()
    again = made()
    again.load_state_dict(state)
    assert lists(again) == seen[2:]


@pytest.mark.parametrize("trains", [True, False])
def test_a_loader_without_an_accelerator_goes_on_from_its_own_state(trains):
    def made():
        generator = torch.Generator().manual_seed(5)
        return prepare_data_loader(DataLoader(range(8), 2, shuffle=True, generator=generator))

    loader = made()
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    loader.trained = trains
    state = loader.state_dict()
    rest = lists(batches)
    again = made()
    again.load_state_dict(state)
    assert lists(again) == rest
    assert sorted(index for batch in first + rest for index in batch) == list(range(8))


def test_what_was_prepared_is_marked():
    accelerator = accelerator_of(False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(range(4))
    parts = accelerator.prepare(
        model, optimizer, schedule, loader, name("skip_first_batches")(loader, 1), [1]
    )
    marks = [getattr(part, "_is_accelerate_prepared", False) for part in parts]
    assert marks == [True] * 5 + [False]


def test_an_accelerator_is_asked_for_by_its_gradient_state():
    states = name("GradientState", "accelerate.state")
    states._reset_state()
    assert states._shared_state == {}
    accelerator = accelerator_of(False)
    assert states._shared_state != {}
    accelerator.end_training()
