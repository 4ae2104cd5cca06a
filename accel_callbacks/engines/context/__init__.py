"""Context and sequence parallelism: each rank has a part of the tokens of every sequence.

Not an engine: a `Sequences` beside the strategy, DDP or FSDP, which `create_strategy` makes by
`sequence_parallelism`. `sequences.py` cuts buffers in `maybe_context_parallel` and replaces torch's
attention by that over the ranks (cp_size); `head_exchange.py` exchanges tokens for heads around
it (sp_size).

Of n tokens in a buffer's dimension of the sequence, a rank has n / ranks, in the order of
`token_order`. Only attention sees the tokens of other ranks, so whatever pools tokens, counts
positions or makes masks by itself is refused. Attention stays replaced until backward has run: it
exchanges keys and values there again.
"""
