"""Names of weights in serving engines: experts and fused layers of qshard under the names of Hugging Face checkpoints.

| module | here | there |
| --- | --- | --- |
| `MoE` `mlp` | `mlp.router.weight` | `mlp.gate.weight` |
| | `mlp.expert_bias` | `mlp.gate.e_score_correction_bias` |
| | `mlp.w13.experts.3.weight` | `mlp.experts.3.gate_proj.weight`, `mlp.experts.3.up_proj.weight` |
| | `mlp.w2.experts.3.weight` | `mlp.experts.3.down_proj.weight` |
| | `mlp.shared.w13.weight`, `mlp.shared.w2.weight` | `mlp.shared_experts.gate_proj.weight`, ... |
| `GroupedLinear` `mlp.up_proj` | `mlp.up_proj.experts.3.weight` | `mlp.experts.3.up_proj.weight` |
| experts of transformers 5 | `mlp.experts.gate_up_proj` `[E, 2 I, H]` | `mlp.experts.3.gate_proj.weight`, ... |
| | `mlp.experts.down_proj` `[E, H, I]` | `mlp.experts.3.down_proj.weight` |
| experts of torchtitan | `moe.experts.w1` `[E, I, H]` | `moe.experts.3.w1.weight` |

All other names stay.

Sources: the checkpoints of DeepSeek-V3 and Qwen3-MoE on Hugging Face, which vLLM and SGLang read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from qshard._files.engine_stream import EngineWeight
from qshard.torch_bridge._experts.layer import GroupedLinear
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._moe.layer import MoE

GATE_UP = ("gate_proj", "up_proj")


class Names(NamedTuple):
    """The weights of the engine for one parameter.

    Attributes:
      of_ranks: the weights for the parameter of each rank of `ep_group`; for a stack of biases, of each expert.
      ep_group: expert parallelism: ranks with other experts. None: `of_ranks` has one entry, or one for each expert.
    """

    of_ranks: tuple[tuple[EngineWeight, ...], ...]
    ep_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, *weights: EngineWeight) -> Names:
        return cls((weights,))


def engine_weights(model: nn.Module) -> dict[str, Names]:
    """Return the engine names of parameters and buffers with other names there, by the name in the model.

    >>> model = nn.ModuleDict({"mlp": MoE(32, 64, num_experts=4, top_k=2, recipe="CurrentScaling")})
    >>> engine_weights(model)["mlp.w13.experts.3.weight"].of_ranks[0][1]
    EngineWeight(name='mlp.experts.3.up_proj.weight', rows=(64, 128))
    """
    found: dict[str, Names] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        at = f"{prefix}." if prefix else ""
        if isinstance(module, MoE):
            found |= _of_moe(at, module)
        elif isinstance(module, GroupedLinear):
            parent, _, own = prefix.rpartition(".")
            if isinstance(module.experts, Experts) and module.experts._parameters.get("bias") is not None:
                start, count = f"{parent}.experts" if parent else "experts", len(module.experts)
                names = [EngineWeight(f"{start}.{expert}.{own}.bias") for expert in range(count)]
                found[f"{at}experts.bias"] = Names(tuple((name,) for name in names))
            for key in () if isinstance(module.experts, Experts) else _parameters(module):
                _, expert, kind = key.split(".")
                name = ".".join(filter(None, (parent, "experts", expert, own, kind)))
                found.setdefault(f"{at}{key}", Names.of(EngineWeight(name)))
    return found


def expert_names(name: str, expert: int, rows: int) -> list[EngineWeight]:
    """Return the weights of the engine for one expert of a 3-D parameter with `rows` rows for each expert.

    >>> expert_names("mlp.experts.down_proj", 3, 64)
    [EngineWeight(name='mlp.experts.3.down_proj.weight', rows=None)]
    """
    prefix, _, own = name.rpartition(".")
    if own == "weight":  # Of a `GroupedLinear`, which `MoE` has under other names than engines.
        path, _, of_all = prefix.rpartition(".")
        at, _, layer = path.rpartition(".")
        prefix, own = f"{at}.{of_all}" if at else of_all, {"w13": "gate_up_proj", "w2": "down_proj"}.get(layer, layer)
    if own == "gate_up_proj":
        return _halves([f"{prefix}.{expert}.{each}.weight" for each in GATE_UP], rows)
    return [EngineWeight(f"{prefix}.{expert}.{own}.weight")]


def _of_moe(at: str, moe: MoE) -> dict[str, Names]:
    found = {f"{at}router.weight": Names.of(EngineWeight(f"{at}gate.weight"))}
    found[f"{at}expert_bias"] = Names.of(EngineWeight(f"{at}gate.e_score_correction_bias"))
    group = moe.ep_group
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    local = moe.num_experts // ranks
    for layer, prefix in ((moe.w13, "w13"), (moe.w2, "w2")):
        for key, parameter in () if isinstance(layer.experts, Experts) else _parameters(layer).items():
            _, expert, kind = key.split(".")
            experts = [int(expert) + (other - rank) * local for other in range(ranks)]
            of_ranks = tuple(_names(f"{at}experts.{each}.", prefix, kind, parameter) for each in experts)
            found[f"{at}{prefix}.{key}"] = Names(of_ranks, group)
    for prefix in () if moe.shared is None else ("w13", "w2"):
        for kind, parameter in _parameters(moe.shared[prefix]).items():  # type: ignore[index]
            found[f"{at}shared.{prefix}.{kind}"] = Names((_names(f"{at}shared_experts.", prefix, kind, parameter),))
    return found


def _names(at: str, layer: str, kind: str, parameter: Tensor) -> tuple[EngineWeight, ...]:
    if layer == "w13":
        return tuple(_halves([f"{at}{each}.{kind}" for each in GATE_UP], parameter.shape[0]))
    return (EngineWeight(f"{at}down_proj.{kind}"),)


def _halves(names: list[str], rows: int) -> list[EngineWeight]:
    return [EngineWeight(names[0], (0, rows // 2)), EngineWeight(names[1], (rows // 2, rows))]


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters() if name.rpartition(".")[2] in ("weight", "bias")}
