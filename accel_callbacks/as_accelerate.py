"""Run a script that imports accelerate on this library.

Usage: python -m accel_callbacks.as_accelerate SCRIPT [ARGUMENT ...]
       python -m accel_callbacks.as_accelerate -m MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import sys

from accel_callbacks.launch.worker import run_program

__all__ = ["main"]


def main() -> None:
    """Run the script or module that the command line names as ``__main__``."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        print((__doc__ or "").strip())
        sys.exit(0 if words and words[0] != "-m" else 2)
    from accel_callbacks.compat import install

    install()
    kind = "module" if words[0] == "-m" else "script"
    sys.argv[:] = words[1:] if kind == "module" else words
    run_program(kind, sys.argv[0])


if __name__ == "__main__":
    main()
