"""Padded rows of experts in every format: the bits of each expert alone, in both front ends."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Philox
from qshard.formats import NVFP4, Usage
from qshard.jax._experts import tiles as jax_tiles
from qshard.layout import block_alignment
from qshard.recipes import Recipe
from qshard.torch_bridge._experts import fallback, tiles
from qshard.torch_bridge._ops.bind import ops
from support.awkward import assert_bits_equal
from support.formats import NAMED, VARIANTS

SIZES, TOKENS, COLUMNS = np.int32([40, 0, 3, 70, 17]), 140, 96
SEEDS = np.arange(2 * len(SIZES), dtype=np.uint32).reshape(-1, 2) * np.uint32(0x9E3779B9)
X = (np.random.default_rng(0).standard_normal((TOKENS, COLUMNS)) ** 3).astype(np.float32)
X[5, 7], X[50, 0] = np.inf, np.nan
BLOCKS = [fmt for fmt in VARIANTS if fmt.block and not (fmt.shares_codes and fmt.scaling.eps)]
IN_JAX = [fmt for fmt in BLOCKS if fmt in NAMED or (fmt.hadamard and fmt.stochastic)]
IN_JAX += [NVFP4.with_options(global_scale="row"), NVFP4.with_options(four_over_six="mae")]


def usage_of(fmt):
    return Usage.ROWWISE if fmt.row_scaled else Usage.BOTH


def alone(fmt, expert, rows):
    """Quantize the rows of one expert, with zeros up to `rows`."""
    end = SIZES[: expert + 1].sum()
    own = np.zeros((rows, COLUMNS), np.float32)
    own[: SIZES[expert]] = X[end - SIZES[expert] : end]
    key = torch.from_numpy(SEEDS[expert].view(np.int32))
    philox = Philox(key, torch.zeros(2, dtype=torch.int32)) if fmt.stochastic else None
    return quantize_steps.quantize(ops, torch.from_numpy(own), fmt, usage_of(fmt), philox=philox)


def assert_planes_of_each_expert(fmt, operands, stops):
    for usage, operand in operands.items():
        begin = 0
        for expert, (found, stop) in enumerate(zip(fallback._of_experts(operand, stops), stops, strict=True)):
            want = alone(fmt, expert, stop - begin)[usage]
            for got, part in zip(found.parts, want, strict=True):
                assert (got is None) == (part is None)
                if part is not None:
                    assert_bits_equal(np.asarray(got), np.asarray(part.contiguous()))
            begin = stop


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_torch(fmt):
    unit = max(16, block_alignment(fmt))
    where, _ = tiles.tiles_of(unit, TOKENS, torch.from_numpy(SIZES))
    seeds = torch.from_numpy(SEEDS.view(np.int32))
    made, amax = tiles.quantize_experts(torch.from_numpy(X), OperandSpec(fmt, usage_of(fmt)), where, seeds=seeds)
    assert amax is None
    assert list(made) == list(usage_of(fmt).planes)
    assert_planes_of_each_expert(fmt, made, where.stops.tolist())


@pytest.mark.parametrize("fmt", IN_JAX, ids=str)
def test_jax(fmt):
    where = jax_tiles.tiles_of(
        Recipe(weight=fmt.with_options(hadamard=False) if fmt.hadamard else fmt, activation=fmt, gradient=fmt),
        TOKENS,
        SIZES,
    )
    spec, seeds = OperandSpec(fmt, usage_of(fmt)), jnp.asarray(SEEDS)
    q, _ = jax_tiles.quantize_tiles(jnp.asarray(X), spec, where, axes=(), seeds=seeds, scales=None)
    operands = {}
    for usage, plane in q.planes.items():
        parts = [part if part is None else _to_torch(part) for part in plane]
        operands[usage] = fallback.GroupedOperand(fmt, usage, quantize_steps.Plane(*parts))
    assert_planes_of_each_expert(fmt, operands, np.asarray(where.stops).tolist())


@pytest.mark.parametrize("fmt", [fmt for fmt in NAMED if fmt.tensor_scaled], ids=str)
def test_row_amaxes(fmt):
    """Amaxes of rows, infinity and NaN included, give the bits that reading the rows gives. Padding has no part."""
    where, _ = tiles.tiles_of(max(16, block_alignment(fmt)), TOKENS, torch.from_numpy(SIZES))
    x, spec = torch.from_numpy(X), OperandSpec(fmt, Usage.BOTH)
    found, want = (tiles.quantize_experts(x, spec, where, row_amaxes=amaxes)[0] for amaxes in (x.abs().amax(1), None))
    for usage, operand in want.items():
        for got, part in zip(found[usage].parts, operand.parts, strict=True):
            assert (got is None) == (part is None)
            if part is not None:
                assert_bits_equal(np.asarray(got), np.asarray(part))
    twice = tiles.quantize_experts(x, spec, where, row_amaxes=2 * x.abs().amax(1))[0][Usage.ROWWISE]
    assert not torch.equal(twice.expert_scale, want[Usage.ROWWISE].expert_scale)  # They are used.


def _to_torch(part):
    array = np.array(part)
    return torch.from_numpy(array if array.dtype == np.float32 else array.view(np.uint8))
