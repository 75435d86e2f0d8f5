"""Parallelism beside FSDP2: shards of tensor and sequence parallelism, process groups, DTensors.

The styles for `parallelize_module` are public: `qshard.torch_bridge.tensor_parallel`.
"""
