"""The processes of a run: how they meet, watch each other, fail together and part.

``resolve_topology`` is the way in, once an Accelerator: it finds rank and device (``topology``),
joins the group (``process_group``), and starts the heartbeat and what follows from it
(``heartbeat``, ``abort``). The loop enters by ``share_failure``, which raises an error of one rank
on all (``failures``), and by ``Votes``, which make ranks act at the same step (``votes``). Scripts
enter by the decorators and contexts of ``process_control``, and by ``set_seed`` (``rng``).

All ranks pass the same sync points and collectives in the same order. So none may begin one under a
condition that is not known to be the same on all, swallow an error between two of them, or wait for
another rank without a limit: the timeout of the group bounds each wait. What a heartbeat finds is
raised on the thread that trains; its own thread only notes it, and aborts.
"""
