"""Print figures about the layout of the three packages, of one checkout or of two.

    python scripts/layout_figures.py [--against PATH_OF_ANOTHER_CHECKOUT]

The rules of counting:

* A *file* is a ``*.py`` of accel_callbacks, checkpoint_io or loggers. A line of *code* is neither
  blank, nor only a comment, nor part of a docstring.
* An *import* is any import statement of a file, those inside functions and under ``TYPE_CHECKING``
  included. ``from a import b`` imports module ``a.b`` where there is one, else module ``a``.
* *Imported by one module*: the modules, each ``__init__`` left out on both sides, since it is the
  door of its package and not a reader. A module that nobody imports counts in the total.
* *Files in circles*: files in strongly connected components of the import graph. A package whose
  ``__getattr__`` imports its names when they are first used repeats them under ``TYPE_CHECKING``;
  these count as imports inside functions, which is what they are.
* The *core* is accel_callbacks without the rooms and files of `OUTSIDE_THE_CORE`, and without its
  own callbacks, each one of many. A file *names* an engine or an add-on where an identifier holds a
  word of `NAMES`; texts and docstrings may.
* A *walk*: distinct files and functions of the packages that one call enters, in all threads. Of
  what is called for each batch it is the second time, which also ends the batch before. One
  process, CPU, bf16, a window of two batches, one callback, one jsonl tracker, a 4x4
  model. Module and class bodies are not counted, lambdas and comprehensions not as functions.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("accel_callbacks", "checkpoint_io", "loggers")
OPENINGS = ("What", "Whether", "Say", "Which", "How")
#: What stands around the core of accel_callbacks: rooms, files of the root, and doors.
OUTSIDE_THE_CORE = {
    *("engines", "models", "addons", "compat", "launch", "cli", "plugins", "testing"),
    *("as_accelerate", "engine_options", "launch_memory", "local_sgd", "recurrence", "utils"),
    *("_lazy",),
}
#: Files of ``callbacks/`` itself that are no callback.
CALLBACK_INTERFACE = {"base", "__init__"}
#: The words of identifiers by which a file of the core would know an engine or an add-on.
NAMES = {
    "torchft": "torchft|votes_on_steps",
    "xla": "xla",
    "deepspeed": "deepspeed|zero_stage",
    "journal": "journal|replay|rollbacks",
    "survive": "survive|survivor|snapshot|memory_every",
    "context": "context_parallel|cut_sequences|cp_size|sp_size",
    "exit": "boundary_exit",
    "offload": "offload|residence",
    "megatron": "megatron",
    "fp8": "fp8|float8",
    "pipeline": "pipeline|pp_size",
    "steering": "CommandFile|on_command",
    "lightning": "lightning|transformers",
}
_BATCHES = 14  # of a walk, two a step
IMPORT_TIME, IN_FUNCTIONS, FOR_TYPES = "import time", "in functions", "for types"


# --- the source ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """One file of the packages."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read_modules(root: Path) -> dict[str, Module]:
    """Return the modules of a checkout by dotted name."""
    modules = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text, str(path)))
    return modules


def docstrings(module: Module) -> Iterator[ast.Constant]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def code_and_comment_lines(module: Module) -> tuple[int, int]:
    """Count the lines with code, and those that hold nothing but a comment."""
    documented: set[int] = set()
    for node in docstrings(module):
        documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    silent = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented), len(comments - code)


# --- imports -------------------------------------------------------------------------------


def _resolves_names_late(tree: ast.Module) -> bool:
    """Return whether the module has a ``__getattr__`` of its own (PEP 562)."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any("__getattr__" in ast.unparse(target) for target in targets):
            return True
    return False


def _import_statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.stmt, str]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, kind
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for inner in node.body:
            yield from _import_statements(inner, FOR_TYPES)
        for inner in node.orelse:
            yield from _import_statements(inner, kind)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and kind == IMPORT_TIME:
        kind = IN_FUNCTIONS
    for child in ast.iter_child_nodes(node):
        yield from _import_statements(child, kind)


def _imported_names(statement: ast.stmt, module: Module) -> Iterator[str]:
    """Yield what a statement imports, ``from a import b`` as ``a.b``, relative names resolved."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        parts = module.name.split(".")
        start = parts[: len(parts) - statement.level + module.is_package] if statement.level else []
        base = ".".join([*start, *([statement.module] if statement.module else [])])
        yield from (f"{base}.{alias.name}" for alias in statement.names)


def import_graph(modules: Mapping[str, Module], kinds: Iterable[str]) -> dict[str, set[str]]:
    """Return for each module the other ones that it imports in one of the given ways."""
    wanted = set(kinds)
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        late = _resolves_names_late(module.tree)
        imported: set[str] = set()
        for statement, kind in _import_statements(module.tree, IMPORT_TIME):
            if (IN_FUNCTIONS if late and kind == FOR_TYPES else kind) in wanted:
                imported.update(_imported_names(statement, module))
        known = (found if found in modules else found.rpartition(".")[0] for found in imported)
        graph[name] = {found for found in known if found in modules} - {name}
    return graph


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the modules that an import of `start` leads to."""
    seen: set[str] = set()
    pending = list(graph[start])
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending.extend(graph[name])
    return seen


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module."""
    reach = {name: reachable(graph, name) for name in graph}
    found = []
    grouped: set[str] = set()
    for name in graph:
        if name in reach[name] and name not in grouped:
            circle = {other for other in reach[name] if name in reach[other]}
            grouped |= circle
            found.append(circle)
    return found


# --- the core ------------------------------------------------------------------------------


def is_core(module: Module) -> bool:
    """Return whether a module belongs to the core of accel_callbacks."""
    package, *parts = module.name.split(".")
    if package != "accel_callbacks" or not parts or parts[0] in OUTSIDE_THE_CORE:
        return False
    is_file_of_callbacks = parts[0] == "callbacks" and len(parts) == 2 and not module.is_package
    return not is_file_of_callbacks or parts[1] in CALLBACK_INTERFACE


def named_in(module: Module) -> set[str]:
    """Return which keys of `NAMES` the identifiers of a module name."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    words = "\n".join({token.string for token in tokens if token.type == tokenize.NAME})
    return {name for name, pattern in NAMES.items() if re.search(pattern, words, re.IGNORECASE)}


# --- the table -----------------------------------------------------------------------------


def percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} % ({part} of {total})"


def source_figures(root: Path) -> dict[str, str]:
    """Return the figures that need only the source."""
    modules = read_modules(root)
    if not modules:
        raise SystemExit(f"{root} has no accel_callbacks, checkpoint_io or loggers.")
    figures = {"files": str(len(modules))}
    per_package = Counter(module.package for module in modules.values())
    figures["files by package"] = " + ".join(str(per_package[name]) for name in PACKAGES)
    sizes = [module.lines for module in modules.values()]
    figures["lines of a file, median"] = f"{statistics.median(sizes):.0f}"
    figures["lines of the longest file"] = str(max(sizes))
    code: Counter[str] = Counter()
    comments = 0
    for module in modules.values():
        coded, commented = code_and_comment_lines(module)
        code[module.package] += coded
        comments += commented
    figures["lines of code"] = str(code.total())
    figures["code by package"] = " + ".join(str(code[name]) for name in PACKAGES)
    figures |= _core_figures(modules)
    figures["comment lines"] = percent(comments, sum(sizes))
    texts = [str(node.value) for module in modules.values() for node in docstrings(module)]
    opened = Counter(text.split(maxsplit=1)[0] for text in texts if text.strip())
    figures["docstrings"] = str(len(texts))
    for opening in OPENINGS:
        figures[f'docstrings with "{opening} ..."'] = str(opened[opening])
    return figures | _import_figures(modules) | _name_figures(root, modules)


def _core_figures(modules: Mapping[str, Module]) -> dict[str, str]:
    core = [module for module in modules.values() if is_core(module)]
    named = [named_in(module) for module in core]
    counts = Counter(name for names in named for name in names)
    return {
        "code of the core": str(sum(code_and_comment_lines(module)[0] for module in core)),
        "files of the core": str(len(core)),
        "files of it that name others": str(sum(map(bool, named))),
        "whom they name": ", ".join(f"{name} {counts[name]}" for name in NAMES if counts[name]),
    }


def _import_figures(modules: Mapping[str, Module]) -> dict[str, str]:
    figures = {}
    graph = import_graph(modules, (IMPORT_TIME, IN_FUNCTIONS, FOR_TYPES))
    plain = {name for name, module in modules.items() if not module.is_package}
    importers = Counter(other for name in plain for other in graph[name] & plain)
    figures["imported by one module"] = percent(
        sum(importers[name] == 1 for name in plain), len(plain)
    )
    ways = (
        ("at import time", (IMPORT_TIME,)),
        ("with those in functions", (IMPORT_TIME, IN_FUNCTIONS)),
        ("with those for types", (IMPORT_TIME, IN_FUNCTIONS, FOR_TYPES)),
    )
    for words, kinds in ways:
        found = sorted(len(circle) for circle in circles(import_graph(modules, kinds)))
        figures[f"files in circles, {words}"] = " + ".join(map(str, reversed(found))) or "0"
    return figures


def _name_figures(root: Path, modules: Mapping[str, Module]) -> dict[str, str]:
    names = Counter(m.path.name for m in modules.values() if not m.is_package)
    repeated = [(name, count) for name, count in names.most_common() if count > 1]
    figures = {"file names used twice or more": str(len(repeated))}
    figures["the most repeated"] = ", ".join(f"{name} {count}" for name, count in repeated[:5])
    for package in PACKAGES:
        files = list((root / package).glob("*.py"))
        figures[f"files at the root of {package}"] = str(len(files))
    return figures


def walk_figures(root: Path) -> dict[str, str]:
    """Return the figures of the walks, traced in a process that imports this checkout's code."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in environment.items() if key[:6] != "ACCEL_"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--trace-into", folder],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"Tracing the walks of {root} failed, see above.")
        walks = json.loads((Path(folder) / "walks.json").read_text(encoding="utf-8"))
    return {
        f"walk: {name}": f"{walk['files']} / {walk['functions']}" for name, walk in walks.items()
    }


def print_table(columns: list[dict[str, str]], titles: list[str]) -> None:
    rows = [["", *titles]]
    rows += [[name, *(column.get(name, "-") for column in columns)] for name in columns[0]]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


# --- the walks -----------------------------------------------------------------------------


class Tracer:
    """Record the functions of the packages that are entered, in every thread."""

    def __init__(self, root: Path) -> None:
        self.roots = tuple(f"{root / package}{os.sep}" for package in PACKAGES)
        self.entered: set[CodeType] | None = None
        self.only_thread: int | None = None
        self.walks: dict[str, dict[str, int]] = {}

    def start(self) -> None:
        # Before any thread of the packages exists: a running thread is not traced.
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if self.entered is None or event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        wanted = self.only_thread in (None, threading.get_ident())
        if wanted and code.co_filename.startswith(self.roots):
            self.entered.add(code)

    @contextmanager
    def walk(self, name: str, *, only_here: bool = False) -> Iterator[None]:
        """Record what the block enters, of a name used again the last time."""
        entered = self.entered = set()
        self.only_thread = threading.get_ident() if only_here else None
        yield
        self.entered = None
        files = {code.co_filename for code in entered}
        named = [code for code in entered if not code.co_name.startswith("<")]
        self.walks[name] = {"files": len(files), "functions": len(named)}


def trace_walks(folder: Path) -> None:
    """Train for some batches and write what each call has entered to ``walks.json``."""
    import torch

    import accel_callbacks

    class Counter(accel_callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    tracer = Tracer(Path(accel_callbacks.__file__).resolve().parent.parent)
    tracer.start()
    accel = accel_callbacks.Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        log_with="jsonl",
        project_dir=str(folder / "run"),
        callbacks=[Counter()],
    )
    model: Any = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    data: Any = torch.randn(64, 4)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    with tracer.walk("prepare"):
        model, optimizer, loader, scheduler = accel.prepare(model, optimizer, loader, scheduler)
    context = accel.run("walks")
    with tracer.walk("entering accel.run"):
        run = context.__enter__()
    next(iter(run.epochs(1)))
    batches = iter(loader)
    # The checks of the first steps end with the third step: what is kept is a batch after them.
    for _ in range(_BATCHES):
        with tracer.walk("a batch"):
            batch = next(batches)
        window = accel.accumulate(model)
        with tracer.walk("accumulate().__enter__"):
            window.__enter__()
        loss = model(batch).float().square().mean()
        with tracer.walk("backward"):
            accel.backward(loss)
        with tracer.walk("optimizer.step"):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        window.__exit__(None, None, None)
    with tracer.walk("log, to the bytes in the file"):
        accel.log({"loss/first": 1.0})
        _wait_for("loss/first", folder)
    with tracer.walk("log, on the training thread", only_here=True):
        accel.log({"loss/second": 1.0})
        _wait_for("loss/second", folder)
    with tracer.walk("save_state"):
        path = accel.save_state(str(folder / "state"))
    with tracer.walk("load_state"):
        accel.load_state(path)
    tracer.stop()
    context.__exit__(None, None, None)
    accel.end_training()
    (folder / "walks.json").write_text(json.dumps(tracer.walks), encoding="utf-8")


def _wait_for(text: str, folder: Path) -> None:
    """Wait until a jsonl file holds a text."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(text in path.read_text(encoding="utf-8") for path in folder.rglob("*.jsonl")):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{text} did not arrive in a jsonl file in a minute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout, for a second column")
    parser.add_argument("--trace-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace_into is not None:
        trace_walks(options.trace_into)
        return
    roots = [Path(__file__).resolve().parent.parent]
    titles = ["this checkout"]
    if options.against is not None:
        roots.append(options.against.resolve())
        titles.append(options.against.name or str(options.against))
    print_table([source_figures(root) | walk_figures(root) for root in roots], titles)
    print("A walk is files / functions.")


if __name__ == "__main__":
    main()
