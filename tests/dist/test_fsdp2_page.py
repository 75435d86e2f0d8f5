"""What docs/fsdp2.md says: its code as one script, and its tables against what two ranks really send and keep."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qshard.torch_bridge import WithMasters, ZeroOptimizer, convert
from support.pages import Page, run_as_told
from support.torch_models import Wire, resident, shard
from support.torch_ranks import on_ranks

PAGE = Page("docs/fsdp2.md")
COSTS = {row["recipe"]: row for row in PAGE.rows("recipe")}
KEPT = {row["kind"]: {k: Fraction(v) for k, v in row.items() if k != "kind"} for row in PAGE.rows("kind | parameter")}
SIZE = 512
OF_TORCH = ["DTensor random operators may not have complete support", "returned a view tensor"]
"""Warnings of torch, with plain layers too: random values on CPUs, and what `parallelize_module` returns."""


def test_its_code_runs(tmp_path):
    """All blocks as one script, started as it says."""
    warned = run_as_told(PAGE, tmp_path)
    assert [line for line in warned if not any(known in line for known in OF_TORCH)] == []


def model_of():
    return nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(2)])


@on_ranks(2)
@pytest.mark.parametrize("recipe", COSTS)
def test_bytes_on_the_wire(recipe):
    plain = recipe.startswith("bf16")
    model = model_of().to(torch.bfloat16) if plain else convert(model_of(), recipe)
    model = shard(model)
    x = torch.ones(1, SIZE, dtype=torch.bfloat16 if plain else torch.float32)
    with torch.no_grad():
        model(x)  # The first time ranks send digests too.
        for layer in model:
            layer.reshard()
        with Wire() as wire:
            model(x)
    sent = sum(size * dtype.itemsize for dtype, size in wire.of("allgather"))  # By this rank: its own part.
    assert Fraction(sent * dist.get_world_size(), 2 * SIZE * SIZE) == Fraction(COSTS[recipe]["gathered"])
    reduced = sum(size * dtype.itemsize for dtype, size in wire.of("allreduce"))
    said, of_weights = COSTS[recipe]["reduced"], 2 * 4 * ("a weight" in COSTS[recipe]["one scale for"])
    assert reduced == of_weights + (0 if said == "4 a weight" else Fraction(said) * 2 * SIZE * SIZE)


@on_ranks(2)
@pytest.mark.parametrize("kind", KEPT)
def test_bytes_that_stay(kind):
    """After a step, before gradients are let go of; what is no column of the table is scales, less than 1 %."""
    recipe = "MXFP4" if "4-bit" in kind else "MXFP8"
    kind, said = kind.split(",")[0], KEPT[kind]
    assert sum(said.values()) == 2 * said["in all"]
    before = resident()
    model = convert(model_of(), recipe, primary=kind == "primary")
    if kind == "zero":
        optimizer = ZeroOptimizer(model, shard_weights=True)
    else:
        model = shard(model)
        make = torch.optim.AdamW
        optimizer = WithMasters(model.parameters(), make) if kind == "primary" else make(model.parameters())
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    elements = 2 * SIZE * SIZE // dist.get_world_size()
    kept = (resident() - before) / elements
    # Beside weights there are biases, scales and steps.
    assert kept == pytest.approx(float(said["in all"]), rel=0.01), kept
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    local = [getattr(v, "to_local", lambda v=v: v)() for v in state]
    assert sum(v.numel() * v.element_size() for v in local) / elements == pytest.approx(float(said["states"]), rel=0.01)
    if kind != "zero":
        weights = [layer.weight.to_local() for layer in model]
        kinds = {
            "parameter": [w.shard for w in weights if not w.shard.is_meta],
            "codes": [w.scale_state.primary.codes for w in weights if kind == "primary"],
            "master": [w.scale_state.primary.master for w in weights if kind == "primary"],
            "gradient": [layer.weight.grad.to_local() for layer in model],
        }
        for name, tensors in kinds.items():
            assert sum(t.numel() * t.element_size() for t in tensors) / elements == float(said[name]), name
