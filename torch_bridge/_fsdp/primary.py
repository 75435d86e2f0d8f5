"""Primary weights: the parameter is the quantized shard; what it is made of is a master, which the optimizer updates.

More words for the glossary in `scale_state.py`:

  values    what this rank's shard holds in high precision, as it was made, initialized or loaded
  master    float32 values of the shard: they are the values, once they have left the parameter
  sealed    without values: the parameter stands for codes, and all that would need its values raises
  recast    to make codes anew of masters, after an optimizer has changed them

A primary weight is a sharded weight like all others until it is gathered for the first time, or an optimizer asks for
its master. Then its values leave it, for good: as the master, in the same memory if they are in float32. Codes are made
at that gather, and after each step of the optimizer. All other gathers send the codes as they are. So nothing is cast
twice, and forward, backward and all micro-batches of a step make no scales. With an offload policy master and codes are
on the CPU, and codes alone are copied for a gather.

An optimizer of ours may write to masters, and `load_state_dict`. State dicts show masters, in the memory that they
have. If someone else has written there, the next gather raises. That is so for writes that PyTorch sees; those by
NumPy, or through `.data`, count from the next step on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
    from qshard.torch_bridge._fsdp.weight import Values


class Primary:
    """What a rank has of one primary weight.

    Attributes:
      master: its values in float32; None as long as the parameter holds them.
      codes: padded codes of the master, as they are sent; None if they are to be made.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.master: Tensor | None = None
        self.codes: Tensor | None = None
        self._room: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._version = 0
        self._values: list[weakref.ref[Values]] = []  # Of every view and copy of the parameter, FSDP2's too.
        self._shown: list[tuple[weakref.ref[Tensor], int]] = []

    def add_values(self, values: Values) -> None:
        self._values = [ref for ref in self._values if ref() is not None]
        self._values.append(weakref.ref(values))

    def take_master(self, shard: Tensor) -> Tensor:
        """The master. The first time, all that stands for the parameter loses its values, and `shard` has them."""
        if self.master is None:
            with torch.no_grad(), torch.inference_mode(False):
                self.master = shard.detach() if shard.dtype == torch.float32 else shard.detach().float()
            for ref in self._values:
                values = ref()
                if values is not None:
                    values.tensor = without_memory(values.tensor)
            self.note_version()
        return self.master

    def master_to_cast(self) -> Tensor:
        assert self.master is not None
        return self.master

    def room(self, plan: ShardPlan) -> Tensor:
        """Memory for the codes, which stays. What is past the end of the shard is zeros."""
        if self._room is None or self._room.numel() != plan.room:
            with torch.inference_mode(False):
                master = self.master_to_cast()
                pinned = master.is_cpu and master.is_pinned()
                self._room = torch.zeros(plan.room, dtype=torch.uint8, device=master.device, pin_memory=pinned)
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._room

    def codes_on(self, device: torch.device) -> Tensor:
        """The codes, where ranks compute: offloaded ones are copied there, a byte or half of one an element."""
        assert self.codes is not None
        if self.codes.device == device:
            return self.codes
        copied = self.codes.to(device, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return copied

    def end_cast(self, plan: ShardPlan) -> None:
        self.codes = plan.padded_in(self.room(plan))
        self.note_version()

    def load(self, values: Tensor) -> None:
        """New values, on all ranks alike: codes are made at the next gather."""
        assert self.master is not None
        if values is not self.master:
            self.master.copy_(values)
        self.codes = None

    def show(self, value: Tensor) -> None:
        """`value` has the memory of the master, and goes into a state dict."""
        self._shown = [(ref, version) for ref, version in self._shown if ref() is not None]
        self._shown.append((weakref.ref(value), value._version))

    def note_version(self) -> None:
        """What has been written so far is known."""
        self._version = _version_of(self.master)
        self._shown = [(ref, value._version) for ref, _ in self._shown if (value := ref()) is not None]

    def check(self) -> None:
        """Raises if the codes are not those of the master."""
        written = any((value := ref()) is not None and value._version != version for ref, version in self._shown)
        if written or self._version != _version_of(self.master):
            raise RuntimeError(
                f"ShardedWeight: the master of {self.name} (primary) was written directly, so its codes are out of "
                "date; load the state dict with model.load_state_dict, on all ranks"
            )


def without_memory(shard: Tensor) -> Tensor:
    return torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device="meta")


def _version_of(master: Tensor | None) -> int:
    return -1 if master is None or master.is_inference() else master._version
