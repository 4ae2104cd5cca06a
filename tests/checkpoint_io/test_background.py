"""Saving in the background: the state of the call, no error lost, no process gone too early."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import checkpoint_io
from checkpoint_io import BackgroundSaver, CheckpointError, CheckpointWarning, prepare_save
from tests.support import warm

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

from gated_files import Gate  # noqa: E402


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@pytest.fixture
def saver():
    saver = BackgroundSaver()
    yield saver
    saver.abandon()


def save(saver: BackgroundSaver, gate: Gate, name: str, state: dict, **options):
    return saver.save(f"{gate.root}/{name}", state, storage_options=gate.options, **options)


def load(gate: Gate, name: str) -> dict:
    return checkpoint_io.load(f"{gate.root}/{name}", storage_options=gate.options).state


# --- what is saved --------------------------------------------------------------------------------


def test_the_checkpoint_is_the_state_at_the_call_while_training_goes_on(saver, gate):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    state = {"model": model.state_dict(), "step": 3, "seen": [1, 2]}
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with gate.held():
        handle = save(saver, gate, "c", state)
        for _ in range(3):
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
        state["step"] = 4
        state["seen"].append(3)
        assert not handle.done()
        assert not os.path.exists(f"{gate.root.removeprefix('gated://')}/c/manifest.json")
    manifest = handle.wait()
    loaded = load(gate, "c")
    assert not torch.equal(model.weight, wanted["weight"])
    assert all(torch.equal(loaded["model"][name], wanted[name]) for name in wanted)
    assert (loaded["step"], loaded["seen"], manifest.generation) == (3, [1, 2], 1)


def test_saves_of_one_layout_use_the_same_memory_and_each_is_its_own(saver, gate):
    weight = torch.zeros(5000)
    places = []
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        save(saver, gate, "c", {"w": weight})
        places.append(saver._buffers._copies[0].data_ptr())
        saver.wait()
        assert torch.equal(load(gate, "c")["w"], torch.full((5000,), value))
    assert len(set(places)) == 1


def test_the_memory_is_given_back_by_close_and_by_free_memory_but_not_under_a_save(saver, gate):
    with gate.held():
        save(saver, gate, "c", {"w": torch.ones(5000)})
        saver.free_memory()
        assert saver._buffers.nbytes > 0
    saver.wait()
    saver.free_memory()
    assert saver._buffers.nbytes == 0
    save(saver, gate, "c", {"w": torch.ones(5000)})
    saver.close()
    assert saver._buffers.nbytes == 0
    assert torch.equal(load(gate, "c")["w"], torch.ones(5000))


def test_a_handle_holds_no_tensors_once_its_save_has_ended(saver, gate):
    job = prepare_save(f"{gate.root}/c", {"w": torch.ones(9)}, next_generation=lambda old: 1,
                       storage_options=gate.options)  # fmt: skip
    known = weakref.ref(job)
    handle = saver.submit(job)
    del job
    handle.wait()
    gc.collect()
    assert known() is None


def test_what_comes_afterwards_runs_on_the_saving_thread_when_it_is_durable(saver, gate):
    seen = []

    def look() -> None:
        seen.append((threading.current_thread() is threading.main_thread(), load(gate, "c")["n"]))

    job = prepare_save(f"{gate.root}/c", {"n": 5}, next_generation=lambda old: 1,
                       storage_options=gate.options)  # fmt: skip
    saver.submit(job, afterwards=look).wait()
    assert seen == [(False, 5)]


# --- one at a time --------------------------------------------------------------------------------


def test_the_next_save_waits_for_the_one_before(saver, gate):
    with gate.held():
        first = save(saver, gate, "a", {"n": 1})
        threading.Timer(0.2, gate.open).start()
        second = save(saver, gate, "b", {"n": 2})
        assert first.done()
    second.wait()
    assert (load(gate, "a")["n"], load(gate, "b")["n"]) == (1, 2)


def test_with_the_policy_skip_the_next_save_is_left_out_counted_and_warned_of_once(gate):
    saver = BackgroundSaver(policy="skip")
    with gate.held():
        save(saver, gate, "a", {"n": 1})
        with pytest.warns(CheckpointWarning, match="still under way"):
            assert save(saver, gate, "b", {"n": 2}) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert save(saver, gate, "b", {"n": 2}) is None
    assert (saver.skipped, saver.pending) == (2, True)
    saver.wait()
    assert save(saver, gate, "c", {"n": 3}) is not None
    saver.close()
    assert not Path(gate.root.removeprefix("gated://"), "b").exists()
    assert load(gate, "c")["n"] == 3


def test_poll_says_when_it_is_over_and_does_not_wait(saver, gate):
    assert saver.poll()
    with gate.held():
        handle = save(saver, gate, "a", {"n": 1})
        assert not saver.poll()
        assert saver.pending
    handle.wait()
    assert saver.poll()
    assert not saver.pending


@pytest.mark.parametrize("policy", ["later", "", None])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(ValueError, match="policy"):
        BackgroundSaver(policy=policy)


# --- errors ---------------------------------------------------------------------------------------


def fail_one(saver: BackgroundSaver, gate: Gate) -> None:
    gate.break_writes()
    handle = save(saver, gate, "bad", {"w": torch.ones(3)})
    while not handle.done():
        pass
    gate.mend()


ASKING = {
    "wait": lambda saver, gate: saver.wait(),
    "poll": lambda saver, gate: saver.poll(),
    "the next save": lambda saver, gate: save(saver, gate, "next", {"n": 1}),
    "close": lambda saver, gate: saver.close(),
}


@pytest.mark.parametrize("ask", ASKING)
def test_an_error_is_raised_by_whoever_asks_next_and_then_saving_goes_on(saver, gate, ask):
    save(saver, gate, "good", {"n": 1}).wait()
    fail_one(saver, gate)
    with pytest.raises(CheckpointError, match="the disk is on fire"):
        ASKING[ask](saver, gate)
    assert not saver.pending
    save(saver, gate, "good", {"n": 2})
    saver.close()
    assert load(gate, "good")["n"] == 2
    assert not Path(gate.root.removeprefix("gated://"), "next").exists()


def test_the_handle_tells_the_error_and_then_the_saver_does_not_tell_it_again(saver, gate):
    gate.break_writes()
    handle = save(saver, gate, "bad", {"n": 1})
    assert "on fire" in str(handle.exception())
    with pytest.raises(CheckpointError, match="on fire"):
        handle.wait()
    gate.mend()
    save(saver, gate, "good", {"n": 1})
    saver.close()
    assert load(gate, "good")["n"] == 1


def test_a_state_that_cannot_be_saved_is_refused_by_the_call_itself(saver, gate):
    with pytest.raises(checkpoint_io.UnsupportedStateError, match="object"):
        save(saver, gate, "bad", {"x": object()})
    assert not saver.pending


def test_no_room_for_the_copies_is_an_error_of_the_call_and_writes_nothing(
    saver, gate, monkeypatch
):
    def full(tensors):
        raise MemoryError("no room")

    monkeypatch.setattr(saver._buffers, "fill", full)
    before = set(threading.enumerate())  # some of which, of other tests, may end meanwhile
    with pytest.raises(CheckpointError, match=r"did not begin.*MemoryError: no room"):
        save(saver, gate, "bad", {"w": torch.ones(3)})
    assert not saver.pending
    assert set(threading.enumerate()) <= before
    assert not Path(gate.root.removeprefix("gated://"), "bad").exists()


def test_an_interrupt_ends_the_wait_and_not_the_save(saver, gate):
    with gate.held():
        save(saver, gate, "c", {"n": 1})
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
        assert saver.pending
    saver.wait()
    assert load(gate, "c")["n"] == 1


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def run():
    """Runs a script as the main program of a process, which ends as an interpreter ends."""
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])

    def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        code = "import sys\n" + textwrap.dedent(script)
        command = [sys.executable, "-c", code, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": path}
        return warm.run(command, capture_output=True, text=True, env=environment)

    return run


ENDINGS = {
    "falls off its end": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise ValueError('mine')", 1),
}

SAVES_AND_ENDS = """
    import threading, torch, checkpoint_io
    from gated_files import Gate
    gate = Gate(sys.argv[1])
    gate.shut()
    saver = checkpoint_io.BackgroundSaver()
    weight = torch.ones(100_000)
    saver.save(gate.root + "/c", {"w": weight}, storage_options=gate.options)
    weight.zero_()
    timer = threading.Timer(0.5, gate.open)
    timer.daemon = True
    timer.start()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_after_the_save_however_the_script_ends(run, tmp_path, ending):
    last_line, status = ENDINGS[ending]
    done = run(SAVES_AND_ENDS + "    " + last_line, tmp_path)
    assert done.returncode == status, done.stderr
    gate = Gate(tmp_path)
    assert torch.equal(load(gate, "c")["w"], torch.ones(100_000))


RESERVES_AND_ENDS = """
    from checkpoint_io.async_save.staging import HostBuffers
    buffers = HostBuffers()
    buffers.reserve(1 << 30)
"""


def test_a_process_may_end_while_memory_is_reserved_for_its_first_save(run):
    done = run(RESERVES_AND_ENDS)
    assert done.returncode == 0, done.stderr


FAILS_AND_ENDS = """
    import atexit, torch, checkpoint_io
    from gated_files import Gate
    atexit.register(print, "the script's own exit handler")
    gate = Gate(sys.argv[1])
    gate.break_writes()
    saver = checkpoint_io.BackgroundSaver()
    handle = saver.save(gate.root + "/c", {"w": torch.ones(3)}, storage_options=gate.options)
    atexit.register(print, "and a later one")
"""


def test_an_error_that_nobody_asked_for_is_shown_at_the_end_and_the_status_is_not_0(run, tmp_path):
    done = run(FAILS_AND_ENDS, tmp_path)
    assert done.returncode == 1
    assert "FAILED" in done.stderr
    assert "OSError: the disk is on fire" in done.stderr
    assert "Traceback" in done.stderr
    assert done.stdout.splitlines() == ["and a later one", "the script's own exit handler"]


@pytest.mark.parametrize("ask", ["saver.wait()", "handle.wait()", "saver.close()"])
def test_an_error_that_was_asked_for_is_not_shown_again(run, tmp_path, ask):
    caught = f"""
    try:
        {ask}
    except checkpoint_io.CheckpointError as error:
        print("caught", error)
    """
    done = run(FAILS_AND_ENDS + caught, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "caught" in done.stdout
    assert "FAILED" not in done.stderr


def test_an_error_is_shown_even_if_saver_and_handle_are_gone(run, tmp_path):
    done = run(FAILS_AND_ENDS + "    del saver, handle\n    import gc; gc.collect()", tmp_path)
    assert done.returncode == 1
    assert "the disk is on fire" in done.stderr


def test_pools_of_threads_still_work_for_a_save_that_outlives_the_script(run, tmp_path):
    """As uploads and name look-ups need them: they refuse work once the interpreter ends."""
    script = """
    import concurrent.futures, threading, checkpoint_io
    from gated_files import Gate
    gate = Gate(sys.argv[1])
    def upload():
        threading.Event().wait(0.5)  # by then the script has ended
        with concurrent.futures.ThreadPoolExecutor() as pool:
            print(pool.submit(lambda: "worked").result(), flush=True)
    saver = checkpoint_io.BackgroundSaver()
    job = checkpoint_io.prepare_save(gate.root + "/c", {"n": 1}, next_generation=lambda old: 1,
                                     storage_options=gate.options)
    saver.submit(job, afterwards=upload)
    """
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr


def test_an_interrupt_at_the_end_gives_the_save_up(run, tmp_path):
    script = """
    import os, signal, threading
    class Interrupts:  # once it is said that the process waits
        def write(self, text):
            if "waiting for the save" in text:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            return sys.__stderr__.write(text)
        def flush(self):
            sys.__stderr__.flush()
    sys.stderr = Interrupts()
    """
    done = run(SAVES_AND_ENDS.replace("timer.start()", "") + script, tmp_path)
    assert done.returncode == 130, done.stderr
    assert "the save is aborted" in done.stderr


def test_a_forked_child_neither_waits_for_the_save_nor_runs_it_again(run, tmp_path):
    script = """
    import os, torch, checkpoint_io
    from gated_files import Gate
    gate = Gate(sys.argv[1])
    saver = checkpoint_io.BackgroundSaver()
    gate.shut()
    handle = saver.save(gate.root + "/c", {"w": torch.ones(3)}, storage_options=gate.options)
    child = os.fork()
    if child == 0:
        assert saver.poll() and not saver.pending
        saver.wait()
        try:
            handle.wait()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("the child waits")
        sys.exit(7)  # with the gate still shut
    assert os.waitpid(child, 0)[1] >> 8 == 7
    gate.open()
    assert handle.wait().generation == 1
    """
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_workers_of_a_loader_that_were_forked_in_between_end_and_the_save_too(run, tmp_path):
    script = """
    import torch, checkpoint_io
    from gated_files import Gate
    gate = Gate(sys.argv[1])
    saver = checkpoint_io.BackgroundSaver()
    gate.shut()
    saver.save(gate.root + "/c", {"w": torch.ones(3)}, storage_options=gate.options)
    data = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
    assert sum(batch.item() for batch in data) == 28
    gate.open()
    """
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert load(Gate(tmp_path), "c")["w"].tolist() == [1, 1, 1]


@pytest.mark.s3
def test_a_save_to_s3_ends_after_the_script(run, s3_options):
    script = """
    import json, torch, checkpoint_io
    saver = checkpoint_io.BackgroundSaver()
    weight = torch.ones(3_000_000)
    saver.save("s3://bucket/exit", {"w": weight}, storage_options=json.loads(sys.argv[1]))
    weight.zero_()
    """
    done = run(script, json.dumps(s3_options))
    assert done.returncode == 0, done.stderr
    found = checkpoint_io.load("s3://bucket/exit", storage_options=s3_options).state["w"]
    assert torch.equal(found, torch.ones(3_000_000))
