"""Write each page as Markdown beside its HTML, and ``llms.txt``, a list of them, for programs.

sphinx-llm does this by a second build of everything. Here the sources are Markdown already.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_pages import public_objects

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_TOCTREE = re.compile(r"^```\{toctree\}\n.*?^```\n", re.M | re.S)
_ENTRY = re.compile(r"^(- \[[^\]]+\]\()([\w-]+\.md\).*)$", re.M)


def pages_of(app: Sphinx) -> dict[str, str]:
    """Return the Markdown of each page by its path, as the site shows it, without its toctrees."""
    pages = {}
    for page in sorted(app.env.found_docs):
        source = Path(app.env.doc2path(page))
        if source.suffix == ".md":
            text = [source.read_text("utf-8")]
            app.events.emit("source-read", page, text)
            # The pages that are written for the site alone have no Markdown.
            pages[f"{page}.md"] = _TOCTREE.sub("", text[0]).replace(".rst)", ".html)")
    for package, objects in public_objects().items():
        for name, value in objects.items():
            pages[f"reference/api/{package}.{name}.md"] = _object_page(package, name, value)
    return pages


def _object_page(package: str, name: str, value: Any) -> str:
    """Return an object's signature and docstring, and those of its public methods."""
    parts = [f"# {package}.{name}", _described(name, value)]
    if inspect.isclass(value):
        methods = inspect.getmembers(value, inspect.isfunction)
        parts += [
            f"## {method}\n\n{_described(method, function)}"
            for method, function in methods
            if not method.startswith("_") and function.__doc__
        ]
    return "\n\n".join(parts) + "\n"


def _described(name: str, value: Any) -> str:
    try:
        signature = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        signature = name
    return f"```python\n{signature}\n```\n\n{inspect.getdoc(value) or ''}"


def list_of(app: Sphinx, pages: dict[str, str]) -> str:
    """Return ``llms.txt``: the lists of the index pages, one below the other."""
    parts = [f"# {app.config.project}", f"> {app.config.description}"]
    for section in app.config.sections:
        folder = section.partition("/")[0]
        entries = [
            f"{link}{folder}/{rest}" for link, rest in _ENTRY.findall(pages[f"{section}.md"])
        ]
        parts.append("\n".join([f"## {app.env.titles[section].astext()}", "", *entries]))
    names = [
        f"- [{package}.{name}](reference/api/{package}.{name}.md)"
        for package, objects in public_objects().items()
        for name in objects
    ]
    parts.append("\n".join(["## Optional", "", *names]))
    return "\n\n".join(parts) + "\n"


def write_markdown(app: Sphinx, error: Exception | None) -> None:
    """Write the pages and their list into the site."""
    if error is not None or app.builder.name != "html":
        return
    pages = pages_of(app)
    for path, text in {**pages, "llms.txt": list_of(app, pages)}.items():
        target = Path(app.outdir, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the files with Sphinx."""
    app.add_config_value("description", "", "env")
    app.add_config_value("sections", (), "env")
    app.connect("build-finished", write_markdown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
