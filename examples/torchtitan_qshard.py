"""torchtitan's Llama 3 with quantized weights on the wire: its own trainer and models, and one converter.

    pip install torchtitan==0.3.0
    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_qshard --config llama3_debugmodel_qshard

A config of your own takes `QshardConverter.Config(recipe="MXFP8")` where torchtitan's take its own converters, and
`update_scales_after_steps`, which only `DelayedScaling` needs. Checkpoints of the model are those of bf16; to go on
with the same bits under `DelayedScaling` and `NVFP4`, keep `scaling_state(model)` beside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

from qshard.torch_bridge import convert, update_scales


class QshardConverter(QuantizationConverter):
    """Builds the model that its config describes, then converts it, on the meta device and before it is sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "CurrentScaling"
        """The name of a recipe of `qshard.recipes`."""

        filter_fqns: list[str] = field(default_factory=list)
        """Regular expressions: layers whose names one of them is found in stay in high precision."""

        fuse: bool = False
        """Whether RMSNorms take the amax of what they give as they make it; for runs without `torch.compile`."""

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        recipe, left_out, fuse = self.config.recipe, self.config.filter_fqns, self.config.fuse

        class Quantized(type(model_config)):
            __slots__ = ()

            def build(self, **kwargs: Any) -> nn.Module:
                model = super().build(**kwargs)
                model.verify_module_protocol()

                def is_quantized(_: nn.Linear, name: str) -> bool:
                    return not any(re.search(each, name) for each in left_out)

                convert(model, recipe, filter=is_quantized, fuse=fuse)
                # The states of delayed scaling are modules of qshard, not of torchtitan.
                model.verify_module_protocol = lambda: None
                return model

        model_config.__class__ = Quantized
        return model_config


def update_scales_after_steps(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """A `ModelSpec.post_optimizer_build_fn`. Ranks of one stage share the scales of its layers."""

    def update(*_: Any) -> None:
        for part in model_parts:
            update_scales(part)

    optimizers.register_step_post_hook(update)


def llama3_debugmodel_qshard(recipe: str = "CurrentScaling", filter_fqns: tuple[str, ...] = ()) -> Any:
    """The script of bf16, and a converter."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel  # And with it all that the trainer needs.

    config = llama3_debugmodel()
    converter = QshardConverter.Config(recipe=recipe, filter_fqns=list(filter_fqns))
    config.model_spec = model_registry("debugmodel", converters=[converter])
    config.model_spec.post_optimizer_build_fn = update_scales_after_steps
    return config
