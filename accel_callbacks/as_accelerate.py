"""Run a script that imports accelerate on this library.

Usage: python -m accel_callbacks.as_accelerate SCRIPT [ARGUMENT ...]
       python -m accel_callbacks.as_accelerate -m MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["main"]


def main() -> None:
    """Run the script or module that the command line names as ``__main__``."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help") or words == ["-m"]:
        print((__doc__ or "").strip())
        sys.exit(0 if words and words[0] != "-m" else 2)
    from accel_callbacks.compat import install

    install()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
