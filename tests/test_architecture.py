"""The rules of the house, checked on the source: who imports whom, and what nobody does."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.other_system import MISSING, MISSING_MODULES
from tests.support.sources import modules

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import rooms  # noqa: E402

PACKAGES = ("accel_callbacks", "checkpoint_io", "loggers")
FORBIDDEN_ARROWS = {
    "accel_callbacks": {"examples", "tests"},
    "checkpoint_io": {"accel_callbacks", "loggers", "examples", "tests"},
    "loggers": {"accel_callbacks", "checkpoint_io", "examples", "tests"},
}
#: What `loggers` takes from `checkpoint_io` all the same. They import nothing but the standard
#: library, so that `loggers` has no torch.
SHARED = {"checkpoint_io.local_files", "checkpoint_io.warning"}
MAY_UNPICKLE_TENSORS = {"checkpoint_io/weights/foreign/torch_pickle.py"}
# It imports and calls nothing.
MAY_READ_PICKLES = {"checkpoint_io/weights/foreign/inert_pickle.py"}
# Among the ranks of a run, as torch does for its collectives of objects; nothing of it is kept.
MAY_SEND_PICKLES = {
    "accel_callbacks/collectives/objects.py",
    "accel_callbacks/launch/functions.py",  # from processes to the one that has started them
}
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
    "accel_callbacks._lazy": "looks up a name of another library, where one is used",
    "accel_callbacks.state": "the handles that Accelerate has, each imported late",
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
#: The core, by how the names of modules begin.
CORE = (
    *(f"accel_callbacks.{room}." for room in ("loop", "data", "collectives", "distributed")),
    *(f"accel_callbacks.{room}." for room in ("precision", "checkpoint", "tracking", "errors")),
    "accel_callbacks.strategy.",
    *("accel_callbacks.callbacks.base", "accel_callbacks.callbacks.dispatch."),
    *("accel_callbacks.optimizer", "accel_callbacks.scheduler", "accel_callbacks.placeholder"),
)
#: Files of the core that name another room all the same. The list only shrinks.
CORE_NAMES = {
    # The command that a process was started by, in the text of an error.
    ("accel_callbacks.errors.text", "launch"),
}
#: Files that import each other, those imports included that run late or only for type checkers.
#: Each entry is one whole circle. The list only shrinks.
ALLOWED_CIRCLES: list[set[str]] = [
    {
        "accel_callbacks.addons.lightning.trainer",
        "accel_callbacks.addons.lightning.trainer_parts",
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
    "sharding",
    "staging",
    "steering",
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
#: Of `torch.load`, with ``weights_only=True``.
RESTRICTED = "torch.load of tensors"
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
    "accel_callbacks/addons/trainer/trainer_mirror.py",
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


#: A line and what was found on it.
Uses = list[tuple[int, str]]


# --- walkers -------------------------------------------------------------------------------


@functools.cache  # each rule asks
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


def all_imports(tree: ast.AST, module: str = "", is_package: bool = False) -> Uses:
    """Every import of a module, those inside functions included."""
    statements = (node for node in walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return [(one.lineno, name) for one in statements for name in imported(one, module, is_package)]


def names_room(tree: ast.AST, module: str, room: str) -> bool:
    """Whether a module imports from a room, or names a module of it in a string."""
    names = all_imports(tree, module, module.rpartition(".")[0] == "")
    _, _, short = room.partition(".")
    texts = {
        node.value
        for node in walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return any(f"{name}.".startswith(f"{room}.") for _, name in names) or any(
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


@functools.cache
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


def named(tree: ast.AST) -> Iterator[tuple[ast.Name | ast.Attribute, str]]:
    """Names and attributes of a module, and what each stands for."""
    names = _real_names(tree)
    for node in walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, _full_name(node, names)


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of a module, and of what."""
    names = _real_names(tree)
    for node in walk(tree):
        if isinstance(node, ast.Call):
            yield node, _full_name(node.func, names)


def environ_writes(tree: ast.AST) -> Uses:
    """What changes os.environ."""
    names = _real_names(tree)
    writers = {f"os.environ.{name}" for name in ENVIRON_WRITERS} | {"os.putenv", "os.unsetenv"}
    found = []
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
            found.append((node.lineno, ast.unparse(node)))
    return found


def unsafe_uses(tree: ast.AST) -> Uses:
    """Pickle in any form, and code made from text, but for loads of tensors alone."""
    found = [use for use in all_imports(tree) if use[1].partition(".")[0] in PICKLERS]
    restricted = {
        id(call.func) for call, name in calls(tree) if name == "torch.load" and _is_restricted(call)
    }
    found += [
        (node.lineno, name if id(node) not in restricted else RESTRICTED)
        for node, name in named(tree)
        if name in UNSAFE_CALLS
    ]
    for node in walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if off else [(node.value.lineno, "allow_pickle")]
    return found


def _is_restricted(load: ast.Call) -> bool:
    return any(
        key.arg == "weights_only"
        and isinstance(key.value, ast.Constant)
        and key.value.value is True
        for key in load.keywords
    )


def plain_warnings(tree: ast.AST) -> Uses:
    """Calls of ``warnings.warn``, which names a line by a number of frames."""
    return [(call.lineno, name) for call, name in calls(tree) if name == "warnings.warn"]


def uses_of_the_default_device(tree: ast.AST) -> Uses:
    """Torch's factories that are used without ``device=``."""
    given = {
        id(call.func)
        for call, name in calls(tree)
        if any(key.arg == "device" for key in call.keywords)
        or (call.args and name == "torch.Generator")
    }
    called = {id(call.func) for call, _ in calls(tree)}
    found = []
    for node, name in named(tree):
        package, _, factory = name.rpartition(".")
        # A type may be named without being made.
        is_made = factory != "Generator" or id(node) in called
        if package == "torch" and factory in FACTORIES and is_made and id(node) not in given:
            found.append((node.lineno, name))
    return found


def system_calls(tree: ast.AST) -> Uses:
    """Uses of the system's own rename and sync."""
    return [(node.lineno, name) for node, name in named(tree) if name in RENAMES_AND_SYNCS]


def splits_at_slashes(tree: ast.AST) -> Uses:
    """What takes a text apart at ``"/"``."""
    return [
        (call.lineno, ast.unparse(call))
        for call, _ in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("split", "rsplit", "partition", "rpartition")
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == "/"
    ]


def unguarded_names(tree: ast.Module) -> Uses:
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
    found = []

    def used_by(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name | ast.Attribute):
            return {_full_name(node, names)} & absent
        return {name.partition(".")[0] for name in imported(node)} & modules

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.Try | ast.With):
            guarded = guarded or _looks_at_the_system(node)
        if not guarded:
            found.extend((node.lineno, name) for name in used_by(node))  # type: ignore[attr-defined]
        for inner in ast.iter_child_nodes(node):
            visit(inner, guarded)

    if not any(map(used_by, walk(tree))):
        return []
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


# --- the rules -----------------------------------------------------------------------------


def found_by(walker: Callable[[ast.Module], Uses]) -> dict[str, Uses]:
    """What a walker finds in the three packages, by file."""
    found = {str(one.path.relative_to(ROOT)): walker(one.tree) for one in modules().values()}
    return {name: uses for name, uses in found.items() if uses}


def told(found: Mapping[str, Uses], but: Iterable[str] = ()) -> list[str]:
    """One line each use, but for those in files that may."""
    return [f"{name}:{n}: {what}" for name in found.keys() - set(but) for n, what in found[name]]


def test_dependencies_point_one_way() -> None:
    wrong = [
        f"{one.path.relative_to(ROOT)}:{line}: {name}"
        for one in modules().values()
        for line, name in all_imports(one.tree, one.name, one.is_package)
        if name.partition(".")[0] in FORBIDDEN_ARROWS[one.package]
        and not (one.package == "loggers" and name.rpartition(".")[0] in SHARED)
    ]
    assert wrong == []


def test_what_the_packages_share_needs_the_standard_library_alone() -> None:
    names = {name for shared in SHARED for _, name in all_imports(modules()[shared].tree)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names}


def test_only_the_launcher_writes_the_environment() -> None:
    found = found_by(environ_writes)
    assert told(found, MAY_WRITE_ENVIRON) == []
    assert found.keys() >= MAY_WRITE_ENVIRON


def test_no_pickle_and_no_code_from_text() -> None:
    found = found_by(unsafe_uses)
    may = {
        **dict.fromkeys(MAY_UNPICKLE_TENSORS, RESTRICTED),
        **dict.fromkeys(MAY_SEND_PICKLES | MAY_READ_PICKLES, "pickle"),
    }
    wrong = {name: [use for use in uses if use[1] != may.get(name)] for name, uses in found.items()}
    assert told(wrong) == []
    assert found.keys() >= MAY_UNPICKLE_TENSORS | MAY_READ_PICKLES | MAY_SEND_PICKLES


def test_a_warning_finds_the_line_of_the_user() -> None:
    found = found_by(plain_warnings)
    own = "checkpoint_io/warning.py"
    assert told(found, [own]) == [], f"use warn of {own}"
    assert len(found[own]) == 1


def test_what_we_make_does_not_follow_the_default_device() -> None:
    found = found_by(uses_of_the_default_device)
    used = {(name, use[1]) for name, uses in found.items() for use in uses}
    follow = MAY_FOLLOW_THE_DEFAULT_DEVICE
    wrong = {n: [use for use in uses if (n, use[1]) not in follow] for n, uses in found.items()}
    assert told(wrong) == [], "give device=, such as 'cpu' for what ranks exchange"
    assert used >= follow


def test_renames_and_syncs_are_those_of_local_files() -> None:
    # Windows needs patience for a rename, and macOS a call of its own for a sync.
    found = found_by(system_calls)
    own = "checkpoint_io/local_files.py"
    assert told(found, [own]) == [], f"use {own}"
    assert own in found


def test_paths_are_split_by_the_helpers_of_local_files() -> None:
    # A path may have backslashes on Windows, and then prune would not know what it protects.
    found = found_by(splits_at_slashes)
    assert told(found, SPLIT_AT_SLASHES) == [], "split_path and base_name are for paths"
    assert found.keys() >= SPLIT_AT_SLASHES


def test_what_other_systems_lack_is_used_where_the_system_is_looked_at() -> None:
    assert told(found_by(unguarded_names)) == [], (
        "test sys.platform, which mypy understands, in the same function"
    )


def test_nobody_imports_the_examples() -> None:
    paths = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: text for path in paths if "examples" in (text := path.read_text("utf-8"))}
    found = {str(path): all_imports(ast.parse(text)) for path, text in texts.items()}
    assert [use for use in told(found) if use.partition(": ")[2].split(".")[0] == "examples"] == []


def test_no_circles_of_imports_nor_of_late_ones_and_those_for_types() -> None:
    trees = {name: (one.tree, one.is_package) for name, one in modules().items()}
    assert " -> ".join(find_circle(import_graph(trees))) == ""
    circles = all_circles(import_graph(trees, everywhere=True))
    new = [sorted(circle) for circle in circles if circle not in ALLOWED_CIRCLES]
    gone = [sorted(circle) for circle in ALLOWED_CIRCLES if circle not in circles]
    # A circle that has become smaller is one of each: put the smaller one into the list.
    assert (new, gone) == ([], [])


def test_import_is_light() -> None:
    code = """
        import sys

        def new(before, names):
            return sorted({*sys.modules} - before & {*names})

        import accel_callbacks
        print(new(set(), NAMES))
        import torch  # what it brings along by itself (tqdm) is not ours to avoid
        before = {*sys.modules}
        from accel_callbacks import Accelerator
        print(new(before, NAMES))
    """
    text = textwrap.dedent(code).replace("NAMES", repr([*HEAVY, "torch"]))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr


def test_rooms_import_those_below_them_but_for_pairs_with_a_reason() -> None:
    up = set(rooms.arrows_up(rooms.arrows(modules())))
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
        for module, one in modules().items()
        if not f"{module}.".startswith(f"{room}.") and names_room(one.tree, module, room)
    }
    assert importers == set(MAY_IMPORT_COMPAT), (
        "say the foreign name in terms of this library, in compat/"
    )
    for table in (
        "accel_callbacks",
        *(f"accel_callbacks.{one}" for one in ("utils", "plugins", "state")),
    ):
        body = import_time_nodes(modules()[table].tree.body)
        assert not any(name.startswith(room) for node in body for name in imported(node, table))


def test_the_core_names_no_engine_and_no_add_on() -> None:
    naming = {
        (module, room)
        for module, one in modules().items()
        for room in ("engines", "addons", "launch", "cli")
        if module.startswith(CORE) and names_room(one.tree, module, f"accel_callbacks.{room}")
    }
    assert naming == CORE_NAMES, "ask the Strategy, an observer, or what its owner registers"


def test_files_are_named_after_things() -> None:
    assert gerunds(modules()) == set()


def test_no_module_hides_a_public_name_of_its_package() -> None:
    # To import such a module would put it in the place of the function or class.
    hidden = {}
    for module, one in modules().items():
        if one.is_package:
            names = set(getattr(importlib.import_module(module), "__all__", []))
            if found := {name for name in names if f"{module}.{name}" in modules()}:
                hidden[module] = found
    assert hidden == {}


def test_packages_are_marked_as_typed() -> None:
    assert [one for one in PACKAGES if not (ROOT / one / "py.typed").is_file()] == []


def test_every_folder_is_a_package() -> None:
    # The wheel leaves out a folder without __init__.py; an editable install hides that.
    folders = {one.path.parent for one in modules().values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_every_public_name_shows_an_example() -> None:
    doors = (importlib.import_module(name) for name, one in modules().items() if one.is_package)
    assert {door.__name__: names for door in doors if (names := undocumented(door))} == {}


# --- the walkers can fail ------------------------------------------------------------------


def tree_of(text: str) -> ast.Module:
    return ast.parse(textwrap.dedent(text))


def lines_found(walker: Callable[[ast.Module], Uses], lines: Iterable[str]) -> dict[str, bool]:
    """Whether a walker finds something in each of these."""
    return {line: bool(walker(tree_of(line))) for line in lines}


def test_walker_sees_imports_in_functions_and_relative_ones() -> None:
    tree = tree_of("from ..b import c\ndef f():\n    import loggers.base\n    from . import d")
    assert sorted(all_imports(tree, "p.a.m")) == [
        (1, "p.b.c"),
        (3, "loggers.base"),
        (4, "p.a.d"),
    ]
    assert all_imports(tree_of("from .x import y"), "p", True) == [(1, "p.x.y")]


def test_walker_sees_circles() -> None:
    circle = ["p.a", "p.b", "p.c", "p.a"]
    cases = {
        "from p import b": circle,
        "try:\n    from .b import x\nexcept ImportError:\n    pass": circle,
        "def f():\n    import p.b": [],
        "if TYPE_CHECKING:\n    import p.b": [],
        "if TYPE_CHECKING:\n    pass\nelse:\n    import p.b": circle,
    }
    found = {}
    for first in cases:
        texts = {"p.a": first, "p.b": "import p.c", "p.c": "class K:\n    from p.a import x"}
        graph = import_graph({name: (tree_of(text), False) for name, text in texts.items()})
        found[first] = find_circle(graph)
    assert found == cases


def test_walker_sees_circles_of_late_imports_and_of_imports_for_types() -> None:
    statements = [
        "from p import b",
        "def f():\n    import p.b",
        "if TYPE_CHECKING:\n    from p.b import x",
        "class K:\n    def f(self):\n        from . import b",
    ]
    found = {}
    for statement in statements:
        texts = {
            "p.a": statement,
            "p.b": "import p.c",
            "p.c": "from p.a import x",
            "p.d": "import p.a",  # leads to the circle and is not in it
            "p.e": "def f():\n    import p.f",
            "p.f": "if TYPE_CHECKING:\n    import p.e",
        }
        trees = {name: (tree_of(text), False) for name, text in texts.items()}
        found[statement] = all_circles(import_graph(trees, everywhere=True))
    assert found == {one: [{"p.a", "p.b", "p.c"}, {"p.e", "p.f"}] for one in statements}


def test_walker_sees_no_circle_where_imports_go_one_way() -> None:
    assert all_circles({"p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": set()}) == []


def test_walker_sees_what_names_a_room() -> None:
    cases = {
        "from accel_callbacks.compat import install": True,
        "def f():\n    import accel_callbacks.compat.names": True,
        "from .compat import hooks": True,
        "import_module('accel_callbacks.compat.names')": True,
        "HOMES = {'listify': 'compat.operations'}": True,
        "from accel_callbacks.checkpoint.compatibility import compare_frozen": False,
        "'compatible'": False,
    }
    room = "accel_callbacks.compat"
    assert {line: names_room(tree_of(line), "accel_callbacks", room) for line in cases} == cases


def test_walker_sees_gerunds() -> None:
    names = ["p.putting_back", "p.saving.options", "p.early_stopping", "p.from_lightning", "p.ring"]
    assert gerunds([*names, "p.stopping", "p.settings"]) == {"putting_back", "saving", "stopping"}


def test_walker_sees_plain_warnings() -> None:
    cases = {
        "import warnings; warnings.warn('text', stacklevel=2)": True,
        "import warnings as w; w.warn('text')": True,
        "from warnings import warn; warn('text')": True,
        "from checkpoint_io.warning import warn; warn('text')": False,
    }
    assert lines_found(plain_warnings, cases) == cases


def test_walker_sees_renames_and_syncs() -> None:
    assert system_calls(tree_of("import os as o\no.replace(a, b)")) == [(2, "os.replace")]
    assert system_calls(tree_of("from os import fsync; fsync(0)")) == [(1, "os.fsync")]
    assert system_calls(tree_of("text.replace(a, b); dataclasses.replace(c)")) == []


def test_walker_sees_splits_at_slashes() -> None:
    found = splits_at_slashes(tree_of("a.rsplit('/', 1)\nb.partition('/')"))
    assert found == [(1, "a.rsplit('/', 1)"), (2, "b.partition('/')")]
    assert splits_at_slashes(tree_of("a.split(); a.split('.'); a.replace('/', '')")) == []


def test_walker_sees_what_other_systems_lack() -> None:
    cases = {
        "import signal\nROOTS = {signal.SIGKILL, signal.SIGTERM}": [(2, "signal.SIGKILL")],
        "from signal import SIGBUS as bus\ndef f():\n    return bus": [(3, "signal.SIGBUS")],
        "def f():\n    import os as o\n    o.fork()": [(3, "os.fork")],
        "import fcntl": [(1, "fcntl")],
        "import os, sys\nif sys.platform != 'win32':\n    os.fork()": [],
        "import os, sys\nassert sys.platform == 'linux'\nos.fork()": [],
        "import os\ndef f():\n    if hasattr(os, 'fork'):\n        os.fork()": [],
        "try:\n    import fcntl\nexcept ImportError:\n    pass": [],
        "import os, sys\nif x:\n    os.fork()": [(3, "os.fork")],
    }
    assert {text: unguarded_names(tree_of(text)) for text in cases} == cases


def test_walker_sees_environ_writes_and_lets_reads_pass() -> None:
    writes = [
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
    ]
    reads = ["os.environ['A']", "dict(os.environ)", "os.environ.get('A')", "env['A'] = 'b'"]
    cases = {**dict.fromkeys(writes, True), **dict.fromkeys(reads, False)}
    assert lines_found(environ_writes, cases) == cases


def test_walker_sees_uses_of_the_default_device() -> None:
    cases = {
        "torch.tensor([1])": True,
        "torch.Generator().manual_seed(1)": True,
        "from torch import zeros; zeros(2)": True,
        "import torch as t; t.full((2,), 1)": True,
        "make = torch.ones": True,
        "torch.tensor([1], device=here)": False,
        "torch.Generator('cpu')": False,
        "isinstance(one, torch.Generator)": False,
        "torch.frombuffer(data, dtype=kind)": False,
        "tensor.new_zeros(2)": False,
        "def f(x: torch.Generator | None): pass": False,
    }
    assert lines_found(uses_of_the_default_device, cases) == cases


def test_walker_sees_unsafe_uses() -> None:
    unsafe = [
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
    ]
    safe = [
        "model.eval()",
        "json.load(f)",
        "dist.all_gather_object(out, x)",
        "np.load(p, allow_pickle=False)",
    ]
    cases = {**dict.fromkeys(unsafe, True), **dict.fromkeys(safe, False)}
    assert lines_found(unsafe_uses, cases) == cases


def test_walker_tells_restricted_loads_from_others() -> None:
    tree = tree_of(
        "torch.load(a, weights_only=True)\ntorch.load(a)\ntorch.load(a, weights_only=x)\n"
        "torch.load(a, weights_only=False)\nload = torch.load"
    )
    others = [(line, "torch.load") for line in range(2, 6)]
    assert sorted(unsafe_uses(tree)) == [(1, RESTRICTED), *others]


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
