"""From a bare clone to a trained model: ``python scripts/demo.py [options of examples/digits.py]``.

Makes .venv first, on Linux, macOS and Windows alike; any Python from 3.10 on will do.
"""

from __future__ import annotations

import subprocess
import sys

from environment import PYTHON, ROOT, fail, say, set_up


def main() -> None:
    words = sys.argv[1:]
    set_up("examples")
    say(" ".join(["run examples/digits.py", *words]))
    code = subprocess.call([str(PYTHON), "examples/digits.py", *words], cwd=ROOT)
    if code:
        fail(
            f"examples/digits.py exited with code {code}",
            "its own message is above; scripts/demo --help lists its options",
        )
    say("done")


if __name__ == "__main__":
    main()
