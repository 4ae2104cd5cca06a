"""load_state on several processes: agreed on all, on another number of them, and of DTensors."""

from __future__ import annotations

import io
import random
import shutil
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, DistributedDataParallelKwargs, ResumeError
from accel_callbacks.strategy.single_device import SingleDevice
from tests.support.bound import BOUND
from tests.support.pool import Pool
from tests.support.rounding import reordered
from tests.support.strategies import strategy

pytestmark = pytest.mark.distributed


def job(seed: int, steps: int = 1, layers: int = 8, **options: Any) -> tuple:
    torch.manual_seed(seed)
    accel = Accelerator(cpu=True, timeout=BOUND, **options)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(layers)])
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(steps):
        step(accel, model, optimizer)
    return accel, model, optimizer


def step(accel: Accelerator, model: Any, optimizer: Any) -> None:
    accel.backward(model(torch.ones(2, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def digest(accel: Accelerator) -> list:
    """All weights and states, as plain numbers that are equal only where the bits are."""
    optimizers = [
        [float(value.double().sum()) for state in o.state.values() for value in state.values()]
        for o in accel.optimizers
    ]
    models = [
        [value.double().flatten().tolist() for value in model.state_dict().values()]
        for model in accel.bare_models
    ]
    return [models, optimizers]


# --- bitwise ---------------------------------------------------------------------------------


def goes_on(folder: str, static_graph: bool) -> list[bool]:
    """Whether the gradients of each step after a load are those of the steps after the save."""

    def train(first: int) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        options = DistributedDataParallelKwargs(static_graph=static_graph)
        accel = Accelerator(cpu=True, kwargs_handlers=[options], timeout=BOUND)
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)])
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if first:
            accel.load_state(folder)
        gradients = []
        own = torch.Generator().manual_seed(accel.process_index)
        inputs = torch.randn(6, 2, 16, generator=own)
        for number in range(first, len(inputs)):
            accel.backward(model(inputs[number]).square().sum())
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if number == 2 and not first:
                accel.save_state(folder)
        return gradients

    unbroken, resumed = train(0), train(3)
    return [all(map(torch.equal, *pair)) for pair in zip(unbroken[3:], resumed, strict=True)]


@pytest.mark.parametrize("static_graph", [False, True])
def test_the_first_step_after_a_load_adds_up_as_an_unbroken_run(
    pool_of_4: Pool, tmp_path: Path, static_graph: bool
) -> None:
    """Of four numbers, whose sum depends on the order."""
    for equal in pool_of_4.run(goes_on, str(tmp_path / "c"), static_graph):
        assert equal == [True] * 3


# --- agreed ----------------------------------------------------------------------------------


def saves_two(folder: str) -> list:
    accel, model, optimizer = job(0, project_dir=folder)
    paths, wanted = [], []
    for _ in range(2):
        paths.append(accel.save_state(max_shard_size=3_000))
        wanted.append(digest(accel))
        step(accel, model, optimizer)
    return [paths, wanted]


def flip_last_weight(folder: Path) -> None:
    """A wrong byte in the last file of a state that is read in place."""
    manifest = checkpoint_io.read_manifest(folder)
    chunks = [e.chunks[0] for key, e in manifest.tensors.items() if key.startswith("optimizers/")]
    file = folder / manifest.files[max(chunk.file for chunk in chunks)].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def loads_the_newest(folders: list[str]) -> list:
    accel, model, optimizer = job(1, project_dir="memory://of-each-process")
    files = fsspec.filesystem("memory")  # one path, and what is there differs
    if files.exists("/of-each-process"):
        files.rm("/of-each-process", recursive=True)
    files.put(folders[accel.process_index], "/of-each-process", recursive=True)
    with redirect_stderr(io.StringIO()) as said:
        path = accel.load_state()
    told = [line for line in said.getvalue().splitlines() if "passed over" in line]
    result = [Path(path).name, digest(accel), told]
    step(accel, model, optimizer)
    return result


def loads_and_is_refused(folders: list[str], name: str, older: str) -> list:
    accel, model, optimizer = job(1)
    seen = []
    here = folders[accel.process_index]
    for action in (
        lambda: accel.load_state(f"{here}/checkpoints/{name}"),
        lambda: step(accel, model, optimizer),
        optimizer.step,
        lambda: accel.save_state(f"{here}/again"),
    ):
        try:
            action()
            seen.append("ok")
        except Exception as error:
            seen.append(type(error).__name__)
    accel.load_state(f"{here}/checkpoints/{older}")
    step(accel, model, optimizer)
    return seen


def test_damage_that_one_process_meets_half_way_sends_all_to_the_one_before(pool, tmp_path):
    ((older, newer), wanted), _ = pool.run(saves_two, str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # what the second process sees
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    flip_last_weight(tmp_path / "b" / Path(newer).relative_to(tmp_path / "a"))
    results = pool.run(loads_the_newest, folders)
    for name, state, _ in results:
        assert name == Path(older).name
        assert state == wanted[0]
    (line,), others = (told for _, _, told in results)  # once, not by each process
    assert line.startswith("[accel] passed over ")
    assert "rank 1: " in line
    assert others == []
    seen = pool.run(loads_and_is_refused, folders, Path(newer).name, Path(older).name)
    refused = ["ResumeError"] * 3
    assert seen == [["RemoteError", *refused], ["TornLoadError", *refused]]


def saves_one(path: str) -> list:
    accel, *_ = job(0)
    accel.save_state(path)
    return digest(accel)


@pytest.mark.filterwarnings("ignore")
def test_a_misfit_on_one_process_changes_nothing_on_any(pool, tmp_path):
    path = str(tmp_path / "c")
    pool.run(saves_one, path)
    results = pool.run(ddp_free, path)
    assert results == [["RemoteError", True, None], ["ResumeError", True, None]]


def ddp_free(path: str) -> list:
    """Models that differ between processes cannot be wrapped, so they are prepared frozen."""
    torch.manual_seed(1)
    accel = Accelerator(cpu=True, timeout=BOUND)
    layers = 8 if accel.process_index == 0 else 7
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(layers)])
    accel.prepare(model.requires_grad_(False))
    before = digest(accel)
    try:
        accel.load_state(path, only="models", strict=True)
        outcome = "ok"
    except Exception as error:
        outcome = type(error).__name__
    return [outcome, digest(accel) == before, accel.loop.step.half_loaded]


# --- another number of processes -------------------------------------------------------------


def saves_all(path: str) -> list:
    accel, model, optimizer = job(0)
    loader = accel.prepare(torch.utils.data.DataLoader(range(24), batch_size=2, shuffle=True))
    seen = []
    for batch in loader:
        seen.append(accel.gather(batch).tolist())
        step(accel, model, optimizer)
        if len(seen) == 2:
            random.seed(100 + accel.process_index)
            torch.manual_seed(200 + accel.process_index)
            accel.save_state(path)
            saved = digest(accel)
    return [saved, seen]


def loads_all(path: str, strict: bool) -> list:
    random.seed(1)
    accel, *_ = job(1)
    loader = accel.prepare(torch.utils.data.DataLoader(range(24), batch_size=2, shuffle=True))
    torch.manual_seed(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            accel.load_state(path, strict=strict)
        except (ResumeError, RuntimeError) as error:
            return [str(error)]
    told = [str(one.message) for one in caught if "processes and is loaded" in str(one.message)]
    numbers = [random.random(), torch.rand(1).item()]
    return [digest(accel), [accel.gather(batch).tolist() for batch in loader], numbers, told]


def drawn(rank: int) -> list[float]:
    state, generator = random.Random(100 + rank), torch.Generator().manual_seed(200 + rank)
    return [state.random(), torch.rand(1, generator=generator).item()]


def flat(batches: list) -> list:
    return sorted(sample for batch in batches for sample in batch)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (2, 2)])
def test_a_run_goes_on_on_another_number_of_processes(pool, pool_of_4, tmp_path, before, after):
    def on(world: int, function: Any, *args: Any) -> list:
        pools = {2: pool, 4: pool_of_4}
        return [function(*args)] if world == 1 else pools[world].run(function, *args)

    path = str(tmp_path / "c")
    saved, seen = on(before, saves_all, path)[0]
    left = flat(seen[2:])
    results = on(after, loads_all, path, False)
    for rank, (state, batches, numbers, told) in enumerate(results):
        assert state == saved
        assert flat(batches) == left
        assert (numbers == drawn(rank)) == (rank < before)
        assert len(told) == (before != after)
        kept = min(before, after) - 1
        alike = "rank 0" if kept == 0 else f"ranks 0 to {kept}"
        assert all(
            f"random generators are not restored, except on {alike}" in text for text in told
        )
    if before != after:
        for (text,) in on(after, loads_all, path, True):
            assert "pass strict=False" in text


# --- inside of a gradient window ---------------------------------------------------------------


def in_a_window(seed: int) -> tuple:
    return job(seed, steps=0, layers=1, gradient_accumulation_steps=4)


def saves_in_a_window(path: str, ranks_apart: bool) -> list:
    accel, model, _ = in_a_window(0)
    with accel.accumulate(model):
        inputs = torch.ones(2, 16) * (1 + ranks_apart * accel.process_index)
        accel.backward(model(inputs).square().mean())
    accel.save_state(path)
    return accel.unwrap_model(model)[0].weight.grad.flatten().tolist()


def loads_in_a_window(path: str) -> list:
    accel, model, _ = in_a_window(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accel.load_state(path)
    gradient = accel.unwrap_model(model)[0].weight.grad
    return [accel.loop.window.position, gradient.flatten().tolist()]


def test_the_gradients_of_a_window_are_each_rank_s_own_and_elsewhere_their_mean(
    alone, pool, tmp_path
):
    path = str(tmp_path / "c")
    own = pool.run(saves_in_a_window, path, True)
    assert own[0] != own[1]
    assert pool.run(loads_in_a_window, path) == [[1, gradient] for gradient in own]
    mean = torch.tensor(own).mean(0).tolist()
    assert alone.run(loads_in_a_window, path) == [[1, reordered(mean)]]


def test_two_ranks_go_on_in_a_window_of_one(alone, pool, tmp_path):
    path = str(tmp_path / "c")
    (gradient,) = alone.run(saves_in_a_window, path, False)
    assert pool.run(loads_in_a_window, path) == [[1, gradient]] * 2


# --- DTensors --------------------------------------------------------------------------------


class Spread(SingleDevice):
    """Leaves models as they are, whose parameters are spread already."""

    has_gradient_sync = True


def spread_job(seed: int, steps: int, mesh_shape: tuple[int, ...]) -> tuple:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(seed)
    with strategy(Spread):
        accel = Accelerator(cpu=True, timeout=BOUND)
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Shard(0), Replicate()][: len(mesh_shape)]
    if len(mesh_shape) == 2:
        placements = [Replicate(), Shard(1)]
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7))
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            own = placements if parameter.dim() > 1 else [Replicate()] * len(mesh_shape)
            spread = distribute_tensor(parameter.detach(), mesh, own)
            setattr(layer, name, torch.nn.Parameter(spread))
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(steps):
        sum(parameter.square().sum() for parameter in model.parameters()).full_tensor().backward()
        optimizer.step()
        optimizer.zero_grad()
    return accel, model, optimizer


def whole(value: torch.Tensor) -> list:
    full = getattr(value, "full_tensor", None)
    return (value if full is None else full()).double().flatten().tolist()


def contents(model: Any, optimizer: Any) -> list:
    return [
        [whole(value.detach()) for value in model.state_dict().values()],
        [whole(value) for state in optimizer.state.values() for value in state.values()],
    ]


def saves_spread(path: str, mesh_shape: tuple[int, ...]) -> list:
    accel, model, optimizer = spread_job(0, 1, mesh_shape)
    accel.save_state(path)
    accel.save_model(model, f"{path}-model", max_shard_size=100)
    return contents(model, optimizer)


def loads_spread(path: str, mesh_shape: tuple[int, ...], steps: int) -> list:
    accel, model, optimizer = spread_job(1, steps, mesh_shape)
    places = [p.to_local().data_ptr() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accel.load_state(path)
    assert places == [p.to_local().data_ptr() for p in model.parameters()]
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].placements == parameter.placements
        assert state["exp_avg"].to_local().shape == parameter.to_local().shape
    return contents(model, optimizer)


@pytest.mark.parametrize("steps", [0, 1])
def test_spread_parameters_and_their_states_go_on_on_another_mesh(pool, pool_of_4, tmp_path, steps):
    path = str(tmp_path / "c")
    wanted = pool.run(saves_spread, path, (2,))[0]
    for group, mesh_shape in ((pool, (2,)), (pool_of_4, (4,)), (pool_of_4, (2, 2))):
        assert all(one == wanted for one in group.run(loads_spread, path, mesh_shape, steps))


def test_one_process_loads_what_was_spread_and_save_model_writes_it_whole(pool, tmp_path):
    path = str(tmp_path / "c")
    weights, states = pool.run(saves_spread, path, (2,))[0]
    accel = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7))
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        accel.load_state(path)
    assert contents(model, optimizer) == [weights, states]
    saved = checkpoint_io.load_model_state(f"{path}-model")
    assert [whole(saved[name]) for name in model.state_dict()] == weights
