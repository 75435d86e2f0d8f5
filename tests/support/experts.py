"""Experts in 3-D parameters as transformers 5 and torchtitan have them, for tests without these packages."""

from functools import wraps
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


def use_experts_implementation(*, is_transposed=False, has_bias=False, has_gate=True, has_post_expert_norm=False):
    """As `transformers.integrations.moe.use_experts_implementation`: the same attributes and dispatch."""

    def wrapper(experts_class):
        original_init, original_forward = experts_class.__init__, experts_class.forward

        @wraps(original_init)
        def __init__(self, config, *args, **kwargs):
            original_init(self, config, *args, **kwargs)
            self.config = config
            self.has_gate = has_gate
            self.has_bias = has_bias
            self.has_post_expert_norm = has_post_expert_norm
            self.is_transposed = is_transposed

        @wraps(original_forward)
        def forward(self, *args, **kwargs):
            experts_forward = {"eager": original_forward}[self.config._experts_implementation]
            return experts_forward(self, *args, **kwargs)

        if not hasattr(experts_class, "_apply_gate"):
            experts_class._apply_gate = _default_apply_gate
        experts_class.__init__, experts_class.forward = __init__, forward
        return experts_class

    return wrapper


def _default_apply_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


class _Experts(nn.Module):
    """The eager loop of transformers, for every option of the decorator."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        up = "gate_up_proj" if self.has_gate else "up_proj"
        for expert in range(self.num_experts):
            tokens, places = torch.where(top_k_index == expert)
            h = self.project(hidden_states[tokens], up, expert)
            h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            y = self.project(h, "down_proj", expert)
            y = self.post_expert_norm(y) if self.has_post_expert_norm else y
            total.index_add_(0, tokens, (y * top_k_weights[tokens, places, None]).to(total.dtype))
        return total

    def project(self, x, name, expert):
        weight = getattr(self, name)[expert]
        y = F.linear(x, weight.t() if self.is_transposed else weight)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y


@use_experts_implementation()
class GatedExperts(_Experts):
    """As `MixtralExperts` and `Qwen3MoeExperts`."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, width, hidden = config.sizes
        self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, 2 * hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, width, hidden) / hidden**0.5)
        self.act_fn = nn.SiLU()


@use_experts_implementation(is_transposed=True, has_bias=True)
class OpenExperts(_Experts):
    """As `GptOssExperts`: weights `[E, K, N]`, biases and another gate."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, width, hidden = config.sizes
        self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, width, 2 * hidden) / width**0.5)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(self.num_experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, hidden, width) / hidden**0.5)
        self.down_proj_bias = nn.Parameter(torch.randn(self.num_experts, width))

    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


@use_experts_implementation(has_gate=False, has_post_expert_norm=True)
class PlainExperts(_Experts):
    """As `NemotronHExperts`, without a gate, and with the norm of `MuseSparkExperts`."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, width, hidden = config.sizes
        self.up_proj = nn.Parameter(torch.randn(self.num_experts, hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, width, hidden) / hidden**0.5)
        self.act_fn, self.post_expert_norm = nn.ReLU(), nn.RMSNorm(width)


class GroupedExperts(nn.Module):
    """As torchtitan's `GroupedExperts`, for CPUs too; the products are a method of their own."""

    def __init__(self, config):
        super().__init__()
        experts, width, hidden = config.sizes
        self.w1_EFD = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        self.w3_EFD = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)

    def forward(self, x_RD, num_tokens_per_expert_E):
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x_RD = x_RD.bfloat16()
        h = F.silu(self._grouped_mm(A=x_RD, B_t=self.w1_EFD.bfloat16().transpose(-2, -1), offs=offs))
        h = h * self._grouped_mm(A=x_RD, B_t=self.w3_EFD.bfloat16().transpose(-2, -1), offs=offs)
        return self._grouped_mm(A=h, B_t=self.w2_EDF.bfloat16().transpose(-2, -1), offs=offs).float()

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


class Mixture(nn.Module):
    """A router, experts, and a head: the top 2 of the experts for each token."""

    def __init__(self, kind, sizes=(5, 128, 128)):
        super().__init__()
        experts, width, _ = sizes
        self.router, self.head = nn.Linear(width, experts, bias=False), nn.Linear(width, 32)
        self.experts = kind(SimpleNamespace(sizes=sizes, _experts_implementation="eager"))

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(2)
        if isinstance(self.experts, GroupedExperts):
            order = torch.argsort(chosen.flatten(), stable=True)
            sizes = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
            y = self.experts(x[order // 2], sizes)
            y = torch.zeros_like(y).index_copy(0, order, y).view(*chosen.shape, -1)
            return self.head((y * scores[..., None]).sum(1) + x)
        return self.head(self.experts(x, chosen, scores) + x)
