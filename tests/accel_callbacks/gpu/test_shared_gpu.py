"""Two ranks on one GPU, over gloo; run with -m gpu where there is one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("shared_gpu.py")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_on_one_gpu(*words: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *words],
            # As a scheduler that shows each task one device: the ranks may share it.
            env={**os.environ, **place, "RANK": r, "LOCAL_RANK": r, "MPI_LOCALRANKID": r},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in "01"
    ]
    try:
        texts = [process.communicate()[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, text) for process, text in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("what", ["train", "gather", "save", "fail"])
def test_two_ranks_share_it(tmp_path, what):
    words = [what, str(tmp_path / "state")] if what == "save" else [what]
    for code, text in run_on_one_gpu(*words):
        assert code == 0, text
