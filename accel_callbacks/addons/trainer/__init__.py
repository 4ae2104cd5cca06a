"""Our callbacks and checkpoints in the Trainer of transformers.

``to_transformers`` wraps a callback, a tracker or a `Checkpoint` (``hosted_checkpoint``) as a
TrainerCallback. ``trainer_folder`` tells which checkpoints of an ``output_dir`` are whole, and
``trainer_mirror`` copies them to a store and back.

The Trainer decides what a checkpoint holds, and writes it: at most a folder with the state of our
callback is added. A copy is committed by its manifest, and what is fetched is verified before it
gets a checkpoint's name.
"""
