"""Parallelism other than FSDP2 and ZeRO: tensor and sequence parallel shards, process groups, DTensors, FSDP1.

Also the scaling state of a model, which ranks merge and load into DTensors.

The styles for `parallelize_module` are public, in `qshard.torch_bridge.tensor_parallel`.
"""
