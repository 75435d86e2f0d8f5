"""The model and its training schedule as plain data, so that both frameworks start from the same bits.

A pre-norm GPT over bytes: learned positions, causal attention, squared-ReLU MLP, no biases. Linear weights are stored
`[out_features, in_features]`, as in torch, and every weight is sharded over its first axis.

With experts, a block has several MLPs and each token takes one, as in Switch Transformer, arXiv:2101.03961:

    p = softmax(x @ router), e = argmax p, y = p[e] MLP_e(x)

For each block, BALANCE E sum_e f[e] mean(p[:, e]) is added to the loss, where f[e] is the fraction of tokens that
expert e gets (equation 4 of the paper). Only gradients include it: reported losses are losses of the text. Routers are
`[width, experts]`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

BALANCE = 0.01  # weight of the loss that balances experts


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the default has 3.3 M parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 32
    vocabulary: int = 256  # a token is a byte
    experts: int = 0  # MLPs per block, one per token; 0: one MLP for all tokens


PEAKS = {"adamw": 3e-3, "muon": 1e-2}
"""The highest learning rate with each optimizer."""


@dataclass(frozen=True)
class Schedule:
    """AdamW, or Muon, with a linear warm-up and a cosine decay to zero."""

    steps: int = 120
    batch: int = 32
    peak: float = PEAKS["adamw"]
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.1  # for matrices; gains of norms do not decay

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        warm_up = min(20, max(1, self.steps // 5))
        if step < warm_up:
            return self.peak * (step + 1) / warm_up
        return self.peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.steps - warm_up)))

    def validates_after(self, step: int) -> bool:
        """Return whether the validation loss is measured after `step`: in the middle and at the end."""
        return step + 1 in (self.steps // 2, self.steps)


def is_quantized(name: str) -> bool:
    """Return whether a recipe applies to the weight `name`: the linear layers of the blocks, 96 % of the model.

    Embeddings, norms, routers and the head stay in high precision, as is usual for FP8 training.
    """
    return name.startswith("blocks.") and not name.endswith(("norm.weight", "router.weight"))


def initial_weights(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the float32 weights in NumPy, under the names that both models use."""
    rng = np.random.default_rng(seed)
    width = config.width

    def normal(rows: int, columns: int, deviation: float) -> np.ndarray:
        return (deviation * rng.standard_normal((rows, columns))).astype(np.float32)

    weights = {
        "embedding.weight": normal(config.vocabulary, width, 0.2),
        "position.weight": normal(config.context, width, 0.2),
        "norm.weight": np.ones(width, np.float32),
        "head.weight": normal(config.vocabulary, width, width**-0.5),
    }
    shapes = {
        "qkv": (3 * width, width),
        "projection": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    residual = (2 * config.layers) ** -0.5  # keeps the variance of the residual stream
    for layer in range(config.layers):
        for norm in ("attention_norm", "mlp_norm"):
            weights[f"blocks.{layer}.{norm}.weight"] = np.ones(width, np.float32)
        if config.experts:
            weights[f"blocks.{layer}.router.weight"] = normal(width, config.experts, width**-0.5)
        for name, (rows, columns) in shapes.items():
            gain = residual if name in ("projection", "down") else 1
            parts = config.experts if name in ("up", "down") else 0
            for each in [f"{name}.experts.{expert}" for expert in range(parts)] or [name]:
                weights[f"blocks.{layer}.{each}.weight"] = normal(rows, columns, gain * columns**-0.5)
    return weights


def expert_names(name: str, experts: int) -> list[str]:
    """Return the names of the single weights that `name`, such as "blocks.0.up.experts.weight", stacks."""
    return [name.replace(".experts.", f".experts.{expert}.") for expert in range(experts)]


def stacked(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the weights of a layer's experts into one `[experts, rows, columns]`, as JAX uses them."""
    found: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(weight)
    return {name: np.stack(parts) if is_stacked(name) else parts[0] for name, parts in found.items()}


def is_stacked(name: str) -> bool:
    """Return whether `name` is a stacked weight of all experts of a layer."""
    return name.endswith(".experts.weight")
