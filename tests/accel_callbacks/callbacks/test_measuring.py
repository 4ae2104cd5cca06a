"""Callbacks that measure, and the finders, on two processes."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import ModelSummary, Profiler, SampleLogger, Throughput
from accel_callbacks.tuning import find_batch_size, find_learning_rate
from loggers import read_jsonl
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(*callbacks: Any, **options: Any) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, callbacks=list(callbacks), **options)


def prepared(accel: Accelerator) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(torch.ones(40, 4), 2)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def measured(folder: str) -> dict[str, Any]:
    text = io.StringIO()
    speed, profiler = Throughput(), Profiler(folder, wait=0, warmup=1, active=1, activities=["cpu"])
    asked = []

    def show(run: Any, model: Any, batch: Any, outputs: Any) -> dict[str, Any]:
        asked.append(run.accelerator.process_index)
        return {"sum": str(float(model(batch).sum().isfinite()))}

    summary = ModelSummary(example=torch.ones(3, 4), file=text)
    samples = SampleLogger(show, stage="train", every="5 steps")
    accel = accelerator(
        speed, profiler, summary, samples, log_with="jsonl", project_dir=f"{folder}/project"
    )
    model, optimizer, data = prepared(accel)
    with accel.run("measured"):
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "rates": {name.removeprefix("throughput/"): value for name, value in speed.rates.items()},
        "state": speed.state_dict(),
        "traces": [os.path.basename(path) for path in profiler.traces],
        "printed": text.getvalue(),
        "flops": summary.summaries[0].total.flops,
        "asked": asked,
    }


def test_each_measures_itself_and_the_main_one_reports(pool, tmp_path):
    first, second = pool.run(measured, str(tmp_path))
    for one in (first, second):
        rates = one["rates"]
        assert rates["samples_per_s"] == pytest.approx(2 * rates["device/samples_per_s"])
        assert rates["tflops"] * 1e12 == pytest.approx(
            2 * (2 * 4 * 2) * rates["device/samples_per_s"]
        )
        assert rates["total_samples"] == one["state"]["samples"] == 40
        assert one["flops"] == 2 * 3 * 4 * 2
        assert len(one["asked"]) == 2
    assert first["traces"] == ["rank0.00000002.pt.trace.json"]
    assert second["traces"] == ["rank1.00000002.pt.trace.json"]
    assert first["printed"].count("Linear: 10 parameters") == 1
    assert second["printed"] == ""
    texts = read_jsonl(tmp_path / "project" / "metrics.jsonl", kind="text")
    assert [(row["step"], row["values"]) for row in texts] == [
        (5, {"samples/sum": "1.0"}),
        (10, {"samples/sum": "1.0"}),
    ]


def batch_sizes(limits: tuple[int, ...]) -> tuple[int, int, list[int], list[int]]:
    accel = accelerator()
    trained = []

    def step(size: int) -> None:
        accel.free_memory()
        model, optimizer, _ = prepared(accel)
        if size > limits[accel.process_index]:
            torch.empty(1 << 60, dtype=torch.uint8)
        accel.backward(model(torch.ones(size, 4)).sum())  # waits for the other
        optimizer.step()
        trained.append(size)

    result = find_batch_size(step, steps_per_trial=1, mode="binsearch", margin=0.0)
    return (
        result.batch_size,
        result.largest,
        [trial.batch_size for trial in result.trials],
        sorted(set(trained)),
    )


def test_a_size_fits_if_it_fits_on_all(pool):
    first, second = pool.run(batch_sizes, (5, 3))
    assert first == second
    assert first[:3] == (3, 3, [2, 4, 3])


def failing_size() -> None:
    accel = accelerator()

    def step(size: int) -> None:
        if accel.process_index == 1:
            raise KeyError("label")
        accel.wait_for_everyone()

    find_batch_size(step)


def test_another_error_is_one_on_all(pool):
    outcomes = pool.outcomes(failing_size)
    assert [kind for kind, _ in outcomes] == ["RemoteError", "KeyError"]


def rates(fails: bool) -> tuple[list[float], list[float], bool]:
    accel = accelerator()
    model, optimizer, _ = prepared(accel)
    before = [one.detach().clone() for one in model.parameters()]
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        if fails and count == 3 and accel.process_index == 1:
            raise KeyError("label")
        inputs = torch.full((2, 4), float(accel.process_index + 1))
        loss = (model(inputs) - 1).square().mean()
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # One that runs away on one process alone ends it on both.
        return loss * (1e6 if accel.process_index and count == 8 else 1)

    result = find_learning_rate(
        step, optimizer, min_lr=1e-4, num_steps=20, smoothing=0.0, restore=[model]
    )
    same = all(map(torch.equal, before, model.parameters()))
    return result.lrs, result.losses, same


def test_the_mean_of_the_losses_counts(pool):
    first, second = pool.run(rates, False)
    assert first == second
    assert len(first[0]) == 8
    assert first[2]


@pytest.mark.slow
def test_an_error_in_a_step_is_one_on_all(pool):
    outcomes = pool.outcomes(rates, True)
    assert [kind for kind, _ in outcomes] == ["RemoteError", "KeyError"]
