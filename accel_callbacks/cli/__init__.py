"""The ``accel`` command: one file per subcommand, listed in `registry.COMMANDS`.

``main.main`` parses the first word, imports the one module that it names, and calls its
``configure(parser)`` and ``run(args)``, which returns the exit code. Importing a command must not
import torch, as ``accel env --short`` does not. A command says what to do in
a ``CommandError``, which is shown in one line, and prints what comes from files or other machines
through ``printable`` only. It computes nothing itself that a script could ask for too: that belongs
into the room that has the data.
"""

from __future__ import annotations

__all__: list[str] = []
