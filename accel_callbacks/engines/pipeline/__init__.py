"""Pipeline parallelism: each rank has some layers, and micro-batches pass from rank to rank.

`prepare` and `prepare_pipeline` enter by `PipelineParallel.cut` in `strategy.py`, which keeps the
layers of this rank and returns a `PipelinedModel`. Its call goes through `runner.py`: a schedule of
`torch.distributed.pipelining` runs forward and backward of all micro-batches in it, and backward of
the loss only hands the gradients out. `stages.py` runs a model's own forward with the layers of one
stage; `rehearsal.py` runs it without values, once for each shape of batch, to find what passes from
stage to stage. `gradients.py` and `states.py` have what differs in a step and in checkpoints: a
parameter is on the ranks of one stage, and on the meta device elsewhere.

All ranks of a pipeline call the model with the same batch, also in an evaluation. Nothing may wrap
the schedules of torch or read their private order, and nothing between the layers of a model may
depend on values that they return: other stages compute it from zeros.
"""
