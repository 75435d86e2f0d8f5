"""Programs that run several steps in one call: bits of separate steps; modes and hooks see each op."""

import gc
import json
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from qshard.formats import FP8_E4M3, MXFP8_E4M3, Usage
from qshard.gemm_dispatch import Gpu
from qshard.recipes import CurrentScaling
from qshard.torch_bridge import quantize
from qshard.torch_bridge._nn import linear_program
from qshard.torch_bridge._ops.programs import Memo, Steps, first_equal, run_in_graph, run_program
from qshard.torch_bridge._quantized import plane_programs
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._quantized.target_gpu import Target, multiply_for
from support.awkward import awkward_values
from support.formats import VARIANTS

SEED = torch.tensor([3, 4], dtype=torch.int32)


class Watches(TorchDispatchMode):
    """A dispatch mode that records ops; while it is active, ops run separately."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def parts_of(q):
    return [part for usage in Usage.BOTH.planes for part in (q.parts(usage) or ()) if part is not None]


def usages_of(fmt):
    return [Usage.ROWWISE] if fmt.scaling.global_scale == "row" else [*Usage.BOTH.planes, Usage.BOTH]


@pytest.mark.parametrize("fmt", VARIANTS, ids=str)
def test_one_call_gives_the_bits_of_the_steps(fmt):
    seed = SEED if fmt.stochastic else None
    for shape, dtype in (((32, 128), torch.bfloat16), ((2, 64, 64), torch.float32), ((128, 32), torch.float16)):
        kinds = ["normal", "zeros", "ties", "wide"]
        x = torch.from_numpy(awkward_values(shape, seed=5, kinds=kinds)).to(dtype)
        for usage in usages_of(fmt):
            made = quantize(x, fmt, usage=usage, seed=seed)
            with Watches() as watches:
                want = quantize(x, fmt, usage=usage, seed=seed)
            assert any("qshard" in op for op in watches.ops)
            assert len(parts_of(made)) == len(parts_of(want))
            for got, one in zip(parts_of(made), parts_of(want), strict=True):
                assert (got.dtype, got.shape, got.stride()) == (one.dtype, one.shape, one.stride())
                assert torch.equal(got.flatten().view(torch.uint8), one.flatten().view(torch.uint8))
            for one in usage.planes:
                values = made.dequantize(usage=one)
                with Watches():
                    assert torch.equal(values.view(torch.int8), want.dequantize(usage=one).view(torch.int8))


def outcome(x, fmt, usage):
    """Return the bits or the error message."""
    try:
        parts = parts_of(quantize(x, fmt, usage=usage, seed=SEED if fmt.stochastic else None))
    except ValueError as error:
        return str(error)
    return [(part.shape, part.dtype, part.flatten().view(torch.uint8).tolist()) for part in parts]


@pytest.mark.parametrize(
    "shape", [(0, 64), (64, 0), (0, 0), (3, 0, 64), (), (64,), (1, 1), (33,), (5, 7), (37, 160)], ids=str
)
def test_awkward_shapes_have_the_same_bits_or_the_same_error(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for fmt in VARIANTS:
        for usage in usages_of(fmt):
            made = outcome(x, fmt, usage)
            with Watches():
                assert outcome(x, fmt, usage) == made, (fmt, usage)


def test_steps_are_recorded_once_for_shapes_and_dtypes():
    asked = []

    def amaxes(ops, x, lead):
        asked.append(type(x).__name__)
        return (ops.amax_tensor(x, lead=lead), None)

    steps = Steps(amaxes)
    for x in (torch.ones(2, 3), torch.zeros(2, 3), torch.full((2, 3), 7.0)):
        assert torch.equal(steps((x,), 1)[0], x[:, 0])
    assert asked == ["_Slot"]
    steps((torch.ones(2, 4),), 1), steps((torch.ones(2, 3).half(),), 1), steps((torch.ones(2, 3),), 0)
    assert asked == ["_Slot"] * 4
    with Watches():
        assert steps((torch.ones(2, 3),), 1)[1] is None
    assert asked == ["_Slot"] * 4 + ["Tensor"]


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("who", ["dispatch", "function", "fake", "vmap", "trace", "subclass", "device", "compile"])
def test_who_looks_on_sees_ops(who):
    """Steps receive tensors, and an active mode or hook sees each op."""
    asked = []

    def amax(ops, x):
        asked.append(type(x).__name__)
        return (ops.amax_tensor(x, lead=0),)

    steps, x = Steps(amax), torch.tensor([1.0, -3.0])
    if who == "dispatch":
        with Watches() as watches:
            steps((x,))
        assert "qshard.amax_tensor.default" in watches.ops
    elif who == "function":
        with Functions():
            steps((x,))
    elif who == "fake":
        with FakeTensorMode() as mode:
            assert steps((mode.from_tensor(x),))[0].shape == ()
    elif who == "vmap":
        made = torch.vmap(lambda x: steps((x,))[0])(torch.tensor([[1.0, 2.0], [4.0, 3.0]]))
        assert made.tolist() == [2, 4]
    elif who == "trace":
        with pytest.warns((DeprecationWarning, FutureWarning), match="jit.trace"):
            traced = torch.jit.trace(lambda x: steps((x,))[0], (x,), check_trace=False)
        assert traced(torch.tensor([5.0, 1.0])) == 5
    elif who == "subclass":
        steps((x.as_subclass(Subclass),))
    elif who == "device":
        with torch.device("cpu"):
            steps((x,))
    elif who == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: steps((x,))[0], fullgraph=True, backend="eager")
        assert compiled(x) == 3
    assert set(asked) - {"_Slot"} == set(asked) != set()


def test_a_profile_names_the_ops():
    x = torch.ones(32, 64)
    quantize(x, MXFP8_E4M3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        quantize(x, MXFP8_E4M3)
    assert "qshard::quantize_block" in [event.key for event in profile.key_averages()]


def test_what_is_wrong_is_said_as_without_them():
    quantize(torch.ones(64, 64), FP8_E4M3)  # What a right call has left behind does not make these right.
    with pytest.raises(ValueError, match=r"quantize: x \(strides \(1, 64\)\) is not contiguous"):
        quantize(torch.ones(64, 64).t(), FP8_E4M3)
    with pytest.raises(TypeError, match=r"quantize: x .sparse_coo. is not dense"):
        quantize(torch.ones(64, 64).to_sparse(), FP8_E4M3)
    with pytest.raises(TypeError, match=r"quantize: x .int32. is not float32"):
        quantize(torch.ones(64, 64, dtype=torch.int32), FP8_E4M3)


def test_negated_views_have_the_bits_of_their_values():
    """Memory of a lazily negated view has the opposite signs, so a recorded program refuses it, and the ops run."""
    x = torch.arange(1.0, 65).view(8, 8)
    for usage in Usage:
        got, want = (quantize(each, FP8_E4M3, usage=usage) for each in (x._neg_view(), -x))
        assert all(torch.equal(a, b) for a, b in zip(parts_of(got), parts_of(want), strict=True))


def test_values_of_what_has_a_gradient_are_taken():
    x = torch.ones(4, 4, requires_grad=True)
    assert not quantize(x, FP8_E4M3).rowwise.scale_inv.requires_grad
    with Watches():
        assert not quantize(x, FP8_E4M3).rowwise.scale_inv.requires_grad
    with torch.inference_mode():
        assert quantize(x, FP8_E4M3).rowwise.scale_inv.is_inference()


def test_nothing_outlives_its_tensors_and_nothing_grows_without_end():
    x = torch.ones(16, 16)
    q = quantize(x, FP8_E4M3, usage=Usage.BOTH)
    gone = [weakref.ref(t) for t in (x, q, *parts_of(q))]
    del x, q
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    before = len(plane_programs._quantize.programs)
    for _ in range(50):
        quantize(torch.ones(16, 16), FP8_E4M3, usage=Usage.BOTH)
    assert len(plane_programs._quantize.programs) == before


def test_what_is_kept_is_bounded_and_told_apart():
    made = []

    def count(*args):
        made.append(args)
        return len(made)

    kept = Memo(count, most=3)
    formats = [first_equal(FP8_E4M3.with_options(pow2=True)), FP8_E4M3.with_options(pow2=True)]
    assert [kept(fmt, 1) for fmt in formats * 2] == [1, 1, 1, 1]
    assert kept(first_equal(FP8_E4M3.with_options(pow2=True, eps=0.5)), 1) == 2
    assert kept((1, torch.bfloat16)) == 3  # A fourth key: the others are forgotten.
    assert len(kept) == 1
    assert kept((1, torch.bfloat16)) == 3
    assert kept(formats[1], 1) == 4
    seen = {kept(object()) for _ in range(9)}  # None gets what was made of another.
    assert len(seen) == 9
    assert len(kept) <= 3


def test_equal_formats_share_programs():
    """Also in tensors, which know their format by a number."""
    formats = [FP8_E4M3.with_options(eps=0.25) for _ in range(3)]
    recorded = {
        id(plane_programs._quantize.programs(((4, 4),), (torch.float32,), "cpu", fmt, Usage.BOTH)) for fmt in formats
    }
    assert len(recorded) == 1
    assert len({quantize(torch.ones(4, 4), fmt).format_id for fmt in formats}) == 1


def test_threads_share_programs():
    results, count = [], 8
    inputs = [torch.full((64, 64), float(i + 1)) for i in range(count)]

    def work(x):
        for _ in range(50):
            results.append((x[0, 0].item(), quantize(x, FP8_E4M3, usage=Usage.BOTH).rowwise.scale_inv.item()))

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(results) == 50 * count
    assert all(abs(scale_inv * 448 - amax) < 1e-3 for amax, scale_inv in results)


def text_of(shape=(4,), dtype="float32", source=0, offset=0, **others):
    """A program that computes the amax of its input into its output."""
    described = {
        "platform": "cpu",
        "inputs": 1,
        "outputs": [["float32", []]],
        "scratch": 0,
        "slots": [[dtype, shape, source, offset], ["float32", [], 1, 0]],
        "steps": [["amax_tensor", [0], [1], {"lead": 0}]],
    }
    return json.dumps(described | others)


def test_a_program_takes_only_what_it_was_made_for():
    x = torch.tensor([1.0, -3.0, 2.0, 0.0])
    assert run_program([x], text_of()) == [torch.tensor(3.0)]
    wrong = [x.half(), x[:3], torch.ones(5), torch.empty(0), x.to(torch.float64)]
    for other in wrong:
        with pytest.raises(ValueError, match="a tensor does not have the shape or dtype"):
            run_program([other], text_of())
    with pytest.raises(ValueError, match=r"the number of inputs \(2\) is not that of the program \(1\)"):
        run_program([x, x], text_of())
    with pytest.raises(ValueError, match=r"an input \(strides \(2,\)\) is not contiguous"):
        run_program([torch.ones(4, 2)[:, 0]], text_of())
    with pytest.raises(ValueError, match="a tensor does not have the shape or dtype"):
        run_program([x], text_of(outputs=[["uint8", [1]]]))  # Room for less than the op writes.
    with pytest.raises(ValueError, match="a tensor does not have the shape or dtype"):
        run_program([x], text_of(source=1, offset=1 << 40))
    with pytest.raises(ValueError, match="not on the platform of the program"):
        run_program([x], text_of(platform="cuda", steps=[]))


def test_a_program_in_a_graph_has_the_shapes_and_flops_of_its_ops():
    """A fake call allocates the outputs, and products in a program count."""
    recipe = CurrentScaling()
    with multiply_for(Target(Gpu((9, 0), cublaslt=130800))):
        x, w = (torch.randn(size, dtype=torch.bfloat16) for size in ((32, 64), (48, 64)))
        operand = Operand(recipe.activation, quantize(x, recipe.activation).rowwise)
        tensors, text = linear_program.compiled_forward(operand, w, recipe, None, torch.bfloat16, (4, 8, 48))
        (y,) = run_program(tensors, text)
        want, _ = linear_program.run_forward(operand, w, recipe, None, None, torch.bfloat16, (4, 8, 48))
    (in_graph,) = run_in_graph(tensors, text, 1)
    assert torch.equal(y, want)
    assert torch.equal(in_graph, want)
    with pytest.raises(ValueError, match=r"the number of results \(1\) is not that of the overload \(2\)"):
        run_in_graph(tensors, text, 2)
    assert not set(text) & {'"', "\\"}  # Inductor writes it into C++ as it is.
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in tensors]
        for (fake,) in (run_program(fakes, text), run_in_graph(fakes, text, 1)):
            assert (fake.shape, fake.dtype, fake.stride()) == (y.shape, y.dtype, y.stride())
    with FlopCounterMode(display=False) as counter:
        run_program(tensors, text)
    assert counter.get_total_flops() == 2 * 32 * 48 * 64
