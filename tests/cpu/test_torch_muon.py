"""`qshard.torch_bridge.Muon` on one process: torch's own Muon, the split into two algorithms, and its states.

Shards are in tests/dist/test_torch_muon.py, and wrong arguments in the error catalogue.
"""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim._muon import _zeropower_via_newtonschulz  # noqa: E402

from qshard._core.optimizers import muon_plan  # noqa: E402
from qshard._core.placement import Box  # noqa: E402
from qshard.torch_bridge import AdamW, Muon  # noqa: E402
from qshard.torch_bridge._optim.newton_schulz import newton_schulz  # noqa: E402
from support.newton_schulz import COEFFICIENTS, assert_near_float64, draw_matrices  # noqa: E402

SHAPES = [(24, 40), (40, 24), (16, 16), (1, 9), (9, 1)]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def as_group(params, **settings):
    return [{"params": params, "algorithm": "muon", **settings}]


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.5, "ns_steps": 3}],
    ids=str,
)
def test_float32_has_the_bits_of_torch(options):
    ours, theirs = parameters(), parameters()
    a, b = Muon(as_group(ours), lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for step in range(4):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_gradients(params, step)
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])
    b.load_state_dict({**b.state_dict(), "state": a.state_dict()["state"]})  # The states have torch's names.


def test_bfloat16_is_near_torch():
    """torch multiplies in bfloat16: its learning rate and its result are rounded, and so is ours at the end."""
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a, b = Muon(as_group(ours), lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for params, optimizer in ((ours, a), (theirs, b)):
        set_gradients(params, 0)
        optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=2**-7, atol=0.02 * 2**-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_torchs_and_a_stack_is_its_matrices(shape):
    """Batched products may round otherwise than single ones: bits of bfloat16, for 5 steps of 3 products."""
    x = torch.randn(3, *shape).bfloat16()
    whole = newton_schulz(x, COEFFICIENTS, 5, 1e-7)
    for matrix, of_stack in zip(x, whole, strict=True):
        assert torch.equal(
            newton_schulz(matrix, COEFFICIENTS, 5, 1e-7), _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        )
        assert torch.allclose(of_stack, newton_schulz(matrix, COEFFICIENTS, 5, 1e-7), atol=15 * 2**-8)
    assert torch.equal(newton_schulz(x * 0, COEFFICIENTS, 5, 1e-7), x * 0)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (3, 128, 128), (3, 256, 128)], ids=str)
def test_first_steps_in_fp8_are_near_float64(shape):
    x = draw_matrices(shape)
    errors = []
    for fp8_steps in range(6):
        found = newton_schulz(torch.tensor(x).bfloat16(), COEFFICIENTS, 5, 1e-7, fp8_steps, fp8_min_side=128)
        errors.append(assert_near_float64(found.float().numpy(), x, fp8_steps))
    assert errors[0] < errors[3] < errors[5]


@pytest.mark.parametrize(
    ("shape", "min_side"), [((32, 40), 0), ((40, 32), 0), ((2, 32, 48), 33), ((0, 16), 0)], ids=str
)
def test_other_shapes_stay_in_bfloat16(shape, min_side):
    x = torch.tensor(draw_matrices(shape)).bfloat16()
    found = newton_schulz(x, COEFFICIENTS, 5, 1e-7, 3, min_side)
    assert torch.equal(found, newton_schulz(x, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("shape", [(32, 48), (2, 48, 32)], ids=str)
def test_zeros_and_nan_in_fp8(shape):
    """Zeros have no direction. A NaN or an infinity reaches every element of its matrix, as in bfloat16."""
    x = torch.tensor(draw_matrices(shape)).bfloat16()
    assert torch.equal(newton_schulz(x * 0, COEFFICIENTS, 5, 1e-7, 3, 0), x * 0)
    for bad in (torch.nan, torch.inf):
        x[..., 3, 5] = bad
        assert newton_schulz(x, COEFFICIENTS, 5, 1e-7, 3, 0).isnan().all()


def test_a_stack_has_the_states_and_scale_of_matrices():
    """`scale` is of a matrix of the stack, and units of 8 matrices do not depend on the number of matrices."""
    stack, first = nn.Parameter(torch.ones(11, 8, 2)), nn.Parameter(torch.ones(8, 8, 2))
    stack.grad = torch.randn(11, 8, 2)
    first.grad = stack.grad[:8].clone()
    for p in (stack, first):
        Muon(as_group([p]), lr=0.02, weight_decay=0.0).step()
    assert torch.equal(stack[:8], first)
    change = (1 - stack.detach()[10]) / (0.02 * 2)  # 2: the square root of 8 / 2.
    assert torch.allclose(torch.linalg.svdvals(change), torch.ones(2), atol=0.35)


def test_masters_collect_what_bfloat16_would_lose():
    p = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = Muon(as_group([p]), lr=1e-4, weight_decay=0.0, master_weights="float32")
    direction = torch.eye(8)
    for _ in range(40):
        p.grad = direction.bfloat16()
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert master.dtype == optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(p, master.bfloat16())
    assert (p.diagonal() < 1).all()
    assert (1 - master.diagonal() - 40e-4).abs().max() < 0.35 * 40e-4


def model_of():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(12, 8),
            "layer": nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
            "lm_head": nn.Linear(8, 12, bias=False),
        }
    )


def split_of(optimizer):
    return {group["algorithm"]: group["param_names"] for group in optimizer.param_groups}


def test_the_split_is_a_rule_that_names_override():
    by_rule = split_of(Muon(model_of().named_parameters()))
    assert by_rule["muon"] == ["layer.0.weight", "layer.2.weight"]
    assert by_rule["adamw"][:2] == ["embed.weight", "layer.0.bias"]
    rules = {"layer[-1:].*": "adamw", "lm_head.*": "muon"}
    assert split_of(Muon(model_of().named_parameters(), rules=rules))["muon"] == ["layer.0.weight", "lm_head.weight"]


def test_the_rest_is_adamw_with_settings_of_its_own():
    model, other = model_of(), model_of()
    adamw = {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.3, "exp_avg_dtype": torch.bfloat16}
    optimizer = Muon(model.named_parameters(), lr=0.02, adamw=adamw)
    its = AdamW([p for name, p in other.named_parameters() if name not in split_of(optimizer)["muon"]], **adamw)
    for params in (model.parameters(), other.parameters()):
        set_gradients(params, 0)
    optimizer.step(inv_grad_scale=0.5)
    its.step(inv_grad_scale=0.5)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) is (name in split_of(optimizer)["adamw"]), name


def test_groups_have_settings_of_their_own_and_choose_an_algorithm():
    model = model_of()
    layer = [("layer.0.weight", model["layer"][0].weight), ("layer.0.bias", model["layer"][0].bias)]
    head = [("lm_head.weight", model["lm_head"].weight)]
    groups = [{"params": layer, "lr": 0.5}, {"params": head, "algorithm": "muon", "momentum": 0.5}]
    optimizer = Muon(groups, adamw={"lr": 1e-3})
    optimizer.add_param_group({"params": [("embed.weight", model["embed"].weight)], "algorithm": "adamw", "lr": 2.0})
    found = [(group["algorithm"], group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert found == [("muon", 0.5, 0.95), ("adamw", 1e-3, 0.95), ("muon", 1e-3, 0.5), ("adamw", 2.0, 0.95)]


def test_a_group_of_adamw_keeps_its_settings():
    """Of a group that has matrices for Muon, too, `lr` is Muon's."""
    model, adamw = model_of(), {"lr": 1e-3, "weight_decay": 0.1}
    layer = dict(model["layer"][0].named_parameters(prefix="layer"))
    rest = {"params": [("layer.bias", layer["layer.bias"])], "lr": 1e-4, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    optimizer = Muon([rest], adamw=adamw)
    both = Muon([rest | {"params": layer.items()}], adamw=adamw)
    found = [
        [(group["algorithm"], group["lr"], group["weight_decay"], group["betas"]) for group in each.param_groups]
        for each in (optimizer, both)
    ]
    own, of_adamw = (1e-4, 0.0, (0.9, 0.95)), (1e-3, 0.0, (0.9, 0.95))
    assert found == [[("adamw", *own)], [("muon", *own), ("adamw", *of_adamw)]]


def test_states_copy_and_load():
    model = model_of()
    optimizer = Muon(model.named_parameters(), lr=0.02)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    other = copy.deepcopy(model)
    its = Muon(other.named_parameters(), lr=0.5)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:  # As saved by a rank with other experts.
        group["param_names"] = ["another"]
    its.load_state_dict(state)
    names = [group["param_names"] for group in optimizer.param_groups]
    assert [group["param_names"] for group in its.param_groups] == names
    for params, each in ((model.parameters(), optimizer), (other.parameters(), its)):
        set_gradients(params, 1)
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    copied = copy.deepcopy((model, optimizer))
    set_gradients(copied[0].parameters(), 2)
    copied[1].step()


def test_a_state_has_the_steps_in_fp8():
    """A loaded state decides, as for other settings; one that was saved without the settings leaves them."""
    models = [nn.Linear(48, 32, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    own, its = (
        Muon(model.named_parameters(), lr=0.02, ns_fp8_steps=steps, ns_fp8_min_side=0)
        for model, steps in zip(models, (3, 0), strict=True)
    )
    its.load_state_dict(copy.deepcopy(own.state_dict()))
    for model, optimizer in zip(models, (own, its), strict=True):
        set_gradients(model.parameters(), 0)
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    old = copy.deepcopy(own.state_dict())
    for group in old["param_groups"]:
        del group["ns_fp8_steps"], group["ns_fp8_min_side"]
    own.load_state_dict(old)
    assert (own.param_groups[0]["ns_fp8_steps"], own.param_groups[0]["ns_fp8_min_side"]) == (3, 0)


def test_a_step_scales_gradients_and_skips_parameters_without_one():
    (p, q), (r,) = [[nn.Parameter(torch.eye(4)) for _ in range(n)] for n in (2, 1)]
    p.grad, r.grad = torch.randn(4, 4), None
    r.grad = p.grad / 2
    Muon(as_group([p, q])).step(inv_grad_scale=torch.tensor(0.5))
    Muon(as_group([r])).step()
    assert torch.equal(p, r)
    assert torch.equal(q, torch.eye(4))


def boxes_of(shape, ranks, replicas=1):
    rows = -(-shape[0] // ranks)
    starts = [min(rank * rows, shape[0]) for rank in range(ranks + 1)]
    of_shards = [
        Box(shape, (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
        for first, last in itertools.pairwise(starts)
    ]
    return of_shards * replicas


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_a_plan_sends_each_element_once_and_returns_it_to_all_replicas(ranks, replicas):
    shapes = [(64, 32)] * 5 + [(19, 4, 6), (2, 128), (0, 4)]
    boxes = [boxes_of(shape, ranks, replicas) for shape in shapes]
    buckets = muon_plan.plan_buckets(shapes, boxes, owned_elements=2048)
    assert [i for bucket in buckets for i in bucket.parameters] == [*range(len(shapes))]
    world = ranks * replicas
    for bucket in buckets:
        for u, (_, unit) in enumerate(bucket.units):
            parts = [part for part in bucket.parts if part.unit == u]
            size = torch.Size(unit.size).numel()
            assert sum(part.size for part in parts if part.sends) == size
            assert sum(part.size for part in parts) == size * replicas
        for a in range(world):
            for b in range(world):
                assert bucket.sent_to_owner(a, world)[b] == bucket.received_by_owner(b, world)[a]
                assert bucket.returned_by_owner(a, world)[b] == bucket.returned_to(b, world)[a]


def test_owners_have_about_equal_work():
    """The greedy order gives at most 4/3 of the best division (Graham, 1969), here of 4 equal shares."""
    shapes = [(256, 64), (128, 128), (64, 64), (512, 64), (96, 300), (33, 7)] * 6
    [bucket] = muon_plan.plan_buckets(shapes, [boxes_of(shape, 4) for shape in shapes])
    costs = [muon_plan.newton_schulz_cost(unit.size) for _, unit in bucket.units]
    work = [sum(cost for cost, owner in zip(costs, bucket.owners, strict=True) if owner == r) for r in range(4)]
    assert max(work) <= 4 / 3 * sum(work) / 4
