"""Layers of experts whose codes are in separate memory, as FSDP2 gathers them: bits, copies, and work of the host."""

import sys

import pytest
import torch

from qshard.formats import Usage
from qshard.recipes import NAMED
from qshard.torch_bridge import grouped_linear, quantize

SHAPES = {"CurrentScaling": (16, 32), "BlockScaling": (128, 256)}
every_recipe = pytest.mark.parametrize("name", SHAPES)


def codes_of(experts, name, usage=Usage.ROWWISE):
    generator = torch.Generator().manual_seed(0)
    fmt = NAMED[name].weight
    of = [torch.randn(SHAPES[name], generator=generator) for _ in range(experts)]
    return [quantize(values, fmt, usage=usage).requires_grad_() for values in of]


def moved(weight, place, i):
    """The same codes in other memory: `place` maps the number and the codes of an expert to a tensor of such codes."""
    rowwise = weight.parts(Usage.ROWWISE)
    other = quantize(weight.dequantize(), weight.format)
    other.set(Usage.ROWWISE, rowwise._replace(data=place(i, rowwise.data)))
    return other.requires_grad_()


def x_of(name, rows=40):
    return torch.randn(rows, SHAPES[name][1], generator=torch.Generator().manual_seed(1)).requires_grad_()


def both_passes(weights, name, sizes, x):
    y = grouped_linear(x, weights, torch.tensor(sizes), name)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *weights))]


@every_recipe
@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.BOTH], ids=str)
def test_bits_do_not_depend_on_where_codes_are(name, usage):
    """Separate memory, one buffer, and addresses that products on a GPU cannot read, so that codes are copied."""
    x, sizes, separate = x_of(name), [9, 0, 24], codes_of(3, name, usage)
    buffer = torch.empty(3, *SHAPES[name], dtype=torch.uint8)
    places = [
        lambda i, data: buffer[i].copy_(data),
        lambda _, data: torch.empty(data.numel() + 1, dtype=torch.uint8)[1:].view(data.shape).copy_(data),
    ]
    want = both_passes(separate, name, sizes, x)
    for place in places:
        got = both_passes([moved(weight, place, i) for i, weight in enumerate(separate)], name, sizes, x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(found.any() for found in want[:3])


@every_recipe
def test_products_read_codes_where_they_are(name):
    """Nothing stacks codes: of the weights only scales, which are few."""
    x, weights = x_of(name), codes_of(3, name)
    options = {"record_shapes": True, "acc_events": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        both_passes(weights, name, [9, 0, 24], x)
    events = profile.events()
    suffix = "" if NAMED[name].weight.per_tensor else "_block"
    assert [event.name for event in events].count(f"qshard::gemm_grouped{suffix}_list") == 1
    stacked = [event.input_shapes[0] for event in events if event.name == "aten::cat"]
    assert stacked, "scales are stacked"
    assert all([*SHAPES[name]] not in (each if each and isinstance(each[0], list) else [each]) for each in stacked)


MOST_CALLS = 20
"""Calls of functions on the host for each expert, in both passes. There were 93 with a loop over planes."""


@every_recipe
def test_work_of_the_host(name):
    """Most of the work of a call does not depend on the number of experts: each adds only some calls of functions."""

    def calls(experts):
        x, weights, counts = x_of(name), codes_of(experts, name), []
        sizes = [40, *[0] * (experts - 1)]

        def note(_frame, event, _argument):
            counts[-1] += event in ("call", "c_call")

        both_passes(weights, name, sizes, x)  # Caches.
        for _ in range(2):  # A cache that other tests have filled may be cleared during one of the calls.
            counts.append(0)
            sys.setprofile(note)
            try:
                both_passes(weights, name, sizes, x)
            finally:
                sys.setprofile(None)
        return min(counts)

    few, many = calls(4), calls(12)
    assert 0 < many - few <= 8 * MOST_CALLS


def test_codes_and_values_do_not_mix():
    weights = [*codes_of(1, "CurrentScaling"), torch.ones(16, 32)]
    with pytest.raises(TypeError, match=r"weights \(QuantizedTensor, Tensor\) are codes of some experts"):
        grouped_linear(x_of("CurrentScaling"), weights, torch.tensor([20, 20]), "CurrentScaling")
