"""The launchers in a real Jupyter kernel: what the cells show, an interrupt, the example."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="pip install ipykernel nbclient")
nbclient = pytest.importorskip("nbclient", reason="pip install ipykernel nbclient")
nbformat = pytest.importorskip("nbformat", reason="pip install ipykernel nbclient")
from jupyter_client.manager import start_new_kernel  # noqa: E402

from tests.support.bound import BOUND  # noqa: E402

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]

FIRST_CELL = """
import os, sys, time, torch
from accel_callbacks import Accelerator, debug_launcher, notebook_launcher

class Net(torch.nn.Module):  # of the notebook, so that no other process could import it
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

def speak(first):
    accel = Accelerator()
    accel.prepare(Net())
    print("out", "of", first + accel.process_index, accel.mixed_precision)
    print("err of", accel.process_index, file=sys.stderr)
    return first + accel.process_index

def wait():
    accel = Accelerator()
    with open(f"pid{accel.process_index}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

def compute():
    torch.set_num_threads(torch.get_num_threads())
    torch.randn(2_000_000).exp_()
    return torch.get_num_threads()
"""


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "ACCEL_CPU": "1", "OMP_NUM_THREADS": "2"}
        del environment["PYTEST_CURRENT_TEST"]  # with it a kernel shows less
        self.folder = folder
        self.manager, self.client = start_new_kernel(
            BOUND.total_seconds(), "python3", cwd=str(folder), env=environment
        )

    def run(self, cell: str, meanwhile: Callable[[], None] = lambda: None) -> dict[str, str]:
        """The text of each stream, the result and the error of a cell."""
        asked = self.client.execute(cell)
        meanwhile()
        shown = {"stdout": "", "stderr": "", "result": "", "error": ""}
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                assert self.manager.is_alive(), f"{cell!r} ends the kernel; so far {shown}"
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return shown
            _show(shown, kind, content)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def _show(shown: dict[str, str], kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        shown[content["name"]] += content["text"]
    elif kind == "execute_result":
        shown["result"] = content["data"]["text/plain"]
    elif kind == "error":
        shown["error"] = f"{content['ename']}: {content['evalue']}"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    try:
        assert kernel.run(FIRST_CELL)["error"] == ""
        yield kernel
    finally:
        kernel.close()


def test_the_cell_shows_output_of_the_processes_in_whole_lines(kernel: Kernel) -> None:
    """Each with a prefix that is asked for; the example below has lines without one."""
    cell = "notebook_launcher(speak, (10,), 2, 'bf16', log_line_prefix_template='[${rank}] ')"
    shown = kernel.run(cell)
    assert shown["result"] == "[10, 11]"
    out, err = (set(shown[stream].splitlines()) for stream in ("stdout", "stderr"))
    for rank in range(2):
        assert f"[{rank}] out of 1{rank} bf16" in out
        assert f"[{rank}] err of {rank}" in err


def test_a_failure_is_the_error_of_the_cell(kernel: Kernel) -> None:
    shown = kernel.run(
        """
def fail():
    accel = Accelerator()
    if accel.process_index == 1:
        raise ValueError("no data")
    accel.wait_for_everyone()
notebook_launcher(fail, num_processes=2)
"""
    )
    assert shown["error"].startswith("RemoteError: rank 1 failed in notebook_launcher")
    assert re.search(r"line \d+, in fail\n +raise ValueError\(\"no data\"\)", shown["error"])
    assert shown["error"].endswith("ValueError: no data")
    assert shown["stderr"] == ""  # reported once only


def test_an_interrupt_ends_all_processes_and_the_kernel_goes_on(kernel: Kernel) -> None:
    files = [kernel.folder / f"pid{rank}" for rank in range(2)]

    def interrupt() -> None:
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.05)
        kernel.manager.interrupt_kernel()

    shown = kernel.run("notebook_launcher(wait, num_processes=2)", meanwhile=interrupt)
    assert shown["error"].startswith("KeyboardInterrupt")
    assert not [file for file in files if Path(f"/proc/{file.read_text()}").exists()]
    assert kernel.run("debug_launcher(int)")["result"] == "[0, 0]"


def test_forks_do_not_hang_where_the_notebook_has_computed_with_threads(kernel: Kernel) -> None:
    """OpenMP's threads are gone in a fork, and it waits for them."""
    kernel.run("torch.randn(2_000_000).exp_()")
    after = kernel.run("notebook_launcher(compute, num_processes=2)")
    assert after["result"] == "[1, 1]", after


def test_the_example_runs(kernel: Kernel) -> None:
    """In the kernel of the tests above, which saves the start of another."""
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, km=kernel.manager).execute()
    shown = [out for cell in book.cells for out in cell.get("outputs", [])]
    text = "".join(out["text"] for out in shown if out["output_type"] == "stream")
    assert float(re.findall(r"accuracy ([\d.]+) %", text)[-1]) > 90
    assert {"process 0 of 2 on cpu", "process 1 of 2 on cpu"} <= set(text.splitlines())
