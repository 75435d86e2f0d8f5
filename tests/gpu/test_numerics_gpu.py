"""`qshard.numerics` of tensors on a GPU: the numbers of the same values on the host, also in hooks of a step."""

import pytest

torch = pytest.importorskip("torch")

from qshard.numerics import compare, stats  # noqa: E402
from qshard.recipes import Role  # noqa: E402
from qshard.torch_bridge import convert, numerics_of  # noqa: E402
from support import torch_ranks  # noqa: E402
from support.awkward import TAME, awkward_values  # noqa: E402
from support.formats import RECIPES  # noqa: E402
from support.stats import assert_same_stats  # noqa: E402


def test_tensors_on_a_gpu():
    values = awkward_values((128, 256), 1, kinds=TAME)
    there = torch.from_numpy(values).cuda()
    for s in compare(there):
        assert_same_stats(s, stats(values, s.format))
    half = there.bfloat16()
    assert_same_stats(stats(half, "NVFP4"), stats(half.cpu(), "NVFP4"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_on_a_gpu(name):
    """Codes and scales have the bits of the CPU, so counts are equal, and sums to float32."""
    rows = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = convert(torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False)), RECIPES[name]).to(device)
        if model[0].seed is not None:
            model[0].seed.fill_(7)
        x = torch.from_numpy(awkward_values((128, 128), 2, kinds=("normal", "outlier"))).to(device)
        dy = torch.from_numpy(awkward_values((128, 256), 3, kinds=("normal",))).to(device)
        with numerics_of(model) as seen:
            model(x).backward(dy)
        rows.append(seen.stats())
    for role in Role:
        host, there = (each.of("0", role) for each in rows)
        for field in ("elements", "amax", "zeros_made", "subnormal", "saturated", "scale_low", "scale_high"):
            assert getattr(host, field) == getattr(there, field), (role, field)
        assert there.sqnr_db == pytest.approx(host.sqnr_db, rel=1e-5)


@pytest.mark.parametrize(
    ("file", "case", "world"),
    [
        ("test_torch_numerics.py", "test_dtensors", 2),
        ("test_torch_numerics.py", "test_weights_of_a_sharded_model", 2),
        ("test_torch_watch.py", "test_fsdp2", 2),
        ("test_torch_watch.py", "test_tensor_parallelism", 2),
    ],
)
def test_ranks_on_gpus(file, case, world):
    torch_ranks.run(world, f"dist/{file}::{case}", on="cuda")
