"""Weight sync: the bytes that an engine gets from ranks are those of `quantize` of the whole weight, in its format."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import qshard.torch_bridge as qt
from qshard import reference
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description, flat, key_of
from qshard._core.validation import as_format
from qshard._files.engine_formats import engine_tensors
from qshard.formats import Usage
from qshard.recipes import NAMED
from support import torch_ranks
from support.pairs import turns
from support.torch_models import Wire
from support.torch_ranks import on_ranks

SIZES = (256, 768, 128)
CASES = [
    ("deepseek", "FP8_128x128"),
    ("compressed-tensors", "FP8_E4M3"),
    ("compressed-tensors", "MXFP8_32x32"),
    ("modelopt", "NVFP4_16x16"),
    ("compressed-tensors", "MXFP4"),
    ("qshard", "NVFP4"),
]
DTYPES = {"F8_E4M3": "float8_e4m3fn", "U8": "uint8", "F32": "float32"}


class Stacks(nn.Module):
    """Experts in 3-D parameters, as torchtitan has them."""

    def __init__(self, *shape):
        super().__init__()
        self.w1, self.w3 = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)

    def forward(self, x, offs):
        return sum(self._grouped_mm(A=x, B_t=w.transpose(-2, -1), offs=offs) for w in (self.w1, self.w3))


def model_of(dtype=torch.float32):
    """The same on all ranks; values of different sizes, so that scales differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*SIZES[:2]), nn.GELU(), nn.Linear(*SIZES[1:]), nn.LayerNorm(SIZES[2]))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(torch.randn(layer.weight.shape[0], 1).exp())
    return model.to(torch_ranks.device, dtype)


def numpy_of(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensors_of(engine, name, weight, fmt):
    """What a writer of files makes of a whole weight, in NumPy: dtype, shape and bytes by name."""
    fmt = as_format(fmt, "test")
    whole = reference.quantize(numpy_of(weight), fmt).rowwise
    arrays = (None if x is None else np.asarray(x) for x in (whole.data, whole.scale_inv, whole.global_scale_inv))
    parts = Plane(*(x.view(np.uint8) if x is not None and x.dtype.itemsize == 1 else x for x in arrays))
    if engine == "qshard":
        arrays = {key_of(name, key): x for key, x in flat({Usage.ROWWISE: parts}).items()}
        return {key: (str(x.dtype), x.shape, x.tobytes()) for key, x in arrays.items()}
    what = Description(format=fmt, shape=tuple(weight.shape), dtype="float32", planes=(Usage.ROWWISE,))
    found = {}
    for each in engine_tensors(engine, name, what):
        x = each.encode(getattr(parts, each.part), np)
        found[each.name] = (DTYPES[each.dtype], each.shape, np.ascontiguousarray(x).tobytes())
    return found


def got(stream):
    found = {}
    for name, tensor in stream:
        assert name not in found
        raw = tensor.detach().cpu().contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = (str(raw.dtype).removeprefix("torch."), tuple(raw.shape), data)
    return found


def expected(model, engine, fmt):
    """Of a model that is not sharded."""
    found = {}
    for name, value in model.state_dict().items():
        if value.ndim == 2:
            found |= tensors_of(engine, name, value, fmt)
        else:
            found |= got([(name, value)])
    return found


def fsdp(model, mesh=None):
    for module in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
        fully_shard(module, mesh=mesh or torch_ranks.mesh())
    return model


def recipe_of(fmt):
    return next((name for name, recipe in NAMED.items() if recipe.weight.name == fmt and not recipe.stateful), None)


@turns(1, kind={" ".join(kind): kind for kind in CASES}, world=[2, 4])
@on_ranks()
def test_under_fsdp2(kind):
    """Ranks split blocks. A model of bf16 values is quantized in the stream, a converted one has that format."""
    engine, fmt = kind
    given = {} if recipe_of(fmt) else {"weight_format": fmt}
    plain = model_of()
    model = model_of() if given else qt.convert(model_of(), recipe_of(fmt))
    wanted = expected(plain, engine, fmt if given else model[0].recipe.weight)
    fsdp(model)
    for bucket in (1, 2**28):
        with Wire() as wire:
            made = got(qt.stream_weights(model, engine, bucket_bytes=bucket, **given))
        assert made == wanted
        assert [*made] == [*wanted]
        floats = sum(count for _, dtype, count in wire.calls if dtype.is_floating_point)
        assert floats <= 2 * sum(p.numel() for p in plain.parameters() if p.ndim == 1), "weights go as codes"
    half = model_of(torch.bfloat16)
    wanted = expected(half, engine, fmt)
    assert got(qt.stream_weights(fsdp(half), engine, weight_format=fmt)) == wanted


@on_ranks((2, 2))
@pytest.mark.parametrize(
    ("engine", "fmt"),
    [pytest.param(*case, marks=[] if i in (0, 1, 3) else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_under_fsdp2_and_tensor_parallelism(engine, fmt):
    plain, given = model_of(), {} if recipe_of(fmt) else {"weight_format": fmt}
    model = model_of() if given else qt.convert(model_of(), recipe_of(fmt))
    wanted = expected(plain, engine, fmt if given else model[0].recipe.weight)
    mesh = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with Wire() as wire:
        assert got(qt.stream_weights(model, engine, **given)) == wanted
    assert got(qt.stream_weights(fsdp(model, mesh["dp"]), engine, **given)) == wanted
    assert not [count for _, dtype, count in wire.calls if dtype.is_floating_point and count >= SIZES[1] * SIZES[2]]


@pytest.mark.each_value
@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "NVFP4"])
@pytest.mark.parametrize("shard_weights", [False, True])
def test_under_zero(name, shard_weights):
    """After a step, too; then the model trains on."""
    model = qt.convert(model_of(), name)
    fmt, engine = model[0].recipe.weight, "compressed-tensors"
    optimizer = qt.ZeroOptimizer(model, lr=1e-2, shard_weights=shard_weights)
    assert got(qt.stream_weights(model, engine)) == expected(model_of(), engine, fmt)
    for _ in range(2):
        model(torch.ones(32, SIZES[0], device=torch_ranks.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made = got(qt.stream_weights(model, engine))
        whole = optimizer.full_weights()
        for each in ("0.weight", "2.weight"):
            wanted = tensors_of(engine, each, whole[each], fmt)
            assert {key: made[key] for key in wanted} == wanted


@on_ranks(2)
def test_shardings_that_are_gathered_as_values():
    """Columns under FSDP2, and parts that split blocks under tensor parallelism: the same bytes."""
    engine, fmt = "deepseek", "FP8_128x128"
    wanted = expected(model_of(), engine, fmt)
    model = model_of()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=torch_ranks.mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert got(qt.stream_weights(model, engine, weight_format=fmt)) == wanted
    small = nn.Sequential(nn.Linear(192, 320)).to(torch_ranks.device)
    wanted = expected(small, engine, fmt)
    parallelize_module(small, torch_ranks.mesh(), {"0": ColwiseParallel()})
    assert got(qt.stream_weights(small, engine, weight_format=fmt)) == wanted


QKV = {"q_proj": 64, "k_proj": 48, "v_proj": 16}  # rows
SHARED = ["rows", "columns", "tp", "zero", "zero codes", "stacks"]


@on_ranks(3)
@pytest.mark.parametrize("way", SHARED)
def test_weights_that_engines_merge_share_a_global_scale(way):
    """The rows of the merged weight, whose amax one rank has; shards split blocks, and are empty."""
    torch.manual_seed(0)
    mesh, fmt = torch_ranks.mesh(), as_format("NVFP4_16x16", "test")
    layers = {name: nn.Linear(96, rows, bias=False) for name, rows in QKV.items()}
    model = nn.ModuleDict({"attn": nn.ModuleDict(layers), "mlp": nn.Linear(96, 96)})
    if way == "stacks":
        model = nn.ModuleDict({"experts": Stacks(4, 48, 96)})
    model.to(torch_ranks.device)
    with torch.no_grad():
        for i, weight in enumerate(model.parameters()):
            weight.view(-1)[-1].fill_(i + 1.0)
    groups = [[model.state_dict()[f"attn.{name}.weight"].clone() for name in QKV]] if way != "stacks" else []
    names = [[f"attn.{name}.weight" for name in QKV]] if way != "stacks" else []
    for expert in range(4) if way == "stacks" else ():
        groups.append([model["experts"].get_parameter(name)[expert].detach().clone() for name in ("w1", "w3")])
        names.append([f"experts.{expert}.{name}.weight" for name in ("w1", "w3")])
    given = {"weight_format": fmt} if way == "zero" else {}
    model = model if given else qt.convert(model, "NVFP4")
    if way in ("rows", "columns"):
        axis = 1 if way == "columns" else 0
        for layer in (*model["attn"].values(), model["mlp"]):
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(axis if p.ndim > axis else 0))
    elif way == "tp":
        parallelize_module(model, mesh, {"attn.q_proj": ColwiseParallel(), "attn.k_proj": RowwiseParallel()})
    elif way == "stacks":
        fully_shard(model["experts"], mesh=mesh)
    else:  # Each layer is a unit.
        parity = "master" if way == "zero codes" else "model"
        optimizer = qt.ZeroOptimizer(model.bfloat16(), lr=1e-2, shard_weights=True, parity=parity)
        for layer in (*model["attn"].values(), model["mlp"]):
            layer(torch.ones(16, 96, dtype=torch.bfloat16, device=torch_ranks.device)).square().mean().backward()
        optimizer.step()
        dtype = torch.float32 if way == "zero codes" else torch.bfloat16
        groups = [[optimizer.full_weights()[name].to(dtype) for name in names[0]]]
    found = got(qt.stream_weights(model, "modelopt", **given))
    for weights, own in zip(groups, names, strict=True):
        merged = reference.quantize(numpy_of(torch.cat(weights)), fmt).rowwise
        codes = np.split(np.asarray(merged.data), np.cumsum([len(weight) for weight in weights])[:-1])
        for name, rows in zip(own, codes, strict=True):
            assert found[name][2] == rows.tobytes()
            assert found[f"{name}_scale_2"][2] == np.asarray(merged.global_scale_inv).tobytes()


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_delayed_and_primary_weights(sharded):
    """The trainer's bytes: with the scale of earlier steps, and the cast of masters."""
    model = qt.convert(model_of(), "DelayedScaling")
    model = fsdp(model) if sharded else model
    model(torch.ones(32, SIZES[0], device=torch_ranks.device)).square().mean().backward()
    qt.update_scales(model)
    made, codes = got(qt.stream_weights(model, "qshard")), qt.quantized_state_dict(model)
    assert made["0.weight.rowwise.data"][2] == codes["0.weight"].rowwise.data.view(torch.uint8).numpy().tobytes()
    model = fsdp(qt.convert(model_of(), "MXFP8", primary=True))
    wanted = expected(model_of(), "compressed-tensors", model[0].recipe.weight)
    assert got(qt.stream_weights(model, "compressed-tensors")) == wanted


@on_ranks(2)
@pytest.mark.parametrize("way", ["whole", "fsdp", "zero", "ep"])
def test_experts(way):
    """Under the names of Hugging Face checkpoints, gate and up apart; expert parallelism yields those of all ranks."""
    options = {"num_experts": 4, "top_k": 2, "recipe": "BlockScaling"}

    def made(**others):
        torch.manual_seed(0)
        return nn.ModuleDict({"mlp": qt.MoE(128, 256, **options, **others)}).to(torch_ranks.device)

    plain = made().mlp
    wanted = got([("mlp.gate.weight", plain.router.weight)])
    for e in range(4):
        w13, w2 = (layer.experts[e].weight.detach().clone() for layer in (plain.w13, plain.w2))
        halves = {"gate_proj": w13[:256], "up_proj": w13[256:], "down_proj": w2}
        for name, weight in halves.items():
            fmt = plain.w13.experts[0].recipe.weight
            wanted |= tensors_of("deepseek", f"mlp.experts.{e}.{name}.weight", weight, fmt)
    model = made(ep_group=dist.group.WORLD) if way == "ep" else made()
    if way == "fsdp":
        fully_shard(model.mlp, mesh=torch_ranks.mesh())
    optimizer = qt.ZeroOptimizer(model, lr=1e-2, shard_weights=True) if way == "zero" else None
    assert got(qt.stream_weights(model, "deepseek")) == wanted
    del optimizer
