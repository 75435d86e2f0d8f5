"""Tensor parallelism over NCCL: the cases of the gloo tests, on two GPUs, and with FSDP2 on four."""

import pytest

torch = pytest.importorskip("torch")

from support.torch_ranks import run  # noqa: E402


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "MXFP8", "NVFP4"])
def test_training_is_that_of_one_process(shape, name):
    world = torch.Size(shape).numel()
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    run(shape, "dist/test_torch_parallel_fsdp.py::trains_as_one_process", on="cuda", name=name)
