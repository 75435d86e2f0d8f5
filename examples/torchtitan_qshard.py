"""torchtitan's Llama 3 with quantized weights on the wire: torchtitan's trainer and models, and one converter.

    pip install torchtitan==0.3.0
    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_qshard --config llama3_debugmodel_qshard

Your own config passes `QshardConverter.Config(recipe="MXFP8")` as a converter, and for `DelayedScaling` also
`update_scales_after_steps`. Model checkpoints have the format of the bf16 model. To resume bit for bit under
`DelayedScaling` and `NVFP4`, also save `scaling_state(model)`.
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
    """Builds the configured model and converts it, on the meta device and before it is sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Options of the converter."""

        recipe: str = "CurrentScaling"
        """Name of a recipe in `qshard.recipes`."""

        filter_fqns: list[str] = field(default_factory=list)
        """Regular expressions. Layers with a match in their name stay in high precision."""

        fuse: bool = False
        """Whether RMSNorms also compute the amax of their output, for runs without `torch.compile`."""

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Make the config build a converted model."""
        recipe, left_out, fuse = self.config.recipe, self.config.filter_fqns, self.config.fuse

        class Quantized(type(model_config)):
            __slots__ = ()

            def build(self, **kwargs: Any) -> nn.Module:
                model = super().build(**kwargs)
                model.verify_module_protocol()

                def is_quantized(_: nn.Linear, name: str) -> bool:
                    return not any(re.search(each, name) for each in left_out)

                convert(model, recipe, filter=is_quantized, fuse=fuse)
                # The states of delayed scaling are modules of qshard, which torchtitan's check would refuse.
                model.verify_module_protocol = lambda: None
                return model

        model_config.__class__ = Quantized
        return model_config


def update_scales_after_steps(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """Update scales after each optimizer step. For `ModelSpec.post_optimizer_build_fn`.

    The ranks of one pipeline stage share the scales of its layers.
    """

    def update(*_: Any) -> None:
        for part in model_parts:
            update_scales(part)

    optimizers.register_step_post_hook(update)


def llama3_debugmodel_qshard(recipe: str = "CurrentScaling", filter_fqns: tuple[str, ...] = ()) -> Any:
    """Return torchtitan's bf16 debug config with the converter added."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel  # imports the whole trainer

    config = llama3_debugmodel()
    converter = QshardConverter.Config(recipe=recipe, filter_fqns=list(filter_fqns))
    config.model_spec = model_registry("debugmodel", converters=[converter])
    config.model_spec.post_optimizer_build_fn = update_scales_after_steps
    return config
