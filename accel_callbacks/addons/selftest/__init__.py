"""The checks of an installation: small trainings whose results are known, on the launched ranks.

``accel test`` enters by ``__main__``, which it launches as it would launch a script; a program may
enter by ``runner.run_checks`` with some of ``checks.CHECKS``. All ranks run each check together and
get the same outcome, so a check must reach its last collective on every rank: it collects problems
in ``Expectations`` and raises ``Failed`` after that, never before. A check compares with plain
torch, with arithmetic, or with a training that was not interrupted. What it writes is in a folder
of its own, which it removes.
"""
