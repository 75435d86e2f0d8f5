"""Train a byte-level GPT with JAX and sharded weights: first with a bfloat16 all-gather, then with a quantized one.

    python examples/train_jax.py [--recipe fp8 | --formats bf16,fp8,mxfp8] [--steps N] [--text FILE]
        [--mode shard_map|auto|explicit] [--mesh fsdp|hsdp|fsdp,tp] [--weights shard|primary]
        [--loss plain|fused] [--experts N] [--checkpoint DIR [--every N] [--resume]] [--log-numerics FILE]

Runs on the GPUs present, or else on eight host devices of the CPU. Comments (1), (2), (3) mark effects of a recipe.
"""

import interrupt  # isort: skip

if __name__ == "__main__":
    interrupt.install()  # before the imports below, which take seconds

import math
import os
import re
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import checkpoint_jax
import experts_jax
import modes
import numerics_log
import options
import qshard.jax as qshard
import report
from corpus import Batch, Corpus, load
from gpt import BALANCE, PEAKS, GPTConfig, Schedule, initial_weights, is_quantized, is_stacked, stacked
from modes import Layout, bf16_linear, gather
from progress import TrainingProgress
from qshard.recipes import DelayedScaling, Recipe

CONFIG = GPTConfig()
CPU_DEVICES = 8
Weights = dict[str, jax.Array]
States = dict[str, qshard.LinearState]  # of delayed scaling; empty for other recipes
Probes = dict[str, qshard.Probe]  # collect statistics, by weight; empty without --log-numerics
Training = dict[str, Any]  # everything that the next step depends on: weights, states and optimizer state


def last_of(
    layout: Layout,
    weights: Weights,
    states: States,
    probes: Probes,
    scales: dict[str, Any],
    tokens: jax.Array,
    key: jax.Array,
    recipe: Recipe | None,
    gathered: dict[str, Any] | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the model up to the head.

    Args:
      layout: the parallel mode.
      weights: weights by name, sharded as `layout` expects.
      states: states of delayed scaling.
      probes: probes of logged layers.
      scales: weight scales, if computed in advance.
      tokens: `[batch, context]`.
      key: random key of stochastic rounding.
      recipe: the recipe, or None for bf16.
      gathered: receives every gathered weight, by name, if not None.

    Returns:
      The input of the head, `[batch, context, width]`, the head's weight, and the imbalance of experts.
    """
    # GPUs compute in bfloat16, the dtype of gathered weights. Most CPUs are slow in it.
    compute_dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    uneven = []

    def whole(name: str) -> jax.Array:
        weight = gather(layout, f"{name}.weight", weights[f"{name}.weight"])
        if gathered is not None:
            gathered[f"{name}.weight"] = weight
        return weight.astype(compute_dtype)

    def norm(x: jax.Array, name: str) -> jax.Array:
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        x = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return x.astype(compute_dtype) * whole(name)

    def given_to(weight: str) -> dict[str, Any]:
        return {
            "state": states.get(weight),
            "seed": jax.random.fold_in(key, list(weights).index(weight)),  # each layer has its own random numbers
        }

    def linear(x: jax.Array, name: str) -> jax.Array:
        weight = f"{name}.weight"
        shard = weights[weight]
        if recipe is None:
            if gathered is not None:
                gathered[weight] = gather(layout, weight, shard)
            return bf16_linear(layout, weight, x, shard)
        # (1) quantize the shard, gather its codes, and multiply in the recipe's formats
        given = {**given_to(weight), "weight_scales": scales.get(weight)}
        if gathered is not None:
            gathered[weight] = layout.gathered_weight(shard, weight, recipe, given)
        return layout.linear(x, shard, weight, recipe, {**given, "probe": probes.get(weight)})

    def grouped(x: jax.Array, sizes: jax.Array, name: str) -> jax.Array:
        weight = f"{name}.experts.weight"
        shard, given = weights[weight], given_to(weight)
        if gathered is not None:
            gathered.update(experts_jax.gathered_weights(layout, shard, weight, recipe, given["state"]))
        return experts_jax.grouped_linear(layout, x, shard, sizes, weight, recipe, given)

    def mlp(x: jax.Array, name: str) -> jax.Array:
        if f"{name}.router.weight" not in weights:
            return linear(jax.nn.relu(linear(x, f"{name}.up")) ** 2, f"{name}.down")
        y, more = experts_jax.routed(
            x, whole(f"{name}.router"), lambda rows, sizes, layer: grouped(rows, sizes, f"{name}.{layer}")
        )
        uneven.append(more)
        return layout.rows(y)

    def block(x: jax.Array, name: str) -> jax.Array:
        qkv = layout.rows(linear(norm(x, f"{name}.attention_norm"), f"{name}.qkv"))
        q, k, v = jnp.unstack(qkv.reshape(*x.shape[:-1], 3, CONFIG.heads, -1), axis=-3)
        attention = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + linear(attention, f"{name}.projection")
        return x + mlp(norm(x, f"{name}.mlp_norm"), name)

    x = layout.take(whole("embedding"), tokens) + whole("position")
    for layer in range(CONFIG.layers):
        x = block(x, f"blocks.{layer}")
    return norm(x, "norm"), whole("head"), sum(uneven, jnp.float32(0))


def loss_of(
    layout: Layout,
    weights: Weights,
    states: States,
    probes: Probes,
    tokens: jax.Array,
    targets: jax.Array,
    key: jax.Array,
    recipe: Recipe | None,
    record: bool,
    fused: bool,
) -> tuple[jax.Array, dict[str, Any]]:
    """Return the mean loss over the whole batch and the gathered weights, if recorded.

    In shard_map mode this is the loss of one device. Recorded weights get a leading axis for devices.

    Args:
      layout: the parallel mode.
      weights: weights by name, sharded as `layout` expects.
      states: states of delayed scaling.
      probes: probes of logged layers.
      tokens: `[batch, context]`.
      targets: `[batch, context]`.
      key: random key of stochastic rounding.
      recipe: the recipe, or None for bf16.
      record: whether to return gathered weights.
      fused: whether to use qshard's linear cross entropy.

    Returns:
      The loss, and the gathered weights by name, empty unless `record`.
    """
    scales = {}
    shards = {
        name: weight
        for name, weight in weights.items()
        if is_quantized(name) and not is_stacked(name) and isinstance(weight, jax.Array)
    }
    if recipe is not None and shards and not states:  # (2) one all-reduce finds the amaxes of all weights
        scales = layout.scales(jax.lax.stop_gradient(shards), recipe)
    gathered: dict[str, Any] | None = {} if record else None
    x, head, uneven = last_of(layout, weights, states, probes, scales, tokens, layout.key(key), recipe, gathered)
    if fused:  # computes logits for some rows at a time and overwrites them by their gradient
        loss = qshard.linear_cross_entropy(x, head, targets)
    else:
        logits = (x @ head.T).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    loss += BALANCE * (uneven - jax.lax.stop_gradient(uneven))  # adds gradients only
    return layout.mean(loss), jax.tree.map(lambda part: part[None], gathered or {})


def gathered_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that all-gathers of a compiled program write on one device, from its HLO text.

    XLA's CPU backend merges the forward and the backward gather of a weight.
    """
    total = 0
    # On GPUs an all-gather is a pair of instructions, and the second one has the result's type.
    for result in re.findall(r"= (\S+|\(.+?\)) all-gather(?:-done)?\(", program.as_text() or ""):
        for bits, shape in re.findall(r"[a-z]+(\d+)\w*\[([\d,]*)\]", result):  # for example u8[1024,256]
            total += int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)
    return total


def parts_of(gathered: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Return the arrays of gathered weights on one device, for `report.digest`."""
    return {name: [np.asarray(part)[0] for part in jax.tree.leaves(whole)] for name, whole in gathered.items()}


def resident_bytes(training: Training) -> int:
    """Return the bytes of a training's arrays on one device."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(training))


def make_optimizer(mesh: Mesh, kind: str, recipe: Recipe | None, schedule: Schedule, name: str) -> Any:
    """Return AdamW, with weight decay for matrices only; or Muon, which updates embedding, head and norms by AdamW."""
    rates = jnp.asarray([schedule.learning_rate(index) for index in range(schedule.steps)])
    if name == "muon":
        made = qshard.muon(
            lambda index: rates[index],
            weight_decay=schedule.weight_decay,
            consistent_rms=0.2,  # fits weight decay, and about the learning rates, of AdamW
            adam_b1=schedule.betas[0],
            adam_b2=schedule.betas[1],
        )
    else:
        made = optax.adamw(
            lambda index: rates[index],
            *schedule.betas,
            schedule.eps,
            weight_decay=schedule.weight_decay,
            mask=lambda weights: jax.tree.map(lambda weight: weight.ndim >= 2, weights),
        )
    if kind != "primary" or recipe is None:
        return made
    return qshard.optimizer(
        made,
        recipe,
        filter=lambda path, weight: is_quantized(path[2:-2]),  # path is "['blocks.0.up.weight']"
        spec=lambda path, weight: modes.spec_of(mesh, path[2:-2]),
    )


def recast(optimizer: Any, training: Training) -> Training:
    """Compute the codes of primary weights from their masters. Other trainings are returned as they are."""
    weights, states = training["weights"], training["states"]
    if not isinstance(optimizer, qshard.PrimaryOptimizer):
        return training
    made = jax.jit(optimizer.recast)(training["optimizer"], weights, states=like(weights, states))
    return {**training, "weights": made}


def like(weights: Weights, states: States) -> dict[str, Any] | None:
    """Return the states of delayed scaling as a tree with the structure of the weights."""
    return {name: states.get(name) for name in weights} if states else None


def begin(mesh: Mesh, recipe: Recipe | None, optimizer: Any, config: GPTConfig) -> Training:
    """Shard the initial weights over the mesh, and initialize states and optimizer."""
    weights = {
        name: jax.device_put(value, NamedSharding(mesh, modes.spec_of(mesh, name)))
        for name, value in stacked(initial_weights(config)).items()
    }
    states = {}
    if isinstance(recipe, DelayedScaling):
        states = {name: qshard.init_delayed(recipe, w.shape[:-2]) for name, w in weights.items() if is_quantized(name)}
    training = {"weights": weights, "states": states, "optimizer": optimizer.init(weights)}
    everywhere = NamedSharding(mesh, P())

    def put(array: jax.Array) -> jax.Array:  # moments are already sharded like their weights
        return array if len(array.sharding.device_set) == mesh.size else jax.device_put(array, everywhere)

    return recast(optimizer, jax.tree.map(put, training))


def train(name: str, corpus: Corpus, arguments: Namespace, progress: TrainingProgress) -> report.Run:
    """Train with one format."""
    mesh, schedule = jax.sharding.get_mesh(), Schedule(arguments.steps, arguments.batch, PEAKS[arguments.optimizer])
    layout = modes.Device(mesh) if arguments.mode == "shard_map" else modes.Whole(mesh)
    recipe = options.RECIPES[name]
    kind = arguments.weights if recipe is not None else "shard"  # bf16 is trained for comparison
    on_gpus, fused = jax.default_backend() == "gpu", arguments.loss == "fused"
    ranks = " ".join([f"{mesh.size} {'GPUs' if on_gpus else 'CPU devices'}", *options.shown_choices(arguments, kind)])
    device = jax.devices()[0].device_kind if on_gpus else "CPU"
    config = replace(CONFIG, experts=arguments.experts)
    run = report.Run("jax", name, ranks, corpus.name, schedule.steps, device=device, experts=config.experts)
    progress.start(f"jax {name}")

    optimizer = make_optimizer(mesh, kind, recipe, schedule, arguments.optimizer)
    training = begin(mesh, recipe, optimizer, config)
    batches = P(modes.batch_axes(mesh))
    cut = {weight: modes.spec_of(mesh, weight) for weight in training["weights"]}
    primary = isinstance(optimizer, qshard.PrimaryOptimizer)
    given = optimizer.specs(stacked(initial_weights(config)), mesh) if primary else cut
    in_specs = (given, P(), P(), batches, batches, P())
    logged = arguments.log_numerics is not None and recipe is not None
    probes = {weight: qshard.init_numerics() for weight in cut if logged and is_quantized(weight)}
    probes = jax.device_put(probes, NamedSharding(mesh, P()))
    value_and_grad = qshard.value_and_grad if primary else jax.value_and_grad

    @jax.jit
    def evaluate(training: Training, tokens: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        loss = partial(loss_of, layout, recipe=recipe, record=False, fused=fused)
        value, _ = layout.over_devices(loss, in_specs, (P(), P()))(
            training["weights"], training["states"], {}, tokens, targets, key
        )
        return value

    @partial(jax.jit, donate_argnums=0, static_argnames="record")
    def step(
        training: Training, tokens: jax.Array, targets: jax.Array, key: jax.Array, record: bool = False
    ) -> tuple[Training, jax.Array, dict[str, Any], Probes]:
        weights, states = training["weights"], training["states"]
        loss = partial(loss_of, layout, recipe=recipe, record=record, fused=fused)
        differentiate = layout.over_devices(
            value_and_grad(loss, argnums=(0, 1, 2), has_aux=True), in_specs, ((P(), P("fsdp")), (cut, P(), P()))
        )
        (loss_now, gathered), (gradients, amaxes, seen) = differentiate(weights, states, probes, tokens, targets, key)
        if states:  # (3) scales of the next step, from the amaxes of this and earlier steps
            states = qshard.update_delayed(states, amaxes, recipe)
        scaled = {"states": like(weights, states)} if primary else {}
        updates, state = optimizer.update(gradients, training["optimizer"], weights, **scaled)
        weights = optax.apply_updates(weights, updates)
        return {"weights": weights, "states": states, "optimizer": state}, loss_now, gathered, seen

    def put(batch: Batch) -> list[jax.Array]:
        return [jax.device_put(half, NamedSharding(mesh, batches)) for half in batch]

    done, folder = 0, arguments.checkpoint and arguments.checkpoint / name
    if arguments.resume and (found := checkpoint.newest(folder)) is not None:
        done, run, training = checkpoint_jax.load(found, training, run, partial(recast, optimizer))
        for loss in run.losses:
            progress.step(loss)
    run.resident_bytes = resident_bytes(training)
    held_out = [put(batch) for batch in corpus.validation(schedule.batch, CONFIG.context)]
    keys = jax.device_put(jax.random.split(jax.random.key(0), schedule.steps), NamedSharding(mesh, P()))
    program = step.lower(training, *held_out[0], keys[0]).compile()
    run.gathered_bytes = gathered_bytes(program)
    for index in range(done, schedule.steps):
        batch = put(corpus.batch(index, schedule.batch, CONFIG.context))
        start = time.perf_counter()
        if not run.gathered_sha256:  # the same step, in a program that also returns the gathered weights
            training, loss_now, gathered, seen = step(training, *batch, keys[index], record=True)
            run.gathered_sha256 = report.digest(parts_of(gathered))
        else:
            training, loss_now, _, seen = program(training, *batch, keys[index])
        # Wait for each step: host devices share few threads, and queued steps could take all of them.
        run.losses.append(float(jax.block_until_ready((loss_now, training))[0]))
        run.seconds.append(time.perf_counter() - start)
        progress.step(run.losses[-1])
        if logged:
            layers = {weight.removesuffix(".weight"): probe for weight, probe in seen.items()}
            found = qshard.numerics_of(layers, recipe)
            numerics_log.append(arguments.log_numerics, name, index, run.losses[-1], found)
        if schedule.validates_after(index):
            losses = [evaluate(training, *batch, keys[0]) for batch in held_out]
            run.validation.append((index + 1, float(np.mean(losses))))
            progress.validation(*run.validation[-1])
        if folder and ((index + 1) % arguments.every == 0 or index + 1 == schedule.steps):
            checkpoint_jax.save(folder, index + 1, training, run, settings(arguments, corpus))
    return run


def settings(arguments: Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return the settings that a resumed run must match. The devices may differ."""
    return {
        "framework": "jax",
        "text": corpus.name,
        **{name: getattr(arguments, name) for name in ("steps", "batch", "experts", "optimizer", "weights")},
    }


def main() -> None:
    """Train with each format in turn and write the report."""
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    # XLA's threads: each host device holds one while it waits for the others.
    os.environ.setdefault("NPROC", str(2 * CPU_DEVICES))
    devices = jax.devices()
    parser, arguments = options.parse(
        str(__doc__).splitlines()[0], "devices", len(devices), kinds=modes.KINDS, modes=modes.MODES
    )
    if math.gcd(CONFIG.width, CONFIG.context) % arguments.ranks:
        parser.error(f"--ranks {arguments.ranks} does not divide the rows of every weight")
    try:
        corpus = load(arguments.text, arguments.batch, CONFIG.context)
    except (OSError, ValueError) as error:
        options.fail(parser.prog, str(error))
    problem = options.refusal(arguments) or modes.refusal(arguments)
    checkpoint.check(parser.prog, arguments, problem, settings(arguments, corpus), "orbax.checkpoint")
    numerics_log.begin(arguments)
    mesh = modes.make_mesh(arguments.mesh, arguments.mode, devices[: arguments.ranks])
    with jax.set_mesh(mesh), TrainingProgress(arguments.steps) as progress:
        runs = [train(name, corpus, arguments, progress) for name in arguments.formats]
    report.present(runs, arguments.out)


if __name__ == "__main__":
    main()
