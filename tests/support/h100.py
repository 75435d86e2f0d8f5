"""Virtual H100s as compilation targets for JAX: call `prepare` before importing JAX, then `devices`.

Needs JAX's CUDA plugin (half a gigabyte), but not installed beside JAX. Nothing runs, so CPU handlers can stand in for
CUDA handlers.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "build" / "jax_cuda"
"""Target folder of `make h100`."""


def is_there() -> bool:
    """Return whether there is a plugin for the installed JAX."""
    return _is_installed() or any(PLUGIN.glob(f"*_plugin-{version('jaxlib')}.dist-info"))


def _is_installed() -> bool:
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def prepare() -> None:
    """Set the environment that JAX reads at import."""
    if not _is_installed():
        sys.path.append(str(PLUGIN))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # XLA picks its own GEMMs or cuBLASLt's by running both; without a GPU it would pick its own.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def devices(count: int = 8) -> Any:
    """Return an array of `count` devices, eight per host."""
    import numpy as np
    from jax.experimental import topologies

    from qshard import _ffi
    from qshard.jax import ops

    if not _ffi.cuda_built:
        ops.register_handlers("CUDA", _ffi.handlers("cpu"))
    topology = f"1x{-(-count // 8)}x{min(count, 8)}"
    found = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=topology).devices
    return np.array(found)


# Device description for XLA. It emits FP8 matmuls only if the CUDA versions are known.
_H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32  clock_rate_ghz: 1.98
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  device_memory_size: 84942979072  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
