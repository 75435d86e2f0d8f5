"""docs/jax_*.md: code blocks run as scripts, and tables agree with what XLA compiles."""

import functools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import gathered_weight
from support import hlo
from support.pages import Page, run

PAGES = {name: Page(f"docs/jax_{name}.md") for name in ("flax", "pytrees", "shard_map")}
PYTREES, SHARD_MAP = PAGES["pytrees"], PAGES["shard_map"]
COSTS = {row["recipe"]: row for row in PYTREES.rows("recipe")}
SIZE = 1024
ARRAY = re.compile(r"[a-z]+(\d+)\w*\[([\d,]*)\]")


@pytest.mark.parametrize("name", PAGES)
def test_their_code_runs(name, tmp_path):
    """All blocks of a page run as one script."""
    page = PAGES[name]
    for module in set(re.findall(r"^(?:import|from) (\w+)", "\n".join(page.python), re.MULTILINE)) - {"qshard"}:
        pytest.importorskip(module)
    script = tmp_path / "page.py"
    script.write_text("\n".join(page.python))
    result = run(script, ["python", script.name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


def total(text):
    """Sum a cell such as 1 + 1/1024, without its terms per weight."""
    return sum((Fraction(part) for part in text.split(" + ") if not part.endswith("a weight")), Fraction(0))


@pytest.mark.parametrize("recipe", [name for name in COSTS if not name.startswith("bf16")])
def test_bytes_on_the_wire(recipe):
    """Bytes gathered and reduced for one weight, in shards of whole blocks."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    w = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    given = {"seed": 0} if recipe == "NVFP4" else {}
    if recipe == "DelayedScaling":  # The first pass reduces amaxes as later ones do.
        from qshard.jax import init_delayed

        given = {"state": init_delayed(recipe)}
    gather = functools.partial(
        gathered_weight, recipe=recipe, weight_spec=NamedSharding(mesh, P("fsdp")), gather_axis="fsdp", **given
    )
    found = hlo.collectives(jax.jit(gather).lower(w).compile())
    sizes = {"all-gather": 0, "all-reduce": 0}
    for kind, arrays in found:
        for array in arrays:
            width, shape = ARRAY.match(array).groups()
            sizes[kind] += int(width) // 8 * functools.reduce(int.__mul__, map(int, filter(None, shape.split(","))), 1)
    said = COSTS[recipe]
    assert Fraction(sizes["all-gather"], SIZE * SIZE) == total(said["gathered"])
    assert sizes["all-reduce"] == (4 if said["reduced"] == "4 a weight" else total(said["reduced"]))


def test_collectives_of_a_step():
    """Collectives of the first program on the page of shard_map."""
    count = {row["collective"].split(",")[0]: row["how many"] for row in SHARD_MAP.rows("collective")}
    assert count == {"all-reduce": "1", "all-gather": count["all-gather"], "reduce-scatter": "L"}
    assert count["all-gather"] == "L forward, and L backward, less those whose x has no gradient"
    there = {}
    exec("\n".join(SHARD_MAP.python[:2]).replace("jax.config.update", "(lambda *_: None)"), there)
    text = there["step"].lower(there["params"], there["x"]).as_text()
    layers = len(there["params"])
    # As traced: XLA drops unused gathers, as of the first layer in backward (test_jax_h100).
    assert text.count('"stablehlo.all_gather"') == 2 * layers
    assert text.count('"stablehlo.reduce_scatter"') == layers
    reduced = re.findall(r'"stablehlo.all_reduce".*?\) -> tensor<(\S+?)>', text, re.DOTALL)
    assert sorted(reduced) == sorted([f"{layers}xi32", "f32"])  # And the loss.
