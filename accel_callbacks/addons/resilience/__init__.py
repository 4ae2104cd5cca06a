"""What keeps a run alive: its state in host memory, and the exit between two steps.

``Checkpoint(memory_every_n_steps=)`` enters by ``memory_snapshots``, which keeps the newest state
in host memory for the next attempt of a launch, and copies it between machines by ``peer_copies``;
``memory_folder`` is the part of the launch that outlives the processes. ``Preemption`` enters by
``boundary_exit``, which saves the last step boundary where a run is left in an evaluation or as it
waits. Snapshots end with the launch: nothing that a user is to keep may be in them alone.
"""
