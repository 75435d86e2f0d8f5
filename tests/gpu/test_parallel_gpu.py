"""Tensor parallelism over NCCL: the cases of the gloo tests, on two GPUs, and with FSDP2 on four."""

import pytest

torch = pytest.importorskip("torch")

from support.torch_ranks import run  # noqa: E402


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "MXFP8", "NVFP4"])
def test_training_is_that_of_one_process(shape, name):
    run(shape, "dist/test_torch_parallel_fsdp.py::trains_as_one_process", on="cuda", name=name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_what_is_gathered_is_the_whole(name, style, overlap):
    from qshard.torch_bridge import tensor_parallel

    how = {"style": getattr(tensor_parallel, style), "batch": 1, "overlap": overlap}
    run(2, "dist/test_torch_sequence.py::codes_of", on="cuda", name=name, **how)


@pytest.mark.parametrize(("rows", "dim"), [((1, 256), 1), ((2, 384), 1), ((512,), 0)], ids=str)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_overlapped_is_the_same(name, rows, dim):
    """By copy engines, which gloo has none of."""
    run(2, "dist/test_torch_sequence.py::overlaps", on="cuda", name=name, rows=rows, dim=dim)


@pytest.mark.parametrize("name", ["CurrentScaling", "NVFP4"])
def test_training_is_that_of_pytorchs_styles(name):
    run(2, "dist/test_torch_sequence.py::trains", on="cuda", name=name, overlap=True)
