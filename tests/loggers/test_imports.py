from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "numpy", "tensorboard", "wandb", "fsspec", "accel_callbacks")


def _run(code: str, *args: str) -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_import_brings_in_no_tool() -> None:
    code = f"import sys, loggers; print([name for name in {HEAVY} if name in sys.modules])"
    assert _run(code).strip() == "[]"


def test_a_whole_run_without_torch_or_numpy(tmp_path: Path) -> None:
    code = f"""
import sys
from loggers import RunInfo, TrackerHub, read_jsonl

with TrackerHub(["jsonl"], run=RunInfo("digits", sys.argv[1], "a1"), strict=True) as hub:
    hub.log_config({{"lr": 0.1}})
    hub.log({{"loss": 0.5}}, 1)
rows = read_jsonl(sys.argv[1] + "/metrics.jsonl")
print([name for name in {HEAVY} if name in sys.modules], len(rows))
"""
    assert _run(code, str(tmp_path)).strip() == "[] 1"


def test_processes_that_do_not_log_never_import_the_tool(tmp_path: Path) -> None:
    code = f"""
import sys
from loggers import RunInfo, TrackerHub

run = RunInfo("digits", sys.argv[1], "a1", rank=1)
with TrackerHub(["wandb", "tensorboard"], run=run, main_process=False) as hub:
    hub.log({{"loss": 0.5}}, 1)
    hub.get("wandb").raw.log({{"a": 1}})
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert _run(code, str(tmp_path)).strip() == "[]"
