"""FSDP1 around converted layers: codes of one device in every strategy, memory, checkpoints and refusals."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling
from qshard.torch_bridge import (
    LinearCrossEntropy,
    convert,
    load_scaling_state,
    prepare_modules_for_fsdp1,
    quantize,
    scaling_state,
    swiglu,
    update_scales,
)
from support import torch_ranks
from support.pairs import each_value, pairs
from support.torch_models import assert_gathers_the_whole, batch, linears, model_of, resident, shard, sizes_for
from support.torch_ranks import on_ranks
from support.torch_wrapped import FLAT, ORIG, RECIPES, device, follow, in_fsdp1, sgd, values

SHARDED = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
}
BY_PRODUCT = {"wgrad": MXFP8(wgrad="bf16"), "two formats": MXFP8(forward="bf16", dgrad="CurrentScaling")}
HYBRID = {"hybrid": ShardingStrategy.HYBRID_SHARD, "hybrid_grad_op": ShardingStrategy._HYBRID_SHARD_ZERO2}


def ready(recipe, **options):
    """Build a model for `in_fsdp1` and a copy for one process; biases of 3 and 20 misalign weights from 16 bytes."""
    options = {"bias": True, "sizes": sizes_for(recipe), **options}
    one = convert(model_of(**options), recipe)
    return prepare_modules_for_fsdp1(convert(model_of(**options), recipe)), one


@each_value(world=[2, 3], strategy=list(SHARDED), recipe=list(RECIPES), orig=FLAT)
@on_ranks()
def test_trains_as_one_process(strategy, recipe, orig):
    model, one = ready(RECIPES[recipe])
    model = in_fsdp1(model, orig, SHARDED[strategy])
    follow(model, sgd(model), one)


@each_value(strategy=list(SHARDED), recipe=list(BY_PRODUCT), orig=FLAT)
@on_ranks(2)
def test_formats_of_single_products(strategy, recipe, orig):
    """The backward pass reads values of a weight that FSDP1 has gathered again, in the format of its product."""
    model, one = ready(BY_PRODUCT[recipe])
    model = in_fsdp1(model, orig, SHARDED[strategy])
    follow(model, sgd(model), one)


@each_value(strategy=list(HYBRID), recipe=["current", "delayed"], orig=FLAT)
@on_ranks((2, 2))
def test_replicas_of_shards(strategy, recipe, orig):
    model, one = ready(RECIPES[recipe])
    model = in_fsdp1(model, orig, HYBRID[strategy])
    follow(model, sgd(model), one)


@each_value(sync=[False, True], strategy=list(SHARDED), orig=FLAT)
@on_ranks(2)
def test_accumulation(sync, strategy, orig):
    """Gradients, reduced once or in each micro-batch, and amaxes accumulate."""
    model, one = ready(RECIPES["delayed"])
    model = in_fsdp1(model, orig, SHARDED[strategy])
    follow(model, sgd(model), one, micro_batches=2, sync=sync)


@each_value(inside=[True, False], kind=list(CheckpointImpl.__members__), recipe=["current", "delayed"], orig=FLAT)
@on_ranks(2)
def test_activation_checkpointing(inside, kind, recipe, orig):
    """Inside units, or around them, where FSDP1 gathers in the recomputed forward pass."""
    model, one = ready(RECIPES[recipe])
    if inside:
        for i in (0, 2, 4):
            model[i] = checkpoint_wrapper(model[i], checkpoint_impl=CheckpointImpl[kind])
    model = in_fsdp1(model, orig)
    if not inside:
        for i in (0, 2, 4):
            model.module[i] = checkpoint_wrapper(model.module[i], checkpoint_impl=CheckpointImpl[kind])
    follow(model, sgd(model), one)


@pairs(strategy=["full", "no_shard"], recipe=["current", "delayed"], orig=FLAT)
@on_ranks(2)
def test_mixed_precision(strategy, recipe, orig):
    """Layers compute with bfloat16 weights, with the codes of one device; scales and amaxes stay float32."""
    model, one = ready(RECIPES[recipe])
    policy = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = in_fsdp1(model, orig, SHARDED[strategy], mixed_precision=policy)
    if recipe == "delayed":  # Before FSDP1 casts buffers.
        state = {name: torch.full_like(value, 1 / 3) for name, value in scaling_state(one).items()}
        for each in (model, one):
            load_scaling_state(each, state)
    one.to(torch.bfloat16)
    follow(model, sgd(model), one, dtype=torch.bfloat16)
    assert {state.dtype for state in scaling_state(model).values()} <= {torch.float32}


@pytest.mark.each_value
@ORIG
@on_ranks(2, 3)
def test_clipping(orig):
    model, one = ready(RECIPES["delayed"])
    model = in_fsdp1(model, orig)
    follow(model, sgd(model), one, clip=1e-4)


def offloaded_parameters(orig):
    """Train with offloaded parameters; GPUs only, as FSDP1 pins them."""
    model, one = ready(RECIPES["delayed"])
    model = in_fsdp1(model, orig, cpu_offload=CPUOffload(offload_params=True))
    follow(model, sgd(model), one)


@ORIG
@on_ranks(3)
def test_models_on_meta(orig):
    """FSDP1 initializes the values; on GPUs it also broadcasts those of the first rank."""
    recipe = RECIPES["delayed"]
    with torch.device("meta"):
        model = prepare_modules_for_fsdp1(convert(nn.Sequential(nn.Linear(20, 104), nn.Linear(104, 20)), recipe))
    sync = torch_ranks.device == "cuda"
    torch.manual_seed(dist.get_rank() if sync else 0)
    policy = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = in_fsdp1(model, orig, sync_module_states=sync, mixed_precision=policy)
    one = convert(nn.Sequential(nn.Linear(20, 104), nn.Linear(104, 20)), recipe).to(device())
    follow(model, sgd(model), one)


class Block(nn.Module):
    """A fused block with a loss without logits; in a flat parameter, three elements precede all weights."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.norm, self.down = nn.RMSNorm(48), nn.Linear(96, 48, bias=False)
        self.gate, self.up = nn.Linear(48, 96, bias=False), nn.Linear(48, 96, bias=False)
        self.head = LinearCrossEntropy(48, 50)

    def forward(self, x, labels):
        h = self.norm(x + self.shift.sum())
        return self.head(x + self.down(swiglu(self.gate(h), self.up(h))), labels)


@ORIG
@on_ranks(2)
def test_fused_modules(orig):
    torch.manual_seed(0)
    one = convert(Block().to(device()), "CurrentScaling", fuse=True)
    model = in_fsdp1(prepare_modules_for_fsdp1(copy.deepcopy(one)), orig, units=False)
    optimizer = sgd(model)
    x, labels = batch(dist.get_rank(), 48), torch.arange(6, device=device())
    for _ in range(3):
        one.load_state_dict(values(model))
        xs = [x.clone().requires_grad_() for _ in range(2)]
        losses = [each(of, labels) for each, of in zip((model, one), xs, strict=True)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert torch.equal(xs[0].grad, xs[1].grad)
        optimizer.step()
        optimizer.zero_grad()


@ORIG
@on_ranks(2)
def test_no_codes_of_weights_are_kept(orig):
    """Between forward and backward, and after backward, a converted model uses no more memory than a plain one."""
    held = {}
    for kind in ("plain", "converted"):
        model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)]).to(device())
        if kind == "converted":
            prepare_modules_for_fsdp1(convert(model, "CurrentScaling"))
        model = in_fsdp1(model, orig)
        for _ in range(2):  # The first pass allocates FSDP1's buffers.
            x, before = torch.ones(1, 128, device=device()), resident()
            y = model(x)
            between = resident() - before
            y.sum().backward()
            del x, y
            for p in model.parameters():
                p.grad = None
            held[kind] = between, resident() - before
    codes = 128 * 128
    assert held["converted"][0] < held["plain"][0] + codes / 2, held
    assert held["converted"][1] < held["plain"][1] + codes / 2, held


@ORIG
@on_ranks(2)
def test_inputs_that_are_written_between_passes(orig):
    """Codes of x are shared within one pass only, although FSDP1 creates a new view of the weight for each pass."""
    model, one = ready(RECIPES["current"])
    model, x, views = in_fsdp1(model, orig), batch(), []
    for layer in linears(model):
        layer.register_forward_hook(lambda layer, args, y: views.append(layer.weight))  # Keeps ids unique.
    with torch.no_grad():
        ys = []
        for i in range(2):
            x.data.copy_(batch(i))
            ys.append(model.module[0](x))
        assert all(torch.equal(y, one[0](batch(i))) for i, y in enumerate(ys))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL, flat"])
@on_ranks(2, 3)
def test_resumed_runs(kind):
    """Weights, optimizer and scaling state restore every bit; full weights have the names of a plain model.

    FSDP1 cannot load its own LOCAL_STATE_DICT with original parameters, for any model.
    """
    kind, orig = StateDictType[f"{kind.split(',')[0]}_STATE_DICT"], "flat" not in kind
    recipe = DelayedScaling(history=3)
    policy = MixedPrecision(buffer_dtype=torch.bfloat16)

    def run():
        model = in_fsdp1(ready(recipe)[0], orig, mixed_precision=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, steps):
        for i in steps:
            model(batch(2 * i + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
        return {**values(model), **{name: t.clone() for name, t in scaling_state(model).items()}}

    first = run()
    train(*first, range(3))
    with warnings.catch_warnings():
        for theirs in ("FSDP.state_dict_type", "`_get_pg_default", "Multiple backends", ".* deprecating ShardedTensor"):
            warnings.filterwarnings("ignore", theirs)
        with FullyShardedDataParallel.state_dict_type(first[0], kind):
            saved = copy.deepcopy([first[0].state_dict(), first[1].state_dict()])
            scaling = copy.deepcopy(scaling_state(first[0], dist.group.WORLD))
            assert not set(saved[0]) & set(scaling)
            if kind is StateDictType.FULL_STATE_DICT:
                plain = model_of(bias=True)
                plain.load_state_dict(saved[0])
                assert all(torch.equal(p, values(first[0])[name]) for name, p in plain.named_parameters())
            went_on = train(*first, range(3, 6))
        again = run()
        with FullyShardedDataParallel.state_dict_type(again[0], kind):
            again[0].load_state_dict(saved[0])
            again[1].load_state_dict(saved[1])
            load_scaling_state(again[0], scaling)
            resumed = train(*again, range(3, 6))
    assert went_on.keys() == resumed.keys()
    for name, value in went_on.items():
        assert torch.equal(value, resumed[name]), name


@ORIG
@on_ranks(3)
def test_a_forgotten_update_is_an_error_on_every_rank(orig):
    """Also on ranks without any part of a weight."""
    model = in_fsdp1(ready(DelayedScaling(), sizes=(20, 3, 20))[0], orig)
    optimizer = sgd(model)
    for step in range(2):
        model(batch()).sum().backward()
        if step == 0:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"DelayedScaling: .*weight .* call update_scales\(model\)"):
        optimizer.step()
    update_scales(model)
    optimizer.step()


@ORIG
@on_ranks(4)
def test_amaxes_are_those_of_the_group_that_shards(orig):
    """Pipeline stages of two ranks each; several groups in one model raise."""
    rank = dist.get_rank()
    pairs = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("stage", "shard"))
    pair, across = pairs["shard"].get_group(), pairs["stage"].get_group()
    model, _ = ready(DelayedScaling())
    for i in (0, 2, 4):
        model[i] = FullyShardedDataParallel(model[i], pair, use_orig_params=orig, device_id=device())
    x = torch.full((2, 20), 2.0**rank, device=device())
    model(x).sum().backward()
    update_scales(model)
    assert linears(model)[0].delayed["activation"].amax_history[-1] == 2.0 ** (2 * (rank // 2) + 1)
    other, _ = ready(DelayedScaling())
    for i, group in ((0, pair), (2, across)):
        other[i] = FullyShardedDataParallel(other[i], group, use_orig_params=orig, device_id=device())
    with pytest.raises(ValueError, match=r"modules are wrapped with 2 groups \(of 2 to 2 ranks\); pass group="):
        update_scales(other)
    update_scales(other, dist.group.WORLD)


def coded_layer():
    layer = nn.Linear(32, 32, bias=False)
    layer.weight = nn.Parameter(quantize(layer.weight.detach(), "FP8_E4M3"), requires_grad=False)
    return nn.Sequential(layer, nn.Linear(32, 32))


def cut_layer():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh(torch_ranks.device, (dist.get_world_size(),))
    return parallelize_module(nn.Sequential(nn.Linear(32, 64)), mesh, {"0": ColwiseParallel()})


REFUSED = {
    "primary": (
        lambda: convert(model_of(), "CurrentScaling", primary=True),
        r"0.weight \(primary, FP8_E4M3.*\) is not",
    ),
    "codes": (coded_layer, r"0.weight \(QuantizedTensor, FP8_E4M3.*\) is not"),
    "cut": (cut_layer, r"0.weight \(DTensor\) is not"),
    "wrapped": (lambda: in_fsdp1(ready(CurrentScaling())[0]), r"model \(FullyShardedDataParallel\) has already taken"),
    "wrapped in part": (
        lambda: in_fsdp1(ready(CurrentScaling())[0]).module,
        r"0 \(FullyShardedDataParallel\) has already taken",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_cannot_be_prepared(what):
    """A refused model is unchanged."""
    make, text = REFUSED[what]
    model = make()
    before = [(id(p), type(p)) for p in model.parameters()]
    with pytest.raises(ValueError, match=f"^prepare_modules_for_fsdp1: {text}"):
        prepare_modules_for_fsdp1(model)
    assert [(id(p), type(p)) for p in model.parameters()] == before


@ORIG
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_what_was_not_prepared_is_refused(sync, primary, orig):
    """The error comes before any collective, so a single rank raises too."""
    model = convert(model_of(), "CurrentScaling", primary=primary)
    text = r"^FullyShardedDataParallel: 0.weight \(.*FP8_E4M3.*prepare_modules_for_fsdp1"
    for wrap in (
        in_fsdp1,
        lambda model, *args, **options: FullyShardedDataParallel(model, device_id=device(), **options),
    ):
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=text):
                wrap(model, orig, sync_module_states=sync)
    if not primary:
        in_fsdp1(prepare_modules_for_fsdp1(model), orig)(batch()).sum().backward()


@on_ranks(2)
def test_a_prepared_model_is_a_model():
    """It trains alone, is copied, converted again and passed to FSDP2; optimizers from before still train it."""
    model = convert(model_of(), RECIPES["delayed"])
    optimizer, before = sgd(model), [*map(id, model.parameters())]
    prepare_modules_for_fsdp1(prepare_modules_for_fsdp1(model))
    assert [*map(id, model.parameters())] == before
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(batch()).sum().backward()
        update_scales(each)
    optimizer.step()
    copied.zero_grad()
    state = {name: value.clone() for name, value in scaling_state(model).items()}
    assert all(torch.equal(value, state[name]) for name, value in scaling_state(copied).items())
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    copied = in_fsdp1(copied, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    with torch.no_grad():
        copied.module[0](batch())
    for name, value in scaling_state(copied).items():
        assert value.dtype == torch.float32
        assert name.endswith("amax") or torch.equal(value, state[name]), name
    convert(model, CurrentScaling())
    shard(model)(batch()).sum().backward()
    assert_gathers_the_whole(model)
