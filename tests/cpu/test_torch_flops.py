"""FLOPs of products for `torch.utils.flop_counter`, and what a memory budget of `torch.compile` does with them."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.flop_counter import FlopCounterMode

from qshard.gemm_dispatch import Gpu
from qshard.op_table import multi_table, table
from qshard.recipes import NAMED
from qshard.torch_bridge import LinearCrossEntropy, MoE, convert
from qshard.torch_bridge._quantized.target_gpu import Target, multiply_for
from support.draws import draw

PRODUCTS = [spec for spec in (*table().values(), *multi_table().values()) if spec.name.startswith("gemm")]
FP8 = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn"}
M, N, K, EXPERTS = 32, 64, 128, 3


def empty(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call(torch.ops.qshard)
    return counter.get_total_flops()


E8, F32, STOPS = torch.float8_e4m3fn, {"dtype": torch.float32}, torch.empty(EXPERTS, dtype=torch.int32, device="meta")
SCALES = empty(EXPERTS, dtype=torch.float32)
CALLS = {
    "packed": lambda ops: ops.gemm_nvfp4(
        *(empty(M, K // 2), empty(M, K // 16, dtype=E8), empty(dtype=torch.float32)),
        *(empty(N, K // 2), empty(N, K // 16, dtype=E8), empty(dtype=torch.float32)),
        **{"a_rows": 1, "b_rows": 1, "workspace": 0, **F32},
    ),
    "values_tn": lambda ops: ops.gemm_values_tn(
        empty(K, M, dtype=torch.float32), empty(K, N, dtype=torch.float32), **{"workspace": 0, **F32}
    ),
    "grouped": lambda ops: ops.gemm_grouped(
        *(empty(M, K), SCALES, empty(EXPERTS, N, K), SCALES, STOPS, STOPS),
        **{**FP8, "fast": True, "tokens": M, "workspace": 0, **F32},
    ),
    "grouped_k": lambda ops: ops.gemm_grouped_k(
        *(empty(M, K), SCALES, empty(N, K), SCALES, STOPS), **{**FP8, "fast": True, "workspace": 0, **F32}
    ),
    "grouped_list": lambda ops: ops.gemm_grouped_list(
        *(empty(M, K), SCALES, SCALES, STOPS, STOPS, empty(M, N, dtype=torch.float32), empty(0)),
        *([empty(N, K)] * EXPERTS,),
        **{**FP8, "fast": True},
    ),
}


@pytest.mark.parametrize("recipe", NAMED)
def test_models_on_meta_run_and_have_flops(recipe):
    """Forward and backward, with fused norms and a head, as to plan a step without its memory."""
    with torch.device("meta"):
        body = nn.Sequential(nn.RMSNorm(K), nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
        head, x = LinearCrossEntropy(K, N), torch.empty(M, K, requires_grad=True)
        labels = torch.empty(M, dtype=torch.int64)
    convert(body, recipe, fuse=True)

    def step(_):
        head(body(x), labels).backward()
        assert {each.grad.device.type for each in (x, *body.parameters(), *head.parameters())} == {"meta"}

    assert counted(step) == 3 * 3 * 2 * M * N * K


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flops_are_those_of_one_product(call):
    """A token goes to one expert, so experts do not multiply the FLOPs."""
    assert counted(call) == 2 * M * N * K


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_every_product_has_flops(spec):
    made = draw(spec, lengths=(64,))
    options = {name: getattr(torch, value) if name == "dtype" else value for name, value in made.options.items()}

    def tensor(shape, dtype):
        given = getattr(torch, dtype)
        return empty(*shape, dtype=torch.uint8 if given.itemsize == 1 and "scale" not in dtype else given)

    operands = [
        [tensor(*one) for one in tensors] if operand.many else tensor(*tensors[0])
        for operand, tensors in zip(spec.inputs, made.tensors, strict=True)
    ]
    rows, columns = made.tensors[0][0][0][-2:]
    assert counted(lambda ops: getattr(ops, spec.name)(*operands, **options)) >= 2 * rows * columns


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Compiled(NamedTuple):
    """Gradients of a compiled model, bytes that it saves for its backward pass, and products in that pass."""

    gradients: list
    saved: int
    products: int


def compile_within(budget, model, x):
    """Run a compiled copy of a model under an `activation_memory_budget`."""
    saved, products = [], []

    def count_saved(graph, _):
        (results,) = next(node for node in graph.graph.nodes if node.op == "output").args
        kept = [node.meta["val"] for node in results[1:] if isinstance(node, torch.fx.Node)]
        saved.append(sum(x.numel() * x.element_size() for x in kept if isinstance(x, torch.Tensor)))
        return make_boxed_func(graph)

    def count_products(graph, _):
        texts = ([str(node.target), *node.args] for node in graph.graph.nodes)  # A program names its ops in its text.
        products.append(sum(text.count("gemm") for line in texts for text in line if isinstance(text, str)))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=count_saved,
        bw_compiler=count_products,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),  # As inductor: the partitioner does not repeat `detach`.
    )
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled(x).square().sum().backward()
    return Compiled([p.grad for p in compiled.parameters()], saved[0], products[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # From dynamo itself.
def test_a_memory_budget_keeps_the_bits_of_gradients():
    torch.manual_seed(0)
    model, x = convert(Block(64), "CurrentScaling"), torch.randn(256, 64)
    whole, least = (compile_within(budget, model, x) for budget in (1.0, 0.4))
    assert least.saved < 0.6 * whole.saved
    assert all(torch.equal(a, b) for a, b in zip(whole.gradients, least.gradients, strict=True))


@pytest.mark.parametrize(
    "recipe", ["CurrentScaling", *(pytest.param(name, marks=pytest.mark.slow) for name in ("BlockScaling", "MXFP8"))]
)
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_a_budget_just_below_one_repeats_no_product(recipe):
    """Layers save x in place of its codes, and the partitioner computes the activation again instead of storing it."""
    torch.manual_seed(0)
    rows = 2048  # PyTorch ignores the budget of a graph that saves less than its inputs, such as weights.
    model, x = convert(Block(128).bfloat16(), recipe), torch.randn(rows, 128, dtype=torch.bfloat16)
    hopper = Target(Gpu((9, 0), cublaslt=130800))  # Its products are ops that PyTorch does not know, unlike `mm`.
    with multiply_for(hopper):
        whole, less = (compile_within(budget, model, x) for budget in (1.0, 0.9))
    activation = rows * 3 * 128  # Bytes of its codes.
    assert less.saved <= whole.saved - activation
    assert less.products == whole.products == 4
    assert all(torch.equal(a, b) for a, b in zip(whole.gradients, less.gradients, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8"])
def test_a_budget_keeps_the_bits_of_experts(recipe):
    """Experts save codes under any budget, so the partitioner may repeat their products."""
    torch.manual_seed(0)
    model = MoE(128, 128, num_experts=8, top_k=2, recipe=recipe).bfloat16()
    x = torch.randn(2048, 128, dtype=torch.bfloat16)
    with multiply_for(Target(Gpu((9, 0), 130800, 130800))):
        whole, *others = (compile_within(budget, model, x) for budget in (1.0, 0.9, 0.5))
    assert whole.products < others[-1].products
    for other in others:
        assert other.saved < whole.saved
        assert all(torch.equal(a, b) for a, b in zip(whole.gradients, other.gradients, strict=True))


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_seeds_are_not_drawn_again():
    """The forward pass advances the seeds of stochastic rounding."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compile_within(0.4, convert(Block(64), "NVFP4"), torch.randn(256, 64))
