"""Primary weights: the parameter is quantized codes, and its float32 master belongs to the optimizer.

Terms, in addition to the glossary of `scale_state.py`:

  values    the high-precision shard of this rank, as it was initialized or loaded
  master    the float32 values of the shard, after they have left the parameter
  sealed    state of a parameter without values: it stands for codes, and ops that need its values raise
  recast    to cast codes from the masters again, after an optimizer step

A primary weight is an ordinary sharded weight until its first gather, or until an optimizer requests its master. Then
its values leave the parameter for good and become the master, in the same memory if they are float32. Codes are cast at
that gather and after each optimizer step, and every other gather sends them as they are. So nothing is cast twice: no
forward, backward or micro-batch computes scales. Under an offload policy, master and codes are on the CPU, and only
codes are copied for a gather.

Only optimizers of this package and `load_state_dict` may write to masters. State dicts contain the masters themselves,
not copies. After any other write the next gather raises, provided PyTorch counts the write: one through NumPy or
`.data` goes unnoticed until the next step, which casts it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qshard.torch_bridge._delayed_scaling import version_of

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
    from qshard.torch_bridge._fsdp.weight import Values


class Primary:
    """Master and codes of one primary weight on this rank.

    Attributes:
      master: float32 values of the shard; None while the parameter still has them.
      codes: padded codes of the master, as they are gathered; None if the next gather must cast them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.master: Tensor | None = None
        self.codes: Tensor | None = None
        self._buffer: Tensor | None = None
        self._copy_event: torch.cuda.Event | None = None
        self._version = 0
        self._values: list[weakref.ref[Values]] = []  # Of every view and copy of the parameter, also FSDP2's.
        self._watched: list[tuple[weakref.ref[Tensor], int]] = []

    def add_values(self, values: Values) -> None:
        self._values = [ref for ref in self._values if ref() is not None]
        self._values.append(weakref.ref(values))

    def take_master(self, shard: Tensor) -> Tensor:
        """Return the master. The first call moves the values of `shard` out of every view and copy of the parameter."""
        if self.master is None:
            with torch.no_grad(), torch.inference_mode(False):
                self.master = shard.detach() if shard.dtype == torch.float32 else shard.detach().float()
            for ref in self._values:
                values = ref()
                if values is not None:
                    values.tensor = without_memory(values.tensor)
            self.note_version()
        return self.master

    def buffer(self, plan: ShardPlan) -> Tensor:
        """Return the persistent buffer for the codes. Bytes past the end of the shard are zero."""
        if self._buffer is None or self._buffer.numel() != plan.buffer_size:
            with torch.inference_mode(False):
                master = self.master
                assert master is not None
                pinned = master.is_cpu and master.is_pinned()
                self._buffer = torch.zeros(plan.buffer_size, dtype=torch.uint8, device=master.device, pin_memory=pinned)
        if self._copy_event is not None:
            self._copy_event.synchronize()
            self._copy_event = None
        return self._buffer

    def codes_on(self, device: torch.device) -> Tensor:
        """Return the codes on `device`. Offloaded codes are copied there: 1 or 1/2 byte an element."""
        assert self.codes is not None
        if self.codes.device == device:
            return self.codes
        copied = self.codes.to(device, non_blocking=True)
        self._copy_event = torch.cuda.Event()
        self._copy_event.record()
        return copied

    def end_cast(self, plan: ShardPlan) -> None:
        self.codes = plan.padded_view(self.buffer(plan))
        self.note_version()

    def load(self, values: Tensor) -> None:
        """Replace the values of the master, on all ranks alike. The next gather casts them."""
        assert self.master is not None
        if values is not self.master:
            self.master.copy_(values)
        self.codes = None

    def watch(self, value: Tensor) -> None:
        """Register `value`, a tensor in a state dict that shares the memory of the master, to detect writes to it."""
        self._watched = [(ref, version) for ref, version in self._watched if ref() is not None]
        self._watched.append((weakref.ref(value), value._version))

    def note_version(self) -> None:
        self._version = version_of(self.master)
        self._watched = [(ref, value._version) for ref, _ in self._watched if (value := ref()) is not None]

    def check(self) -> None:
        """Raise RuntimeError if the master was written to after its codes were cast."""
        written = any((value := ref()) is not None and value._version != version for ref, version in self._watched)
        if written or self._version != version_of(self.master):
            raise RuntimeError(
                f"ShardedWeight: the master of {self.name} (primary) was written directly, so its codes are out of "
                "date; load the state dict with model.load_state_dict, on all ranks"
            )


def without_memory(shard: Tensor) -> Tensor:
    return torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta")
