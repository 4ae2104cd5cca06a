"""``accel completions``: scripts for bash, zsh and fish, made from the parsers.

Not made by shtab (1.13): its scripts offer the options of ``accel launch`` after the user's script
too, and that for bash completes no values after ``=``.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from accel_callbacks.cli.parser import CommandParser
from accel_callbacks.cli.registry import COMMANDS, Command
from accel_callbacks.plugins.option import Option as Setting

_REST = (argparse.PARSER, argparse.REMAINDER)
# For bash and zsh: walk over the words before the cursor, to find the place they lead to ("-" after
# a script, whose arguments are its own), and the option that expects a value, if any.
_WALK = """
    local node="" expects="" word next opt
    for word in "${before[@]}"; do
        if [[ -n $expects ]]; then
            expects=""
        elif [[ $word == -* ]]; then
            opt=${word//-/_}
            [[ $word == *=* || " $(_accel_valued "$node") " != *" $opt "* ]] || expects=$opt
        else
            next=$(_accel_next "$node" "$word")
            node=$next
        fi
        [[ $node != - ]] || break
    done
"""
_BASH = """# Completions of accel for bash: eval "$(accel completions bash)" in ~/.bashrc
{tables}
_accel() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} before=() i IFS=$' \\t\\n'
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${{COMP_WORDS[i]}} == "=" ]] || before+=("${{COMP_WORDS[i]}}")
    done
    [[ $cur != "=" ]] || cur=""
    COMPREPLY=()
{walk}
    local offers=""
    if [[ $node == - ]]; then
        return
    elif [[ -n $expects ]]; then
        offers=$(_accel_values "$node $expects")
    elif [[ $cur == --*-* ]]; then
        offers=$(_accel_flags "$node" | tr _ -)
    elif [[ $cur == -* ]]; then
        offers=$(_accel_flags "$node")
    else
        offers=$(_accel_words "$node")
    fi
    COMPREPLY=($(compgen -W "$offers" -- "$cur"))
}}
complete -o bashdefault -o default -F _accel accel
"""
_ZSH = """#compdef accel
# Completions of accel for zsh: eval "$(accel completions zsh)" in ~/.zshrc, after compinit
{tables}
_accel() {{
    setopt localoptions extendedglob no_ksh_arrays
    local cur=$words[CURRENT]
    local -a before offers
    before=("${{(@)words[2,CURRENT-1]}}")
{walk}
    if [[ $node == - ]]; then
        _files
    elif [[ -n $expects || $cur == --*=* ]]; then
        [[ -n $expects ]] || {{ expects=${{cur%%=*}}; expects=${{expects//-/_}}; compset -P '*=' }}
        offers=(${{(f)"$(_accel_values "$node $expects")"}})
        if (( $#offers )); then _describe value offers; else _files; fi
    elif [[ $cur == -* ]]; then
        offers=(${{(f)"$(_accel_flags "$node")"}})
        [[ $cur != --*-* ]] || offers=(${{(f)"$(_accel_flags "$node" dashed)"}})
        _describe option offers
    else
        offers=(${{(f)"$(_accel_words "$node")"}})
        if (( $#offers )); then _describe word offers; else _files; fi
    fi
}}
if [[ ${{funcstack[1]}} == _accel ]]; then _accel "$@"; else compdef _accel accel; fi
"""
_FISH = """# Completions of accel for fish: accel completions fish | source
{tables}
function __accel_place
    set -l node ""
    set -l expects ""
    for word in (commandline -opc)[2..]
        if test -n "$expects"
            set expects ""
        else if string match -q -- '-*' $word
            set -l opt (string replace -a -- - _ $word)
            if contains -- $opt (__accel_valued $node)
                set expects $opt
            end
        else
            set node (__accel_next $node $word)
        end
        test "$node" = -; and break
    end
    echo $node
end
function __accel_at
    test (__accel_place) = "$argv[1]"
end
complete -c accel -e
complete -c accel -n 'not __accel_at -' -s h -l help -d 'show the help'
{lines}
"""


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel completions``."""
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell to print completions for")


def run(args: Namespace) -> int:
    """Print the script for a shell."""
    print(SCRIPTS[args.shell](places()), end="")
    return 0


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        flags: all spellings, the first one with ``_`` between words.
        help: one line.
        takes_value: the option is followed by a value.
        choices: the allowed values, if they are limited.
    """

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A command or action, and what may follow it.

    Attributes:
        path: the words of the command, such as ``ckpt ls``; empty for ``accel`` itself.
        options: its options.
        words: words that may follow, with a line of help each.
        ends: the first positional argument ends the command: a script's own arguments follow.
    """

    path: str
    options: tuple[Option, ...]
    words: Mapping[str, str]
    ends: bool = False


def places() -> list[Place]:
    """Return all places, `accel` itself first."""
    top = CommandParser("accel", "")
    top.option("--version", action="store_true", help="print the version")
    words = {name: command.help for name, command in COMMANDS.items()}
    places = [Place("", tuple(_options(top)), words)]
    for name, command in COMMANDS.items():
        places += _places_of(name, _parser(name, command))
    return places


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    """Build the parser of a subcommand; without options if its module cannot be imported."""
    parser = CommandParser(f"accel {name}", command.help)
    try:
        command.load().configure(parser)
    except ImportError:
        return CommandParser(f"accel {name}", command.help)
    return parser


def _places_of(path: str, parser: argparse.ArgumentParser) -> Iterator[Place]:
    """Yield the place of a parser, and those of its subparsers."""
    words: dict[str, str] = {}
    inner: dict[str, argparse.ArgumentParser] = {}
    ends = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner |= action.choices
            helps = {a.dest: a.help or "" for a in action._choices_actions}
            words |= {
                name: helps.get(name) or chosen.description or ""
                for name, chosen in action.choices.items()
            }
        elif not action.option_strings:
            words |= dict.fromkeys(map(str, action.choices or ()), "")
            ends = ends or action.nargs in _REST
    yield Place(path, tuple(_options(parser)), words, ends)
    for name, chosen in inner.items():
        yield from _places_of(f"{path} {name}", chosen)


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    """Yield the options of a parser."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield Option(
                tuple(action.option_strings),
                _first_line(parser, action),
                action.nargs != 0,
                _values(action),
            )


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return the choices of an option; a setting has them itself, as it parses the value."""
    setting = getattr(action.type, "__self__", None)
    if not isinstance(setting, Setting):
        return tuple(map(str, action.choices or ()))
    return setting.choices or (("true", "false") if setting.kind == "bool" else ())


def _first_line(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an option, expanded, on one line."""
    try:
        text = parser._get_formatter()._expand_help(action) if action.help else ""
    except (KeyError, TypeError, ValueError):
        text = action.help or ""
    return " ".join(text.split())


def spelled(flags: Iterable[str]) -> list[str]:
    """Drop the spelling with ``-`` of each flag that is spelled with ``_`` too."""
    spellings = list(flags)
    return [
        f for f in spellings if not ("-" in f[2:] and f"--{f[2:].replace('-', '_')}" in spellings)
    ]


def _valued(place: Place) -> list[str]:
    """Return the flags that take a value, with ``_`` for every dash."""
    flags = [flag for option in place.options if option.takes_value for flag in option.flags]
    return list(dict.fromkeys(flag.replace("-", "_") for flag in flags))


def _next(places: Sequence[Place]) -> dict[str, str]:
    """Map ``place:word`` to the place that the word leads to; ``-`` where nothing is offered."""
    known = {place.path for place in places}
    leads = {}
    for place in places:
        for word in place.words:
            if (path := f"{place.path} {word}".strip()) in known:
                leads[f"{place.path}:{word}"] = path
    inner = {key.partition(":")[0] for key in leads}
    return leads | {f"{p.path}:*": "-" for p in places if p.ends or p.path in inner}


def _case(name: str, rows: Mapping[str, str], otherwise: str = "") -> str:
    """Write a lookup function for bash and zsh."""
    lines = [f"        {quote(key)}) echo {quote(text)} ;;" for key, text in rows.items() if text]
    body = "\n".join([*lines, f"        *) echo {otherwise} ;;" if otherwise else "        *) ;;"])
    return f'{name}() {{\n    case "$1" in\n{body}\n    esac\n}}'


def _walking(places: Sequence[Place]) -> list[str]:
    """Write the lookups of `_WALK`, for bash and zsh."""
    leads = _next(places)
    rows = [
        f"        {quote(key[:-1])}*) echo - ;;"
        if key.endswith("*")
        else f"        {quote(key)}) echo {quote(path)} ;;"
        for key, path in leads.items()
    ]
    following = "\n".join([*rows, '        *) echo "$1" ;;'])
    return [
        _case("_accel_valued", {place.path: " ".join(_valued(place)) for place in places}),
        f'_accel_next() {{\n    case "$1:$2" in\n{following}\n    esac\n}}',
    ]


def _choices(places: Sequence[Place]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the choices of options by place and flag."""
    for place in places:
        for option in place.options:
            for flag in dict.fromkeys(flag.replace("-", "_") for flag in option.flags):
                if option.choices:
                    yield f"{place.path} {flag}", option.choices


def bash(places: Sequence[Place]) -> str:
    """Write the script for bash."""
    flags = {p.path: " ".join(f for o in p.options for f in spelled(o.flags)) for p in places}
    tables = [
        *_walking(places),
        _case("_accel_flags", flags),
        _case("_accel_words", {place.path: " ".join(place.words) for place in places}),
        _case("_accel_values", {key: " ".join(values) for key, values in _choices(places)}),
    ]
    return _BASH.format(tables="\n".join(tables), walk=_WALK)


def _described(word: str, text: str) -> str:
    """Format a word and its help for ``_describe`` of zsh."""
    return f"{word.replace(':', chr(92) + ':')}:{text}" if text else word


def _zsh_flags(place: Place, dashed: bool) -> str:
    """List the options of a place with their help, one per line."""
    lines = []
    for option in place.options:
        for flag in spelled(option.flags):
            shown = flag.replace("_", "-") if dashed else flag
            lines.append(_described(shown, option.help))
    return "\n".join(lines)


def zsh(places: Sequence[Place]) -> str:
    """Write the script for zsh."""
    words = {p.path: "\n".join(_described(*item) for item in p.words.items()) for p in places}
    tables = [
        *_walking(places),
        _case("_accel_flags_", {p.path: _zsh_flags(p, False) for p in places}),
        _case("_accel_flags_dashed", {p.path: _zsh_flags(p, True) for p in places}),
        '_accel_flags() { _accel_flags_$2 "$1" }',
        _case("_accel_words", words),
        _case("_accel_values", {key: "\n".join(values) for key, values in _choices(places)}),
    ]
    text = "\n".join(tables).replace(" echo ", " print -r -- ")
    return _ZSH.format(tables=text, walk=_WALK)


def _fish_option(place: Place, option: Option) -> Iterator[str]:
    """Yield the lines of an option for fish, in both spellings."""
    for flag in option.flags:
        if flag in ("-h", "--help"):
            continue
        letter = "-l" if flag.startswith("--") else "-s"
        parts = ["complete -c accel -n", _fish(f"__accel_at {_fish(place.path)}"), letter]
        parts += [_fish(flag.lstrip("-")), "-d", _fish(option.help)]
        if option.choices:
            parts += ["-x -a", _fish(" ".join(option.choices))]
        elif option.takes_value:
            parts.append("-r")
        yield " ".join(parts)


def _fish(text: str) -> str:
    """Quote a text for fish, which has two escapes in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def fish(places: Sequence[Place]) -> str:
    """Write the script for fish."""
    lines = []
    for place in places:
        at = _fish(f"__accel_at {_fish(place.path)}")
        for word, text in place.words.items():
            lines.append(f"complete -c accel -n {at} -f -a {_fish(word)} -d {_fish(text)}")
        lines += [line for option in place.options for line in _fish_option(place, option)]
    valued = [
        f"case {_fish(p.path)}\n    printf '%s\\n' {' '.join(_valued(p))}"
        for p in places
        if _valued(p)
    ]
    leads = [f"case {_fish(key)}\n    echo {_fish(path)}" for key, path in _next(places).items()]
    tables = [
        'function __accel_valued\nswitch "$argv[1]"\n' + "\n".join(valued) + "\nend\nend",
        'function __accel_next\nswitch "$argv[1]:$argv[2]"\n'
        + "\n".join(leads)
        + '\ncase "*"\n    echo "$argv[1]"\nend\nend',
    ]
    return _FISH.format(tables="\n".join(tables), lines="\n".join(lines))


SCRIPTS: Mapping[str, Callable[[Sequence[Place]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
