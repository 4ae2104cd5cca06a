"""Sharded data parallelism (FSDP2, HSDP): each rank has a shard of every parameter.

`strategy.py` shards: it chooses units (`units.py`), lets tensor parallelism cut layers first, and
calls `fully_shard` from the inside out. `gradients.py` has what differs in a step. `groups.py`
looks into FSDP's parameter groups, to which torch has no public way; `unit_agreement.py` compares
what ranks gather and reduce; `sharded_calls.py` explains calls that FSDP does not expect.

Two states look like others. After a forward without a backward, the model itself and its last
unit stay gathered: `model.parameters()` are other objects than those of the optimizer until
`FSDP.unwrap` frees them. And inside of a window gradients may be where `parameter.grad` does not
show them: whole ones of a rank, or shards that the replicas have not added up. Ask
`strategy.gradients`, and nothing else, whether there are some.

No unit may be called on a part of the ranks, and nobody replaces a parameter that is sharded.
"""
