"""A matrix with one scale on a GPU: bits of the separate ops, one launch, CUDA graphs, and other streams."""

import pytest

torch = pytest.importorskip("torch")
from qshard._core.quantize_steps import MOST_TILES, TILE  # noqa: E402
from qshard.formats import FP8_E4M3, Usage  # noqa: E402
from qshard.torch_bridge import quantize  # noqa: E402
from qshard.torch_bridge._ops.bind import into, ops  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.whole_block import DTYPES, ELEMENTS, RULES, check, separate_ops, whole_block  # noqa: E402

# Rows that are no vectors, one tile, tiles with edges, few rows of many columns (amaxes of fewer thread blocks fit than
# there are tiles), and as many rows as columns have.
SHAPES = [
    *((1, 1), (1, 8), (1, 513), (513, 1), (5, 7), (128, 128), (129, 128), (128, 136), (130, 264), (257, 513)),
    *((1, 512), (1, 4096), (1, 8192), (2, 16384), (7, 5000), (8, 32768), (32768, 8), (1000, 24), (2048, 512)),
]
LIMIT = [(2048, 2048), (2049, 2048), (2048, 2056), (TILE * MOST_TILES, TILE), (TILE * MOST_TILES + 1, TILE)]
E4M3 = ELEMENTS[0]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_separate_ops(dtype, element):
    """Also of memory that begins at any element."""
    check(SHAPES, dtype, element, "cuda", skews=(0, 1, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_next_to_the_largest_size_of_one_launch(dtype):
    check(LIMIT, dtype, E4M3, "cuda", skews=(0,))


def kernels_of(call):
    """Return the names of qshard's kernels that a call launches."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if "qshard::kernels" in event.name]


@pytest.mark.parametrize("shape", [(16, 128), (128, 512), (2048, 512), (512, 2048), (2048, 2048)], ids=str)
@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.BOTH], ids=str)
def test_one_launch(shape, usage):
    """An op, as the profiler sees it, and a program, which a graph has captured."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert len(kernels_of(lambda: quantize(x, FP8_E4M3, usage=usage))) == 1
    graph, _ = capture(lambda: quantize(x, FP8_E4M3, usage=usage), warm_up=1)
    assert len(kernels_of(graph.replay)) == 1


@pytest.mark.parametrize("shape", [(2048, 512), (1, 8192), (2048, 2048), (257, 513)], ids=str)
def test_a_captured_graph_replays_with_other_inputs(shape):
    """The results of replays overwrite each other, so an amax of an earlier input would show."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    options, rule = whole_block(x, E4M3, RULES[1]), RULES[1]
    data, data_t = (torch.empty(s, dtype=torch.uint8, device="cuda") for s in (shape, shape[::-1]))
    scales = torch.empty(2, 1, 1, device="cuda")
    graph, _ = capture(
        lambda: into(data, scales[0], data_t, scales[1]).quantize_square_both(x, outer=0, **options), warm_up=1
    )
    for number, factor in enumerate((1.0, 1000.0, 1e-3, float("nan"), 0.0, 7.0)):
        x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        x.view(-1)[number::97] *= factor
        for _ in range(10):
            graph.replay()
        codes, codes_t, scale_inv = separate_ops(x, E4M3, rule)
        assert torch.equal(data, codes)
        assert torch.equal(data_t, codes_t)
        assert scales.view(torch.int32).flatten().tolist() == 2 * [scale_inv.view(torch.int32).item()]


def test_launches_on_several_streams_at_once():
    """Cooperative launches share the GPU with each other and with other kernels; none waits for ever."""
    x = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) * (i + 1) for i in range(4)]
    want = [separate_ops(each, E4M3, RULES[0]) for each in x]
    options = whole_block(x[0], E4M3, RULES[0])
    streams, found = [torch.cuda.Stream() for _ in x], {}
    torch.cuda.synchronize()
    for turn in range(50):
        for i, (each, stream) in enumerate(zip(x, streams, strict=True)):
            with torch.cuda.stream(stream):
                if turn % 5 == i:
                    torch.cuda._sleep(20_000)
                found[i] = ops.quantize_square_both(each, **options)
    torch.cuda.synchronize()
    for i, (codes, codes_t, scale_inv) in enumerate(want):
        data, own_scale_inv, data_t, _ = found[i]
        assert torch.equal(data, codes)
        assert torch.equal(data_t, codes_t)
        assert own_scale_inv.item() == scale_inv.item()
