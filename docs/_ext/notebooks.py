"""Tutorials as notebooks: each Python block is a cell, what is around it is text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import jupytext
from nbformat import NotebookNode

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# A block that is not to run is shown, as everything else that is no cell.
_NOT_RUN = re.compile(r"^<!-- not run: [^\n]+ -->\n```python$", re.M)
_TITLE = re.compile(r"\A# .+\n")


def as_notebook(page: Path) -> NotebookNode:
    """Return a tutorial as a notebook without outputs."""
    notebook = jupytext.reads(_NOT_RUN.sub("```py", page.read_text(encoding="utf-8")), fmt="md")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(kernel))
    return notebook


def _tutorials(app: Sphinx) -> list[Path]:
    pages = sorted(Path(app.srcdir, "tutorials").glob("*.md"))
    return [page for page in pages if "\n```python\n" in page.read_text(encoding="utf-8")]


def _add_link(app: Sphinx, name: str, source: list[str]) -> None:
    folder, _, stem = name.partition("/")
    if folder == "tutorials" and Path(app.srcdir, f"{name}.md") in _tutorials(app):
        # In HTML, because the notebook is made after the pages.
        link = f'<p><a href="../notebooks/{stem}.ipynb" download>Download it as a notebook</a></p>'
        source[0] = _TITLE.sub(lambda title: f"{title[0]}\n{link}\n", source[0])


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, "notebooks")
        folder.mkdir(exist_ok=True)
        for page in _tutorials(app):
            jupytext.write(as_notebook(page), folder / f"{page.stem}.ipynb")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the link of each tutorial and the files that it leads to."""
    app.connect("source-read", _add_link)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
