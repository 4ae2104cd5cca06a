"""The tiers of the tests, the shares of their workers, and the end of a session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent

# By its path: that of another folder may have the name in this worker.
_SPEC = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
conftest = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conftest)

SESSION = """
    import signal, subprocess, sys, time
    from pathlib import Path

    def test_that_leaves_a_handler():
        signal.signal(signal.SIGTERM, lambda *_: None)

    def test_that_waits_for_a_child_in_a_session_of_its_own():
        words = [sys.executable, "-c", "import time; time.sleep(1e6)"]
        child = subprocess.Popen(words, start_new_session=True)
        (Path(__file__).parent / "child").write_text(str(child.pid))
        child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_session_that_is_told_to_end_does_so_with_its_children(
    tmp_path: Path, number: signal.Signals, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text(textwrap.dedent(SESSION))
    # A session of its own: it must not end the processes of this one.
    environment = {k: v for k, v in os.environ.items() if k != "SESSION_OF_TESTS"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    session = subprocess.Popen(
        [*words, *workers, "--rootdir", str(ROOT), str(tmp_path / "test_it.py")],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    note = tmp_path / "child"
    while not (note.exists() and note.read_text()):
        assert session.poll() is None, session.communicate()[0]
        time.sleep(0.05)
    session.send_signal(number)
    printed, _ = session.communicate()
    assert session.returncode == (143 if number == signal.SIGTERM else 2), printed
    child = int(note.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != "zombie":  # the signal takes effect when it runs
            time.sleep(0.05)


HELPERS = """
    import subprocess

    import pytest

    @pytest.fixture
    def server():
        return subprocess.Popen(["true"])

    class Job:
        def start(self):
            return run()

    def run():
        subprocess.run(["true"])

    def test_by_a_fixture(server): ...

    def test_by_a_class():
        Job().start()

    @pytest.mark.usefixtures("server")
    def test_by_the_name_of_a_fixture(): ...

    def test_that_starts_nothing(tmp_path): ...
"""


def test_what_starts_a_process_is_found_through_helpers_and_fixtures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    module = tmp_path / "test_helpers.py"
    module.write_text(textwrap.dedent(HELPERS))
    found = {name for name in conftest._starters(module) if name.startswith("test_")}
    assert found == {"test_by_a_fixture", "test_by_a_class", "test_by_the_name_of_a_fixture"}


@pytest.mark.parametrize("first", [True, False])
def test_each_file_has_one_worker_and_no_worker_has_most_of_the_work(first: bool) -> None:
    owner = conftest._shares(first, 3)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert files <= set(owner)
    assert set(owner.values()) == {0, 1, 2}


def test_a_module_whose_tests_all_start_processes_is_not_collected_for_the_first_tier(
    tmp_path: Path,
) -> None:
    module = tmp_path / "test_ranks.py"
    module.write_text("pytestmark = [\n    pytest.mark.distributed,\n]\n")
    assert not conftest._in_first_tier(module)
    module.write_text(module.read_text() + "\n@pytest.mark.first\ndef test(): ...\n")
    assert conftest._in_first_tier(module)
