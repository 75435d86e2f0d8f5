"""The part of `kernel_bits.py` on ops in blocks: tests of the kernels, with fewer combinations and in more ways."""

from __future__ import annotations

import itertools

import test_block_ops as steps
import test_fused_ops as fused
import test_nonfinite_ops as nonfinite
import test_rotated_and_random_ops as rotated

from qshard.formats import E2M1, E4M3, E5M2, PowerScaling
from support import op_calls
from support.awkward import BFLOAT16, DTYPES

FLOAT32, _, FLOAT16 = DTYPES
DTYPE_IN_TURN = itertools.cycle(DTYPES)


def use(device: str) -> None:
    """Which kernels the checks look at, and that they call each in every way."""
    op_calls.device = device
    op_calls.ways = ("plain", "flushed", "odd")


def check_steps_of_every_format() -> None:
    for fmt, dtype in zip(steps.OPTIONS, DTYPE_IN_TURN, strict=False):
        steps.test_ops_in_order_are_quantize(fmt, dtype)


def check_amax_and_casts_in_any_blocks() -> None:
    for block, dtype in zip(steps.BLOCKS[::2], DTYPE_IN_TURN, strict=False):
        steps.test_amax_block(block, dtype)
        steps.test_casts_with_any_scales_in_any_blocks(block, dtype)


def check_every_16_bit_input() -> None:
    for element, dtype in itertools.product(PowerScaling.elements, DTYPES):
        steps.test_every_16_bit_input(element, dtype)
    steps.test_every_code_is_decoded_under_every_kind_of_scale()


def check_planes_of_every_format() -> None:
    for fmt, dtype in zip(fused.OPTIONS, DTYPE_IN_TURN, strict=False):
        fused.check_planes(fmt, dtype, fused.SHAPES[::2])
        fused.test_batch_axes(fmt)


def check_planes_of_every_16_bit_value() -> None:
    for fmt in fused.OPTIONS[::2]:
        fused.test_every_16_bit_value(fmt, BFLOAT16)
    fused.test_every_16_bit_value(fused.OPTIONS[0], FLOAT16)
    fused.test_every_16_bit_value(fused.OPTIONS[0], FLOAT32)


def check_planes_in_any_blocks() -> None:
    for block, dtype in zip(fused.BLOCKS[::2], DTYPE_IN_TURN, strict=False):
        fused.test_blocks_of_any_size(block, dtype)


def check_hadamard() -> None:
    for dtype in DTYPES:
        rotated.test_hadamard_is_exact(dtype)
    rotated.test_hadamard_of_exponents_far_apart()


def check_stochastic() -> None:
    for first, dtype in zip([0, 1, 15, 2**32 - 5, 2**36 + 7, 2**63], DTYPE_IN_TURN, strict=False):
        rotated.test_random_bits_follow_the_index(first, dtype)
    rotated.test_place_of_each_row_or_block_is_the_place_of_the_whole()
    rotated.test_shards_draw_what_the_whole_draws()


def check_layouts() -> None:
    for rows, cols in [(0, 16), (2, 2), (16, 80), (130, 48), (288, 32), (16, 0), (254, 258)]:
        rotated.test_transpose_packed(rows, cols)
    for block_rows in (1, 16, 32, 128):
        rotated.test_swizzle_scale(block_rows)


def check_delayed() -> None:
    for element, dtype in itertools.product((E4M3, E5M2), DTYPES):
        rotated.test_cast_and_amax_of_one_read(element, dtype)
    for length, most_recent in itertools.product((1, 16), (False, True)):
        rotated.test_update_delayed_scale_over_many_steps(length, most_recent, E4M3)
    for most_recent in (False, True):
        rotated.test_an_amax_of_zero_leaves_window_and_scale(most_recent)


def check_nonfinite() -> None:
    for option in nonfinite.OPTIONS:
        nonfinite.test_scales_of_amaxes(option)
        nonfinite.test_casts_under_a_scale_of_earlier_steps(option, next(DTYPE_IN_TURN))
        nonfinite.test_slices_under_a_scale_of_earlier_steps(option, E2M1)
        nonfinite.test_slices_under_a_scale_of_earlier_steps(option, E4M3)
