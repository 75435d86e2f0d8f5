"""FSDP programs that XLA compiles for eight H100s, without a GPU (support/jax_h100.py): bytes sent and FP8 GEMMs.

XLA for CPUs proves neither: it has no FP8 GEMMs and widens the gathered arrays. The tests need JAX's CUDA plugin, half
a gigabyte, which need not be installed beside JAX: `make h100` puts it into build/jax_cuda.
"""

import collections
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
    """Run a module of support and return the JSON that it prints about programs."""
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
    """Return the result arrays of one kind of collective, sorted, however XLA combined them."""
    return sorted(array for each, arrays in program["collectives"] if each == kind for array in arrays)


@pytest.mark.parametrize("name", ["cast of rows", "cast of columns"])
def test_cast(compiled, name):
    """Four bytes are reduced; the handler writes the transposed plane, with no copy after it."""
    program = compiled[name]
    assert program["collectives"] == [["all-reduce", ["s32[]"]]]
    assert program["ops"] == []
    assert sorted(program["calls"]) == ["qshard_amax_tensor", "qshard_cast_transpose", "qshard_scale_from_amax"]


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_head(compiled, mode):
    """Gradients overwrite logits and accumulate in GEMMs: no array of the size of a chunk, or of w, is copied."""
    program = compiled[f"head, {mode}"]
    assert program["ops"] == []
    assert program["gemms"] == ["bf16[512,4096]", "bf16[512,512]", "f32[4096,512]"]
    assert [call for call in program["calls"] if call.startswith("qshard")] == ["qshard_cross_entropy_with_grad"]
    assert moved(program, "all-gather") == ["bf16[4096,512]"]
    assert moved(program, "reduce-scatter") == ["f32[512,512]"]


@pytest.mark.parametrize("name", STEPS)
def test_step_gathers_codes_and_scatters_gradients(compiled, name):
    """Both layers gather codes forward; only the second gathers again, since x has no gradient."""
    program = compiled[name]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 3
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"] * 2
    # The amaxes and the loss.
    assert {array for array in moved(program, "all-reduce") if not array.startswith("s32[")} == {"f32[]"}
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("name", STEPS)
def test_step_multiplies_in_fp8(compiled, name):
    """Every GEMM is cuBLASLt's on the codes: no operand is dequantized or transposed by XLA."""
    program = compiled[name]
    assert program["calls"].count("__cublas$lt$matmul$f8") == 5
    assert {call for call in program["calls"] if "cublas" in call} == {"__cublas$lt$matmul$f8"}
    assert program["ops"] == []
    assert program["calls"].count("qshard_transpose") == 1  # the gathered weight


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_kn_is_no_dearer(compiled, mode):
    """flax's layout, sharded along K, has the collectives and GEMMs of `[N, K]`, and XLA transposes nothing.

    Gathered codes are transposed once a layer: in forward, where `[N, K]` does it in backward.
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
    """Codes are gathered in each pass, packed FP4 at half a byte, and compact scales once; no values are sent.

    XLA has no GEMM with block scales for Hopper: 128-blocks use qshard's GEMM of codes, other blocks bfloat16.
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
    # A GEMM of codes reads transposed scales of the weight; there is no other copy.
    assert program["ops"] == (["transpose"] if of_codes else [])
    assert sum("dequantize" in call for call in program["calls"]) == (0 if of_codes else 10)


@pytest.mark.parametrize(
    "recipe", ["CurrentScaling, Auto", "CurrentScaling, Explicit", "MXFP8, Auto", "BlockScaling, Explicit"]
)
def test_batch_and_sequence(compiled, recipe):
    """With x `[16, 4096, 2048]` sharded 2 x 4, the GEMMs are those of bfloat16; x and dy are not sent or copied."""
    program, plain = compiled[f"sequence, {recipe}"], compiled["sequence, bfloat16"]
    shapes = [sorted(gemm.split("[")[1] for gemm in each["gemms"]) for each in (program, plain)]
    assert shapes[0] == shapes[1] == ["2048,2048]"] * 2 + ["8192,2048]"] * 3
    scales = {"CurrentScaling": [], "MXFP8": ["u8[64,64]"], "BlockScaling": ["u32[16,16]"]}[recipe.split(",")[0]]
    assert moved(program, "all-gather") == sorted(["u8[2048,2048]"] * 3 + scales * 2)
    assert moved(program, "reduce-scatter") == ["f32[1024,2048]"] * 2
    # Amaxes and the loss; and gradients summed over "seq", after the reduce-scatter over "fsdp".
    reduced = {array for array in moved(program, "all-reduce") if not array.startswith("s32[")}
    assert reduced == {"f32[]", "f32[1024,2048]"}
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert plain["ops"] == []
    assert program["ops"] == (["transpose"] if "BlockScaling" in recipe else [])  # 16 x 16 scales


def test_delayed_step(compiled):
    """GEMMs are FP8; the amax of the whole tensor precedes each cast, and gives the scale if there is no history."""
    program = compiled["step, delayed"]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 3
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"] * 2
    assert program["calls"].count("__cublas$lt$matmul$f8") == 5
    amaxes, casts = (program["calls"].count(f"qshard_{op}") for op in ("amax_tensor", "delayed_scale"))
    assert amaxes == casts > 0
    assert program["ops"] == []


@pytest.mark.parametrize(("recipe", "codes"), [("CurrentScaling", 128), ("NVFP4", 64)])
def test_two_axes(compiled, recipe, codes):
    """A weight sharded along both axes, in shards of 64 columns, sends its codes twice, compact scales and amaxes.

    Without a custom partitioning rule, XLA would gather shards with runs shorter than 128, and permute codes before the
    backward pass gathers them.
    """
    program = compiled[f"two axes, {recipe}"]
    gathered = moved(program, "all-gather")
    assert {array[: array.index("[")] for array in gathered} == {"u8"}
    sizes = [math.prod(int(n) for n in array[3:-1].split(",")) for array in gathered]
    assert sorted(sizes, reverse=True)[:2] == [128 * codes] * 2
    assert sum(sizes) <= 2 * 128 * codes * 9 // 8
    assert {kind for kind, _ in program["collectives"]} == {"all-gather", "all-reduce", "reduce-scatter"}


def test_cut_blocks(compiled):
    """Blocks that devices share send amaxes of partial blocks, then codes; every device computes the scales."""
    program = compiled["cut blocks"]
    gathered = moved(program, "all-gather")
    assert "u8[1920,2048]" in gathered
    gathered.remove("u8[1920,2048]")
    assert gathered in (["f32[120,64]"], ["s32[120,64]"])  # amaxes of 16 x 32 blocks
    assert program["ops"] == []


def test_scan_and_remat(compiled):
    """A loop gathers the codes of one layer at a time: forward, and in the recomputation, which backward reuses."""
    program = compiled["step, scan and remat"]
    assert moved(program, "all-gather") == ["u8[2048,2048]"] * 2
    assert moved(program, "reduce-scatter") == ["f32[256,2048]"]
    assert {call for call in program["calls"] if "cublas" in call} == {"__cublas$lt$matmul$f8"}
    assert "s32[4]" in moved(program, "all-reduce")  # All scales, before the loop.


def calls_of(program):
    """Count the ops of qshard, without the small ones of sizes and scales."""
    small = ("group_rows", "scale_from_amax")
    names = (call.removeprefix("qshard_") for call in program["calls"] if call.startswith("qshard_"))
    return collections.Counter(name for name in names if name not in small)


EXPERTS = {
    "CurrentScaling": {
        "amax_tensor": 1,
        "cast_transpose": 1,
        "amax_grouped": 2,
        "cast_transpose_grouped": 2,
        "gemm_grouped": 2,
        "gemm_grouped_k": 1,
    },
    "BlockScaling": {
        "quantize_square_both": 1,
        "quantize_block_both_t_rows": 2,
        "gemm_grouped_block": 2,
        "gemm_grouped_block_k": 1,
    },
    "NoneType": {"gemm_grouped_values_nt": 1, "gemm_grouped_values_nn": 1, "gemm_grouped_values_tn": 1},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(compiled, name):
    """One op multiplies all experts, each operand is quantized once, and XLA copies or transposes none."""
    program = compiled[f"experts, {name}"]
    assert calls_of(program) == EXPERTS[name]
    assert program["ops"] == []
    assert program["collectives"] == []


def test_gathered_experts(compiled):
    """Codes are gathered in both passes, and backward transposes them once."""
    program = compiled["experts, gathered"]
    once = {"amax_tensor": 1, "cast_tensor": 1, "transpose": 1}
    assert calls_of(program) == once | {name: n for name, n in EXPERTS["CurrentScaling"].items() if "grouped" in name}
    assert moved(program, "all-gather") == ["u8[64,256,1024]"] * 2
    assert len(moved(program, "reduce-scatter")) == 1


def test_muon_multiplies_in_fp8(compiled):
    """A loop of steps in FP8 and one in bfloat16, each of three products, for the matrix and for the stack."""
    calls = collections.Counter(call for call in compiled["muon"]["calls"] if "cublas" in call)
    assert calls == {"__cublas$lt$matmul$f8": 2 * 3, "__cublas$lt$matmul": 2 * 3}


def test_scales_of_a_model_are_one_reduction(compiled):
    assert compiled["scales"]["collectives"] == [["all-reduce", ["s32[2]"]]]


def test_arrays_that_no_mesh_tells_of_are_refused(compiled):
    """With one local device, tracing without a mesh would gather everything in high precision."""
    assert "compiled for 8 without a mesh, and XLA would gather all of them; trace within" in compiled["no mesh"]


def test_gradients_may_travel_in_bfloat16(compiled):
    assert moved(compiled["step, bfloat16 gradients"], "reduce-scatter") == ["bf16[256,2048]"] * 2


def test_gradients_may_travel_as_codes(compiled):
    """Codes and their scales by all-to-all, and no reduce-scatter or all-reduce of gradients."""
    program = compiled["step, codes of gradients"]
    assert sorted(moved(program, "all-to-all")) == ["u8[8,16384]"] * 2 + ["u8[8,524288]"] * 2
    assert moved(program, "reduce-scatter") == []


RECIPES = ["CurrentScaling", "DelayedScaling", "BlockScaling", "MXFP8", "NVFP4"]
MODES = ["auto", "explicit", "shard_map"]
# Each recipe runs with one mode and option; `make slow` runs all combinations.
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
    """Check that the backward gathers of a weight hide behind its own GEMMs, in any loop and mode."""
    option = case.split(",")[2:]
    gathers = collectives(program, "all-gather")
    forward = [each for each in gathers if not each.backward]
    backward = [each for each in gathers if each.backward and not each.recomputed]
    # Of eight weights, the first has an x without a gradient. The gathers of NVFP4 are small enough to be combined.
    # Gathers of cached codes, and of operands recomputed from codes, hide as in forward.
    if option not in (["kept"], ["codes"]):
        assert hidden(backward) == len(backward) >= 6, backward
    assert hidden(forward) >= hidden(collectives(bf16, "all-gather")) - 2
    scattered = collectives(program, "reduce-scatter")
    # The last reduce-scatter has no work behind it. XLA cannot estimate the time of qshard's GEMMs, and where it
    # recomputes codes, it groups reduce-scatters.
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
    """Codes of two layers are gathered twice, except where there is no backward; `jax.checkpoint` can avoid more."""
    codes, first = 2 * (3 + 1 + 7 + 3.5) * 16, 3 * 16
    assert gathered(overlap["CurrentScaling,auto"]) == 2 * codes - first
    assert gathered(overlap["CurrentScaling,auto,kept"]) == 2 * codes
    assert gathered(overlap["CurrentScaling,auto,apart"]) == 2 * codes - first
    assert gathered(overlap["NVFP4,auto,products"]) <= 1.02 * (codes - first / 2)


@pytest.mark.slow
def test_planes_for_backward_are_made_in_forward(overlap):
    """Planes for backward are computed in forward and dequantized at the GEMM: otherwise XLA saves x, or all values."""
    assert overlap["NVFP4,auto"]["peak"] < 1.05 * overlap["CurrentScaling,auto"]["peak"]


@pytest.mark.slow
def test_each_operand_is_cast_once(overlap):
    """Eight weights have an x and a dy each; q, k and v, and the two halves of the MLP, share one x."""
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
"""Bytes of a collective that must hide. Amaxes, and block scales not combined with their codes, are smaller."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_chunks_travel_behind_products(parallel, recipe):
    """In both layers and passes, 3 chunks of codes, 3 of products, and the codes for dw are sent while a GEMM runs."""
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
    """XLA gathers the codes of x and dy for each product, and reduce-scatters y and dx."""
    program = parallel[f"{recipe},{mode}"]
    gathered = [a for each in collectives(program, "all-gather") for a in each.arrays if size(a) > LARGE]
    assert all(array.startswith(("f8", "u8")) for array in gathered)
    assert len(gathered) == 4
    assert [size(a) for each in collectives(program, "reduce-scatter") for a in each.arrays] == [2 * 1024 * 4096] * 2
    others = {"all-gather", "reduce-scatter", "all-reduce"}
    assert {found["kind"] for found in program["collectives"]} <= others
