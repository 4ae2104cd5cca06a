"""SampleLogger: what reaches a real tracker, when, and that training does not feel it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import SampleLogger
from loggers import read_jsonl


def show(run: Any, model: Any, batch: torch.Tensor, outputs: Any) -> dict[str, Any]:
    return {
        "picture": batch.reshape(-1, 1, 1, 1).expand(-1, 3, 4, 5) / 10,
        "text": [f"{float(row):g}" for row in batch],
        "one": "text",
        "table": {"columns": ["x", "y"], "rows": [[float(x), 0] for x in batch]},
    }


def noted(stage: str, **options: Any) -> tuple[SampleLogger, list[tuple[int, int]]]:
    """A logger that only notes (step, epoch) of each call."""
    calls: list[tuple[int, int]] = []

    def note(run: Any, model: Any, batch: Any, outputs: Any) -> dict[str, Any]:
        calls.append((run.global_step, run.current_epoch))
        return {}

    return SampleLogger(note, stage=stage, **options), calls


def train(kit: Any, epochs: int, *, passes: int = 0) -> None:
    """Some epochs, each with an evaluation of so many passes over the loader."""
    with kit.accel.run("samples") as run:
        for _ in run.epochs(epochs):
            for batch in kit.train:
                kit.step(batch)
            if passes:
                with kit.accel.evaluate(kit.model):
                    for _ in range(passes):
                        for _ in kit.val:
                            pass


def test_pictures_texts_and_tables_reach_the_tracker(training, tmp_path):
    logger = SampleLogger(show, n=1)
    kit = training(logger, val_batches=2, log_with="jsonl", project_dir=str(tmp_path))
    train(kit, 1, passes=2)
    file = tmp_path / "metrics.jsonl"
    (pictures,) = read_jsonl(file, kind="images")
    (path,) = pictures["values"]["samples/picture"]
    picture = Image.open(tmp_path / path)
    assert picture.size == (5, 4)
    assert pictures["step"] == 2
    (texts,) = read_jsonl(file, kind="text")
    assert texts["values"] == {"samples/text": "0", "samples/one": "text"}
    (table,) = read_jsonl(file, kind="table")
    assert (table["name"], table["columns"]) == ("samples/table", ["x", "y"])
    assert table["rows"] == [[0.0, 0]]


def test_the_first_batch_of_each_evaluation_by_default(training):
    logger, calls = noted("validation")
    train(training(logger, val_batches=2), 3, passes=2)
    assert calls == [(2, 0), (4, 1), (6, 2)]


def test_evaluations_that_come_too_soon_are_left_out(training):
    by_steps, steps = noted("validation", every="4 steps", prefix="a")
    by_epochs, epochs = noted("validation", every="2 epochs", prefix="b")
    train(training(by_steps, by_epochs), 5, passes=1)
    assert steps == [(2, 0), (6, 2), (10, 4)]
    assert epochs == [(2, 0), (6, 2), (10, 4)]


def test_in_training(training):
    by_steps, steps = noted("train", every="3 steps", prefix="a")
    by_default, epochs = noted("train", prefix="b")
    train(training(by_steps, by_default, batches=4), 2, passes=1)
    assert steps == [(3, 0), (6, 1)]
    assert epochs == [(1, 0), (5, 1)]


def test_in_tests(training):
    logger, calls = noted("test")
    kit = training(logger)
    train(kit, 1, passes=1)
    with kit.accel.evaluate(kit.model, stage="test"):
        for _ in kit.val:
            pass
    kit.accel.end_training()
    assert len(calls) == 1


def test_the_model_is_looked_at_without_a_trace():
    seen = []

    def look(run: Any, model: Any, batch: Any, outputs: Any) -> dict[str, Any]:
        seen.append((model.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        model(batch)
        torch.rand(3)
        return {}

    def weights(*callbacks: Any) -> torch.Tensor:
        accel = Accelerator(cpu=True, mixed_precision="bf16", callbacks=list(callbacks))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        model, optimizer, data = accel.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.ones(8, 2), 2),
        )
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
        accel.end_training()
        return model[0].weight.detach().clone()

    logger = SampleLogger(look, stage="train", every="1 steps")
    assert torch.equal(weights(logger), weights())
    assert seen == [(False, False, True)] * 4


def test_an_error_of_the_function_leaves_the_modes(training):
    def fail(run: Any, model: Any, batch: Any, outputs: Any) -> dict[str, Any]:
        raise KeyError("label")

    kit = training(SampleLogger(fail, stage="train", every="1 steps"))
    with pytest.raises(KeyError, match="label"):
        train(kit, 1)
    assert kit.model.training
    assert torch.is_grad_enabled()


def test_a_resumed_run_counts_on(training, tmp_path):
    logger, calls = noted("train", every="3 steps")
    kit = training(logger, batches=4)
    train(kit, 1)
    kit.accel.save_state(str(tmp_path / "state"))
    again, more = noted("train", every="3 steps")
    kit = training(again, batches=4)
    kit.accel.load_state(str(tmp_path / "state"))
    train(kit, 2)
    assert (calls, more) == ([(3, 0)], [(6, 1)])


def test_another_run_resets_the_state(training):
    logger, calls = noted("validation", every="100 steps")
    kit = training(logger)
    train(kit, 1, passes=1)
    train(kit, 1, passes=1)
    assert calls == [(2, 0), (2, 0)]


def test_two_have_states_of_their_own():
    names = {noted(stage)[0].state_key for stage in ("train", "validation", "test")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "fit"}, "stage='fit' is unknown"),
        ({"every": "10 min"}, "must be steps or epochs"),
        ({"n": 0}, "n=0"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SampleLogger(show, **options)


def test_a_mapping_that_is_no_table_is_named(training):
    kit = training(SampleLogger(lambda *_: {"pairs": {"a": 1}}))
    with pytest.raises(ValueError, match=r"'samples/pairs' is a mapping with \['a'\]"):
        train(kit, 1, passes=1)
