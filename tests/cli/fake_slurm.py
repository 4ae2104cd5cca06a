"""A stand-in for `srun`, which starts its tasks on this machine with the variables of SLURM."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

SRUN = """#!{python}
import os, subprocess, sys
words, options = sys.argv[1:], {{}}
while words and words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    takes_next = not value and name in ("nodes", "ntasks")
    options[name] = words.pop(0) if takes_next else value
nodes = int(options.get("nodes", os.environ["SLURM_NNODES"]))
each = int(options.get("ntasks-per-node", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
tasks = []
for rank in range(nodes * each):
    hosts = ",".join(["localhost", "second"][:nodes])
    variables = dict(STEP_ID="0", STEP_NODELIST=hosts, STEP_NUM_TASKS=nodes * each)
    variables |= dict(STEP_TASKS_PER_NODE=f"{{each}}(x{{nodes}})", PROCID=rank)
    variables |= dict(LOCALID=rank % each, NODEID=rank // each)
    env = os.environ | {{f"SLURM_{{name}}": str(value) for name, value in variables.items()}}
    tasks.append(subprocess.Popen(words, env=env))
sys.exit(max(task.wait() for task in tasks))
"""


def put_tools(folder: Path) -> Path:
    """Make a folder for PATH, with `srun`, and `accel` of this interpreter."""
    folder.mkdir()
    (folder / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "accel").write_text(f'#!/bin/sh\nexec {sys.executable} -m accel_callbacks.cli "$@"\n')
    for tool in folder.iterdir():
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return folder
