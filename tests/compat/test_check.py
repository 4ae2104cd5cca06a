"""`accel compat check`: names of Accelerate in sources, and what each is here."""

from __future__ import annotations

import json
import textwrap

import pytest

from accel_callbacks.cli.main import main
from accel_callbacks.compat.check import name_uses, status_of
from accel_callbacks.errors.removed import REMOVED

SCRIPT = """
    import accelerate
    import accelerate.utils as u
    import accelerate.no_such_module
    from accelerate import Accelerator, state
    from accelerate.utils import set_seed, TERecipeKwargs
    from .accelerate import mine

    def train():
        from accelerate.utils.modeling import no_such_name
        accelerate.utils.tqdm([])
        u.gather(1)
        state.PartialState()
        assert accelerate.__version__
    """


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_names_are_found_where_they_are_imported_and_where_a_module_is_asked():
    uses = {(use.dotted, use.line) for use in name_uses(textwrap.dedent(SCRIPT))}
    assert uses == {
        ("accelerate.no_such_module", 4),
        ("accelerate.Accelerator", 5),
        ("accelerate.utils.set_seed", 6),
        ("accelerate.utils.TERecipeKwargs", 6),
        ("accelerate.utils.modeling.no_such_name", 10),
        ("accelerate.utils.tqdm", 11),
        ("accelerate.utils.gather", 12),
        ("accelerate.state.PartialState", 13),
        ("accelerate.__version__", 14),
    }


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("accelerate", "__version__", "here"),
        ("accelerate.utils", "gather", "here"),
        ("accelerate.tracking", "WandBTracker", "here"),
        ("accelerate", "DataLoaderConfiguration", "lenient"),
        ("accelerate.utils", "TERecipeKwargs", "not provided"),
        ("accelerate", "no_such_name", "unknown"),
        ("accelerate", "*", "unknown"),
        ("accelerate.test_utils", "anything", "unknown"),
        ("accelerate.utils", "", "here"),
    ],
)
def test_what_a_name_is(module, name, expected):
    status, reason = status_of(module, name)
    assert status == expected
    assert bool(reason) == (status in ("not provided", "unknown"))


def test_what_was_removed_is_not_provided(monkeypatch):
    monkeypatch.setitem(REMOVED, "GonePlugin", "It was removed in 0.1.0. Use another one.")
    reason = "It was removed in 0.1.0. Use another one."
    assert status_of("accelerate.utils", "GonePlugin") == ("not provided", reason)


def test_a_script_that_lacks_something_is_reported_with_its_lines(script, capsys):
    assert main(["compat", "check", script]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not here: the import fails:"
    assert f"  accelerate.utils.modeling.no_such_name  ({script}:10)" in lines
    reason = lines[lines.index(f"  accelerate.utils.TERecipeKwargs  ({script}:6)") + 1]
    assert reason.startswith("    fp8 is that of torchao here")
    assert main(["compat", "check", "--json", "--lacking", script]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [
        "accelerate.no_such_module",
        "accelerate.utils.TERecipeKwargs",
        "accelerate.utils.modeling.no_such_name",
    ]


SAVES = """
from accelerate import Accelerator
accelerator = Accelerator()
for step in range(9):
    if accelerator.is_main_process and step % 3 == 0:
        if step:
            accelerator.save_state(str(step))
    if not accelerator.is_main_process:
        pass
    else:
        accelerator.save_model(model, "weights")
    if accelerator.sync_gradients:
        accelerator.save_state("all")

@accelerator.on_main_process
def save():
    accelerator.save_state("one")
"""


def test_calls_of_one_process_that_all_have_to_make_are_found(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SAVES)
    assert main(["compat", "check", "--lacking", "--json", str(tmp_path)]) == 1
    rows = json.loads(capsys.readouterr().out)
    lines = {row["name"].rpartition(".")[2]: row["places"] for row in rows}
    script = tmp_path / "train.py"
    assert lines == {"save_model": [f"{script}:11"], "save_state": [f"{script}:7", f"{script}:17"]}
    assert {row["status"] for row in rows} == {"alone"}
    assert main(["compat", "check", str(tmp_path)]) == 1
    assert "called on one process, and wait here for all:" in capsys.readouterr().out


def test_a_script_that_lacks_nothing_is_right(tmp_path, capsys):
    (tmp_path / "train.py").write_text("from accelerate import Accelerator\nAccelerator()\n")
    assert main(["compat", "check", "--lacking", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing of accelerate lacks\n"


def test_a_package_is_read_and_not_imported(tmp_path, monkeypatch, capsys):
    package = tmp_path / "uses_accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("from accelerate import no_such_name\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["compat", "check", "uses_accelerate"]) == 1
    assert "accelerate.no_such_name" in capsys.readouterr().out


def test_what_cannot_be_read_is_told(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import accelerate (")
    assert main(["compat", "check", str(tmp_path)]) == 1
    assert "broken.py: line 1:" in capsys.readouterr().err
    assert main(["compat", "check", "no_such_package"]) == 2
    assert "no file, no folder and no installed package" in capsys.readouterr().err
