"""Muon in both front ends: its settings, and which parameters it updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from qshard import gemm_dispatch
from qshard._core.name_patterns import NamePatterns
from qshard._core.optimizers.adam import check_setting
from qshard._core.validation import join_names, quote
from qshard.layout import Shape

MUON, ADAMW = ALGORITHMS = ("muon", "adamw")

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of `torch.optim.Muon` and optax
STEPS = 5

FP8_MIN_SIDE = 4096
"""Shorter side from which 3 steps in FP8 are as fast as in bfloat16, or faster, on an H200."""

_WRAPPERS = ("model", "module", "transformer", "_orig_mod")
"""Parts of names that containers and wrappers add."""


class AlgorithmRules(NamedTuple):
    """Algorithms by pattern of the names of parameters."""

    algorithms: Mapping[str, str]
    patterns: NamePatterns


def check_rules(op: str, rules: Any, names: Collection[str]) -> AlgorithmRules:
    """Return the rules of a model with parameters of these names, or raise unless each has an effect."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"{op}: rules ({quote(rules)}) is not a dict; pass one, such as {{'*.router.*': 'adamw'}}")
    for pattern, algorithm in rules.items():
        check_algorithm(op, f"rules[{pattern!r}]", algorithm)
    patterns = NamePatterns(rules, names)
    patterns.check_used(op, [(name,) for name in names], "parameter")
    return AlgorithmRules(rules, patterns)


def algorithm_of(op: str, name: str, shape: Shape, rules: AlgorithmRules) -> str:
    """Return the algorithm of a parameter: of the first of `rules` that matches its name, else by default.

    By default matrices and stacks of matrices are updated by Muon, except for embeddings and heads, which are known by
    their names: a part of the name contains "embed" or is `wte`, `wpe` or `position`, or ends with "head", or is
    `output` at the top of the model.

    Raises:
      ValueError: a rule selects Muon for a parameter that is neither a matrix nor a stack.

    >>> names = ("blocks.0.output.weight", "output.weight", "model.embed_tokens.weight", "blocks.0.router.weight")
    >>> rules = check_rules("Muon", {"*.router.*": "adamw"}, names)
    >>> [algorithm_of("Muon", name, (4, 4), rules) for name in names]
    ['muon', 'adamw', 'adamw', 'adamw']
    """
    if (pattern := rules.patterns.first(name)) is not None:
        if rules.algorithms[pattern] == MUON:
            check_shape(op, name, shape)
        return rules.algorithms[pattern]
    parts = [part for part in name.lower().split(".") if part not in _WRAPPERS]
    is_embedding = any("embed" in part or part in ("wte", "wpe", "position") for part in parts)
    is_head = any(part.endswith("head") for part in parts) or parts[0] == "output"
    return MUON if len(shape) in (2, 3) and not is_embedding and not is_head else ADAMW


def check_algorithm(op: str, name: str, value: Any) -> None:
    if value not in ALGORITHMS:
        raise ValueError(f"{op}: {name} ({quote(value)}) is not {join_names(map(repr, ALGORITHMS))}; pass one of these")


def check_shape(op: str, name: str, shape: Shape) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{op}: {name} {tuple(shape)} is not a matrix [N, K] or a stack [E, N, K]; pass 'adamw' as its algorithm"
        )


def check_settings(
    op: str, momentum: Any, nesterov: Any, coefficients: Any, steps: Any, eps: Any, fp8_steps: Any, fp8_min_side: Any
) -> None:
    """Raise if a setting of Newton-Schulz or of the momentum has a wrong type or is out of range."""
    check_setting(op, "momentum", momentum, is_beta=True)
    check_setting(op, "eps", eps)
    if not isinstance(nesterov, bool):
        raise TypeError(f"{op}: nesterov ({quote(nesterov)}) is not a bool; pass True or False")
    is_list = isinstance(coefficients, Sequence) and len(coefficients) == 3
    if not is_list or not all(isinstance(each, Real) and math.isfinite(each) for each in coefficients):
        raise ValueError(
            f"{op}: ns_coefficients ({quote(coefficients)}) is not three numbers; pass three, such as {COEFFICIENTS}"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"{op}: ns_steps ({quote(steps)}) is not a whole number from 1 to 99; pass 5, as usual")
    if isinstance(fp8_steps, bool) or not isinstance(fp8_steps, int) or not 0 <= fp8_steps <= steps:
        raise ValueError(
            f"{op}: ns_fp8_steps ({quote(fp8_steps)}) is not a whole number from 0 to ns_steps ({steps}); pass 0 for "
            "bfloat16, or 3 of 5 steps"
        )
    if isinstance(fp8_min_side, bool) or not isinstance(fp8_min_side, int) or fp8_min_side < 0:
        raise ValueError(
            f"{op}: ns_fp8_min_side ({quote(fp8_min_side)}) is not a whole number of at least 0; pass {FP8_MIN_SIDE}, "
            "as by default"
        )


def fitting_fp8_steps(fp8_steps: int, min_side: int, shape: Shape) -> int:
    """Return how many of the first steps of a matrix, or of a stack, multiply in FP8: `fp8_steps` or 0.

    FP8 tensor cores need sides that are multiples of 16, and do not pay for matrices with a side below `min_side`.
    Other shapes stay in bfloat16 on every device, so that the formula depends on the shape alone.

    >>> [fitting_fp8_steps(3, 32, shape) for shape in [(32, 48), (8, 48, 32), (32, 40), (16, 48)]]
    [3, 3, 0, 0]
    """
    short, long = sorted(shape[-2:])
    return fp8_steps if short >= min_side and gemm_dispatch.fits("tensors", (short, short, long)) else 0


def update_scale(op: str, adjust: str | None, fan_out: int, fan_in: int) -> float:
    """Return the factor of the learning rate of a matrix with `fan_in` inputs and `fan_out` outputs.

        "original", None:   sqrt(max(1, fan_out / fan_in))
        "match_rms_adamw":  0.2 sqrt(max(fan_out, fan_in)), for learning rates of AdamW

    >>> update_scale("Muon", None, 64, 16), update_scale("Muon", "match_rms_adamw", 25, 16)
    (2.0, 1.0)
    """
    if adjust in (None, "original"):
        return math.sqrt(max(1, fan_out / fan_in))
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    raise ValueError(
        f"{op}: adjust_lr_fn ({quote(adjust)}) is not None, 'original' or 'match_rms_adamw'; pass one of these"
    )
