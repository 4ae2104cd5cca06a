"""The training loop: passes over loaders, gradient windows, optimizer steps, and the run around.

A script enters here by what it calls anyway: a prepared loader is iterated by ``Passes.iterate``,
``run.epochs`` by ``Passes.epochs``, ``accel.accumulate`` opens a ``GradientWindow``,
``accel.backward`` is ``StepEngine.backward``, and ``accel.run`` is a ``RunContext``. All of them
share one ``Loop``, which fires the hooks and holds three records: ``position`` (passes, epochs,
evaluations), ``step`` (the optimizer step under way) and ``flags`` (what has begun of a run).

Never fire a hook, save or wait for other ranks while an error unwinds: another rank may be gone.
Never call a collective inside of a gradient window or of ``join_uneven_inputs``, where ranks do not
come equally often. Add nothing to the path of a batch or a step that is not counted by
``benchmarks/counts.py``.
"""
