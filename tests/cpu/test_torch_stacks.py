"""Experts in one parameter: `QuantizedStack`, and `GroupedLinear(stacked=True)` with the bits of a list."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qshard.formats import Usage
from qshard.torch_bridge import (
    GroupedLinear,
    MoE,
    QuantizedStack,
    convert,
    grouped_linear,
    load_scaling_state,
    numerics_of,
    quantize,
    quantized_init,
    scaling_state,
    stream_weights,
    update_scales,
)
from support.formats import SQUARES, STATELESS, nearest

E, WIDTH, HIDDEN = 4, 128, 256
SIZES = torch.tensor([9, 0, 30, 21])


def x_of(width=WIDTH):
    return torch.randn(64, width, generator=torch.Generator().manual_seed(1))


def stack_of(fmt, usage=Usage.ROWWISE):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(HIDDEN, WIDTH, generator=generator) for _ in range(E)]
    return QuantizedStack.of([quantize(value, fmt, usage=usage) for value in values])


@pytest.mark.parametrize("fmt", SQUARES, ids=str)
def test_parts_and_transposes(fmt):
    """Experts, transposes and values of a stack are those of each matrix."""
    stack = stack_of(fmt)
    for expert, matrix in enumerate(stack.unbind()):
        assert torch.equal(stack.dequantize()[expert], matrix.dequantize())
        assert torch.equal(stack.mT.dequantize()[expert], matrix.dequantize().t())
        assert torch.equal(stack[expert].dequantize(torch.bfloat16), stack.bfloat16().dequantize()[expert])
    assert torch.equal(stack.mT.mT.dequantize(), stack.dequantize())
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack)), stack.clone()):
        assert isinstance(copied, QuantizedStack)
        assert torch.equal(copied.dequantize(), stack.dequantize())


@pytest.mark.parametrize("name", [name for name, recipe in STATELESS.items() if recipe.weight in SQUARES])
def test_products_of_a_stack_are_those_of_a_list(name):
    """In both layouts, with any of the planes, forward and backward."""
    recipe = nearest(STATELESS[name])
    found = []
    for weights in (
        [each.requires_grad_() for each in stack_of(recipe.weight).unbind()],
        stack_of(recipe.weight).requires_grad_(),
        stack_of(recipe.weight, Usage.BOTH).requires_grad_(),
        stack_of(recipe.weight).mT.detach().requires_grad_(),
    ):
        x = x_of().requires_grad_()
        layout = None
        if isinstance(weights, QuantizedStack):
            layout = "NK" if weights.shape[1] == HIDDEN else "KN"
        y = grouped_linear(x, weights, SIZES, recipe, weight_layout=layout)
        y.square().sum().backward()
        grads = weights.grad if layout else torch.stack([each.grad for each in weights])
        found.append((y, x.grad, grads.mT if layout == "KN" else grads))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", sorted(STATELESS))
def test_a_stacked_layer_is_a_list_of_layers(name):
    """The same bits, seeds apart, from the state dict of the list."""
    recipe = nearest(STATELESS[name])
    listed = GroupedLinear(E, WIDTH, HIDDEN, recipe=recipe)
    stacked = GroupedLinear(E, WIDTH, HIDDEN, recipe=recipe, stacked=True)
    stacked.load_state_dict(listed.state_dict())
    assert list(stacked.state_dict()) == ["experts.weight"]
    again = GroupedLinear(E, WIDTH, HIDDEN, recipe=recipe, stacked=True)
    again.load_state_dict(stacked.state_dict(), assign=True)
    found = []
    for layer in (listed, stacked, again, pickle.loads(pickle.dumps(stacked)), copy.deepcopy(stacked)):
        x = x_of().requires_grad_()
        y = layer(x, SIZES)
        y.square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        found.append((y, x.grad, torch.stack(grads) if len(grads) > 1 else grads[0]))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("name", "bias"), [("DelayedScaling", False), ("DelayedScaling", True), ("MXFP8", True)])
def test_delayed_scales_and_biases_are_those_of_a_list(name, bias):
    """Three steps with scales of earlier steps: bits, states in both forms, pickles and copies."""
    layers = []
    for stacked in (False, True):
        torch.manual_seed(0)
        layers.append(GroupedLinear(E, WIDTH, HIDDEN, bias=bias, recipe=name, stacked=stacked))
    listed, stacked = layers
    assert torch.equal(stacked.experts.weight, torch.stack([each.weight for each in listed.experts]))
    listed.load_state_dict(stacked.state_dict())
    layers += [pickle.loads(pickle.dumps(stacked)), copy.deepcopy(stacked)]
    for step in range(3):
        found = []
        for layer in layers:
            x = (x_of() * (1 + step)).requires_grad_()
            y = layer(x, SIZES)
            grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            if layer is listed:
                grads = [grads[0], *(torch.stack(grads[i :: 1 + bias]) for i in range(1, 2 + bias))]
            found.append((y, *grads))
            update_scales(layer)
        for other in found[1:]:
            assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))
    state = scaling_state(listed)
    assert len(state) == 4 * len(scaling_state(stacked))
    fresh = GroupedLinear(E, WIDTH, HIDDEN, bias=bias, recipe=name, stacked=True)
    load_scaling_state(fresh, state)
    for key, value in scaling_state(fresh).items():
        assert torch.equal(value, scaling_state(stacked)[key])
    load_scaling_state(listed, scaling_state(fresh))


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "bias"), [("MXFP8", False), ("DelayedScaling", True)])
def test_compiled_and_recomputed(name, bias):
    """One graph, and the bits of eager calls; also with activation checkpointing."""
    found, sizes = [], SIZES.clone()
    layer = GroupedLinear(E, WIDTH, HIDDEN, bias=bias, recipe=name, stacked=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call in (layer, compiled, lambda *given: checkpoint(layer, *given, use_reentrant=False)):
        layer.zero_grad()
        y = call(x_of(), sizes)
        y.square().sum().backward()
        found.append((y, layer.experts.weight.grad))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_models_of_stacked_layers():
    """Initial values, another recipe, models without memory, and statistics."""
    made = []
    for stacked in (False, True):
        torch.manual_seed(0)
        made.append(MoE(WIDTH, HIDDEN, num_experts=E, top_k=2, recipe="CurrentScaling", stacked=stacked))
    assert torch.equal(*(model(x_of()) for model in made))
    stacked = made[1]
    convert(stacked, "DelayedScaling")
    assert stacked(x_of()).isfinite().all()
    convert(stacked, "BlockScaling")
    assert stacked.w13.experts.recipe == STATELESS["BlockScaling"]
    with pytest.raises(ValueError, match=r"^numerics_of: model .* has no converted layer"):
        numerics_of(stacked)
    model = torch.nn.Sequential(stacked, convert(torch.nn.Linear(WIDTH, WIDTH), "MXFP8"))
    with pytest.warns(UserWarning, match=r"numerics_of: 0.w13.experts, 0.w2.experts \(3-D parameters of experts\) are"):
        numerics_of(model)
    with torch.device("meta"), quantized_init("MXFP8", primary=False):
        empty = MoE(WIDTH, HIDDEN, num_experts=E, top_k=2, recipe="MXFP8", stacked=True)
    empty.to_empty(device="cpu")
    empty.load_state_dict(made[0].state_dict())
    assert empty(x_of()).isfinite().all()


def test_errors():
    one, other = (quantize(torch.ones(32, size), "FP8_E4M3") for size in (32, 64))
    with pytest.raises(ValueError, match=r"QuantizedStack.of: matrices \(2\) have 2 kinds"):
        QuantizedStack.of([one, other])
    with pytest.raises(TypeError, match=r"QuantizedStack.of: matrices .* quantize each"):
        QuantizedStack.of([torch.ones(2, 2)])
    stack = QuantizedStack.of([one, one])
    with pytest.raises(NotImplementedError, match=r"^QuantizedStack: aten.add.Tensor is not supported on codes"):
        stack + 1
    with pytest.raises(ValueError, match=r"dequantize: usage .* is not a plane of QuantizedStack"):
        stack.dequantize(usage=Usage.COLUMNWISE)
    with pytest.raises(NotImplementedError, match=r"^QuantizedStack: .* export each, stack\[e\]"):
        stack.describe()
    with pytest.raises(ValueError, match=r"grouped_linear: weight_layout \(None\) is not a layout"):
        grouped_linear(torch.ones(4, 32), stack, torch.tensor([2, 2]), "CurrentScaling")
    model = convert(GroupedLinear(2, 32, 32, recipe="MXFP8", stacked=True), "MXFP8", primary=True)
    with pytest.raises(ValueError, match=r"^grouped_linear: experts.weight \(primary\) is not gathered"):
        model(torch.ones(4, 32), torch.tensor([2, 2]))


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling"])
def test_streams_have_the_tensors_of_a_list(name):
    """Codes, scales and biases of each expert, under the names of engines."""
    found = []
    for stacked in (False, True):
        torch.manual_seed(0)
        moe = MoE(64, 64, num_experts=2, top_k=1, recipe=name, stacked=stacked)
        up = GroupedLinear(2, 64, 64, bias=True, recipe=name, stacked=stacked)
        found.append(dict(stream_weights(torch.nn.ModuleDict({"mlp": moe, "up": up}), "compressed-tensors")))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value.view(torch.uint8), found[1][key].view(torch.uint8)), key
