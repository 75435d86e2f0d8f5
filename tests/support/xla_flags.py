"""Options with which programs that tests start compile as fast as the tests do (see conftest.py)."""

import os


def xla_flags(devices: int | None = None) -> str:
    """Return XLA_FLAGS of this process with another number of host devices, or without a number."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return " ".join([*flags, *([f"--xla_force_host_platform_device_count={devices}"] if devices else [])])
