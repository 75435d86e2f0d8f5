"""ZeRO over NCCL: the cases of the gloo tests."""

import pytest

torch = pytest.importorskip("torch")

from support.torch_ranks import run  # noqa: E402

CASES = [
    ("", "same_bits", {"name": "NVFP4"}),
    ("", "same_bits", {"name": "DelayedScaling", "dtype": "bfloat16"}),
    ("", "same_bits", {"name": "BlockScaling"}),
    ("", "test_units", {}),
    ("_clip", "test_bits_of_one_process", {"dtype": "bfloat16"}),
    ("_clip", "test_norms_that_are_not_finite", {"bad": float("nan"), "stage": True}),
    ("_clip", "test_zero_grad_of_the_model", {"stage": True}),
    ("_muon", "test_bits_of_one_process", {"kind": "float32"}),
    ("_misuse", "test_freed_weights_raise", {}),
    ("_misuse", "test_changes_after_construction", {"stage": False}),
    ("_state", "test_resumed_runs", {"recipe": "DelayedScaling", "stage": True}),
    ("_state", "test_load_state_dict", {"stage": True}),
    ("_state", "test_to_and_from_plain_programs", {"stage": False}),
    ("_compile", "test_bits_of_eager", {"way": "units", "stage": True, "recipe": "CurrentScaling"}),
    ("_schedule", "test_passes_that_are_not_as_the_one_before", {"change": "twice"}),
    ("_schedule", "test_passes_that_are_not_as_the_one_before", {"change": "recomputed_together"}),
    ("_schedule", "test_after_an_exception", {"where": "forward"}),
    ("_schedule", "test_after_an_exception", {"where": "backward"}),
    ("_schedule", "test_bits_of_other_ways_to_run", {}),
    ("_travel", "test_gradients_travel_in_parts", {"stage": True}),
    ("_travel", "test_gradients_travel_in_few_bits", {"stage": True, "dtype": "bfloat16"}),
    ("_travel", "test_memory_of_a_step", {"recipe": "CurrentScaling"}),
    ("_travel", "bits_with_slow_streams", {}),
    ("_travel", "captured_graphs_are_refused", {}),
    ("_travel", "peak_of_a_step", {}),
    ("_meta", "test_never_more_than_a_module_is_whole", {"stage": True}),
]
NEED_TWO = ("test_norms_that_are_not_finite", "test_zero_grad_of_the_model", "test_memory_of_a_step")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("file", "case", "arguments"), CASES)
def test_zero_over_nccl(file, case, arguments, world):
    if world == 1 and case in NEED_TWO:
        pytest.skip("is of two ranks")
    run(world, f"dist/test_torch_zero{file}.py::{case}", on="cuda", **arguments)


@pytest.mark.parametrize(("file", "case", "arguments"), CASES[:3])
def test_zero_on_four_gpus(file, case, arguments):
    run(4, f"dist/test_torch_zero{file}.py::{case}", on="cuda", **arguments)


def test_cuts_over_nccl(tmp_path):
    """A checkpoint of all GPUs, loaded by one."""
    world = min(torch.cuda.device_count(), 2)
    for ranks, case, stage in ((world, "save", True), (1, "load", False)):
        options = {"folder": str(tmp_path), "recipe": "DelayedScaling", "stage": stage, "options": {}}
        run(ranks, f"dist/test_torch_zero_state.py::{case}", on="cuda", **options)
