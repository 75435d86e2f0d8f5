"""ZeRO: optimizer states, masters and optionally weights sharded over ranks, with quantized weights for layers.

    convert(model, recipe)
    optimizer = ZeroOptimizer(model, lr=1e-3)          # replaces DistributedDataParallel and AdamW
    for batch in data:                                 # each rank its own
        optimizer.zero_grad(); loss_of(model, batch).backward(); optimizer.step()

Stage 1: each rank has all weights, quantized once a step instead of once a forward, and a shard of masters and states.
A step:

    reduce-scatter gradients -> Adam on the local slices -> ONE max-reduction -> cast the local slices -> ONE all-gather

With `optimizer_class=Muon`, owners of matrices among the ranks also orthogonalize momentum (`sliced_muon.py`).

Fully sharded, `shard_weights=True`: codes are sharded too. The codes of a unit, one or more layers, are gathered while
the unit before it runs, in forward and in backward, and freed after it. Its gradients are reduced as soon as they are
complete, while the next unit runs (`schedule.py`).

The bits do not depend on the stage or the sharding, and W ranks give the bits of one process that runs the W batches
one after the other and adds their gradients. Gradients are added in float32 in rank order, then divided by W; codes are
the codes of the whole weight (`_core.flat_shards`); Adam is elementwise. With several backward passes a step, the
bits of the two stages differ: stage 1 first adds the gradients of each rank over the passes, and sharded weights are
reduced over ranks after each pass.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; TransformerEngine `quantize_master_weights`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from qshard._core.optimizers.adam import check_setting
from qshard.torch_bridge._delayed_scaling import update_delayed
from qshard.torch_bridge._distributed.ordered_sum import GradientWire, WireType
from qshard.torch_bridge._ops.collectives import unlike_ranks
from qshard.torch_bridge._optim.adam import Adam, initialize_state
from qshard.torch_bridge._optim.cast_master import Parity, check_parity
from qshard.torch_bridge._optim.muon import Muon, check_algorithms
from qshard.torch_bridge._quantized.validation import check_group, check_model
from qshard.torch_bridge._zero.buffers import ALIGNMENT, BLOCK_ALIGNMENT, FlatBuffer, update_batches
from qshard.torch_bridge._zero.gradients import clip_by_norm, norm_over_ranks
from qshard.torch_bridge._zero.meta_init import Init, MetaInit, check_init, default_device
from qshard.torch_bridge._zero.placeholders import weakly
from qshard.torch_bridge._zero.schedule import Schedule, autograd_runs, check_parameters, watch
from qshard.torch_bridge._zero.settings import Settings, SettingsOf, settings_of
from qshard.torch_bridge._zero.sliced_muon import SlicedMuon, is_muon
from qshard.torch_bridge._zero.state_dict import StateDicts, check_is_state
from qshard.torch_bridge._zero.weight import Ranks, SliceCast, copy_values, units_of, weights_of


class ZeroOptimizer(Adam):
    """Adam, AdamW or Muon with masters and states sharded over ranks, which also quantizes and gathers the weights.

    Weights of `Linear` become `QuantizedTensor`s of the recipe's format. All other parameters are gathered in their
    dtype, among them weights in formats that cannot be gathered as codes: formats with 1-D blocks, where the two planes
    have different codes, and `four_over_six`. Layers quantize such weights in each forward. Frozen parameters stay as
    they are.

    Args:
      model: the model on its device, with the same layers on all ranks. Values and buffers are broadcast from the first
        rank. Do not wrap it in DistributedDataParallel. Its parameters are replaced, so take references to them
        afterwards.
      lr: learning rate, a number or a tensor with one element.
      group: the ranks; by default all. A single process needs none.
      shard_weights: whether to shard the weights too.
      units: with `shard_weights`, the modules that gather their weights together. A parameter belongs to the innermost
        unit around it. By default each module with parameters of its own is a unit. A parameter of two modules needs a
        unit that contains both.
      settings: a function of name and parameter that returns options of `optimizer_class` for it, such as
        `{"weight_decay": 0.0}`, or with `Muon` `{"algorithm": "adamw"}`.
      parity: "model" casts the master after rounding it to the dtype of the parameter; "master" casts the master
        itself.
      reduce_dtype: dtype of gradients on the wire: float32, bfloat16 or float16. Sums are float32. If gradients already
        have this dtype and a step has one backward pass, the bits equal a float32 reduction at half the traffic. Or
        "MXFP8_E4M3" or "MXFP8_E5M2", a quarter of the traffic: `reduce_gradients_in_order` states the error.
      init: for a model on meta, a function that initializes a module. It is called with each module that has parameters
        or buffers of its own; by default its `reset_parameters` or `init_weights` is called. A rank materializes one
        module at a time. Values depend on module names and on `torch.manual_seed` of the first rank, not on the number
        of ranks or the stage.
      device: for a model on meta, its device; by default the current accelerator.
      optimizer_class: `Adam`, `AdamW` or `Muon`, with its formulas, options, defaults and states.
      options: options of `optimizer_class` for all parameters, such as `rules` and `adamw` of `Muon`. Scaled states
        have one scale for every 128 elements of the flattened weight. Masters are float32 with any `master_weights`.

    Raises:
      ValueError: the model or an option is unsupported. All ranks raise, even if only one sees the reason.
      TypeError: an argument has a wrong type.

    **Gradients.** Each gradient is moved from `.grad` to a flat float32 buffer as soon as autograd has computed it.
    `zero_grad` of the optimizer or of the model clears the buffer; `step` does not. Reading the placeholder at `.grad`
    raises: clip with `clip_grad_norm_`. A parameter without a gradient counts as zeros, and a gradient that you assign
    to `.grad` counts. `step` also updates `DelayedScaling`; a further call of `update_scales` changes nothing. The
    histories get the amaxes of all weights, also of layers that did not run in the step.

    **Muon** updates hidden matrices and stacks of experts, and AdamW the rest, as in `Muon` of named parameters, with
    the same bits. The momentum is in slices too. Each matrix has an owner among the ranks; in `step`, two all-to-alls
    for a bucket of matrices send slices of the momentum there in bfloat16, and results back. A parameter without a
    gradient is updated by its momentum.

    **Sharded weights** have memory while their unit runs. In between, `model.parameters()` have shapes and dtypes, and
    reading values raises. Layers may be compiled: the hooks that gather and free stay outside of the graph. Moving the
    model to another dtype or device, such as `model.half()`, raises before anything is moved. Any other change that a
    step would ignore, such as freezing a parameter or writing to it, raises in the next step.

    **Checkpoints.** `state_dict` of the model contains the exact float32 masters in whole shapes; `state_dict` of the
    optimizer contains the states. With several ranks both contain slices. `torch.distributed.checkpoint` loads them on
    any number of ranks, in either stage and into plain models. `get_model_state_dict`, `get_optimizer_state_dict` and
    the matching `set_` functions take them too, with `full_state_dict=True` for one file. `load_state_dict` of the
    model takes whole tensors or slices; it is collective, because weights are cast again. `full_weights` returns whole
    masters on every rank. A model with sharded weights cannot be pickled or copied.

    **Communication.** `step` is collective, also on a rank with empty slices. For any number of weights it takes one
    all-to-all of gradients for every 128 MiB, one max-reduction of amaxes and one all-gather of bytes. With sharded
    weights the all-to-all and the all-gather are per unit, and backward gathers again, except for the last unit of
    forward. `DelayedScaling` takes one all-reduce of its own instead of the max-reduction. All ranks must run the same
    units in the same order and have gradients for the same parameters.

    **Prefetch.** Sharded weights are gathered one unit ahead, in the order of the last pass. In another order, or if
    only part of the model runs, results are the same, and a unit that was gathered in vain is freed. Two units have
    memory at a time, plus the units that contain others, so choose `units` of similar size, such as the blocks of a
    transformer. On CUDA, gathers and reductions have streams of their own. Sharded weights cannot be captured in a CUDA
    graph.

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

    owned_elements = Muon.owned_elements
    """Elements of a bucket of matrices for each rank, as of `Muon`. Set it on all ranks before the first step."""
    _op = "ZeroOptimizer"

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        group: dist.ProcessGroup | None = None,
        shard_weights: bool = False,
        units: Sequence[nn.Module] | None = None,
        settings: SettingsOf | None = None,
        parity: Parity = "model",
        reduce_dtype: WireType = torch.float32,
        init: Init | None = None,
        device: torch.device | str | None = None,
        optimizer_class: type[Adam] = Adam,
        **options: Any,
    ):
        check_model("ZeroOptimizer", model)
        check_group("ZeroOptimizer", group)
        self._ranks, self._model = Ranks.of(group), model
        there = next((p.device for p in model.parameters() if not p.is_meta), None)
        self._device = there or (default_device() if device is None else torch.device(device))
        problem, chosen, resolved, wire = None, [], Settings([], {}), GradientWire(None)
        try:  # Validate before any collective.
            weights = weights_of(model)
            check_init(model, init)
            chosen = units_of(model, weights, units) if shard_weights else [(model, weights)]
            check_parity("ZeroOptimizer", parity)
            wire = GradientWire.of("ZeroOptimizer", "reduce_dtype", reduce_dtype)
            resolved = settings_of(optimizer_class, weights, settings, lr, options)
        except Exception as error:  # Of `settings` too. All ranks raise.
            problem = error
        alignment = BLOCK_ALIGNMENT if resolved.has_scaled_states else ALIGNMENT
        kinds = [(w.name, w.shape, str(w.dtype), str(w.fmt)) for _, of_unit in chosen for w in of_unit]
        layout = repr((self._ranks.size, shard_weights, parity, alignment, kinds))
        self._layout = hashlib.sha256(layout.encode()).hexdigest()
        also = wire, resolved.facts
        self._agree(problem, "has another model or other options; use the same on all ranks", also)
        initial = MetaInit(model, weights, init, self._ranks, self._device)
        self._ranks.broadcast([*model.parameters(), *model.buffers()])
        self._stale = False  # True if masters were loaded and weights are not cast yet.
        self._schedule = Schedule(self._device)
        make: dict[str, Any] = {
            "device": self._device,
            "on_write": weakly(self._note_write),
            "make": initial.make,
            "wire": wire,
            "reductions": self._schedule.reductions,
        }
        self._flats = [FlatBuffer(of_unit, self._ranks, shard_weights, alignment, **make) for _, of_unit in chosen]
        self._weights = [weight for flat in self._flats for weight in flat.weights]
        self._hypers, self._steps = {}, {}
        self._of_groups = [of_group for _, of_group in resolved.groups]
        groups = [{"params": [w.master for w in of_group], **given} for given, of_group in resolved.groups]
        Optimizer.__init__(self, groups, resolved.defaults)  # All settings are in the groups.
        for param_group, of_group in zip(self.param_groups, self._of_groups, strict=True):
            param_group["params"] = [w.visible for w in of_group]  # What users see, the same on every rank.
        self._batches = update_batches(self._flats, self._of_groups)
        self._muon = SlicedMuon(self._batches, resolved, self._ranks, self._device)
        self._initialize_states()
        quantized = [w for w in self._weights if w.quantized]
        self._current = SliceCast([w for w in quantized if not w.delayed], parity, self._device)
        self._delayed = SliceCast([w for w in quantized if w.delayed], parity, self._device)
        watch(model, [module for module, _ in chosen], self._flats, self._schedule, parity, self._renew)
        ordered = [weight for of_group in self._of_groups for weight in of_group]
        written = weakly(self._note_write)
        self._states = StateDicts(self._ranks, self._device, self._layout, self._weights, ordered, written)
        self._states.watch(model, self._flats, self._renew)
        self._publish()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Raise TypeError: the optimizer has views of a model's memory, hooks on it, and a process group."""
        raise TypeError(
            "ZeroOptimizer: it owns memory and hooks of its model, so it cannot be pickled or copied; save "
            "state_dict(), and load it into the optimizer of the other model"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise NotImplementedError: masters and buffers of all parameters are made with the optimizer."""
        if "_states" in vars(self):  # Else the constructor of `Optimizer` calls it.
            raise NotImplementedError(
                "ZeroOptimizer: add_param_group is not supported, because buffers have the parameters of the model; "
                "add the parameters to the model first, and pass settings="
            )
        super().add_param_group(param_group)

    def _initialize_states(self) -> None:
        for group, of_group in zip(self.param_groups, self._of_groups, strict=True):
            for weight in () if is_muon(group) else of_group:
                initialize_state(self.state[weight.visible], weight.master, group)
        self._muon.initialize_states(self.param_groups, self.state)

    def _to_update(self, group: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Tensor]]:
        if is_muon(group):
            return []
        index = next(i for i, one in enumerate(self.param_groups) if one is group)
        return [(self.state[weight.visible], weight.master) for weight in self._batch.of_groups[index]]

    def _by_kind(self, group: dict[str, Any]) -> dict[Any, list[tuple[dict[str, Any], dict[str, Tensor]]]]:
        """Group states as `Adam` does, and by batch: each batch has step numbers in memory of its own."""
        return {(*kind, self._batch.number): members for kind, members in super()._by_kind(group).items()}

    def _update(self, inv_grad_scale: Tensor | float | None) -> None:
        """Update the local slices with the mean gradient of all ranks, then the weights of layers. Collective."""
        check_parameters(self._model, self._flats)
        self._schedule.abandon()
        muon = self._muon.begin(self.param_groups, self.state, self.owned_elements)
        self._delayed.observe()  # The weights that this step's forward used.
        for flat in self._flats:
            flat.gradient.settle()
        # If the number of ranks is a power of two, Adam can multiply sums by its reciprocal without rounding.
        sums = inv_grad_scale is None and self._ranks.size.bit_count() == 1
        sums = sums and not any(flat.gradient.is_clipped for flat in self._flats)
        scale = 1 / self._ranks.size if sums else inv_grad_scale
        for batch in self._batches:
            self._batch = batch
            for flat in batch.flats:
                flat.set_gradients(flat.gradient.total() if sums else flat.gradient.mean())
            self._update_values(scale)
            muon.add(batch, 1.0 if scale is None else scale)
            for flat in batch.flats:
                flat.set_gradients(None)
        muon.finish()
        if self._delayed.delayed:
            update_delayed(self._model, self._ranks.group)
        self._publish()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float | Tensor, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the mean gradient of all ranks by its norm, like `torch.nn.utils.clip_grad_norm_`.

        Call it on all ranks after the last backward pass of a step and before `step`. The norm is the exact sum of
        powers rounded to 60 bits, so its bits depend neither on the stage nor on the sharding.

        Args:
          max_norm: largest norm after clipping; `math.inf` only measures.
          norm_type: a number above 0, or infinity.
          error_if_nonfinite: whether to raise, on all ranks, if the norm is infinite or NaN. This waits for the device.

        Returns:
          The norm before clipping, float32 `[]`, the same bits on every rank.

        Raises:
          TypeError, ValueError: `norm_type` is not a number above 0, or `max_norm` is not a number of at least 0.
          RuntimeError: the norm is infinite or NaN, and `error_if_nonfinite` is True.

        Collective: the reduction of gradients, which `step` then skips, and two all-reduces of at most 16 bytes.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = ZeroOptimizer(model)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        tensor(5.)
        """
        if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
            raise ValueError(
                f"clip_grad_norm_: norm_type ({norm_type!r}) is not a number above 0; pass 2.0, or math.inf"
            )
        if isinstance(max_norm, Tensor) or max_norm != math.inf:
            check_setting("clip_grad_norm_", "max_norm", max_norm)
        for flat in self._flats:
            flat.gradient.settle()
        means = [flat.gradient.freeze_mean() for flat in self._flats]
        norm = norm_over_ranks(means, float(norm_type), self._ranks.group)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: norm ({norm.item()}) of the gradients is not finite; skip the step with "
                "zero_grad(), or pass error_if_nonfinite=False"
            )
        clip_by_norm(means, norm, max_norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients. `set_to_none` is ignored; `.grad` becomes None."""
        if self._schedule.in_backward and not autograd_runs():
            self._schedule.abandon()  # A backward pass has raised.
        for flat in self._flats:
            flat.gradient.clear()
            for weight in flat.weights:
                weight.parameter.grad = weight.visible.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states in whole shapes and, under "zero", the masters. No communication.

        With several ranks, tensors are slices that share memory with the optimizer. Save them with
        `torch.distributed.checkpoint`, or take a snapshot with `copy.deepcopy`. `get_optimizer_state_dict` drops
        "zero", and `state_dict` of the model has the masters too.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = ZeroOptimizer(model)
        >>> sorted(optimizer.state_dict()), sorted(optimizer.state_dict()["state"][0])
        (['param_groups', 'state', 'zero'], ['exp_avg', 'exp_avg_sq', 'step'])
        """
        return self._states.of_optimizer(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state bit for bit: this rank's slice of it, whatever its sharding. Collective.

        A state from `state_dict` of this class restores the masters too, for the same model, stage and ranks. A state
        from `get_optimizer_state_dict` or from torch's AdamW has no masters: load the model too.

        Raises:
          ValueError: the state belongs to another model or other algorithms, or its masters to another stage, number of
            ranks or rank. All ranks raise, and nothing has changed.

        >>> optimizer = ZeroOptimizer(nn.Linear(2, 1, bias=False))
        >>> optimizer.load_state_dict(optimizer.state_dict())
        """
        problem: Exception | None = None
        states: dict[Any, Any] = {}
        masters: list[Tensor] = []
        try:
            check_is_state(state_dict)
            check_algorithms("ZeroOptimizer", state_dict["param_groups"], self.param_groups)
            states, masters = self._states.local_slices(state_dict, [len(g["params"]) for g in self.param_groups])
        except Exception as error:  # Of whatever the state dict has in it. All ranks raise.
            problem = error
        self._agree(problem, "cannot load its state; see its message", bool(masters))
        super().load_state_dict({**state_dict, "state": states})
        self._initialize_states()
        for weight, master in zip(self._weights, masters, strict=False):
            weight.master.detach().copy_(master)
        self._publish()

    def full_weights(self) -> dict[str, Tensor]:
        """Return the whole float32 masters by name, on every rank, as a plain model loads them. Collective.

        Frozen parameters and buffers are not among them.

        >>> optimizer = ZeroOptimizer(nn.Linear(2, 1, bias=False))
        >>> {name: tuple(value.shape) for name, value in optimizer.full_weights().items()}
        {'weight': (1, 2)}
        """
        return {name: value for flat in self._flats for name, value in flat.gather_masters().items()}

    def _note_write(self) -> None:
        self._stale = True

    def _renew(self) -> None:
        """Publish masters or delayed scales that were loaded. Collective if there are any; all ranks load alike."""
        if (
            self._stale
            or self._delayed.are_scales_written
            or (self._ranks.size == 1 and any(flat.is_written for flat in self._flats))
        ):
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Cast this rank's slices and, unless weights are sharded, gather them."""
        self._stale = False
        self._schedule.abandon()
        self._current.cast(self._ranks.group)
        self._delayed.cast(self._ranks.group)
        copy_values(weight for flat in self._flats if not flat.values_alone for weight in flat.weights)
        for flat in self._flats:
            if not flat.sharded:
                flat.publish()
            flat.note_versions()

    def _agree(self, problem: Exception | None, otherwise: str, also: object = None) -> None:
        """Raise on all ranks if one has a problem, or if layouts or `also` differ. Collective."""
        facts = repr((str(problem), self._layout, also)).encode()
        others = unlike_ranks(facts, self._ranks.group, self._device)
        if problem is not None:
            raise problem
        if others:
            raise ValueError(f"ZeroOptimizer: rank {others[0]} differs from rank {dist.get_rank()}: it {otherwise}")
