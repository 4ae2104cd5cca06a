"""Classes of Accelerate, constructed as its documentation does, and what prepare returns."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from accel_callbacks import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    skip_first_batches,
)
from accel_callbacks.compat.names import NotProvided, resolve
from accel_callbacks.data.loader import NoEvents
from accel_callbacks.data.prepare import prepare_loader
from accel_callbacks.data.sources import Setting
from accel_callbacks.utils import extract_model_from_parallel, is_compiled_module


def name(key: str):
    return resolve("accelerate", key)


def lists(loader) -> list[list[int]]:
    return [torch.as_tensor(batch).tolist() for batch in loader]


@pytest.fixture
def accelerator():
    yield (made := name("Accelerator")(cpu=True, gradient_accumulation_steps=2))
    made.end_training()


def test_of_a_loss_for_each_sample_of_a_full_batch_a_smaller_one_counts_its_own(accelerator):
    loader = accelerator.prepare(DataLoader(range(13), batch_size=8))
    gathered = [
        accelerator.gather_for_metrics((torch.full((8,), 1.0), batch, torch.ones(9)))
        for batch in loader
    ]
    sizes = [[len(tensor) for tensor in tensors] for tensors in gathered]
    assert sizes == [[8, 8, 9], [5, 5, 9]]
    assert len(accelerator.gather_for_metrics(torch.ones(8))) == 8  # after the loop


def test_one_process_returns_what_is_gathered_as_objects_as_it_is(accelerator):
    for data in ({"loss": 1.0}, 1.0, "a", ("a", "b"), [1, 2], {"x": torch.ones(2), "name": "a"}):
        assert accelerator.gather_for_metrics(data) is data
    data = [{"boxes": torch.ones(2, 4)}]
    assert accelerator.gather_for_metrics(data, use_gather_object=True) is data
    assert accelerator.gather_for_metrics((torch.ones(2),))[0].tolist() == [1, 1]


def test_as_many_boxes_as_a_full_batch_has_samples_are_all_kept(accelerator):
    loader = accelerator.prepare(DataLoader(range(13), batch_size=8))
    for batch in loader:
        boxes = [{"boxes": torch.ones(8, 4)} for _ in batch]
        found, same = accelerator.gather_for_metrics((boxes, tuple(boxes)))
        assert [len(one["boxes"]) for one in (*found, *same)] == [8] * 2 * len(batch)


@pytest.mark.parametrize("adjusts", [True, False])
def test_a_schedule_moves_once_a_window_and_holds_at_its_end(adjusts):
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjusts)
    accelerator = name("Accelerator")(cpu=True, gradient_accumulation_plugin=plugin)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    loader = DataLoader(torch.ones(10, 1), batch_size=1)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    moves = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        moves.append(schedule.last_epoch)
    assert moves == [0, 1, 1, 2, 2, 3, 3, 3, 3, 3]


def test_a_sampler_that_shares_its_batches_itself_is_read_as_it_is():
    """As a Trainer says it of a sampler that balances lengths, by the attributes of a shard."""
    setting = Setting(1, 2)
    loader = DataLoader(range(8), batch_sampler=[[4, 5], [6]])
    prepared = prepare_loader(loader, setting, events=NoEvents(), feed=None, seed=0)
    shares = prepared.batch_sampler
    assert (shares.batch_sampler, shares.num_processes, shares.process_index) == (
        *(loader.batch_sampler, 2, 1),
    )
    shares.num_processes, shares.process_index = 1, 0
    assert lists(prepared) == [[4, 5], [6]]


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_options_of_fsdp_are_assigned_until_a_model_is_prepared():
    plugin = name("FullyShardedDataParallelPlugin")(fsdp_version=2)
    plugin.auto_wrap_policy = callable
    assert plugin.auto_wrap_policy is callable
    assert isinstance(plugin, FullyShardedDataParallelPlugin)
    assert replace(plugin, no_sync=True).auto_wrap_policy is callable
    plugin.set_auto_wrap_policy(torch.nn.Linear(1, 1))
    with pytest.raises(NotProvided, match="give the plugin a mixed_precision_policy before"):
        plugin.set_mixed_precision(torch.bfloat16, override=True)


def test_a_loader_reads_the_batches_of_the_rank_that_its_sampler_is_of(accelerator):
    batches = BatchSampler(SequentialSampler(range(10)), 2, False)
    shard = resolve("accelerate.data_loader", "BatchSamplerShard")(batches, 2, 1)
    loader = resolve("accelerate.data_loader", "DataLoaderShard")(range(10), batch_sampler=shard)
    assert loader.batch_sampler is shard
    assert lists(loader) == [[2, 3], [6, 7], [0, 1]]
    with pytest.raises(ValueError, match="prepare\\(\\) shards too"):
        accelerator.prepare(DataLoader(range(10), batch_sampler=shard))


# --- what a prepared loader says --------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "drop_last": True},
        {"batch_size": 2, "shuffle": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(RandomSampler(range(5)), 3, False)},
    ],
    ids=["drop", "shuffle", "single", "batches"],
)
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_prepared_loader_describes_itself_as_the_user_did(options, dispatch):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = name("Accelerator")(cpu=True, dataloader_config=config)
    loader = DataLoader(range(5), **options)
    prepared = accelerator.prepare(loader)
    for key in ("batch_size", "drop_last", "sampler", "dataset"):
        assert getattr(prepared, key) is getattr(loader, key), key
    for key in ("batch_size", "drop_last"):
        own = getattr(prepared.batch_sampler, key, None)
        assert own == getattr(loader.batch_sampler, key, None), key
    if not dispatch:
        assert prepared.batch_sampler is loader.batch_sampler
    before = torch.get_rng_state()
    order = lists(prepared)
    torch.set_rng_state(before)
    assert order == lists(loader)
    assert prepared.batch_size == options.get("batch_size")


def test_a_prepared_stream_describes_itself_as_the_user_did(accelerator):
    loader = DataLoader(Count(), batch_size=2, drop_last=True, num_workers=1)
    prepared = accelerator.prepare(loader)
    assert (prepared.batch_size, prepared.drop_last) == (2, True)
    assert prepared.dataset is loader.dataset
    assert lists(prepared) == [[0, 1], [2, 3]]


def test_a_prepared_loader_is_pickled(accelerator):
    prepared = accelerator.prepare(DataLoader(range(5), batch_size=2))
    first = next(iter(prepared))
    copy = pickle.loads(pickle.dumps(prepared))
    assert isinstance(copy, DataLoader)
    assert copy.batch_size == 2
    assert first.tolist() == lists(copy)[0] == [0, 1]


def test_what_prepare_and_skip_return_are_loaders(accelerator):
    prepared = accelerator.prepare(DataLoader(range(5), batch_size=2))
    view = skip_first_batches(prepared, 1)
    assert isinstance(view, DataLoader)
    assert isinstance(view, name("SkipDataLoader"))
    assert isinstance(prepared, name("DataLoaderShard"))
    assert not isinstance(DataLoader(range(5)), name("DataLoaderShard"))
    assert view.batch_size == 2


# --- constructors -----------------------------------------------------------------------------


def test_loaders_are_constructed_from_datasets(accelerator):
    shard = name("DataLoaderShard")(range(5), "cpu", batch_size=2)
    assert isinstance(shard, name("DataLoaderShard"))
    ends = []
    for _ in shard:
        ends.append((name("GradientState")().end_of_dataloader, shard.end_of_dataloader))
    assert ends == [(False, False), (False, False), (True, True)]
    assert lists(name("DataLoaderShard")(range(5), skip_batches=1, batch_size=2)) == [[2, 3], [4]]
    assert lists(name("SkipDataLoader")(range(5), skip_batches=2, batch_size=2)) == [[4]]
    dispatcher = name("DataLoaderDispatcher")(range(3), batch_size=2)
    assert isinstance(dispatcher, name("DataLoaderDispatcher"))
    assert lists(dispatcher) == [[0, 1], [2]]


def test_samplers_are_constructed_by_position():
    batches = BatchSampler(range(5), 2, False)
    assert list(resolve("accelerate.data_loader", "BatchSamplerShard")(batches, 2, 1)) == [
        [2, 3],
        [1, 2],
    ]
    assert list(name("IterableDatasetShard")(Count(), 1, False, 2, 1)) == [1, 3, 0]


def test_optimizers_and_schedulers_are_those_of_the_accelerator(accelerator):
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = name("AcceleratedOptimizer")(sgd, False)
    assert isinstance(optimizer, name("AcceleratedOptimizer"))
    assert optimizer.optimizer is sgd
    inner = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    scheduler = name("AcceleratedScheduler")(inner, optimizer, True, False)
    assert isinstance(scheduler, name("AcceleratedScheduler"))
    model = accelerator.prepare(model)
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_states_are_those_of_the_newest_accelerator():
    states = name("GradientState"), name("AcceleratorState")
    first = name("Accelerator")(cpu=True, gradient_accumulation_steps=3)
    second = name("Accelerator")(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert states[0]().num_steps == 2
    assert states[1]().mixed_precision == "bf16"
    assert (first.gradient_state.num_steps, first.state.mixed_precision) == (3, "no")
    with pytest.raises(ValueError, match="and the Accelerator has 'bf16'"):
        states[1]("fp16")
    del second
    gc.collect()
    with pytest.raises(RuntimeError, match="make one first"):
        states[0]()
    assert states[1]("fp16").mixed_precision == "fp16"


def test_fp16_on_a_cpu_is_float32_as_there():
    handlers = [AutocastKwargs(cache_enabled=False)]
    with pytest.warns(UserWarning, match="fp16 has no effect on a CPU, as with Accelerate"):
        accelerator = name("Accelerator")(
            cpu=True, mixed_precision="fp16", kwargs_handlers=handlers
        )
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1))
    accelerator.backward(loss.sum())
    assert (accelerator.mixed_precision, accelerator.scaler) == ("fp16", None)
    assert loss.dtype is torch.float32
    assert model.bias.grad == 1


def test_the_old_name_of_xla_is_its_name():
    kinds = name("DistributedType")
    assert kinds.TPU is kinds.XLA
    assert "TPU" not in [kind.name for kind in kinds]


def test_a_model_is_unwrapped_inside_too():
    inner = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Sequential(inner)))
    assert extract_model_from_parallel(model, True, True) is model
    assert isinstance(model[0], torch.nn.DataParallel)
    assert extract_model_from_parallel(model, recursive=True)[0][0] is inner


# --- options of torch.compile -----------------------------------------------------------------


def test_the_launcher_gives_a_plugin_of_torch_compile_what_it_leaves_out(monkeypatch):
    plugin = name("TorchDynamoPlugin")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "1")
    made = plugin(use_regional_compilation=True, dynamic=False)
    assert (made.backend, made.dynamic) == (name("DynamoBackend").EAGER, False)
    assert plugin().to_kwargs() == {"backend": "eager", "dynamic": True}
    assert plugin().to_dict()["backend"] == "eager"
    assert torch.compile(torch.nn.Linear(1, 1), **made.to_kwargs())(torch.ones(1)).shape == (1,)
    assert not plugin(backend="no").compiles
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    prepared = name("Accelerator")(cpu=True, dynamo_plugin=plugin(fullgraph=True)).prepare(net)
    assert is_compiled_module(prepared)


def test_a_plugin_without_a_backend_compiles_nothing_and_says_so():
    plugin = name("TorchDynamoPlugin")
    with pytest.warns(UserWarning, match="without a backend.*fullgraph, mode has no effect"):
        made = plugin(fullgraph=True, mode="max-autotune")
    assert not made.compiles
    assert not plugin(disable=True, backend="eager").compiles
