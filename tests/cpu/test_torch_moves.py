"""Moves of models: `nn.Module.to`, copies and loads give the bits of a model that was moved first, or raise.

Models over ranks are in tests/dist/test_torch_moves.py, and those of a `ZeroOptimizer` in test_torch_zero_misuse.py.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from qshard.formats import MXFP4_32x32, MXFP8_32x32, Usage
from qshard.recipes import BlockScaling, CurrentScaling, DelayedScaling
from qshard.torch_bridge import GroupedLinear, QuantizedStack, QuantizedTensor, ShardedWeight, convert, quantize

WIDTH = 64


@contextlib.contextmanager
def flag(name):
    """A future way of torch to move parameters, or none."""
    options = torch.__future__
    if name:
        getattr(options, f"set_{name}_module_params_on_conversion")(True)
    try:
        yield
    finally:
        if name:
            getattr(options, f"set_{name}_module_params_on_conversion")(False)


class Experts(nn.Module):
    """Two layers, or one of experts once they are converted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        return self.layer(x, torch.tensor([3, 5]))


def experts(prepare):
    torch.manual_seed(0)
    model = convert(prepare(Experts()), CurrentScaling())
    model.layer = GroupedLinear.of(model.layer)
    return model


def layers_of(prepare):
    torch.manual_seed(0)
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    return prepare(nn.Sequential(*layers))


KINDS = {
    "values": lambda prepare: convert(layers_of(prepare), BlockScaling()),
    "delayed": lambda prepare: convert(layers_of(prepare), DelayedScaling()),
    "stochastic": lambda prepare: convert(layers_of(prepare), "NVFP4"),
    "experts": experts,
}


def x_of(dtype=torch.float32):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def results(model):
    """The output, and the gradients of the parameters that have some, for the same random numbers."""
    for module in model.modules():
        if getattr(module, "seed", None) is not None:
            module.seed.copy_(torch.tensor([3, 4], dtype=torch.int32))
    y = model(x_of(next(model.parameters()).dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y.float().square().sum(), trained) if trained else [])]


def assert_same(model, other):
    assert [type(p) for p in model.parameters()] == [type(p) for p in other.parameters()]
    for mine, its in zip(results(model), results(other), strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


def loaded(model, assign=False):
    """By way of meta."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    return model


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to("cpu", torch.bfloat16),
    "and back": lambda model: model.bfloat16().float(),
}
OTHERS = {
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "load": loaded,
    "assign": lambda model: loaded(model, assign=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "share": lambda model: model.share_memory(),
}
every_future = pytest.mark.parametrize("future", [None, "swap", "overwrite"])


@pytest.mark.each_value
@every_future
@pytest.mark.parametrize("kind", KINDS)
def test_a_move_gives_the_bits_of_a_model_that_was_moved_first(kind, future):
    for name, move in {**CASTS, **OTHERS}.items():
        want = KINDS[kind](move if name in CASTS else lambda model: model)
        model = KINDS[kind](lambda model: model)
        with flag(future):
            assert_same(move(model), want)


@every_future
@pytest.mark.parametrize("primary", [False, True])
def test_what_belongs_to_a_parameter_moves_along(primary, future):
    """Hooks, a gradient and attributes; optimizers still hold it. Of primary weights too: nothing refers to them."""
    model = convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), CurrentScaling(), primary=primary)
    weight, seen = model[0].weight, []
    weight.tag = "mine"
    weight.grad = torch.ones(WIDTH, WIDTH)
    weight.register_hook(lambda grad: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter is weight))
    values = (weight.detach() + 0).bfloat16()
    for move in (model.bfloat16, model.cpu, lambda: model.to(torch.bfloat16), model.share_memory):
        with flag(future):
            move()
    assert model[0].weight is weight
    assert (type(weight), weight.tag, weight.dtype) == (ShardedWeight, "mine", torch.bfloat16)
    assert weight.is_shared()
    assert torch.equal(weight.detach() + 0, values)
    assert torch.equal(weight.grad, torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16))
    (weight * 2).sum().backward()
    assert seen == ["hook", True]
    assert weight.grad.dtype is torch.bfloat16
    assert weight.data_ptr() == weight.shard.data_ptr() != 0
    assert model.to("meta")[0].weight is weight
    assert weight.is_meta


def test_weights_are_exported_through_dlpack():
    """The tensor of a weight has no memory of its own: importers read address 0, and Python ended."""
    (layer,) = convert(nn.Sequential(nn.Linear(WIDTH, 32)), CurrentScaling())
    exported = torch.from_dlpack(layer.weight.detach())
    assert torch.equal(exported, layer.weight)
    assert exported.data_ptr() == layer.weight.data_ptr()
    with pytest.raises(BufferError, match=r"0\.weight requires grad; export weight\.detach\(\)"):
        torch.from_dlpack(layer.weight)


def test_weights_are_read_as_arrays():
    """As loggers of histograms read them."""
    (layer,) = convert(nn.Sequential(nn.Linear(WIDTH, 32)), CurrentScaling())
    values = layer.weight.detach() + 0
    array = np.asarray(layer.weight.detach())
    assert np.array_equal(array, values.numpy())
    assert np.array_equal(layer.weight.numpy(force=True), array)
    assert layer.weight.tolist() == values.tolist()
    layer.weight.data.zero_()
    assert not array.any()
    with pytest.raises(RuntimeError, match=r"0\.weight requires grad; call weight\.detach\(\)\.numpy"):
        layer.weight.numpy()


def test_a_dtype_that_no_cast_takes():
    """It raises at the next use, and moving back makes all as it was."""
    model, same = (KINDS["values"](lambda model: model) for _ in range(2))
    model.double()
    with pytest.raises(TypeError, match=r"x \(float64\) is not float32, bfloat16 or float16"):
        model(x_of(torch.float64))
    assert_same(model.float(), same)


def test_a_primary_model_stays_one():
    for travel in (copy.deepcopy, saved):
        model = travel(convert(layers_of(lambda model: model), CurrentScaling(), primary=True))
        with pytest.raises(ValueError, match=r"1.weight \(primary\) is not gathered; call fully_shard"):
            model(x_of())
        assert model.half()[1].weight.dtype is torch.float16


def codes_of(recipe, usage=Usage.ROWWISE, **options):
    """A converted model without values that a cast rounds, whose weights are frozen codes."""
    torch.manual_seed(0)
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
    model = convert(nn.Sequential(*layers), recipe)
    state = model.state_dict()
    for key in ("1.weight", "2.weight"):
        state[key] = quantize(state[key], options.get("fmt", model[1].recipe.weight), usage=usage)
    model.requires_grad_(False)
    return model, state


def bytes_of(weight):
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name).clone() for name in names}


@every_future
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "NVFP4", "DelayedScaling"])
def test_codes_as_weights(recipe, future):
    """They are loaded as they are, move as they are, and the dtype that they stand for changes."""
    model, state = codes_of(recipe)
    by_hand = copy.deepcopy(model)
    for layer, key in ((by_hand[1], "1.weight"), (by_hand[2], "2.weight")):
        layer.weight = nn.Parameter(state[key], requires_grad=False)
    with flag(future):
        model.load_state_dict(state, assign=True)
    before = [bytes_of(layer.weight) for layer in model[1:]]
    assert_same(model, by_hand)
    for move in (*CASTS.values(), *OTHERS.values()):
        with flag(future):
            model = move(model)
        assert all(type(layer.weight) is QuantizedTensor for layer in model[1:])
        assert not any(layer.weight.requires_grad for layer in model[1:])
        for layer, planes in zip(model[1:], before, strict=True):
            assert all(torch.equal(plane, planes[name]) for name, plane in bytes_of(layer.weight).items())
        assert model(x_of(model[1].weight.dtype)).dtype is model[1].weight.dtype
        with flag(future):
            model.float()
        assert_same(model, by_hand)
    with flag(future), pytest.raises(TypeError, match=r"x \(float64\) is not float32, bfloat16 or float16"):
        model.double()(x_of(torch.float64))
    with flag(future):
        model.float()
    assert_same(model, by_hand)
    values = {**state, **{key: state[key].dequantize() for key in ("1.weight", "2.weight")}}
    with flag(future):
        model.load_state_dict(values, assign=True)  # And back to values.
    assert all(type(layer.weight) is ShardedWeight for layer in model[1:])
    assert torch.equal(model[1].weight.detach() + 0, values["1.weight"])
    model.requires_grad_(True)
    results(model)


def test_data_of_codes():
    """Adapters are merged into `weight.data`: PyTorch kept the old codes without a word."""
    model, _ = codes_of("MXFP8")
    model.load_state_dict(codes_of("MXFP8")[1], assign=True)
    weight, want = model[1].weight, results(model)
    values, fmt = weight.dequantize(), weight.format
    for data in (values, quantize(values, "FP8_E4M3"), quantize(values[:32], fmt), None):
        with pytest.raises(ValueError, match=r"data \(.*\) is not codes of MXFP8_32x32.*; pass quantize\(values, "):
            weight.data = data
    weight.data = weight.data
    assert all(torch.equal(*pair) for pair in zip(results(model), want, strict=True))
    weight.data = quantize(4 * values, fmt)
    assert torch.equal(weight.dequantize(), 4 * values)
    assert model[1].weight is weight
    assert not torch.equal(results(model)[0], want[0])


def test_codes_that_a_layer_cannot_take():
    """One error that names the key. The layer has what it had."""
    model, state = codes_of("CurrentScaling")
    other = {"fmt": MXFP8_32x32}
    for given, assign, text in (
        (state, False, r"Error\(s\) in loading state_dict for Sequential:"),
        (codes_of("CurrentScaling", **other)[1], True, r"Error\(s\) in loading state_dict for Sequential:"),
        (codes_of("CurrentScaling", Usage.COLUMNWISE)[1], True, r"1.weight \(.*\) has no rowwise plane"),
    ):
        want = results(model)
        with pytest.raises(RuntimeError, match=text):
            model.load_state_dict(given, assign=assign)
        assert all(torch.equal(*pair) for pair in zip(results(model), want, strict=True))
    model.load_state_dict(state, assign=True)
    model.load_state_dict(codes_of("CurrentScaling")[1])
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Sequential:"):
        model.load_state_dict(codes_of("CurrentScaling", Usage.BOTH)[1])
    q = quantize(torch.ones(32, 32), MXFP8_32x32)
    with pytest.raises(ValueError, match=r"copy_: source \(MXFP8_32x32, \(32, 32\)\) and destination \(MXFP4_32x32"):
        quantize(torch.ones(32, 32), MXFP4_32x32).copy_(q)
    assert torch.equal(quantize(torch.zeros(32, 32), MXFP8_32x32).copy_(q).dequantize(), q.dequantize())


def test_a_file_of_codes_holds_nothing_of_this_process():
    """A pickle, read in another process, sets only what others than qshard set."""
    codes = quantize(torch.ones(WIDTH, WIDTH), "MXFP8_E4M3")
    codes.comment = "of a user"
    for each in (codes, QuantizedStack.of([codes, codes])):
        _, given = each.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        assert given[-1] == ({"comment": "of a user"} if each is codes else {})
