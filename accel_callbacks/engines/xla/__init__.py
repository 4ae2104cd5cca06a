"""XLA devices, such as TPUs: one process computes on all of them (SPMD).

`device.py` finds out whether this process computes through torch_xla, and gives torch its module;
`strategy.py` cuts batches and, with the options of FSDP, parameters by annotations, from which the
compiler places data and adds the collectives; `states.py` copies states to the host.

Operations are queued until a sync runs them as one graph: between two batches, after an optimizer's
step, and before a state is read. Reading a value on the host in a step is one more sync, and a
batch of another shape one more compilation. Parameters stay the objects that they are: optimizers
of the user hold them.
"""
