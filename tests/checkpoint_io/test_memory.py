"""The free host memory, as the system and the control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_io.memory import free_memory


def system(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    50 kB\n"}
V2 = {
    **MEMINFO,
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "30720\n",
    "sys/fs/cgroup/job/memory.current": "20480\n",
    "sys/fs/cgroup/job/memory.stat": "anon 10240\ninactive_file 1024\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "20480\n",
}
V1 = {
    **MEMINFO,
    "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param(MEMINFO, 50 * 1024, id="system"),
        pytest.param(V2, 11 * 1024, id="group above"),
        pytest.param(V1, 0, id="version 1"),
        pytest.param({}, None, id="unknown"),
    ],
)
def test_the_least_of_all_limits(tmp_path, files, free):
    assert free_memory(system(tmp_path, files)) == free


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no proc")
def test_the_memory_of_this_machine_is_known():
    assert 2**20 < free_memory() < 2**50
