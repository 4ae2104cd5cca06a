"""torch's profiler through the Accelerator."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, ProfileKwargs


def work() -> None:
    torch.ones(4, 4).matmul(torch.ones(4, 4))


def names_in(path: Path) -> list[str]:
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]


def steps(accel: Accelerator, count: int, handler: ProfileKwargs) -> torch.profiler.profile:
    with accel.profile(handler) as profiler:
        for _ in range(count):
            work()
            profiler.step()
    return profiler


def keys(profiler: torch.profiler.profile) -> list[str]:
    return [event.key for event in profiler.key_averages()]


def test_a_block_is_recorded_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile() as profiler:
        work()
    assert isinstance(profiler, torch.profiler.profile)
    assert "aten::matmul" in keys(profiler)
    assert list(tmp_path.iterdir()) == []


def test_the_handler_of_the_accelerator_is_used_or_that_of_the_call(tmp_path):
    accel = Accelerator(
        cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=tmp_path / "a" / "b")]
    )
    with accel.profile():
        work()
    assert "aten::matmul" in names_in(tmp_path / "a" / "b" / "profile_0.json")
    with accel.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "c"))):
        pass
    assert (tmp_path / "c" / "profile_0.json").exists()


def test_another_object_is_no_handler():
    with pytest.raises(TypeError, match="takes a ProfileKwargs"):
        Accelerator(cpu=True).profile({"with_stack": True})


def test_a_schedule_records_its_active_steps_and_writes_one_file(tmp_path):
    seen = []
    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
    handler = ProfileKwargs(
        schedule_option=schedule,
        output_trace_dir=tmp_path,
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
    )
    steps(Accelerator(cpu=True), 7, handler)
    assert seen == [4]
    assert names_in(tmp_path / "profile_0.json").count("aten::matmul") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["profile_0.json"]


def test_with_several_recordings_the_last_complete_one_stays(tmp_path):
    seen = []
    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
        output_trace_dir=tmp_path,
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
    )
    steps(Accelerator(cpu=True), 8, handler)  # the third has begun, and no step is in it
    assert seen == [3, 6, 8]
    assert names_in(tmp_path / "profile_0.json").count("aten::matmul") == 1


def test_a_schedule_that_never_records_is_told(tmp_path):
    handler = ProfileKwargs(
        schedule_option={"wait": 10, "warmup": 1, "active": 1}, output_trace_dir=tmp_path
    )
    with pytest.warns(UserWarning, match=r"nothing was recorded.*in 3 steps") as told:
        steps(Accelerator(cpu=True), 3, handler)
    assert told[0].filename == __file__
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_block_closes_the_profiler_and_writes(tmp_path):
    accel = Accelerator(cpu=True)
    handler = ProfileKwargs(output_trace_dir=tmp_path)

    def fails():
        with accel.profile(handler):
            work()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "aten::matmul" in names_in(tmp_path / "profile_0.json")
    with accel.profile() as profiler:  # a profiler that was left open would refuse this one
        work()
    assert "aten::matmul" in keys(profiler)


def test_a_function_that_saves_the_trace_itself_is_told_and_wins(tmp_path):
    own = tmp_path / "own.json"
    handler = ProfileKwargs(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(own)),
        output_trace_dir=tmp_path,
    )
    with pytest.warns(UserWarning, match="profile_0.json is not written"):
        steps(Accelerator(cpu=True), 1, handler)
    assert "aten::matmul" in names_in(own)


def recorded(**options) -> list:
    with Accelerator(cpu=True).profile(ProfileKwargs(**options)) as profiler:
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
    return profiler.events()


def test_each_option_changes_what_is_recorded():
    def shapes(events):
        return any(event.input_shapes for event in events)

    assert shapes(recorded(record_shapes=True))
    assert not shapes(recorded())
    assert any(event.self_cpu_memory_usage for event in recorded(profile_memory=True))
    assert not any(event.self_cpu_memory_usage for event in recorded())
    assert any(event.flops for event in recorded(with_flops=True))
    assert not any(event.flops for event in recorded())


def test_python_functions_are_recorded_with_the_stack(tmp_path):
    found = []
    for with_stack in (True, False):
        handler = ProfileKwargs(with_stack=with_stack, output_trace_dir=tmp_path)
        steps(Accelerator(cpu=True), 1, handler)
        found.append(any("work" in str(name) for name in names_in(tmp_path / "profile_0.json")))
    assert found == [True, False]


def test_activities_and_modules_reach_the_profiler():
    built = ProfileKwargs(activities=["cpu"], with_modules=True).build()
    assert set(built.activities) == {torch.profiler.ProfilerActivity.CPU}
    assert built.with_modules
    assert not ProfileKwargs().build().with_modules
    assert set(ProfileKwargs().build().activities) == torch.profiler.supported_activities()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cup"]}, "'cup' is unknown.*Did you mean 'cpu'"),
        ({"activities": "cpu"}, r"must be a list, \['cpu'\]"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "activ": 1}}, "Did you mean 'active'"),
        ({"schedule_option": {"wait": 1, "warmup": 1}}, "needs active too"),
        ({"schedule_option": {"wait": -1, "warmup": 1, "active": 1}}, "wait=-1 must be"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 0}}, "active=0 must be"),
        ({"schedule_option": {"wait": 1.5, "warmup": 1, "active": 1}}, "wait=1.5 must be"),
    ],
)
def test_an_option_that_is_not_understood_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        ProfileKwargs(**options)


def test_an_activity_that_this_machine_lacks_is_an_error_that_says_what_it_has():
    lacking = next(
        name
        for name in ("mtia", "hpu", "xpu")
        if torch.profiler.ProfilerActivity.__members__.get(name.upper())
        not in torch.profiler.supported_activities()
    )
    with pytest.raises(ValueError, match=r"this machine has .*'cpu'"):
        ProfileKwargs(activities=[lacking]).build()


def test_an_ordinary_profile_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Accelerator(cpu=True).profile():
            work()
