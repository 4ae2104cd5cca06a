"""Saving: plan what each rank writes, write it, commit it.

`save.prepare_save` is the entry: it plans a job, for a state that all ranks share and one of each;
`save.save` runs it at once, `async_save` on a thread. `snapshot` and `collect` take the tensors out
of a state, `plan` shares them out among ranks and files, `writer` writes the files of one rank, and
`commit` puts the manifest in place on rank 0.

The order is the guarantee: files under new names, durable on all ranks; then the manifest; then the
files of the checkpoint before it are removed. Never write under a name that a manifest has, never
remove what the current one names. Never raise on one rank between two collectives, or the others
wait in the next one: an error goes along with the next gather.
"""
