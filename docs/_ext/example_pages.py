"""Write a gallery of the examples: a card each, and a page with its source.

Nothing is run here: tests run the examples, and pictures are those of ``docs/images``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from api_pages import mark_code, write_changed

if TYPE_CHECKING:
    from sphinx.application import Sphinx

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GROUPS = {
    ".": ("Whole programs", "Programs to start from, and two that draw what others logged."),
    "by_feature": ("One feature a file", "Each is short, and prints whether it worked."),
}
_NAMES = {
    **{"deepspeed": "DeepSpeed", "gpt2": "GPT-2", "mlflow": "MLflow", "sgd": "SGD"},
    **{"tensorboard": "TensorBoard", "tpu": "TPU", "wandb": "W&B", "zero": "ZeRO"},
}
PICTURES = {
    "digits": "progress.svg",
    "elastic": "order.svg",
    "gpt2": "losses.svg",
    "own_callback": "hooks.svg",
    "plot_offload": "offload.svg",
}


def sources() -> dict[str, list[Path]]:
    """Return the examples of each group by its folder."""
    return {folder: sorted((EXAMPLES / folder).glob("*.py")) for folder in GROUPS}


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return mark_code(docstring.partition("\n\n")[0].replace("\n", " "))


def _title(path: Path) -> str:
    words = " ".join(_NAMES.get(word, word) for word in path.stem.split("_"))
    return words[:1].upper() + words[1:]


def example_page(path: Path) -> str:
    """Return the source of an example's page."""
    title, place = _title(path), path.relative_to(EXAMPLES.parent)
    lines = [title, "=" * len(title), "", _summary(path), ""]
    lines += [f":download:`{path.name} <../../{place}>`", ""]
    lines += [f".. literalinclude:: ../../{place}", "   :language: python", ""]
    return "\n".join(lines)


def gallery() -> str:
    """Return the source of the page with all cards."""
    lines = ["Examples", "========", ""]
    for folder, paths in sources().items():
        title, text = GROUPS[folder]
        lines += [title, "-" * len(title), "", text, ""]
        lines += [".. grid:: 1 2 2 3", "   :gutter: 3", ""]
        for path in paths:
            lines += [f"   .. grid-item-card:: {_title(path)}", f"      :link: {path.stem}"]
            lines += ["      :link-type: doc"]
            if path.stem in PICTURES:
                lines += [f"      :img-top: ../images/{PICTURES[path.stem]}"]
            lines += ["", f"      {_summary(path)}", ""]
    lines += [".. toctree::", "   :hidden:", ""]
    lines += [f"   {path.stem}" for paths in sources().values() for path in paths]
    return "\n".join([*lines, ""])


def write_pages(app: Sphinx) -> None:
    """Write the gallery and its pages."""
    pages = {
        f"{path.stem}.rst": example_page(path) for paths in sources().values() for path in paths
    }
    write_changed(Path(app.srcdir, "examples"), {"index.rst": gallery(), **pages})


_LINK = re.compile(r"\]\((?:\.\./)+examples/(?:by_feature/)?(\w+)\.(?:py|md)\)")


def link_to_gallery(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to the files of examples into links to their pages, or to the gallery."""
    up = "../" * page.count("/")

    def target(link: re.Match[str]) -> str:
        stem = "index" if link[1] == "README" else link[1]
        return f"]({up}examples/{stem}.rst)"

    source[0] = _LINK.sub(target, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the gallery with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_to_gallery, priority=100)  # before links leave the site
    return {"parallel_read_safe": True, "parallel_write_safe": True}
