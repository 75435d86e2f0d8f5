"""Objects travel: what is saved, copied, pickled, sent to other processes or shared comes back with the same bits."""

import copy
import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from qshard.formats import FP8_E4M3, MXFP8_E4M3, NVFP4, NVFP4_16x16, Usage
from qshard.plain import KEY, described
from qshard.recipes import NVFP4 as NVFP4Recipe
from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import (
    Adam,
    AdamW,
    CastPlan,
    Linear,
    QuantizedTensor,
    ShardedWeight,
    ZeroOptimizer,
    cast_master,
    convert,
    from_plain,
    quantize,
    to_plain,
    update_columnwise,
    update_scales,
)
from qshard.torch_bridge.tensor import _rebuild
from support.formats import RECIPES, VARIANTS, stochastic, usages_of
from support.travel import learn, serve

# One with scales of its own, and one with seeds.
with_states = pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4Recipe()], ids=["scales", "seeds"])
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quantized(fmt=FP8_E4M3, usage=Usage.BOTH, shape=(32, 64), dtype=torch.bfloat16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return quantize(x, fmt, usage=usage, seed=1 if stochastic(fmt) else None)


@pytest.fixture(scope="module")
def of_all_formats():
    """A tensor of every format with every option, of one plane or the other or both, of two axes or three."""
    made = {}
    for i, fmt in enumerate(VARIANTS):
        shape = ((64, 96), (2, 32, 96))[i % 2]
        usages = usages_of(fmt, shape)
        made[str(fmt)] = quantized(fmt, usages[-1 - i // 2 % len(usages)], shape)
    stale = quantized(NVFP4_16x16)
    cast_master([stale], [torch.ones(32 * 64)], [0], parity="master")
    return made | {"stale": stale, "parameter": nn.Parameter(quantized()), "frozen": nn.Parameter(quantized(), False)}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def bytes_of(q):
    return [getattr(q, name) for name in q.__tensor_flatten__()[0]]


def assert_same(got, want):
    assert (type(got), got.shape, got.stride()) == (type(want), want.shape, want.stride())
    assert got.__tensor_flatten__() == want.__tensor_flatten__()
    assert (got.requires_grad, isinstance(got, nn.Parameter)) == (want.requires_grad, isinstance(want, nn.Parameter))
    for a, b in zip(bytes_of(got), bytes_of(want), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def from_disk(folder, **options):
    def travel(value):
        torch.save(value, folder / "file")
        return torch.load(folder / "file", **options)

    return travel


@pytest.mark.parametrize("way", ["pickle", "weights_only", "not weights_only", "mmap", "copy", "deepcopy", "plain"])
def test_quantized_tensors_come_back_with_the_same_bits(way, of_all_formats, tmp_path):
    travel = {
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "weights_only": lambda value: torch.load(saved(value), weights_only=True),
        "not weights_only": lambda value: torch.load(saved(value), weights_only=False),
        "mmap": from_disk(tmp_path, mmap=True, map_location="cpu"),
        "copy": lambda value: {name: copy.copy(q) for name, q in value.items()},
        "deepcopy": copy.deepcopy,
        "plain": lambda value: from_plain(*to_plain(value)),
    }[way]
    again = travel(of_all_formats)
    assert list(again) == list(of_all_formats)
    for name, q in of_all_formats.items():
        if way == "plain" and isinstance(q, nn.Parameter):
            q = q.detach()
        if way == "plain" and name == "stale":  # It counts as absent.
            assert again[name].columnwise is None
            assert again[name].parts(Usage.COLUMNWISE, stale=True) is None
            assert torch.equal(again[name].dequantize(), q.dequantize())
            continue
        assert_same(again[name], q)
    stale = again["stale"]
    update_columnwise([stale])
    assert torch.equal(stale.dequantize(usage=Usage.COLUMNWISE), stale.dequantize())


def test_memory_is_shared_as_it_was():
    q = quantized()
    both = [q, q.detach(), q.rowwise.data]
    for again in (torch.load(saved(both)), copy.deepcopy(both)):
        addresses = [again[0]._rowwise_data, again[1]._rowwise_data, again[2]]
        assert len({part.untyped_storage().data_ptr() for part in addresses}) == 1
        assert addresses[0].untyped_storage().data_ptr() != q._rowwise_data.untyped_storage().data_ptr()
        scales = again[0]._rowwise_scale_inv, again[0]._columnwise_scale_inv  # One scale, of two planes.
        assert scales[0].data_ptr() == scales[1].data_ptr()
    assert [part.data_ptr() for part in bytes_of(copy.copy(q))] == [part.data_ptr() for part in bytes_of(q)]
    part = quantized()
    part.set(Usage.ROWWISE, part.parts(Usage.ROWWISE)._replace(data=torch.zeros(2, 32, 64, dtype=torch.uint8)[1]))
    again = torch.load(saved(part))  # Of memory that holds more, its own part alone.
    assert again._rowwise_data.untyped_storage().nbytes() == 32 * 64
    assert copy.copy(part)._rowwise_data.data_ptr() == part._rowwise_data.data_ptr()
    twice = copy.deepcopy([q, q])
    assert twice[0] is twice[1]


def test_attributes_and_gradients_travel_as_those_of_tensors():
    q = nn.Parameter(quantized())
    q.tag, q.grad = "expert", torch.ones(32, 64, dtype=torch.bfloat16)
    for again in (torch.load(saved(q)), copy.copy(q), copy.deepcopy(q)):
        assert again.tag == "expert"
    assert torch.equal(copy.deepcopy(q).grad, q.grad)
    assert torch.load(saved(q)).grad is None
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(q.view(32, 64))


class Forged:
    """What a file may hold that qshard did not write."""

    def __init__(self, *given):
        self.given = given

    def __reduce__(self):
        return _rebuild, self.given


def forged(text=None, stale=False, others=None, **parts):
    _, (right, arrays, _, _, _) = quantized(NVFP4).__reduce_ex__(2)
    arrays = {name: parts.get(name.replace(".", "_"), array) for name, array in arrays.items()}
    return saved(Forged(text or right, arrays, stale, False, others or {}))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: forged(rowwise_data=torch.zeros(32, 31, dtype=torch.uint8)), r"rowwise.data \(uint8 \(32, 31\)\)"),
        (lambda: forged(rowwise_data=torch.zeros(32, 32)), r"rowwise.data \(float32 \(32, 32\)\) is not uint8"),
        (lambda: forged(columnwise_scale_inv=torch.zeros(64, 1, dtype=torch.uint8)), "columnwise.scale_inv"),
        (lambda: forged(rowwise_global_scale_inv=None), r"rowwise.global_scale_inv \(absent\) is not there"),
        (lambda: forged(rowwise_data="codes"), r"rowwise.data \(absent\) is not there"),
        (lambda: forged(rowwise_global_scale_inv=quantized(shape=(), dtype=torch.float32)), "is not of plain tensors"),
        (lambda: forged(columnwise_scale_inv=torch.zeros(64, 2, dtype=torch.uint8).to_sparse()), "not of plain"),
        (lambda: forged(rowwise_data=torch.zeros(32, 32, dtype=torch.uint8, device="meta")), r"on cpu, meta\) is not"),
        (lambda: forged("{}"), "is not the JSON of to_plain"),
        (lambda: forged('{"version": 1, "tensors": {}}'), "is not of one tensor"),
        (lambda: forged(others={"_rowwise_data": torch.zeros(1)}), r"attribute _rowwise_data \(saved\)"),
        (lambda: saved(Forged("", [], False, False, {})), "is not the JSON"),
        (lambda: saved(Forged(*quantized(usage=Usage.ROWWISE).__reduce_ex__(2)[1][:2], True, False, {})), "stale"),
    ],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_what_does_not_fit_is_refused(make, text, weights_only):
    with pytest.raises(ValueError, match=f"QuantizedTensor: .*{text}"):
        torch.load(make(), weights_only=weights_only)


def test_memory_of_other_strides_is_made_contiguous():
    """A kernel reads row after row, and would read past the end of what has strides of 0."""
    strided = torch.zeros(1, dtype=torch.uint8).expand(32, 32)
    q = torch.load(forged(rowwise_data=strided), weights_only=True)
    assert q.parts(Usage.ROWWISE).data.is_contiguous()
    assert not q.dequantize().any()


def names_in(file):
    with zipfile.ZipFile(file) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return {str(argument) for _, argument, _ in pickletools.genops(data) if argument is not None}


READER = """
import sys
sys.modules["qshard"] = None
import json, ml_dtypes, numpy as np, torch
from pathlib import Path
folder = Path(sys.argv[1])
try:
    import safetensors.numpy, safetensors
    arrays = safetensors.numpy.load_file(folder / "w.safetensors")
    with safetensors.safe_open(folder / "w.safetensors", "numpy") as file:
        metadata = file.metadata()
except ImportError:
    arrays, metadata = np.load(folder / "w.npz"), json.loads((folder / "w.json").read_text())
assert json.loads(metadata["qshard"])["tensors"]["w"]["shape"] == [32, 64]
values = arrays["w.rowwise.data"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
values *= np.repeat(arrays["w.rowwise.scale_inv"].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=1)
np.save(folder / "values.npy", values)
for name in ("plain", "state", "parameters", "optimizer"):
    read = torch.load(folder / name, weights_only=True)
assert type(torch.load(folder / "state", weights_only=True)["0.weight"]) is torch.Tensor
assert type(torch.load(folder / "parameters", weights_only=True)["0.weight"]) is torch.nn.Parameter
assert torch.load(folder / "optimizer", weights_only=True)["state"][0]["exp_avg"].dtype is torch.float8_e4m3fn
"""


def test_programs_without_qshard_read_what_is_plain(tmp_path):
    """State dicts, parameters, states of optimizers, and quantized weights: with torch alone, or with NumPy alone."""
    q = quantized(MXFP8_E4M3, Usage.ROWWISE, dtype=torch.float32)
    tensors, metadata = to_plain({"w": q, "both": quantized(), "b": torch.ones(3)})
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(tmp_path / "w.npz", **arrays)
    (tmp_path / "w.json").write_text(json.dumps(metadata))
    model = model_of(DelayedScaling())
    optimizer = Adam(model.parameters(), exp_avg_dtype=torch.float8_e4m3fn)
    learn(model, batches(), optimizer)
    files = {"plain": tensors, "state": model.state_dict(), "parameters": dict(model.named_parameters())}
    for name, value in (files | {"optimizer": optimizer.state_dict()}).items():
        torch.save(value, tmp_path / name)
        assert not any("qshard" in text for text in names_in(tmp_path / name)), name
    try:
        from safetensors.torch import save_file
    except ImportError:
        pass
    else:
        save_file(tensors, tmp_path / "w.safetensors", metadata)
    result = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert np.array_equal(np.load(tmp_path / "values.npy"), q.dequantize().numpy())


def test_safetensors_take_it_as_it_is(of_all_formats, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    some = {name: q for name, q in of_all_formats.items() if not isinstance(q, nn.Parameter) and name != "stale"}
    tensors, metadata = to_plain(some)
    save_file(tensors, tmp_path / "file", metadata | {"format": "pt"})
    with safetensors.safe_open(tmp_path / "file", "pt") as file:
        again = from_plain(load_file(tmp_path / "file"), file.metadata())
    for name, q in some.items():
        assert_same(again[name], q)


def test_jax_reads_what_torch_wrote_and_back(of_all_formats):
    """The same names, bytes and JSON, for every format."""
    jax = pytest.importorskip("jax")
    import qshard.jax

    some = {name: q for name, q in of_all_formats.items() if not isinstance(q, nn.Parameter) and name != "stale"}
    tensors, metadata = to_plain(some)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    theirs = qshard.jax.from_plain(arrays, metadata)
    assert all(isinstance(q, qshard.jax.QuantizedArray) for q in theirs.values())
    back, metadata_back = qshard.jax.to_plain(theirs)
    assert metadata_back == metadata
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(np.asarray(back[name]), array), name
    for name in ("FP8_E4M3", "MXFP8_E4M3", "NVFP4"):
        values = theirs[name].dequantize()
        assert values.shape == some[name].shape
        assert np.array_equal(np.asarray(values).astype(np.float32), some[name].dequantize().float().numpy())
    for travel in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        for name, q in theirs.items():
            again = travel(q)
            assert (again.format, again.dtype, again.axes) == (q.format, q.dtype, q.axes)
            assert jax.tree.structure(again) == jax.tree.structure(q)
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(np.asarray(a), np.asarray(b)), name
    stacked = jax.tree.map(lambda leaf: jax.numpy.stack([leaf, leaf]), theirs["FP8_E4M3"])
    with pytest.raises(ValueError, match=r"to_plain: w \(QuantizedArray\(FP8_E4M3.* is not one whole tensor"):
        qshard.jax.to_plain({"w": stacked})


def test_checkpoints_of_distributed_take_the_plain_form(tmp_path):
    """Loaded in place: the plain form shares the memory of the tensor."""
    q, like = quantized(), quantize(torch.zeros(32, 64, dtype=torch.bfloat16), FP8_E4M3, usage=Usage.BOTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that there is one process.
        dcp.save(to_plain({"w": q})[0], checkpoint_id=tmp_path / "taken", no_dist=True)
        dcp.save({"w": torch.zeros(32, 64)}, checkpoint_id=tmp_path / "other", no_dist=True)
        for call, name in ((dcp.save, "w"), (dcp.load, "tensor")):
            with pytest.raises(dcp.api.CheckpointException, match=name + r" .QuantizedTensor. is not a plain tensor"):
                call({"w": q}, checkpoint_id=tmp_path / "other", no_dist=True)
        dcp.load(to_plain({"w": like})[0], checkpoint_id=tmp_path / "taken", no_dist=True)
    assert_same(like, q)


# --- models ---


def model_of(recipe, seed=0):
    """Layers that share a weight, and one that is frozen, with what state the recipe has."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 32))
    model[4].weight = model[2].weight
    model[3].weight.requires_grad_(False)
    return convert(model, recipe)


def batches(count=2, seed=0):
    return torch.randn(count, 32, 32, generator=torch.Generator().manual_seed(seed))


def state_of(model):
    return [*(p.detach() + 0 for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def assert_converted(model, original):
    """A model in its own right, as `convert` makes it."""
    assert [type(layer) for layer in model] == [type(layer) for layer in original]
    for layer, other in zip(model, original, strict=True):
        if isinstance(layer, Linear):
            assert type(layer.weight) is ShardedWeight
            assert isinstance(layer.weight, nn.Parameter)
            assert layer.weight.requires_grad == other.weight.requires_grad
            assert (layer.recipe, layer.weight.scale_state.name) == (other.recipe, other.weight.scale_state.name)
            assert layer.weight.scale_state is not other.weight.scale_state
            assert layer.weight.data_ptr() == layer.weight.shard.data_ptr() or layer.weight.data_ptr() == 0
            if layer.recipe.stateful:
                assert layer.delayed["weight"] is layer.weight.scale_state.delayed
    assert model[4].weight is model[2].weight


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: torch.load(saved(value), weights_only=False),
}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@every_recipe
def test_models_travel_and_train_on_with_the_same_bits(way, recipe):
    """With their optimizer, which finds its parameters, whichever of the two comes first."""
    model = model_of(recipe)
    optimizer = AdamW(model.parameters(), lr=1e-2, exp_avg_dtype=torch.bfloat16)
    learn(model, batches(), optimizer)
    update_scales(model)
    before = state_of(model)
    made = []
    for pair in ((model, optimizer), (optimizer, model)):
        copies = WAYS[way](pair)
        other, other_optimizer = copies if pair[0] is model else copies[::-1]
        assert_converted(other, model)
        assert_equal(state_of(other), before)
        assert all(a is b for a, b in zip(other_optimizer.param_groups[0]["params"], other.parameters(), strict=True))
        made.append([*learn(other, batches(seed=1), other_optimizer), *state_of(other)])
        if way == "deepcopy" and pair[0] is model:
            assert other[0].weight.scale_state.root is other
    assert_equal(state_of(model), before)
    want = [*learn(model, batches(seed=1), optimizer), *state_of(model)]
    for got in made:
        assert_equal(got, want)


def test_a_layer_and_a_weight_travel_alone():
    """Without the model that they were converted in. A weight is a plain parameter to those who read it."""
    model = model_of(CurrentScaling())
    size = len(pickle.dumps(model))
    for way, travel in WAYS.items():
        layer = travel(model[0])
        assert layer.weight.scale_state.root is None
        assert_equal([layer(batches()[0])], [model[0](batches()[0])])
        weight = travel(model[0].weight)
        assert isinstance(weight, nn.Parameter)
        assert (type(weight) is ShardedWeight) == (way == "deepcopy")
        assert torch.equal(weight.detach() + 0, model[0].weight.shard)
    assert len(pickle.dumps(model[0])) < size / 2
    shallow = copy.copy(model[0])
    assert shallow.weight is model[0].weight
    weight = copy.copy(model[0].weight)
    assert (type(weight), weight.scale_state) == (ShardedWeight, model[0].weight.scale_state)
    assert weight.shard.data_ptr() == model[0].weight.shard.data_ptr()
    model[0].weight.tag = "expert"
    assert pickle.loads(pickle.dumps(model[0])).weight.tag == copy.copy(model[0].weight).tag == "expert"
    view = pickle.loads(pickle.dumps(model[0].weight.detach()))
    assert type(view) is torch.Tensor


@with_states
def test_averages_of_models(recipe):
    """`AveragedModel` keeps a deep copy: of weights, the average that it would keep of plain ones."""
    model, plain = model_of(recipe), model_of(recipe)
    plain = nn.ParameterList([nn.Parameter(p.detach() + 0) for p in plain.parameters()])
    averaged, reference = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (model, plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for xs in (batches(), batches(seed=1)):
        learn(model, xs, optimizer)
        with torch.no_grad():
            for p, q in zip(plain, model.parameters(), strict=True):
                p.copy_(q)
        averaged.update_parameters(model)
        reference.update_parameters(plain)
    assert_equal([p.detach() + 0 for p in averaged.module.parameters()], [p.detach() for p in reference.parameters()])
    assert_converted(averaged.module, model)
    assert averaged.module[0].weight.scale_state.root is averaged.module
    twin = convert(nn.Sequential(*(nn.Linear(*layer.weight.shape[::-1]) for layer in averaged.module[:1])), recipe)
    twin[0].load_state_dict(averaged.module[0].state_dict())
    assert_equal([averaged.module[0](batches()[0])], [twin(batches()[0])])


def test_models_and_tensors_in_other_processes():
    """Spawned ones give the bits of this one, under both ways to share; they and forked ones write to one memory."""
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox), daemon=False)
    process.start()
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        for sharing in sorted(torch.multiprocessing.get_all_sharing_strategies()):
            torch.multiprocessing.set_sharing_strategy(sharing)
            for recipe in (DelayedScaling(), NVFP4Recipe()):
                model, x = model_of(recipe), batches()[0]
                want = copy.deepcopy(model)(x)
                inbox.put(("run", model, x))
                assert torch.equal(outbox.get(timeout=100), want)
            for fmt in (FP8_E4M3, NVFP4):
                q = quantized(fmt)
                assert not q.is_shared()
                assert q.share_memory_() is q
                assert q.is_shared()
                values = q.dequantize()
                inbox.put(("read", q))
                assert torch.equal(outbox.get(timeout=100), values)
                again = outbox.get(timeout=100)
                assert_same(again, q)
                assert not q.dequantize().any()  # The other process wrote to the memory of this one.
        for recipe in (DelayedScaling(), NVFP4Recipe()):
            model = model_of(recipe)
            alone = copy.deepcopy(model)
            learn(model, batches(1), torch.optim.SGD(model.parameters(), lr=0.0))  # So there are gradients.
            learn(alone, batches(1), torch.optim.SGD(alone.parameters(), lr=0.0))
            assert model.share_memory() is model
            assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
            assert_converted(model, alone)
            assert model[0].weight.is_shared()
            assert not alone[0].weight.is_shared()
            inbox.put(("train", model, batches()))
            assert outbox.get(timeout=100) == 0
            learn(alone, batches(), torch.optim.SGD(alone.parameters(), lr=0.1))
            assert_equal(state_of(model), state_of(alone))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
        inbox.put(None)
        process.join(20)
        if process.is_alive():
            process.kill()
    assert process.exitcode == 0


# --- optimizers ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_states_of_optimizers_are_plain_tensors(dtype):
    model = model_of(CurrentScaling()).bfloat16()
    options = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "master_weights": "remainder"}
    optimizer = Adam(model.parameters(), lr=1e-2, **options)
    learn(model, batches().bfloat16(), optimizer)
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    held = [value for of in state["state"].values() for value in of.values()]
    assert {type(value) for value in held} == {torch.Tensor}
    other = copy.deepcopy(model)
    made = Adam(other.parameters())
    made.load_state_dict(state)
    learn(model, batches(seed=1).bfloat16(), optimizer)
    learn(other, batches(seed=1).bfloat16(), made)
    assert_equal(state_of(other), state_of(model))


def test_plans_and_slices_travel():
    weights = [quantized(NVFP4_16x16), quantized(FP8_E4M3), quantized(NVFP4_16x16)]
    masters = [torch.randn(32 * 64) for _ in weights]
    plan = CastPlan(weights, parity="master")
    cast_master(weights, masters, [0] * 3, parity="master", plan=plan)
    for travel in WAYS.values():
        others, other_plan = travel((weights, plan))
        for q in others:
            q.rowwise.data.view(torch.uint8).zero_()
        cast_master(others, masters, [0] * 3, parity="master", plan=other_plan)
        for a, b in zip(others, weights, strict=True):
            assert_same(a, b)


def test_zero_says_what_cannot_travel():
    def made(shard_weights):
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
        model = convert(model, CurrentScaling())
        return model, ZeroOptimizer(model, lr=1e-2, shard_weights=shard_weights)

    torch.manual_seed(0)
    model, optimizer = made(False)
    learn(model, batches(), optimizer)
    for travel in (copy.copy, *WAYS.values()):
        with pytest.raises(TypeError, match=r"ZeroOptimizer: it cannot be pickled or copied.*save state_dict\(\)"):
            travel(optimizer)
    for travel in WAYS.values():  # A snapshot of what layers see.
        other = travel(model)
        assert isinstance(other[0].weight, QuantizedTensor)
        assert_equal([other(batches()[0])], [model(batches()[0])])
    before = other(batches()[0])
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    saved_model = torch.load(saved(model.state_dict()), weights_only=True)
    assert_same(saved_model["0.weight"], model[0].weight.detach())
    learn(model, batches(seed=1), optimizer)
    assert torch.equal(other(batches()[0]), before)
    torch.manual_seed(1)
    again, resumed = made(False)
    resumed.load_state_dict(state)
    learn(again, batches(seed=1), resumed)
    assert_equal(resumed.full_weights().values(), optimizer.full_weights().values())

    sharded, optimizer = made(True)
    losses = learn(sharded, batches(), optimizer)
    for travel in (copy.deepcopy, pickle.dumps, saved):
        with pytest.raises(TypeError, match=r"ZeroOptimizer: Linear \(sharded weights\) cannot be pickled or copied"):
            travel(sharded)
    for call in (sharded.state_dict, lambda: sharded.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"state_dict of .* \(sharded weights\) is not there between uses"):
            call()
    for travel in (copy.deepcopy, pickle.dumps, saved, lambda q: to_plain({"w": q}), lambda q: q.share_memory_()):
        with pytest.raises(RuntimeError, match=r"QuantizedTensor: .* has no memory now"):
            travel(sharded[0].weight)
    assert len(losses) == 2
    assert torch.load(saved(optimizer.state_dict()), weights_only=True)["zero"]["rank"] == 0


def test_metadata_names_what_it_describes():
    _, metadata = to_plain({"w": quantized(), "b": torch.ones(1)})
    (of_w,) = described(metadata[KEY]).values()
    assert (of_w.format, of_w.shape, of_w.dtype, of_w.planes) == (FP8_E4M3, (32, 64), "bfloat16", Usage.BOTH.planes)
