"""What `jax.checkpoint` may keep of `linear`, as its argument `policy`; and the names by which policies know it.

    jax.checkpoint(layer, policy=qshard.jax.policies.codes_and_products_saveable)

`linear` marks what it makes with `jax.ad_checkpoint.checkpoint_name`. A policy keeps some of it from the forward to the
backward pass; all else is computed again. For each `linear`, with an x of M x K and a y of M x N, in bytes:

| policy | keeps | casts x and w | gathers w |
| --- | --- | --- | --- |
| none: `jax.checkpoint(layer)` | nothing | twice | 3 times, or twice with `reshard_after_forward=False` |
| `codes_saveable` | codes of x, M K a plane, and of w's shard | once | as without a policy |
| `codes_and_products_saveable` | codes of x, M K; of w's shard; y, 2 M N | once | twice |

Codes of 4 bits take half of that. x has two planes, one for each pass, where GEMMs read codes as they are or blocks are
vectors; the second policy keeps that of the backward pass alone.

Join one with a policy of your own by `jax.checkpoint_policies.save_from_both_policies`.
"""

from __future__ import annotations

import jax

__all__ = ["FORWARD", "PRODUCTS", "SCALES", "W_CODES", "X_CODES", "codes_and_products_saveable", "codes_saveable"]

X_CODES = "qshard.x"
"""Codes of x, of the plane that backward reads."""
W_CODES = "qshard.w"
"""Codes of a weight, on each device those of its shard."""
FORWARD = "qshard.forward"
"""Codes of x and w of planes that the forward pass alone reads."""
SCALES = "qshard.scales"
"""Scales of x and w, and in delayed scaling their amaxes."""
PRODUCTS = "qshard.y"
"""What `linear` gives."""


codes_saveable = jax.checkpoint_policies.save_only_these_names(X_CODES, W_CODES, FORWARD, SCALES)
"""Keeps what `linear` casts: the backward pass computes everything again but casts."""

codes_and_products_saveable = jax.checkpoint_policies.save_only_these_names(X_CODES, W_CODES, SCALES, PRODUCTS)
"""Keeps what backward reads of `linear`, and what it gives: no cast and no GEMM is done again."""
