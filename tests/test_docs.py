"""The documentation is true: its Python blocks run, its links lead somewhere, no name is missing.

The pages about trackers are checked in tests/loggers/test_docs.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import accel_callbacks
import accel_callbacks.callbacks
from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.state import destroy_topology

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"docs/reference/trackers.md", "docs/how-to/write-a-tracker.md"}
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
REFERENCE = [f"docs/reference/{name}.md" for name in ("accelerator", "callbacks", "hooks")]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def runnable(page: str) -> list[tuple[int, str]]:
    """Each block that is to run, with the line on which it begins."""
    text = read(page)
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in BLOCK.finditer(text) if not m[1]]


@pytest.fixture
def empty_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the CPU, and a process that no other test has settled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CPU", "1")
    destroy_topology()
    yield
    destroy_topology()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ELSEWHERE and runnable(page)]
)
@pytest.mark.usefixtures("empty_place")
def test_blocks_run(page: str) -> None:
    namespace = {"__name__": "page"}
    for line, block in runnable(page):
        # Empty lines in front, so that a traceback shows the line of the page.
        exec(compile("\n" * line + block, str(ROOT / page), "exec"), namespace)


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


def test_every_page_is_in_the_index() -> None:
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in index_links()}
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == {ROOT / "docs" / "index.md"}


def index_links() -> list[str]:
    return LINK.findall(read("docs/index.md"))


@pytest.mark.parametrize(
    "name", sorted({*accel_callbacks.__all__, *accel_callbacks.callbacks.__all__})
)
def test_public_names_are_in_the_reference(name: str) -> None:
    assert any(re.search(rf"`{name}\b", read(page)) for page in REFERENCE)


def test_members_of_the_accelerator_are_in_the_reference() -> None:
    text = read("docs/reference/accelerator.md")
    for owner in (accel_callbacks.Accelerator, accel_callbacks.TrainingRun):
        public = [name for name in dir(owner) if not name.startswith("_")]
        missing = [name for name in public if not re.search(rf"`{name}\b", text)]
        assert missing == [], owner.__name__


@pytest.mark.parametrize("page", ["accelerator", "callbacks"])
def test_the_signatures_in_the_reference_are_those_of_the_code(page: str) -> None:
    """`name(argument, other=default)` names arguments that exist, with their defaults."""
    first = {"accelerator": accel_callbacks.Accelerator, "callbacks": accel_callbacks.Callback}
    owners = (first[page], accel_callbacks.TrainingRun, accel_callbacks, accel_callbacks.callbacks)
    checked = 0
    for name, listed in re.findall(r"`(\w+)\(([^`]*?)\)`", read(f"docs/reference/{page}.md"), re.S):
        owner = next((one for one in owners if callable(getattr(one, name, None))), None)
        if owner is None or "..." in listed:
            continue
        parameters = inspect.signature(getattr(owner, name)).parameters
        for part in filter(None, (part.strip() for part in listed.split(","))):
            argument, _, default = part.partition("=")
            if argument == "*":
                continue
            assert argument.lstrip("*") in parameters, f"{name}({argument})"
            if default:
                assert repr(parameters[argument].default).replace("'", '"') == default, name
            checked += 1
    assert checked > 10


def test_the_table_of_hooks_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", read("docs/reference/hooks.md"), re.M)
    assert sorted(rows) == sorted(HOOKS)
