"""The questions of ``accel config``: only those that matter on the machine at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accel_callbacks.launch.config_file import PROJECT_FILE, default_path
from accel_callbacks.launch.machine import Machine
from accel_callbacks.launch.settings import find

_Values = dict[str, Any]
_Answer = TypeVar("_Answer")


def defaults(machine: Machine, mixed_precision: str | None) -> _Values:
    """What fits this machine: all of its GPUs, or one process on the CPU."""
    chosen = _on_all_gpus(machine) if machine.gpus else _on_one_core(machine)
    chosen = _left_to_slurm(chosen) if machine.slurm_nodes else chosen
    return _complete(chosen, {"mixed_precision": mixed_precision or "no"})


def answers(machine: Machine, mixed_precision: str | None) -> _Values:
    """Ask, and return the lines of the file; EOFError if the input ends."""
    chosen = _pick("Where does it run?", _places(machine))(machine)
    if machine.slurm_nodes:
        print("Machines, ranks and addresses come from SLURM at each launch.")
        chosen = _left_to_slurm(chosen)
    else:
        chosen |= _machines(chosen)
    training: _Values = {"mixed_precision": mixed_precision or _precision(chosen)}
    if yes_or_no("Compile models with torch.compile?"):
        training["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return _complete(chosen, training)


def place(environment: Mapping[str, str]) -> Path:
    """Ask where the file goes."""
    project, own = Path.cwd() / PROJECT_FILE, default_path(environment)
    texts = {f"scripts in this folder: {project}": project, f"all that you launch: {own}": own}
    return _pick("What is the file for?", texts)


def yes_or_no(question: str) -> bool:
    """Ask for yes or no; no if nothing is typed."""
    words = {"": False, "n": False, "no": False, "y": True, "yes": True}
    return _until(f"{question} [y/N] ", lambda text: words[text.lower()], "type y or n")


def _complete(chosen: _Values, training: _Values) -> _Values:
    return {"compute_environment": "LOCAL_MACHINE", **chosen, **training}


# --- where it runs ---------------------------------------------------------------------------


def _places(machine: Machine) -> dict[str, Callable[[Machine], _Values]]:
    """What this machine offers, the best first."""
    count = len(machine.gpus)
    found: dict[str, Callable[[Machine], _Values]] = {}
    if machine.tpu and machine.torch_xla:
        found["the TPU"] = lambda _: {"distributed_type": "XLA", "use_cpu": False}
    if count > 1:
        found[f"all {count} GPUs, a process each"] = _on_all_gpus
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):  # whose numbers would not be these
            found["some of the GPUs"] = _on_some_gpus
    if count:
        found["one GPU"] = lambda _: _one_process(use_cpu=False)
    found["one process on the CPU"] = _on_one_core
    found["several processes on the CPU"] = _on_many_cores
    return found


def _one_process(use_cpu: bool) -> _Values:
    return {"distributed_type": "NO", "num_machines": 1, "num_processes": 1, "use_cpu": use_cpu}


def _on_one_core(machine: Machine) -> _Values:
    return _one_process(use_cpu=True)


def _on_all_gpus(machine: Machine) -> _Values:
    count = len(machine.gpus)
    if count == 1 or machine.gpu_kind == "mps":
        return _one_process(use_cpu=False)
    return _one_process(use_cpu=False) | {"distributed_type": "MULTI_GPU", "num_processes": count}


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
    count = _ask("num_processes", "How many processes on this machine?", machine.cores)
    kind = "MULTI_CPU" if count > 1 else "NO"
    return _one_process(use_cpu=True) | {"distributed_type": kind, "num_processes": count}


def _left_to_slurm(chosen: _Values) -> _Values:
    """The machines are those of the job, so a file counts the processes of each."""
    kept = {key: value for key, value in chosen.items() if key not in ("num_machines",)}
    count = kept.pop("num_processes", 1)
    if kept["distributed_type"] == "NO":
        kept.pop("distributed_type")
    return kept | {"nproc_per_node": count}


def _machines(chosen: _Values) -> _Values:
    """Ask for other machines, and how this one finds them."""
    count = _ask("num_machines", "How many machines take part?", 1)
    if count == 1:
        return {}
    rank = _until(
        f"Which of them is this, from 0 (the first) to {count - 1}? [0] ",
        lambda text: _at_most(find("machine_rank").parse(text or "0"), count - 1),
        f"type a number from 0 to {count - 1}",
    )
    address = _until("Address of machine 0, seen from the others? ", _word, "type an address")
    port = _ask("main_process_port", "A free port on it?", 29500)
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


def _precision(chosen: Mapping[str, Any]) -> str:
    words = ("no", "bf16") if chosen.get("use_cpu") else find("mixed_precision").choices
    texts = {"no": "no: float32 throughout", "fp8": "fp8: on GPUs that have it, with torchao"}
    return _pick("Mixed precision?", {texts.get(word, word): word for word in words})


# --- asking ----------------------------------------------------------------------------------


def _ask(name: str, question: str, default: int) -> int:
    """Ask for the value of a setting; the table of settings knows what it may be."""
    one = find(name)
    return _until(f"{question} [{default}] ", lambda text: int(one.parse(text or str(default))))


def _pick(question: str, choices: Mapping[str, _Answer]) -> _Answer:
    """Show numbered choices and return what stands for the one taken, the first by default."""
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
    """Ask again until the answer can be read."""
    while True:
        try:
            return read(input(prompt).strip())
        except (ValueError, KeyError) as error:
            print(f"  {hint or error}")
