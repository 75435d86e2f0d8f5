"""`qshard.torch_bridge.Adam`: torch's own Adam in float32, remainders, states as they are in state dicts.

Bits of a step are in test_adam_steps.py.
"""

import copy
import io

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from qshard.formats import FP8_E4M3  # noqa: E402
from qshard.recipes import CurrentScaling  # noqa: E402
from qshard.torch_bridge import Adam, AdamW, Muon, ShardedWeight, WithMasters, convert, quantize  # noqa: E402

SHAPES = [(8, 300), (17,), (), (4, 128), (3, 5, 7)]
FP8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
SETTINGS = [
    {},
    {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    {**FP8, "master_weights": "remainder"},
    {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16, "master_weights": "float32"},
]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def grads(params, step, dtype=None):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(bits(a[name]), bits(b[name])), name


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_is_torch_adam(decoupled, weight_decay):
    """Over 20 steps of 1e-2, whose updates have sizes of about 1e-2: within 1e-5 of that, as roundings differ."""
    ours, theirs = parameters(), parameters()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    a = Adam(ours, lr=1e-2, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
    b = kind(theirs, lr=1e-2, weight_decay=weight_decay)
    for step in range(20):
        grads(ours, step)
        grads(theirs, step)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):  # Formulas round in another order, 20 times: some ulps.
        torch.testing.assert_close(p, q, rtol=1e-6, atol=3e-6)
        assert a.state[p]["step"] == 20
        torch.testing.assert_close(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_remainders_are_float32_to_the_bit():
    """With the gradients of the float32 run, each step: both halves are that parameter, and ours is it, rounded."""
    rounded = parameters(torch.bfloat16)
    exact = [nn.Parameter(p.detach().float()) for p in rounded]
    a = Adam(exact, lr=1e-2, weight_decay=0.1)
    b = Adam(rounded, lr=1e-2, weight_decay=0.1, master_weights="remainder")
    for step in range(30):
        grads(rounded, step)
        for p, q in zip(exact, rounded, strict=True):
            p.grad = q.grad.float()
        a.step()
        b.step()
    for p, q in zip(exact, rounded, strict=True):
        low = b.state[q]["remainder"].int()
        high = q.detach().view(torch.int16).int() - (low < 0).int()
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        assert (q - master).abs().le((master.bfloat16() - master).abs()).all()
        assert torch.equal(master, p)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_state_dict_has_the_bits_and_gives_them_back(settings):
    dtype = torch.bfloat16 if "master_weights" in settings else torch.float32
    ours = parameters(dtype)
    a = Adam(ours, lr=1e-2, **settings)
    for step in range(3):
        grads(ours, step)
        a.step()
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    size = sum(p.numel() for p in ours)
    per_element = sum(
        torch.empty((), dtype=settings.get(f"{n}_dtype", torch.float32)).itemsize for n in ("exp_avg", "exp_avg_sq")
    )
    per_element += {None: 0, "remainder": 2, "float32": 4}[settings.get("master_weights")]
    assert file.tell() < per_element * size + 6 * len(ours) * 1500, "kept in the dtypes they have"
    file.seek(0)
    theirs = copy.deepcopy(ours)
    b = Adam(theirs, lr=1.0, **settings)
    b.load_state_dict(torch.load(file))
    c = copy.deepcopy(a)
    assert b.param_groups[0]["lr"] == 1e-2
    for p, q in zip(ours, theirs, strict=True):
        assert_same_state(a.state[p], b.state[q])
        if p.ndim >= 2:
            assert b.state[q]["exp_avg"].dtype == settings.get("exp_avg_dtype", torch.float32)
    grads(ours, 9)
    grads(theirs, 9)
    grads(c.param_groups[0]["params"], 9)
    for optimizer in (a, b, c):
        optimizer.step()
    for p, q, r in zip(ours, theirs, c.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
        assert_same_state(a.state[p], b.state[q])


def test_hooks_of_loading_see_tensors():
    p = parameters()
    a = Adam(p)
    grads(p, 0)
    a.step()
    seen = []
    b = Adam(parameters())
    b.register_load_state_dict_post_hook(lambda o: seen.extend(type(s["exp_avg"]) for s in o.state.values()))
    b.load_state_dict(a.state_dict())
    assert seen == [torch.Tensor] * len(SHAPES)


def test_a_state_of_torch_adamw_goes_on():
    ours, theirs = parameters(), parameters()
    theirs_optimizer = torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(3):
        grads(theirs, step)
        theirs_optimizer.step()
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    a = Adam(ours, **FP8)
    a.load_state_dict(copy.deepcopy(theirs_optimizer.state_dict()))  # Loading shares memory, as torch does.
    grads(ours, 9)
    grads(theirs, 9)
    a.step()
    theirs_optimizer.step()
    for p, q in zip(ours, theirs, strict=True):  # As above, once.
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_parameters_without_gradients_wait():
    """And have steps of their own: bias correction is by how often a parameter was updated."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    a = Adam([p, q], lr=0.5)
    p.grad = torch.ones(3)
    a.step()
    assert (q == 1).all()
    assert q not in a.state or not a.state[q]
    q.grad = torch.ones(3)
    for _ in range(2):
        a.step()
    assert (a.state[p]["step"], a.state[q]["step"]) == (3, 2)
    torch.testing.assert_close(p, torch.full((3,), -0.5))
    torch.testing.assert_close(q, torch.full((3,), 0.0))


def test_groups_dtypes_lr_tensors_and_scaled_losses():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    lr = torch.tensor(0.5)
    a = Adam([{"params": [p], "lr": lr}, {"params": [q], "master_weights": "float32"}], lr=0.25)
    p.grad, q.grad = torch.full((3,), 1024.0), torch.full((2, 3), 1024.0, dtype=torch.bfloat16)
    a.step(inv_grad_scale=torch.tensor(1 / 1024))
    torch.testing.assert_close(p, torch.full((3,), 0.5))
    assert (q == 0.75).all()
    torch.testing.assert_close(a.state[p]["exp_avg"], torch.full((3,), 0.1))
    lr.fill_(0.125)
    p.grad, q.grad = torch.ones(3), None
    assert a.step(lambda: 7.0) == 7.0
    torch.testing.assert_close(p, torch.full((3,), 0.375))


def test_a_sharded_weight_is_the_tensor_inside():
    layer = convert(nn.Linear(20, 8, bias=False), CurrentScaling(weight=FP8_E4M3))
    plain = nn.Parameter(layer.weight.shard.detach().clone())
    assert isinstance(layer.weight, ShardedWeight)
    a, b = Adam(layer.parameters(), lr=0.1, **FP8), Adam([plain], lr=0.1, **FP8)
    for step in range(2):
        layer(torch.randn(4, 20, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        plain.grad = layer.weight.grad.clone()
        version = layer.weight.shard._version
        a.step()
        b.step()
        assert layer.weight.shard._version > version, "a write that autograd and scales can see"
        layer.zero_grad()
    assert torch.equal(layer.weight.shard, plain)
    assert type(a.state[layer.weight]["exp_avg"]) is torch.Tensor
    assert_same_state(a.state[layer.weight], b.state[plain])


def test_errors():
    p = nn.Parameter(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"master_weights \('bf16'\) is not None, 'remainder' or 'float32'"):
        Adam([p], master_weights="bf16")
    with pytest.raises(TypeError, match=r"parameter \(2, 4\) is a QuantizedTensor, which has no float values"):
        Adam([nn.Parameter(quantize(torch.ones(2, 4), FP8_E4M3), requires_grad=False)])
    with pytest.raises(TypeError, match=r"Adam: parameter \(2,\) \(float16\) does not support"):
        Adam([nn.Parameter(torch.ones(2, dtype=torch.float16))], master_weights="remainder")
    with pytest.raises(ValueError, match="is not contiguous"):
        Adam([nn.Parameter(torch.ones(2, 4).t())])
    optimizer = Adam([p])
    with pytest.raises(TypeError, match="int32"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_write_to_a_parameter_reaches_its_master(kind):
    """Where the parameter is written to. Elsewhere masters keep the bits that the parameter lacks."""

    def stepped(write):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(32, 64).bfloat16())
        optimizer = kind([("weight", weight)], lr=1e-4, weight_decay=0.0, master_weights="float32")
        for number in range(3):
            weight.grad = torch.full_like(weight, 0.5 + number)
            optimizer.step()
            with torch.no_grad():
                write(weight)
        return weight.detach(), optimizer.state[weight]["master"]

    weight, master = stepped(lambda weight: weight[:8].fill_(0.5))
    assert (weight[:8] == 0.5).all()
    assert (master[:8] - 0.5).abs().max() < 1e-3
    other, kept = stepped(lambda weight: weight.copy_(weight.clone()))
    plain, expected = stepped(lambda weight: None)
    assert torch.equal(other, plain)
    assert torch.equal(kept, expected)
    assert torch.equal(master[8:], expected[8:]) or kind is Muon  # Muon's update is of the whole matrix.


def test_masters_of_other_optimizers_refuse_closures_and_copies():
    layer = convert(nn.Linear(64, 64), "MXFP8")
    with pytest.raises(TypeError, match=r"WithMasters: optimizer \(LBFGS\) evaluates a closure within its steps"):
        WithMasters(layer.parameters(), torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"WithMasters: .* cannot be pickled or copied"):
        copy.deepcopy(WithMasters(layer.parameters(), torch.optim.SGD, lr=0.1))
