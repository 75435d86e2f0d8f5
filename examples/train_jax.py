"""Train the byte-level GPT with JAX, weights sharded over all devices: first gathered as bfloat16, then quantized.

    python examples/train_jax.py [--recipe fp8 | --formats bf16,fp8,mxfp8] [--steps N] [--text FILE]

Runs on the GPUs present, or on eight host devices of the CPU. What a recipe changes is marked (1), (2), (3).
"""

import interrupt  # isort: skip

if __name__ == "__main__":
    interrupt.install()  # before the imports below, which take seconds

import math
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import options
import qshard.jax as qshard
import report
from corpus import Batch, Corpus, load
from gpt import GPTConfig, Schedule, initial_weights, is_quantized
from progress import TrainingProgress
from qshard.recipes import DelayedScaling, Recipe

CONFIG = GPTConfig()
CPU_DEVICES = 8
SHARDED, REPLICATED = PartitionSpec("fsdp"), PartitionSpec()  # everything is cut along its first axis, or not at all
Weights = dict[str, jax.Array]
States = dict[str, qshard.LinearState]  # of delayed scaling; other recipes have none


@jax.custom_vjp
def gather(shard: jax.Array) -> jax.Array:
    """Return the whole weight as bfloat16. Its gradient is summed over the devices, and cut again, in float32.

    The bits travel as uint16, because XLA's CPU backend would widen a bfloat16 collective to float32.
    """
    bits = jax.lax.bitcast_convert_type(shard.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, "fsdp", tiled=True), jnp.bfloat16)


def scatter(gradient: jax.Array) -> jax.Array:
    """Return this device's rows of the sum of all devices' gradients."""
    return jax.lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", tiled=True)


gather.defvjp(lambda shard: (gather(shard), None), lambda _, gradient: (scatter(gradient),))


@jax.custom_vjp
def bf16_linear(x: jax.Array, shard: jax.Array) -> jax.Array:
    """Return `x @ w.T`, for a shard of `w`. Backward gathers `w` again: keeping it would undo what FSDP saves."""
    return x @ gather(shard).T.astype(x.dtype)


def bf16_linear_backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, shard = kept
    dw = jnp.einsum("btn,btk->nk", dy, x).astype(jnp.bfloat16)
    return dy @ gather(shard).astype(dy.dtype), scatter(dw)


bf16_linear.defvjp(lambda x, shard: (bf16_linear(x, shard), (x, shard)), bf16_linear_backward)


def logits_of(
    weights: Weights,
    states: States,
    scales: dict[str, Any],
    tokens: jax.Array,
    key: jax.Array,
    recipe: Recipe | None,
    gathered: dict[str, Any] | None,
) -> jax.Array:
    """Map tokens [batch, context] to float32 logits [batch, context, vocabulary]. `weights` are one device's shards.

    Every weight is put into `gathered`, if that is given, as its layer gathers it.
    """
    # A GPU computes in bfloat16, like the weights it gathers; most CPUs are slow in it.
    compute_dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32

    def whole(name: str) -> jax.Array:
        weight = gather(weights[f"{name}.weight"])
        if gathered is not None:
            gathered[f"{name}.weight"] = weight
        return weight.astype(compute_dtype)

    def norm(x: jax.Array, name: str) -> jax.Array:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        x = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return x.astype(compute_dtype) * whole(name)

    def linear(x: jax.Array, name: str) -> jax.Array:
        weight = f"{name}.weight"
        shard = weights[weight]
        if recipe is None:
            if gathered is not None:
                gathered[weight] = gather(shard)
            return bf16_linear(x, shard)
        # (1) quantize the shard, gather its codes, multiply what the recipe makes of x and of the weight
        given: dict[str, Any] = {
            "gather_axis": "fsdp",
            "weight_scales": scales.get(weight),
            "state": states.get(weight),
            "seed": jax.random.fold_in(key, list(weights).index(weight)),  # each layer rounds by numbers of its own
        }
        if gathered is not None:
            gathered[weight] = qshard.gathered_weight(shard, recipe, **given)
        return qshard.linear(x, shard, recipe, **given)

    def block(x: jax.Array, name: str) -> jax.Array:
        qkv = linear(norm(x, f"{name}.attention_norm"), f"{name}.qkv")
        q, k, v = jnp.unstack(qkv.reshape(*x.shape[:-1], 3, CONFIG.heads, -1), axis=-3)
        attention = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + linear(attention, f"{name}.projection")
        hidden = jax.nn.relu(linear(norm(x, f"{name}.mlp_norm"), f"{name}.up")) ** 2
        return x + linear(hidden, f"{name}.down")

    x = whole("embedding")[tokens] + whole("position")
    for layer in range(CONFIG.layers):
        x = block(x, f"blocks.{layer}")
    return (norm(x, "norm") @ whole("head").T).astype(jnp.float32)


def loss_of(
    weights: Weights,
    states: States,
    tokens: jax.Array,
    targets: jax.Array,
    key: jax.Array,
    recipe: Recipe | None,
    record: bool,
) -> tuple[jax.Array, dict[str, Any]]:
    """Return the mean loss over the whole batch and, to `record` them, the weights that the layers gathered.

    `weights`, `tokens` and `targets` are one device's part. Recorded weights get a first axis of one, for devices.
    """
    scales = {}
    if recipe is not None and not states:  # (2) one all-reduce finds what the scales of all weights follow from
        quantized = {name: jax.lax.stop_gradient(weight) for name, weight in weights.items() if is_quantized(name)}
        scales = qshard.compute_scales(quantized, recipe, axis_name="fsdp")
    key = jax.random.fold_in(key, jax.lax.axis_index("fsdp"))
    gathered: dict[str, Any] | None = {} if record else None
    logits = logits_of(weights, states, scales, tokens, key, recipe, gathered)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return jax.lax.pmean(loss, "fsdp"), jax.tree.map(lambda part: part[None], gathered or {})


def gathered_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that the all-gathers of a compiled program write on one device, as its HLO text states them.

    XLA's CPU backend merges the gathers of a weight in the forward and in the backward pass into one.
    """
    total = 0
    # On GPUs an all-gather is a pair of instructions, and the second one has the type of the result.
    for result in re.findall(r"= (\S+|\(.+?\)) all-gather(?:-done)?\(", program.as_text() or ""):
        for bits, shape in re.findall(r"[a-z]+(\d+)\w*\[([\d,]*)\]", result):  # for example u8[1024,256]
            total += int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)
    return total


def parts_of(gathered: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Return the arrays of weights as one device has gathered them, for `report.digest`."""

    def on_one_device(part: jax.Array) -> np.ndarray:
        return np.asarray(part.addressable_shards[0].data)[0]

    return {name: [on_one_device(part) for part in jax.tree.leaves(whole)] for name, whole in gathered.items()}


def resident_bytes(*trees: object) -> int:
    """Return the bytes that the arrays in `trees` take on one device."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(trees))


def train(name: str, corpus: Corpus, schedule: Schedule, progress: TrainingProgress) -> report.Run:
    """Train with one format."""
    mesh = jax.sharding.get_mesh()
    on_gpus = jax.default_backend() == "gpu"
    ranks = f"{mesh.size} {'GPUs' if on_gpus else 'CPU devices'}"
    device = jax.devices()[0].device_kind if on_gpus else "CPU"
    run = report.Run("jax", name, ranks, corpus.name, schedule.steps, device=device)
    progress.start(f"jax {name}")

    recipe = options.RECIPES[name]
    cut = NamedSharding(mesh, SHARDED)
    weights = jax.device_put(initial_weights(CONFIG), cut)
    rates = jnp.asarray([schedule.learning_rate(index) for index in range(schedule.steps)])
    optimizer = optax.adamw(
        lambda index: rates[index],
        *schedule.betas,
        schedule.eps,
        weight_decay=schedule.weight_decay,
        mask=lambda weights: jax.tree.map(lambda weight: weight.ndim == 2, weights),
    )
    state = optimizer.init(weights)  # cut like the weights

    states: States = {}
    if isinstance(recipe, DelayedScaling):
        states = {name: qshard.init_delayed(recipe) for name in weights if is_quantized(name)}
        states = jax.device_put(states, NamedSharding(mesh, REPLICATED))
    in_specs = (SHARDED, REPLICATED, SHARDED, SHARDED, REPLICATED)

    def over_devices(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """Run `function(weights, states, tokens, targets, key)` on every device's part of the arguments."""
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)

    evaluate = jax.jit(over_devices(lambda *arguments: loss_of(*arguments, recipe, record=False)[0], REPLICATED))

    @partial(jax.jit, donate_argnums=(0, 1, 2), static_argnames="record")
    def step(
        weights: Weights,
        states: States,
        state: Any,
        tokens: jax.Array,
        targets: jax.Array,
        key: jax.Array,
        record: bool = False,
    ) -> tuple[Weights, States, Any, jax.Array, dict[str, Any]]:
        loss = jax.value_and_grad(partial(loss_of, recipe=recipe, record=record), argnums=(0, 1), has_aux=True)
        differentiate = over_devices(loss, ((REPLICATED, SHARDED), (SHARDED, REPLICATED)))
        (loss_now, gathered), (gradients, amaxes) = differentiate(weights, states, tokens, targets, key)
        updates, state = optimizer.update(gradients, state, weights)
        if states:  # (3) the scales of the next step, from the amaxes of this one and of those before
            states = qshard.update_delayed(states, amaxes, recipe)
        return optax.apply_updates(weights, updates), states, state, loss_now, gathered

    def put(batch: Batch) -> list[jax.Array]:
        return [jax.device_put(half, cut) for half in batch]

    run.resident_bytes = resident_bytes(weights, states, state)
    held_out = [put(batch) for batch in corpus.validation(schedule.batch, CONFIG.context)]
    keys = jax.device_put(jax.random.split(jax.random.key(0), schedule.steps), NamedSharding(mesh, REPLICATED))
    program = step.lower(weights, states, state, *held_out[0], keys[0]).compile()
    run.gathered_bytes = gathered_bytes(program)
    for index in range(schedule.steps):
        batch = put(corpus.batch(index, schedule.batch, CONFIG.context))
        start = time.perf_counter()
        if index == 0:  # the same step, in a program that also returns what its layers gathered
            made = step(weights, states, state, *batch, keys[index], record=True)
            run.gathered_sha256 = report.digest(parts_of(made[-1]))
        else:
            made = program(weights, states, state, *batch, keys[index])
        weights, states, state, loss_now, _ = made
        # Each step is waited for: host devices share few threads, and queued steps could take all of them.
        run.losses.append(float(jax.block_until_ready((loss_now, weights))[0]))
        run.seconds.append(time.perf_counter() - start)
        progress.step(run.losses[-1])
        if schedule.validates_after(index):
            losses = [evaluate(weights, states, *batch, keys[0]) for batch in held_out]
            run.validation.append((index + 1, float(np.mean(losses))))
            progress.validation(*run.validation[-1])
    return run


def main() -> None:
    """Train with each format in turn and write the report."""
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    devices = jax.devices()
    parser, arguments = options.parse(str(__doc__).splitlines()[0], "devices", len(devices))
    if math.gcd(CONFIG.width, CONFIG.context) % arguments.ranks:
        parser.error(f"--ranks {arguments.ranks} does not divide the rows of every weight")
    try:
        corpus = load(arguments.text, arguments.batch, CONFIG.context)
    except (OSError, ValueError) as error:
        options.fail(parser.prog, str(error))
    schedule = Schedule(steps=arguments.steps, batch=arguments.batch)
    mesh = jax.make_mesh((arguments.ranks,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices[: arguments.ranks])
    with jax.set_mesh(mesh), TrainingProgress(schedule.steps) as progress:
        runs = [train(name, corpus, schedule, progress) for name in arguments.formats]
    report.present(runs, arguments.out)


if __name__ == "__main__":
    main()
