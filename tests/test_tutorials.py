"""The tutorials run as notebooks, as the site offers them, and print what their pages show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import PAGES, ROOT, assert_prints, runnable

nbclient = pytest.importorskip("nbclient", reason="pip install ipykernel nbclient jupytext")
pytest.importorskip("ipykernel", reason="pip install ipykernel nbclient jupytext")
pytest.importorskip("jupytext", reason="pip install ipykernel nbclient jupytext")

pytestmark = pytest.mark.distributed

# Processes that a cell starts are forked from one that has imported torch.
WARM_PROCESSES = """
import subprocess

from tests.support import warm

subprocess.Popen._execute_child = warm.Popen._execute_child
"""
# As a kernel begins: no names, an empty folder, and no group of processes.
BEGIN = """
%reset -f
import os
from accel_callbacks.distributed.topology import destroy_topology

os.chdir({folder!r})
destroy_topology()
%reset -f
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all tutorials: each would import torch and start the warm process again."""
    from nbformat.v4 import new_notebook

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_CPU", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other are slow
        client = nbclient.NotebookClient(new_notebook())
        with client.setup_kernel():
            execute(client, WARM_PROCESSES)
            yield client


def execute(kernel: Any, code: str) -> str:
    """Run a cell, and return what it printed."""
    from nbformat.v4 import new_code_cell

    cell = new_code_cell(code)
    kernel.nb.cells.append(cell)
    kernel.execute_cell(cell, len(kernel.nb.cells) - 1)
    streams = [output for output in cell.outputs if output.output_type == "stream"]
    return "".join(stream.text for stream in streams if stream.name == "stdout")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith("docs/tutorials/") and runnable(page)]
)
def test_a_tutorial_prints_what_its_page_shows(
    page: str, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    from notebooks import as_notebook

    execute(kernel, BEGIN.format(folder=str(tmp_path)))
    cells = [cell for cell in as_notebook(ROOT / page).cells if cell.cell_type == "code"]
    for cell, (_, block, shown) in zip(cells, runnable(page), strict=True):
        assert cell.source == block.rstrip()
        assert_prints(shown, execute(kernel, cell.source))
