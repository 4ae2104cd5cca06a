"""Saves in the background, while training continues.

`background.BackgroundSaver` is the entry: it copies the tensors of a job into host memory, and a
thread of its own writes and commits the job. `staging` has the buffers for those copies.

The tensors are copied before the call returns, so training may change them at once. The thread has
a process group of its own: collectives of one group must come in the same order on all ranks. The
process ends only after a pending save has. Never let the thread keep a reference to a job that has
run, which would keep its tensors alive, and expect a fork at any time: a child has no thread and no
pending save.
"""
