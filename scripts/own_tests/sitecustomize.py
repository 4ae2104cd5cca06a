"""In each process of Accelerate's own tests: this library for it, and its own `test_utils`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accel_callbacks import compat

_SOURCES = "ACCEL_OWN_TESTS"  # the copy of Accelerate's sources

if _SOURCES in os.environ:
    compat.install()
    import accelerate

    package: Any = accelerate
    theirs = Path(os.environ[_SOURCES], "src", "accelerate")
    # Modules that the table of names has come first: of the others, tests have test_utils.
    package.__path__.append(str(theirs))
    package.__file__ = str(theirs / "__init__.py")  # beside which they look for their scripts
