"""Tensor parallelism: each rank has a part of every layer that a plan names.

`plan.py` reads, proposes and checks plans, and knows no ranks. `strategy.py` cuts a model by one
(`parallelize`), alone or under FSDP and pipelines; `styles.py` has the styles that torch lacks, and
`cut_dropout.py` gives parts of activations masks of their own.

The ranks of the axis read the same batches and draw the same random numbers; `ReplicaAgreement`
compares them in the first steps. A weight is cut before it is sharded over data, and what is tied
is tied again after it is cut. Nothing may depend on the values of a part of an activation: ranks
would come to different collectives.
"""
