"""Grouped products on a GPU of a list of matrices, each in memory of its own, as FSDP2 gathers the codes of experts."""

import pytest

torch = pytest.importorskip("torch")

from qshard import gemm_dispatch  # noqa: E402
from qshard.formats import FP8_E4M3, FP8_E5M2, FP8_1x128, FP8_128x128, Usage  # noqa: E402
from qshard.recipes import NAMED  # noqa: E402
from qshard.torch_bridge import grouped_linear, quantize  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from support.expert_codes import codes, numbers, ranges, stops_of  # noqa: E402
from support.gemm_bounds import assert_is_product_of_codes  # noqa: E402

PAIRS = [(FP8_E4M3, FP8_E4M3), (FP8_E5M2, FP8_E4M3), (FP8_1x128, FP8_128x128), (FP8_1x128, FP8_1x128)]
M_GROUPED = [
    # Rows of each expert, rows after the last stop, N, K.
    ((16,), 0, 16, 128),
    ((48, 0, 16, 256, 0), 32, 144, 272),
    ((128, 384, 0, 256), 128, 384, 1024),
    ((0, 0), 64, 128, 256),
    ((0, 16) * 300, 16, 128, 128),  # more addresses than the parameters of an ordinary launch have
]


@pytest.fixture(scope="module")
def gpu():
    found = gemm_dispatch.gpu_of(torch.cuda.get_device_capability())
    if not gemm_dispatch.grouped_runs_on("tensors", found):
        pytest.skip(f"grouped products run on Hopper with cuBLASLt 13.5 or newer, and here is {found}")
    return found


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_rows_times_a_list_of_matrices(pair):
    """Against fp64: each matrix is in memory of its own, in an order that has nothing to do with addresses."""
    for number, (sizes, rest, n, k) in enumerate(M_GROUPED):
        e, m, stops = len(sizes), sum(sizes) + rest, stops_of(sizes)
        a, b = codes((m, k), pair[0], number, e), codes((e, n, k), pair[1], number + 100, e)
        each = {own: b.data[own].clone() for own in reversed(range(e))}
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
        size = gemm_dispatch.grouped_workspace_size(e, (m, n, k), *pair)
        buffers = out, torch.empty(size, dtype=torch.uint8, device="cuda")
        how = gemm_dispatch.grouped_options(*pair, fast=False)
        scales, matrices = (a.data, a.scale_inv, b.scale_inv, stops), [each[own] for own in range(e)]
        if pair[0].block is None:
            ops.gemm_grouped_list(*scales, stops, *buffers, matrices, **how)
        else:
            ops.gemm_grouped_block_list(*scales, *buffers, matrices, b_rows=pair[1].block[0], **how)
        x, y = numbers(a, pair[0], ranges(sizes)), numbers(b, pair[1], range(e))
        for own, rows in enumerate(ranges(sizes)):
            if sizes[own]:
                assert_is_product_of_codes(out[rows], x[rows], y[own])
        assert not out[sum(sizes) :].any()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_a_layer_reads_codes_where_they_are(name):
    """Nothing stacks the codes of a list, and the result is that of one tensor, up to the order of sums."""
    sizes, shape = [48, 0, 144, 16], (256, 384)
    w = torch.randn(len(sizes), *shape, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(sum(sizes), shape[1], device="cuda", dtype=torch.bfloat16).requires_grad_()
    weights = [quantize(one, NAMED[name].weight, usage=Usage.ROWWISE).requires_grad_() for one in w]
    given, dy = torch.tensor(sizes, device="cuda"), torch.randn(sum(sizes), shape[0], device="cuda").bfloat16()
    options = {"record_shapes": True, "acc_events": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        got = torch.autograd.grad(y := grouped_linear(x, weights, given, name), (x, *weights), dy)
    stacked = [str(event.input_shapes[0]) for event in profile.events() if event.name == "aten::cat"]
    assert not any(f"{shape[0]}, {shape[1]}" in shapes for shapes in stacked), stacked
    whole = w.requires_grad_()
    y_whole = grouped_linear(x, whole, given, name, weight_layout="NK")
    dx, dw = torch.autograd.grad(y_whole, (x, whole), dy)
    for a, b in ((y, y_whole), (got[0], dx), (torch.stack(got[1:]), dw)):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-6 * float(b.detach().abs().max()))  # Sums in bfloat16.
