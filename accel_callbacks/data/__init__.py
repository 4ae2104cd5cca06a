"""From a torch DataLoader to a prepared one: which rank reads what, and where a resume goes on.

``prepare_data_loader`` and ``Accelerator.prepare`` enter by ``prepare.py``, which picks a source
for the dataset: the shares of a map-style one (``shard.py``), a stream that each rank reads whole
(``stream.py``), or one that is sharded at its source (``sharded_stream.py``). The loader
(``loader.py``) counts the position in global samples, so that a resume may have another number of
ranks; ``dispatch.py`` is the loader that rank 0 reads for all.

The order of an epoch is that of the user's sampler: it is drawn as a plain loop draws it, and a
checkpoint has what draws it again (``order.py``). Only with
``seeded_order``, a ``data_seed`` or ``use_seedable_sampler`` is it a function of seed and epoch. So
nothing in this room may draw from a generator of the program that torch's loader would not draw
from at that moment, nor read a stream ahead of the batch that was asked for.
"""
