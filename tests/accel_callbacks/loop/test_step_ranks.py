"""What one process does in a step, an evaluation or a log, seen from two."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import ProgressBar
from accel_callbacks.callbacks.base import HOOKS
from loggers import read_jsonl
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def line(accel: Accelerator, weight: float = 0.0, lr: float = 1.0) -> tuple:
    """A prepared model y = weight * x with its optimizer."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr))


def value_of(accel: Accelerator) -> torch.Tensor:
    """1 on the first process, 2 on the second, ..."""
    return torch.full((1, 1), accel.process_index + 1.0)


def gradients_in_a_window() -> list[float]:
    accel = accelerator(gradient_accumulation_steps=2)
    model, _ = line(accel)
    seen = []
    for _ in range(2):
        with accel.accumulate(model):
            accel.backward(model(value_of(accel)).sum())
        seen.append(accel.unwrap_model(model).weight.grad.item())
    return seen


def test_gradients_stay_on_their_process_until_the_window_is_full(pool):
    assert pool.run(gradients_in_a_window) == [[0.5, 1.5], [1.0, 1.5]]


def gradients_without_sync() -> list[float]:
    accel = accelerator()
    model, _ = line(accel)
    with accel.no_sync(model):
        accel.backward(model(value_of(accel)).sum())
    alone = accel.unwrap_model(model).weight.grad.item()
    accel.backward(model(value_of(accel)).sum())
    return [alone, accel.unwrap_model(model).weight.grad.item()]


def test_no_sync_leaves_gradients_on_their_process(pool):
    assert pool.run(gradients_without_sync) == [[1.0, 3.0], [2.0, 3.0]]


def clipped(how: str) -> list:
    accel = accelerator(gradient_accumulation_steps=2)
    model, _ = line(accel)
    seen = []
    for _ in range(2):
        with accel.accumulate(model):
            accel.backward(model(value_of(accel)).sum())
            norm = getattr(accel, how)(model.parameters(), 1.0)
            seen += [norm, accel.unwrap_model(model).weight.grad.item()]
    return [one.item() if isinstance(one, torch.Tensor) else one for one in seen]


def test_clipping_sees_the_gradient_of_all_processes_at_the_end_of_a_window(pool):
    for rank, (inside, alone, norm, after) in enumerate(pool.run(clipped, "clip_grad_norm_")):
        assert (inside, alone, norm) == (None, (rank + 1) / 2, 1.5)
        assert after == pytest.approx(1.0, abs=1e-5)
    assert [seen[-1] for seen in pool.run(clipped, "clip_grad_value_")] == [1.0, 1.0]


def starts_from_its_own_weights() -> float:
    accel = accelerator()
    model, _ = line(accel, weight=5.0 + accel.process_index)
    return accel.unwrap_model(model).weight.item()


def test_the_replicas_begin_with_the_weights_of_the_main_process(pool):
    assert pool.run(starts_from_its_own_weights) == [5.0, 5.0]


def trained_in(precision: str) -> list:
    accel = accelerator(mixed_precision=precision)
    model, optimizer = line(accel, weight=0.5, lr=0.25)
    with accel.autocast():
        inside = str((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
    output = model(value_of(accel))
    accel.backward(output.sum() / 4)  # small, for the first loss scale of fp16
    optimizer.step()
    return [inside, str(output.dtype), accel.unwrap_model(model).weight.item()]


@pytest.mark.parametrize(
    ("precision", "inside"), [("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_a_precision_trains_the_same_on_all_processes(pool, precision, inside):
    expected = [f"torch.{inside}", "torch.float32", 0.5 - 0.25 * 1.5 / 4]
    assert pool.run(trained_in, precision) == [expected] * 2


def overflows_on_the_second() -> list:
    accel = accelerator(mixed_precision="fp16")
    model, optimizer = line(accel, weight=0.5)
    seen = []
    for factor in (float("inf") if accel.process_index == 1 else 1.0, 1.0):
        accel.backward(model(value_of(accel)).sum() / 4 * factor)
        optimizer.step()
        seen += [accel.optimizer_step_was_skipped, accel.unwrap_model(model).weight.item()]
        optimizer.zero_grad()
    return [*seen, accel.current_run.global_step, accel.precision.state_dict()["scale"]]


def test_an_overflow_on_one_process_skips_the_step_on_all(pool):
    first, second = pool.run(overflows_on_the_second)
    assert first == second
    assert first[:5] == [True, 0.5, False, 0.5 - 1.5 / 4, 1]


def saves_a_model(folder: str) -> None:
    accel = accelerator()
    model, _ = line(accel, weight=3.0)
    accel.save_model(model, folder)


def test_save_model_writes_once_and_fails_everywhere(pool, tmp_path):
    pool.run(saves_a_model, str(tmp_path / "model"))
    assert load_file(tmp_path / "model" / "model.safetensors")["weight"].item() == 3.0
    (tmp_path / "file").write_text("in the way")
    first, second = pool.outcomes(saves_a_model, str(tmp_path / "file"))
    assert first[0] not in ("ok", "RemoteError")
    assert second[0] == "RemoteError"


def prints() -> str:
    accel = accelerator()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accel.print("once")
    return printed.getvalue()


def test_print_prints_once_on_a_machine(pool):
    assert pool.run(prints) == ["once\n", ""]


def waits(folder: str) -> list[bool]:
    accel = accelerator()
    arrived = []

    def arrive_late(name: str) -> None:
        if accel.process_index == 1:
            time.sleep(0.3)
            (Path(folder) / name).touch()

    arrive_late("wait")
    accel.wait_for_everyone()
    arrived.append((Path(folder) / "wait").exists())
    arrive_late("enter")
    with accel.synchronize("meet"):
        arrived.append((Path(folder) / "enter").exists())
        arrive_late("leave")
    return [*arrived, (Path(folder) / "leave").exists()]


def test_nobody_goes_on_before_everybody_is_there(pool, tmp_path):
    assert pool.run(waits, str(tmp_path)) == [[True] * 3] * 2


def logs(folder: str) -> list:
    accel = accelerator(log_with="jsonl", project_dir=folder)
    accel.init_trackers("two")
    for step in range(3):
        accel.log({"loss": float(accel.process_index)}, step=step)
    tracker = accel.get_tracker("jsonl")
    tracker.log({"extra": 1.0}, 3)  # does nothing where this process does not log
    accel.tracking.close("success")
    return [type(tracker).__name__, accel.current_run.callback_metrics["loss"]]


def test_the_main_process_logs_and_the_others_have_a_tracker_that_does_nothing(pool, tmp_path):
    (main, own), (other, its) = pool.run(logs, str(tmp_path))
    assert (own, its) == (0.0, 1.0)  # callbacks see the values of their own process
    assert main != other
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert sorted((row["step"], row["values"]) for row in rows) == [
        *((step, {"loss": 0.0}) for step in range(3)),
        (3, {"extra": 1.0}),
    ]
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["metrics.jsonl"]


class Trace:
    """Notes the name of each hook that is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        for hook in HOOKS:
            setattr(self, hook, lambda *args, hook=hook: self.seen.append(hook))


def hooks_of_a_run() -> list[str]:
    trace = Trace()
    accel = accelerator(callbacks=[trace], gradient_accumulation_steps=2)
    model, optimizer = line(accel)
    data = torch.utils.data.DataLoader(torch.ones(7, 1), 1)  # 4 steps of 2; a filler at the end
    train, val = accel.prepare(data, torch.utils.data.DataLoader(torch.ones(3, 1), 1))
    with accel.run("hooks") as run:
        for _ in run.epochs(2):
            for batch in train:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            with accel.evaluate(model):
                for batch in val:
                    model(batch)
    return trace.seen


def test_hooks_fire_alike_on_all_processes(pool):
    first, second = pool.run(hooks_of_a_run)
    assert first == second
    counts = {hook: first.count(hook) for hook in set(first)}
    assert counts["on_train_batch_end"] == 8
    assert counts["on_after_optimizer_step"] == 4
    assert counts["on_validation_batch_end"] == 4
    assert counts["on_train_epoch_end"] == counts["on_validation_end"] == 2


def shows_progress() -> str:
    shown = io.StringIO()
    accel = accelerator(callbacks=[ProgressBar(file=shown)])
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(4, 1), 1))
    with accel.run("progress") as run:
        for _ in run.epochs(1):
            for _ in data:
                pass
    return shown.getvalue()


def test_progress_is_shown_by_the_main_process_only(pool):
    first, second = pool.run(shows_progress)
    assert "epoch 1/1" in first
    assert second == ""
