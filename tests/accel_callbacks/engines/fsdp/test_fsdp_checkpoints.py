"""Checkpoints under FSDP and HSDP: every layout loads what every other one saved."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import checkpoint_io
from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    RemoteError,
    TorchTensorParallelConfig,
    broadcast,
    load_checkpoint_in_model,
    utils,
)
from accel_callbacks.callbacks import EMA
from accel_callbacks.collectives import sharded
from accel_callbacks.distributed.topology import destroy_topology
from tests.support.bound import BOUND, patience
from tests.support.rounding import assert_reordered

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:the checkpoint was saved by"),
]

#: Ranks and arguments of the Accelerator.
LAYOUTS: dict[str, int] = {"one": 1, "ddp2": 2, "fsdp2": 2, "fsdp4": 4, "hsdp2x2": 4}
#: Cut by tensor parallelism: columns of 15 for FSDP's two, and a norm beside that is whole.
CUT: dict[str, int] = {"tp2": 2, "fsdp2tp2": 4}
RANKS = LAYOUTS | CUT
PLAN = {"blocks.*.inner": "colwise", "blocks.*.outer": "rowwise"}
PATIENCE = BOUND
STEPS = 12  # micro-batches of an epoch
# Where a run saves: between two windows, in the middle of the epoch; inside of a window.
PLACES = {"between": 6, "inside": 5}


class Block(torch.nn.Module):
    """A block whose parameters do not divide by four; some have fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(7, 30)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.outer = torch.nn.Linear(30, 7)
        self.norm = torch.nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.outer(torch.tanh(self.inner(x))) * self.scale.sum())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.out = torch.nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def accelerator(layout: str, timeout: timedelta = PATIENCE, **options: Any) -> Accelerator:
    if layout.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    if layout in CUT:
        shards = {"fsdp2tp2": 2, "tp2": 1}[layout]
        handler = TorchTensorParallelConfig(plan=PLAN)
        mesh = ParallelismConfig(dp_shard_size=shards, tp_size=2, tp_handler=handler)
        options["parallelism_config"] = mesh
    if layout == "tp2":
        options.pop("fsdp_plugin", None)
    if layout.startswith("hsdp"):
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        options |= {"parallelism_config": mesh, "fsdp_plugin": FullyShardedDataParallelPlugin()}
    return Accelerator(cpu=True, timeout=timeout, **options)


def prepared(layout: str, seed: int = 0, window: int = 3, **options: Any) -> tuple:
    accel = accelerator(layout, gradient_accumulation_steps=window, **options)
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    torch.manual_seed(1)
    inputs = torch.randn(8 * STEPS, 7)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, 8 // accel.data_world, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return accel, *accel.prepare(model, optimizer, loader, schedule)


def train(job: tuple, saves: dict[int, str] | None = None, counted: bool = False) -> None:
    """Go on to the end of the epoch; save after these micro-batches."""
    accel, model, optimizer, loader, schedule = job
    for number, (inputs, targets) in enumerate(loader, start=1):
        with accel.accumulate(model):
            loss = (model(inputs) - targets).square()
            if counted:
                accel.backward(loss.sum(), normalizer=loss.numel())
            else:
                accel.backward(loss.mean())
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if saves and number in saves:
            accel.save_state(saves[number])


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = getattr(tensor.detach(), "full_tensor", None)
    return (tensor.detach() if whole is None else whole()).clone()


def contents(job: tuple) -> dict[str, torch.Tensor]:
    """Weights, and states of the optimizer, as full tensors."""
    accel, model, optimizer, *_ = job
    bare = accel.unwrap_model(model)
    found = {name: full(value) for name, value in bare.state_dict().items()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value)
    return found


# --- every layout loads what every other one saved -------------------------------------------


def saving(layout: str, folder: str, counted: bool) -> dict[str, list]:
    """Train an epoch and save on the way; return its result."""
    job = prepared(layout)
    train(job, {at: f"{folder}/{layout}-{place}" for place, at in PLACES.items()}, counted)
    return {name: value.tolist() for name, value in contents(job).items()}


def going_on(
    layout: str, folder: str, counted: bool, saves: list[tuple[str, str]]
) -> list[dict[str, list]]:
    """Go on from what each layout saved at a place, to the end of the epoch."""
    results = []
    for before, place in saves:
        job = prepared(layout, seed=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job[0].load_state(f"{folder}/{before}-{place}")
        train(job, counted=counted)
        results.append({name: value.tolist() for name, value in contents(job).items()})
    return results


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def pools(pool: Any, pool_of_4: Any) -> Run:
    """Returns the processes of a layout."""
    return lambda layout: {2: pool, 4: pool_of_4}[RANKS[layout]]


@pytest.fixture(scope="module")
def run_on(pools: Run) -> Run:
    """Runs a function of a layout on its ranks: one is this process."""

    def run(layout: str, function: Run, *args: Any) -> Any:
        if RANKS[layout] == 1:
            return function(layout, *args)
        results = pools(layout).run(function, layout, *args)
        assert all(result == results[0] for result in results)
        return results[0]

    return run


@pytest.fixture(scope="module", params=["mean", pytest.param("counted", marks=pytest.mark.slow)])
def saved(request: Any, run_on: Run, tmp_path_factory: Any) -> tuple[str, bool, dict]:
    """What a run of each layout saved and where it came to."""
    folder, counted = str(tmp_path_factory.mktemp("saved")), request.param == "counted"
    return folder, counted, {one: run_on(one, saving, folder, counted) for one in LAYOUTS}


#: Of what is saved by shards and by replicas of shards alike: those of replicas hold both.
SLOW_FSDP2 = pytest.param("fsdp2", marks=pytest.mark.slow)


def turns(layout: str, others: Iterable[str], first: int = 0) -> list[tuple[str, str]]:
    """What a layout goes on from: its own at each place; of the others, the places take turns."""
    turn = list(RANKS).index(layout) + first
    return [
        (before, place)
        for number, before in enumerate(others)
        for even, place in enumerate(PLACES)
        if before == layout or (turn + number) % 2 == even
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_what_every_other_one_saved(run_on, saved, layout):
    """From its own, to the bit."""
    folder, counted, wanted = saved
    assert_goes_on(run_on, layout, folder, counted, wanted, turns(layout, LAYOUTS))


def assert_goes_on(run_on, layout, folder, counted, wanted, saves):
    results = run_on(layout, going_on, folder, counted, saves)
    for (before, _), result in zip(saves, results, strict=True):
        assert result.keys() == wanted[before].keys()
        for name, value in result.items():
            if before == layout:
                assert value == wanted[before][name], f"{name}, not bitwise"
            assert_reordered(value, wanted[before][name], f"{before} {name}")


@pytest.fixture(scope="module", params=[False, True], ids=["mean", "counted"])
def saved_by_all(request: Any, run_on: Run, tmp_path_factory: Any) -> tuple[str, bool, dict]:
    """What a run of each layout saved, those of tensor parallelism included."""
    folder, counted = str(tmp_path_factory.mktemp("all")), request.param
    return folder, counted, {one: run_on(one, saving, folder, counted) for one in RANKS}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RANKS)
def test_layouts_of_tensor_parallelism_join_the_others(run_on, saved_by_all, layout):
    folder, counted, wanted = saved_by_all
    saves = turns(layout, RANKS if layout in CUT else CUT, first=counted)
    assert_goes_on(run_on, layout, folder, counted, wanted, saves)


def test_tensor_parallelism_goes_on_from_one_process_and_back(run_on, tmp_path):
    """In the middle of a window: the quick part of the one above."""
    folder, layouts = str(tmp_path), ["one", "tp2"]
    wanted = {one: run_on(one, saving, folder, False) for one in layouts}
    for layout in layouts:
        saves = [(before, "inside") for before in layouts]
        assert_goes_on(run_on, layout, folder, False, wanted, saves)


# --- whole tensors of sharded ones -----------------------------------------------------------


def on_2_and_4(test: Any) -> Any:
    return pytest.mark.parametrize("layout", ["fsdp2", "fsdp4", "hsdp2x2"])(test)


def gathered_states(layout: str) -> list:
    accel, model, *_ = prepared(layout)
    expected = {name: full(value) for name, value in model.state_dict().items()}
    default = accel.get_state_dict(model)
    kept = accel.get_state_dict(model, all_ranks=True)
    same = kept.keys() == expected.keys() and all(
        type(kept[name]) is torch.Tensor and torch.equal(kept[name], expected[name])
        for name in expected
    )
    with torch.no_grad():
        for value in kept.values():
            value.zero_()
    unchanged = all(torch.equal(full(v), expected[n]) for n, v in model.state_dict().items())
    whole = all(torch.equal(value, expected[name]) for name, value in default.items())
    return [len(default), whole, same, unchanged, len(expected)]


@on_2_and_4
def test_get_state_dict_gathers_on_rank_0_or_on_all(pools, layout):
    results = pools(layout).run(gathered_states, layout)
    number = results[0][-1]
    assert results == [
        [0 if rank else number, True, True, True, number] for rank in range(len(results))
    ]


def counts_gathered(layout: str) -> list[int]:
    """For each gathered tensor, how many gathered before it this rank still holds."""
    accel, model, *_ = prepared(layout)
    gathered: list[weakref.ref[torch.Tensor]] = []
    alive = []
    gather = sharded.full_tensor

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in gathered))
        whole = gather(tensor)
        gathered.append(weakref.ref(whole))
        return whole

    sharded.full_tensor = counting
    try:
        accel.get_state_dict(model)
    finally:
        sharded.full_tensor = gather
    return alive


@on_2_and_4
def test_ranks_hold_one_gathered_tensor_at_a_time(pools, layout):
    for alive in pools(layout).run(counts_gathered, layout):
        assert len(alive) == len(list(Net().parameters()))
        assert max(alive) <= 1


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 6)  # with four ranks, one has none of it
        self.block = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(x)))


def gathers_tied(layout: str) -> list:
    accel = accelerator(layout)
    torch.manual_seed(0)
    model = accel.prepare(Tied())
    state = accel.get_state_dict(model, all_ranks=True)
    return [state["head.weight"] is state["embedding.weight"], len(state)]


@on_2_and_4
def test_tied_weights_stay_tied_in_the_gathered_state(pools, layout):
    results = pools(layout).run(gathers_tied, layout)
    assert results[0] == [True, 4]
    assert all(length == 4 for _, length in results)


def gathers_tensors(layout: str) -> list:
    accel, model, *_ = prepared(layout)
    weight = accel.unwrap_model(model).blocks[0].inner.weight
    whole = accel.gather({"weight": weight, "rank": torch.tensor([accel.process_index])})
    assert type(whole["weight"]) is torch.Tensor
    assert not whole["weight"].requires_grad
    messages = []
    for refused in (accel.reduce, broadcast):
        with pytest.raises(TypeError) as error:
            refused(weight)
        messages.append(str(error.value))
    return [whole["weight"].tolist(), full(weight).tolist(), whole["rank"].tolist(), messages]


@on_2_and_4
def test_gather_returns_the_whole_tensor_of_a_sharded_one(pools, layout):
    for whole, wanted, ranks, messages in pools(layout).run(gathers_tensors, layout):
        assert whole == wanted
        assert len(whole) == 30
        assert ranks == list(range(LAYOUTS[layout]))
        assert all("sharded over the processes already" in text for text in messages)


def writes_models(layout: str, folder: str) -> dict[str, list] | None:
    accel, model, *_ = prepared(layout)
    accel.save_model(model, f"{folder}/saved", max_shard_size=2000)
    accel.save(model.state_dict(), f"{folder}/state.safetensors")
    accel.save(accel.get_state_dict(model), f"{folder}/gathered.safetensors")
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: value.tolist() for name, value in state.items()}


@on_2_and_4
def test_saved_models_are_bitwise_the_gathered_weights(pools, layout, tmp_path):
    wanted = pools(layout).run(writes_models, layout, str(tmp_path))[0]
    plain = Net()
    load_checkpoint_in_model(plain, tmp_path / "saved")
    assert {name: value.tolist() for name, value in plain.state_dict().items()} == wanted
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    for name in ("state", "gathered"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert {key: value.tolist() for key, value in found.items()} == wanted


def loads_weights(layout: str, folder: str) -> list:
    """Plain weights, and a checkpoint, into a sharded model."""
    results = []
    for path in (
        f"{folder}/model",
        checkpoint_io.CheckpointFolder(f"{folder}/checkpoints").path(1),
    ):
        _, model, *_ = prepared(layout, seed=5)
        load_checkpoint_in_model(model, path, strict=True)
        results.append({n: full(v).tolist() for n, v in model.state_dict().items()})
    _, model, *_ = prepared(layout, seed=5)
    checkpoint_io.CheckpointFolder(f"{folder}/checkpoints").load_latest(
        into={"models": {"0": model.state_dict()}},
        only="models/0/*",
        group=checkpoint_io.TorchGroup(),
    )
    results.append({n: full(v).tolist() for n, v in model.state_dict().items()})
    return results


@on_2_and_4
def test_weights_load_into_a_sharded_model(pools, layout, tmp_path):
    accel, model, *_ = prepared("one")
    accel.save_model(model, tmp_path / "model")
    folder = checkpoint_io.CheckpointFolder(tmp_path / "checkpoints")
    state = {"models": {"0": model.state_dict()}}
    folder.save(1, state)
    wanted = {name: value.tolist() for name, value in model.state_dict().items()}
    for results in pools(layout).run(loads_weights, layout, str(tmp_path)):
        assert results == [wanted] * 3


def gathers_on_one_rank(layout: str, debug: bool, then: str, seconds: float) -> None:
    """Only the main process calls, as scripts for DDP may; the others go on."""
    destroy_topology()  # the group of other tests has a longer timeout
    accel = accelerator(layout, timeout=timedelta(seconds=seconds), debug=debug)
    model = accel.prepare(Net())
    if accel.is_main_process:
        accel.get_state_dict(model)
    if then == "wait":
        accel.wait_for_everyone()
    if then == "forward":
        model(torch.ones(2, 7)).sum().backward()


def test_debug_mode_names_the_rank_that_does_not_gather(pools):
    for kind, text in pools("fsdp2").outcomes(
        gathers_on_one_rank, "fsdp2", True, "wait", patience(8)
    ):
        assert kind == "DistributedOperationException"
        assert re.search(r"process 0: get_state_dict\(all_ranks=False\) at test_fsdp", text)
        assert "process 1: wait_for_everyone()" in text


@pytest.mark.parametrize(
    "then", ["wait", *(pytest.param(one, marks=pytest.mark.slow) for one in ("end", "forward"))]
)
def test_a_rank_that_does_not_gather_is_named_within_the_timeout(pools, then):
    pool = pools("fsdp2")
    try:
        kind, text = pool.outcomes(gathers_on_one_rank, "fsdp2", False, then, patience(8))[0]
    finally:
        pool.restart()
    assert kind != "ok"
    assert "get_state_dict" in text.splitlines()[0]
    assert re.search(r"rank(s \[1\]| 1)", text.splitlines()[0])


# --- all parts of a training state -----------------------------------------------------------


class Counting(torch.nn.Module):
    """Saves more than its tensors, so it loads its state itself."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counting_job(layout: str, seed: int) -> tuple:
    accel = accelerator(layout)
    torch.manual_seed(seed)
    model = Counting(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accel, *accel.prepare(model, optimizer)


def step(accel: Accelerator, model: Any, optimizer: Any) -> None:
    accel.backward(model(torch.ones(2, 7)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def tensors_of(job: tuple) -> dict[str, list]:
    return {name: value.tolist() for name, value in contents((job[0], job[1], job[2])).items()}


def saves_in_the_background(layout: str, path: str) -> list:
    accel, model, optimizer = counting_job(layout, 0)
    step(accel, model, optimizer)
    extra = accel.unwrap_model(model).state_dict().pop("_extra_state")
    wanted = tensors_of_counting(accel, model, optimizer)
    accel.save_state(path, async_save=True)
    for _ in range(3):  # in place, into the tensors that are being saved
        step(accel, model, optimizer)
    accel.wait_for_save()
    return [wanted, extra]


def tensors_of_counting(accel: Accelerator, model: Any, optimizer: Any) -> dict[str, list]:
    inner = accel.unwrap_model(model).inner
    found = {name: full(value).tolist() for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value).tolist()
    return found


def loads_counting(layout: str, path: str) -> list:
    accel, model, optimizer = counting_job(layout, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accel.load_state(path, verify="full")
    return [tensors_of_counting(accel, model, optimizer), {"calls": model.calls}]


@pytest.mark.parametrize("before", [SLOW_FSDP2, "hsdp2x2"])
def test_background_saves_hold_the_state_of_their_call(pools, run_on, tmp_path, before):
    """And a model with a state of its own, which tensors cannot be written into directly."""
    path = str(tmp_path / "c")
    wanted = run_on(before, saves_in_the_background, path)
    assert wanted[1] == {"calls": 1}
    for layout in LAYOUTS:
        assert run_on(layout, loads_counting, path) == wanted


def averaging_job(layout: str, seed: int) -> tuple:
    averaging = EMA(decay=0.5)
    accel = accelerator(layout, callbacks=[averaging])
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(model, optimizer)
    return averaging, accel, model, optimizer


def averages_of(averaging: Any) -> dict[str, list]:
    average = averaging.state_dict()["average"]
    return {name: full(value).tolist() for name, value in average.items()}


def saves_averages(layout: str, path: str) -> dict[str, list]:
    averaging, *job = averaging_job(layout, 0)
    for _ in range(3):
        step(*job)
    job[0].save_state(path)
    return averages_of(averaging)


def loads_averages(layout: str, path: str) -> dict[str, list]:
    averaging, *job = averaging_job(layout, 5)
    step(*job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job[0].load_state(path)
    with averaging.applied():
        held = job[0].unwrap_model(job[1]).state_dict()
        applied = {name: full(value).tolist() for name, value in held.items() if name != "seen"}
    found = averages_of(averaging)
    assert {
        name.partition(".")[2]: value for name, value in found.items() if "seen" not in name
    } == applied
    return found


@pytest.mark.parametrize(
    "before", [pytest.param("one", marks=pytest.mark.slow), "fsdp4", "hsdp2x2"]
)
def test_averages_of_sharded_weights_load_on_every_layout(run_on, tmp_path, before):
    wanted = run_on(before, saves_averages, str(tmp_path / "c"))
    for layout in LAYOUTS:
        assert run_on(layout, loads_averages, str(tmp_path / "c")) == wanted


def frozen_job(layout: str, seed: int) -> tuple:
    """A model whose body is the same for all seeds, and frozen."""
    accel = accelerator(layout)
    torch.manual_seed(0)
    model = Net()
    model.blocks.requires_grad_(False)
    torch.manual_seed(seed)
    model.out.reset_parameters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return accel, *accel.prepare(model, optimizer)


def saves_the_head(layout: str, path: str) -> dict[str, list]:
    job = frozen_job(layout, 0)
    step(*job)
    job[0].save_state(path, trainable_only=True)
    return tensors_of(job)


def loads_the_head(layout: str, path: str) -> dict[str, list]:
    job = frozen_job(layout, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job[0].load_state(path)
    assert set(job[0].load_report.kept) >= {"0.blocks.0.scale", "0.blocks.1.inner.weight"}
    return tensors_of(job)


@pytest.mark.parametrize("before", ["ddp2", "fsdp4"])
def test_a_save_of_the_trained_weights_alone(run_on, tmp_path, before):
    path = tmp_path / "c"
    wanted = run_on(before, saves_the_head, str(path))
    saved = checkpoint_io.read_manifest(path).tensors
    assert {key for key in saved if key.startswith("models/")} == {
        "models/0/out.weight",
        "models/0/out.bias",
        "models/0/seen",
    }
    for layout in LAYOUTS:
        assert run_on(layout, loads_the_head, str(path)) == wanted


def scaled_job(layout: str, path: str, load: bool) -> list:
    accel = accelerator(layout, mixed_precision="fp16")
    torch.manual_seed(5 if load else 0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(model, optimizer)
    if load:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accel.load_state(path)
    else:
        for factor in (1.0, float("inf")):
            accel.backward(model(torch.ones(2, 7)).square().mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
        accel.save_state(path)
    return [accel.scaler.get_scale(), tensors_of((accel, model, optimizer))]


@pytest.mark.parametrize("before", [SLOW_FSDP2, "hsdp2x2"])
def test_the_loss_scale_of_fp16_is_loaded(run_on, tmp_path, before):
    wanted = run_on(before, scaled_job, str(tmp_path / "c"), False)
    assert wanted[0] < 2.0**16  # halved by the overflow
    for layout in LAYOUTS:
        assert run_on(layout, scaled_job, str(tmp_path / "c"), True) == wanted


# --- Accelerate's names ----------------------------------------------------------------------


def small_job(layout: str, seed: int) -> tuple:
    accel = accelerator(layout)
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accel, *accel.prepare(model, optimizer)


def saves_by_accelerates_names(layout: str, folder: str) -> dict[str, list]:
    accel, model, optimizer = small_job(layout, 0)
    step(accel, model, optimizer)
    utils.save_fsdp_model(None, accel, model, folder)
    utils.save_fsdp_optimizer(None, accel, optimizer, model, folder)
    wanted = tensors_of((accel, model, optimizer))
    step(accel, model, optimizer)
    utils.save_fsdp_model(None, accel, model, folder, 1)
    utils.save_fsdp_model(None, accel, model, folder, 1)  # again, over the last one
    utils.merge_fsdp_weights(
        f"{folder}/pytorch_model_fsdp_1", f"{folder}/merged", remove_checkpoint_dir=True
    )
    return wanted


def loads_by_accelerates_names(layout: str, folder: str) -> dict[str, list]:
    accel, model, optimizer = small_job(layout, 5)
    utils.load_fsdp_model(None, accel, model, folder)
    utils.load_fsdp_optimizer(None, accel, optimizer, model, f"{folder}/optimizer_0")
    return tensors_of((accel, model, optimizer))


@pytest.mark.parametrize("before", [SLOW_FSDP2, "hsdp2x2"])
def test_models_and_optimizers_by_accelerates_names(run_on, tmp_path, before):
    wanted = run_on(before, saves_by_accelerates_names, str(tmp_path))
    for layout in LAYOUTS:
        assert run_on(layout, loads_by_accelerates_names, str(tmp_path)) == wanted
    assert not (tmp_path / "pytorch_model_fsdp_1").exists()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == set(Net().state_dict())
    assert merged["out.bias"].tolist() != wanted["out.bias"]


def loads_of_accelerate(layout: str, folder: str) -> dict[str, list]:
    accel, model, optimizer = small_job(layout, 5)
    utils.load_fsdp_model(None, accel, model, folder)
    return tensors_of((accel, model, optimizer))


def test_a_sharded_checkpoint_of_accelerate_is_read(run_on, tmp_path):
    """Its layout: a folder of torch.distributed.checkpoint with the weights below "model"."""
    torch.manual_seed(0)
    state = Net().state_dict()
    place = str(tmp_path / "pytorch_model_fsdp_0")
    dcp.save({"model": state}, checkpoint_id=place, no_dist=True)
    wanted = {name: value.tolist() for name, value in state.items()}
    for layout in ("fsdp2", "hsdp2x2"):
        assert run_on(layout, loads_of_accelerate, str(tmp_path)) == wanted


def loads_what_does_not_fit(layout: str, folder: str) -> list[str]:
    accel = accelerator(layout)
    model = accel.prepare(torch.nn.Linear(7, 30))
    messages = []
    with pytest.raises((checkpoint_io.CheckpointError, RemoteError)) as error:
        utils.load_fsdp_model(None, accel, model, folder)
    messages.append(str(error.value))
    with pytest.raises(ValueError, match="pickle"):
        utils.merge_fsdp_weights(folder, f"{folder}/m", safe_serialization=False)
    return messages


def test_a_model_that_does_not_fit_is_an_error_on_all_ranks(pools, run_on, tmp_path):
    run_on("fsdp2", saves_by_accelerates_names, str(tmp_path))
    for (message,) in pools("fsdp4").run(loads_what_does_not_fit, "fsdp4", str(tmp_path)):
        assert "blocks.0" in message


def shards_a_reference(layout: str) -> list:
    accel = accelerator(layout)
    torch.manual_seed(0)
    plain = Net()
    inputs = torch.randn(4, 7)
    wanted = plain(inputs)
    model = utils.fsdp2_prepare_model(accel, plain)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    whole = sum(p.numel() for p in Net().parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), wanted)
    return [held < whole, len(accel.models) if hasattr(accel, "models") else 0]


def test_a_reference_model_is_sharded_and_not_saved(pools):
    for smaller, registered in pools("fsdp4").run(shards_a_reference, "fsdp4"):
        assert smaller
        assert registered == 0


# --- damage, and ranks that fail -------------------------------------------------------------


def saves_twice(layout: str, folder: str) -> list:
    job = prepared(layout, project_dir=folder)
    accel, model, optimizer = job[:3]
    wanted = []
    for _ in range(2):
        step(accel, model, optimizer)
        path = accel.save_state(max_shard_size=2000)
        wanted.append(tensors_of(job))
    return [path, wanted]


def loads_the_newest(layout: str, folder: str) -> list:
    job = prepared(layout, seed=5, project_dir=folder)
    path = job[0].load_state()
    return [path, tensors_of(job)]


@pytest.mark.parametrize("section", [pytest.param("models", marks=pytest.mark.slow), "optimizers"])
def test_a_damaged_shard_is_passed_over_on_all_ranks(run_on, tmp_path, section):
    """It is read by one rank of four, after others have read theirs into the model."""
    newest, wanted = run_on("fsdp4", saves_twice, str(tmp_path))
    path, loaded = run_on("fsdp4", loads_the_newest, str(tmp_path))
    assert (path, loaded) == (newest, wanted[1])
    manifest = checkpoint_io.read_manifest(newest)
    entries = [one for key, one in manifest.tensors.items() if key.startswith(section)]
    chunk = max((c for e in entries for c in e.chunks), key=lambda c: (len(c.checksums), c.file))
    file = Path(newest) / manifest.files[chunk.file].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    path, loaded = run_on("fsdp4", loads_the_newest, str(tmp_path))
    assert path != newest
    assert loaded == wanted[0]


def saves_with_a_bad_rank(layout: str, path: str, bad: int) -> list:
    job = prepared(layout)
    accel, model, optimizer = job[:3]
    step(accel, model, optimizer)
    accel.save_state(path)
    wanted = tensors_of(job)
    step(accel, model, optimizer)
    if accel.process_index == bad:
        accel.register_for_checkpointing(Unsavable())
    else:
        accel.register_for_checkpointing(Savable())
    with pytest.raises((OSError, RemoteError), match="no state today") as error:
        accel.save_state(path)
    return [wanted, f"{type(error.value).__name__}: {error.value}"]


class Savable:
    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Unsavable(Savable):
    def state_dict(self) -> dict[str, int]:
        raise OSError("no state today")


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_cannot_save_leaves_the_checkpoint_before(pools, run_on, tmp_path, bad):
    path = str(tmp_path / "c")
    results = pools("fsdp4").run(saves_with_a_bad_rank, "fsdp4", path, bad)
    for rank, (_, message) in enumerate(results):
        assert message.startswith("OSError" if rank == bad else "RemoteError")
    before = run_on("hsdp2x2", loads_one, path)
    assert before == results[0][0]


def loads_one(layout: str, path: str) -> dict[str, list]:
    job = prepared(layout, seed=5)
    job[0].load_state(path, only=["models", "optimizers"])
    return tensors_of(job)


def written(layout: str) -> int:
    accel = accelerator(layout)
    model = torch.nn.Linear(7, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model, optimizer = accel.prepare(model, optimizer)
    accel.backward(model(torch.ones(2, 7)).sum())
    optimizer.step()
    return accel.training_state.nbytes()


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_each_rank_knows_about_how_much_it_writes(pool: Any, layout: str) -> None:
    # half of the weights and of their two averages; of the two numbers of steps each has a half
    assert pool.run(written, layout) == [(3 * 7 * 4 + 3 * 4 + 2) * 4 // 2] * 2
