"""JAX primitives of the ops in `ffi/ops.def`: binding, custom partitioning, scheduling, and argument checks.

Shard specs, quantized arrays and layers are in the packages beside this one.
"""
