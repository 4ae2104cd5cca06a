"""Pictures and tables of a run for its page: the newest ones that its JSONL tracker has kept."""

from __future__ import annotations

import base64
import os
import posixpath
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from accel_callbacks.addons.journal.metrics import project_of, records_of
from accel_callbacks.addons.journal.reader import Journal
from checkpoint_io.local_files import local_path

__all__ = ["pictures_of", "tables_of"]

_FOLDER = "metrics-media"
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_PICTURES = 8  # of a name: those of its newest steps
_MOST_BYTES = 8 << 20  # of the pictures of a run, which the page holds
_MOST_ROWS, _MOST_COLUMNS, _LONGEST = 50, 20, 500


def pictures_of(journal: Journal) -> list[dict[str, Any]]:
    """Return the newest images and figures of each name: name, step, caption, and a data URL.

    Of a run with more than fits, the oldest ones are left out.
    """
    project = project_of(journal)
    if project is None:
        return []
    entries = sorted(_entries(journal), key=lambda entry: int(entry["step"]))
    pictures, counts, left = [], dict.fromkeys((entry["name"] for entry in entries), 0), _MOST_BYTES
    for entry in reversed(entries):
        if counts[entry["name"]] >= _MOST_PICTURES:
            continue
        data = _content(project, entry.pop("path"))
        if not data.startswith(_PNG) or len(data) > left:
            continue
        left -= len(data)
        counts[entry["name"]] += 1
        encoded = base64.b64encode(data).decode("ascii")
        pictures.append({**entry, "source": f"data:image/png;base64,{encoded}"})
    # The newest step of a name first, and the pictures of a step in their order.
    pictures.reverse()
    return sorted(pictures, key=lambda picture: (str(picture["name"]), -int(picture["step"])))


def _entries(journal: Journal) -> Iterator[dict[str, Any]]:
    """Yield name, step, caption and path of each picture."""
    for record in records_of(journal, "images"):
        captions = record.get("captions")
        for name, paths in record["values"].items():
            texts = _list(captions.get(name)) if isinstance(captions, dict) else []
            for number, path in enumerate(_list(paths)):
                caption = _cell(texts[number]) if number < len(texts) else ""
                yield {"name": name, "step": record["step"], "caption": caption, "path": path}
    for record in records_of(journal, "figure"):
        for name, path in record["values"].items():
            yield {"name": name, "step": record["step"], "caption": "", "path": path}


def _content(project: str, path: Any) -> bytes:
    """Return a file of the folder of media, nothing if it is elsewhere, gone or too large."""
    # A record is a text, which may come from elsewhere: it must not bring other files into a page.
    whole = posixpath.normpath(str(path))
    if not whole.startswith(f"{_FOLDER}/"):
        return b""
    with suppress(OSError, ValueError):
        local = local_path(f"{project}{whole}")
        if local is None:
            from loggers.trackers.line_file import read_object

            return read_object(f"{project}{whole}")
        if os.path.getsize(local) <= _MOST_BYTES:
            with open(local, "rb") as stream:
                return stream.read()
    return b""


def tables_of(journal: Journal) -> list[dict[str, Any]]:
    """Return the newest table of each name: name, step, columns, rows, and how many rows it has."""
    newest: dict[str, dict[str, Any]] = {}
    for record in records_of(journal, "table"):
        newest[str(record["name"])] = record
    return [
        {
            "name": name,
            "step": record["step"],
            "columns": [_cell(column) for column in record["columns"][:_MOST_COLUMNS]],
            "rows": [
                [_cell(cell) for cell in _list(row)[:_MOST_COLUMNS]]
                for row in record["rows"][:_MOST_ROWS]
            ],
            "count": len(record["rows"]),
        }
        for name, record in sorted(newest.items())
    ]


def _list(value: Any) -> list[Any]:
    """Return a list of a record; an empty one in place of anything else that stands there."""
    return value if isinstance(value, list) else []


def _cell(cell: Any) -> str:
    try:
        text = str(cell)
    except RecursionError:  # lists in lists, as no tracker writes them
        return "..."
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
