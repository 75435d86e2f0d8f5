"""H100s that are not there, for JAX to compile for: `prepare` before JAX is imported, then `devices`.

It needs JAX's CUDA plugin, half a gigabyte, which need not be installed beside JAX. Nothing is run, so the handlers of
the CPU may stand for those of CUDA.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parents[2] / "build" / "jax_cuda"
"""Where `make h100` puts it."""


def is_there() -> bool:
    """Whether there is a plugin for the JAX that is installed."""
    return _is_installed() or any(PLUGIN.glob(f"*_plugin-{version('jaxlib')}.dist-info"))


def _is_installed() -> bool:
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def prepare() -> None:
    """What JAX reads when it is imported."""
    if not _is_installed():
        sys.path.append(str(PLUGIN))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # XLA chooses between its own GEMMs and cuBLASLt's by running both; without a GPU it would take its own.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def devices(count: int = 8) -> Any:
    """An array of so many, eight to a host."""
    import numpy as np
    from jax.experimental import topologies

    from qshard import _ffi
    from qshard.jax import ops

    if not _ffi.cuda_built:
        ops.register_handlers("CUDA", _ffi.handlers("cpu"))
    topology = f"1x{-(-count // 8)}x{min(count, 8)}"
    found = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=topology).devices
    return np.array(found)


# What XLA asks of a device. It only makes FP8 matmuls where it knows the versions of CUDA.
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
