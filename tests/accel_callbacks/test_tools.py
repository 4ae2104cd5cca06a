"""The tools around a loop, on two processes: memory, logging, LocalSGD, profiles, triggers."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    DistributedDataParallelKwargs,
    LocalSGD,
    ProfileKwargs,
    find_executable_batch_size,
    get_logger,
    set_seed,
    synchronize,
    tqdm,
)

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    # Longer than the pool waits: a process that is left in a collective fails the test.
    return Accelerator(cpu=True, timeout=timedelta(minutes=5), **options)


def value_of(accel: Accelerator) -> torch.Tensor:
    """1 on the first process, 2 on the second, ..."""
    return torch.full((1, 1), accel.process_index + 1.0)


def line(accel: Accelerator, lr: float = 1.0) -> tuple:
    """A prepared model y = weight * x with its optimizer."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr))


def weight_of(accel: Accelerator, model: torch.nn.Module) -> float:
    return accel.unwrap_model(model).weight.item()


# --- the search for a batch size ---------------------------------------------------------------


def out_of_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)  # the real error of the real allocator


def halving(size: int) -> int:
    return size // 2


def fails_in_training(rank: int, step: int) -> list:
    """One process runs out of memory before its backward; the other waits in that all-reduce."""
    accel = accelerator()
    seen = []

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=halving)
    def train(batch_size: int) -> float:
        accel.free_memory()
        seen.append(batch_size)
        model, optimizer = line(accel)
        for current in range(3):
            if (accel.process_index, current) == (rank, step) and batch_size > 4:
                out_of_memory()
            accel.backward(model(value_of(accel)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return weight_of(accel, model)

    weight = train()
    return [seen, weight, accel.reduce(value_of(accel), "sum").item()]


@pytest.mark.parametrize(("rank", "step"), [(1, 0), (1, 2), (0, 1)])
def test_memory_that_runs_out_on_one_process_makes_all_try_the_next_size(pool, rank, step):
    assert pool.run(fails_in_training, rank, step) == [[[16, 8, 4], -4.5, 3.0]] * 2


def fails_in_backward() -> list:
    """Some buckets of the gradients are on their way already, others never come."""
    options = DistributedDataParallelKwargs(bucket_cap_mb=1)
    accel = accelerator(kwargs_handlers=[options])
    seen = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        accel.free_memory()
        seen.append(batch_size)
        layers = [torch.nn.Linear(600, 600) for _ in range(4)]  # a bucket for each
        bare = torch.nn.Sequential(*layers)
        model = accel.prepare(bare)
        for step in range(2):
            if accel.process_index == 1 and batch_size > 1 and step == 1:
                bare[0].weight.register_hook(lambda grad: out_of_memory())
            accel.backward(model(torch.ones(1, 600)).sum())
        return accel.gather(bare[0].weight.grad.sum().reshape(1)).unique().numel() == 1

    return [train(), seen]


def test_memory_may_run_out_in_the_middle_of_backward(pool):
    assert pool.run(fails_in_backward) == [[True, [2, 1]]] * 2


def fails_while_the_other(does: str) -> list:
    accel = accelerator()
    sizes = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> str:
        sizes.append(batch_size)
        if batch_size > 1 and accel.process_index == 1:
            out_of_memory()
        what = {
            "gathers": lambda: accel.gather(value_of(accel)),
            "waits": accel.wait_for_everyone,
            "has finished": lambda: None,
            "fails too": lambda: out_of_memory() if batch_size > 1 else None,
            "gathers objects": lambda: accel.synchronize("a block")(lambda: None)(),
        }
        what[does]()
        return "done"

    return [train(), sizes]


@pytest.mark.parametrize(
    "does", ["gathers", "waits", "has finished", "fails too", "gathers objects"]
)
def test_whatever_the_other_does_it_tries_again_too(pool, does):
    assert pool.run(fails_while_the_other, does) == [["done", [2, 1]]] * 2


def fails_in(block: str) -> list:
    accel = accelerator()
    sizes = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        around = {"run": lambda: accel.run("search"), "synchronize": lambda: synchronize("it")}
        with around[block]():
            if batch_size > 1 and accel.process_index == 1:
                out_of_memory()

    train()
    return sizes


@pytest.mark.parametrize("block", ["run", "synchronize"])
def test_an_error_that_comes_from_the_other_process_for_its_memory_is_no_other_error(pool, block):
    assert pool.run(fails_in, block) == [[2, 1]] * 2


def fails_otherwise(both: bool) -> None:
    accel = accelerator()

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        if accel.process_index == 0:
            raise KeyError("no such column")
        if both:
            out_of_memory()
        accel.gather(value_of(accel))

    train()


@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_error_of_one_process_ends_the_search_on_all(pool, both):
    (first, _), (second, text) = pool.outcomes(fails_otherwise, both)
    assert (first, second) == ("KeyError", "RemoteError")
    assert "no such column" in text
    assert pool.run(fails_in_training, 1, 0)  # and the processes can go on, with a new Accelerator


def reduces(kind: str) -> list:
    accel = accelerator()
    rank = accel.process_index
    sizes = []

    def reduce(size: int) -> int:
        if kind == "raises" and rank == 1:
            raise ZeroDivisionError
        return size - 1 - rank

    start = 10 - rank if kind == "starts" else 10

    @find_executable_batch_size(starting_batch_size=start, reduce_batch_size_fn=reduce)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > 5 and rank == 0:
            out_of_memory()

    train()
    return sizes


def test_all_processes_take_the_smallest_size_that_one_proposes(pool):
    assert pool.run(reduces, "differs") == [[10, 8, 6, 4]] * 2
    assert pool.run(reduces, "starts") == [[9, 7, 5]] * 2
    assert [kind for kind, _ in pool.outcomes(reduces, "raises")] == [
        "RemoteError",
        "ZeroDivisionError",
    ]


# --- LocalSGD ----------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_all_reduces():
    """The real collective, and a list of what went through it."""
    real, seen = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        seen.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield seen
    finally:
        dist.all_reduce = real


def trains_locally(steps: int, every: int, window: int = 1, **options) -> list:
    accel = accelerator(gradient_accumulation_steps=window)
    model, optimizer = line(accel)
    weights = []
    with counted_all_reduces() as seen:
        with LocalSGD(accel, model, every, **options) as local_sgd:
            for _ in range(steps):
                with accel.accumulate(model):
                    accel.backward(model(value_of(accel)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
                weights.append(weight_of(accel, model))
        weights.append(weight_of(accel, model))
    return [weights, seen]


def test_parameters_are_averaged_every_few_steps_and_at_the_end(pool):
    once = ("float32", 1)
    first, second = pool.run(trains_locally, 3, 2)
    assert first == [[-1.0, -3.0, -4.0, -4.5], [once] * 2]
    assert second == [[-2.0, -3.0, -5.0, -4.5], [once] * 2]
    # Nothing more at the end where the last step averaged.
    assert [seen for _, seen in pool.run(trains_locally, 4, 2)] == [[once] * 2] * 2


def test_local_steps_are_counted_by_the_gradient_window(pool):
    first, second = pool.run(trains_locally, 4, 2, 2)  # two optimizer steps: one average
    assert first == [[0.0, -1.0, -1.0, -3.0, -3.0], [("float32", 1)]]
    assert second == [[0.0, -2.0, -2.0, -3.0, -3.0], [("float32", 1)]]


def disabled_local_sgd() -> list:
    return trains_locally(2, 1, enabled=False)


def test_disabled_it_leaves_gradients_to_each_step(pool):
    assert pool.run(disabled_local_sgd) == [[[-1.5, -3.0, -3.0], []]] * 2


class Mixed(torch.nn.Module):
    """Parameters and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.single = torch.nn.Parameter(torch.zeros(3))
        self.short = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16).t())
        self.long = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def averages_a_mixed_model() -> list:
    accel = accelerator()
    bare = Mixed()
    model = accel.prepare(bare)
    with counted_all_reduces() as seen, LocalSGD(accel, model, 1) as local_sgd:
        with torch.no_grad():
            for tensor in (*bare.parameters(), *bare.buffers()):
                tensor.fill_(accel.process_index * 2)
        bare.short.requires_grad_(False)  # trained until now, so it differs too
        local_sgd.step()
    return [sorted(seen), {name: float(value.sum()) for name, value in bare.state_dict().items()}]


def test_there_is_one_all_reduce_for_a_dtype_and_only_what_is_trained_is_averaged(pool):
    for rank, (seen, sums) in enumerate(pool.run(averages_a_mixed_model)):
        assert seen == [("float32", 3 + 4 + 1), ("float64", 5)]
        assert sums.pop("frozen") == 14.0 * rank
        assert sums.pop("count") == 2.0 * rank
        assert sums == {"single": 3.0, "short": 4.0, "long": 5.0, "mean": 1.0}


def leaves_local_sgd_with_an_error() -> list:
    accel = accelerator()
    model, optimizer = line(accel)
    with counted_all_reduces() as seen, contextlib.suppress(ValueError):
        with LocalSGD(accel, model, 8) as local_sgd:
            local_sgd.step()
            raise ValueError
    accel.backward(model(value_of(accel)).sum())  # gradients are averaged again
    optimizer.step()
    return [seen, weight_of(accel, model)]


def test_an_exception_leaves_local_sgd_without_a_collective(pool):
    assert pool.run(leaves_local_sgd_with_an_error) == [[[], -1.5]] * 2


# --- logging, progress -------------------------------------------------------------------------


def logger_to(path: str, level: int = logging.INFO):
    logger = get_logger(f"tools.{path}", level)
    if not logger.logger.handlers:
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(filename)s %(message)s"))
        logger.logger.addHandler(handler)
    return logger


def logs(path: str) -> None:
    accel = accelerator()
    logger = logger_to(path)
    logger.info("for all")
    logger.info("%s of two", accel.process_index, main_process_only=False)
    for turn in range(10):
        logger.info("turn %d", turn, in_order=True)
    logger.info("the main one", main_process_only=True, in_order=True)
    if accel.process_index == 1:
        logger.setLevel(logging.ERROR)
    logger.info("not by all", in_order=True)
    for _ in range(2):
        logger.warning_once("once")
        # New to each process at another time.
        logger.warning_once("rank %d", accel.process_index or None, in_order=True)
        logger.warning_once("rank %d", 0, in_order=True, main_process_only=False)


def test_logging_is_for_the_main_process_or_in_order(pool, tmp_path):
    path = tmp_path / "log"
    pool.run(logs, str(path))
    lines = path.read_text().splitlines()
    assert {line.split()[0] for line in lines} == {"test_tools.py"}
    lines = [line.removeprefix("test_tools.py ") for line in lines]
    assert lines.count("for all") == lines.count("the main one") == lines.count("once") == 1
    turns = [line for line in lines if "turn" in line]
    assert turns == [f"[RANK {rank}] turn {turn}" for turn in range(10) for rank in range(2)]
    assert {"[RANK 0] 0 of two", "[RANK 1] 1 of two"} <= set(lines)
    assert [line for line in lines if "not by all" in line] == ["[RANK 0] not by all"]


class Unreadable:
    def __str__(self) -> str:
        return str(1 / 0)


def logging_raises(how: str) -> None:
    accel = accelerator()
    logger, message = get_logger(f"tools.raises.{how}", "INFO"), "in order"
    if accel.process_index == 0 and how == "filter":
        logger.logger.addFilter(lambda record: 1 / 0)
    elif accel.process_index == 0:
        message = Unreadable()
    logger.info(message, in_order=True)


@pytest.mark.parametrize("how", ["filter", "message"])
def test_an_error_in_logging_is_an_error_of_all(pool, how):
    (first, _), (second, text) = pool.outcomes(logging_raises, how)
    assert (first, second) == ("ZeroDivisionError", "RemoteError")
    assert "logging in order" in text


def shows_a_bar(main_process_only: bool) -> list:
    accelerator()
    shown = io.StringIO()
    total = sum(tqdm(range(4), file=shown, main_process_only=main_process_only))
    return [total, bool(shown.getvalue())]


def test_one_process_shows_a_bar_and_all_iterate(pool):
    assert pool.run(shows_a_bar, True) == [[6, True], [6, False]]
    assert pool.run(shows_a_bar, False) == [[6, True]] * 2


# --- profiles, triggers, seeds -----------------------------------------------------------------


def profiles(folder: str) -> None:
    accel = accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=folder)])
    with accel.profile():
        if accel.process_index == 1:
            torch.ones(2, 2).matmul(torch.ones(2, 2))


def test_each_process_writes_its_profile(pool, tmp_path):
    pool.run(profiles, str(tmp_path))
    names = []
    for rank in range(2):
        trace = json.loads((tmp_path / f"profile_{rank}.json").read_text())
        names.append({event.get("name") for event in trace["traceEvents"]})
    assert ["aten::matmul" in one for one in names] == [False, True]


def triggers() -> list[bool]:
    accel, other = accelerator(), accelerator()
    if accel.process_index == 1:
        accel.set_trigger()
    return [other.check_trigger(), accel.check_trigger(), accel.check_trigger()]


def test_a_trigger_of_one_process_is_seen_by_all_once(pool):
    assert pool.run(triggers) == [[False, True, False]] * 2


def draws(device_specific: bool) -> float:
    accelerator()
    set_seed(7, device_specific=device_specific)
    return torch.rand(1).item()


def test_seeds_are_alike_or_differ_by_process(pool):
    first, second = pool.run(draws, False)
    assert first == second
    first, second = pool.run(draws, True)
    assert first != second


# --- nothing is left ---------------------------------------------------------------------------


def held() -> dict[str, int]:
    """Threads (those of gloo too) and open sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    sockets = sum(link.startswith("socket") for link in links)
    return {"threads": len(os.listdir("/proc/self/task")), "sockets": sockets}


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what torch sets by itself."""
    return {k: v for k, v in environment.items() if k != "TORCHINDUCTOR_CACHE_DIR"}


def sweeps(way: str) -> list:
    """Runs in one process: what is alive after each, and what the process has more of."""
    shared = accelerator()
    environment = ours(os.environ)
    alive, seen = [], []
    for trial in range(12):
        accel = shared if way == "free_memory" else accelerator()
        model, optimizer = line(accel)
        # not forked: gloo's threads may hold a lock in that moment, and the worker waits for ever
        server = {"num_workers": 1, "multiprocessing_context": "forkserver"}
        workers = {**server, "persistent_workers": trial % 2 == 1} if trial < 2 else {}
        data = accel.prepare(DataLoader(torch.ones(4, 1), 1, **workers))
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        refs = [weakref.ref(one) for one in (model, optimizer, data)]
        if way == "free_memory":
            model, optimizer, data = accel.free_memory(model, optimizer, data)
        elif way == "end_training":
            accel.end_training()
        del accel, model, optimizer, data
        gc.collect()
        alive += [ref() for ref in refs if ref() is not None]
        seen.append(held())
    more = [name for name in seen[0] if seen[-1][name] > max(one[name] for one in seen[1:3])]
    return [alive, more, ours(os.environ) == environment, dist.is_initialized()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["free_memory", "del", "end_training"])
def test_a_sweep_of_ten_runs_leaves_nothing_on_two_processes(pool, way):
    assert pool.run(sweeps, way) == [[[], [], True, way != "end_training"]] * 2
