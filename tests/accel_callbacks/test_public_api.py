"""The public names: all there, all typed, and imported only when they are used."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import accel_callbacks
import accel_callbacks.callbacks
import accel_callbacks.models.offload
import accel_callbacks.utils

ROOT = Path(__file__).resolve().parents[2]
LAZY = [accel_callbacks, accel_callbacks.callbacks, accel_callbacks.models.offload]
lazy = pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)


def typing_block(package):
    """The import statements of the ``if TYPE_CHECKING`` block."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert len(blocks) == 1
    return blocks[0].body


def typed_imports(package):
    """What the ``if TYPE_CHECKING`` block imports: name to module."""
    return {
        alias.asname: (alias.name, node.module)
        for node in typing_block(package)
        for alias in node.names
    }


def starred_modules(package):
    """The modules of which the ``if TYPE_CHECKING`` block imports all names."""
    return {
        node.module for node in typing_block(package) for alias in node.names if alias.name == "*"
    }


@lazy
def test_every_public_name_is_there_and_documented(package):
    for name in package.__all__:
        value = getattr(package, name)
        if name != "__version__":
            assert inspect.getdoc(value), name


@lazy
def test_type_checkers_see_exactly_the_names_that_are_resolved_late(package):
    home = {name: (name, f"{package.__name__}.{module}") for name, module in package._HOME.items()}
    assert typed_imports(package) == home
    assert set(package.__all__) - {"__version__"} == set(home)


@lazy
def test_a_name_is_the_one_of_its_module_and_is_found_once(package):
    for name, module in package._HOME.items():
        value = getattr(package, name)
        assert value is getattr(sys.modules[f"{package.__name__}.{module}"], name)
        assert package.__dict__[name] is value
        assert name in sys.modules[f"{package.__name__}.{module}"].__all__


@lazy
def test_an_unknown_name_is_an_attribute_error(package):
    assert not hasattr(package, "Acelerator")
    with pytest.raises(AttributeError, match="'Acelerator'"):
        package.Acelerator  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from {package.__name__} import Acelerator")


@pytest.mark.parametrize(
    "package",
    [
        accel_callbacks,
        pytest.param(
            accel_callbacks.callbacks,
        ),
    ],
    ids=lambda package: package.__name__,
)
def test_dir_lists_the_names_before_they_are_used(package):
    code = f"import {package.__name__} as p; print(sorted(set(p.__all__) - set(dir(p))))"
    assert run(code) == "[]"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_next_to_nothing_and_a_star_import_imports_all():
    code = (
        "import sys, accel_callbacks\n"
        "ours = [name for name in sys.modules if name.startswith('accel_callbacks.')]\n"
        "print('torch' in sys.modules, ours)\n"
        "from accel_callbacks import *\n"
        "print(Accelerator.__name__, 'wandb' in sys.modules, 'tensorboard' in sys.modules)\n"
    )
    assert run(code) == "False ['accel_callbacks._lazy']\nAccelerator False False"


def test_utils_have_all_of_the_package_and_the_same_objects():
    assert accel_callbacks.utils.__all__ == sorted(accel_callbacks.utils.__all__)
    assert set(accel_callbacks.__all__) - set(accel_callbacks.utils.__all__) == {"__version__"}
    for name in accel_callbacks.__all__[:-1]:
        assert getattr(accel_callbacks.utils, name) is getattr(accel_callbacks, name)


def test_type_checkers_see_all_names_of_utils():
    homes = accel_callbacks.utils._HOME
    modules = {f"accel_callbacks.{home}" for home in homes.values()}
    assert starred_modules(accel_callbacks.utils) == {"accel_callbacks", *modules}
    for name, home in homes.items():
        assert name in importlib.import_module(f"accel_callbacks.{home}").__all__


def test_utils_answer_what_is_installed(monkeypatch):
    assert accel_callbacks.utils.is_tensorboard_available()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not accel_callbacks.utils.is_tensorboard_available()
    for name in ("is_tesnorboard_available", "tensorboard_available", "is_available"):
        with pytest.raises(AttributeError, match=name):
            getattr(accel_callbacks.utils, name)


@pytest.mark.parametrize(
    ("operation", "version", "expected"),
    [(">=", "2.0", True), ("<", "2.0", False), ("==", "1.0", False), ("!=", "1.0", True)],
)
def test_versions_are_compared(operation, version, expected):
    assert accel_callbacks.utils.is_torch_version(operation, version) is expected


def test_an_unknown_comparison_is_an_error():
    with pytest.raises(ValueError, match="unknown"):
        accel_callbacks.utils.compare_versions("torch", "=>", "2.0")


def test_models_are_taken_out_of_their_wrappers():
    utils = accel_callbacks.utils
    layer = torch.nn.Linear(1, 1)
    compiled = torch.compile(layer, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert not utils.is_compiled_module(layer)
    assert utils.extract_model_from_parallel(torch.nn.DataParallel(layer)) is layer
    assert utils.extract_model_from_parallel(compiled) is compiled
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is layer
    prepared = accel_callbacks.Accelerator(cpu=True, mixed_precision="bf16").prepare(layer)
    assert utils.extract_model_from_parallel(prepared)(torch.ones(1, 1)).dtype is torch.float32
    assert "forward" in vars(layer)
    assert utils.extract_model_from_parallel(prepared, False) is layer
    assert "forward" not in vars(layer)


LAZY_PACKAGES = [
    path.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for path in sorted(ROOT.glob("accel_callbacks/**/__init__.py"))
    if "lazy_names(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", [*LAZY_PACKAGES, "accel_callbacks.utils", "checkpoint_io"])
def test_names_made_on_demand_are_in_all_in_dir_and_among_the_members(name):
    package = importlib.import_module(name)
    members = dict(inspect.getmembers(package))
    assert {*package.__all__} <= {*dir(package)}
    assert {*package.__all__} <= {*members}


def test_checkpoint_io_has_names_and_rooms_on_demand_and_costs_no_torch_before():
    code = """
import sys, checkpoint_io
print("torch" in sys.modules)
print(checkpoint_io.errors.LeaseError is checkpoint_io.LeaseError)
print(hasattr(checkpoint_io, "no_such_name"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\nTrue\nFalse\n"), done.stderr


def test_a_star_import_of_utils_has_the_checks_for_packages():
    names: dict[str, object] = {}
    exec("from accel_callbacks.utils import *", names)
    assert names["is_wandb_available"]() in (True, False)
    assert "no_such_name" not in names


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert accel_callbacks.__version__ == version("accel-callbacks")


def test_methods_named_as_in_accelerate_exist():
    names = """prepare backward accumulate no_sync autocast clip_grad_norm_ clip_grad_value_ gather
        gather_for_metrics reduce pad_across_processes wait_for_everyone print unwrap_model
        save_state load_state save_model log run evaluate main_process_first
        local_main_process_first end_training init_trackers get_tracker trackers sync_gradients
        gradient_accumulation_steps mixed_precision device distributed_type num_processes
        process_index local_process_index is_main_process is_local_main_process is_last_process
        on_main_process on_local_main_process on_last_process on_process on_local_process
        optimizer_step_was_skipped get_state_dict project_dir unscale_gradients"""
    missing = [n for n in names.split() if not hasattr(accel_callbacks.Accelerator, n)]
    assert not missing
