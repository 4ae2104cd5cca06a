"""``accel config``: write, update and show config files."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.compat.foreign_settings import to_fsdp2
from accel_callbacks.launch.config_file import (
    PROJECT_FILE,
    default_path,
    expanded,
    find_config,
    read_config,
    values_of,
    write_config,
)
from accel_callbacks.launch.machine import Machine, detect_machine
from accel_callbacks.launch.resolve import Resolved, refuse_unbuilt, resolve_settings
from accel_callbacks.launch.settings import all_options, find
from accel_callbacks.plugins.option import SettingsError
from accel_callbacks.terminal_text import printable, table
from loggers.redaction import redacted

_Values = dict[str, Any]
_Answer = TypeVar("_Answer")
ACTIONS = {
    "default": "write what fits this machine, without questions; the same as --default",
    "update": "write a file again with the keys of this version",
    "show": "show every setting and where its value comes from",
}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel config`` and its actions."""
    parser.usage = "accel config [default | update | show] [options]"
    parser.option("--config_file", metavar="FILE", help="the file to write, update or show")
    parser.option(
        "--default", action="store_true", help="write what fits this machine, without questions"
    )
    _add_writing(parser, {})
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in ACTIONS.items():
        action: CommandParser = actions.add_parser(name, help=text, description=f"{text}.")
        # SUPPRESS keeps the value of the same option before the action.
        action.option(
            "--config_file",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="the file to write, update or show",
        )
        if name == "default":
            _add_writing(action, {"default": argparse.SUPPRESS})
        if name == "show":
            action.option(
                "--script", metavar="FILE", help="search for accel.yaml from here upwards"
            )
            action.option("--json", action="store_true", help="print JSON")
        parser.adopt(action)


def _add_writing(parser: CommandParser, more: Mapping[str, Any]) -> None:
    """Add the options of writing a new file."""
    parser.option(
        "--force",
        action="store_true",
        help="replace an existing file, which --default refuses and the questions ask about",
        **more,
    )
    parser.option("--mixed_precision", metavar="TYPE", help="type to compute in", **more)


def run(args: Namespace) -> int:
    """Run the action; files are written atomically."""
    action = args.action or ("default" if args.default else "ask")
    try:
        return _ACTIONS[action](args)
    except SettingsError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        print("\naccel config: stopped; nothing was written", file=sys.stderr)
        return 130


def _default(args: Namespace) -> int:
    """Write the default values for this machine."""
    machine = detect_machine(os.environ)
    values = defaults(machine, args.mixed_precision)
    path = expanded(args.config_file or default_path(os.environ))
    if os.path.lexists(path) and not args.force:
        raise CommandError(f"{path} already exists: --force replaces it", exit_code=1)
    return _write(path, values)


def _ask(args: Namespace) -> int:
    """Ask questions, then write the file."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError(
            "asks questions, and standard input is no terminal: `accel config --default` asks none"
        )
    machine = detect_machine(os.environ)
    print("\n".join(["This machine:", *(f"  {line}" for line in machine.lines())]))
    try:
        values = answers(machine, args.mixed_precision)
        path = expanded(args.config_file or place(os.environ))
        keep = os.path.lexists(path) and not args.force
        if keep and not yes_or_no(f"{path} already exists. Replace it?"):
            raise CommandError("nothing was written; --config_file names another", exit_code=1)
    except EOFError:
        raise CommandError("the input ended; nothing was written", exit_code=1) from None
    return _write(path, values)


def _write(path: Path, values: Mapping[str, Any]) -> int:
    """Validate the values as a launch would, write them, and print the launch command."""
    values_of(values, str(path))
    written = write_config(path, values)
    print(f"wrote {path}")
    print("\n".join(["launch with:", *(f"  {line}" for line in _commands(written, values))]))
    return 0


def _commands(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Return the launch command of this machine, and that of others if there are several."""
    current = find_config(None, os.environ)
    option = [] if current and os.path.samefile(current, path) else ["--config_file", str(path)]
    command = shlex.join(["accel", "launch", *option, "train.py"])
    if values.get("num_machines", 1) == 1:
        return [command]
    other = shlex.join(["accel", "launch", *option, "--machine_rank", "N", "train.py"])
    return [
        f"{command}  # here, machine {values['machine_rank']}",
        f"{other}  # on each other machine, with the same file and its own N",
    ]


def _update(args: Namespace) -> int:
    """Rename old keys, those of FSDP1 too, and drop obsolete ones, in place."""
    path = Path(args.config_file) if args.config_file else find_config(None, os.environ)
    if path is None:
        raise CommandError("found no config file to update: name it with --config_file")
    before = read_config(path)
    values, gone = values_of(before, str(path))
    values, replaced = to_fsdp2(values)
    after = nested(values)
    for key in sorted(set(before) - set(after)):
        print(f"removed {key}: {gone.get(key, 'nothing is given there, or it has a new name')}")
    for key in sorted(set(after) - set(before)):
        print(f"added {key}: {redacted(after[key], key)}")
    print("".join(f"{line}\n" for line in replaced), end="")
    write_config(path, after)
    print(f"wrote {path}; comments are not kept")
    return 0


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings by path in blocks, as in a file."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        block, _, name = path.rpartition(".")
        plain = list(value) if isinstance(value, tuple) else value
        if plain in ("true", "false") and "true" in find(path).choices:
            plain = plain == "true"  # a switch, as Accelerate writes it
        (data.setdefault(block, {}) if block else data)[name] = plain
    return data


# --- values for this machine -----------------------------------------------------------------


def defaults(machine: Machine, mixed_precision: str | None) -> _Values:
    """Return the values for this machine: all of its GPUs, or one process on the CPU."""
    count = 1 if machine.gpu_kind == "mps" else max(1, len(machine.gpus))
    place = _place("MULTI_GPU" if machine.gpus else "MULTI_CPU", count)
    return _complete(place, machine, mixed_precision or "no")


def answers(machine: Machine, mixed_precision: str | None) -> _Values:
    """Ask for the values of the file; raise EOFError if the input ends.

    Args:
        machine: has the answers that are offered.
        mixed_precision: as given on the command line, then it is not asked for.
    """
    chosen = _ask_place(machine)
    if machine.slurm_nodes:
        print("Machines, ranks and addresses come from SLURM at each launch.")
    else:
        chosen |= _ask_machines(chosen)
    if chosen["distributed_type"].startswith("MULTI_"):
        chosen |= _pick("How is a model trained on several processes?", _ENGINES)()
    precision = mixed_precision or _ask_option("mixed_precision")
    if yes_or_no(find("dynamo_config.dynamo_backend").question):
        chosen["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return _complete(chosen, machine, precision)


def _place(kind: str, count: int) -> _Values:
    """Return the values of a number of processes on one machine."""
    return {
        "distributed_type": kind if count > 1 else "NO",
        "num_machines": 1,
        "num_processes": count,
        "use_cpu": kind == "MULTI_CPU",
    }


def _complete(chosen: _Values, machine: Machine, precision: str) -> _Values:
    """Return all values; in a SLURM job, which sets the machines, processes are per machine."""
    values = {"compute_environment": "LOCAL_MACHINE", **chosen, "mixed_precision": precision}
    if machine.slurm_nodes:
        values.pop("num_machines", None)
        values["nproc_per_node"] = values.pop("num_processes", 1)
        if values["distributed_type"] == "NO":
            del values["distributed_type"]
    return values


# --- questions -------------------------------------------------------------------------------


def _ask_place(machine: Machine) -> _Values:
    """Ask for the devices and the number of processes on this machine."""
    kinds = {"GPUs, a process each": "MULTI_GPU", "the CPU": "MULTI_CPU", "a TPU": "XLA"}
    if not machine.gpus:
        kinds = {"the CPU": "MULTI_CPU", **kinds}
    kind = _pick("Where does it run?", kinds)
    if kind == "XLA":
        return {"distributed_type": "XLA", "use_cpu": False}
    found = len(machine.gpus) if kind == "MULTI_GPU" else 0
    values = _place(kind, _ask_option("num_processes", found or 1))
    if values["num_processes"] < found:
        values |= _ask_given("", "gpu_ids")
    return values


def _ask_machines(chosen: _Values) -> _Values:
    """Ask for the number of machines, and for their rendezvous."""
    count = _ask_option("num_machines")
    if count == 1:
        return {}
    kind = chosen["distributed_type"]
    several = "MULTI_CPU" if chosen["use_cpu"] else "MULTI_GPU"
    return {
        "distributed_type": several if kind == "NO" else kind,
        "num_machines": count,
        "num_processes": count * chosen.get("num_processes", 1),
        **_ask_given("", "machine_rank", "main_process_ip"),
        "main_process_port": _ask_option("main_process_port", 29500),
        "rdzv_backend": "static",
    }


def _ask_fsdp() -> _Values:
    """Ask how FSDP shards models."""
    names = ("reshard_after_forward", "offload_params", "activation_checkpointing")
    block = _ask_given("fsdp_config", *(f"fsdp_{name}" for name in names))
    policy = _pick(find("fsdp_config.fsdp_auto_wrap_policy").question, _UNITS)
    if policy is not None:
        name, rest = policy
        block |= {"fsdp_auto_wrap_policy": name, **_ask_given("fsdp_config", rest)}
    return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **block}}


def _ask_deepspeed() -> _Values:
    """Ask for the configuration of DeepSpeed, or how it trains models."""
    block = _ask_given("deepspeed_config", "deepspeed_config_file")
    if not block:
        block = _ask_given("deepspeed_config", "zero_stage", "gradient_clipping")
        parts = {3: ("optimizer", "param"), 0: ()}.get(block["zero_stage"], ("optimizer",))
        for part in parts:
            block |= _ask_given("deepspeed_config", f"offload_{part}_device")
            if block[f"offload_{part}_device"] == "nvme":
                block |= _ask_given("deepspeed_config", f"offload_{part}_nvme_path")
        if block["zero_stage"] == 3:
            block |= _ask_given("deepspeed_config", "zero3_init_flag")
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": block}


_ENGINES: Mapping[str, Callable[[], _Values]] = {
    "each has the whole model (DDP)": dict,
    "each has a shard of it, to save memory (FSDP)": _ask_fsdp,
    "by DeepSpeed (ZeRO)": _ask_deepspeed,
}
_UNITS: Mapping[str, tuple[str, str] | None] = {
    "the blocks that a model repeats": None,
    "modules of some classes": ("TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap"),
    "modules of some size": ("SIZE_BASED_WRAP", "fsdp_min_num_params"),
}


def place(environment: Mapping[str, str]) -> Path:
    """Ask for the path of the file."""
    project, personal = Path.cwd() / PROJECT_FILE, default_path(environment)
    texts = {
        f"scripts in this folder: {project}": project,
        f"all that you launch: {personal}": personal,
    }
    return _pick("What is the file for?", texts)


def _ask_given(block: str, *names: str) -> _Values:
    """Ask for options of a block, or of none; leave out those without an answer."""
    paths = {name: f"{block}.{name}" if block else name for name in names}
    asked = {name: _ask_option(path) for name, path in paths.items()}
    return {name: value for name, value in asked.items() if value is not None}


def _ask_option(path: str, default: Any = None) -> Any:
    """Ask for an option, whose default is that of the option itself if None."""
    option = find(path)
    default = option.default if default is None else default
    if option.kind == "bool" or "true" in option.choices:
        return yes_or_no(option.question, default in (True, "true"))
    if option.choices:
        ordered = sorted(option.choices, key=lambda choice: choice != default)
        return _pick(option.question, {choice: choice for choice in ordered})
    hint = "" if default is None else f"[{default}] "

    def read(text: str) -> Any:
        return option.parse(text) if text else default

    return _until(f"{option.question} {hint}", read)


def yes_or_no(question: str, default: bool = False) -> bool:
    """Ask for yes or no."""
    words = {"": default, "n": False, "no": False, "y": True, "yes": True}
    shown = "[Y/n]" if default else "[y/N]"
    return _until(f"{question} {shown} ", lambda text: words[text.lower()], "type y or n")


def _pick(question: str, choices: Mapping[str, _Answer]) -> _Answer:
    """Print numbered choices and return the value of the chosen one, by default the first."""
    texts: Sequence[str] = list(choices)
    print(question)
    print("\n".join(f"  {number}) {text}" for number, text in enumerate(texts, 1)))

    def read(text: str) -> _Answer:
        number = int(text or "1")
        if not 1 <= number <= len(texts):
            raise ValueError
        return choices[texts[number - 1]]

    return _until("Number [1] ", read, f"type a number from 1 to {len(texts)}")


def _until(prompt: str, read: Callable[[str], _Answer], hint: str = "") -> _Answer:
    """Ask until the answer can be parsed."""
    while True:
        try:
            return read(input(prompt).strip())
        except (ValueError, KeyError) as error:
            print(f"  {hint or error}")


# --- showing -----------------------------------------------------------------------------------


def _show(args: Namespace) -> int:
    """Print every setting of a launch without options, and the origin of its value."""
    resolved = resolve_settings({}, args.config_file, args.script, os.environ)
    print(_json(resolved) if args.json else _text(resolved, args.script, os.environ))
    return 0


def _text(resolved: Resolved, script: str | None, environment: Mapping[str, str]) -> str:
    lines = [_file_line(resolved, script, environment), ""]
    idle = resolved.idle()
    lines.append(table(("SETTING", "VALUE", "FROM"), _rows(resolved, idle)))
    if refused := _refusal(resolved):
        lines += ["", printable(f"accel launch stops: {refused}")]
    return "\n".join(lines)


def _file_line(resolved: Resolved, script: str | None, environment: Mapping[str, str]) -> str:
    if resolved.file is not None:
        return printable(f"config file: {resolved.file}")
    start = Path.cwd() if script is None else Path(script).resolve().parent
    personal = default_path(environment)
    return printable(f"config file: none ({PROJECT_FILE} in {start} or above it, then {personal})")


def _rows(resolved: Resolved, idle: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a row per setting; a block without given options has a single row."""
    shown = {
        option.block for option in all_options() if option.block and resolved.given(option.path)
    }
    for option in all_options():
        if option.kind == "block" and option.name in shown:
            continue
        if option.block and option.block not in shown:
            continue
        origin = "default" if option.kind == "block" else resolved.origins[option.path]
        unused = f"; no effect: {idle[option.path]}" if option.path in idle else ""
        yield (
            option.path,
            _format(redacted(resolved.value(option.path), option.path)),
            f"{origin}{unused}",
        )
    for key, reason in resolved.gone.items():
        yield key, "...", f"{resolved.file}; no effect: {reason}"


def _format(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _refusal(resolved: Resolved) -> str:
    try:
        refuse_unbuilt(resolved)
    except SettingsError as error:
        return str(error)
    return ""


def _json(resolved: Resolved) -> str:
    idle = resolved.idle()
    settings = {
        option.path: {
            "value": redacted(resolved.value(option.path), option.path),
            "origin": resolved.origins[option.path],
            "no_effect": idle.get(option.path),
        }
        for option in all_options()
        if option.kind != "block"
    }
    file = None if resolved.file is None else str(resolved.file)
    facts = {"file": file, "refused": _refusal(resolved) or None, "settings": settings}
    return json.dumps(facts, indent=2)


_ACTIONS: Mapping[str, Callable[[Namespace], int]] = {
    "ask": _ask,
    "default": _default,
    "update": _update,
    "show": _show,
}
