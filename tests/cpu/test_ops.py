"""Every op of `ffi/ops.def` through each front end: the reference's bits, and the same errors everywhere.

Calls are generated from the rows of `ops.def` (support/draws.py), so these tests cover a new op automatically.
`kernel_bits.py` calls the kernels directly, with all attributes and dtypes and on every SIMD target.
"""

import copy
import itertools
import math

import jax
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qshard import _ffi
from qshard.jax import ops as jax_ops
from qshard.jax._sharding import multi_tensor
from qshard.op_table import table
from qshard.torch_bridge._ops.bind import into
from support.awkward import assert_all_bits_equal
from support.draw_values import filled
from support.draws import FEW, SPECS, choices, draw
from support.op_calls import attributes_of, placed, to_numpy, to_torch
from support.oracle import oracle

every_op = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_single_op = pytest.mark.parametrize("spec", table().values(), ids=table())


def torch_call(made, move=lambda x: x):
    """Return `torch.ops.qshard.<op>`, its operands, and its keyword arguments."""
    keywords = dict(made.options)
    if "dtype" in keywords:
        keywords["dtype"] = getattr(torch, keywords["dtype"])
    operands = [[move(to_torch(x)) for x in o] if isinstance(o, list) else move(to_torch(o)) for o in made.operands]
    return getattr(torch.ops.qshard, made.spec.name).default, operands, keywords


def results(made, returned, operands):
    """Return the results of a PyTorch op: returned tensors, or operands changed in place."""
    if made.spec.many:
        names = [operand.name for operand in made.spec.inputs]
        changed = [operands[names.index(output.name)] for output in made.spec.outputs]
        return [x for each in changed for x in (each if isinstance(each, list) else [each])]
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


CHEAP = ("encode", "decode", "dequantize", "scale_", "global_scale")
"""Ops with small inputs: the PyTorch test runs every choice of their attributes."""


def draws(spec, count, **options):
    """Return calls with operands. PyTorch and JAX have no Adam update separate from the parameter."""
    numbers = (n for n in itertools.count() if spec.name != "adam" or not draw(spec, n).options["update"])
    return [filled(draw(spec, n, **options), n) for n in itertools.islice(numbers, count)]


@every_op
def test_torch(spec):
    """Eager results and results of `into` have the reference's bits; traced results its shapes and dtypes."""
    for made in draws(spec, max(8, len(choices(spec))) if spec.name.startswith(CHEAP) else 8):
        op, operands, keywords = torch_call(made)
        want = oracle(made)
        for move in (lambda x: x.to("meta"), FakeTensorMode().from_tensor):
            _, fakes, _ = torch_call(made, move)
            fake = results(made, op(*fakes, **keywords), fakes)
            assert [(x.shape, x.is_contiguous()) for x in fake] == [(x.shape, True) for x in want]
        returned = results(made, op(*operands, **keywords), operands)
        assert [x.dtype for x in fake] == [x.dtype for x in returned]
        assert_all_bits_equal([to_numpy(x) for x in returned], want, str(made))
        if not spec.many:
            given = [torch.full_like(x, 77) for x in returned]
            getattr(into(*given), spec.name)(*operands, **attributes_of(made))
            assert_all_bits_equal([to_numpy(x) for x in given], want, str(made))


@every_op
def test_torch_finds_nothing_wrong_with_the_op(spec):
    # NaN compares unequal. It comes from NaN codes, invalid labels, and the loss without logits.
    is_loss = spec.name in ("cross_entropy", "cross_entropy_with_grad")
    calls = draws(spec, 4, lengths=FEW)
    made = next(made for made in calls if not is_loss or math.prod(made.tensors[0][0][0]))
    op, operands, keywords = torch_call(made)
    least, bits = (0.1, 0) if "classes" in made.options else (0.0, 0x33)
    with torch.no_grad():
        for x in (x for o in operands for x in (o if isinstance(o, list) else [o])):
            x.copy_(x.nan_to_num(1.0, 1.0, 1.0).abs().clamp(least, 1e4) if x.is_floating_point() else x & bits)
    torch.library.opcheck(op, operands, keywords)


def jax_call(made):
    if made.spec.many:
        return lambda *operands: multi_tensor.bind(made.spec.name)(*operands, **made.options)
    return lambda *operands: getattr(jax_ops, made.spec.name)(*operands, **made.options)


@pytest.mark.parametrize("calls", [1, pytest.param(8, marks=pytest.mark.slow)])
@every_op
def test_jax(spec, calls):
    """Results have the reference's bits in `jit`, and under `vmap` for ops on single tensors.

    `test_torch` has more calls of the same handlers.
    """
    # Operands without leading axes, e.g. the weight of a norm, are shared by the batch.
    axes = [0 if operand.has_leading_axes else None for operand in spec.inputs]
    batched = not spec.many and axes[0] == 0
    for made in draws(spec, calls):
        call = jax_call(made)

        @jax.jit
        def run(operands, stacked, call=call):
            return call(*operands), jax.vmap(call, axes)(*stacked) if batched else ()

        pairs = zip(made.operands, axes, strict=True) if batched else ()
        results, of_batch = run(made.operands, [x if axis is None else np.stack([x, x]) for x, axis in pairs])
        want = oracle(made)
        assert_all_bits_equal(jax.tree.leaves(results), want, str(made))
        if batched:
            assert_all_bits_equal([np.asarray(x)[1] for x in jax.tree.leaves(of_batch)], want, f"{made}, under vmap")


# --- refusals ---

WRONG = {"str": ("no such",), "int": (-3, -(2**62), 2**62), "float": (-1.0, math.nan), "int[]": ((-1, 2),)}


def wrong_attributes(made):
    """Yield (name, call) pairs with one invalid attribute."""
    for name, (kind, given, least, most, _) in made.spec.attributes.items():
        for value in WRONG.get(kind, ()):
            if name == "shapes":
                value = (*value, *made.options["shapes"][2:])
            if kind == "int" and not given and not name.startswith("block") and least <= value <= most:
                continue  # Block sizes are checked against their own range.
            other = copy.copy(made)
            other.options = {**made.options, name: value}
            yield name.removesuffix("_rows").removesuffix("_cols"), other


def wrong_operands(made):
    """Yield (name, call) pairs with one operand of an unsupported dtype, a wrong rank, or a wrong length."""
    for i, operand in enumerate(made.spec.inputs):
        old = made.operands[i]
        first = old[0] if isinstance(old, list) and old else old
        if isinstance(first, list):
            continue
        wrong = [] if operand.dtype == "any" else [(operand.name, np.zeros(first.shape))]
        if i and "..." not in operand.terms and not all(isinstance(term, str) for term in operand.terms):
            wrong.append((operand.name, first[None]))
            others = [o.terms for j, o in enumerate(made.spec.inputs) if j != i]
            # In lists, attributes give the other sizes; the op's body checks them. Unshared axes may have any size.
            if ("n",) in operand.terms if made.spec.many else any(operand.terms[0] in terms for terms in others):
                # If only later operands share the axis, the message names one of them.
                before = any(operand.terms[0] in o.terms for o in made.spec.inputs[:i])
                name = operand.name if made.spec.many or before else ""
                wrong.append((name, np.concatenate([first, first, first[:1]])))
        for name, x in wrong:
            other = copy.copy(made)
            other.operands = list(made.operands)
            other.operands[i] = [x, *old[1:]] if isinstance(old, list) else x
            yield name, other
        if isinstance(old, list):
            other = copy.copy(made)
            other.operands = [*made.operands[:i], [*old, old[0]], *made.operands[i + 1 :]]
            yield "", other


def refusal(function, *arguments, **keywords):
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*arguments, **keywords)
    return str(caught.value).splitlines()[0]


@every_op
def test_what_no_row_takes_is_refused_alike(spec):
    """The handler, eager and traced PyTorch, and JAX raise the same message, which names the wrong argument."""
    (made,) = draws(spec, 1, lengths=(64,))
    for name, wrong in itertools.chain(wrong_attributes(made), wrong_operands(made)):
        op, operands, keywords = torch_call(wrong)
        said = refusal(op, *operands, **keywords)
        assert said.startswith(f"{spec.name}: "), said
        assert name in said, said
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            _, fakes, _ = torch_call(wrong, mode.from_tensor)
            assert refusal(op, *fakes, **keywords) == said
        if not spec.many and not any(x.dtype == np.float64 for x in wrong.operands):
            assert refusal(jax.eval_shape, jax_call(wrong), *wrong.operands).startswith(f"{spec.name}: ")


@every_op
def test_handlers_refuse_other_results_and_write_nothing(spec):
    (made,) = draws(spec, 1)
    inputs, placed_outputs = placed(made)
    outputs = [output for output, _ in placed_outputs]
    for i, good in enumerate(outputs):
        wrong = [good.double(), good[None], torch.cat([good.reshape(-1)] * 2)[1:]]
        for other in wrong:
            if other.shape == good.shape and other.dtype == good.dtype:  # At most one element.
                continue
            before = [to_numpy(x).tobytes() for x in outputs]
            given = [*outputs[:i], other, *outputs[i + 1 :]]
            said = refusal(_ffi.call, spec.name, inputs, given, attributes_of(made))
            assert said.startswith(f"{spec.name}: "), said
            assert before == [to_numpy(x).tobytes() for x in outputs]


E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn"
FP8 = {"element": E4M3, "eps": 0.0, "pow2": True, "rounding": "up", "scale_dtype": "float32"}
FP4 = {"element": E2M1, "eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": "float8_e8m0fnu"}
# The message for each kind of error: op, shapes of operands, block, attributes.
WORDS = [
    ("cast_block", [(4, 8), (4, 3)], (1, 4), {"element": E4M3}, r"scale \(4, 3\) does not fit"),
    ("cast_block", [(4, 9), (4, 1)], (1, 16), {"element": E2M1}, "2 codes share a byte"),
    ("amax_block", [(8,)], (1, 4), {}, "does not have the axes"),
    ("amax_block", [(4, 8)], (0, 4), {}, "block .0x4. is not of positive size"),
    ("quantize_block", [(4, 8)], (1, 4), {**FP8, "rounding": "x"}, "rounding .x. is not one of up, floor"),
    ("quantize_block", [(4, 8)], (1, 4), {**FP8, "eps": -1.0}, "eps .-1. is not at least 0"),
    ("quantize_block", [(4, 8)], (1, 4), {**FP8, "element": E2M1}, "element .* has no float32 scales"),
    ("quantize_block", [(12, 12)], (3, 4), FP4, r"block \(3x4\) of .* sides of 1, or even ones up to 256"),
    ("quantize_block", [(2, 516)], (1, 258), FP4, r"block \(1x258\) of .* sides of 1, or even ones up to 256"),
    ("quantize_square_both", [(4, 8)], (1, 4), FP8, "1x4. is not square"),
    ("quantize_nvfp4", [(4, 32), ()], (1, 32), {"scale_max": 448.0}, "1x32. is not 1x16"),
    ("quantize_nvfp4", [(4, 40), ()], (1, 16), {"scale_max": 448.0}, "not a multiple of block_cols=16"),
    ("quantize_nvfp4", [(4, 32), ()], (1, 16), {"scale_max": 99.0}, "scale_max .99. is not one of 448, 256"),
    (
        "quantize_nvfp4",
        [(4, 32), (3,)],
        (1, 16),
        {"scale_max": 448.0},
        "does not match the leading axes of blocks of x",
    ),
    (
        "quantize_nvfp4_t",
        [(16, 32), ()],
        (16, 16),
        {"scale_max": 448.0, "hadamard": True, "outer": 0},
        r"block \(16x16\) with hadamard must be 16x1",
    ),
    ("amax_hadamard", [(24, 32)], (24, 32), {}, r"block \(24x32\) must have a multiple of 16 rows"),
    ("update_delayed_scale", [(), (0,), ()], None, {"element": E4M3, "margin": 0, "most_recent": True}, "has no amax"),
]


@pytest.mark.parametrize(("op", "shapes", "block", "attributes", "words"), WORDS)
def test_words_of_refusals(op, shapes, block, attributes, words):
    where = {} if block is None else {"block_rows": block[0], "block_cols": block[1]}
    with pytest.raises(ValueError, match=f"^{op}: .*{words}"):
        getattr(torch.ops.qshard, op)(*(torch.ones(shape) for shape in shapes), **attributes, **where)
