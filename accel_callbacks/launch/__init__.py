"""Launch processes: settings, config files, the plan, and the launchers that carry it out.

``accel launch`` enters in this order: ``resolve.resolve_settings`` merges flags, a config file and
variables into one ``LaunchSettings``; ``plan.build_plan`` decides what would run, without torch and
without writes, so that ``--dry_run`` can show it; ``agent.run_agent`` runs it with torch's elastic
launcher, in which ``attempts`` decides on restarts and ``report`` finds the rank that failed first.
Scripts enter by ``notebook.notebook_launcher`` and ``debug_launcher``, which run a function by
``functions.run_function`` and have no agent.

An option is declared once, as a field of ``settings``, with its flags, key, variable and question.
``environment`` alone writes ``os.environ``, and undoes it. Nothing that a plan imports may import
torch: a command would take seconds before it says that a flag is mistyped.
"""

from __future__ import annotations

__all__: list[str] = []
