"""A matrix with one scale, quantized by one op: its bits, and when PyTorch chooses it."""

import re
from pathlib import Path

import pytest
import torch

from qshard._core import quantize_steps
from qshard._core.quantize_steps import MOST_TILES, PATCH, TILE
from qshard.formats import FP8_E4M3, FP8_E5M2, Usage
from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Linear, quantize
from qshard.torch_bridge._ops.bind import ops
from support.torch_graphs import calls_of, compile_and_keep
from support.whole_block import DTYPES, ELEMENTS, RULES, check, whole_block

USAGES = [Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH]
SHAPES = [(1, 1), (1, 8), (1, 513), (513, 1), (5, 7), (128, 128), (129, 136), (257, 300), (1030, 520)]
SEPARATE = ("amax_tensor", "scale_from_amax", "cast_tensor", "cast_transpose")


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_separate_ops(dtype, element):
    check(SHAPES, dtype, element, "cpu", skews=(0, 1))


def test_an_empty_matrix_has_no_block():
    for shape in ((0, 8), (8, 0)):
        x = torch.ones(shape)
        options = whole_block(x, ELEMENTS[0], RULES[0]) | {"block_rows": 8, "block_cols": 8}
        codes, scale_inv, codes_t, scale_inv_t = ops.quantize_square_both(x, **options)
        assert (codes.shape, codes_t.shape) == (shape, shape[::-1])
        assert scale_inv.numel() == scale_inv_t.numel() == 0


@pytest.mark.parametrize(
    ("shape", "block", "outer"),
    [((8, 16), (8, 8), 0), ((8, 16), (4, 16), 0), ((2, 4, 16), (4, 16), 1), ((3, 8, 16), (8, 15), 0)],
)
def test_a_block_must_be_square_or_whole(shape, block, outer):
    options = whole_block(torch.ones(block), ELEMENTS[0], RULES[0])
    if block[0] == block[1]:
        options["block_rows"] -= 1
    wrong = re.escape(f"quantize_square_both: block ({options['block_rows']}x{block[1]}) is not square or the whole")
    with pytest.raises(ValueError, match=wrong):
        ops.quantize_square_both(torch.ones(shape), **options, outer=outer)


def test_each_matrix_of_a_batch_is_a_block():
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    options = whole_block(x[0], ELEMENTS[0], RULES[0])
    made = ops.quantize_square_both(x, **options)
    for i in range(3):
        for got, want in zip(made, ops.quantize_square_both(x[i], **options), strict=True):
            assert torch.equal(got[i], want)


class Recorder:
    """The ops, and the names of the ops that were called."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        def call(*operands, **options):
            self.names.append(name)
            return getattr(ops, name)(*operands, **options)

        return call


@pytest.mark.parametrize("usage", USAGES, ids=str)
@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2.with_options(eps=0.5, pow2=True, nonfinite="nan")], ids=str)
def test_planes_of_one_op(fmt, usage):
    x = torch.randn(48, 40, generator=torch.Generator().manual_seed(1))
    one, several = Recorder(), Recorder()
    got = quantize_steps.quantize(one, x, fmt, usage, is_whole=True)
    want = quantize_steps.quantize(several, x, fmt, usage)
    assert one.names == ["quantize_block" if usage is Usage.ROWWISE else "quantize_square_both"]
    assert set(several.names) < set(SEPARATE)
    assert got.keys() == want.keys()
    for each in want:
        assert torch.equal(got[each].data, want[each].data)
        assert torch.equal(got[each].scale_inv, want[each].scale_inv)
        assert got[each].scale_inv.shape == ()


def test_scales_from_elsewhere_take_separate_ops():
    """Amaxes that ranks reduce, amaxes and scales that are known, stacks, and matrices that are empty or large."""
    x = torch.ones(16, 16)
    amax = ops.amax_tensor(x)
    given = quantize_steps.scales(ops, FP8_E4M3, amax)
    cases = {
        "reduced": (x, {"reduce_max": lambda amax: 2 * amax}),
        "amax": (x, {"amax": amax}),
        "scales": (x, {"given": given}),
        "global_amaxes": (x, {"global_amaxes": [amax]}),
        "stack": (torch.ones(2, 8, 8), {}),
        "empty": (torch.ones(0, 8), {}),
        "odd": (torch.ones(8, 9), {}),
        "large": (torch.ones(1, (MOST_TILES + 1) * TILE), {}),
    }
    for name, (values, options) in cases.items():
        recorder = Recorder()
        quantize_steps.quantize(recorder, values, FP8_E4M3, Usage.ROWWISE, is_whole=True, **options)
        assert recorder.names[-1] == "cast_tensor", name


def ops_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    names = {event.key for event in profile.key_averages()}
    return {name.removeprefix("qshard::") for name in names if name.startswith("qshard::")}


def test_quantize_and_linear_take_one_op():
    x = torch.randn(32, 64)
    assert ops_of(lambda: quantize(x, FP8_E4M3, usage=Usage.BOTH)) == {"quantize_square_both"}
    layer = Linear(64, 48, recipe=CurrentScaling())
    found = ops_of(lambda: layer(x.clone().requires_grad_()).sum().backward())
    assert found >= {"quantize_block", "quantize_square_both"}
    assert not found & set(SEPARATE)


@pytest.mark.parametrize("usage", USAGES, ids=str)
@pytest.mark.parametrize("shape", [(33, 64), (2, 8, 32), (64,)], ids=str)
def test_recorded_programs_have_the_bits_of_observed_ops(shape, usage):
    if len(shape) == 1 and usage is not Usage.ROWWISE:
        pytest.skip("a vector has no columnwise plane")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    made, found = quantize(x, FP8_E4M3, usage=usage), []
    ops_of(lambda: found.append(quantize(x, FP8_E4M3, usage=usage)))
    for got, want in ((made.rowwise, found[0].rowwise), (made.columnwise, found[0].columnwise)):
        assert (got is None) == (want is None)
        if got is not None:
            assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
            assert got.scale_inv.shape == want.scale_inv.shape == ()
            assert torch.equal(got.scale_inv, want.scale_inv)


def run_step(layer, call, x, dy):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("dynamic", "whole"), [(False, 4), (True, 2)])
def test_a_compiled_layer_takes_one_op(dynamic, whole):
    """For x, dy and both planes of w; with symbolic rows for w only, because the block is an attribute of the op."""
    torch._dynamo.reset()
    layer = Linear(64, 48, recipe=CurrentScaling())
    call, graphs = compile_and_keep(layer, dynamic=dynamic)
    for rows in (32, 96) if dynamic else (32,):
        x, dy = torch.randn(rows, 64), torch.randn(rows, 48)
        want = run_step(layer, layer, x, dy)
        for got, one in zip(run_step(layer, call, x, dy), want, strict=True):
            assert torch.equal(got, one)

    def count(op):
        return sum(len(calls_of(graph, op)) for graph in graphs)

    assert len(graphs) == 2
    assert count("quantize_block") + count("quantize_square_both") == whole
    assert count("amax_tensor") == count("scale_from_amax") == 4 - whole
    torch._dynamo.reset()


def test_sizes_are_those_of_the_kernel():
    folder = Path(__file__).parents[2] / "ffi" / "kernels" / "cuda"
    assert f"kMostWholeTiles = {MOST_TILES};" in (folder / "quantize" / "whole.cuh").read_text()
    assert f"kEight = {PATCH};" in (folder / "quantize" / "codes.cuh").read_text()
    assert f"kTile = {TILE};" in (folder / "transpose" / "tile.cuh").read_text()
