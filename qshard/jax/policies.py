"""Policies for `jax.checkpoint`: which intermediates of `linear` to save for backward.

    jax.checkpoint(layer, policy=qshard.jax.policies.codes_and_products_saveable)

`linear` names its intermediates with `jax.ad_checkpoint.checkpoint_name`. A policy saves some of them; the backward
pass recomputes the others. For each `linear` with x `[M, K]` and y `[M, N]`, sizes in bytes:

| policy | saves | casts of x and w | gathers of w |
| --- | --- | --- | --- |
| none: `jax.checkpoint(layer)` | nothing | 2 | 3, or 2 with `reshard_after_forward=False` |
| `codes_saveable` | codes of x, M K per plane; codes of the local shard of w | 1 | as without a policy |
| `codes_and_products_saveable` | codes of x, M K; codes of the local shard of w; y, 2 M N | 1 | 2 |

Sizes are for 8-bit codes and 16-bit y; 4-bit codes take half as much. x has two planes, one for each pass, if GEMMs
read codes directly or blocks are 1-D. `codes_saveable` saves both, `codes_and_products_saveable` only the backward one.

Combine a policy with your own by `jax.checkpoint_policies.save_from_both_policies`.
"""

from __future__ import annotations

import jax

__all__ = ["FORWARD", "PRODUCTS", "SCALES", "W_CODES", "X_CODES", "codes_and_products_saveable", "codes_saveable"]

X_CODES = "qshard.x"
"""Codes of the plane of x that backward reads."""
W_CODES = "qshard.w"
"""Codes of the local shard of a weight."""
FORWARD = "qshard.forward"
"""Codes of the planes of x and w that only the forward pass reads."""
SCALES = "qshard.scales"
"""Scales of x and w, and their amaxes under delayed scaling."""
PRODUCTS = "qshard.y"
"""The result of `linear`."""


codes_saveable = jax.checkpoint_policies.save_only_these_names(X_CODES, W_CODES, FORWARD, SCALES)
"""Saves codes and scales: the backward pass recomputes GEMMs, not casts."""

codes_and_products_saveable = jax.checkpoint_policies.save_only_these_names(X_CODES, W_CODES, SCALES, PRODUCTS)
"""Saves the codes and scales that backward reads, and the results: no cast and no GEMM is recomputed."""
