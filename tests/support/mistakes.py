"""Catalogue of errors: typical wrong calls of new users, and the full texts of their errors.

tests/cpu/error_catalogue/*.txt have an entry for each: what is wrong, the call, the type and the text of its error. In
calls of both front ends, `f` is a `Caller`, {w} stands for what `linear` calls a weight, and {device} for the device.
If the texts of the front ends differ, each has its own line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qshard._core.flat_shards import FlatSlice, plan_master
from qshard.formats import FP8_E4M3
from qshard.recipes import RecipeLike
from support.front import Front

FILES = Path(__file__).parents[1] / "cpu" / "error_catalogue"
LINE = 125
"""Characters of a terminal line; errors have at most two."""
VERBS = """
add apply ask call cast choose compute convert count cut dequantize differentiate drop enter exclude export gather
give initialize install leave let load make mark move multiply name pad pass plan put quantize remove replicate return
rotate run set shard split stack take trace use write
"""
ADVICE = re.compile(
    rf"[;:] (or )?({'|'.join(VERBS.split())})\b .*\w"  # An instruction,
    r"|; did you mean '.+'\?$"  # a name that is nearly the one given,
    r"|; (it has|the closest are|classes are) .*\w"  # names and axes that are there,
    r"|\) (must be|is not one of) .*\w"  # or the values that are allowed.
)
"""End of an error message: the fix."""


def mistakes(name: str) -> dict[str, tuple[str, list[str]]]:
    """Map each mistake in a file of the catalogue to its call and error texts."""
    entries = re.split("^# ", (FILES / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    split = [[line.strip() for line in entry.strip().splitlines()] for entry in entries]
    return {wrong: (call, texts) for wrong, call, *texts in split}


def said(call: Callable[[], Any] | str, names: Mapping[str, Any] | None = None) -> str:
    """Return the type and text of a call's error; assert that it is short, names a fix, and has no cause."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which, is what the caller compares.
        eval(call, dict(names or {})) if isinstance(call, str) else call()
    error, text = caught.value, str(caught.value)
    assert error.__suppress_context__ or error.__context__ is None, f"another error is behind it: {text}"
    # JAX adds the source location of a transformed call.
    assert type(error.__cause__).__name__ in ("NoneType", "JaxStackTraceBeforeTransformation"), text
    assert len(text) <= 2 * LINE, f"shorten this error from {len(text)} to {2 * LINE} characters: {text}"
    assert ADVICE.search(text), f"it does not say what to do (see ADVICE in {__file__}): {text}"
    return f"{type(error).__name__}: {text}"


class Caller:
    """Common calls of both front ends on NumPy arrays.

    Attributes:
      w: the name of a weight in the errors of `linear`.
      device: the name of the device of arrays in errors.
      foreign: an array of the other framework.
      state: options that give a layer a state of delayed scaling.
    """

    def __init__(self, front: Front):
        self.front, self.qshard = front, front.qshard
        self.jax = front.name == "jax"
        self.w = "w" if self.jax else "weight"
        self.device = {"cuda": "cuda:0"}.get(front.device, front.device)
        values = np.ones((64, 64), np.float32)
        if self.jax:
            import torch

            self.foreign: Any = torch.from_numpy(values)
            self.state: dict[str, Any] = {"state": self.qshard.init_delayed("DelayedScaling")}
        else:
            import jax.numpy as jnp

            self.foreign, self.state = jnp.asarray(values), {"delayed": {}}

    def array(self, x: Any) -> Any:
        return self.front.array(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x

    def quantize(self, x: Any, fmt: Any, **options: Any) -> Any:
        return self.qshard.quantize(self.array(x), fmt, **options)

    def linear(self, x: Any, w: Any, recipe: RecipeLike, **options: Any) -> Any:
        return self.qshard.linear(self.array(x), self.array(w), *(() if self.jax else (None,)), recipe, **options)

    def cross_entropy(self, logits: Any, labels: Any, **options: Any) -> Any:
        return self.qshard.cross_entropy(self.array(logits), self.array(labels), **options)

    def linear_cross_entropy(self, x: Any, w: Any, labels: Any, **options: Any) -> Any:
        return self.qshard.linear_cross_entropy(self.array(x), self.array(w), self.array(labels), **options)

    def swiglu(self, gate: Any, up: Any) -> Any:
        return self.qshard.swiglu(self.array(gate), self.array(up))

    def topk_routing(self, logits: Any, top_k: Any, **options: Any) -> Any:
        return self.qshard.topk_routing(self.array(logits), top_k, **options)

    def grouped_mlp(self, *given: Any, **options: Any) -> Any:
        return self.qshard.grouped_mlp(*map(self.array, given), **options)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return self.qshard.rms_norm(self.array(x), self.array(weight), eps)

    def gradient(self, x: Any, w: Any, recipe: RecipeLike) -> Any:
        """Return the gradient of the sum of `linear` with respect to x."""
        if self.jax:
            import jax

            return jax.grad(lambda x: self.linear(x, w, recipe).sum())(self.array(x))
        x = self.array(x).requires_grad_()
        return self.linear(x, w, recipe).sum().backward()

    def dtype(self, name: str) -> Any:
        return name if self.jax else getattr(self.front.torch, name)  # type: ignore[attr-defined]

    def op(self, name: str) -> Any:
        return getattr(self.qshard.ops if self.jax else self.front.torch.ops.qshard, name)  # type: ignore[attr-defined]

    def adam(
        self, lr: Any, betas: Any = (0.9, 0.999), eps: Any = 1e-8, state: str = "float32", params: Any = None
    ) -> Any:
        params = self.array(np.float32(1) if params is None else params)
        if self.jax:
            return self.qshard.adamw(lr, *betas, eps, mu_dtype=state).init(params)
        return self.qshard.AdamW([params], lr, betas, eps, exp_avg_dtype=self.dtype(state))

    def cast_master(self, masters: Any, starts: Any = (0,)) -> Any:
        """Cast a slice of one master weight."""
        masters = [self.array(m) for m in masters]
        if self.jax:
            plan = plan_master([FlatSlice((64, 64), FP8_E4M3)])
            return self.qshard.cast_master(None, masters, starts, plan=plan)
        weight = self.quantize(np.zeros((64, 64), np.float32), "FP8_E4M3")
        return self.qshard.cast_master([weight], masters, starts, parity="master")
