"""The long description: README.md with links that work away from its repository.

Everything else about the package is in setup.cfg.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

_ROOT = Path(__file__).parent
# The targets of relative links and pictures, of Markdown and of HTML.
_RELATIVE = re.compile(r'(\]\(|(?:href|src|srcset)=")(?![a-z]+:|#)([^)"\s]+)')


def source_url() -> str:
    """Return the address of the repository, from ``project_urls``."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg", encoding="utf-8")
    lines = config["metadata"]["project_urls"].split("\n")
    return dict(line.split(" = ") for line in lines if line)["Source"]


def long_description() -> str:
    """Return the README with absolute addresses of what its relative links name."""
    pages, files = (f"{source_url()}/{view}/main/" for view in ("blob", "raw"))

    def absolute(link: "re.Match[str]") -> str:
        opening, target = link.groups()
        is_picture = target.endswith((".svg", ".png"))
        return opening + (files if is_picture else pages) + target

    return _RELATIVE.sub(absolute, (_ROOT / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
