"""FSDP1 and DistributedDataParallel over NCCL: the cases of the gloo tests, on two GPUs."""

import pytest

torch = pytest.importorskip("torch")

from support.torch_ranks import run  # noqa: E402

FSDP1 = [
    ("test_trains_as_one_process", {"strategy": "full", "recipe": "current"}),
    ("test_trains_as_one_process", {"strategy": "grad_op", "recipe": "delayed"}),
    ("test_trains_as_one_process", {"strategy": "no_shard", "recipe": "mxfp8"}),
    ("test_trains_as_one_process", {"strategy": "full", "recipe": "nvfp4"}),
    ("test_accumulation", {"sync": False, "strategy": "full"}),
    ("test_activation_checkpointing", {"inside": True, "kind": "NO_REENTRANT", "recipe": "delayed"}),
    ("test_activation_checkpointing", {"inside": False, "kind": "REENTRANT", "recipe": "current"}),
    ("test_mixed_precision", {"strategy": "full", "recipe": "delayed"}),
    ("test_mixed_precision", {"strategy": "no_shard", "recipe": "current"}),
    ("test_clipping", {}),
    ("offloaded_parameters", {}),
    ("test_models_on_meta", {}),
    ("test_fused_modules", {}),
    ("test_no_codes_of_weights_are_kept", {}),
    ("test_inputs_that_are_written_between_passes", {}),
    ("test_what_was_not_prepared_is_refused", {"sync": True, "primary": False}),
]
DDP = [
    *[("test_trains_as_one_process", {"options": "all", "recipe": name}) for name in ("current", "delayed", "mxfp8")],
    ("test_trains_as_one_process", {"options": "plain", "recipe": "nvfp4"}),
    ("test_accumulation", {"options": "views", "sync": True}),
    ("test_amaxes_stay_with_their_ranks", {}),
    ("test_resumed_runs", {}),
]


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize(("case", "arguments"), FSDP1)
def test_fsdp1(case, arguments, orig):
    run(2, f"dist/test_torch_fsdp1.py::{case}", on="cuda", orig=orig, **arguments)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL, flat"])
def test_fsdp1_resumes(kind):
    run(2, "dist/test_torch_fsdp1.py::test_resumed_runs", on="cuda", kind=kind)


@pytest.mark.parametrize(("case", "arguments"), DDP)
def test_ddp(case, arguments):
    run(2, f"dist/test_torch_ddp.py::{case}", on="cuda", **arguments)
