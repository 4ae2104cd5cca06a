"""The long description: README.md, as it can be read away from its repository.

Everything else about the package is in setup.cfg.
"""

import re
from pathlib import Path

from setuptools import setup

_RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:)[^)\s]+\)")
_WHERE = """\
> The pages and examples that this text names are in the source distribution, in `docs` and
> `examples`. There, `docs/index.md` is where to start.
"""


def long_description() -> str:
    """Return the README with the text of its relative links, and where the files are."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    title, _, rest = _RELATIVE_LINK.sub(r"\1", readme).partition("\n\n")
    return f"{title}\n\n{_WHERE}\n{rest}"


setup(long_description=long_description(), long_description_content_type="text/markdown")
