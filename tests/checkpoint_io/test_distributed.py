"""Two gloo processes run every case; what each saw is compared here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.ports import free_port

pytestmark = pytest.mark.distributed

WORKER = r"""
import datetime, gc, json, os, sys, warnings
import torch, torch.distributed as dist
import checkpoint_io as c
from pathlib import Path

rank, port, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=datetime.timedelta(minutes=10),
)
group = c.TorchGroup()
seen = {}
tied = torch.ones(3)
own = {"rank": rank, "rng": torch.full((4,), float(rank)), "tied": [tied, tied]}
shared = {"w": torch.arange(6.0), "alias": tied, "tied": tied, "who": rank}

manifest = c.save(root / "both", shared, local_state=own, metadata={"run_id": "r"}, group=group)
loaded = c.load(root / "both", rank=rank)
seen["id"] = manifest.id
seen["files"] = len(manifest.files)
seen["world"] = manifest.world_size
seen["who"] = loaded.state["who"]
seen["local"] = [loaded.local_state["rank"], loaded.local_state["rng"].tolist()]
seen["other"] = c.load(root / "both", rank=1 - rank).local_state["rank"]
seen["absent"] = c.load(root / "both", rank=2).local_state

c.save(root / "some", shared, local_state=own if rank == 1 else None, group=group)
seen["some"] = [c.load(root / "some", rank=r).local_state is None for r in (0, 1)]

def error_of(call):
    try:
        call()
    except c.CheckpointError as error:
        return [type(error).__name__, str(error)]

def failing(bad_rank):
    state = {**own, "x": object()} if rank == bad_rank else own
    return error_of(lambda: c.save(root / "both", shared, local_state=state, group=group))

seen["fails"] = [failing(0), failing(1)]
dist.barrier()
seen["after"] = [c.load(root / "both").manifest.id, sorted(os.listdir(root / "both"))]
dist.barrier()

elsewhere = root / ("both" if rank == 0 else "elsewhere")
seen["unshared"] = error_of(lambda: c.save(elsewhere, shared, local_state=own, group=group))
dist.barrier()
seen["after_unshared"] = c.load(root / "both").manifest.id

folder = c.CheckpointFolder(root / "folder")
for step in (1, 2):
    made = folder.save(step, {"step": step}, local_state=own, group=group)
seen["generation"] = made.generation
if rank == 0:  # damage what only rank 1 reads: both must fall back
    path = next((root / "folder" / "step-00000002").glob("objects-*-r00001.json"))
    data = bytearray(path.read_bytes()); data[-3] ^= 1; path.write_bytes(bytes(data))
dist.barrier()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    seen["fallback"] = folder.load_latest(group=group).state["step"]
seen["warned"] = len(caught)

again = c.save(root / "both", shared, local_state=own, group=group)
dist.barrier()
seen["again"] = [again.generation, len(os.listdir(root / "both")) - len(again.files)]
(root / f"seen-{rank}.json").write_text(json.dumps(seen))
del group, folder
gc.collect()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root: Path = tmp_path_factory.mktemp("two")
    port = free_port()
    ranks = [
        warm.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(port), str(root)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((root / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_gets_shared_and_own_state(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["id"] == seen[1]["id"]
    for rank in range(2):
        assert seen[rank]["world"] == 2
        assert seen[rank]["who"] == 0
        assert seen[rank]["local"] == [rank, [float(rank)] * 4]
        assert seen[rank]["other"] == 1 - rank
        assert seen[rank]["absent"] is None
        assert seen[rank]["some"] == [True, False]
        assert seen[rank]["files"] == 6


def test_one_rank_failing_fails_all_and_commits_nothing(seen: list[dict[str, Any]]) -> None:
    for rank in range(2):
        for bad, (kind, text) in enumerate(seen[rank]["fails"]):
            assert kind == "UnsupportedStateError"
            assert f"rank {bad}: " in text
            assert "nothing was committed" in text
            assert "local_state['x']" in text
        identity, files = seen[rank]["after"]
        assert identity == seen[0]["id"]
        assert len(files) == 7
        assert all(identity in name for name in files if name != "manifest.json")


def test_place_that_ranks_do_not_share_is_refused(seen: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert "all ranks share" in seen[rank]["unshared"][1]
        assert seen[rank]["after_unshared"] == seen[0]["id"]


def test_folder_falls_back_on_all_ranks_together(seen: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert seen[rank]["generation"] == 2
        assert seen[rank]["fallback"] == 1
        assert seen[rank]["warned"] == 1


def test_overwrite_by_two_ranks_leaves_one_checkpoint(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["again"] == [2, 1]
