"""Serialization of quantized tensors: save, copy, pickle and share preserve bits, or raise."""

import copy
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
from torch import nn

from qshard._core.serialization import KEY, parse_metadata
from qshard.formats import FP8_E4M3, MXFP8_E4M3, NVFP4, NVFP4_16x16, Usage
from qshard.recipes import DelayedScaling
from qshard.torch_bridge import Adam, cast_master, from_plain, quantize, to_plain, update_columnwise
from qshard.torch_bridge._quantized.tensor import _rebuild
from support.formats import VARIANTS, usages_of
from support.travel import assert_same, batches, bytes_of, learn, model_of, quantized, saved

# Warnings for files with a sparse tensor: torch 2.11 warns on load, torch 2.15 also at the next sparse tensor.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
]


@pytest.fixture(scope="module")
def of_all_formats():
    """Return a tensor of every format and option, with one plane or both, and two axes or three."""
    made = {}
    for i, fmt in enumerate(VARIANTS):
        shape = ((64, 96), (2, 32, 96))[i % 2]
        usages = usages_of(fmt, shape)
        made[str(fmt)] = quantized(fmt, usages[-1 - i // 2 % len(usages)], shape)
    stale = quantized(NVFP4_16x16)
    cast_master([stale], [torch.ones(32 * 64)], [0], parity="master")
    return made | {"stale": stale, "parameter": nn.Parameter(quantized()), "frozen": nn.Parameter(quantized(), False)}


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
        if way == "plain" and name == "stale":  # A stale plane counts as absent.
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
        scales = again[0]._rowwise_scale_inv, again[0]._columnwise_scale_inv  # Both planes share one scale.
        assert scales[0].data_ptr() == scales[1].data_ptr()
    assert [part.data_ptr() for part in bytes_of(copy.copy(q))] == [part.data_ptr() for part in bytes_of(q)]
    part = quantized()
    part.set(Usage.ROWWISE, part.parts(Usage.ROWWISE)._replace(data=torch.zeros(2, 32, 64, dtype=torch.uint8)[1]))
    again = torch.load(saved(part))  # Saves only its own part of a larger storage.
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
    """File content that qshard did not write."""

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
        (lambda: forged(rowwise_global_scale_inv=None), r"rowwise.global_scale_inv is missing, but the metadata"),
        (lambda: forged(rowwise_data="codes"), r"rowwise.data is missing, but the metadata"),
        (lambda: forged(rowwise_global_scale_inv=quantized(shape=(), dtype=torch.float32)), "is not a plain tensor"),
        (lambda: forged(columnwise_scale_inv=torch.zeros(64, 2, dtype=torch.uint8).to_sparse()), "not a plain"),
        (lambda: forged(rowwise_data=torch.zeros(32, 32, dtype=torch.uint8, device="meta")), r"on cpu, meta\) is not"),
        (lambda: forged("{}"), "is not the metadata of to_plain"),
        (lambda: forged('{"version": 1, "tensors": {}}'), "tensors, not one"),
        (lambda: forged(others={"_rowwise_data": torch.zeros(1)}), r"attribute _rowwise_data cannot"),
        (lambda: saved(Forged("", [], False, False, {})), "is not the metadata"),
        (lambda: saved(Forged(*quantized(usage=Usage.ROWWISE).__reduce_ex__(2)[1][:2], True, False, {})), "stale"),
    ],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_what_does_not_fit_is_refused(make, text, weights_only):
    with pytest.raises(ValueError, match=f"QuantizedTensor: .*{text}"):
        torch.load(make(), weights_only=weights_only)


def test_memory_of_other_strides_is_made_contiguous():
    """Kernels assume contiguous rows, and would read past the end of a tensor with strides of 0."""
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
assert torch.load(folder / "optimizer", weights_only=True)["state"][0]["exp_avg"]["float8_e4m3fn"].dtype is torch.uint8
"""


def test_programs_without_qshard_read_what_is_plain(tmp_path):
    """torch alone, or NumPy alone, reads state dicts, parameters, optimizer states and quantized weights."""
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
    """Names, bytes and JSON are the same in both front ends, for every format."""
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
    with pytest.raises(ValueError, match=r"to_plain: w \(QuantizedArray\(FP8_E4M3.* is stacked or a shard"):
        qshard.jax.to_plain({"w": stacked})


def test_checkpoints_of_distributed_take_the_plain_form(tmp_path):
    """The plain form shares the tensor's memory, so `dcp.load` fills the tensor in place."""
    q, like = quantized(), quantize(torch.zeros(32, 64, dtype=torch.bfloat16), FP8_E4M3, usage=Usage.BOTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process.
        dcp.save(to_plain({"w": q})[0], checkpoint_id=tmp_path / "taken", no_dist=True)
        dcp.save({"w": torch.zeros(32, 64)}, checkpoint_id=tmp_path / "other", no_dist=True)
        for call, name in ((dcp.save, "w"), (dcp.load, "tensor")):
            with pytest.raises(dcp.api.CheckpointException, match=name + r" .QuantizedTensor. is not a plain tensor"):
                call({"w": q}, checkpoint_id=tmp_path / "other", no_dist=True)
        dcp.load(to_plain({"w": like})[0], checkpoint_id=tmp_path / "taken", no_dist=True)
    assert_same(like, q)


def test_metadata_names_what_it_describes():
    _, metadata = to_plain({"w": quantized(), "b": torch.ones(1)})
    (of_w,) = parse_metadata(metadata[KEY]).values()
    assert (of_w.format, of_w.shape, of_w.dtype, of_w.planes) == (FP8_E4M3, (32, 64), "bfloat16", Usage.BOTH.planes)
