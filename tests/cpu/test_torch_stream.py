"""Weight sync from one process: names, other tensors, and mistakes. tests/dist/test_torch_stream.py has shardings."""

import functools
import gc
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import qshard.torch_bridge as qt
from qshard.torch_bridge._weight_sync.stream import plans_of_models


def names_of(stream):
    return [name for name, _ in stream]


def test_names_and_values():
    """Linear weights are quantized; a shared weight comes once; other parameters and buffers keep their values."""
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64), "norm": nn.BatchNorm1d(32)})
    model["tied"] = nn.Linear(32, 64)
    model["tied"].weight = model["head"].weight
    found = dict(qt.stream_weights(model, "modelopt", weight_format="NVFP4", dtype=torch.bfloat16))
    heads = ["head.weight", "head.weight_scale", "head.weight_scale_2", "head.bias"]
    norms = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert [*found] == ["embed.weight", *heads, *norms, "tied.bias"]
    assert torch.equal(found["embed.weight"], model["embed"].weight.bfloat16())
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    codes = qt.quantize(model["head"].weight.detach(), "NVFP4").rowwise
    assert torch.equal(found["head.weight"], codes.data)
    assert found["head.weight_scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["head.weight_scale"].view(torch.uint8), codes.scale_inv.view(torch.uint8))


def test_codes_of_the_forward_pass():
    """A converted layer has the format of its recipe, also for one of several; others stay values."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    qt.convert(model, {"0": "BlockScaling", "1": "MXFP8", "*": None})
    found = dict(qt.stream_weights(model, bucket_bytes=1))
    assert found["0.weight_scale"].shape == (1, 1)
    assert found["1.weight_scale"].shape == (128, 4)
    assert torch.equal(found["2.weight"], model[2].weight)


class Stacks(nn.Module):
    """Experts in 3-D parameters, as torchtitan has them."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(3, 64, 32)))

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)

    def forward(self, x, offs):
        return sum(self._grouped_mm(A=x, B_t=w.transpose(-2, -1), offs=offs) for w in self.parameters())


def test_experts_of_other_layers():
    """`GroupedLinear` by its own name, and 3-D parameters as torchtitan has them."""
    model = nn.ModuleDict({"up": qt.GroupedLinear(2, 32, 64, bias=True, recipe="MXFP8"), "experts": Stacks("w1")})
    qt.convert(model, "MXFP8")
    found = dict(qt.stream_weights(model))
    each = [f"experts.{e}.up.{kind}" for e in range(2) for kind in ("weight", "weight_scale", "bias")]
    each += [f"experts.{e}.w1.{kind}" for e in range(3) for kind in ("weight", "weight_scale")]
    assert [*found] == each
    codes = qt.quantize(model["experts"].w1[1].detach(), model["experts"].recipe.weight).rowwise
    assert torch.equal(found["experts.1.w1.weight"].view(torch.uint8), codes.data.view(torch.uint8))


def test_plans_follow_the_model():
    """A plan is used again, and not once a weight, a recipe or a dtype is another. A stream that stops does no harm."""
    model = qt.convert(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), "MXFP8")

    def has_codes_of(fmt):
        found = dict(qt.stream_weights(model, "qshard", bucket_bytes=1))
        for i in (0, 1):
            codes = qt.quantize(model[i].weight.detach() * 1, fmt).rowwise  # A product is no weight of a layer.
            assert torch.equal(found[f"{i}.weight.rowwise.data"], codes.data.view(torch.uint8))

    has_codes_of("MXFP8_32x32")
    next(qt.stream_weights(model, "qshard", bucket_bytes=1))
    plans = len(plans_of_models[model])
    with torch.no_grad():
        model[0].weight.mul_(3)
    has_codes_of("MXFP8_32x32")
    assert len(plans_of_models[model]) == plans
    model[1] = qt.convert(nn.Linear(128, 128), "MXFP8")
    has_codes_of("MXFP8_32x32")
    model.bfloat16()
    has_codes_of("MXFP8_32x32")
    qt.convert(model, "NVFP4")
    has_codes_of("NVFP4_16x16")
    frozen = dict(qt.stream_weights(model, "qshard"))
    qt.freeze(model)
    assert all(torch.equal(frozen[name], each) for name, each in qt.stream_weights(model, "qshard"))


def test_formats_by_pattern():
    """Patterns match names of weights or of layers; None keeps values, also of a layer with a recipe."""
    model = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("up", "down", "lm_head")})

    def formats(**given):
        names = {name for name, _ in qt.stream_weights(model, "modelopt", **given)}
        scales = {"weight_scale_2": "NVFP4", "weight_scale": "MXFP8", "weight": None}
        return [next(fmt for key, fmt in scales.items() if f"{layer}.{key}" in names) for layer in model]

    assert formats(weight_format={"lm_head": None, "up.weight": "NVFP4", "*": "MXFP8_E4M3"}) == ["NVFP4", "MXFP8", None]
    qt.convert(model, "MXFP8")
    assert formats(weight_format={"lm_head": None}) == ["MXFP8", "MXFP8", None]
    assert formats() == ["MXFP8", "MXFP8", "MXFP8"]


def test_plans_keep_no_model():
    model = nn.Linear(128, 128)
    weight = weakref.ref(model.weight)
    assert [*qt.stream_weights(model, weight_format="MXFP8_E4M3")]
    assert model in plans_of_models
    del model
    gc.collect()
    assert weight() is None


def test_mistakes():
    """One error, before anything is gathered."""
    model, small = nn.Sequential(nn.Linear(128, 96)), qt.MoE(32, 64, num_experts=2, top_k=1, recipe="BlockScaling")
    for target, given, text in (
        (model, {}, "model (Sequential) has no quantized weight; call convert first, or pass weight_format="),
        (model, {"format": "vllm"}, "format ('vllm') is unknown"),
        (model, {"bucket_bytes": 0.5}, "bucket_bytes (0.5) is not a positive integer"),
        (model, {"weight_format": "NVFP4", "format": "deepseek"}, "0.weight (NVFP4) has no form in deepseek"),
        (model, {"weight_format": "NVFP4[rounding=stochastic]"}, "rounds stochastically"),
        (model, {"weight_format": {"*": "NVFP4[rounding=stochastic]"}}, "rounds stochastically"),
        (model, {"weight_format": {"lm_head": None, "*": "NVFP4"}}, "pattern 'lm_head' matches no weight; the closest"),
        (model, {"weight_format": {"*": "NVFP4", "0": None}}, "pattern '0' has no effect: '*' before it"),
        (model, {"weight_format": {"*": None}}, "has no quantized weight"),
        (model, {"weight_format": ""}, "weight_format"),
        (small, {}, "experts.0.gate_proj.weight is rows 0 to 64 of a weight (128, 32) whose blocks have 128 rows"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            qt.stream_weights(target, **given)
    with pytest.raises(TypeError, match="model"):
        qt.stream_weights("model")


QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 16}  # rows


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_weights_that_engines_merge_share_a_global_scale(framework):
    """vLLM takes one scale for q, k and v: their codes are rows of `quantize` of the merged weight."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(64, rows, bias=False) for name, rows in QKV.items()})
    with torch.no_grad():
        layers["k_proj"].weight.mul_(9)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    if framework == "jax":
        qj = pytest.importorskip("qshard.jax")
        params = {"attn": {name: {"weight": each.numpy()} for name, each in weights.items()}}
        stream = functools.partial(qj.stream_weights, params)
    else:
        stream = functools.partial(qt.stream_weights, nn.ModuleDict({"attn": layers}))

    def streamed(format, fmt, **others):
        found = {}
        for name, x in stream(format, weight_format=fmt, **others):
            x = np.asarray(x) if framework == "jax" else x.contiguous().reshape(-1).view(torch.uint8).numpy()
            found[name.removeprefix("attn.")] = x.tobytes()
        return found

    merged = qt.quantize(torch.cat([*weights.values()]), "NVFP4_16x16").rowwise
    codes, scale = merged.data.split([*QKV.values()]), merged.global_scale_inv.numpy().tobytes()
    for size in (1, 2**28):
        found = streamed("modelopt", "NVFP4_16x16", bucket_bytes=size)
        for name, rows in zip(QKV, codes, strict=True):
            assert found[f"{name}.weight"] == rows.numpy().tobytes()
            assert found[f"{name}.weight_scale_2"] == scale
    own = qt.quantize(weights["v_proj"], "NVFP4_16x16").rowwise.data
    assert streamed("qshard", "NVFP4_16x16")["v_proj.weight.rowwise.data"] == own.numpy().tobytes()
    assert not torch.equal(own, codes[2])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_codes_that_engines_merge_keep_their_global_scales(framework):
    """A warning names them. Formats without a global scale, and rows of one weight, need none."""
    layers = nn.ModuleDict({name: nn.Linear(64, 32, bias=False) for name in ("gate_proj", "up_proj")})
    if framework == "jax":
        qj = pytest.importorskip("qshard.jax")
        weights = {f"mlp.{name}.weight": layer.weight.detach().numpy() for name, layer in layers.items()}
        weights["mlp.up_proj.weight"] = qj.quantize(weights["mlp.up_proj.weight"], "NVFP4")
        stream = functools.partial(qj.stream_weights, weights, weight_format="NVFP4")
    else:
        qt.freeze(qt.convert(layers["up_proj"], "NVFP4"))
        qt.convert(layers["gate_proj"], "NVFP4")
        stream = functools.partial(qt.stream_weights, nn.ModuleDict({"mlp": layers}))
    message = r"mlp.gate_proj.weight and mlp.up_proj.weight \(NVFP4\S*\) have a global scale each"
    with pytest.warns(UserWarning, match=message):
        list(stream("modelopt"))
    list(stream("qshard"))
    shared = qt.MoE(64, 64, num_experts=2, top_k=1, recipe="NVFP4")
    list(qt.stream_weights(shared, "modelopt"))


def test_stacks_that_engines_merge_share_the_global_scales_of_experts():
    torch.manual_seed(0)
    model = qt.convert(nn.ModuleDict({"experts": Stacks("w1", "w3")}), "NVFP4")
    found = dict(qt.stream_weights(model, "modelopt"))
    for expert in range(3):
        halves = [model["experts"].get_parameter(name)[expert].detach() * 1 for name in ("w1", "w3")]
        merged = qt.quantize(torch.cat(halves), model["experts"].recipe.weight).rowwise
        codes = [found[f"experts.{expert}.{name}.weight"] for name in ("w1", "w3")]
        assert torch.equal(torch.cat(codes), merged.data)
        assert found[f"experts.{expert}.w1.weight_scale_2"] == found[f"experts.{expert}.w3.weight_scale_2"]
