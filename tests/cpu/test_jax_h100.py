"""What XLA makes of FSDP programs for eight H100s, compiled without a GPU (support/jax_h100.py): bytes and FP8 GEMMs.

XLA for CPUs proves neither: it has no FP8 and widens what it gathers. This needs JAX's CUDA plugin, half a gigabyte,
which need not be installed beside JAX: `make h100` puts it into build/jax_cuda.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import h100
from support.hlo import Collective, size

REPOSITORY = Path(__file__).parents[2]
STEPS = ["step, Auto", "step, Explicit", "step, shard_map"]


def run(module, *arguments):
    """The JSON that a module of support prints about programs."""
    if not h100.is_there():
        pytest.skip(f"no CUDA plugin of JAX, neither installed nor in {h100.PLUGIN.relative_to(REPOSITORY)}: make h100")
    result = subprocess.run(
        [sys.executable, "-m", f"support.{module}", *arguments],
        env={**os.environ, "PYTHONPATH": ""},
        cwd=REPOSITORY / "tests",
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled():
    """Map each program to its "collectives", its "calls" of handlers and libraries, and its "ops" of interest."""
    return run("jax_h100")


def moved(program, kind):
    """Arrays that collectives of one kind give, in order, however XLA has combined them."""
    return sorted(array for each, arrays in program["collectives"] if each == kind for array in arrays)


@pytest.mark.parametrize("name", ["cast of rows", "cast of columns"])
def test_cast(compiled, name):
    """Four bytes are reduced; the transposed plane is written by the handler, not copied into place after it."""
    program = compiled[name]
    assert program["collectives"] == [["all-reduce", ["s32[]"]]]
    assert program["ops"] == []
    assert sorted(program["calls"]) == ["qshard_amax_tensor", "qshard_cast_transpose", "qshard_scale_from_amax"]


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_head(compiled, mode):
    """Gradients take the place of logits, and add up in GEMMs: nothing of the size of a chunk, or of w, is copied."""
    program = compiled[f"head, {mode}"]
    assert program["ops"] == []
    assert program["gemms"] == ["bf16[512,4096]", "bf16[512,512]", "f32[4096,512]"]
    assert [call for call in program["calls"] if call.startswith("qshard")] == [
        *("qshard_cross_entropy_stats", "qshard_cross_entropy", "qshard_cross_entropy_grad")
    ]
    assert moved(program, "all-gather") == ["bf16[4096,512]"]
    assert moved(program, "reduce-scatter") == ["f32[512,512]"]


@pytest.mark.parametrize("name", STEPS)
def test_step_gathers_codes_and_scatters_gradients(compiled, name):
    """Two layers: their codes are gathered forward, and those of the second again, since x has no gradient."""
    program = compiled[name]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 3
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"] * 2
    # Amaxes and the loss.
    assert {array for array in moved(program, "all-reduce") if not array.startswith("s32[")} == {"f32[]"}
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("name", STEPS)
def test_step_multiplies_in_fp8(compiled, name):
    """Every GEMM is cuBLASLt's, on codes as they are: none is dequantized or transposed for it."""
    program = compiled[name]
    assert program["calls"].count("__cublas$lt$matmul$f8") == 5
    assert {call for call in program["calls"] if "cublas" in call} == {"__cublas$lt$matmul$f8"}
    assert program["ops"] == []
    assert program["calls"].count("qshard_transpose") == 1  # of the gathered weight


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_kn_is_no_dearer(compiled, mode):
    """flax's layout, cut along K: the same collectives and GEMMs as of `[N, K]`, and nothing that XLA transposes.

    Gathered codes are transposed once for each layer, in forward where `[N, K]` has it in backward.
    """
    program, like = compiled[f"step, {mode}, KN"], compiled[f"step, {mode}"]
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert moved(program, kind) == moved(like, kind)
    assert {kind for kind, _ in program["collectives"]} == {kind for kind, _ in like["collectives"]}
    assert program["calls"].count("__cublas$lt$matmul$f8") == 5
    assert {call for call in program["calls"] if "cublas" in call} == {"__cublas$lt$matmul$f8"}
    assert program["ops"] == []
    assert program["calls"].count("qshard_transpose") == 2


BLOCKS = {
    "BlockScaling": ("u8[2048,2048]", "u32[16,16]"),
    "MXFP8": ("u8[2048,2048]", "u8[64,64]"),
    "NVFP4": ("u8[2048,1024]", "u8[128,128]"),
}


@pytest.mark.parametrize("mode", ["Auto", "shard_map"])
@pytest.mark.parametrize("recipe", BLOCKS)
def test_step_of_blocks(compiled, recipe, mode):
    """Codes are gathered in each pass, packed FP4 at half a byte, and compact scales once; no values are but GEMMs'.

    XLA has no GEMM for Hopper that takes the scales of blocks: those of 128 have qshard's own, of codes; the others
    are of bfloat16.
    """
    program = compiled[f"step, {recipe}, {mode}"]
    codes, scales = BLOCKS[recipe]
    assert moved(program, "all-gather") == sorted([codes] * 3 + [scales] * 2)
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"] * 2
    reduced = [array for array in moved(program, "all-reduce") if array != "f32[]"]
    assert all(array.startswith("s32[") for array in reduced)  # global amaxes
    assert bool(reduced) == (recipe == "NVFP4")
    of_codes = recipe == "BlockScaling"
    gemm = "qshard_gemm_block" if of_codes else "__cublas$lt$matmul"
    assert {call for call in program["calls"] if "cublas" in call or "gemm" in call} == {gemm}
    assert program["calls"].count(gemm) == 5
    # A GEMM of codes reads transposed scales of the weight; nothing else is copied into place.
    assert program["ops"] == (["transpose"] if of_codes else [])
    assert sum("dequantize" in call for call in program["calls"]) == (0 if of_codes else 10)


@pytest.mark.parametrize(
    "recipe", ["CurrentScaling, Auto", "CurrentScaling, Explicit", "MXFP8, Auto", "BlockScaling, Explicit"]
)
def test_batch_and_sequence(compiled, recipe):
    """x `[16, 4096, 2048]`, cut into 2 x 4: the GEMMs of bfloat16, and no array of x or dy that moves or is copied."""
    program, plain = compiled[f"sequence, {recipe}"], compiled["sequence, bfloat16"]
    shapes = [sorted(gemm.split("[")[1] for gemm in each["gemms"]) for each in (program, plain)]
    assert shapes[0] == shapes[1] == ["2048,2048]"] * 2 + ["8192,2048]"] * 3
    scales = {"CurrentScaling": [], "MXFP8": ["u8[64,64]"], "BlockScaling": ["u32[16,16]"]}[recipe.split(",")[0]]
    assert moved(program, "all-gather") == sorted(["u8[2048,2048]"] * 3 + scales * 2)
    assert moved(program, "reduce-scatter") == ["f32[1024,2048]"] * 2
    # Amaxes and the loss; and of gradients, which devices of "seq" add to, what is left for one of "fsdp".
    reduced = {array for array in moved(program, "all-reduce") if not array.startswith("s32[")}
    assert reduced == {"f32[]", "f32[1024,2048]"}
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert plain["ops"] == []
    assert program["ops"] == (["transpose"] if "BlockScaling" in recipe else [])  # of 16 x 16 scales


def test_delayed_step(compiled):
    """FP8 GEMMs. What is cut is read for its amax, then cast: one without history is scaled by that of all of it."""
    program = compiled["step, delayed"]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 3
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"] * 2
    assert program["calls"].count("__cublas$lt$matmul$f8") == 5
    amaxes, casts = (program["calls"].count(f"qshard_{op}") for op in ("amax_tensor", "delayed_scale"))
    assert amaxes == casts > 0
    assert program["ops"] == []


@pytest.mark.parametrize(("recipe", "codes"), [("CurrentScaling", 128), ("NVFP4", 64)])
def test_two_axes(compiled, recipe, codes):
    """Of a weight cut along both axes, shards of 64 columns: codes travel twice, compact scales and amaxes; no value.

    XLA would gather what is cut into runs shorter than 128 if nobody told it, and permute codes that are bytes already
    before the backward pass gathers them.
    """
    program = compiled[f"two axes, {recipe}"]
    gathered = moved(program, "all-gather")
    assert {array[: array.index("[")] for array in gathered} == {"u8"}
    sizes = [math.prod(int(n) for n in array[3:-1].split(",")) for array in gathered]
    assert sorted(sizes, reverse=True)[:2] == [128 * codes] * 2
    assert sum(sizes) <= 2 * 128 * codes * 9 // 8
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "all-reduce", "reduce-scatter"}


def test_cut_blocks(compiled):
    """Of blocks that devices share, amaxes of their parts travel, then codes; scales are made everywhere."""
    program = compiled["cut blocks"]
    gathered = moved(program, "all-gather")
    assert "u8[1920,2048]" in gathered
    gathered.remove("u8[1920,2048]")
    assert gathered in (["f32[120,64]"], ["s32[120,64]"])  # amaxes of 16 x 32
    assert program["ops"] == []


def test_scan_and_remat(compiled):
    """In a loop, one layer's codes at a time: gathered forward, and when recomputing, where backward finds them."""
    program = compiled["step, scan and remat"]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 2
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"]
    assert {call for call in program["calls"] if "cublas" in call} == {"__cublas$lt$matmul$f8"}
    assert "s32[4]" in moved(program, "all-reduce")  # All scales, before the loop.


def test_scales_of_a_model_are_one_reduction(compiled):
    assert compiled["scales"]["collectives"] == [["all-reduce", ["s32[2]"]]]


def test_arrays_that_no_mesh_tells_of_are_refused(compiled):
    """Compiled from a machine with one device, all of them would be gathered in high precision."""
    assert "compiled for 8 without a mesh, and XLA would gather all of them; trace within jax.set_mesh" in compiled["no mesh"]


def test_gradients_may_travel_in_bfloat16(compiled):
    assert moved(compiled["step, bfloat16 gradients"], "reduce-scatter") == ["bf16[256,2048]"] * 2


RECIPES = ["CurrentScaling", "DelayedScaling", "BlockScaling", "MXFP8", "NVFP4"]
MODES = ["auto", "explicit", "shard_map"]
# Recipes, modes and options meet in turn; `make slow` has each with each.
QUICK = ["CurrentScaling,auto", "DelayedScaling,shard_map", "MXFP8,explicit,remat", "NVFP4,auto,products"]
SLOW = [
    f"{recipe},{mode}{option}"
    for recipe in RECIPES
    for mode in MODES
    for option in ("", ",remat", ",kept", ",codes", ",products")
]


@pytest.fixture(scope="module")
def overlap():
    """Map each case to its collectives and the other fields that support.jax_overlap prints."""
    return run(
        "jax_overlap", "bf16,auto", *QUICK, "CurrentScaling,auto,kept", "CurrentScaling,auto,apart", "NVFP4,auto"
    )


def collectives(program, kind):
    return [each for each in (Collective(**found) for found in program["collectives"]) if each.kind == kind]


def hidden(found):
    return sum(each.hidden for each in found)


def casts(program):
    return sum(call.startswith(("qshard_cast", "qshard_quantize")) for call in program["calls"])


def assert_overlaps(case, program, bf16):
    """Of a weight, the gathers of backward hide behind its own GEMMs, whatever the loop or the mode."""
    option = case.split(",")[2:]
    gathers = collectives(program, "all-gather")
    forward = [each for each in gathers if not each.backward]
    backward = [each for each in gathers if each.backward and not each.recomputed]
    # Of eight weights; the first one's x has no gradient. NVFP4's are small enough to be combined. Kept codes, and
    # those of what is computed again from codes, hide as in forward.
    if option not in (["kept"], ["codes"]):
        assert hidden(backward) == len(backward) >= 6, backward
    assert hidden(forward) >= hidden(collectives(bf16, "all-gather")) - 2
    scattered = collectives(program, "reduce-scatter")
    # The last has nothing behind it. XLA does not know how long GEMMs of ours take; where it computes codes again, it
    # bunches what it scatters.
    least = 3 if case.startswith("BlockScaling") and option == ["codes"] else len(scattered) - 1
    assert hidden(scattered) >= least
    assert program["peak"] < bf16["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_collectives_hide_behind_gemms(overlap, case):
    assert_overlaps(case, overlap[case], overlap["bf16,auto"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_collectives_hide_behind_gemms_in_every_mode():
    programs = run("jax_overlap", "bf16,auto", *SLOW)
    for case in SLOW:
        assert_overlaps(case, programs[case], programs["bf16,auto"])


def gathered(program):
    """Return the MiB that all-gathers receive."""
    return round(sum(each.bytes * each.times for each in collectives(program, "all-gather")) / 2**20)


@pytest.mark.slow
def test_gathered_bytes(overlap):
    """Twice the codes of two layers, but for what has no backward; with `jax.checkpoint` not more, if so asked."""
    codes, first = 2 * (3 + 1 + 7 + 3.5) * 16, 3 * 16
    assert gathered(overlap["CurrentScaling,auto"]) == 2 * codes - first
    assert gathered(overlap["CurrentScaling,auto,kept"]) == 2 * codes
    assert gathered(overlap["CurrentScaling,auto,apart"]) == 2 * codes - first
    assert gathered(overlap["NVFP4,auto,products"]) <= 1.02 * (codes - first / 2)


@pytest.mark.slow
def test_planes_for_backward_are_made_in_forward(overlap):
    """And what they hold is made values when it is multiplied: else XLA keeps x, or the values of all layers."""
    assert overlap["NVFP4,auto"]["peak"] < 1.05 * overlap["CurrentScaling,auto"]["peak"]


@pytest.mark.slow
def test_each_operand_is_cast_once(overlap):
    """Eight weights, x and dy of each; q, k and v, and two halves of the MLP, share one x."""
    assert casts(overlap["CurrentScaling,auto"]) == 24
    assert casts(overlap["CurrentScaling,auto,apart"]) == 14 + 14 + 8
    assert casts(overlap["NVFP4,auto,products"]) == casts(overlap["CurrentScaling,auto"])


# --- tensor and sequence parallelism ---

PARALLEL = {
    **{f"{recipe},overlap": None for recipe in ("CurrentScaling", "BlockScaling", "MXFP8", "NVFP4")},
    **{f"{recipe},{mode}": None for recipe in ("CurrentScaling", "BlockScaling") for mode in ("auto", "explicit")},
}


@pytest.fixture(scope="module")
def parallel():
    """Map each case to its collectives."""
    return run("jax_parallel", *PARALLEL)


LARGE = 2**21
"""Bytes of what is to hide. Scales of blocks that XLA has not combined with their codes are smaller, as amaxes are."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_chunks_travel_behind_products(parallel, recipe):
    """Of both layers and passes: 3 pieces of codes, 3 of products, and the codes for dw, each while a GEMM runs."""
    program = parallel[f"{recipe},overlap"]
    permuted = [each for each in collectives(program, "collective-permute") if each.bytes >= LARGE]
    gathered = [each for each in collectives(program, "all-gather") if each.bytes >= LARGE]
    products = [each for each in permuted if each.arrays[0].startswith("bf16")]
    assert (len(products), len(permuted) - len(products), len(gathered)) == (6, 6, 2)
    assert all(each.arrays[0].startswith("u8") for each in [*permuted, *gathered] if each not in products)
    assert all(each.hidden for each in [*permuted, *gathered])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling"])
def test_xla_gathers_codes_of_rows(parallel, recipe, mode):
    """Where XLA cuts products too: codes of x and of dy are gathered for each, and y and dx are reduce-scattered."""
    program = parallel[f"{recipe},{mode}"]
    gathered = [a for each in collectives(program, "all-gather") for a in each.arrays if size(a) > LARGE]
    assert all(array.startswith(("f8", "u8")) for array in gathered)
    assert len(gathered) == 4
    assert [size(a) for each in collectives(program, "reduce-scatter") for a in each.arrays] == [2 * 1024 * 4096] * 2
    others = {"all-gather", "reduce-scatter", "all-reduce"}
    assert {found["kind"] for found in program["collectives"]} <= others
