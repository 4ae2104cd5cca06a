"""Make the tables of the page of ``accel`` from its parsers, where the page has a mark for one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = "reference/cli"
OPTIONS = re.compile(r"^<!-- options of accel ([\w-]+) -->$", re.M)
_UNTITLED = ("options", "positional arguments")
_REST = (argparse.PARSER, argparse.REMAINDER)


def options_of(command: str) -> str:
    """Return the options of a command as Markdown tables, one a group of its help."""
    from accel_callbacks.cli.parser import CommandParser
    from accel_callbacks.cli.registry import COMMANDS

    parser = CommandParser(f"accel {command}", "")
    COMMANDS[command].load().configure(parser)
    actions = _actions_of(parser)
    if actions:
        return _table_of_actions({"": parser, **actions})
    groups: dict[str, list[tuple[str, ...]]] = {}
    for group in parser._action_groups:
        rows = [(_spelled(action), _meaning(action)) for action in _shown(group)]
        if rows:
            title = group.title or ""
            groups.setdefault("" if title in _UNTITLED else title, []).extend(rows)
    if command == "test":  # the others are those of a launch
        groups = {"": groups[""]}
    tables = []
    for title, rows in groups.items():
        shown = f"`{title}`" if "_" in title else title[:1].upper() + title[1:]
        tables += [*([f"**{shown}**", ""] if title else [])]
        tables += [*_table(("option", "meaning"), rows), ""]
    return "\n".join(tables)


def _actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's actions, each once, under its first name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers: dict[int, tuple[str, argparse.ArgumentParser]] = {}
            for name, inner in action.choices.items():
                parsers.setdefault(id(inner), (name, inner))
            return dict(parsers.values())
    return {}


def _table_of_actions(parsers: dict[str, argparse.ArgumentParser]) -> str:
    owners: dict[tuple[str, str], list[str]] = {}
    for name, parser in parsers.items():
        for action in _shown(parser):
            if action.option_strings:
                row = (_spelled(action), _meaning(action))
                owners.setdefault(row, []).append(name and f"`{name}`")
    rows = [
        (spelled, "" if "" in names else ", ".join(names), text)
        for (spelled, text), names in owners.items()
    ]
    return "\n".join(_table(("option", "of", "meaning"), rows))


def _shown(group: argparse._ActionsContainer) -> Iterator[argparse.Action]:
    """Yield the arguments of a group, but for help and what only turns another one off."""
    actions = getattr(group, "_group_actions", None) or group._actions
    for action in actions:
        flags = action.option_strings
        is_off = bool(flags) and (action.help or "").startswith("turns ")
        hidden = action.help == argparse.SUPPRESS or action.nargs in _REST
        if not (is_off or hidden or "--help" in flags):
            yield action


def _spelled(action: argparse.Action) -> str:
    """Return the flags of an option as code, without the spelling with dashes, and its value."""
    flags = action.option_strings
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    value += " ..." if action.nargs == "+" else ""
    if not flags:
        shown = [value]
    elif action.nargs == 0:
        shown = flags
    else:
        shown = [f"{flag} {value}" for flag in flags]
    names = [name for name in shown if "-" not in name.partition(" ")[0][2:]]
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _meaning(action: argparse.Action) -> str:
    """Return the help of an option, with the default that a launch has for it."""
    from accel_callbacks.launch.settings import all_options

    text = re.sub(r"(?<!`)(--\w+)(?!`)", r"`\1`", (action.help or "").replace("%%", "%"))
    defaults = {option.flag: option.default for option in all_options()}
    default = next((defaults[flag] for flag in action.option_strings if flag in defaults), None)
    if default and "default" not in text:
        text += f"; default: `{default}`"
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the tables in the places of their marks."""
    if page == PAGE:
        source[0] = OPTIONS.sub(lambda mark: options_of(mark[1]), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the tables with Sphinx."""
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
