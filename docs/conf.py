"""Configuration of the documentation's site, which ``scripts/docs`` builds without a network."""

from __future__ import annotations

import configparser
import os
import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS / "_ext")]

metadata = configparser.ConfigParser()
metadata.read(ROOT / "setup.cfg", encoding="utf-8")
REPOSITORY = dict(re.findall(r"(\w+) = (\S+)", metadata["metadata"]["project_urls"]))["Source"]

project = metadata["metadata"]["name"]
description = metadata["metadata"]["description"]
sections = ("tutorials/index", "how-to/index", "reference/index", "concepts/index")
copyright = f"the authors of {project}"
version = release = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "accel_callbacks/__init__.py").read_text("utf-8"), re.M
)[0]
language = "en"

extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon"),
    *("myst_parser", "sphinx_copybutton", "sphinx_design"),
    *("sphinxext.opengraph", "notfound.extension"),
    *("api_pages", "cli_options", "example_pages", "markdown_pages", "notebooks"),
]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "**/_*"]

html_theme = "pydata_sphinx_theme"
html_title = project
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": project, "image_light": "_static/icon.svg", "image_dark": "_static/icon.svg"},
    "icon_links": [{"name": "Source", "url": REPOSITORY, "icon": "fa-brands fa-github"}],
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "collapse_navigation": True,
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
}
templates_path = ["_templates"]
html_sidebars = {
    **{page: [] for page in ("index", "examples/index", "why", "benchmarks")},
    "reference/api/*": ["api-nav.html"],
}
html_context = {"default_mode": "auto"}  # as the reader's system: light or dark
notfound_urls_prefix = "/"
notfound_context = {
    "title": "Page not found",
    "body": """<h1>Page not found</h1>
<p>No page has this address. <a href="/search.html">Search</a> for what you need, or begin on the
<a href="/index.html">landing page</a>.</p>""",
}
ogp_site_url = os.environ.get("SITE_URL", "")  # where the built site is put
ogp_social_cards = {"enable": False}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The Markdown is read on the repository's pages too, where a toctree would be a block of code:
# the bulleted links of an index page are its toctrees, one a heading.
_HEADING = re.compile(r"^## (.+)$", re.M)
_ENTRY = re.compile(r"^- \[[^\]]+\]\(([\w./-]+)\.md\)", re.M)
_LINK_OUT = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def toctree(caption: str, pages: list[str]) -> str:
    """Return a hidden toctree of these pages, as MyST writes one."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the toctrees of an index page."""
    if page == "index":
        stems = sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")
        others = [f"{stem.capitalize()} <{stem}>" for stem in stems]  # short, for the header
        source[0] += toctree("", [*sections, "examples/index", *others])
    elif page in sections:
        intro, *groups = _HEADING.split(source[0])
        source[0] += toctree("", _ENTRY.findall(intro))
        for caption, listing in zip(groups[::2], groups[1::2], strict=True):
            source[0] += toctree(caption, _ENTRY.findall(listing))


def point_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to files outside of the documentation into those of the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page))

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/"):
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}"

    source[0] = _LINK_OUT.sub(target, source[0])


def read_again(app: Sphinx, *changes: object) -> list[str]:
    """Return the pages that are made of more than their files, which a new build cannot see."""
    return ["index", "reference/api", "reference/cli"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what the pages need beside the extensions."""
    app.connect("env-get-outdated", read_again)
    app.connect("source-read", add_toctrees)
    app.connect("source-read", point_to_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
