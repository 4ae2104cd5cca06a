"""Profiler: the steps that are recorded, where they are written, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch

from accel_callbacks.callbacks import Profiler


def profiled(training, profiler: Profiler, batches: int = 8, **options) -> Profiler:
    kit = training(profiler, batches=batches, **options)
    with kit.accel.run("profiled"):
        for batch in kit.train:
            with kit.accel.accumulate(kit.model):
                kit.step(batch)
    return profiler


def make(folder: str | Path | None, **options) -> Profiler:
    given = {"wait": 1, "warmup": 1, "active": 2, "activities": ["cpu"], **options}
    return Profiler(folder, **given)


def steps_in(path: str) -> list[str]:
    """The steps that a trace says it has recorded."""
    with fsspec.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted({one["name"] for one in events if one["name"].startswith("ProfilerStep#")})


def nobody_profiles() -> bool:
    return not torch.autograd._profiler_enabled()


def test_the_steps_of_the_schedule_are_recorded(training, tmp_path):
    profiler = profiled(training, make(tmp_path))
    assert profiler.traces == [str(tmp_path / "rank0.00000004.pt.trace.json")]
    assert steps_in(profiler.traces[0]) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert nobody_profiles()


def test_each_round_has_a_trace_of_its_own(training, tmp_path):
    profiler = profiled(training, make(tmp_path, repeat=2), batches=9)
    assert [Path(one).name[6:14] for one in profiler.traces] == ["00000004", "00000008"]


def test_a_step_is_one_of_the_optimizer_or_a_batch(training, tmp_path):
    by_step = profiled(training, make(tmp_path / "a"), gradient_accumulation_steps=2)
    assert [Path(one).name[6:14] for one in by_step.traces] == ["00000004"]
    by_batch = make(tmp_path / "b", unit="batch")
    profiled(training, by_batch, gradient_accumulation_steps=2)
    assert [Path(one).name[6:14] for one in by_batch.traces] == ["00000002"]
    with pytest.raises(ValueError, match="unit='epoch'"):
        make(None, unit="epoch")


def test_without_a_folder_it_is_that_of_the_project(training, tmp_path):
    profiler = profiled(training, make(None), project_dir=str(tmp_path))
    assert Path(profiler.traces[0]).parent == tmp_path / "profile"


def test_a_folder_may_be_elsewhere(training):
    profiler = profiled(training, make("memory://profiles"))
    assert profiler.traces == ["memory://profiles/rank0.00000004.pt.trace.json"]
    assert len(steps_in(profiler.traces[0])) == 2


def test_what_the_end_of_training_cuts_short_is_written(training, tmp_path):
    profiler = profiled(training, make(tmp_path, active=9), batches=5)
    assert steps_in(profiler.traces[0])[0] == "ProfilerStep#2"
    assert nobody_profiles()


def test_what_an_error_cuts_short_is_written(training, tmp_path):
    profiler = make(tmp_path, active=9)
    kit = training(profiler, batches=8)

    def train() -> None:
        with kit.accel.run("profiled"):
            for index, batch in enumerate(kit.train):
                kit.step(batch)
                if index == 4:
                    raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train()
    assert len(profiler.traces) == 1
    assert nobody_profiles()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # another can begin


def test_a_trace_that_cannot_be_written_costs_no_training(training, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(
        UserWarning, match=r"was not written, and training continues: \w+Error"
    ) as told:
        profiler = profiled(training, make(tmp_path / "file"), batches=8)
    assert profiler.traces == []
    assert not [one for one in told if "nothing was recorded" in str(one.message)]
    assert nobody_profiles()


def test_a_training_that_is_too_short_is_told(training, tmp_path):
    profiler = make(tmp_path, wait=50)
    with pytest.warns(UserWarning, match="needs more than the 3 steps"):
        profiled(training, profiler, batches=3)
    assert profiler.traces == []
    assert nobody_profiles()


def test_another_run_is_profiled_anew_and_the_user_is_called(training, tmp_path):
    seen = []
    profiler = make(tmp_path, on_trace_ready=lambda one: seen.append(len(one.key_averages())))
    profiled(training, profiler)
    profiled(training, profiler)
    assert len(profiler.traces) == 1
    assert len(seen) == 2
    assert min(seen) > 0


def test_options_are_checked_at_once():
    with pytest.raises(ValueError, match="active=0"):
        Profiler(active=0)
    with pytest.raises(ValueError, match="'gpu' is unknown"):
        Profiler(activities=["gpu"])
