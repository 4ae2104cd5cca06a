"""Stand-ins for the CUDA libraries that a build of torch wants, for machines without a GPU.

    python scripts/cuda_stubs.py FOLDER

The torch that torch_xla goes with is built for CUDA, whose packages are several GB. To import it
and to compute on the CPU, libraries with the right names and versioned symbols are enough: put
FOLDER into LD_LIBRARY_PATH. Each function answers "no device". Needs `cc` and `objdump`.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE


def main(folder: Path) -> None:
    parts = Path(sysconfig.get_path("purelib"), "torch", "lib")
    shipped = {path.name for path in parts.iterdir()}
    wanted: dict[str, set[str]] = {}
    functions: dict[str, set[str]] = {}
    for library in [*parts.glob("*.so*"), *parts.parent.glob("_C*.so")]:
        shown = subprocess.check_output(["objdump", "-pT", str(library)], text=True)
        for name in re.findall(r"NEEDED +(lib(?:cu|nv|nccl)\S+)", shown):
            wanted.setdefault(name, set())
        for name, versions in re.findall(r"required from (\S+):\n((?:    .+\n)+)", shown):
            wanted.setdefault(name, set()).update(re.findall(r"(\S+)\n", versions))
        for version, function in re.findall(r"\*UND\*\s\S+ +(?:\((\S+)\)|Base)? +(\S+)\n", shown):
            functions.setdefault(version, set()).add(function)
    unversioned = {one for one in functions.get("", ()) if re.match("nv|nccl|cu", one)}
    folder.mkdir(parents=True, exist_ok=True)
    made = [name for name in wanted if re.match("lib(cu|nv|nccl)", name) and name not in shipped]
    for name in made:
        owned = {version: functions.get(version, set()) for version in sorted(wanted[name])}
        prefix = re.match("lib([a-z]+)", name)[1]
        owned = owned or {"": {one for one in unversioned if one.lower().startswith(prefix)}}
        source, versions = folder / "stub.c", folder / "stub.versions"
        source.write_text(
            "".join(
                f"int {function}(void) {{ return {_NO_DEVICE}; }}\n"
                for function in sorted(set().union(*owned.values()))
            )
        )
        versions.write_text(
            "".join(
                f"{version} {{ {''.join(f'{one}; ' for one in sorted(own))}}};\n"
                for version, own in owned.items()
            )
        )
        options = ["-w", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}"]
        options += [] if "" in owned else [f"-Wl,--version-script={versions}"]
        subprocess.check_call(["cc", "-shared", *options, str(source), "-o", str(folder / name)])
    print(f"{len(made)} stand-ins: {' '.join(sorted(made))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
