"""Ops on sharded tensors in JAX: axes that shard without communication, and reductions over shards."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import ops
from qshard.jax._ops.bind import shardy_rule
from qshard.op_table import table
from support.awkward import assert_all_bits_equal, assert_bits_equal
from support.draw_values import filled
from support.draws import draw
from support.hlo import collectives
from support.op_calls import bind, call
from support.oracle import oracle
from support.pairs import turns

every_op = pytest.mark.parametrize("spec", table().values(), ids=table())
X = np.ones((256, 256), np.float32)
SQUARE = {"block_rows": 32, "block_cols": 32}


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


def cut_in_turn(made, names):
    """The PartitionSpecs of operands and of results: factors that all of them share lie over mesh axes, in turn."""
    binding, spec = bind(made), made.spec
    shared = list(binding.inputs[0].factors[: binding.lead])
    alike = {o.terms for o in spec.inputs} - {("...",)} | {o.terms for o in spec.outputs}
    if len(alike) > 1 and len(shared) == len(made.tensors[0][0][0]):
        shared = shared[:-1]  # XLA cuts no op along every axis of its first operand; elementwise ones get another axis.
    by = dict(zip((factor for factor in shared if factor.size and factor.size % 4 == 0), names, strict=False))
    sides = (binding.inputs, binding.outputs)
    return tuple([P(*(by.get(axis[0]) for axis in view.axes)) for view in side] for side in sides)


WAYS = {f"{kind.name}-{names}": (kind, names) for names in ("ab", "ba") for kind in (AxisType.Auto, AxisType.Explicit)}


@turns(1, spec=table(), way=WAYS)
def test_cut_at_blocks(spec, way):
    """Of calls with axes of 256, one that can be cut most: XLA moves nothing, and results are cut as operands are."""
    kind, names = way
    drawn = [draw(spec, number, lengths=(256,)) for number in range(40)]
    made = filled(max(drawn, key=lambda one: str(cut_in_turn(one, "ab")[1]).count("'")))
    mesh = mesh_of(kind)
    before, after = cut_in_turn(made, names)
    operands = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(made.operands, before, strict=True)]
    function = jax.jit(lambda *operands: getattr(ops, spec.name)(*operands, **made.options))
    compiled = function.lower(*operands).compile()
    assert collectives(compiled) == []
    results = jax.tree.leaves(compiled(*operands))
    assert_all_bits_equal(results, oracle(made), str(made))
    for got, cut in zip(results, after, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, cut), got.ndim)
        if kind is AxisType.Explicit:
            assert jax.typeof(got).sharding.spec == cut


def test_explicit_mesh_that_cuts_blocks():
    """An error that says where to cut: XLA could only gather."""
    x = jax.device_put(X[:96, :64], NamedSharding(mesh_of(AxisType.Explicit), P("a")))
    with pytest.raises(ValueError, match=r"x \(96, 64\) has an axis of 96 in 4 shards, .* blocks of 32"):
        ops.amax_block(x, **SQUARE)


@pytest.mark.parametrize("op", ["quantize_block", "quantize_square_both"])
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b")], ids=str)
def test_a_block_of_the_matrix_spans_its_shards(spec, op):
    """One scale of the whole, in automatic meshes; an explicit mesh raises instead of a gather."""
    x = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    x[-1, -1] = 1000.0  # The amax, on one device.
    options = {"element": "float8_e4m3fn", "eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": "float32"}
    options |= {"block_rows": 64, "block_cols": 48}
    call = jax.jit(lambda x: getattr(ops, op)(x, **options))
    want = call(x)
    got = call(jax.device_put(x, NamedSharding(mesh_of(AxisType.Auto), spec)))
    assert_all_bits_equal([*map(np.asarray, got)], [*map(np.asarray, want)], op)
    with pytest.raises(ValueError, match=r"x \(64, 48\) has an axis of .* in \d shards"):
        call(jax.device_put(x, NamedSharding(mesh_of(AxisType.Explicit), spec)))


def test_layouts_keep_the_memory():
    """Logical order is blocks first; the layouts say that memory is the row-major matrix."""
    text = jax.jit(lambda x: ops.amax_block(x, **SQUARE)).lower(X).as_text()
    assert "operand_layouts = [dense<[3, 1, 2, 0]> : tensor<4xindex>]" in text
    assert 'num_batch_dims = "2"' in text
    assert "split = true" in text


@every_op
def test_shardy_keeps_what_is_reduced_whole(spec):
    """XLA never runs a kernel on a part of a factor that a result lacks: a rule has just these replicated."""
    made = draw(spec, lengths=(64,))
    rule = shardy_rule(bind(made))
    operands, results = (
        [set(re.findall(r"\w+", buffer)) for buffer in re.findall(r"\[(.*?)\]", side)] for side in rule.split("->")
    )
    marked = re.search(r"need_replication={(.*?)}", rule)
    assert set(marked[1].split(", ") if marked else []) == operands[0] - set.intersection(*results)


# amax_slices gives the amaxes of any slices: tests of master weights merge them.
@pytest.mark.parametrize("name", [name for name, spec in table().items() if spec.outputs[-1].name == "amax"])
def test_amaxes_of_parts_merge_to_that_of_the_whole(name):
    """For every factor that an amax lacks: amaxes of parts that cut it, max-merged, are the amax of the whole."""
    spec = table()[name]
    drawn = (filled(draw(spec, number, lengths=(64,))) for number in range(100))
    made, binding = next((one, bind(one)) for one in drawn if bind(one).reduced)
    x = np.random.default_rng(0).standard_normal(made.operands[0].shape).astype(made.operands[0].dtype)

    def amax(x, options, first_row=0):
        """Of others there is one number, or ones in the shape of x, or of its leading axes and its last one.

        Rows of experts, and their stops, are as drawn. If x has rows from `first_row` on, others are padding.
        """
        terms, lead = spec.inputs[0].terms, x.shape[: options.get("lead", 0)]
        shapes = {("...",): (), terms: x.shape, (terms[0], terms[-1]): (*lead, *x.shape[-1:])}
        given = {"rows": lambda y: y.view(np.int32) - np.int32(first_row), "stops": lambda y: y}
        others = [
            given[o.name](y) if o.name in given else np.ones(shapes[o.terms], y.dtype)
            for o, y in zip(spec.inputs[1:], made.operands[1:], strict=True)
        ]
        results = call(name, x, *others, **options)
        return results[-1] if isinstance(results, list) else results

    factors = [factor for axis in binding.inputs[0].axes for factor in axis]
    # A norm needs whole rows, which rstd says: it lacks their axis too.
    sides = zip(spec.outputs, binding.outputs, strict=True)
    kept = [view.factors for operand, view in sides if not operand.name.startswith("amax")]
    for cut in (factor for factor in binding.reduced if factor.size % 2 == 0 and all(factor in some for some in kept)):
        amaxes = []
        for i, part in enumerate(np.split(x.reshape([f.size for f in factors]), 2, axis=factors.index(cut))):
            sizes = {factor: factor.size // 2 if factor == cut else factor.size for factor in factors}
            shape = [math.prod(sizes[factor] for factor in axis) for axis in binding.inputs[0].axes]
            smaller = {cut.name: cut.size // 2} if cut.name in made.options else {}
            first_row = i * cut.size // 2 if cut == factors[0] else 0
            amaxes.append(amax(np.ascontiguousarray(part).reshape(shape), made.options | smaller, first_row))
        assert not np.array_equal(*amaxes)
        merged = np.maximum(*(one.view(np.int32) for one in amaxes)).view(np.float32)
        assert_bits_equal(merged, amax(x, made.options), cut.name)
