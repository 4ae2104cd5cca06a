"""Models: built without memory, loaded, compiled, checkpointed in activations, and sized.

``prepare`` enters by ``compile.compile_model``. Engines that shard enter by
``initial_weights.InitialWeights``, which gives each rank its part of the weights of rank 0, and by
``absent_weights.absent_weights``, which knows the parameters that have memory and no values yet.
Scripts enter by ``init_empty_weights``, ``load_checkpoint_in_model``, ``initialize_weights`` and
``apply_activation_checkpointing``; ``accel estimate-memory`` by ``memory_estimate``. ``offload/``
places models that are larger than memory.

A model stays the object that the script has, with its parameters and their names: what is compiled
or hooked goes into attributes of its modules. Weights without values must never be computed with
(an error on all ranks), and no rank is sent more of a model than its part and a block at a time.
"""
