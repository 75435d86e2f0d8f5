"""Errors of common mistakes: both front ends raise the same text. See support/mistakes.py."""

import json

import ml_dtypes
import numpy as np
import pytest

from qshard import formats, layout, numerics, recipes, reference
from qshard._core.flat_shards import FlatSlice, plan_master, plan_shards
from qshard.formats import FLOATS, FORMATS, Usage
from qshard.op_table import OpSpec
from qshard.recipes import NAMED, Recipe
from support.mistakes import Caller, mistakes, said

X = np.ones((64, 64), np.float32)
NAMES = {
    **{"X": X, "W": X, "ONE": X[0, 0], "STOCHASTIC": "NVFP4[rounding=stochastic]", "np": np, "ml_dtypes": ml_dtypes},
    **{"formats": formats, "layout": layout, "recipes": recipes, "reference": reference, "Usage": Usage},
    **{"numerics": numerics, "json": json},
    **{"FlatSlice": FlatSlice, "plan_master": plan_master, "plan_shards": plan_shards, "Recipe": Recipe},
}
BOTH, ALONE = mistakes("both"), mistakes("alone")


@pytest.mark.parametrize("wrong", BOTH)
def test_both_front_ends(front, wrong):
    call, texts = BOTH[wrong]
    caller = Caller(front)
    text = texts[0] if len(texts) == 1 else next(t for t in texts if t.startswith(f"{front.name}: "))
    text = text.removeprefix(f"{front.name}: ").replace("{w}", caller.w).replace("{device}", caller.device)
    assert said(call, {**NAMES, "f": caller}) == text


@pytest.mark.parametrize("wrong", ALONE)
def test_without_a_framework(wrong):
    call, (text,) = ALONE[wrong]
    assert said(call, NAMES) == text


def test_dtypes_of_high_precision_are_those_of_ops():
    """`FLOATS` is the class `float` of ops.def, as the binder reads it."""
    spec, taken = OpSpec("op", "x: float *lead -> y: float32 *lead"), []
    for name in ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "bool"):
        try:
            spec.results([()], [name], {})
        except TypeError:
            continue
        taken.append(name)
    assert sorted(taken) == sorted(FLOATS)


@pytest.mark.parametrize("name", ["FP8_E4M3", "MXFP8_E4M3", "NVFP4_16x16[nonfinite=nan]"])
def test_a_name_is_its_format(front, name):
    caller, x = Caller(front), np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    plain, _, options = name.partition("[")
    fmt = FORMATS[plain].with_options(nonfinite="nan") if options else FORMATS[plain]
    by_name, by_format = (caller.quantize(x, each) for each in (name, fmt))
    assert by_name.format == fmt
    np.testing.assert_array_equal(front.numpy(by_name.rowwise.data), front.numpy(by_format.rowwise.data))


@pytest.mark.parametrize("name", ["CurrentScaling", "NVFP4"])
def test_a_name_is_its_recipe(front, name):
    caller, rng = Caller(front), np.random.default_rng(0)
    x, w = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(2))
    y, again = (front.numpy(caller.linear(x, w, recipe, seed=1)) for recipe in (name, NAMED[name]))
    np.testing.assert_array_equal(y, again)
