"""Averages of weights in ZeRO stage 3: of the flat parts that each rank keeps, saved by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from accel_callbacks import DeepSpeedPlugin
from accel_callbacks.callbacks import EMA, WeightAveraging
from tests.deepspeed.jobs import difference, finish, net, prepared, train, weights
from tests.support.rounding import ABSOLUTE

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _job(layout: str, precision: str, device: str | None) -> Any:
    options: dict[str, Any] = {"mixed_precision": precision}
    if layout == "small":  # parameters that stay gathered
        layout, options["deepspeed_plugin"] = "zero3", DeepSpeedPlugin(zero_stage=3)
    averages = [EMA(0.5, device=device), WeightAveraging(evaluate_with_average=False)]
    return prepared(layout, callbacks=averages, **options), averages


def _found(job: Any, averages: Any) -> Any:
    """Return the weights, both averages, and what a model of one process gets of the first."""
    accel, model = job[:2]
    before = weights(job)
    found = [before]
    for average in averages:
        with average.applied():
            found.append(weights(job))
    assert weights(job) == before
    with accel.evaluate(model):
        assert weights(job) == found[1]
        loss = float(model(next(iter(job[3]))[0]).sum().detach())
    other = net()
    averages[0].copy_to(other)
    copied = {n: v.flatten().tolist() for n, v in other.state_dict().items()}
    assert not accel.is_main_process or difference(copied, found[1]) == 0.0
    return found, loss


def _trained(layout: str, precision: str, folder: str | None = None, device: Any = None) -> Any:
    job, averages = _job(layout, precision, device)
    train(job, save=folder)
    found = _found(job, averages)
    finish(job[0])
    return found


def _resumed(layout: str, folder: str) -> Any:
    job, averages = _job(layout, "no", None)
    job[0].load_state(folder)
    train(job)
    found = _found(job, averages)
    finish(job[0])
    return found


def _differ(some: Any, others: Any) -> float:
    return max(difference(one, other) for one, other in zip(some[0], others[0], strict=True))


@pytest.mark.parametrize(("layout", "device"), [("zero3", None), ("zero3", "cpu"), ("small", None)])
def test_parts_are_averaged_as_whole_weights(pool, layout: str, device: str | None) -> None:
    found = pool.run(_trained, layout, "no", None, device)[0]
    wanted = pool.run(_trained, "ddp", "no")[0]
    assert _differ(found, wanted) < ABSOLUTE
    assert found[1] == pytest.approx(wanted[1], abs=1e-4)  # the forward has the average
    assert difference(*found[0][:2]) > 1e-3  # which is another one than the weights


def test_in_bf16_the_float32_weights_are_averaged(pool) -> None:
    found = pool.run(_trained, "zero3", "bf16")[0]
    wanted = pool.run(_trained, "ddp", "no")[0]
    assert _differ(found, wanted) < 0.02


def test_averages_are_saved_by_name_for_any_layout(pool, alone, tmp_path: Path) -> None:
    paths = {layout: str(tmp_path / layout) for layout in ("zero3", "ddp")}
    ends = {layout: pool.run(_trained, layout, "no", path)[0] for layout, path in paths.items()}
    assert _differ(pool.run(_resumed, "zero3", paths["zero3"])[0], ends["zero3"]) == 0.0
    for source, target in (("zero3", "zero2"), ("zero3", "ddp"), ("ddp", "zero3")):
        found = pool.run(_resumed, target, paths[source])[0]
        assert _differ(found, ends["ddp"]) < ABSOLUTE, (source, target)
    assert _differ(alone.run(_resumed, "ddp", paths["zero3"])[0], ends["ddp"]) < ABSOLUTE


def _saved_in_an_evaluation(folder: str) -> Any:
    job, _ = _job("zero3", "no", None)
    train(job)
    with job[0].evaluate(job[1]):
        job[0].save_state(folder)
    found = weights(job)
    finish(job[0])
    return found


def _loaded(folder: str) -> Any:
    job, _ = _job("ddp", "no", None)
    job[0].load_state(folder)
    found = weights(job)
    finish(job[0])
    return found


def test_a_save_in_an_evaluation_has_the_weights(pool, tmp_path: Path) -> None:
    wanted = pool.run(_saved_in_an_evaluation, str(tmp_path / "state"))[0]
    assert difference(pool.run(_loaded, str(tmp_path / "state"))[0], wanted) == 0.0


def _evaluated(folder: str) -> Any:
    job, averages = _job("zero3", "no", None)
    train(job, save=folder)
    before = weights(job)
    with job[0].evaluate(job[1], checkpoint=folder):
        lent = weights(job)
    assert weights(job) == before
    job[0].load_state(folder)
    with averages[0].applied():
        found = lent, weights(job)
    finish(job[0])
    return found


def test_the_average_of_a_checkpoint_is_lent(pool, tmp_path: Path) -> None:
    lent, wanted = pool.run(_evaluated, str(tmp_path / "state"))[0]
    assert difference(lent, wanted) == 0.0
