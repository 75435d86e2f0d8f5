"""ZeRO over NCCL: the cases of the gloo tests."""

import pytest

torch = pytest.importorskip("torch")

from support.torch_ranks import run  # noqa: E402

CASES = [
    ("same_bits", {"name": "NVFP4"}),
    ("same_bits", {"name": "DelayedScaling", "dtype": "bfloat16"}),
    ("same_bits", {"name": "BlockScaling"}),
    ("test_units", {}),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("case", "arguments"), CASES)
def test_zero_over_nccl(case, arguments, world):
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    run(world, f"dist/test_torch_zero.py::{case}", on="cuda", **arguments)
