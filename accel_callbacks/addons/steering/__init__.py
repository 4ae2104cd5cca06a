"""Commands to a run that goes on: ``save``, ``evaluate``, ``stop`` and ``set``.

``accel ctl`` enters by ``send_command``, which appends a line to the file of commands of the run of
a folder that is alive. The ``Control`` callback of the run enters by ``CommandFile``. Only the user
of the run may write to that file: never read or write it but by ``_open_own``. What a command does
is the business of ``Control``, which lets all ranks agree first; the answer is a line of its log.
"""
