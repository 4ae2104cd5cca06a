"""The rules of the house, checked on the source: who imports whom, and what nobody does."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.other_system import MISSING, MISSING_MODULES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import rooms  # noqa: E402

PACKAGES = ("accel_callbacks", "checkpoint_io", "loggers")
FORBIDDEN_ARROWS = {
    "accel_callbacks": {"examples", "tests"},
    "checkpoint_io": {"accel_callbacks", "loggers", "examples", "tests"},
    "loggers": {"accel_callbacks", "checkpoint_io", "examples", "tests"},
}
MAY_UNPICKLE_TENSORS = {"checkpoint_io/weights/torch_pickle.py"}
# Among the ranks of a run, as torch does for its collectives of objects; nothing of it is kept.
MAY_SEND_PICKLES = {"accel_callbacks/collectives/object_exchange.py"}
MAY_WRITE_ENVIRON = {
    "accel_callbacks/launch/environment.py",
    # Processes that one standing in for Accelerate starts stand in too.
    "accel_callbacks/compat/finder.py",
    # Functions of Accelerate by which scripts change variables themselves.
    "accel_callbacks/compat/environment.py",
}
RENAMES_AND_SYNCS = {"os.replace", "os.rename", "os.renames", "os.fsync", "os.fdatasync"}
#: Who imports the room of Accelerate's names, and why. Nobody else does.
MAY_IMPORT_COMPAT = {
    "accel_callbacks": "the table of public names, each imported late",
    "accel_callbacks.utils": "the table of Accelerate's names, each imported late",
    "accel_callbacks.plugins": "the table of plugins, each imported late",
    "accel_callbacks.as_accelerate": "runs a script for which the room stands in for Accelerate",
    "accel_callbacks.launch.worker": "runs a launched one: `accel launch --as_accelerate`",
    "accel_callbacks.cli.compat": "`accel compat` is the room's subcommand",
    "accel_callbacks.cli.config": "`accel config update` rewrites a file for FSDP1",
    "accel_callbacks.cli.launch": "`accel launch` tells what a file for FSDP1 or Megatron-LM means",
    "accel_callbacks.cli.migrate": "`accel migrate` is the room's subcommand",
    "accel_callbacks.cli.to_fsdp2": "`accel to-fsdp2` is the room's subcommand",
}
#: Files that import each other, those imports included that run late or only for type checkers.
#: Each entry is one whole circle. The list only shrinks.
ALLOWED_CIRCLES: list[set[str]] = [
    {
        "accel_callbacks.integrations.lightning.trainer",
        "accel_callbacks.integrations.lightning.trainer_parts",
    }
]
#: Files and folders that are named after something that the field calls so.
FIELD_TERMS = {
    "activation_checkpointing",
    "big_modeling",
    "casting",
    "early_stopping",
    "learning_rate",
    "learning_rate_monitor",
    "listing",
    "logging",
    "modeling",
    "sharding",
    "staging",
    "testing",
    "tracking",
    "training",
    "training_state",
    "tuning",
    "warning",
    "weight_averaging",
}
NO_GERUNDS = {"lightning", "ring", "string"}
HEAVY = [
    "wandb",
    "tensorboard",
    "s3fs",
    "lightning",
    "deepspeed",
    "transformers",
    "tqdm",
    "yaml",
    "fsspec",
]
PICKLERS = ["pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"]
UNSAFE_CALLS = {"torch.load", "torch.save", "eval", "exec", "builtins.eval", "builtins.exec"}
#: Functions of torch whose result is on the default device, unless another one is given.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "tensor"),
    *("scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "zeros"),
    *("sparse_compressed_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor", "tril_indices"),
    *("triu_indices", "bartlett_window", "blackman_window", "hamming_window", "hann_window"),
    *("kaiser_window", "Generator"),
}
#: Uses that follow ``torch.set_default_device`` on purpose: file and function. What else we make is
#: for collectives and for the host, where a default device would move it to the accelerator.
MAY_FOLLOW_THE_DEFAULT_DEVICE = {
    # The memory that a user asks for, in place of a call of torch.empty.
    ("accel_callbacks/compat/operations.py", "torch.empty"),
}
#: What is split at "/" and is no path: keys of tensors, object keys, names of metrics, headers.
SPLIT_AT_SLASHES = {
    "accel_callbacks/checkpoint/selection.py",
    "accel_callbacks/checkpoint/training_state.py",
    "accel_callbacks/integrations/trainer_mirror.py",
    "checkpoint_io/loader/load.py",
    "checkpoint_io/loader/selection.py",
    "checkpoint_io/storage/fsspec_store.py",
    "checkpoint_io/storage/s3/conditional.py",
    "checkpoint_io/storage/s3/download.py",
    "checkpoint_io/storage/s3/store.py",
    "loggers/file_names.py",
    "loggers/trackers/clearml.py",
}
ENVIRON_WRITERS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}


def sources() -> dict[str, Path]:
    """All modules of the three packages: dotted name to file."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()
FILES = {str(path.relative_to(ROOT)): path for path in SOURCES.values()}


# --- walkers -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)  # the rules ask one after another of the same file
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a module."""
    return tuple(ast.walk(tree))


def _package_of(module: str, is_package: bool, level: int) -> str:
    """Resolve the dots of a relative import to the package they mean."""
    parts = module.split(".")
    return ".".join(parts[: len(parts) - level + is_package])


def imported(node: ast.AST, module: str = "", is_package: bool = False) -> Iterator[str]:
    """Dotted names that an import statement asks for, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        start = _package_of(module, is_package, node.level) if node.level else ""
        base = ".".join(part for part in (start, node.module) if part)
        yield from (f"{base}.{alias.name}" for alias in node.names)


def all_imports(tree: ast.AST, module: str = "", is_package: bool = False) -> set[str]:
    """Every import of a module, those inside functions included."""
    return {name for node in walk(tree) for name in imported(node, module, is_package)}


def names_room(tree: ast.AST, module: str, room: str) -> bool:
    """Whether a module imports from a room, or names a module of it in a string."""
    names = all_imports(tree, module, module.rpartition(".")[0] == "")
    _, _, short = room.partition(".")
    texts = {
        node.value
        for node in walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return any(f"{name}.".startswith(f"{room}.") for name in names) or any(
        text.startswith((f"{room}.", f"{short}.", f".{short}.")) for text in texts
    )


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_time_nodes(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported; `if TYPE_CHECKING:` blocks do not."""
    for node in body:
        if _is_type_checking(node):
            yield from import_time_nodes(getattr(node, "orelse", []))
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(node, field, []):
                    handler = isinstance(inner, ast.ExceptHandler)
                    yield from import_time_nodes(inner.body if handler else [inner])


def import_graph(
    trees: Mapping[str, tuple[ast.Module, bool]], *, everywhere: bool = False
) -> dict[str, set[str]]:
    """Return for each module which of the given ones it imports when it is imported.

    With `everywhere`, imports inside functions and under ``TYPE_CHECKING`` count too.
    """
    graph: dict[str, set[str]] = {}
    for module, (tree, is_package) in trees.items():
        nodes = walk(tree) if everywhere else import_time_nodes(tree.body)
        names = (name for node in nodes for name in imported(node, module, is_package))
        # `from a import b` needs module a.b where there is one, else module a.
        known = (name if name in trees else name.rpartition(".")[0] for name in names)
        graph[module] = {name for name in known if name in trees} - {module}
    return graph


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one circle as a path that ends where it starts, or an empty list."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), [])


def all_circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module, sorted by their names."""

    def reachable(module: str) -> set[str]:
        seen: set[str] = set()
        pending = list(graph[module])
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending.extend(graph[name])
        return seen

    reach = {module: reachable(module) for module in graph}
    circles = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(map(set, circles), key=sorted)


def gerunds(names: Iterable[str]) -> set[str]:
    """Return the parts of dotted names that hold a verb in -ing and are no term of the field."""
    parts = {part for name in names for part in name.split(".")} - FIELD_TERMS
    return {
        part
        for part in parts
        if any(word.endswith("ing") and word not in NO_GERUNDS for word in part.split("_"))
    }


@functools.lru_cache(maxsize=2)
def _real_names(tree: ast.AST) -> dict[str, str]:
    """What local names stand for: imports, and plain ``alias = os.environ`` assignments."""
    names: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in walk(tree):
        value = getattr(node, "value", None)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        assigns = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        if assigns and value is not None and _full_name(value, names) == "os.environ":
            names.update({t.id: "os.environ" for t in targets if isinstance(t, ast.Name)})
    return names


def _full_name(node: ast.AST, names: Mapping[str, str]) -> str:
    """Dotted name of an expression with its first part resolved, or an empty string."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def environ_writes(tree: ast.AST) -> list[int]:
    """Lines that change os.environ."""
    names = _real_names(tree)
    writers = {f"os.environ.{name}" for name in ENVIRON_WRITERS} | {"os.putenv", "os.unsetenv"}
    lines = set()
    for node in walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            wrong = _full_name(node.value, names) == "os.environ"
        elif isinstance(node, ast.AugAssign):
            wrong = _full_name(node.target, names) == "os.environ"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            wrong = _full_name(node, names) == "os.environ"
        else:
            wrong = isinstance(node, ast.Call) and _full_name(node.func, names) in writers
        if wrong and isinstance(node, ast.expr | ast.stmt):
            lines.add(node.lineno)
    return sorted(lines)


def unsafe_uses(tree: ast.AST) -> list[str]:
    """Pickle in any form, and code made from text."""
    names = _real_names(tree)
    found = [name for name in all_imports(tree) if name.partition(".")[0] in PICKLERS]
    for node in walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and _full_name(node, names) in UNSAFE_CALLS:
            found.append(f"line {node.lineno}: {_full_name(node, names)}")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if off else [f"line {node.value.lineno}: allow_pickle"]
    return found


def restricted_loads(tree: ast.AST) -> list[str]:
    """Calls of ``torch.load`` that say ``weights_only=True``, as `unsafe_uses` would name them."""
    names = _real_names(tree)
    calls = [node for node in walk(tree) if isinstance(node, ast.Call)]
    return [
        f"line {call.func.lineno}: torch.load"
        for call in calls
        if _full_name(call.func, names) == "torch.load"
        and any(
            key.arg == "weights_only"
            and isinstance(key.value, ast.Constant)
            and key.value.value is True
            for key in call.keywords
        )
    ]


def plain_warnings(tree: ast.AST) -> list[int]:
    """Lines that call ``warnings.warn``, which names a line by a number of frames."""
    names = _real_names(tree)
    return [
        node.lineno
        for node in walk(tree)
        if isinstance(node, ast.Call) and _full_name(node.func, names) == "warnings.warn"
    ]


def uses_of_the_default_device(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and names of torch's factories that are used without ``device=``."""
    names = _real_names(tree)
    calls = [node for node in walk(tree) if isinstance(node, ast.Call)]
    given = {
        id(call.func)
        for call in calls
        if any(key.arg == "device" for key in call.keywords)
        or (call.args and _full_name(call.func, names) == "torch.Generator")
    }
    called = {id(call.func) for call in calls}
    found = []
    for node in walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in given:
            package, _, factory = _full_name(node, names).rpartition(".")
            # A type may be named without being made.
            is_made = factory != "Generator" or id(node) in called
            if package == "torch" and factory in FACTORIES and is_made:
                found.append((node.lineno, f"torch.{factory}"))
    return found


def system_calls(tree: ast.AST) -> list[str]:
    """Uses of the system's own rename and sync, by line."""
    names = _real_names(tree)
    return [
        f"line {node.lineno}: {name}"
        for node in walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and (name := _full_name(node, names)) in RENAMES_AND_SYNCS
    ]


def splits_at_slashes(tree: ast.AST) -> list[int]:
    """Lines that take a text apart at ``"/"``."""
    return [
        node.lineno
        for node in walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("split", "rsplit", "partition", "rpartition")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value == "/"
    ]


def unguarded_names(tree: ast.Module) -> set[str]:
    """Names that Windows or macOS lacks, used where nothing beside them looks at the system.

    A look is ``sys.platform``, ``hasattr``, ``suppress`` or ``try`` in the same function, or around
    a statement of the module, or in an ``assert`` of the module.
    """
    names = _real_names(tree)
    absent = {
        f"{module}.{name}"
        for missing in MISSING.values()
        for module, found in missing.items()
        for name in found
    }
    modules = {name for found in MISSING_MODULES.values() for name in found}
    found = set()

    def used_by(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name | ast.Attribute):
            return {_full_name(node, names)} & absent
        return {name.partition(".")[0] for name in imported(node)} & modules

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.Try | ast.With):
            guarded = guarded or _looks_at_the_system(node)
        if not guarded:
            found.update(used_by(node))
        for inner in ast.iter_child_nodes(node):
            visit(inner, guarded)

    if not any(map(used_by, walk(tree))):
        return set()
    visit(tree, any(isinstance(one, ast.Assert) and _looks_at_the_system(one) for one in tree.body))
    return found


def _looks_at_the_system(node: ast.AST) -> bool:
    inside = ast.walk(node.test if isinstance(node, ast.If) else node)
    return any(isinstance(one, ast.Try) or _is_look(one) for one in inside)


def _is_look(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) == ("sys", "platform")
    return isinstance(node, ast.Name) and node.id in ("hasattr", "suppress", "getattr")


def undocumented(owner: object) -> list[str]:
    """Names in ``__all__`` that are ours and have no docstring with an example."""
    missing = []
    for name in getattr(owner, "__all__", []):
        value = getattr(owner, name)
        ours = str(getattr(value, "__module__", "")).partition(".")[0] in PACKAGES
        checked = ours and (inspect.isclass(value) or inspect.isroutine(value))
        if checked and ">>>" not in (value.__doc__ or ""):
            missing.append(name)
    return missing


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# --- the rules -----------------------------------------------------------------------------


def dependencies_point_one_way(module: str, name: str, tree: ast.Module) -> None:
    names = all_imports(tree, module, name.endswith("__init__.py"))
    top = {other.partition(".")[0] for other in names}
    assert not top & FORBIDDEN_ARROWS[module.partition(".")[0]]


def only_the_launcher_writes_the_environment(name: str, tree: ast.Module) -> None:
    lines = environ_writes(tree)
    assert bool(lines) == (name in MAY_WRITE_ENVIRON), f"{name}, lines {lines}"


def no_pickle_and_no_code_from_text(name: str, tree: ast.Module) -> None:
    allowed = restricted_loads(tree) if name in MAY_UNPICKLE_TENSORS else []
    allowed += ["pickle"] if name in MAY_SEND_PICKLES else []
    assert [use for use in unsafe_uses(tree) if use not in allowed] == []


def a_warning_finds_the_line_of_the_user(name: str, tree: ast.Module) -> None:
    lines = plain_warnings(tree)
    if name in {f"{package}/warning.py" for package in PACKAGES}:
        assert len(lines) == 1
    else:
        assert lines == [], f"{name}: use warn of {name.partition('/')[0]}.warning"


def what_we_make_does_not_follow_the_default_device(name: str, tree: ast.Module) -> None:
    uses = uses_of_the_default_device(tree)
    wrong = [one for one in uses if (name, one[1]) not in MAY_FOLLOW_THE_DEFAULT_DEVICE]
    assert wrong == [], f"{name}: give device=, such as 'cpu' for what ranks exchange"


def renames_and_syncs_are_those_of_local_files(name: str, tree: ast.Module) -> None:
    # Windows needs patience for a rename, and macOS a call of its own for a sync.
    uses = system_calls(tree)
    if name.endswith("/local_files.py"):
        assert uses
    else:
        assert uses == [], f"{name}: use {name.partition('/')[0]}.local_files"


def paths_are_split_by_the_helpers_of_local_files(name: str, tree: ast.Module) -> None:
    # A path may have backslashes on Windows, and then prune would not know what it protects.
    lines = splits_at_slashes(tree)
    assert bool(lines) == (name in SPLIT_AT_SLASHES), (
        f"{name}, lines {lines}: split_path and base_name are for paths"
    )


def what_other_systems_lack_is_used_where_the_system_is_looked_at(
    name: str, tree: ast.Module
) -> None:
    assert unguarded_names(tree) == set(), (
        f"{name}: test sys.platform, which mypy understands, in the same function"
    )


RULES = (
    only_the_launcher_writes_the_environment,
    no_pickle_and_no_code_from_text,
    a_warning_finds_the_line_of_the_user,
    what_we_make_does_not_follow_the_default_device,
    renames_and_syncs_are_those_of_local_files,
    paths_are_split_by_the_helpers_of_local_files,
    what_other_systems_lack_is_used_where_the_system_is_looked_at,
)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_file_keeps_the_rules(module: str) -> None:
    path = SOURCES[module]
    name, tree = str(path.relative_to(ROOT)), parse(path)  # once for all rules
    dependencies_point_one_way(module, name, tree)
    for rule in RULES:
        rule(name, tree)


def test_lists_of_exceptions_name_files() -> None:
    named = MAY_UNPICKLE_TENSORS | MAY_WRITE_ENVIRON | SPLIT_AT_SLASHES
    assert named <= set(FILES)


def test_nobody_imports_the_examples() -> None:
    paths = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in paths if "examples" in path.read_text("utf-8")]
    assert not [p for p in paths if "examples" in {n.split(".")[0] for n in all_imports(parse(p))}]


def test_no_circles_of_imports_nor_of_late_ones_and_those_for_types() -> None:
    trees = {name: (parse(path), path.name == "__init__.py") for name, path in SOURCES.items()}
    assert " -> ".join(find_circle(import_graph(trees))) == ""
    circles = all_circles(import_graph(trees, everywhere=True))
    new = [sorted(circle) for circle in circles if circle not in ALLOWED_CIRCLES]
    gone = [sorted(circle) for circle in ALLOWED_CIRCLES if circle not in circles]
    # A circle that has become smaller is one of each: put the smaller one into the list.
    assert (new, gone) == ([], [])


@pytest.mark.parametrize(
    ("first", "statement", "unwanted"),
    [
        ("pass", "import accel_callbacks", [*HEAVY, "torch"]),
        # What torch brings along by itself (tqdm) is not ours to avoid.
        ("import torch", "from accel_callbacks import Accelerator", HEAVY),
    ],
)
def test_import_is_light(first: str, statement: str, unwanted: list[str]) -> None:
    new = "print(json.dumps(sorted(set(sys.modules) - before)))"
    code = f"import json, sys\n{first}\nbefore = set(sys.modules)\n{statement}\n{new}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(set(json.loads(done.stdout)) & set(unwanted)) == []


def test_all_that_may_follow_the_default_device_does() -> None:
    uses = {
        (name, used)
        for name in {name for name, _ in MAY_FOLLOW_THE_DEFAULT_DEVICE}
        for _, used in uses_of_the_default_device(parse(FILES[name]))
    }
    assert uses == MAY_FOLLOW_THE_DEFAULT_DEVICE


def test_the_packages_agree_which_line_is_the_users() -> None:
    # None of them may import another for it.
    assert len({(ROOT / package / "warning.py").read_text() for package in PACKAGES}) == 1


def test_the_packages_agree_on_local_files() -> None:
    assert len({(ROOT / package / "local_files.py").read_text() for package in PACKAGES}) == 1


def test_rooms_import_those_below_them_but_for_pairs_with_a_reason() -> None:
    up = set(rooms.arrows_up(rooms.arrows()))
    assert up == set(rooms.REASONS), (
        "import downwards, or give the pair a reason in scripts/rooms.py"
    )
    page = (ROOT / "docs" / "concepts" / "rooms.md").read_text("utf-8")
    assert all(
        f"| `{start}` | `{end}` | {why} |" in page for (start, end), why in rooms.REASONS.items()
    )


def test_nobody_imports_the_room_of_foreign_names() -> None:
    room = "accel_callbacks.compat"
    importers = {
        module
        for module, path in SOURCES.items()
        if not f"{module}.".startswith(f"{room}.")
        and "compat" in path.read_text("utf-8")  # others need not be parsed
        and names_room(parse(path), module, room)
    }
    assert importers == set(MAY_IMPORT_COMPAT), (
        "say the foreign name in terms of this library, in compat/"
    )
    for table in ("accel_callbacks", "accel_callbacks.utils", "accel_callbacks.plugins"):
        body = import_time_nodes(parse(SOURCES[table]).body)
        assert not any(name.startswith(room) for node in body for name in imported(node, table))


def test_files_are_named_after_things() -> None:
    assert gerunds(SOURCES) == set()


def test_no_module_hides_a_public_name_of_its_package() -> None:
    # To import such a module would put it in the place of the function or class.
    hidden = {}
    for module, path in SOURCES.items():
        if path.name == "__init__.py":
            names = set(getattr(importlib.import_module(module), "__all__", []))
            inside = {one.name.partition(".")[0] for one in path.parent.iterdir()}
            if found := {name for name in names & inside if f"{module}.{name}" in SOURCES}:
                hidden[module] = found
    assert hidden == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_every_folder_is_a_package() -> None:
    # The wheel leaves out a folder without __init__.py; an editable install hides that.
    folders = {path.parent for path in FILES.values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_shows_an_example(package: str) -> None:
    root = importlib.import_module(package)
    inner = pkgutil.walk_packages(root.__path__, f"{package}.")
    modules = [root, *(importlib.import_module(m.name) for m in inner if m.ispkg)]
    missing = {module.__name__: names for module in modules if (names := undocumented(module))}
    assert missing == {}


# --- the walkers can fail ------------------------------------------------------------------


def tree_of(text: str) -> ast.Module:
    return ast.parse(textwrap.dedent(text))


def test_walker_sees_imports_in_functions_and_relative_ones() -> None:
    tree = tree_of("from ..b import c\ndef f():\n    import loggers.base\n    from . import d")
    assert all_imports(tree, "p.a.m") == {"p.b.c", "loggers.base", "p.a.d"}
    assert all_imports(tree_of("from .x import y"), "p", True) == {"p.x.y"}


@pytest.mark.parametrize(
    ("first", "circle"),
    [
        ("from p import b", ["p.a", "p.b", "p.c", "p.a"]),
        ("try:\n    from .b import x\nexcept ImportError:\n    pass", ["p.a", "p.b", "p.c", "p.a"]),
        ("def f():\n    import p.b", []),
        ("if TYPE_CHECKING:\n    import p.b", []),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import p.b", ["p.a", "p.b", "p.c", "p.a"]),
    ],
)
def test_walker_sees_circles(first: str, circle: list[str]) -> None:
    texts = {"p.a": first, "p.b": "import p.c", "p.c": "class K:\n    from p.a import x"}
    graph = import_graph({name: (tree_of(text), False) for name, text in texts.items()})
    assert find_circle(graph) == circle


@pytest.mark.parametrize(
    "statement",
    [
        "from p import b",
        "def f():\n    import p.b",
        "if TYPE_CHECKING:\n    from p.b import x",
        "class K:\n    def f(self):\n        from . import b",
    ],
)
def test_walker_sees_circles_of_late_imports_and_of_imports_for_types(statement: str) -> None:
    texts = {
        "p.a": statement,
        "p.b": "import p.c",
        "p.c": "from p.a import x",
        "p.d": "import p.a",  # leads to the circle and is not in it
        "p.e": "def f():\n    import p.f",
        "p.f": "if TYPE_CHECKING:\n    import p.e",
    }
    trees = {name: (tree_of(text), False) for name, text in texts.items()}
    circles = all_circles(import_graph(trees, everywhere=True))
    assert circles == [{"p.a", "p.b", "p.c"}, {"p.e", "p.f"}]


def test_walker_sees_no_circle_where_imports_go_one_way() -> None:
    assert all_circles({"p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": set()}) == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("from accel_callbacks.compat import install", True),
        ("def f():\n    import accel_callbacks.compat.names", True),
        ("from .compat import hooks", True),
        ("import_module('accel_callbacks.compat.names')", True),
        ("HOMES = {'listify': 'compat.operations'}", True),
        ("from accel_callbacks.checkpoint.compatibility import compare_frozen", False),
        ("'compatible'", False),
    ],
)
def test_walker_sees_what_names_a_room(line: str, names: bool) -> None:
    assert names_room(tree_of(line), "accel_callbacks", "accel_callbacks.compat") == names


def test_walker_sees_gerunds() -> None:
    names = ["p.putting_back", "p.saving.options", "p.early_stopping", "p.from_lightning", "p.ring"]
    assert gerunds([*names, "p.stopping", "p.settings"]) == {"putting_back", "saving", "stopping"}


@pytest.mark.parametrize(
    "line",
    [
        "import warnings; warnings.warn('text', stacklevel=2)",
        "import warnings as w; w.warn('text')",
        "from warnings import warn; warn('text')",
    ],
)
def test_walker_sees_plain_warnings(line: str) -> None:
    assert plain_warnings(ast.parse(line)) == [1]
    assert plain_warnings(ast.parse("from loggers.warning import warn; warn('text')")) == []


def test_walker_sees_renames_and_syncs() -> None:
    assert system_calls(tree_of("import os as o; o.replace(a, b)")) == ["line 1: os.replace"]
    assert system_calls(tree_of("from os import fsync; fsync(0)")) == ["line 1: os.fsync"]
    assert system_calls(tree_of("text.replace(a, b); dataclasses.replace(c)")) == []


def test_walker_sees_splits_at_slashes() -> None:
    assert splits_at_slashes(ast.parse("a.rsplit('/', 1)\nb.partition('/')")) == [1, 2]
    assert splits_at_slashes(ast.parse("a.split(); a.split('.'); a.replace('/', '')")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import signal\nROOTS = {signal.SIGKILL, signal.SIGTERM}", {"signal.SIGKILL"}),
        ("from signal import SIGBUS as bus\ndef f():\n    return bus", {"signal.SIGBUS"}),
        ("def f():\n    import os as o\n    o.fork()", {"os.fork"}),
        ("import fcntl", {"fcntl"}),
        ("import os, sys\nif sys.platform != 'win32':\n    os.fork()", set()),
        ("import os, sys\nassert sys.platform == 'linux'\nos.fork()", set()),
        ("import os\ndef f():\n    if hasattr(os, 'fork'):\n        os.fork()", set()),
        ("try:\n    import fcntl\nexcept ImportError:\n    pass", set()),
        ("import os, sys\nif x:\n    os.fork()", {"os.fork"}),
    ],
)
def test_walker_sees_what_other_systems_lack(text: str, found: set[str]) -> None:
    assert unguarded_names(ast.parse(text)) == found


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['A'] = 'b'",
        "del os.environ['A']",
        "os.environ |= {}",
        "os.environ = {}",
        "os.environ.update(a='b')",
        "os.environ.setdefault('A', 'b')",
        "x = os.environ.pop('A')",
        "os.putenv('A', 'b')",
        "from os import environ as e; e['A'] = 'b'",
        "import os as o; o.environ['A'] = 'b'",
        "env = os.environ; env['A'] = 'b'",
    ],
)
def test_walker_sees_environ_writes(line: str) -> None:
    assert environ_writes(tree_of(line)) == [1]


@pytest.mark.parametrize(
    "line", ["os.environ['A']", "dict(os.environ)", "os.environ.get('A')", "env['A'] = 'b'"]
)
def test_walker_lets_reads_pass(line: str) -> None:
    assert environ_writes(tree_of(line)) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.tensor([1])",
        "torch.Generator().manual_seed(1)",
        "from torch import zeros; zeros(2)",
        "import torch as t; t.full((2,), 1)",
        "make = torch.ones",
    ],
)
def test_walker_sees_uses_of_the_default_device(line: str) -> None:
    assert len(uses_of_the_default_device(ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.tensor([1], device=here)",
        "torch.Generator('cpu')",
        "isinstance(one, torch.Generator)",
        "torch.frombuffer(data, dtype=kind)",
        "tensor.new_zeros(2)",
        "def f(x: torch.Generator | None): pass",
    ],
)
def test_walker_lets_a_device_that_is_given_pass(line: str) -> None:
    assert uses_of_the_default_device(ast.parse(line)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "torch.load(path)",
        "import torch as t; t.load(path)",
        "from torch import load; load(path)",
        "eval(text)",
        "exec(text)",
        "reader = torch.load",
        "np.load(path, allow_pickle=True)",
        "def f():\n    import shelve",
    ],
)
def test_walker_sees_unsafe_uses(line: str) -> None:
    assert unsafe_uses(tree_of(line))


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "json.load(f)",
        "dist.all_gather_object(out, x)",
        "np.load(p, allow_pickle=False)",
    ],
)
def test_walker_lets_safe_uses_pass(line: str) -> None:
    assert unsafe_uses(tree_of(line)) == []


def test_walker_lets_only_restricted_loads_pass() -> None:
    tree = tree_of(
        "torch.load(a, weights_only=True)\ntorch.load(a)\ntorch.load(a, weights_only=x)\n"
        "torch.load(a, weights_only=False)\nload = torch.load"
    )
    assert restricted_loads(tree) == ["line 1: torch.load"]
    assert len(unsafe_uses(tree)) == 5


def test_walker_sees_missing_examples() -> None:
    class Module:
        __all__ = ("sources", "ast", "NAME")
        NAME = 3
        ast = ast

        @staticmethod
        def sources() -> None:
            """No example."""

    Module.sources.__module__ = "loggers.fake"
    assert undocumented(Module) == ["sources"]
