"""Layers that share x quantize it once: the same bits in less memory, and no stale codes."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qshard.formats import Usage
from qshard.recipes import MXFP8, DelayedScaling
from qshard.torch_bridge import convert, update_scales
from qshard.torch_bridge._nn.module_calls import running
from support.formats import RECIPES
from support.llama import Held
from support.torch_fan import (
    RECIPE,
    WIDTH,
    Outer,
    assert_equal,
    batch,
    casts,
    during_a_call,
    every_recipe,
    fan,
    gradients,
    remembered,
    seeded,
)


@every_recipe
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=str)
def test_layers_that_share_x_give_the_bits_of_layers_that_do_not(recipe, frozen):
    """Each has its gradient, also where the first needs none, so that the codes for it are made later."""
    made = []
    for apart in (False, True):
        model = fan(recipe, frozen=frozen)
        x = batch(requires_grad=True)
        made.append([*gradients(model, model(x, apart), [x]), *model.buffers()])
    assert_equal(*made)


@every_recipe
@pytest.mark.parametrize("train", [True, False])
def test_x_is_quantized_once(recipe, train):
    """Each further layer quantizes its weight alone."""
    counts = []
    for layers in (1, 3):
        model, x = fan(recipe, count=layers), batch(32, requires_grad=train)
        with torch.set_grad_enabled(train), Held() as held:
            model(x)
        counts.append(casts(held.ops))
    one, three = counts
    assert three - 1 == 3 * (one - 1) > 0


def test_what_makes_layers_quantize_x_again():
    model, x = fan(RECIPE, count=2), batch()
    first, second = model.layers
    twice = fan(MXFP8(), count=1).layers[0]

    def count(call):
        with torch.no_grad(), Held() as held:
            during_a_call(call)
        return casts(held.ops)

    def both(between=lambda: None, other=second):
        first(x)
        between()
        other(x)

    assert count(both) == 3  # Two weights and x.
    assert count(lambda: both(lambda: x.add_(1))) == 4
    assert count(lambda: both(lambda: x.detach().add_(1))) == 4
    assert count(lambda: both(lambda: first(batch(seed=3)))) == 6
    assert count(lambda: both(other=twice)) == 4
    assert count(lambda: both(other=first)) == 4  # Another pass: any write to x counts.
    assert count(lambda: (during_a_call(lambda: first(x)), second(x))) == 4  # That call is over.
    assert count(lambda: (first(x), during_a_call(lambda: second(x)))) == 4

    def rounded():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first(x)
        second(x)

    assert count(rounded) == 4
    with torch.no_grad(), Held() as held:
        both()
    assert casts(held.ops) == 4  # Outside of a module that convert knows.
    with torch.inference_mode():
        inference = batch()
        assert count(lambda: (first(inference), second(inference))) == 4


def write_by_numpy(x, values):
    x.detach().numpy()[:] = values.numpy()


def write_to_data(x, values):
    x.data.copy_(values)


def write_by_dlpack(x, values):
    torch.from_dlpack(x.detach()).copy_(values)


unseen = pytest.mark.parametrize("write", [write_by_numpy, write_to_data, write_by_dlpack])


@unseen
@every_recipe
def test_writes_between_calls_count_even_those_that_autograd_does_not_see(recipe, write):
    """Each model is given all batches in the same memory, one model after the other."""
    models, x = [fan(recipe, count=2) for _ in range(2)], batch()
    for model in models:
        for seed in range(3):
            write(x, batch(seed=seed))
            for got, want in zip(model(x), seeded(model, recipe)(batch(seed=seed)), strict=True):
                assert torch.equal(got, want)


@unseen
def test_writes_between_a_call_and_one_layer_of_it_count(write):
    """Writes invalidate codes in a module with one layer per branch, and for layers outside a module."""
    first, second = fan(RECIPE, count=2).layers
    branches, x = Outer(first, second), batch()
    for way in (branches, lambda layer: layer()):
        way(lambda: first(x))
        write(x, batch(seed=7))
        assert torch.equal(way(lambda: second(x)), second(batch(seed=7)))


@unseen
def test_a_product_that_was_written_is_not_made_again_of_its_factors(write):
    """Also for writes that autograd does not see."""
    layer, h = fan(RECIPE, count=1), batch(requires_grad=True)
    x = F.silu(h) * (h + 1)
    write(x, batch(seed=7))
    gradients = []
    for given in (x, batch(seed=7)):
        layer.zero_grad()
        sum(layer(given)).sum().backward()
        gradients.append(layer.layers[0].weight.grad)
    assert torch.equal(*gradients)


def test_a_module_that_raises_has_ended():
    """After any exception, later calls share no codes with the failed call."""
    first, second = fan(RECIPE, count=2).layers
    x = batch()
    for error in (ValueError, KeyboardInterrupt):

        def stopped(error=error):
            first(x)
            raise error

        outer = Outer(first, second)
        with pytest.raises(error):
            outer(stopped)
        outer(lambda: None)
        write_to_data(x, batch(seed=3))
        assert torch.equal(outer(lambda: second(x)), second(batch(seed=3)))
    assert not [*running()]


def test_hooks_are_registered_once_and_copied():
    model = fan(RECIPE)
    convert(model, RECIPE)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(each._forward_pre_hooks) == len(each._forward_hooks) == 1
        with torch.no_grad(), Held() as held:
            each(batch())
        assert casts(held.ops) == 4


class Adapter(nn.Module):
    """A layer in a module of its own, as adapters have it, which is passed x by keyword."""

    def __init__(self):
        super().__init__()
        self.base, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.base(x) + self.low(x)


class Adapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = Adapter(), Adapter()

    def forward(self, x):
        return self.q(x=x) + self.k(x=x)


def test_layers_in_modules_that_pass_x_on_share_its_codes():
    model = convert(Adapters(), RECIPE)
    with torch.no_grad(), Held() as held:
        model(batch())
    assert casts(held.ops) == 5


def test_a_write_in_place_between_layers_is_seen():
    first, second = fan(RECIPE, count=2).layers
    x = batch()

    def written():
        return first(x), second(x.mul_(3))

    before, after = during_a_call(written)
    assert torch.equal(after, second(batch() * 3))
    assert torch.equal(before, first(batch()))


def test_under_autocast_x_is_rounded_once_and_the_gradients_are_added_as_before():
    """In the dtype of x. Autocast alone would keep three copies of it in bfloat16."""
    made = []
    for apart in (False, True):
        model, x = fan(RECIPE), batch(requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), Held() as held:
            ys = model(x, apart)
        if not apart:
            assert sum(name == "aten._to_copy.default" for name in held.ops) == 1 + len(ys)  # x, and each result.
        made.append(gradients(model, ys, [x]))
    assert_equal(*made)
    x = torch.ones(2, WIDTH, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.layers[0](x), model.layers[0](x.bfloat16()))


def test_delayed_scaling_with_states_that_differ():
    """The second layer takes the codes of the first. Both see the amax, so their scales come to be the same."""
    model, x = fan(DelayedScaling(history=1), count=2), batch(requires_grad=True)
    first, second = (layer.delayed["activation"] for layer in model.layers)
    model(batch() * 4)
    update_scales(model)
    first_scale = first.scale.clone()
    second.scale.mul_(0.5)
    second.scale_inv.mul_(2)
    y = model.layers[1](x * 1)
    shared = model(x)[1]
    assert not torch.equal(shared, y)
    second.scale.copy_(first_scale)
    second.scale_inv.copy_(first.scale_inv)
    assert torch.equal(shared, model.layers[1](x * 1))
    model(x)
    assert first.amax == second.amax == x.abs().max() * 1
    update_scales(model)
    assert torch.equal(first.scale, second.scale)


def test_nothing_is_kept_alive():
    """The cache is freed with x, at the next x and at the end of the call, and does not keep x alive."""
    first, second = fan(RECIPE, count=2).layers
    gone = []

    def body():
        x = batch()
        first(x)
        codes = weakref.ref(remembered().planes[0].planes[Usage.ROWWISE].parts.data)
        gone.append(weakref.ref(x))
        del x
        assert gone[0]() is None
        assert codes() is None
        assert remembered() is None
        x = batch()
        first(x)
        codes = weakref.ref(remembered().planes[0].planes[Usage.ROWWISE].parts.data)
        second(batch())
        assert codes() is None
        first(x)
        gone.append(weakref.ref(remembered().planes[0].planes[Usage.ROWWISE].parts.data))

    with torch.no_grad():
        during_a_call(body)
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_no_growth_over_60_steps(name):
    model = fan(RECIPES[name], count=2)
    gc.collect()
    gc.disable()  # Nothing may wait for it.
    try:
        with Held() as held:
            for step in range(60):
                gradients(model, model(batch(32, requires_grad=step % 2 == 0)), [])
                model.zero_grad()
                if step == 1:
                    after = held.now()
        assert held.now() <= after
    finally:
        gc.enable()


def test_threads_with_a_model_each():
    """Each remembers its own."""
    want, got = {}, {}
    models = {i: fan(RECIPE, count=4) for i in range(2)}

    def run(i, into):
        made = []
        for step in range(20):
            x = batch(8 + i, seed=step + 100 * i, requires_grad=True)
            models[i].zero_grad()
            made += [t.detach().clone() for t in gradients(models[i], models[i](x), [x])[:5]]
        into[i] = made

    for i in models:
        run(i, want)
    threads = [threading.Thread(target=run, args=(i, got)) for i in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # torch.manual_seed is of all threads: gradients of y are compared in y alone.
    for i in models:
        for a, b in itertools.islice(zip(got[i], want[i], strict=True), 0, None, 5):
            assert torch.equal(a, b)
