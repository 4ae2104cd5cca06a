"""Moving scripts from accelerate: what changes, what stays, and that nothing breaks."""

from __future__ import annotations

import ast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_callbacks.compat.migrate import UnreadableError, migrate_script

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
        "from accel_callbacks.utils import set_seed\nfrom accelerate.utils import TERecipeKwargs",
    ),
    "continued": (
        "from accelerate.utils import set_seed, \\\n    TERecipeKwargs, \\\n    gather",
        "from accel_callbacks.utils import set_seed, gather\n"
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
        "import accel_callbacks.utils, accel_callbacks as accelerate\n"
        "accelerate.Accelerator().print(accelerate.utils.gather)",
    ),
    "module without utils": (
        "import accelerate\naccelerate.Accelerator()",
        "import accel_callbacks as accelerate\naccelerate.Accelerator()",
    ),
    "module with utils": (
        "import os, accelerate\naccelerate.utils.listify(1)",
        "import os, accel_callbacks.utils, accel_callbacks as accelerate\n"
        "accelerate.utils.listify(1)",
    ),
    "module alias": (
        "import accelerate as a  # why\na.get_logger(a)",
        "import accel_callbacks as a  # why\na.get_logger(a)",
    ),
    "in a function": (
        "async def f():\n    import accelerate.utils\n    await g(accelerate.utils.gather)",
        "async def f():\n    import accel_callbacks.utils, accel_callbacks as accelerate\n"
        "    await g(accelerate.utils.gather)",
    ),
    "utils alias": (
        "import accelerate.utils.operations as o\no.listify(1)",
        "import accel_callbacks.utils as o\no.listify(1)",
    ),
    "a module by from": (
        "from accelerate import logging, Accelerator\nlogging.get_logger('a')",
        "from accel_callbacks import utils as logging, Accelerator\nlogging.get_logger('a')",
    ),
    "optional": (
        "try:\n    import accelerate\nexcept ImportError:\n    accelerate = None\n"
        "accelerate.utils.gather",
        "try:\n    import accel_callbacks.utils, accel_callbacks as accelerate\n"
        "except ImportError:\n    accelerate = None\naccelerate.utils.gather",
    ),
    "f-string": (
        "import accelerate\nprint(f'{accelerate.gather(1)} {1:>4}')",
        "import accel_callbacks as accelerate\nprint(f'{accelerate.gather(1)} {1:>4}')",
    ),
    "bytes before": (
        "x = 'äöü€'; from accelerate import gather, prepare_pippy; y = 'é'",
        "x = 'äöü€'; from accel_callbacks import gather; from accelerate import prepare_pippy; "
        "y = 'é'",
    ),
    "carriage returns": (
        "import accelerate\r\nif 1:\r\n\tfrom accelerate import gather, prepare_pippy\r\n",
        "import accel_callbacks as accelerate\r\nif 1:\r\n\tfrom accel_callbacks import gather\r\n"
        "\tfrom accelerate import prepare_pippy\r\n",
    ),
    "missing before a parenthesis": (
        "from accelerate import (  # all\n    gather,  # one\n    prepare_pippy)  # end",
        "from accel_callbacks import gather  # end\nfrom accelerate import prepare_pippy",
    ),
    "missing between others": (
        "from accelerate import (gather, prepare_pippy, # a\n reduce, TERecipeKwargs # b\n)",
        "from accel_callbacks import gather, reduce\n"
        "from accelerate import prepare_pippy, TERecipeKwargs",
    ),
    "a module among names": (
        "from accelerate.utils import set_seed, operations as o\no.gather(1)",
        "from accel_callbacks.utils import set_seed\n"
        "from accel_callbacks import utils as o\no.gather(1)",
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
    "a module within": "import accelerate\naccelerate.logging.get_logger('a')\n",
    "some of a module": "import accelerate\naccelerate.Accelerator\naccelerate.prepare_pippy\n",
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


@pytest.mark.parametrize(
    "name",
    [
        *("only missing", "star", "version", "a name of something else", "a module within"),
        "some of a module",
    ],
)
def test_what_stays_is_reported(name: str) -> None:
    assert migrate_script(UNTOUCHED[name]).left


def test_a_save_on_the_main_process_alone_is_found() -> None:
    script = "from accelerate import PartialState\n"
    script += "if state.is_main_process:\n    accelerator.save_state('a')\n"
    (finding,) = migrate_script(script).left
    assert (finding.line, finding.name) == (3, "save_state")
    assert "all processes have to call it here" in finding.text


def test_findings_say_where_and_what() -> None:
    script = """\
from accelerate import Accelerator, TERecipeKwargs
from accelerate.utils import (
    gather_object,
    no_such_name,
)
import accelerate
import accelerate.state as s, accelerate.test_utils as t
from accelerate import *
accelerate.logging.get_logger(__name__)
accelerate.Accelerator()
s.PartialState()
t.require_cuda
Accelerator().prepare()
"""
    findings = migrate_script(script).findings
    assert [(f.line, f.name, f.kind) for f in findings] == [
        (1, "Accelerator", "differs"),
        (1, "TERecipeKwargs", "left"),
        (4, "no_such_name", "left"),
        (6, "import accelerate", "left"),
        (7, "accelerate.test_utils", "note"),
        (7, "import accelerate.test_utils", "note"),
        (8, "accelerate.*", "left"),
        (9, "accelerate.logging.get_logger", "left"),
        (11, "accelerate.state.PartialState", "differs"),
        (12, "accelerate.test_utils.require_cuda", "note"),
    ]


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
