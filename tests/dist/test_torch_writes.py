"""Writes to sharded weights: the next pass gathers the new values, and ranks with different models raise."""

import ctypes
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from qshard import reference
from qshard.formats import FP8_E5M2
from qshard.recipes import MXFP8, CurrentScaling
from qshard.torch_bridge import convert, quantize, update_scales
from support import torch_ranks
from support.fronts import assert_plane
from support.torch_models import FRONT, SIZES, batch, linears, model_of, shard
from support.torch_ranks import on_ranks


def current(recipe=None, **options):
    return shard(convert(model_of(), recipe or CurrentScaling()), **options)


def copies(plane):
    return plane._make(None if part is None else part.clone() for part in plane)


def gathered_in_forward(model, x=None):
    """Return copies of the planes of each layer's weight in forward, in model order."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: seen.append(copies(layer.weight.rowwise)))
        for layer in linears(model)
    ]
    with torch.no_grad():
        model(batch() if x is None else x)
    for hook in hooks:
        hook.remove()
    return seen


def assert_forward_takes_the_weights_as_they_are(model):
    values = [FRONT.numpy(p.full_tensor().detach().clone()) for p in (layer.weight for layer in linears(model))]
    fmts = [layer.recipe.weight for layer in linears(model)]
    for got, w, fmt in zip(gathered_in_forward(model), values, fmts, strict=True):
        assert_plane(FRONT, got, reference.quantize(w, fmt).rowwise, f"weight of {fmt}")


def by_state_dict(model, folder):
    for value in model.state_dict().values():
        value.mul_(4)


def by_get_model_state_dict(model, folder):
    for value in get_model_state_dict(model).values():
        value.mul_(4)


def by_local_tensors(model, folder):
    for value in model.state_dict().values():
        value.to_local().mul_(4)


def by_loading_in_place(model, folder):
    """Load a checkpoint in place, without `load_state_dict`."""
    state = model.state_dict()
    dcp.save({name: value * 4 for name, value in state.items()}, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


def by_data(model, folder):
    for p in model.parameters():
        p.data.mul_(4)


def by_foreach(model, folder):
    torch._foreach_mul_(list(model.parameters()), 4.0)


def by_memory(model, folder):
    """Write through the raw pointer, past PyTorch's version counters."""
    for value in model.state_dict().values():
        local = value.to_local()
        if local.numel():
            array = np.ctypeslib.as_array((ctypes.c_float * local.numel()).from_address(local.data_ptr()))
            array *= 4


def by_one_rank(model, folder):
    if dist.get_rank() == 0:
        by_state_dict(model, folder)


WAYS = [
    by_state_dict,
    by_get_model_state_dict,
    by_local_tensors,
    by_loading_in_place,
    by_data,
    by_foreach,
    by_memory,
    by_one_rank,
]


@pytest.mark.each_value
@on_ranks(1, 3)
@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8()], ids=lambda recipe: type(recipe).__name__)
def test_writes_are_never_missed(recipe, tmp_path):
    """Each write follows a forward pass, so stale scales would show."""
    model = shard(convert(model_of(sizes=(32, 96, 64)), recipe))
    x = batch(columns=32)
    gathered_in_forward(model, x)
    on_gpu = torch_ranks.device == "cuda"
    for way in (way for way in WAYS if not (on_gpu and way in (by_memory, by_loading_in_place))):
        with torch.no_grad():
            way(model, tmp_path and tmp_path / way.__name__)
        values = [FRONT.numpy(layer.weight.full_tensor().detach().clone()) for layer in linears(model)]
        for got, w in zip(gathered_in_forward(model, x), values, strict=True):
            assert_plane(FRONT, got, reference.quantize(w, recipe.weight).rowwise, way.__name__)


@on_ranks(2)
def test_a_write_between_passes_and_update_scales():
    """`update_scales` caches nothing that a later write could invalidate."""
    model = current()
    model(batch()).sum().backward()
    update_scales(model)
    with torch.no_grad():
        by_state_dict(model, None)
    assert_forward_takes_the_weights_as_they_are(model)


@on_ranks(2)
def test_a_write_after_a_forward_pass_that_raised():
    """A gather after it takes the weights as they are, not the scales of that pass."""
    model = current()
    first, last = linears(model)[0], linears(model)[-1]

    def stop(layer, inputs, y):
        raise ValueError("stop")

    hook = first.register_forward_hook(stop)
    with pytest.raises(ValueError, match="stop"):
        model(batch())
    hook.remove()
    with torch.no_grad():
        last.weight.mul_(64)
    want = quantize(last.weight.full_tensor().detach(), last.recipe.weight).dequantize()
    last.unshard()
    assert torch.equal(last.weight.dequantize(), want)


@pytest.mark.parametrize(
    ("world", "compiled"),
    [(1, False), (2, False), (3, False), (2, True), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 3))],
)
@on_ranks()
def test_a_graph_older_than_a_step_computes_with_one_weight(compiled):
    """Backward uses the new weight, as FSDP2 gathers it: never new codes with old scales."""
    torch._dynamo.reset()
    # Dynamo of torch 2.13 triggers torch 2.13's own deprecation warning.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    layer = convert(nn.Linear(32, 48, bias=False), CurrentScaling()).to(torch_ranks.device)
    model = nn.Sequential(torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)
    fully_shard(model[0], mesh=torch_ranks.mesh())
    fully_shard(model, mesh=torch_ranks.mesh())
    x = batch(columns=32).requires_grad_()
    y = model(x)
    old = layer_weight(model)
    with torch.no_grad():
        by_state_dict(model, None)
    if torch_ranks.device == "cuda":
        torch.cuda.synchronize()  # Gathers in backward do not wait for the stream of the write.
    y.backward(torch.ones_like(y))
    new = layer_weight(model)
    assert torch.equal(new, 4 * old)
    codes = quantize(new, CurrentScaling().weight).dequantize()
    torch.testing.assert_close(x.grad[0], codes.sum(0), rtol=1e-5, atol=1e-5)  # Sums of 48, in another order.


def layer_weight(model):
    (value,) = (v for k, v in model.state_dict().items() if k.endswith("weight"))
    return value.full_tensor().detach().clone()


@on_ranks(2, 3)
def test_one_rank_that_steps_alone_makes_no_hang():
    """A user error, as with plain FSDP2; codes are those of the resulting weight."""
    model = current()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch()).square().mean().backward()
    if dist.get_rank() == 0:
        optimizer.step()
    assert_forward_takes_the_weights_as_they_are(model)


def unlike(how):
    """Build a model that differs on rank 1."""
    sizes, recipe, odd = SIZES, CurrentScaling(), dist.get_rank() == 1
    if how == "format" and odd:
        recipe = CurrentScaling(weight=FP8_E5M2)
    if how == "scaling" and odd:
        recipe = MXFP8()
        sizes = (32, 96, 64)
    if how == "shape" and odd:
        sizes = (20, 96, 3, 20)
    model = model_of(sizes=sizes)
    if how == "filter" and odd:
        return shard(convert(model, recipe, filter=lambda _, name: name != "2")), sizes
    return shard(convert(model, recipe)), sizes


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("how", ["format", "scaling", "shape", "filter"])
def test_ranks_that_differ_all_hear_of_it(how):
    model, sizes = unlike(how)
    with pytest.raises(ValueError, match=r"fully_shard: rank [0-2] has other weights than this rank"):
        model(batch(columns=sizes[0]))
    # All ranks raised, so a collective of all ranks completes.
    dist.all_reduce(torch.zeros(1, device=torch_ranks.device))


def converts_one_rank():
    model = model_of()
    model = shard(convert(model, CurrentScaling()) if dist.get_rank() == 0 else model)
    model(batch())


def test_one_rank_that_is_not_converted():
    """The unconverted rank starts another collective; both ranks fail at once, as different FSDP2 models do."""
    with pytest.raises(AssertionError, match=r"ValueError: fully_shard: rank|rank . of 2: (died|Fatal Python error)"):
        torch_ranks.run(2, converts_one_rank)
