"""Data parallelism: each rank has the whole model, and backward averages gradients.

`strategy.py` wraps a model in the class of `forward_methods.py`: torch's DistributedDataParallel,
with the attributes and marked methods of the model inside. `gradients.py` has what differs in a
step: windows, uneven inputs (`join.py`), models that ranks train apart. `reduction.py` names the
gradients that a wrapper still waits for before another collective begins,
`communication_hooks.py` compresses them, `states.py` says which parameters ranks keep equal.

All ranks construct the same wrappers in the same order, and each backward reaches the same
parameters, unless `find_unused_parameters` is set. No rank may begin a collective of its own
between the first gradient of a backward and the last: it would be paired with a bucket of the
others.
"""
