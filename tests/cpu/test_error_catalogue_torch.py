"""The error catalogue, for mistakes that only PyTorch has; a call that raises changes nothing."""

import numpy as np
import pytest
import torch
from torch import nn

import qshard.torch_bridge as qt
from qshard import formats, numerics, recipes
from qshard.formats import Usage
from qshard.recipes import Recipe, Role
from support.mistakes import mistakes, said

X, HALVES = torch.ones(64, 64), torch.full((64, 64), 0.5)


def layers():
    return nn.Sequential(nn.Linear(64, 64))


def watched_without_a_step():
    with qt.numerics_of(qt.convert(layers(), "MXFP8")) as seen:
        pass
    seen.stats()


def tied():
    """Return a model whose head shares the weight of an embedding."""
    model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def sparse_gradient():
    embed = nn.Embedding(64, 64, sparse=True)
    embed(torch.tensor([0])).sum().backward()
    qt.Adam(embed.parameters()).step()


def quantized_layer():
    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(qt.quantize(layer.weight.detach(), "FP8_E4M3"))
    return layer


def twice():
    model = layers()
    kept = qt.ZeroOptimizer(model)
    return kept, qt.ZeroOptimizer(model, shard_weights=True)


def taken():
    """Return a model that an optimizer has taken over."""
    model = layers()
    qt.ZeroOptimizer(model)
    return model


def moved_under_a_graph():
    model = qt.convert(nn.Sequential(layers(), layers()), "CurrentScaling")
    loss = model(X).sum()
    model.half()
    return loss


def hollow():
    """Return a layer without rows."""
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.empty(0, 64))
    return layer


def experts_apart():
    layer = qt.GroupedLinear(2, 64, 64, recipe="CurrentScaling")
    qt.ZeroOptimizer(layer, shard_weights=True, units=[*layer.experts])


def codes(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


ELEMENTS = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "workspace": 0, "dtype": torch.float32}
BLOCKS = {**ELEMENTS, "a_rows": 1, "b_rows": 128, "cols": 128, "scale_dtype": "float32"}
NAMES = {
    **{"codes": codes, "PRODUCT": {**ELEMENTS, "fast": True}, "BLOCKS": BLOCKS},
    **{"X": X.numpy(), "W": X.numpy(), "STOCHASTIC": "NVFP4[rounding=stochastic]", "tensor": torch.from_numpy},
    **{"np": np, "torch": torch, "nn": nn, "qt": qt, "formats": formats, "recipes": recipes, "Usage": Usage},
    **{"Recipe": Recipe, "layers": layers, "tied": tied, "sparse_gradient": sparse_gradient},
    **{"quantized_layer": quantized_layer, "twice": twice, "numerics": numerics},
    **{"watched_without_a_step": watched_without_a_step},
    **{"taken": taken, "moved_under_a_graph": moved_under_a_graph, "hollow": hollow, "experts_apart": experts_apart},
}
MISTAKES = mistakes("torch")


@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes(wrong):
    call, (text,) = MISTAKES[wrong]
    assert said(call, NAMES) == text


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_tensors_that_are_sharded(mesh):
    """A DTensor, or a mesh in place of a group, raises."""
    sharded = torch.distributed.tensor.distribute_tensor(X, mesh)
    for call, text in [
        (
            lambda: qt.quantize(sharded, "FP8_E4M3"),
            "TypeError: quantize: x (DTensor) is not a plain tensor; pass x.to_local(), with group= the ranks that its "
            "amax spans",
        ),
        (
            lambda: qt.linear(sharded, X, None, "CurrentScaling"),
            "TypeError: linear: x (DTensor) is not a plain tensor; pass x.to_local()",
        ),
        (
            lambda: qt.linear(X, sharded, None, "CurrentScaling"),
            "TypeError: linear: weight (DTensor) is not a plain tensor; call the module that fully_shard wraps, which "
            "gathers it; under tensor parallelism, pass x as a DTensor of the same mesh",
        ),
        (
            lambda: qt.convert(torch.distributed.fsdp.fully_shard(layers(), mesh=mesh), "CurrentScaling"),
            "ValueError: convert: 0.weight (DTensor) is not a plain tensor; convert before sharding the model",
        ),
        (
            lambda: qt.quantize(X, "FP8_E4M3", group=mesh),
            f"TypeError: quantize: group ({mesh!r}) is not a ProcessGroup; pass one of torch.distributed, or "
            "mesh.get_group()",
        ),
    ]:
        assert said(call) == text


def test_convert_changes_all_or_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    assert said(lambda: qt.convert(model, "MXFP8")).startswith("ValueError: convert: 1.weight")
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter] * 4


def test_cast_master_writes_all_or_nothing():
    weights = [qt.quantize(X, "FP8_E4M3") for _ in range(2)]
    masters = [HALVES, HALVES.half()]
    assert said(lambda: qt.cast_master(weights, masters, [0, 0], parity="master")).startswith("TypeError: cast_master")
    assert all(torch.equal(weight.dequantize(), X) for weight in weights)


def test_a_refused_call_notes_no_amax():
    delayed = {role: qt.DelayedScale("DelayedScaling", role) for role in Role}
    said(lambda: qt.linear(X, X, torch.ones(3), "DelayedScaling", delayed=delayed))
    assert [float(state.amax) for state in delayed.values()] == [0, 0, 0]


def test_names_of_recipes():
    by_name = qt.convert(layers(), "MXFP8")
    assert by_name[0].recipe == qt.Linear(64, 64, recipe="MXFP8").recipe == recipes.MXFP8()
    assert qt.convert(by_name, "CurrentScaling")[0].recipe == recipes.CurrentScaling()
