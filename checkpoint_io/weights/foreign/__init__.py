"""Readers of weights in files that torch and DeepSpeed have written, which hold pickles.

`torch_pickle` reads files of torch.save by torch's restricted unpickler, `dcp` folders of
torch.distributed.checkpoint, `deepspeed` those of ZeRO. The last two find their tensors by pickles
that `inert_pickle` turns into plain values and records; `torch_archive` locates the bytes.

A file may be anyone's. Nothing that a pickle names is imported or called, but for what torch's
restricted unpickler allows. What it claims is compared with the sizes of the files before memory is
reserved, and none of its values is printed, hashed or traversed before its type is known.
"""
