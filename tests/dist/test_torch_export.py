"""Sharded models in safetensors files: as codes, which JAX reads too, or in high precision; and back, strictly."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from qshard.formats import FP8_E4M3, MXFP8_32x32, Usage
from qshard.recipes import DelayedScaling
from qshard.torch_bridge import (
    Linear,
    QuantizedTensor,
    convert,
    from_plain,
    quantized_state_dict,
    to_plain,
    update_scales,
)
from support import torch_ranks
from support.formats import GATHERED
from support.fronts import PARTS
from support.torch_models import BLOCK_SIZES, Wire, batch, linears, model_of, planes, shard, whole
from support.torch_ranks import on_ranks, run

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def bits(x):
    return x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x


def made(recipe, seed=0, **options):
    return shard(convert(model_of(True, sizes=BLOCK_SIZES, seed=seed), recipe), **options)


def step(model):
    model(batch(0, BLOCK_SIZES[0])).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
            p.grad = None
    update_scales(model)


def assert_is_gathered(state, model):
    """The exported codes are those that forward gathers."""
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    assert {name for name, value in state.items() if isinstance(value, QuantizedTensor)} == {
        f"{n}.weight" for n in names
    }
    for name, expected in zip(names, planes(model), strict=True):
        got = state[f"{name}.weight"]
        assert (got.dtype, got.columnwise) == (torch.float32, None)
        for part in PARTS:
            a, b = getattr(got.rowwise, part), getattr(expected, part)
            assert (a is None and b is None) or torch.equal(bits(a), bits(b)), f"{part} of {name}"


def exports(folder, recipe):
    model = made(recipe)
    step(model)
    states = model.state_dict()
    with Wire() as wire:
        codes = quantized_state_dict(model)
    floats = sum(count for op, dtype, count in wire.calls if dtype.is_floating_point)
    biases = sum(-(-layer.out_features // dist.get_world_size()) for layer in linears(model))
    assert floats <= biases, "weights travel as codes"
    assert_is_gathered(codes, model)
    assert codes.keys() == {name for name in states if "delayed" not in name and "seed" not in name}
    of_one = quantized_state_dict(model, rank0_only=True, cpu_offload=True)
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank():
        assert of_one == {}
        return
    from safetensors.torch import save_file

    tensors, metadata = to_plain(of_one)
    save_file(tensors, folder / "codes.safetensors", metadata)
    save_file(full, folder / "full.safetensors")
    torch.save({"codes": codes, "full": full}, folder / "expected")


def imports(folder, recipe):
    """Load one rank's file into sharded models."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    expected = torch.load(folder / "expected", weights_only=True)
    with safe_open(folder / "codes.safetensors", "pt") as file:
        codes = from_plain(load_file(folder / "codes.safetensors"), file.metadata())
    values = {k: v.dequantize() if isinstance(v, QuantizedTensor) else v for k, v in codes.items()}
    model = made(recipe, seed=1)
    state = {k: v for k, v in model.state_dict().items() if "delayed" in k or "seed" in k}
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(model, load_file(folder / "full.safetensors"), options=options)
    for name, value in whole(model).items():
        assert torch.equal(value, expected["full"][name])
    set_model_state_dict(model, {**values, **state}, options=options)
    for key, value in whole(model).items():
        assert torch.equal(value, values[key])
    # In other formats, rounded values may get other scales.
    if recipe.weight in (FP8_E4M3, MXFP8_32x32) and not isinstance(recipe, DelayedScaling):
        again = quantized_state_dict(model)
        for name, value in expected["codes"].items():
            if isinstance(value, QuantizedTensor):  # The scale of one tensor may differ by a rounding of its own.
                assert torch.equal(bits(again[name].rowwise.data), bits(value.rowwise.data))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("MXFP4", "MXFP6"))) for name in GATHERED]
)
def test_models_go_through_safetensors(name, tmp_path):
    """From 3 ranks, whose shard boundaries split blocks, to JAX, to 2 ranks, and to PyTorch's own layers."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("safetensors")
    import qshard.jax as front

    recipe = GATHERED[name]
    run(3, exports, folder=tmp_path, recipe=recipe)
    run(2, imports, folder=tmp_path, recipe=recipe)
    from safetensors import safe_open
    from safetensors.numpy import load_file
    from safetensors.torch import load_file as load_torch

    codes = torch.load(tmp_path / "expected", weights_only=True)["codes"]
    full = {key: jax.numpy.asarray(value) for key, value in load_file(tmp_path / "full.safetensors").items()}
    rng = np.random.default_rng(0)
    with safe_open(tmp_path / "codes.safetensors", "numpy") as file:
        theirs = front.from_plain(load_file(tmp_path / "codes.safetensors"), file.metadata())
    assert theirs.keys() == codes.keys()
    for key, ours in codes.items():
        if not isinstance(ours, QuantizedTensor):
            assert np.array_equal(np.asarray(theirs[key]), ours.numpy())
            continue
        values = front.dequantize(theirs[key]) if hasattr(front, "dequantize") else theirs[key].dequantize()
        assert np.array_equal(np.asarray(values), ours.dequantize().numpy())
        if not recipe.state_shapes:  # Stateful recipes do not use the current amax.
            x = jax.numpy.asarray(rng.standard_normal((32, ours.shape[1]), dtype=np.float32))
            y, y_of_all = (front.linear(x, w, recipe, seed=0) for w in (theirs[key], full[key]))
            assert np.array_equal(y, y_of_all)
    plain = model_of(True, sizes=BLOCK_SIZES, seed=1)
    plain.load_state_dict(
        {k: v for k, v in load_torch(tmp_path / "full.safetensors").items() if k in codes}, strict=True
    )
    plain.load_state_dict(
        {k: v.dequantize() if isinstance(v, QuantizedTensor) else v for k, v in codes.items()}, strict=True
    )


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "MXFP8", "NVFP4"])
def test_columns_and_what_is_unsharded_now(name):
    """Column shards, tied weights, and weights that are unsharded between forward and backward."""
    recipe = GATHERED[name]
    model = made(recipe, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    step(model)
    assert_is_gathered(quantized_state_dict(model), model)
    model = convert(model_of(sizes=(32, 32, 32)), recipe)
    model[2].weight = model[0].weight
    fully_shard(model, mesh=torch_ranks.mesh())
    step(model)
    state = quantized_state_dict(model)
    assert state["0.weight"] is state["2.weight"]
    model.unshard()
    again = quantized_state_dict(model)
    assert torch.equal(bits(again["0.weight"].rowwise.data), bits(state["0.weight"].rowwise.data))
    kept = again["0.weight"].dequantize(usage=Usage.ROWWISE)
    model.reshard()
    assert torch.equal(again["0.weight"].dequantize(), kept)


@on_ranks(2)
@pytest.mark.parametrize("axis", [0, 1])
def test_primary_weights_are_exported_as_codes_of_their_masters(axis):
    way = {"shard_placement_fn": lambda p: Shard(min(axis, p.ndim - 1))}
    model = shard(convert(model_of(True, torch.bfloat16, BLOCK_SIZES), GATHERED["MXFP8"], primary=True), **way)
    for _ in range(2):  # Before values leave the parameters, and after.
        state = quantized_state_dict(model)
        for name, plane in zip(["0.weight", "2.weight", "4.weight"], planes(model), strict=True):
            assert state[name].dtype == torch.bfloat16
            assert torch.equal(bits(state[name].rowwise.data), bits(plane.data))
        model(batch(0, BLOCK_SIZES[0]).bfloat16())
