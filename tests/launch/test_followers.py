"""A rank that has lost another one ends no sooner than that one, as the launcher sees it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from accel_callbacks.launch.followers import Workers

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform == "win32", reason="the processes are shells"),
]


def shell(env: dict[str, str], **_: Any) -> SubprocessHandler:
    """Start a shell with the command of an environment."""
    words = ("-c", env["command"])
    return SubprocessHandler("sh", words, {}, None, None, local_rank_id=0, numa_options=None)


@pytest.mark.parametrize(
    ("follows", "patience", "codes"),
    [
        (True, 60.0, [1, 3]),  # the one that was lost ends by itself
        (True, 0.1, [1, None]),  # it hangs
        (False, 60.0, [1, None]),  # an error of its own
    ],
)
def test_a_rank_ends_no_sooner_than_the_one_that_it_has_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    follows: bool,
    patience: float,
    codes: list[int | None],
) -> None:
    monkeypatch.setattr("accel_callbacks.launch.followers._HEAD_START", patience)
    started = Workers(shell)
    record = {"message": {"extraInfo": {"follows": follows, "told_by": 5}}}
    (tmp_path / "error.json").write_text(json.dumps(record))
    free = tmp_path / "free"
    waits = f"while [ ! -e {free} ]; do sleep 0.01; done; exit 3"
    workers = [
        started.start(
            env={
                "command": command,
                "RANK": str(rank + 4),
                "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
            },
            local_rank_id=rank,
            stdout=None,
            stderr=None,
        )
        for rank, command in enumerate(("exit 1", waits))
    ]
    follower, lost = workers
    follower.handler.proc.wait()
    if codes[1] is not None:
        assert follower.poll() is None
        free.touch()
        lost.handler.proc.wait()
    while follower.poll() is None:
        time.sleep(0.01)
    assert [worker.poll() for worker in workers] == codes
    for worker in workers:
        worker.close(signal.SIGKILL)


def test_a_signal_while_workers_start_leaves_none() -> None:
    """Torch's launcher knows none of them yet."""
    ranks = []

    def start(**_: Any) -> Any:
        ranks.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"]))
        signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(proc=ranks[-1], close=ranks[-1].send_signal)

    workers = Workers(start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.start(local_rank_id=0, env={})
    finally:
        signal.signal(signal.SIGINT, before)
    workers.close()
    assert ranks[0].returncode == -signal.SIGTERM
    workers.close()  # none is left
