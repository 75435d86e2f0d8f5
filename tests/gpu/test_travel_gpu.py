"""Serialization between GPU and CPU: checkpoints load on either; copies and processes preserve the bits."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from qshard.formats import Usage  # noqa: E402
from qshard.recipes import NVFP4, DelayedScaling  # noqa: E402
from qshard.torch_bridge import AdamW, convert, from_plain, quantize, to_plain  # noqa: E402
from support.formats import NAMED, usages_of  # noqa: E402
from support.travel import learn, saved, serve  # noqa: E402


def parts_of(q):
    return [getattr(q, name).cpu() for name in q.__tensor_flatten__()[0]]


def assert_same(got, want, device):
    assert got.device.type == device
    assert (got.shape, got.dtype, got.format) == (want.shape, want.dtype, want.format)
    for a, b in zip(parts_of(got), parts_of(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", NAMED, ids=str)
def test_tensors_change_devices_in_files(fmt):
    q = quantize(torch.randn(64, 128, device="cuda"), fmt, usage=usages_of(fmt, (64, 128))[-1])
    there = torch.load(saved(q), map_location="cpu", weights_only=True)
    assert_same(there, q, "cpu")
    assert_same(torch.load(saved(there), map_location="cuda", weights_only=True), q, "cuda")
    assert_same(torch.load(saved(q), weights_only=True), q, "cuda")
    for again in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), from_plain(*to_plain({"w": q}))["w"]):
        assert_same(again, q, "cuda")
        assert torch.equal(again.dequantize(), q.dequantize())
    tensors, metadata = to_plain({"w": there})
    moved = from_plain({name: tensor.cuda() for name, tensor in tensors.items()}, metadata)["w"]
    assert_same(moved, q, "cuda")
    tensors["w.rowwise.data"] = tensors["w.rowwise.data"].cuda()
    with pytest.raises(ValueError, match=r"from_plain: w \(on cpu, cuda:0\) is not on one device"):
        from_plain(tensors, metadata)


@pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4()], ids=["scales", "seeds"])
def test_models_travel_with_their_optimizers(recipe):
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda(), recipe)
    optimizer = AdamW(model.parameters(), lr=1e-2, exp_avg_dtype=torch.float8_e4m3fn)
    xs = torch.randn(2, 32, 64, device="cuda")
    learn(model, xs, optimizer)
    # Not by pickle alone, which no torch can for tensors of FP8, such as these states.
    copies = [copy.deepcopy((model, optimizer)), torch.load(saved((model, optimizer)), weights_only=False)]
    want = learn(model, xs, optimizer)
    for each, its_optimizer in copies:
        for a, b in zip(learn(each, xs, its_optimizer), want, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(each.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.detach() + 0, b.detach() + 0)
    on_cpu = torch.load(saved(model), map_location="cpu", weights_only=False)
    assert {tensor.device.type for tensor in (*on_cpu.parameters(), *on_cpu.buffers())} == {"cpu"}
    assert on_cpu(xs[0].cpu()).isfinite().all()


def test_another_process_has_the_same_memory():
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox))
    process.start()
    try:
        model, x = convert(nn.Sequential(nn.Linear(64, 128)), DelayedScaling()).cuda(), torch.randn(32, 64).cuda()
        want = copy.deepcopy(model)(x)
        inbox.put(("run", model, x))
        assert torch.equal(outbox.get(timeout=100), want)
        q = quantize(torch.randn(64, 64, device="cuda"), NAMED[0], usage=Usage.BOTH)
        assert q.share_memory_().is_shared()
        values = q.dequantize()
        inbox.put(("read", q))
        assert torch.equal(outbox.get(timeout=100), values)
        again = outbox.get(timeout=100)
        torch.cuda.synchronize()
        assert not q.dequantize().any()
        assert_same(again, q, "cuda")
        del again
    finally:
        inbox.put(None)
        process.join(30)
        if process.is_alive():
            process.kill()
    assert process.exitcode == 0
