"""`stream_weights`: yields the weights of a sharded model as the tensors of a serving engine, bucket by bucket."""

from __future__ import annotations

import collections
import itertools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qshard._core.validation import FormatLike, as_format
from qshard._files.engine_stream import DEFAULT_BUCKET, buckets, check_stream
from qshard.torch_bridge._convert.export import entries_of
from qshard.torch_bridge._distributed.fsdp1 import is_flattened_model
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_model
from qshard.torch_bridge._weight_sync.bucket import BucketPass, StreamBucket
from qshard.torch_bridge._weight_sync.items import OP, Facts, Formats, Item, items_of, transposed_weights
from qshard.torch_bridge._weight_sync.shared_amaxes import items_that_share, shared_amaxes
from qshard.torch_bridge._zero.schedule import ZeroUnit


def stream_weights(
    model: nn.Module,
    format: str = "compressed-tensors",
    *,
    weight_format: FormatLike | Mapping[str, FormatLike | None] | None = None,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = DEFAULT_BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model as named tensors of a serving engine, such as for vLLM's `load_weights`.

        engine_model.load_weights(stream_weights(model, "compressed-tensors"))    # after optimizer.step()

    Args:
      model: after `convert`, or with `weight_format` any model: sharded by FSDP2 or HSDP, `parallelize_module`, both, a
        `ZeroOptimizer`, or not at all.
      format: "compressed-tensors", "deepseek" or "modelopt", for engines; "qshard" for `from_plain`.
      weight_format: format of all `nn.Linear` weights, or formats by pattern of names of weights or layers, as recipes
        in `convert`; None keeps values: `{"lm_head": None, "*": "FP8_128x128"}`. Without a pattern, a converted layer
        has the weight format of its recipe, and other layers are not quantized.
      dtype: dtype of the other tensors; by default their own.
      bucket_bytes: most bytes of codes in a bucket. A larger weight is gathered alone. Two buckets have memory at a
        time.

    Yields:
      Names as in Hugging Face checkpoints, and whole tensors on the device of the model: codes and scales of a weight
      one after the other, other parameters and buffers as values. Tensors stay valid after the next one. A weight that
      modules share is yielded once, under its first name.

    Raises:
      TypeError, ValueError: an argument is wrong, a pattern has no effect, no weight is quantized, `format` cannot hold
        a weight, or FSDP1 has sharded the model. All ranks raise before the first collective.

    Collective: every rank of the model iterates to the end, and every rank gets all tensors. A rank that does not feed
    an engine drops them. Weights are gathered as codes, 1 or 1/2 byte an element, after a max-reduction of the amaxes
    that shards share, for each bucket; the rest in `dtype`. The next bucket is gathered while the caller has the
    tensors of one, so no weight may change before the end. The plan is kept for the next call.

    Codes and scales are, bit for bit, the result of `quantize` of the whole weight, which the forward pass multiplies.
    Engines multiply q, k and v, and gate and up, as one weight. In NVFP4 such weights are rows of `quantize` of that
    weight: their amaxes are reduced together first, and all have its global scale. Codes keep theirs, with a warning.
    Weights that are sharded in another way, and experts in 3-D parameters, are gathered one at a time in their own
    dtype first, with the same bits. Under a `ZeroOptimizer` with sharded weights, its units take the place of buckets.

    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Sequential(nn.Linear(128, 128)), "BlockScaling")
    >>> for name, tensor in stream_weights(model, "deepseek"):
    ...     print(name, tensor.dtype, tuple(tensor.shape))
    0.weight torch.float8_e4m3fn (128, 128)
    0.weight_scale_inv torch.float32 (1, 1)
    0.bias torch.float32 (128,)
    """
    check_model(OP, model)
    check_stream(format, bucket_bytes, OP)
    if dtype is not None:
        check_dtype(OP, "dtype", dtype)
    rules = weight_format if isinstance(weight_format, Mapping) else {"*": weight_format}
    if weight_format is None:
        rules = {}
    formats = {key: None if each is None else as_format(each, OP, "weight_format") for key, each in rules.items()}
    for fmt in formats.values():
        if fmt is not None and fmt.stochastic:
            raise ValueError(
                f"{OP}: weight_format ({fmt}) rounds stochastically; pass a format with rounding='nearest'"
            )
    return _stream(model, _plan_of(model, (format, tuple(formats.items()), dtype, bucket_bytes)))


class _Run(NamedTuple):
    """Consecutive items: buckets, or the items of a unit of a `ZeroOptimizer`, planned once they have memory."""

    buckets: list[StreamBucket]
    unit: ZeroUnit | None
    items: list[Item]


class _Plan(NamedTuple):
    """The plan of a stream, valid while `facts` hold. Each of the groups in `shared` gets one global scale."""

    facts: Facts
    format: str
    dtype: torch.dtype | None
    runs: list[_Run]
    shared: list[list[Item]]


_Options = tuple[str, Formats, torch.dtype | None, int]
plans_of_models: weakref.WeakKeyDictionary[nn.Module, dict[_Options, _Plan]] = weakref.WeakKeyDictionary()


def _plan_of(model: nn.Module, options: _Options) -> _Plan:
    """Return the plan for a model, of the last call if the structure is the same. Raises before collectives."""
    entries = entries_of(model)
    facts = Facts(model, entries)
    known = plans_of_models.get(model, {}).get(options)
    if known is not None and known.facts.holds(facts):
        return known
    if is_flattened_model(model):
        raise ValueError(
            f"{OP}: model ({type(model).__name__}) is sharded by FullyShardedDataParallel, which flattens its "
            "weights; shard it with fully_shard, ZeroOptimizer or parallelize_module"
        )
    format, formats, dtype, bucket_bytes = options
    items = items_of(model, formats)
    transposed = transposed_weights(model, entries)
    if not any(item.fmt is not None for item in items):
        advice = "call convert first, or pass weight_format="
        if transposed:
            advice = f"{transposed[0]} is [K, N], of Conv1D, which engines do not take as codes"
        raise ValueError(f"{OP}: model ({type(model).__name__}) has no quantized weight; {advice}")
    if transposed:
        more = f" and {len(transposed) - 1} more" if len(transposed) > 1 else ""
        warnings.warn(f"{OP}: {transposed[0]}{more} ([K, N], of Conv1D) are sent as values", stacklevel=3)
    for item in items:
        item.check(format)
    values, runs = dict(entries), []
    shared = items_that_share(items, values, format, stacklevel=4)
    units: set[int] = set()
    for unit, group in itertools.groupby(items, key=lambda item: item.unit):
        run = [*group]
        if unit is None:
            parts = [[run[i] for i in part] for part in buckets([item.size for item in run], bucket_bytes)]
            made = [StreamBucket(part, [values[item.name] for item in part], format, dtype) for part in parts]
            runs.append(_Run(made, None, run))
        elif id(unit) not in units:
            units.add(id(unit))
            runs.append(_Run([], unit, [item for item in items if item.unit is unit]))
    plan = _Plan(facts, format, dtype, runs, shared)
    if not units:  # Units have references to the model.
        plans_of_models.setdefault(model, {})[options] = plan
    return plan


def _stream(model: nn.Module, plan: _Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a plan. Memory of a tensor is freed when it is dropped."""
    values = dict(entries_of(model))
    amaxes = shared_amaxes(plan.shared, values)
    for run in plan.runs:
        if run.unit is None:
            yield from _gathered_ahead(run.buckets, values, amaxes)
        else:
            yield from _of_unit(model, run, plan, amaxes)


def _gathered_ahead(
    buckets: Sequence[StreamBucket], values: Mapping[str, Tensor], amaxes: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of buckets. One bucket is gathered while the caller has the tensors of the one before.

        reduce 0 | reduce 1, send 0 | reduce 2, send 1, yield 0 | reduce 3, send 2, yield 1 | ...

    A reduction is issued before the all-gather of the bucket before, so shards are cast while that all-gather runs.
    """
    running: collections.deque[BucketPass] = collections.deque()
    try:
        for i in range(len(buckets) + 2):
            if i < len(buckets):
                running.append(buckets[i].begin([values[item.name] for item in buckets[i].items], amaxes))
            if 0 < i <= len(buckets):
                running[-1 if i == len(buckets) else -2].send()
            if i > 1:
                yield from running.popleft().pairs()
    finally:
        for each in running:  # The caller has stopped before the end.
            each.abandon()


@torch.no_grad()
def _of_unit(model: nn.Module, run: _Run, plan: _Plan, amaxes: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a unit of ZeRO, in memory of their own: the unit frees its weights."""
    assert run.unit is not None
    with run.unit.gathered():
        values = dict(entries_of(model))
        members = [values[item.name] for item in run.items]
        if any(item.name in amaxes and isinstance(values[item.name], QuantizedTensor) for item in run.items):
            # Its codes have a global scale of their own.
            masters = run.unit.gather_values()
            pairs = zip(run.items, members, strict=True)
            members = [masters[id(value)] if item.name in amaxes else value for item, value in pairs]
        gathered = StreamBucket(run.items, members, plan.format, plan.dtype).begin(members, amaxes)
        gathered.send()
        return [(name, tensor.clone()) for name, tensor in gathered.pairs()]
