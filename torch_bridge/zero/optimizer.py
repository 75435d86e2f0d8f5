"""ZeRO: optimizer states, masters and, if asked for, weights cut over ranks; layers see quantized weights.

    convert(model, recipe)
    optimizer = ZeroOptimizer(model, lr=1e-3)          # in place of DistributedDataParallel and AdamW
    for batch in data:                                 # each rank its own
        optimizer.zero_grad(); loss_of(model, batch).backward(); optimizer.step()

Stage 1: each rank has all weights, quantized once a step, not once a forward, and a part of masters and states. A step:

    gradients summed and scattered -> Adam on the own slice -> ONE max-reduction -> codes of the own slice -> ONE gather

Fully sharded, `shard_weights=True`: each rank has a part of the codes too. Those of a unit, one or more layers, are
gathered before its forward and before its backward pass and freed after; its gradients are scattered as soon as they
are all there.

The bits do not depend on the stage or on how weights are cut, and those of W ranks are those of one process that runs
the W batches one after the other and adds their gradients: gradients are added in float32, in the order of ranks, then
divided by W; codes are those of the whole weight (`qshard.master`); Adam is elementwise. With several backward passes a
step that holds for each stage alone: stage 1 adds a rank's own first, and sharded weights add those of all ranks.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; TransformerEngine `quantize_master_weights`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qshard.torch_bridge.delayed import update_delayed
from qshard.torch_bridge.fsdp.weight import plain
from qshard.torch_bridge.optim.adam import Adam
from qshard.torch_bridge.optim.adam_state import SCALED
from qshard.torch_bridge.optim.master import CastPlan, cast_master
from qshard.torch_bridge.zero.flat import ALIGNMENT, BLOCK_ALIGNMENT, Flat, Ranks, Slice
from qshard.torch_bridge.zero.units import by_setting, units_of, weights_of

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Adam):
    """Adam over slices of float32 masters, which makes the weights that layers compute with.

    Weights of `Linear` become `QuantizedTensor`s of the recipe's format, all others are gathered in the dtype that they
    have; so are weights of formats with vectors as blocks, whose two planes are different numbers, and of
    `four_over_six`: layers quantize these. Frozen parameters stay as they are.

    Args:
      model: on its device, the same layers on all ranks; values, and buffers, are taken from the first rank. Do not
        wrap it in DistributedDataParallel. Its parameters become other objects: hold on to those afterwards.
      lr: a number or a tensor of one.
      group: the ranks; all of them by default. One process needs none.
      shard_weights: whether weights are sharded too.
      units: with it, the modules whose weights are gathered together, innermost first served; by default each module
        that has parameters of its own. A parameter of two modules needs a unit that holds both.
      settings: called with the name and the parameter, gives options of `Adam` for it: `{"weight_decay": 0.0}`.
      parity: "model": codes are those of the master rounded to the dtype of the parameter; "master": of the master.
      options: of `Adam`, for all. States with scales have one for every 128 elements of the flattened weight.

    `step` clears no gradients, `zero_grad` does. They are gone from `.grad` as soon as they are made: added to a flat
    float32 buffer. A parameter without one counts as zeros. `DelayedScaling` is taken care of: call neither
    `update_scales` nor `update_delayed`. Checkpoints: `state_dict` has this rank's slices, exactly; `full_weights` what
    another program needs. That of `model` has what layers see.

    Collectives of a step, whatever the number of weights, also on a rank whose slices are empty: one all-to-all of
    float32 gradients, one max all-reduce of amaxes, one all-gather of bytes; with sharded weights the first and the
    last once for each unit, and the last again in backward. `DelayedScaling` takes an all-reduce of its own and needs
    no other. All ranks must run the same units in the same order. A gather begins when its unit is run, not before.

    Raises:
      ValueError: the model, or an option, cannot be taken: on all ranks, also if one rank alone sees why.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Linear(2, 2, bias=False), CurrentScaling())
    >>> _ = model.weight.detach().fill_(1.0)
    >>> optimizer = ZeroOptimizer(model, lr=0.25)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.dequantize()
    tensor([[0.7500, 0.7500],
            [0.7500, 0.7500]])
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        group: dist.ProcessGroup | None = None,
        shard_weights: bool = False,
        units: Sequence[nn.Module] | None = None,
        settings: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
        parity: Literal["model", "master"] = "model",
        **options: Any,
    ):
        self._ranks, self._model = Ranks.of(group), model
        problem, chosen, alignment = None, [], ALIGNMENT
        try:
            weights = weights_of(model)
            chosen = units_of(model, weights, units) if shard_weights else [(model, weights)]
            if parity not in ("model", "master"):
                raise ValueError(
                    f"ZeroOptimizer: parity ({parity!r}) is not 'model' or 'master'; choose what codes equal"
                )
            of_weights = [(settings(w.name, w.parameter) if settings else {}) for w in weights]
            groups_of = by_setting(weights, of_weights)
            trial = [nn.Parameter(torch.empty(0)) for _ in groups_of]  # What Adam would refuse, before any collective.
            adam = Adam(
                [{"params": [p], **given} for p, (given, _) in zip(trial, groups_of, strict=True)], lr, **options
            )
            if any({group["exp_avg_dtype"], group["exp_avg_sq_dtype"]} & set(SCALED) for group in adam.param_groups):
                alignment = BLOCK_ALIGNMENT
        except (ValueError, TypeError) as error:
            problem, groups_of = error, []
        kinds = [(w.name, w.shape, str(w.dtype), str(w.fmt)) for _, of_unit in chosen for w in of_unit]
        self._layout = hashlib.sha256(
            repr((self._ranks.size, shard_weights, parity, alignment, kinds)).encode()
        ).hexdigest()
        self._agree(problem, "has another model or other options; make them alike")
        self._take_from_first_rank()
        self._flats = [Flat(of_unit, self._ranks, shard_weights, alignment) for _, of_unit in chosen]
        self._slices = [piece for flat in self._flats for piece in flat.slices]
        of_weight = {id(piece.weight): piece for piece in self._slices}
        groups = []
        for given, members in groups_of:
            pieces = [of_weight[id(weight)].master for weight in members]
            groups.append({"params": [piece for piece in pieces if piece.numel()], **given})
        super().__init__(groups, lr, **options)
        quantized = [piece for piece in self._slices if piece.quantized is not None]
        self._cast = _Cast([piece for piece in quantized if piece.weight.delayed is None], parity)
        self._delayed = _Cast([piece for piece in quantized if piece.weight.delayed is not None], parity)
        self._queued = False
        for (module, _), flat in zip(chosen, self._flats, strict=True):
            self._watch(module, flat)
        self._publish()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, inv_grad_scale: Tensor | float | None = None) -> Any:
        """Updates the own slices with the mean of all ranks' gradients, and the weights that layers see. Collective.

        Args:
          closure: makes the gradients, and returns a loss.
          inv_grad_scale: a number that gradients are multiplied by first, as when the loss was scaled up.

        Returns:
          What `closure` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._delayed.observe()  # Of the weights that this step's forward has used.
        for flat in self._flats:
            mean = flat.mean_gradient()
            for piece, grad in zip(flat.slices, mean.split([p.master.numel() for p in flat.slices]), strict=True):
                piece.master.grad = grad.view(piece.master.shape)
        super().step(inv_grad_scale=inv_grad_scale)
        for piece in self._slices:
            piece.master.grad = None
        if self._delayed.slices:
            update_delayed(self._model, self._ranks.group)
        self._publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. There is nothing to set to zeros."""
        self._queued = False  # A backward pass that raised has not seen to it.
        for flat in self._flats:
            flat.clear_gradient()

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns: the states of `Adam` and, under "zero", the masters. No copies, no communication."""
        masters = [flat.masters for flat in self._flats]
        own = {"layout": self._layout, "rank": self._ranks.rank, "masters": masters}
        return {**super().state_dict(), "zero": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this rank, bit for bit, and makes the weights of it. Collective.

        Raises:
          ValueError: it is of another model, stage, number of ranks or rank; on all ranks, which have changed nothing.
        """
        own, problem = state_dict.get("zero", {}), None
        if (own.get("layout"), own.get("rank")) != (self._layout, self._ranks.rank):
            problem = ValueError(
                f"ZeroOptimizer: state (layout {str(own.get('layout'))[:8]}, rank {own.get('rank')}) is not of layout "
                f"{self._layout[:8]}, rank {self._ranks.rank}; load it with that model, stage and number of ranks, or "
                "start from full_weights"
            )
        self._agree(problem, "cannot load its state; see its message")
        super().load_state_dict(state_dict)
        for flat, masters in zip(self._flats, own["masters"], strict=True):
            flat.masters.copy_(masters)
            flat.free()
        self._publish()

    def full_weights(self) -> dict[str, Tensor]:
        """The float32 masters of all weights, by name, on every rank: what a plain model loads. Collective."""
        return {name: value for flat in self._flats for name, value in flat.gather_masters().items()}

    @torch.no_grad()
    def _publish(self) -> None:
        """Makes the own part of the weights of the masters and, unless it is sharded, sends it to all."""
        self._cast.current(self._ranks)
        self._delayed.delayed()
        plain_ones = [(p.values, p.master) for p in self._slices if p.values is not None and p.values.numel()]
        if plain_ones:
            torch._foreach_copy_([values for values, _ in plain_ones], [master for _, master in plain_ones])
        for flat in self._flats:
            if flat.sharded:
                flat.free()
            else:
                flat.publish()

    def _watch(self, module: nn.Module, flat: Flat) -> None:
        """Hooks by which weights are there when they are used, and gradients leave when they have been made."""
        for index, weight in enumerate(flat.weights):
            weight.parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._arrived(flat, i))
        if not flat.sharded:
            return

        def before_backward(_: Tensor) -> None:
            flat.in_backward = True
            flat.gather()
            if not self._queued:
                self._queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

        def before_forward(*_: Any) -> None:
            flat.gather()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
            if torch.is_grad_enabled() and not tensors:
                raise TypeError(
                    f"ZeroOptimizer: output of a unit ({type(output).__name__}) holds no tensor to see backward pass "
                    "by; return tensors in tuples, lists or dicts, or choose other units"
                )
            for t in tensors:
                if t.requires_grad:
                    t.register_hook(before_backward)
            if not flat.in_backward:  # Else activation checkpointing runs it, and backward goes on to use it.
                flat.free()

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)

    def _arrived(self, flat: Flat, index: int) -> None:
        if flat.take_gradient(index) and flat.sharded:
            flat.reduce_gradient()
            flat.in_backward = False
            flat.free()

    def _end_backward(self) -> None:
        """Units of which some parameter had no gradient."""
        self._queued = False
        for flat in self._flats:
            flat.reduce_gradient()
            flat.in_backward = False
            flat.free()

    def _agree(self, problem: Exception | None, otherwise: str) -> None:
        """Raises on all ranks if one has a problem, or if layouts differ. Collective."""
        mine = hashlib.sha256(repr((str(problem), self._layout)).encode()).digest()
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to("cpu" if device.type == "meta" else device)
        everyone = [sent]
        if self._ranks.size > 1:
            everyone = [torch.empty_like(sent) for _ in range(self._ranks.size)]
            dist.all_gather(everyone, sent, group=self._ranks.group)
        if problem is not None:
            raise problem
        others = [rank for rank, digest in enumerate(everyone) if not torch.equal(digest, sent)]
        if others:
            raise ValueError(f"ZeroOptimizer: rank {others[0]} is not like rank {self._ranks.rank}: it {otherwise}")

    @torch.no_grad()
    def _take_from_first_rank(self) -> None:
        if self._ranks.size > 1:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                dist.broadcast(plain(tensor), group=self._ranks.group, group_src=0)


class _Cast:
    """Slices that are cast together."""

    def __init__(self, slices: Sequence[Slice], parity: Literal["model", "master"]):
        self.slices = list(slices)
        self._pieces = [piece.quantized for piece in self.slices if piece.quantized is not None]
        self._masters = [piece.master.detach().view(-1) for piece in self.slices]
        self._states = [piece.weight.delayed for piece in self.slices if piece.weight.delayed is not None]
        self._parity: Literal["model", "master"] = parity
        if self.slices:
            self._plan = CastPlan(self._pieces, parity=parity)
            starts = torch.tensor([piece.start for piece in self.slices], dtype=torch.int64)
            self._starts = starts.to(self._plan.device)
            self._words = self._plan.words("starts", self._starts)

    def current(self, ranks: Ranks) -> None:
        """Codes and scales. One all-reduce."""
        if self.slices:
            group = ranks.group if ranks.size > 1 else None
            cast_master(self._pieces, self._masters, self._starts, group, parity=self._parity, plan=self._plan)

    def delayed(self) -> None:
        """Codes with the scales that are known."""
        for bucket in self._plan.plan.buckets if self.slices else ():
            states = [self._states[i] for i in bucket.indices]
            self._plan._ops.cast_slices(
                self._plan._ops.of_bucket(self._words, bucket),
                torch.stack([state.scale for state in states]),
                [self._masters[i] for i in bucket.indices],
                [self._pieces[i].data for i in bucket.indices],
                element=bucket.fmt.element.name,
                nonfinite=bucket.fmt.nonfinite,
                pieces=True,
                **bucket.attributes,
            )
            torch._foreach_copy_(
                [self._pieces[i].scale_inv for i in bucket.indices], [state.scale_inv for state in states]
            )

    @torch.no_grad()
    def observe(self) -> None:
        """Notes the amaxes of the slices; `update_delayed` makes those of whole weights of them."""
        for bucket in self._plan.plan.buckets if self.slices else ():
            amaxes = self._plan._ops.amax_slices(
                self._plan._ops.of_bucket(self._words, bucket),
                self._plan._ops.zeros(bucket.amaxes),
                [self._masters[i] for i in bucket.indices],
                whole="none",
                **bucket.attributes,
            )
            for i, amax in zip(bucket.indices, amaxes, strict=True):
                self._states[i].observe(amax)
