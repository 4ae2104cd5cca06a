"""A canvas that writes SVG in two themes: the colors follow the reader's preference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

# Class of a shape or text: its declaration in light and in dark.
_THEME = {
    "panel": ("fill:#ffffff;stroke:#d0d7de", "fill:#0f1419;stroke:#333c47"),
    "text": ("fill:#1f2328", "fill:#e6edf3"),
    "muted": ("fill:#59636e", "fill:#9da7b1"),
    "grid": ("stroke:#d0d7de", "stroke:#3a434e"),
    "arrow": ("stroke:#59636e;fill:none", "stroke:#9da7b1;fill:none"),
    "head": ("fill:#59636e", "fill:#9da7b1"),
    "cut": ("stroke:#c4442b;stroke-dasharray:5 4", "stroke:#ff8a73;stroke-dasharray:5 4"),
    "spread": ("stroke:#1f2328", "stroke:#e6edf3"),
    "ours": ("fill:#1f6feb", "fill:#58a6ff"),
    "peer": ("fill:#a9b4bf", "fill:#57626d"),
    "second": ("fill:#d9822b", "fill:#e3a857"),
    "line-0": ("stroke:#c3ccd6", "stroke:#4a5560"),
    "line-1": ("stroke:#1f6feb", "stroke:#58a6ff"),
    "line-2": ("stroke:#1a7f37", "stroke:#56d364"),
    "line-3": ("stroke:#d9822b", "stroke:#e3a857"),
    "line-4": ("stroke:#8250df", "stroke:#bc8cff"),
    "line-5": ("stroke:#c4442b", "stroke:#ff8a73"),
    "box": ("fill:#eef3f8;stroke:#8fa5bd", "fill:#1d2733;stroke:#4d6178"),
    "warm": ("fill:#fdebdc;stroke:#d08a4f", "fill:#3a2614;stroke:#b0713a"),
    "good": ("fill:#e3f4e6;stroke:#5fa46c", "fill:#15301c;stroke:#4a8f58"),
    "good-text": ("fill:#1a7f37", "fill:#56d364"),
    "bad-text": ("fill:#c4442b", "fill:#ff8a73"),
    "warm-text": ("fill:#9a5a00", "fill:#e3a857"),
    "ours-text": ("fill:#0b57c2", "fill:#79b8ff"),
    "faint": ("fill:#f6f8fa;stroke:#d0d7de", "fill:#161c23;stroke:#333c47"),
}
_FONTS = """\
text{font:15px system-ui,-apple-system,"Segoe UI",sans-serif}
.code{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre}
.title{font-weight:600}
.small{font-size:13px}
.code.small{font-size:12.5px}
.bold{font-weight:600}
.grid,.arrow,.cut,.spread,[class^=line]{stroke-width:1.5}
.wide{stroke-width:6!important}"""


class Picture:
    """An SVG picture with a panel behind it, so that it reads on a page of either theme.

    Args:
        width: in pixels; a page scales it down where it is narrower.
        height: in pixels.
        title: what the picture shows, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, "panel", radius=8)

    def text(
        self, x: float, y: float, words: str, classes: str = "text", anchor: str = "start"
    ) -> None:
        """Write a line of text; ``y`` is its baseline."""
        at = f'x="{x:g}" y="{y:g}" class={quoteattr(classes)}'
        if anchor != "start":
            at += f' text-anchor="{anchor}"'
        self._shapes.append(f"<text {at}>{escape(words)}</text>")

    def spans(self, x: float, y: float, spans: Sequence[tuple[str, str]], advance: float) -> None:
        """Write runs of code, each with its classes, in columns that are ``advance`` wide."""
        column = 0
        for words, classes in spans:
            if words.strip():
                start = x + column * advance
                size = f'textLength="{len(words) * advance:g}" lengthAdjust="spacingAndGlyphs"'
                self._shapes.append(
                    f'<text x="{start:g}" y="{y:g}" class={quoteattr(f"code {classes}")} {size}>'
                    f"{escape(words)}</text>"
                )
            column += len(words)

    def rect(
        self, x: float, y: float, width: float, height: float, classes: str, radius: float = 3
    ) -> None:
        """Draw a rectangle with round corners."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f"class={quoteattr(classes)}/>"
        )

    def line(self, points: Sequence[tuple[float, float]], classes: str = "grid") -> None:
        """Draw straight lines through points."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        marker = ' marker-end="url(#head)"' if "arrow" in classes.split() else ""
        self._shapes.append(f'<path d="M{path}" fill="none" class={quoteattr(classes)}{marker}/>')

    def svg(self) -> str:
        """Return the file."""
        classes = {
            name
            for shape in self._shapes
            for names in re.findall(r'class="([^"]+)"', shape)
            for name in names.split()
        }
        if "arrow" in classes:
            classes.add("head")
        themes = {name: pair for name, pair in _THEME.items() if name in classes}
        light, dark = (
            "".join(f".{name}{{{pair[theme]}}}" for name, pair in themes.items())
            for theme in (0, 1)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_FONTS}\n{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
                "</defs>",
                *self._shapes,
                "</svg>\n",
            ]
        )
