"""Expert parallelism over NCCL on two GPUs: the cases of the gloo tests. Sums have another order."""

import pytest

torch = pytest.importorskip("torch")

from qshard.formats import Usage  # noqa: E402
from qshard.recipes import Role  # noqa: E402
from support.torch_ranks import run  # noqa: E402

FILE = "dist/test_torch_expert_parallel.py"
ERROR = 2**-6
"""Part of the norm. Products have other sums, rounded to bfloat16. If the amax of h moves by 2^-8, so does the scale of
an expert, and one code in 20 of h moves to a neighbour, which is off by 2^-4 to 2^-3."""


@pytest.mark.parametrize("load", ["uneven", "empty"])
@pytest.mark.parametrize("name", ["CurrentScaling", "E4M3", "BlockScaling", "MXFP8", "NVFP4", "none"])
def test_one_device(name, load):
    run(2, f"{FILE}::is_one_device", on="cuda", name=name, load=load, dtype="bfloat16", error=ERROR)


@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRADIENT], ids=str)
@pytest.mark.parametrize("name", ["CurrentScaling", "E4M3"])
def test_codes(name, role):
    run(2, f"{FILE}::codes_are_those_of_one_device", on="cuda", name=name, role=role)


@pytest.mark.parametrize("name", ["BlockScaling", "MXFP8", "MXFP4"])
def test_codes_of_blocks(name):
    given = {"name": name, "role": Role.GRADIENT, "usage": Usage.ROWWISE}
    run(2, f"{FILE}::codes_are_those_of_one_device", on="cuda", **given)


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_with_fsdp2(name):
    run((2, 2), f"{FILE}::trains_with_fsdp2", on="cuda", name=name)
