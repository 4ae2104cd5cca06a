"""The documentation is true: its Python blocks run, its links lead somewhere, no name is missing.

The pages about trackers are checked in tests/loggers/test_docs.py, those of tutorials run in
tests/test_tutorials.py.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
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
from tests.support.pages import BLOCK, PAGES, ROOT, assert_prints, read, runnable
from tests.support.site_extension import site_extension
from tests.support.sources import modules

OURS = ("accel_callbacks", "checkpoint_io", "loggers")
# What pages about how the library works import beside public names.
INTERNAL = {"CHECKS", "HOOKS", "Lab", "SamplePlan", "resolve_settings", "run_checks"}
ELSEWHERE = {"docs/reference/trackers.md", "docs/how-to/write-a-tracker.md"}
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


@pytest.fixture
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the CPU, and a process that no other test has settled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CPU", "1")
    destroy_topology()
    yield
    destroy_topology()


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page not in ELSEWHERE and not page.startswith("docs/tutorials/") and runnable(page)
    ],
)
@pytest.mark.usefixtures("empty_place")
def test_blocks_run_and_print_what_the_page_shows(
    page: str, capfd: pytest.CaptureFixture[str]
) -> None:
    namespace = {"__name__": "page"}
    for line, block, shown in runnable(page):
        capfd.readouterr()
        # Empty lines in front, so that a traceback shows the line of the page.
        exec(compile("\n" * line + block, str(ROOT / page), "exec", dont_inherit=True), namespace)
        assert_prints(shown, capfd.readouterr().out)


def test_every_python_block_is_found() -> None:
    """A block that the pattern misses would not run, and nobody would know."""
    assert [
        page for page in PAGES if read(page).count("```python") != len(BLOCK.findall(read(page)))
    ] == []


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)


@cache
def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, made as the usual renderers make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(page: str, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = os.path.normpath(Path(page).parent / file) if file else page
    return (ROOT / target).exists() and (not anchor or anchor in anchors(target))


def test_links() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(without_code(page))]
    inner = [(page, link) for page, link in links if not re.match(r"[a-z]+:", link)]
    assert [f"{page}: {link}" for page, link in inner if not leads_somewhere(page, link)] == []


def test_pages_and_docstrings_have_american_spelling() -> None:
    texts = {page: re.sub(r"`[^`]*`|\]\([^)]*\)", "", without_code(page)) for page in PAGES}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in modules().values():
        nodes = (node for node in ast.walk(module.tree) if isinstance(node, documented))
        docstrings = "\n".join(ast.get_docstring(node, clean=False) or "" for node in nodes)
        texts[module.name] = re.sub(r"^ *(>>>|\.\.\.) .*$|`[^`]*`", "", docstrings, flags=re.M)
    words = {place: {*re.findall(r"\w+", text)} for place, text in texts.items()}
    british = {word for word in set().union(*words.values()) if BRITISH.fullmatch(word)}
    assert {place: found & british for place, found in words.items() if found & british} == {}


SCREEN = 45  # lines


def prose_lines(text: str) -> int:
    """How many lines a page has on a screen of 100 columns, without its code."""
    prose = re.sub(r"^```.*?^```$|\]\([^)]*\)", "", text, flags=re.M | re.S)
    blocks = re.split(r"\n(?=\s*(?:[|#]|[-*] |\d+\. ))|\n\s*\n", prose)
    return sum(-(-len(" ".join(block.split())) // 100) for block in blocks)


def fits(page: str) -> bool:
    text = read(page)
    before_code = re.split(r"^```", text, maxsplit=1, flags=re.M)[0]
    first = before_code == text or prose_lines(before_code) <= SCREEN
    return first and prose_lines(text) <= 3 * SCREEN


def test_a_how_to_fits_on_three_screens_and_shows_code_on_the_first() -> None:
    """What is longer has two tasks, or facts that belong in the reference."""
    how_tos = [page for page in PAGES if page.startswith("docs/how-to/") and "index" not in page]
    assert [page for page in how_tos if not fits(page)] == []


def test_every_page_is_in_its_index() -> None:
    """Once: the bulleted links of an index page are its table of contents on the site."""
    for section in ("tutorials", "how-to", "reference", "concepts"):
        index = read(f"docs/{section}/index.md")
        entries = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", index, re.M)
        pages = sorted(page.name for page in (ROOT / "docs" / section).glob("*.md"))
        assert sorted(["index.md", *entries]) == pages, section


def test_the_landing_page_leads_to_each_section() -> None:
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in [*docs.glob("*.md"), *docs.glob("*/index.md")]}
    assert pages - {*LINK.findall(read("docs/index.md"))} == {"index.md"}


def test_what_a_newcomer_tries_is_two_clicks_away() -> None:
    wanted = {
        *("tutorials/first-run.md", "how-to/resume.md"),  # train, resume
        *("concepts/guarantees.md", "how-to/launch-on-two-processes.md"),  # kill, two processes
        *("how-to/shard-a-model.md", "how-to/save-to-object-stores.md"),  # FSDP, S3
        *("how-to/write-a-callback.md", "how-to/write-a-tracker.md"),
        *("how-to/train-an-adapter.md", "how-to/run-a-trainer-on-it.md"),  # LoRA, Trainer
    }
    near = {Path("docs/index.md")}
    for _ in range(2):
        pages = [at for at in near if at.suffix == ".md"]
        links = {(at, link) for at in pages for link in LINK.findall(read(str(at)))}
        files = {(at.parent, link.partition("#")[0]) for at, link in links if ":" not in link}
        near |= {Path(os.path.normpath(folder / file)) for folder, file in files if file}
    assert {page for page in wanted if Path("docs", page) not in near} == set()


def test_public_names_are_in_the_reference() -> None:
    names = {
        *accel_callbacks.__all__,
        *accel_callbacks.callbacks.__all__,
        *accel_callbacks.offload.__all__,
        *accel_callbacks.utils.__all__,
    }
    assert names - {name for page in REFERENCE for name in named_on(page)} == set()
    assert {*checkpoint_io.__all__} - named_on("docs/reference/checkpoint-io.md") == set()


def named_on(page: str) -> set[str]:
    """The words with which code on a page begins."""
    return {*re.findall(r"`(\w+)", read(page))}


API = site_extension("api_pages")


def test_every_object_of_the_api_has_an_example() -> None:
    for package, objects in API.public_objects().items():
        documented = {
            name: inspect.getdoc(value) or ""
            for name, value in objects.items()
            if inspect.isclass(value) or inspect.isroutine(value)
        }
        assert documented, package
        lacking = [name for name, text in documented.items() if "Example:\n" not in text]
        assert lacking == [], package


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


def test_members_are_in_the_reference() -> None:
    pages = {
        "Accelerator": "accelerator",
        "TrainingRun": "accelerator",
        "GradientState": "accelerator",
        "DataLoaderShard": "data",
        "AcceleratorState": "processes",
    }
    for name, page in pages.items():
        owner = getattr(accel_callbacks, name)
        ours = [one for one in owner.__mro__ if one.__module__.startswith("accel_callbacks")]
        public = {member for one in ours for member in vars(one) if not member.startswith("_")}
        assert public - named_on(f"docs/reference/{page}.md") == set(), name


def arguments_of(name: str) -> set[str]:
    owner = getattr(accel_callbacks, name)
    if is_dataclass(owner):
        return {field.name for field in fields(owner)}
    return {
        parameter.name
        for parameter in inspect.signature(owner).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)  # only refused
    }


@cache
def signatures(page: str) -> list[tuple[str, list[str]]]:
    """What stands as `name(argument, other=default)` on a page, but for what leaves things out."""
    found = re.findall(r"`(\w+)\(([^`]*?)\)`", read(page), re.S)
    return [
        (name, [part for part in (part.strip() for part in listed.split(",")) if part])
        for name, listed in found
        if "..." not in listed
    ]


def test_the_reference_names_every_option() -> None:
    """In one signature, and those of which there are many in a table too."""
    for name in OPTIONS:
        listed = [parts for page in REFERENCE for one, parts in signatures(page) if one == name]
        names = [{part.partition("=")[0] for part in parts} - {"*"} for parts in listed]
        assert arguments_of(name) in names, name
        if name.endswith(("Kwargs", "Plugin", "Accelerator", "DataLoaderConfiguration")):
            assert arguments_of(name) - in_tables_of(name) == set(), name


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
