"""Moving scripts from accelerate: what changes, what stays, and that nothing breaks."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_callbacks.compat.migrate import UnreadableError, migrate_notebook, migrate_script

CASES = {
    "top": ("from accelerate import Accelerator", "from accel_callbacks import Accelerator"),
    "alias": (
        "from accelerate import Accelerator as A  # why",
        "from accel_callbacks import Accelerator as A  # why",
    ),
    "utils": (
        "from accelerate.utils.operations import gather, listify",
        "from accel_callbacks.utils import gather, listify",
    ),
    "elsewhere": (
        "from accelerate.logging import get_logger",
        "from accel_callbacks import get_logger",
    ),
    "parentheses": (
        "from accelerate.utils import (  # all\n    set_seed,  # one\n    gather,\n)",
        "from accel_callbacks.utils import (  # all\n    set_seed,  # one\n    gather,\n)",
    ),
    "missing last": (
        "from accelerate.utils import set_seed, TERecipeKwargs",
        "from accel_callbacks.utils import set_seed\nfrom accelerate.utils import TERecipeKwargs",
    ),
    "missing first, in a block": (
        "if x:\n    from accelerate import prepare_pippy as c, Accelerator  # a\n",
        "if x:\n    from accel_callbacks import Accelerator  # a\n"
        "    from accelerate import prepare_pippy as c\n",
    ),
    "missing in parentheses": (
        "from accelerate.utils import (\n    set_seed,  # a\n    TERecipeKwargs,  # b\n)",
        "from accel_callbacks.utils import (\n    set_seed,  # a\n)\n"
        "from accelerate.utils import TERecipeKwargs",
    ),
    "continued": (
        "from accelerate.utils import set_seed, \\\n    TERecipeKwargs, \\\n    gather",
        "from accel_callbacks.utils import set_seed, \\\n    gather\n"
        "from accelerate.utils import TERecipeKwargs",
    ),
    "one line": (
        "try: from accelerate import Accelerator, prepare_pippy\nexcept ImportError: pass",
        "try: from accel_callbacks import Accelerator; from accelerate import prepare_pippy\n"
        "except ImportError: pass",
    ),
    "odd spaces": (
        "from accelerate . utils import gather",
        "from accel_callbacks.utils import gather",
    ),
    "module": (
        "import accelerate\naccelerate.Accelerator().print(accelerate.utils.gather)",
        "import accel_callbacks\naccel_callbacks.Accelerator().print(accel_callbacks.gather)",
    ),
    "module with utils": (
        "import os, accelerate\naccelerate.utils.listify(1)",
        "import os, accel_callbacks.utils\naccel_callbacks.utils.listify(1)",
    ),
    "module alias": (
        "import accelerate as a\na.logging.get_logger(a)",
        "import accel_callbacks as a\na.get_logger(a)",
    ),
    "utils alias": (
        "import accelerate.utils.operations as o\no.listify(1)",
        "import accel_callbacks.utils as o\no.listify(1)",
    ),
    "a module by from": (
        "from accelerate import logging, Accelerator\nlogging.get_logger('a')",
        "from accel_callbacks import utils as logging, Accelerator\nlogging.get_logger('a')",
    ),
    "beside": (
        "import accelerate\naccelerate.Accelerator\naccelerate.prepare_pippy",
        "import accelerate\nimport accel_callbacks\naccel_callbacks.Accelerator\n"
        "accelerate.prepare_pippy",
    ),
    "optional": (
        "try:\n    import accelerate\nexcept ImportError:\n    accelerate = None\n"
        "accelerate.utils.gather",
        "try:\n    import accel_callbacks as accelerate\nexcept ImportError:\n"
        "    accelerate = None\naccelerate.gather",
    ),
    "f-string": (
        "import accelerate\nprint(f'{accelerate.gather(1)} {1:>4}')",
        "import accel_callbacks\nprint(f'{accel_callbacks.gather(1)} {1:>4}')",
    ),
    "bytes before": (
        "import accelerate\nx = 'äöü€'; accelerate.gather('é'); accelerate.reduce",
        "import accel_callbacks\nx = 'äöü€'; accel_callbacks.gather('é'); accel_callbacks.reduce",
    ),
    "carriage returns": (
        "import accelerate\r\nif 1:\r\n\tfrom accelerate import gather, prepare_pippy\r\n",
        "import accel_callbacks\r\nif 1:\r\n\tfrom accel_callbacks import gather\r\n"
        "\tfrom accelerate import prepare_pippy\r\n",
    ),
    "positional": (
        "from accelerate import Accelerator\nAccelerator(False, True, 'bf16')",
        "from accel_callbacks import Accelerator\n"
        "Accelerator(device_placement=False, split_batches=True, mixed_precision='bf16')",
    ),
    "positional, by the module": (
        "import accelerate as a\na.Accelerator(( True ), x)",
        "import accel_callbacks as a\na.Accelerator(device_placement=( True ), split_batches=x)",
    ),
}
UNTOUCHED = {
    "nothing": "import torch\nprint('accelerate')\n",
    "relative": "from .accelerate import Accelerator\nfrom . import accelerate\n",
    "another package": "import accelerate_more\nfrom accelerate_more import Accelerator\n",
    "only missing": "from accelerate import prepare_pippy, TERecipeKwargs\n",
    "star": "from accelerate.utils import *\n",
    "a name of something else": "import accelerate\ndef f(accelerate):\n    accelerate.step()\n",
    "ours is taken": "import accelerate\naccel_callbacks = 1\naccelerate.prepare_pippy\n",
    "version": "import accelerate\nassert accelerate.__version__ > '0.1'\n",
    "docstring": '"""Run with accelerate launch."""\n',
}


@pytest.mark.parametrize("name", CASES)
def test_what_changes(name: str) -> None:
    before, after = CASES[name]
    assert migrate_script(before).after == after
    ast.parse(after)
    assert not migrate_script(after).changed


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_stays(name: str) -> None:
    assert migrate_script(UNTOUCHED[name]).after == UNTOUCHED[name]


@pytest.mark.parametrize("name", ["only missing", "star", "version", "a name of something else"])
def test_what_stays_is_reported(name: str) -> None:
    assert migrate_script(UNTOUCHED[name]).left


def test_findings_say_where_and_what() -> None:
    script = """\
from accelerate import Accelerator, TERecipeKwargs
from accelerate.utils import gather_object
from transformers import get_cosine_schedule_with_warmup
import os
os.environ["ACCELERATE_LOG_LEVEL"] = "INFO"
mine = Accelerator(split_batches=True, log_with=["tensorboard", "aim"])
warm = get_cosine_schedule_with_warmup(optimizer, num_training_steps=n * mine.num_processes)
model, warm = mine.prepare(model, warm)
warm.step()
mine.save_state()
other.save_state()
gather_object({})
mine.fp8_backend
mine.save_model(model, "x", safe_serialization=False)
subprocess.run("accelerate launch train.py")
mock.patch("accelerate.Accelerator.log")
mine.state.dynamo_plugin
Accelerator(True, False)
Accelerator(*options)
"""
    found = {(f.line, f.name, f.kind) for f in migrate_script(script).findings}
    assert found == {
        (1, "TERecipeKwargs", "left"),
        (5, "ACCELERATE_LOG_LEVEL", "differs"),
        (6, "Accelerator(split_batches=...)", "left"),
        (6, "Accelerator(log_with='aim')", "left"),
        (7, "* num_processes", "differs"),
        (9, "warm.step", "differs"),
        (10, "accelerator.save_state", "differs"),
        (12, "gather_object", "differs"),
        (13, "accelerator.fp8_backend", "left"),
        (14, "accelerator.save_model", "note"),
        (14, "accelerator.save_model(safe_serialization=False)", "left"),
        (15, "'accelerate launch train.py'", "note"),
        (16, "'accelerate.Accelerator.log'", "note"),
        (17, "state.dynamo_plugin", "left"),
        (18, "Accelerator(split_batches=...)", "left"),
        (19, "Accelerator(*...)", "left"),
    }


@pytest.mark.parametrize(
    "text", ["import (", "print 'two'", "x = 1\0", "(" * 5000, "def f():\n\tx\n        y"]
)
def test_what_is_no_python(text: str) -> None:
    with pytest.raises(UnreadableError):
        migrate_script(text)


PIECES = st.sampled_from(
    [
        *(before for before, _ in CASES.values()),
        *UNTOUCHED.values(),
        "def f():\n    import accelerate\n    return accelerate.utils.set_seed(1)",
        "class A:\n    from accelerate import utils",
        "accelerate.utils.listify",
        "accelerate.prepare_pippy(accelerate)",
        "accelerate.utils.x = 1",
        "def g(a: 'accelerate.Accelerator'): pass",
        "(accelerate\n .utils\n .gather)(1)",
        "x: accelerate.Accelerator = None",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(PIECES, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_any_mixture_parses_and_moving_twice_is_moving_once(pieces: list[str], end: str) -> None:
    script = "\n".join(pieces).replace("\r\n", "\n").replace("\n", end)
    after = migrate_script(script).after
    ast.parse(after)
    assert migrate_script(after).after == after


# --- notebooks ------------------------------------------------------------------------------


def notebook(*cells: str | list[str], **more: object) -> dict[str, object]:
    made = [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells]
    return {"cells": made, "metadata": {"kernelspec": "ä"}, "nbformat": 4, **more}


def sources(text: str) -> list[str | list[str]]:
    return [cell["source"] for cell in json.loads(text)["cells"]]


def test_notebook() -> None:
    book = notebook(
        ["!pip install accelerate \\\n", "  torch\n", "import accelerate\n", "x = !ls\n", "x?"],
        "%%bash\naccelerate launch train.py",
        "%%time\nfrom accelerate import notebook_launcher_x, Accelerator\nawait f()",
        "accelerate.utils.set_seed(1)\n%timeit accelerate\n!accelerate launch --help",
        "this is (no Python\nimport accelerate",
        "",
    )
    text = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    moved = migrate_notebook(text)
    assert sources(moved.after) == [
        [
            "!pip install accelerate \\\n",
            "  torch\n",
            "import accel_callbacks\n",
            "x = !ls\n",
            "x?",
        ],
        "%%bash\naccel launch train.py",
        "%%time\nfrom accel_callbacks import Accelerator\n"
        "from accelerate import notebook_launcher_x\nawait f()",
        "accel_callbacks.set_seed(1)\n%timeit accelerate\n!accel launch --help",
        "this is (no Python\nimport accelerate",
        "",
    ]
    assert [(f.cell, f.line, f.kind) for f in moved.findings] == [
        (1, 1, "note"),
        (3, 2, "left"),
        (4, 2, "left"),
        (5, 2, "left"),
    ]
    assert not migrate_notebook(moved.after).changed
    # every line that did not change is as it was, so that a diff is short
    assert len(set(moved.after.split("\n")) - set(text.split("\n"))) == 4


@pytest.mark.parametrize("indent", [1, 2, 4, None])
def test_notebook_keeps_how_it_is_written(indent: int | None) -> None:
    text = json.dumps(notebook("import accelerate", b=float("nan")), indent=indent)
    after = migrate_notebook(text).after
    assert after == text.replace("import accelerate", "import accel_callbacks")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"cells": 3}',
        "[" * 100_000,
        '{"cells": [{"cell_type": "code", "source": [1]}]}',
    ],
)
def test_what_is_no_notebook(text: str) -> None:
    with pytest.raises(UnreadableError, match="notebook"):
        migrate_notebook(text)
