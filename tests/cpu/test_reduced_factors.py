"""A factor of the first operand that a result lacks: what the pattern alone says must be reduced over ranks."""

import math
import re

import numpy as np
import pytest

from qshard import _ffi
from qshard.formats import ELEMENTS
from qshard.jax.ops import shardy_rule
from qshard.ops import OpSpec, table
from support.op_calls import codes_per_byte


def first_attribute(name: str, kind: str, legal: tuple, least: float, most: float):
    """A legal value: of those listed the first, of a range one that is in all."""
    if legal:
        return int(legal[0]) if kind == "int" else legal[0]
    return {"int": 2 if name.startswith("block") else 1, "float": 0.0, "bool": False}[kind]


def call_of(spec: OpSpec) -> tuple[list[tuple[int, ...]], list[str], dict]:
    """Shapes, dtypes and options of a small call of any op: axes and blocks that halve, `...` left out."""
    options = {name: first_attribute(name, *what) for name, what in spec.row.attributes.items()}
    if "block_rows" in options:
        options |= dict(zip(("block_rows", "block_cols"), (spec.row.blocks or [(2, 4)])[-1], strict=True))
        if spec.name == "quantize_square_both":
            options["block_cols"] = options["block_rows"]
    options |= {name: int(f"*{name}" in spec.inputs[0].terms) for name in ("batch", "lead") if name in options}

    def size(name: str) -> int:
        return int(name) if name.isdigit() else options.get(name, 4)

    shapes, dtypes = [], []
    for operand in spec.inputs:
        axes = [4 if isinstance(t, str) else math.prod(map(size, t)) for t in operand.terms if t != "..."]
        if axes and not isinstance(operand.terms[-1], str):
            axes[-1] //= codes_per_byte(operand, options.get("element"))
        shapes.append(tuple(axes))
        classes = {"float": "float32", "byte": "uint8", "word": "uint32", "packed": "uint8", "code": "uint8"}
        dtypes.append(options["scale_dtype"] if operand.dtype == "scale" else classes.get(operand.dtype, operand.dtype))
    if any(operand.dtype == "float" for operand in spec.outputs):
        options["dtype"] = "float32"
    return shapes, dtypes, options


def run(spec: OpSpec, operands: list[np.ndarray], options: dict) -> dict[str, np.ndarray]:
    given = {name: value for name, value in options.items() if name != "dtype"}
    results = spec.results([x.shape for x in operands], [str(x.dtype) for x in operands], given, options.get("dtype"))
    made = [np.zeros(shape, "uint8" if dtype in ELEMENTS else dtype) for shape, dtype in results]
    _ffi.call(spec.name, operands, made, given)
    return dict(zip((operand.name for operand in spec.outputs), made, strict=True))


@pytest.mark.parametrize("name", table())
def test_shardy_keeps_them_whole(name):
    """XLA never runs a kernel on a part of such a factor: the rule of every op has just these replicated."""
    shapes, dtypes, options = call_of(table()[name])
    rule = shardy_rule(table()[name].bind(shapes, dtypes, options, options.pop("dtype", None), cuttable=True))
    operands, results = (
        [set(re.findall(r"\w+", buffer)) for buffer in re.findall(r"\[(.*?)\]", side)] for side in rule.split("->")
    )
    kept = set.intersection(*results)
    marked = re.search(r"need_replication={(.*?)}", rule)
    assert set(marked[1].split(", ") if marked else []) == operands[0] - kept


# amax_slices gives the amaxes of any slices: tests of master weights merge them.
AMAX = [name for name, spec in table().items() if any(result.name == "amax" for result in spec.outputs)]


@pytest.mark.parametrize("name", AMAX)
def test_amaxes_of_parts_merge_to_that_of_the_whole(name):
    """For every factor that an amax lacks: amaxes of parts that cut it, max-merged, are the amax of the whole."""
    spec = table()[name]
    shapes, dtypes, options = call_of(spec)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shapes[0]).astype(dtypes[0])
    others = [np.ones(shape, dtype) for shape, dtype in zip(shapes[1:], dtypes[1:], strict=True)]
    whole = run(spec, [x, *others], options)["amax"]
    binding = spec.bind(shapes, dtypes, options, cuttable=True)
    factors = [factor for axis in binding.inputs[0].axes for factor in axis]
    assert binding.reduced
    for cut in binding.reduced:
        amaxes = []
        for part in np.split(x.reshape([factor.size for factor in factors]), 2, axis=factors.index(cut)):
            sizes = {factor: factor.size // 2 if factor == cut else factor.size for factor in factors}
            shape = [math.prod(sizes[factor] for factor in axis) for axis in binding.inputs[0].axes]
            smaller = {cut.name: cut.size // 2} if cut.name in options else {}
            amaxes.append(run(spec, [np.ascontiguousarray(part).reshape(shape), *others], options | smaller)["amax"])
        assert not np.array_equal(amaxes[0], amaxes[1])
        np.testing.assert_array_equal(np.maximum(*amaxes), whole, err_msg=cut.name)
