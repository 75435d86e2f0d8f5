"""`sensitivity` of torch modules and of JAX functions over sharded parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

from qshard.numerics import sensitivity, stats
from qshard.torch_bridge import convert


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32, bias=False))


def test_torch_and_jax_agree():
    model, x = make_model(), torch.randn(16, 64)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    loss = Loss(model)
    found = sensitivity(loss, (x,), ["NVFP4", "FP8_E4M3"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert [row.layer for row in sensitivity(loss, x, layers=lambda name: "2" in name).rows] == ["model.2.weight"]

    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    params = {
        f"model.{name}": jax.device_put(w.detach().numpy(), NamedSharding(mesh, P("a" if w.ndim > 1 else None)))
        for name, w in model.named_parameters()
    }

    @jax.jit
    def of(w, x):
        y = jnp.tanh(x @ w["model.0.weight"].T + w["model.0.bias"]) @ w["model.2.weight"].T
        return jnp.mean(y**2)

    same = sensitivity(of, (x.numpy(),), ["NVFP4", "FP8_E4M3"], params=params)
    assert len(same.rows) == len(found.rows) == 4
    want = {(row.layer, row.format): row.loss for row in found.rows}
    for row in same.rows:
        assert row.loss == pytest.approx(want[row.layer, row.format], rel=1e-5)


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def test_a_model_is_as_it_was_after_an_error():
    model = make_model()
    before = model[0].weight.clone()
    calls = []

    def fails(*_):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of memory")

    model[1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        sensitivity(model, torch.ones(2, 64))
    assert torch.equal(model[0].weight, before)


def test_converted_models_are_refused():
    with pytest.raises(ValueError, match=r"0\.weight \(of a converted layer\) is not a plain weight"):
        sensitivity(convert(make_model(), "MXFP8"), torch.ones(2, 64))


def test_stats_take_parameters_and_numbers_of_few_bits():
    weight = make_model()[0].weight
    assert stats(weight, "MXFP8_E4M3").sqnr_db == stats(weight.detach().numpy(), "MXFP8_E4M3").sqnr_db
    few = torch.arange(32).to(torch.float8_e4m3fn)
    assert stats(few, "FP8_E4M3").shape == (32,)
    assert np.isclose(
        stats(jnp.arange(32.0).astype(jnp.float8_e4m3fn), "FP8_E4M3").sqnr_db, stats(few, "FP8_E4M3").sqnr_db
    )
