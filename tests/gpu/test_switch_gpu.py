"""`switch_recipe` on GPUs: over NCCL, and one CUDA graph for each recipe."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import qshard.torch_bridge as qt  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.torch_ranks import run  # noqa: E402

WIDTH = 256


@pytest.mark.parametrize("pair", [("NVFP4", "MXFP8"), ("NVFP4", None), ("DelayedScaling", "BlockScaling")])
def test_fsdp2(pair):
    first, then = pair
    run(2, "dist/test_torch_switch.py::test_fsdp2", on="cuda", first=first, then=then)


@pytest.mark.parametrize("how", ["primary", "columns", "policy", "compiled"])
def test_kinds_of_weights(how):
    run(2, "dist/test_torch_switch.py::test_kinds_of_weights", on="cuda", how=how, then="MXFP8")


@pytest.mark.parametrize("then", ["MXFP8", "CurrentScaling", None])
def test_capture_again_after_a_switch(then):
    """A graph keeps the recipe of its capture. A new one has the bits of a model that was converted so."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda().bfloat16()
    model = qt.convert(copy.deepcopy(plain), "BlockScaling")
    other = plain if then is None else qt.convert(plain, then)
    x = torch.randn(128, WIDTH, device="cuda", dtype=torch.bfloat16)
    want = [each(x).detach().clone() for each in (model, other)]
    first, y = capture(lambda: model(x), warm_up=1)
    qt.switch_recipe(model, then)
    second, z = capture(lambda: model(x), warm_up=1)
    for graph, made, expected in ((second, z, want[1]), (first, y, want[0])):
        graph.replay()
        assert torch.equal(made, expected)
