"""``accel config``: write, update and show config files."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from accel_callbacks.plugins.option import Option, SettingsError
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
    parser.option(
        "--all_questions",
        action="store_true",
        help="ask about devices and engines that this machine lacks too, for a file for another",
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
    if args.all_questions:
        raise CommandError("--all_questions asks and --default does not: give one of them")
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
    if not args.all_questions:
        print("Questions are about what it has; accel config --all_questions asks all.")
    try:
        values = answers(machine, args.mixed_precision, args.all_questions)
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
    chosen = _on_all_gpus(machine) if machine.gpus else _on_one_core(machine)
    chosen = _leave_to_slurm(chosen) if machine.slurm_nodes else chosen
    return _complete(chosen, {"mixed_precision": mixed_precision or "no"})


def answers(machine: Machine, mixed_precision: str | None, everything: bool = False) -> _Values:
    """Ask for the values of the file; raise EOFError if the input ends.

    Args:
        machine: what it lacks is not asked about.
        mixed_precision: as given on the command line, then it is not asked for.
        everything: ask about all devices and engines.
    """
    if everything:
        machine = replace(machine, tpu=True, torch_xla=True, fp8=True, deepspeed=True)
    places = _places(machine)
    if everything and not machine.gpus:
        places["GPUs, a process each"] = _on_other_gpus
    chosen = _pick("Where does it run?", places)(machine)
    if machine.slurm_nodes:
        print("Machines, ranks and addresses come from SLURM at each launch.")
        chosen = _leave_to_slurm(chosen)
    else:
        chosen |= _machines(chosen)
    if _several(chosen):
        chosen |= _ask_sharding(chosen, machine)
    elif _has_own_gpu(chosen, machine) and machine.deepspeed:
        chosen |= _ask_deepspeed()
    training: _Values = {"mixed_precision": mixed_precision or _precision(chosen, machine)}
    if _ask_flag("dynamo_config.dynamo_backend"):
        training["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return _complete(chosen, training)


def place(environment: Mapping[str, str]) -> Path:
    """Ask for the path of the file."""
    project, personal = Path.cwd() / PROJECT_FILE, default_path(environment)
    texts = {
        f"scripts in this folder: {project}": project,
        f"all that you launch: {personal}": personal,
    }
    return _pick("What is the file for?", texts)


def yes_or_no(question: str, default: bool = False) -> bool:
    """Ask for yes or no."""
    words = {"": default, "n": False, "no": False, "y": True, "yes": True}
    shown = "[Y/n]" if default else "[y/N]"
    return _until(f"{question} {shown} ", lambda text: words[text.lower()], "type y or n")


def _complete(chosen: _Values, training: _Values) -> _Values:
    return {"compute_environment": "LOCAL_MACHINE", **chosen, **training}


# --- where it runs ---------------------------------------------------------------------------


def _places(machine: Machine) -> dict[str, Callable[[Machine], _Values]]:
    """Return the places to run on this machine, the best first."""
    count = len(machine.gpus)
    places: dict[str, Callable[[Machine], _Values]] = {}
    if machine.tpu and machine.torch_xla:
        places["the TPU"] = lambda _: {"distributed_type": "XLA", "use_cpu": False}
    if count > 1:
        places[f"all {count} GPUs, a process each"] = _on_all_gpus
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # it would renumber the GPUs
            places["some of the GPUs"] = _on_some_gpus
    if count:
        places["one GPU"] = lambda _: _one_process(use_cpu=False)
    places["one process on the CPU"] = _on_one_core
    places["several processes on the CPU"] = _on_many_cores
    return places


def _one_process(use_cpu: bool) -> _Values:
    return {"distributed_type": "NO", "num_machines": 1, "num_processes": 1, "use_cpu": use_cpu}


def _on_one_core(machine: Machine) -> _Values:
    return _one_process(use_cpu=True)


def _on_all_gpus(machine: Machine) -> _Values:
    count = len(machine.gpus)
    if count == 1 or machine.gpu_kind == "mps":
        return _one_process(use_cpu=False)
    return _one_process(use_cpu=False) | {"distributed_type": "MULTI_GPU", "num_processes": count}


def _on_other_gpus(machine: Machine) -> _Values:
    count = _ask_number("num_processes", "How many GPUs on a machine?", 8)
    kind = {"distributed_type": "MULTI_GPU"} if count > 1 else {}
    return _one_process(use_cpu=False) | {"num_processes": count} | kind


def _on_some_gpus(machine: Machine) -> _Values:
    count = len(machine.gpus)

    def read(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if not all(word.isdecimal() and int(word) < count for word in words):
            raise ValueError
        return list(dict.fromkeys(words))

    ids = _until("Which GPUs, such as 0,1? ", read, f"type numbers below {count}, such as 0,1")
    kind = {"distributed_type": "MULTI_GPU"} if len(ids) > 1 else {}
    return _one_process(False) | {"gpu_ids": ",".join(ids), "num_processes": len(ids)} | kind


def _on_many_cores(machine: Machine) -> _Values:
    count = _ask_number("num_processes", "How many processes on this machine?", machine.cores)
    kind = "MULTI_CPU" if count > 1 else "NO"
    return _one_process(use_cpu=True) | {"distributed_type": kind, "num_processes": count}


def _leave_to_slurm(chosen: _Values) -> _Values:
    """Drop the machines, which SLURM sets; count processes per machine."""
    settings = {key: value for key, value in chosen.items() if key != "num_machines"}
    count = settings.pop("num_processes", 1)
    if settings["distributed_type"] == "NO":
        settings.pop("distributed_type")
    return settings | {"nproc_per_node": count}


def _machines(chosen: _Values) -> _Values:
    """Ask for the number of machines, and for their rendezvous."""
    count = _ask_number("num_machines", find("num_machines").question, 1)
    if count == 1:
        return {}
    rank = _until(
        f"Which of them is this, from 0 (the first) to {count - 1}? [0] ",
        lambda text: _at_most(find("machine_rank").parse(text or "0"), count - 1),
        f"type a number from 0 to {count - 1}",
    )
    address = _ask_word("main_process_ip", "type an address")
    port = _ask_number("main_process_port", find("main_process_port").question, 29500)
    several = {"NO": "MULTI_CPU" if chosen.get("use_cpu") else "MULTI_GPU"}
    kind = chosen["distributed_type"]
    return {
        "distributed_type": several.get(kind, kind),
        "num_machines": count,
        "num_processes": count * chosen.get("num_processes", 1),
        "machine_rank": rank,
        "main_process_ip": address,
        "main_process_port": port,
        "rdzv_backend": "static",
    }


def _at_most(number: int, most: int) -> int:
    if number > most:
        raise ValueError
    return number


def _word(text: str) -> str:
    if not text or len(text.split()) != 1:
        raise ValueError
    return text


def _precision(chosen: Mapping[str, Any], machine: Machine) -> str:
    words = ("no", "bf16") if chosen.get("use_cpu") else find("mixed_precision").choices
    words = tuple(word for word in words if word != "fp8" or machine.fp8)
    texts = {"no": "no: float32 throughout", "fp8": "fp8: on GPUs that have it, with torchao"}
    return _pick(find("mixed_precision").question, {texts.get(word, word): word for word in words})


# --- FSDP ------------------------------------------------------------------------------------


def _several(chosen: Mapping[str, Any]) -> bool:
    """Return whether several processes train, which may share the weights of a model."""
    several = max(chosen.get("num_processes", 1), chosen.get("nproc_per_node", 1)) > 1
    return several and chosen.get("distributed_type") != "XLA"


def _ask_sharding(chosen: Mapping[str, Any], machine: Machine) -> _Values:
    """Ask whether and how models are sharded."""
    if not yes_or_no("Shard models over the processes (FSDP), to save memory?"):
        return (_ask_deepspeed() if machine.deepspeed else {}) or _cut_layers(chosen)
    block: _Values = {"fsdp_version": 2}
    block["fsdp_reshard_after_forward"] = _ask_flag(
        "fsdp_config.fsdp_reshard_after_forward", default=True
    )
    block["fsdp_offload_params"] = _ask_flag("fsdp_config.fsdp_offload_params")
    block |= _pick(find("fsdp_config.fsdp_auto_wrap_policy").question, _UNITS)()
    block["fsdp_activation_checkpointing"] = _ask_flag("fsdp_config.fsdp_activation_checkpointing")
    return {"distributed_type": "FSDP", "fsdp_config": block, **_ask_mesh(chosen)}


def _has_own_gpu(chosen: Mapping[str, Any], machine: Machine) -> bool:
    """Return whether one process trains on a GPU that DeepSpeed supports."""
    single = chosen.get("distributed_type", "NO") == "NO" and not chosen.get("use_cpu")
    return single and machine.gpu_kind != "mps"


def _ask_deepspeed() -> _Values:
    """Ask whether and how DeepSpeed trains models; empty if it does not."""
    if not yes_or_no("Train with DeepSpeed (ZeRO), to save memory?"):
        return {}
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": _zero()}


def _zero() -> _Values:
    if _ask_flag("deepspeed_config.deepspeed_config_file"):
        return {"deepspeed_config_file": _until("Its path? ", _file_path, "type a file's path")}
    stages = find("deepspeed_config.zero_stage")
    stage = _ask_number(stages.path, stages.question, stages.default)
    block: _Values = {"zero_stage": stage}
    if stage:
        block |= _ask_offload("optimizer", stage)
    if stage == 3:
        block |= _ask_offload("param", stage)
        block["zero3_init_flag"] = _ask_flag("deepspeed_config.zero3_init_flag", default=True)
    norm = _until(
        f"{find('deepspeed_config.gradient_clipping').question} [as the script does] ",
        lambda text: _positive(text) if text else None,
        "type a number, or nothing",
    )
    return block if norm is None else {**block, "gradient_clipping": norm}


def _ask_offload(part: str, stage: int) -> _Values:
    """Ask where a part of the training state is kept between steps; empty for the device."""
    places = {"on the device": "none", "in host memory": "cpu"}
    if stage == 3:
        places["on an NVMe disk"] = "nvme"
    place = _pick(find(f"deepspeed_config.offload_{part}_device").question, places)
    block: _Values = {} if place == "none" else {f"offload_{part}_device": place}
    if place == "nvme":
        block[f"offload_{part}_nvme_path"] = _ask_word(
            f"deepspeed_config.offload_{part}_nvme_path", "type a path"
        )
    return block


def _file_path(text: str) -> str:
    if not os.path.isfile(os.path.expanduser(text)):
        raise ValueError
    return os.path.expanduser(text)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _classes() -> _Values:
    names = _ask_word("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "type A or A,B")
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": names,
    }


def _sizes() -> _Values:
    least = find("fsdp_config.fsdp_min_num_params")
    count = _ask_number(least.path, least.question, least.default)
    return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": count}


_UNITS: Mapping[str, Callable[[], _Values]] = {
    "the blocks that a model repeats": dict,
    "modules of some classes": _classes,
    "modules of some size": _sizes,
}


def _cut_layers(chosen: Mapping[str, Any]) -> _Values:
    """Ask whether the layers of a model that is not sharded are cut."""
    count = chosen.get("num_processes", 1)
    if count == 1:
        return {}
    if yes_or_no(f"Cut layers over all {count} processes (tensor parallelism, by a plan)?"):
        return _mesh({"tp_size": count})
    return {}


def _ask_mesh(chosen: Mapping[str, Any]) -> _Values:
    """Ask for the mesh of a sharded model, where the number of all processes is known."""
    count, sizes = chosen.get("num_processes", 1), {}
    for axis in ("dp_replicate_size", "tp_size", "cp_size"):
        if count < 4:
            break  # shards beside another axis need at least 2 x 2
        if axis == "cp_size" and chosen.get("use_cpu"):
            continue  # torch's ring attention has no kernel for CPUs
        sizes[axis] = _axis(axis, count)
        count //= sizes[axis]
    if all(size == 1 for size in sizes.values()):
        return {}
    return _mesh(
        {**{axis: size for axis, size in sizes.items() if size > 1}, "dp_shard_size": count}
    )


def _axis(axis: str, count: int) -> int:
    """Ask for the size of an axis that leaves at least two shards of ``count`` processes."""
    option = find(f"parallelism_config.parallelism_config_{axis}")

    def read(text: str) -> int:
        number = int(option.parse(text or "1"))
        if count % number or number == count:
            raise ValueError
        return number

    hint = f"type a number that divides {count}, and is smaller"
    return _until(f"{option.question} [1] ", read, hint)


def _mesh(sizes: Mapping[str, int]) -> _Values:
    return {"parallelism_config": {f"parallelism_config_{k}": v for k, v in sizes.items()}}


# --- asking ----------------------------------------------------------------------------------


def _ask_flag(path: str, default: bool = False) -> bool:
    """Ask the question of a setting that is yes or no."""
    return yes_or_no(find(path).question, default)


def _ask_word(path: str, hint: str) -> str:
    """Ask for the value of a setting that is one word."""
    return _until(f"{find(path).question} ", _word, hint)


def _ask_number(name: str, question: str, default: int) -> int:
    """Ask for the value of a setting; its option validates the answer."""
    option = find(name)
    return _until(f"{question} [{default}] ", lambda text: int(option.parse(text or str(default))))


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
        unused = (
            f"; no effect: {idle[option.path]}; {_purpose(option)}" if option.path in idle else ""
        )
        yield (
            option.path,
            _format(redacted(resolved.value(option.path), option.path)),
            f"{origin}{unused}",
        )
    for key, reason in resolved.gone.items():
        yield key, "...", f"{resolved.file}; no effect: {reason}"


def _purpose(option: Option) -> str:
    """Return what a setting would do if it had an effect."""
    return f"it would {option.help}" if option.kind == "bool" else f"it would set: {option.help}"


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
            "purpose": _purpose(option) if option.path in idle else None,
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
