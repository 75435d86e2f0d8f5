"""`load_quantized` and `freeze`: codes of files as frozen weights, bit for bit, and calls that do not quantize them."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

import qshard.torch_bridge as qt  # noqa: E402
from qshard.formats import Usage  # noqa: E402
from qshard.recipes import NAMED  # noqa: E402
from qshard.torch_bridge._quantized import gemm  # noqa: E402
from support.checkpoints import ok  # noqa: E402
from support.torch_models import Wire  # noqa: E402

ENGINES = {
    "CurrentScaling": [("qshard", "FP8_E4M3"), ("compressed-tensors", "FP8_E4M3"), ("modelopt", "FP8_E4M3")],
    "BlockScaling": [("qshard", "FP8_128x128"), ("deepseek", "FP8_128x128"), ("modelopt", "FP8_128x128")],
    "MXFP8": [("qshard", "MXFP8_32x32"), ("compressed-tensors", "MXFP8_32x32")],
    "MXFP4": [("compressed-tensors", "MXFP4_32x32")],
    "NVFP4": [("qshard", "NVFP4_16x16"), ("compressed-tensors", "NVFP4_16x16"), ("modelopt", "NVFP4_16x16")],
}
CASES = [(recipe, *each) for recipe, engines in ENGINES.items() for each in engines]


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))


def file_of(tmp_path, engine, fmt, model):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    out = tmp_path / ("codes.safetensors" if engine == "qshard" else "codes")
    ok("convert", tmp_path / "model.safetensors", out, "--format", fmt, "--to", engine)
    return out


def same_codes(one, other):
    pairs = zip(one.parts(Usage.ROWWISE), other.parts(Usage.ROWWISE), strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("recipe", "engine", "fmt"), CASES)
def test_the_codes_of_a_file_are_the_weights(recipe, engine, fmt, tmp_path):
    """They are the codes that the model itself would compute, so its outputs are those of the unfrozen model."""
    source = qt.convert(model_of(0), recipe)
    path = file_of(tmp_path, engine, fmt, model_of(0))
    model = qt.load_quantized(qt.convert(model_of(1), recipe), path)
    expected = qt.quantized_state_dict(source)
    for i in (0, 2):
        weight = model[i].weight
        assert isinstance(weight, qt.QuantizedTensor)
        assert not weight.requires_grad
        assert same_codes(weight, expected[f"{i}.weight"])
        assert torch.equal(model[i].bias, source[i].bias)
    x = torch.randn(32, 128, requires_grad=True)
    torch.manual_seed(0)
    if NAMED[recipe].stochastic:
        model[0].seed, model[2].seed = source[0].seed.clone(), source[2].seed.clone()
    y, expected_y = model(x), source(x)
    assert torch.equal(y, expected_y)
    y.sum().backward()  # as the base of adapters
    assert x.grad is not None


@pytest.mark.parametrize(
    ("recipe", "engine", "fmt"),
    [
        ("MXFP8", "modelopt", "MXFP8_E4M3"),
        ("MXFP4", "compressed-tensors", "MXFP4"),
        ("NVFP4", "modelopt", "NVFP4"),
        ("BlockScaling", "qshard", "FP8_1x128"),
    ],
)
def test_blocks_along_k_alone(recipe, engine, fmt, tmp_path):
    """As engines write them: y multiplies the codes, the gradient of x the values, also in a compiled model."""
    source = model_of(0)
    with torch.no_grad():  # Rows of different sizes have different scales, so that no 2-D blocks have the same codes.
        source[0].weight.mul_(torch.randn(256, 1).exp())
    path = file_of(tmp_path, engine, fmt, source)
    model = qt.load_quantized(qt.convert(model_of(1)[:1], recipe), path, strict=False)
    weight = model[0].weight
    assert weight.format.name == fmt
    assert same_codes(weight, qt.quantize(source[0].weight.detach(), fmt))
    x = torch.randn(32, 128, requires_grad=True)
    y = model(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    role, values = NAMED[recipe], weight.dequantize(torch.float32)
    expected = qt.quantize(x.detach(), role.activation).dequantize(torch.float32) @ values.T + model[0].bias
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    if not role.stochastic:
        expected = qt.quantize(dy, role.gradient).dequantize() @ values
        assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(x.grad).all()
    saved = qt.to_plain(qt.quantized_state_dict(model))[0]
    assert torch.equal(saved["0.weight.rowwise.data"].view(torch.uint8), weight.rowwise.data.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 5, gemm.PANELS[1] + 1])
def test_large_frozen_weights_of_a_cpu(rows):
    """Few rows multiply a weight by panels, within the bound of a sum in another order."""
    layer = qt.freeze(qt.convert(nn.Linear(1024, gemm.PANELS[0] // 1024 + 10, bias=False), "CurrentScaling"))
    x = torch.randn(rows, 1024)
    found, values = layer(x), qt.quantize(x, NAMED["CurrentScaling"].activation).dequantize().double()
    weight = layer.weight.dequantize().double()
    bound = 2.0**-20 * (values.abs() @ weight.abs().T)
    assert ((found - values @ weight.T).abs() <= bound).all()


def test_plain_layers_get_values(tmp_path):
    path = file_of(tmp_path, "deepseek", "FP8_128x128", model_of(0))
    plain = qt.load_quantized(model_of(1), path)
    expected = qt.quantized_state_dict(qt.convert(model_of(0), "BlockScaling"))
    for i in (0, 2):
        assert torch.equal(plain[i].weight, expected[f"{i}.weight"].dequantize())
    one = qt.convert(model_of(1), "BlockScaling", filter=lambda layer, name: name == "0")
    qt.load_quantized(one, path)
    assert isinstance(one[0].weight, qt.QuantizedTensor)
    assert torch.equal(one[2].weight, plain[2].weight)


def test_codes_of_another_format_are_an_error_and_change_nothing(tmp_path):
    model = qt.convert(model_of(1), "NVFP4")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = file_of(tmp_path, "qshard", "MXFP8_E4M3", model_of(0))
    with pytest.raises(
        ValueError, match=r"load_quantized: 0.weight \(MXFP8_E4M3\) is not in the weight format of the recipe"
    ):
        qt.load_quantized(model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_names_and_shapes(tmp_path):
    path = file_of(tmp_path, "qshard", "MXFP8_32x32", model_of(0))
    short = qt.convert(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), "MXFP8")
    with pytest.raises(
        ValueError, match=r"3\.bias, 3\.weight of the checkpoint has no partner .*; rename them, or pass"
    ):
        qt.load_quantized(short, path)
    qt.load_quantized(short, path, strict=False)
    assert isinstance(short[2].weight, qt.QuantizedTensor)
    with pytest.raises(ValueError, match="of the model has no partner"):
        qt.load_quantized(qt.convert(nn.Linear(128, 256), "MXFP8"), path, strict=False)
    wide = qt.convert(nn.Sequential(nn.Linear(128, 512), *model_of()[1:]), "MXFP8")
    with pytest.raises(ValueError, match=r"0.weight \(256, 128\) is not \(512, 128\), its shape in the model"):
        qt.load_quantized(wide, path)
    with pytest.raises(FileNotFoundError, match=r"nothing.safetensors does not exist"):
        qt.load_quantized(short, tmp_path / "nothing.safetensors")
    with torch.device("meta"):
        meta = qt.convert(model_of(), "MXFP8")
    with pytest.raises(ValueError, match=r"is on meta; call model.to_empty"):
        qt.load_quantized(meta, path)


@pytest.mark.parametrize(
    ("dtype", "scales", "error"),
    [
        (torch.float8_e4m3fn, [], "has no scale that qshard recognizes"),
        (torch.int8, ["0.weight_scale"], "has its scale in 0.weight_scale, which qshard does not apply"),
        (torch.int8, ["0.SCB"], "has its scale in 0.SCB, which qshard does not apply"),
        (torch.bfloat16, ["0.weight_scale"], "may have its scale in 0.weight_scale, which qshard does not apply"),
    ],
)
def test_unknown_codes_are_an_error(dtype, scales, error, tmp_path):
    """They would be read as plain numbers."""
    state = model_of().state_dict()
    state["0.weight"] = state["0.weight"].to(dtype)
    state |= dict.fromkeys(scales, torch.ones(len(state["0.weight"])))
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"0.weight \(\w+\) .* {re.escape(error)}"):
        qt.load_quantized(model_of(), tmp_path / "model.safetensors", strict=False)


def test_load_state_dict_of_codes_says_this_call(tmp_path):
    path = file_of(tmp_path, "deepseek", "FP8_128x128", model_of(0))
    model, said = qt.convert(model_of(1), "BlockScaling"), r"0.weight.* has codes .*load_quantized\(model, path\)"
    before = model[0].weight.clone()
    for state in (
        load_file(path / "model.safetensors"),
        {"0.weight.rowwise.data": torch.zeros(256, 128, dtype=torch.uint8)},
        {"0.weight_packed": torch.zeros(256, 64, dtype=torch.uint8)},
    ):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=said):
                model.load_state_dict(state, strict=False, assign=assign)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8", "MXFP4"])
def test_frozen_weights_are_quantized_once(recipe):
    model = qt.convert(model_of(), recipe).eval()
    x = torch.randn(1 if recipe == "CurrentScaling" else 32, 128)
    with torch.no_grad():
        with Wire() as wire:
            expected = model(x)
        assert {(256, 128), (128, 256)} <= quantized_shapes(wire)
        assert qt.freeze(model) is model
        with Wire() as wire:
            assert torch.equal(model(x), expected)
        assert not {(256, 128), (128, 256)} & quantized_shapes(wire)
        qt.freeze(model)  # again: nothing to do


def quantized_shapes(wire):
    return {shape for op, shape in wire.shapes if op.startswith(("amax", "cast", "quantize"))}


def test_writes_to_frozen_weights_raise():
    model = qt.convert(model_of(), "MXFP8")
    old = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    qt.freeze(model)
    weight = model[0].weight
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.data.add_(1),
        lambda: weight.copy_(torch.zeros(256, 128)),
        lambda: weight[0].zero_(),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: weight.requires_grad_(True).sum(),
    ):
        with torch.no_grad(), pytest.raises((NotImplementedError, ValueError, RuntimeError, TypeError)):
            write()
    y = model(torch.ones(32, 128))
    old.grad = torch.ones_like(old)
    optimizer.step()  # has the old parameter, as documented
    assert torch.equal(model(torch.ones(32, 128)), y)


def test_what_cannot_be_frozen():
    with pytest.raises(ValueError, match="freeze: the model has no converted layer"):
        qt.freeze(model_of())
    with pytest.raises(ValueError, match=r"freeze: 0.weight is sharded or primary"):
        qt.freeze(qt.convert(model_of(), "MXFP8", primary=True))
    model = qt.convert(model_of(), "MXFP8")
    optimizer = qt.ZeroOptimizer(model)
    with pytest.raises(ValueError, match=r"freeze: the weights of model \(Sequential\) belong to ZeroOptimizer; load"):
        qt.freeze(model)
    del optimizer
    tied = tied_of(0)
    assert qt.freeze(tied)[0].weight is tied[1].weight


def test_experts_in_3d_parameters_keep_their_values():
    moe = qt.MoE(64, 64, num_experts=2, top_k=1, recipe="MXFP8", stacked=True)
    with pytest.raises(ValueError, match=r"with a weight of its own; 0.w13.experts has experts in a 3-D parameter"):
        qt.freeze(nn.ModuleList([moe]))
    linear = qt.convert(nn.ModuleList([nn.Linear(64, 64)]), "MXFP8")[0]
    named = r"freeze: moe.w13.experts, moe.w2.experts \(experts in 3-D parameters\) keep their values"
    with pytest.warns(UserWarning, match=named) as warned:
        qt.freeze(nn.ModuleDict({"linear": linear, "moe": moe}))
    assert warned[0].filename == __file__
    assert isinstance(linear.weight, qt.QuantizedTensor)


def tied_of(seed):
    torch.manual_seed(seed)
    tied = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    tied[1].weight = tied[0].weight
    return qt.convert(tied, "MXFP8")


@pytest.mark.parametrize("names", [("0.weight", "1.weight"), ("0.weight",), ("1.weight",)])
def test_tied_weights_stay_tied(names, tmp_path):
    """A file may have either name, or both: `to_plain` copies what would share memory."""
    source = tied_of(0)
    codes = qt.quantized_state_dict(source)
    tensors, metadata = qt.to_plain({name: codes[name] for name in (*names, "0.bias", "1.bias")})
    save_file(tensors, tmp_path / "w.safetensors", metadata)
    model = qt.load_quantized(tied_of(1), tmp_path / "w.safetensors")
    assert model[0].weight is model[1].weight
    assert torch.equal(model(torch.ones(32, 128)), source(torch.ones(32, 128)))
