"""Process control on real processes: turns, meetings, and errors that reach everybody."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    PartialState,
    RemoteError,
    gather_object,
    local_main_process_first,
    main_process_first,
    main_process_only,
    on_process,
    set_seed,
    synchronize,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accel_callbacks.distributed import failures
from accel_callbacks.distributed.rng import RNGType
from accel_callbacks.distributed.topology import resolve_topology
from tests.support import warm
from tests.support.bound import BOUND, OUTLASTING
from tests.support.ports import free_port

pytestmark = pytest.mark.distributed

FIRST = {"main": main_process_first, "local": local_main_process_first}


def handle() -> PartialState:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PartialState(cpu=True, timeout=OUTLASTING)  # who waits for it shows in no other way


def decorated() -> list:
    handle()
    accel = Accelerator(cpu=True)
    return [
        main_process_only(lambda: "main")(),
        on_process(lambda: "one", process_index=1)(),
        accel.on_last_process(lambda: "last")(),
        accel.on_local_main_process(lambda: "local")(),
    ]


def test_decorators_choose_the_process_at_each_call(pool):
    assert pool.run(decorated) == [["main", None, None, "local"], [None, "one", "last", None]]


def fails_in_synchronize(failing: int, kind: str) -> None:
    rank = handle().process_index
    error = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt, "exit": SystemExit}
    try:
        with synchronize("download"):
            if rank == failing:
                raise error[kind]("no such file")
    except (KeyboardInterrupt, SystemExit) as stop:
        raise LookupError(f"was {type(stop).__name__}") from stop


@pytest.mark.parametrize("kind", ["ValueError", "KeyboardInterrupt", "exit"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_synchronize_reaches_every_rank(pool, failing, kind):
    outcomes = pool.outcomes(fails_in_synchronize, failing, kind)
    assert outcomes[failing][0] == ("ValueError" if kind == "ValueError" else "LookupError")
    other, text = outcomes[1 - failing]
    assert other == "RemoteError"
    assert f"rank {failing} failed in download" in text
    assert "no such file" in text


def fails_on_both() -> None:
    with synchronize("both"):
        raise ValueError(f"of rank {handle().process_index}")


def test_where_all_fail_each_raises_its_own_error(pool):
    outcomes = pool.outcomes(fails_on_both)
    assert [name for name, _ in outcomes] == ["ValueError"] * 2
    assert all(f"of rank {rank}" in text for rank, (_, text) in enumerate(outcomes))


def fails_while_the_others_wait(how: str, failing: int) -> None:
    state, accel = handle(), Accelerator(cpu=True)
    wait = {
        "gather": lambda: accel.gather(torch.ones(3)),
        "reduce": lambda: accel.reduce(torch.ones(1)),
        "torch's own": lambda: torch.distributed.all_reduce(torch.ones(1)),
        "gather_object": lambda: gather_object({"a": 1}),
        "wait_for_everyone": state.wait_for_everyone,
        "sleep": lambda: time.sleep(2),
        "inner": synchronize(lambda: None),
        "inner meeting": lambda: synchronize_rng_states(["torch"]),
    }
    failures._PATIENCE = 1.0
    with synchronize("download"):
        if state.process_index == failing:
            raise OSError("disk full")
        wait[how]()


ELSEWHERE = (
    "gather",
    "reduce",
    "torch's own",
    "gather_object",
    "wait_for_everyone",
    "sleep",
    "inner",
    "inner meeting",
)


# The two ranks take turns, and the rest is slow.
@pytest.mark.parametrize(
    ("how", "failing"),
    [
        pytest.param(how, rank, marks=[] if number % 2 == rank else [pytest.mark.slow])
        for number, how in enumerate(ELSEWHERE)
        for rank in (0, 1)
    ],
)
def test_an_error_in_synchronize_reaches_those_who_wait_elsewhere(pool, how, failing):
    outcomes = pool.outcomes(fails_while_the_others_wait, how, failing)
    assert outcomes[failing][0] == "OSError"
    other, text = outcomes[1 - failing]
    assert other == "RemoteError"
    assert f"rank {failing} failed in download" in text
    assert "disk full" in text
    assert pool.run(synchronized_work) == [0, 1]  # all begin again


def fails_again_after_an_error_outside_of_meetings() -> list:
    accel = Accelerator(cpu=True, timeout=BOUND)
    kinds = []
    try:
        with accel.run("first", resume=False):
            if accel.process_index == 0:
                raise OSError("disk full")
            synchronize_rng_states(["torch"])
    except (OSError, RemoteError) as error:
        kinds.append(type(error).__name__)
    accel = Accelerator(cpu=True)
    try:
        with synchronize("second"):
            if accel.process_index == 0:
                raise ValueError("no such file")
    except (ValueError, RemoteError) as error:
        kinds.append(type(error).__name__)
    return [kinds, accel.gather(torch.ones(1)).tolist()]


def test_processes_meet_as_before_after_an_error_that_only_some_met_for(pool):
    assert pool.run(fails_again_after_an_error_outside_of_meetings) == [
        [["OSError", "ValueError"], [1.0, 1.0]],
        [["RemoteError", "RemoteError"], [1.0, 1.0]],
    ]


def synchronized_work() -> int:
    resolve_topology(cpu=True, anew=True)  # where an error has parted the processes

    @synchronize
    def work() -> int:
        return handle().process_index

    return work()


def test_synchronize_decorates_and_the_group_survives_the_errors(pool):
    assert pool.run(synchronized_work) == [0, 1]


def fails_in_its_turn(first: str, failing: int, kind: str) -> None:
    rank = handle().process_index
    try:
        with FIRST[first]():
            if rank == failing:
                raise {"OSError": OSError, "KeyboardInterrupt": KeyboardInterrupt}[kind](
                    "disk full"
                )
    except KeyboardInterrupt as stop:
        raise LookupError("interrupted") from stop


@pytest.mark.parametrize("kind", ["OSError", "KeyboardInterrupt"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("first", FIRST)
def test_an_error_in_a_turn_reaches_every_rank(pool, first, failing, kind):
    outcomes = pool.outcomes(fails_in_its_turn, first, failing, kind)
    assert outcomes[failing][0] == ("OSError" if kind == "OSError" else "LookupError")
    other, text = outcomes[1 - failing]
    assert other == "RemoteError"
    assert f"rank {failing} failed in {FIRST[first].__name__}" in text
    assert "disk full" in text


def test_main_process_first_releases_the_others_when_the_main_one_raises(pool):
    (main, _), (other, text) = pool.outcomes(fails_in_its_turn, "main", 0, "OSError")
    assert (main, other) == ("OSError", "RemoteError")
    assert "disk full" in text


def order_of_turns(first: str, nested: bool, path: str) -> str:
    rank = handle().process_index

    def write(text: str) -> None:
        with open(path, "a") as file:
            file.write(text)

    with FIRST[first]():
        if rank == 0:
            time.sleep(0.3)
        write(f"{rank}a")
        if nested:
            with main_process_first(), local_main_process_first():
                write(f"{rank}b")
        if rank == 0:
            time.sleep(0.1)
        write(f"{rank}c")
    handle().wait_for_everyone()
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("nested", "order"), [(False, "0a0c1a1c"), (True, "0a0b0c1a1b1c")])
def test_the_first_process_has_the_block_for_itself(pool, tmp_path, first, nested, order):
    assert pool.run(order_of_turns, first, nested, str(tmp_path / "order")) == [order] * 2


def fails_in_the_inner_turn(failing: int) -> None:
    rank = handle().process_index
    with main_process_first(), main_process_first():
        if rank == failing:
            raise OSError("disk full")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_nested_turn_reaches_every_rank(pool, failing):
    outcomes = pool.outcomes(fails_in_the_inner_turn, failing)
    assert outcomes[failing][0] == "OSError"
    assert outcomes[1 - failing][0] == "RemoteError"


def meets_in_a_turn(how: str) -> None:
    state = handle()
    accel = Accelerator(cpu=True)
    meet = {
        "gather": lambda: accel.gather(torch.ones(1)),
        "wait_for_everyone": state.wait_for_everyone,
        "synchronize": synchronize(lambda: None),
        "prepare": lambda: accel.prepare(torch.utils.data.DataLoader(range(2))),
    }
    with main_process_first():
        meet[how]()


@pytest.mark.parametrize("how", ["gather", "wait_for_everyone", "synchronize", "prepare"])
def test_a_collective_in_a_turn_is_an_error_and_does_not_hang(pool, how):
    (main, text), (other, _) = pool.outcomes(meets_in_a_turn, how)
    assert (main, other) == ("RuntimeError", "RemoteError")
    assert "inside of main_process_first would wait for ever" in text


def machines_that_cannot_be_ordered() -> None:
    from dataclasses import replace

    from accel_callbacks.distributed import topology as state

    here = handle().topology
    state._current = replace(here, local_rank=0, local_world_size=1)
    try:
        with main_process_first(), local_main_process_first():
            pass
    finally:
        state._current = here


def test_other_turns_inside_of_turns_are_refused_on_several_machines(pool):
    (main, text), (other, _) = pool.outcomes(machines_that_cannot_be_ordered)
    assert (main, other) == ("RuntimeError", "RemoteError")
    assert "local_main_process_first inside of main_process_first cannot be ordered" in text


def splits() -> list:
    state = handle()
    with state.split_between_processes({"a": [1, 2, 3]}, apply_padding=True) as padded:
        pass
    with state.split_between_processes(torch.arange(3)) as tensor:
        pass
    return [padded, tensor.tolist()]


def test_inputs_are_split(pool):
    assert pool.run(splits) == [[{"a": [1, 2]}, [0, 1]], [{"a": [3, 3]}, [2]]]


def late_options() -> list:
    handle()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        PartialState(cpu=True, timeout=timedelta(seconds=77), init_method="tcp://127.0.0.1:1")
        PartialState(cpu=True, backend="gloo")
    if "other" not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend("other", lambda *_: None, devices=["cpu"])
    try:
        PartialState(cpu=True, backend="other")
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return [sorted(str(one.message) for one in seen), seen[0].filename == __file__, refused]


def test_options_that_come_too_late_are_told(pool):
    for warned, here, refused in pool.run(late_options):
        assert len(warned) == 2
        assert "init_method=tcp://127.0.0.1:1 has no effect" in warned[0]
        assert "timeout=0:01:17 has no effect" in warned[1]
        assert here
        assert "the process group already uses 'gloo'" in refused


# --- random generators --------------------------------------------------------------------


def draws(kinds: list, own_generator: bool) -> list:
    rank = handle().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(100 + rank) if own_generator else None
    synchronize_rng_states(kinds, generator)
    drawn = [torch.rand(1).item()]
    return drawn + ([torch.rand(1, generator=generator).item()] if generator else [])


def test_generators_continue_as_on_rank_zero(pool):
    first, second = pool.run(draws, ["torch", "generator"], True)
    torch.manual_seed(0)
    assert first == second
    assert first[0] == torch.rand(1).item()
    assert first[1] == torch.rand(1, generator=torch.Generator().manual_seed(100)).item()


def test_only_the_generators_asked_for_are_touched(pool):
    first, second = pool.run(draws, ["generator"], True)
    assert first[1] == second[1]
    assert first[0] != second[0]


def one_state() -> list:
    rank = handle().process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_state(generator=generator)
    own = torch.rand(1).item()
    synchronize_rng_state()
    return [torch.rand(1, generator=generator).item(), own, torch.rand(1).item()]


def test_one_generator_or_the_one_of_torch(pool):
    first, second = pool.run(one_state)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


class Broken(torch.Generator):
    """Shows a state and takes none."""

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        raise OSError("no entropy left")


def sets_one_of_two() -> list:
    rank = handle().process_index
    torch.manual_seed(rank)
    generator = Broken() if rank else torch.Generator()
    try:
        synchronize_rng_states(["torch", "generator"], generator)
    except Exception as error:
        return [type(error).__name__, "no entropy left" in str(error), torch.rand(1).item()]
    return []


def test_what_was_set_already_is_put_back(pool):
    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(n)).item() for n in (0, 1)]
    expected = [["RemoteError", True, drawn[0]], ["OSError", True, drawn[1]]]
    assert pool.run(sets_one_of_two) == expected


def states_that_fail(case: str) -> None:
    rank = handle().process_index
    torch.manual_seed(rank)
    kinds, generator = {
        "no generator": (["generator"], None),
        "unknown": (["torhc"], None),
        "no device": ([RNGType.MPS], None),
        "one more": (["torch", "generator"], torch.Generator()),
    }[case]
    try:
        synchronize_rng_states(kinds if rank else ["torch"], generator)
    except RemoteError as error:
        raise LookupError(f"RemoteError, and then {torch.rand(1).item()}") from error


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no generator", "needs generator="),
        ("unknown", "Did you mean 'torch'"),
        ("no device", "no such device"),
        ("one more", "rng_types differ"),
    ],
)
def test_a_generator_that_cannot_be_set_is_an_error_everywhere_and_none_is_set(pool, case, says):
    (main, remote), (other, text) = pool.outcomes(states_that_fail, case)
    assert (main, other) == ("LookupError", "ValueError")
    assert says in text
    torch.manual_seed(0)
    assert (
        f"RemoteError, and then {torch.rand(1).item()}" in remote
    )  # its generator is where it was


# --- how the processes meet -----------------------------------------------------------------


def two_processes(code: str, **environment: str) -> list[str]:
    """What two new processes print, without any address from a launcher."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("MASTER_")}
    common = {**clean, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **environment}
    running = [
        warm.Popen(
            [sys.executable, "-c", code],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [process.communicate()[0] for process in running]


@pytest.mark.parametrize("place", ["tcp", pytest.param("file", marks=pytest.mark.slow)])
def test_processes_meet_where_they_are_told_and_over_the_backend_asked_for(tmp_path, place):
    port = free_port()
    code = (
        "from datetime import timedelta\n"
        "from accel_callbacks import AcceleratorState, PartialState, collectives, reduce\n"
        "options = {'init_method': METHOD, 'timeout': timedelta(minutes=10)}\n"
        "state = PartialState(cpu=True, backend='cpu:gloo', **options)\n"
        "same = AcceleratorState('bf16', backend='gloo')\n"
        "print(collectives.store().timeout)\n"
        "print(state.backend, reduce(state.process_index + 1, 'sum'), same.mixed_precision)\n"
        "state.destroy_process_group()\n"
        "print(state.initialized)\n"
    )
    method = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/meet"}[place]
    printed = two_processes(code.replace("METHOD", repr(method)))
    assert printed == ["0:10:00\ncpu:gloo 3 bf16\nFalse\n"] * 2


@pytest.mark.slow
def test_a_timeout_at_a_meeting_names_who_did_not_come(tmp_path):
    code = (
        "import pathlib, time\n"
        "from datetime import timedelta\n"
        "from accel_callbacks import PartialState, main_process_first\n"
        "from tests.support.bound import patience\n"
        f"meet = 'file://{tmp_path}/meet'\n"
        f"ended = pathlib.Path({str(tmp_path / 'ended')!r})\n"
        "state = PartialState(cpu=True, init_method=meet, timeout=timedelta(seconds=patience(8)))\n"
        "try:\n"
        "    with main_process_first():\n"
        "        while state.is_main_process and not ended.exists():\n"
        "            time.sleep(0.05)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "    ended.touch()\n"
    )
    printed = two_processes(code)[1]
    assert "ranks [0] did not come to main_process_first within the timeout" in printed


# --- seeds ----------------------------------------------------------------------------------


def drawn_after_a_seed(**options) -> tuple[int, float]:
    Accelerator(cpu=True)
    set_seed(5, **options)
    return int(torch.randint(1 << 30, ())), random.random()


def drawn_after_a_seed_of_their_own() -> tuple[int, float]:
    return drawn_after_a_seed(device_specific=True)


def test_a_seed_is_that_of_all_processes_unless_each_is_to_have_its_own(pool):
    first, second = pool.run(drawn_after_a_seed)
    assert first == second
    first, second = pool.run(drawn_after_a_seed_of_their_own)
    assert first[0] != second[0]
    assert first[1] != second[1]
