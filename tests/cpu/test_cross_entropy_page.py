"""docs/cross_entropy.md: its tables agree with the memory and the collectives of compiled programs."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from support import hlo
from support.pages import Page

PAGE = Page("docs/cross_entropy.md")


def test_bytes_of_logits():
    """Memory holds the logits of one chunk, and never those of all rows."""
    (row,) = [row for row in PAGE.rows("in bfloat16") if row["in bfloat16"] == "`linear_cross_entropy`"]
    bytes_each, of = row["bytes for each logit"].split(", of ")
    assert of == "`chunk` rows"
    rows, classes, k, chunk = 2048, 4096, 8, 256
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, k), (classes, k))]
    loss = jax.value_and_grad(lambda x, w, y: qj.linear_cross_entropy(x, w, y, chunk=chunk), argnums=(0, 1))
    compiled = jax.jit(loss).lower(*given, jax.ShapeDtypeStruct((rows,), jnp.int32)).compile()
    text = compiled.as_text()
    assert f"bf16[{chunk},{classes}]" in text
    assert f"[{rows},{classes}]" not in text
    assert int(bytes_each) == jnp.dtype(jnp.bfloat16).itemsize


def test_bytes_that_are_sent():
    said = {row["sent"] for row in PAGE.rows("who has parts of the classes")}
    assert said == {"16 bytes a row"}
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        logits = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
        labels = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=NamedSharding(mesh, P()))
        found = hlo.traffic(jax.jit(jax.value_and_grad(qj.cross_entropy)).lower(logits, labels).compile())
    gathered = [each.bytes for each in found if each.kind == "all-gather"]
    assert gathered == [8 * 64 * 16]
    assert sum(each.bytes for each in found) - sum(gathered) <= 64  # Scalars.
