"""Write the pages of the API, one a public object, for autodoc to fill from its docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# An object that several packages have is documented in the first of them.
PACKAGES = {
    "accel_callbacks": "The Accelerator, its run, options, data and processes",
    "accel_callbacks.callbacks": "The base class of callbacks, and the built-in ones",
    "accel_callbacks.callbacks.adapters": "Callbacks of other trainers",
    "accel_callbacks.testing": "The test kit for callbacks",
    "accel_callbacks.tuning": "Search of a batch size and a learning rate",
    "accel_callbacks.offload": "Models larger than memory",
    "accel_callbacks.engines": "How ranks share a model",
    "accel_callbacks.checkpoint": "What an owner saves of its own",
    "accel_callbacks.precision": "In which types a model computes",
    "accel_callbacks.models.fp8": "Linear layers in float8",
    "accel_callbacks.tracking": "Trackers of an Accelerator",
    "accel_callbacks.journal": "What happened in each step of a run",
    "accel_callbacks.utils": "Names of `accelerate.utils`",
    "loggers": "Trackers, with an Accelerator or without",
    "checkpoint_io": "Checkpoints, in any loop",
}
_CODE = re.compile(r"(?<![`:\w])(`{1,2})([^`]+)\1(?!`)(?=(\w?))")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_OURS = ("accel_callbacks", "checkpoint_io", "loggers")


@cache
def public_objects() -> dict[str, dict[str, Any]]:
    """Return the public objects of each package by name, each object once."""
    objects: dict[str, dict[str, Any]] = {}
    documented: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = [name for name in sorted(module.__all__) if not name.startswith("_")]
        # Functions made for a name, as `is_wandb_available`, have no docstring of their own.
        values = {name: getattr(module, name) for name in names}
        named = {key: value for key, value in values.items() if not isinstance(value, partial)}
        objects[package] = {
            name: value for name, value in named.items() if id(value) not in documented
        }
        documented.update(map(id, named.values()))
    return objects


def members_of(owner: type, pages: set[type]) -> list[str]:
    """Return the members that a class's page documents: those of no other page."""
    classes = [
        base
        for base in owner.__mro__
        if base is owner or (base.__module__.split(".")[0] in _OURS and base not in pages)
    ]
    names = {name: None for base in classes for name in vars(base) if not name.startswith("_")}
    return [name for name in names if _is_documented(inspect.getattr_static(owner, name))]


def _is_documented(member: Any) -> bool:
    """Tell whether a member is no option: those are in the arguments of the class."""
    if isinstance(member, (staticmethod, classmethod)) or inspect.isroutine(member):
        return bool(inspect.getdoc(member))
    return isinstance(member, Enum) or (
        hasattr(type(member), "__get__") and bool(inspect.getdoc(member))
    )


def object_page(package: str, name: str, value: Any, pages: set[type]) -> str:
    """Return the source of one object's page."""
    lines = [name, "=" * len(name), "", f".. currentmodule:: {package}", ""]
    if inspect.isclass(value):
        lines += [f".. autoclass:: {name}", "   :show-inheritance:"]
        members = members_of(value, pages)
        if members:
            lines.append(f"   :members: {', '.join(members)}")
    elif inspect.isroutine(value):
        lines += [f".. autofunction:: {name}"]
    elif inspect.ismodule(value):
        lines += [f".. automodule:: {package}.{name}", "   :members:"]
    else:
        lines += [f".. autodata:: {name}", "   :no-value:"]
    return "\n".join([*lines, ""])


def package_page(package: str, objects: dict[str, Any]) -> str:
    """Return the source of a package's page: a list of its objects, with their first sentences."""
    lines = [package, "=" * len(package), "", mark_code(f"{PACKAGES[package]}."), ""]
    lines += [f".. currentmodule:: {package}", ""]
    lines += [f"- :doc:`{name} <{package}.{name}>`{_summary(objects[name])}" for name in objects]
    lines += ["", ".. toctree::", "   :hidden:", ""]
    lines += [f"   {name} <{package}.{name}>" for name in objects]
    return "\n".join([*lines, ""])


def _summary(value: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return ""
    paragraph = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return ": " + mark_code(paragraph.replace("\n", " "))


def mark_code(line: str) -> str:
    """Turn code in single backticks, as Markdown has it, into references, or code where none is."""

    def marked(code: re.Match[str]) -> str:
        end = "\\ " if code[3] else ""
        if code[1] == "`" and _NAME.fullmatch(code[2]):
            return f":py:obj:`{code[2]}`{end}"
        return f"``{code[2]}``{end}"

    return _CODE.sub(marked, line)


def write_pages(app: Sphinx) -> None:
    """Write a page for each package and each of its objects."""
    folder = Path(app.srcdir, "reference", "api")
    objects = public_objects()
    pages = {
        value for named in objects.values() for value in named.values() if inspect.isclass(value)
    }
    sources = {f"{package}.rst": package_page(package, objects[package]) for package in PACKAGES}
    for package, named in objects.items():
        for name, value in named.items():
            sources[f"{package}.{name}.rst"] = object_page(package, name, value, pages)
    write_changed(folder, sources)


def write_changed(folder: Path, sources: dict[str, str]) -> None:
    """Write the files that have changed into a folder, and remove those that are no longer."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in sources:
            path.unlink()
    for name, source in sources.items():
        path = folder / name
        if not path.is_file() or path.read_text("utf-8") != source:
            path.write_text(source, encoding="utf-8")


def add_packages(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the packages to the page of the API, as they exist on the site only."""
    if page == "reference/api":
        rows = [f"- [`{package}`](api/{package}.rst): {text}" for package, text in PACKAGES.items()]
        entries = [f"api/{package}" for package in PACKAGES]
        source[0] += "\n".join(["", *rows, "", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def mark_docstring(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Mark the code of a docstring's prose."""
    prompts = (">>>", "...")
    lines[:] = [line if line.lstrip().startswith(prompts) else mark_code(line) for line in lines]


def resolve_home(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Resolve a reference to the module that defines an object, such as that of an annotation."""
    if node.get("refdomain") != "py":
        return None
    home = _homes().get(node["reftarget"])
    if home is None:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(
        env, node.get("refdoc", ""), app.builder, node["reftype"], home, node, text
    )


def name_siblings(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Give the template of a page's side column the names of the page's package."""
    if page.startswith("reference/api/"):
        name = page.rpartition("/")[2]
        package = name if name in PACKAGES else name.rpartition(".")[0]
        context.update(api_package=package, api_names=[*public_objects()[package]])


@cache
def _homes() -> dict[str, str]:
    """Return the public name of each object by its place, and by its name alone."""
    homes: dict[str, str] = {}
    for package, named in public_objects().items():
        for name, value in named.items():
            module = getattr(value, "__module__", None) or package
            homes.setdefault(f"{module}.{name}", f"{package}.{name}")
            homes.setdefault(name, f"{package}.{name}")
    return homes


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the pages with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_packages)
    app.connect("autodoc-process-docstring", mark_docstring, priority=100)  # before napoleon
    app.connect("html-page-context", name_siblings)
    app.connect("missing-reference", resolve_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
