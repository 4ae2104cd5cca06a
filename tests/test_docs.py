"""The documentation is true: its Python blocks run, its links lead somewhere, no name is missing.

The pages about trackers are checked in tests/loggers/test_docs.py.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import accel_callbacks
import accel_callbacks.callbacks
import accel_callbacks.offload
import accel_callbacks.utils
import checkpoint_io
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.distributed.topology import destroy_topology
from tests.support.site_extension import site_extension

ROOT = Path(__file__).resolve().parent.parent
OURS = ("accel_callbacks", "checkpoint_io", "loggers")
# What pages about how the library works import beside public names.
INTERNAL = {"CHECKS", "HOOKS", "Lab", "SamplePlan", "resolve_settings", "run_checks"}
ELSEWHERE = {"docs/reference/trackers.md", "docs/how-to/write-a-tracker.md"}
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.M | re.S)
# What the block before prints, with "..." for what differs from run to run.
OUTPUT = re.compile(r"\n\n```text\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BRITISH = re.compile(
    r"\b\w*(?:behaviour|colour|favour|flavour|neighbour|honour|catalogue|labell[ei]|travell[ei])\w*"
    r"|\b(?:centres?|greys?|learnt|spelt|towards|whilst|amongst|signall(?:ed|ing))\b"
    r"|\b\w*(?:initial|normal|optim|organ|recogn|serial|synchron|util|minim|maxim|summar|parallel"
    r"|token|custom|general|special|quant|material|final|visual|regular|random)is(?:e[ds]?|ing|ations?)\b"
    r"|\banalyse[ds]?\b",
    re.IGNORECASE,
)
REFERENCE = [
    f"docs/reference/{name}.md"
    for name in (
        *("accelerator", "callbacks", "data", "hooks", "offload-hooks", "plugins", "processes"),
        "utilities",
    )
]
OPTIONS = sorted(
    name
    for name in accel_callbacks.__all__
    if is_dataclass(getattr(accel_callbacks, name)) or name == "Accelerator"
)


# These run as notebooks, below.
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]


def read(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def runnable(page: str) -> list[tuple[int, str, str | None]]:
    """Each block that is to run, with the line on which it begins, and the output shown."""
    text = read(page)
    blocks = [match for match in BLOCK.finditer(text) if not match[1]]
    outputs = [OUTPUT.match(text, match.end()) for match in blocks]
    return [
        (text.count("\n", 0, match.start(2)), match[2], output and output[1])
        for match, output in zip(blocks, outputs, strict=True)
    ]


@pytest.fixture
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the CPU, and a process that no other test has settled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CPU", "1")
    destroy_topology()
    yield
    destroy_topology()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in {*ELSEWHERE, *TUTORIALS} and runnable(page)]
)
@pytest.mark.usefixtures("empty_place")
def test_blocks_run_and_print_what_the_page_shows(
    page: str, capfd: pytest.CaptureFixture[str]
) -> None:
    namespace = {"__name__": "page"}
    for line, block, shown in runnable(page):
        capfd.readouterr()
        # Empty lines in front, so that a traceback shows the line of the page.
        exec(compile("\n" * line + block, str(ROOT / page), "exec"), namespace)
        assert_prints(shown, capfd.readouterr().out)


def assert_prints(shown: str | None, printed: str) -> None:
    is_alike = OutputChecker().check_output
    assert shown is None or is_alike(shown, printed, ELLIPSIS | NORMALIZE_WHITESPACE), printed


_WARM_PROCESSES = """
import subprocess

from tests.support import warm

subprocess.Popen._execute_child = warm.Popen._execute_child
"""


@pytest.mark.distributed
@pytest.mark.parametrize("page", [page for page in TUTORIALS if runnable(page)])
def test_tutorials_run_as_notebooks_and_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel", reason="pip install ipykernel nbclient jupytext")
    nbclient = pytest.importorskip("nbclient", reason="pip install ipykernel nbclient jupytext")
    pytest.importorskip("jupytext", reason="pip install ipykernel nbclient jupytext")
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    from nbformat.v4 import new_code_cell
    from notebooks import as_notebook

    monkeypatch.setenv("ACCEL_CPU", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = as_notebook(ROOT / page)
    # Processes that a cell starts are forked from one that has imported torch.
    notebook.cells.insert(0, new_code_cell(_WARM_PROCESSES))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, resources=resources).execute()
    cells = [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]
    for cell, (_, block, shown) in zip(cells, runnable(page), strict=True):
        assert cell.source == block.rstrip()
        streams = [output for output in cell.outputs if output.output_type == "stream"]
        assert_prints(shown, "".join(s.text for s in streams if s.name == "stdout"))


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_found(page: str) -> None:
    """A block that the pattern misses would not run, and nobody would know."""
    assert read(page).count("```python") == len(BLOCK.findall(read(page)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as the usual renderers make them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_american_spelling(page: str) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", read(page), flags=re.M | re.S)
    assert BRITISH.findall(prose) == []


@pytest.mark.parametrize("package", OURS)
def test_docstrings_have_american_spelling(package: str) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    british = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented):
                docstring = ast.get_docstring(node, clean=False) or ""
                prose = re.sub(r"^ *(>>>|\.\.\.) .*$|`[^`]*`", "", docstring, flags=re.M)
                british += [f"{path.name}: {word}" for word in BRITISH.findall(prose)]
    assert british == []


SCREEN = 45  # lines
HOW_TOS = [page for page in PAGES if page.startswith("docs/how-to/") and "index" not in page]


def prose_lines(text: str) -> int:
    """How many lines a page has on a screen of 100 columns, without its code."""
    prose = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", text, flags=re.M | re.S)
    blocks = re.split(r"\n(?=\s*(?:[|#]|[-*] |\d+\. ))|\n\s*\n", prose)
    return sum(-(-len(" ".join(block.split())) // 100) for block in blocks)


@pytest.mark.parametrize("page", HOW_TOS)
def test_a_how_to_fits_on_three_screens_and_shows_code_on_the_first(page: str) -> None:
    """What is longer has two tasks, or facts that belong in the reference."""
    text = read(page)
    assert prose_lines(text) <= 3 * SCREEN
    before_code = re.split(r"^```", text, maxsplit=1, flags=re.M)[0]
    assert before_code == text or prose_lines(before_code) <= SCREEN


@pytest.mark.parametrize("section", ["tutorials", "how-to", "reference", "concepts"])
def test_every_page_is_in_its_index(section: str) -> None:
    """Once: the bulleted links of an index page are its table of contents on the site."""
    folder = ROOT / "docs" / section
    index = read(f"docs/{section}/index.md")
    entries = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", index, re.M)
    assert sorted(["index.md", *entries]) == sorted(page.name for page in folder.glob("*.md"))


def test_the_landing_page_leads_to_each_section() -> None:
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in [*docs.glob("*.md"), *docs.glob("*/index.md")]}
    assert pages - {*LINK.findall(read("docs/index.md"))} == {"index.md"}


@pytest.mark.parametrize(
    "page",
    [
        *("tutorials/first-run.md", "how-to/resume.md"),  # train, resume
        *("concepts/guarantees.md", "how-to/launch-on-two-processes.md"),  # kill, two processes
        *("how-to/shard-a-model.md", "how-to/save-to-object-stores.md"),  # FSDP, S3
        *("how-to/write-a-callback.md", "how-to/write-a-tracker.md"),
        *("how-to/train-an-adapter.md", "how-to/run-a-trainer-on-it.md"),  # LoRA, Trainer
    ],
)
def test_what_a_newcomer_tries_is_two_clicks_away(page: str) -> None:
    near = {Path("docs/index.md")}
    for _ in range(2):
        links = {(at, link) for at in near if at.suffix == ".md" for link in LINK.findall(read(at))}
        files = {(at.parent, link.partition("#")[0]) for at, link in links if ":" not in link}
        near |= {Path(os.path.normpath(folder / file)) for folder, file in files if file}
    assert Path("docs", page) in near


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *accel_callbacks.__all__,
            *accel_callbacks.callbacks.__all__,
            *accel_callbacks.offload.__all__,
            *accel_callbacks.utils.__all__,
        }
    ),
)
def test_public_names_are_in_the_reference(name: str) -> None:
    assert any(re.search(rf"`{name}\b", read(page)) for page in REFERENCE)


API = site_extension("api_pages")


@pytest.mark.parametrize("package", API.PACKAGES)
def test_every_object_of_the_api_has_an_example(package: str) -> None:
    objects = API.public_objects()[package]
    documented = [
        name
        for name, value in objects.items()
        if inspect.isclass(value) or inspect.isroutine(value)
    ]
    assert documented
    assert [
        name for name in documented if "Example:\n" not in (inspect.getdoc(objects[name]) or "")
    ] == []


def test_the_gallery_has_its_pictures() -> None:
    gallery = site_extension("example_pages")
    stems = {path.stem for paths in gallery.sources().values() for path in paths}
    assert set(gallery.PICTURES) <= stems
    pictures = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert set(gallery.PICTURES.values()) <= pictures


def test_what_the_pages_import_has_a_page_in_the_api() -> None:
    pages = {id(value) for named in API.public_objects().values() for value in named.values()}
    imported: dict[str, Any] = {}
    for page in PAGES:
        for _, block, _ in runnable(page):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS:
                    exec(ast.unparse(node), imported)
    lacking = {
        name
        for name, value in imported.items()
        if id(value) not in pages and not name.startswith("__") and not inspect.ismodule(value)
    }
    assert lacking == INTERNAL, "a new package belongs in PACKAGES of docs/_ext/api_pages.py"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("accelerator", "Accelerator"),
        ("accelerator", "TrainingRun"),
        ("accelerator", "GradientState"),
        ("data", "DataLoaderShard"),
        ("processes", "AcceleratorState"),
    ],
)
def test_members_are_in_the_reference(page: str, name: str) -> None:
    text, owner = read(f"docs/reference/{page}.md"), getattr(accel_callbacks, name)
    ours = [one for one in owner.__mro__ if one.__module__.startswith("accel_callbacks")]
    public = {member for one in ours for member in vars(one) if not member.startswith("_")}
    missing = [member for member in sorted(public) if not re.search(rf"`{member}\b", text)]
    assert missing == []


def arguments_of(name: str) -> set[str]:
    owner = getattr(accel_callbacks, name)
    if is_dataclass(owner):
        return {field.name for field in fields(owner)}
    return {
        parameter.name
        for parameter in inspect.signature(owner).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)  # only refused
    }


def signatures(page: str) -> list[tuple[str, list[str]]]:
    """What stands as `name(argument, other=default)` on a page, but for what leaves things out."""
    found = re.findall(r"`(\w+)\(([^`]*?)\)`", read(page), re.S)
    return [
        (name, [part for part in (part.strip() for part in listed.split(",")) if part])
        for name, listed in found
        if "..." not in listed
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_names_every_option(name: str) -> None:
    """In one signature, and those of which there are many in a table too."""
    listed = [parts for page in REFERENCE for one, parts in signatures(page) if one == name]
    names = [{part.partition("=")[0] for part in parts} - {"*"} for parts in listed]
    assert arguments_of(name) in names
    if name.endswith(("Kwargs", "Plugin", "Accelerator", "DataLoaderConfiguration")):
        assert arguments_of(name) - in_tables_of(name) == set()


def in_tables_of(name: str) -> set[str]:
    """The names in the first column of the tables in the section that is headed by this name."""
    for page in REFERENCE:
        section = re.search(rf"^## `{name}`$(.*?)(?=^##|\Z)", read(page), re.M | re.S)
        if section is not None:
            firsts = re.findall(r"^\|([^|]*)\|", section[1], re.M)
            return {option for first in firsts for option in re.findall(r"`(\w+)", first)}
    raise AssertionError(f"no section is headed by {name}")


@pytest.mark.parametrize(
    ("page", "first", "at_least"),
    [
        ("accelerator", accel_callbacks.Accelerator, 40),
        ("callbacks", accel_callbacks.Callback, 5),
        ("data", accel_callbacks, 10),
        ("plugins", accel_callbacks, 9),
        ("processes", accel_callbacks, 20),
        ("utilities", accel_callbacks.utils, 20),
        ("offload-hooks", accel_callbacks.utils, 25),
    ],
)
def test_the_signatures_in_the_reference_are_those_of_the_code(
    page: str, first: Any, at_least: int
) -> None:
    """`name(argument, other=default)` names arguments that exist, with their defaults."""
    owners = (
        first,
        accel_callbacks,
        accel_callbacks.callbacks,
        accel_callbacks.TrainingRun,
        accel_callbacks.PartialState,
        accel_callbacks.DataLoaderShard,
        accel_callbacks.MultiProcessAdapter,
    )
    checked = set()
    for name, parts in signatures(f"docs/reference/{page}.md"):
        owner = next((one for one in owners if callable(getattr(one, name, None))), None)
        if owner is None:
            continue
        function = getattr(owner, name)
        parameters = inspect.signature(function).parameters
        for part in parts:
            argument, _, default = part.partition("=")
            if argument == "*":
                continue
            assert argument.lstrip("*") in parameters, f"{name}({argument})"
            if default:
                assert default_of(function, argument) == default, f"{name}({part})"
        checked.add(name)
    assert len(checked) >= at_least


def default_of(function: Any, argument: str) -> str:
    """A default as the pages write it."""
    default = inspect.signature(function).parameters[argument].default
    if is_dataclass(function):
        made = next(one for one in fields(function) if one.name == argument).default_factory
        default = default if made is MISSING else made()
    value = default.value if isinstance(default, Enum) else default
    return repr(value).replace("'", '"')


def test_the_table_of_hooks_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", read("docs/reference/hooks.md"), re.M)
    assert sorted(rows) == sorted(HOOKS)


@pytest.mark.parametrize("name", checkpoint_io.__all__)
def test_checkpoint_io_is_in_its_reference(name: str) -> None:
    assert re.search(rf"`{name}\b", read("docs/reference/checkpoint-io.md"))


def test_the_methods_of_a_folder_are_in_its_reference() -> None:
    text = read("docs/reference/checkpoint-io.md")
    methods = [
        name
        for name, value in inspect.getmembers(checkpoint_io.CheckpointFolder, callable)
        if not name.startswith("_")
    ]
    missing = [m for m in methods if f"`CheckpointFolder.{m}(" not in text]
    assert missing == []


def test_the_signatures_of_checkpoint_io_are_those_of_the_code() -> None:
    """Of functions as `name(...)`, of methods as `Class.name(...)`."""
    text = read("docs/reference/checkpoint-io.md")
    found = re.findall(r"`([\w.]+)\(([^`]*?)\)`", text, re.S)
    checked = 0
    for name, listed in found:
        function = checkpoint_io
        for part in name.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function).parameters
        for part in filter(None, (part.strip() for part in listed.split(","))):
            argument, _, default = part.partition("=")
            assert argument.lstrip("*") in parameters, f"{name}({argument})"
            if default and default != "...":
                assert default_of(function, argument) == default, f"{name}({part})"
        checked += 1
    assert checked >= 30
