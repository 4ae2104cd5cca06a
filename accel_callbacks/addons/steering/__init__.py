"""Commands to a run that goes on: ``save``, ``evaluate``, ``stop`` and ``set``.

``accel ctl`` enters by ``living_run``, which finds the run of a folder that lives, and ``send``.
The ``Control`` callback of the run enters by ``Mailbox``. Commands travel as files of one folder,
which only the user of the run may enter: never read or write there before ``require_private`` has
passed, and never act on a command that names another holder of the run's lease. What a command does
is the business of ``Control``, which lets all ranks agree first.
"""
