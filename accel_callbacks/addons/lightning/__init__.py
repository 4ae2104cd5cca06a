"""Lightning: its callbacks in our loop, ours in its Trainer.

``from_lightning`` wraps one of its callbacks: the run stands before it as a Trainer (``trainer``,
``trainer_parts``), the model as a LightningModule (``module``), a checkpoint under Lightning's keys
(``checkpoint``). ``to_lightning`` wraps one of ours for ``pl.Trainer``. ``packages`` finds which of
the two packages a callback is of; objects of the two must not meet.

Lightning is imported where a callback of it is wrapped, never before. A name that a plain loop does
not have raises an error which says it (`Missing`): no facade may answer with a guess.
"""
