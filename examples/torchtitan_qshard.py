"""torchtitan's trainer and models with quantized weights on the wire: one converter, and a trainer that saves scales.

    pip install torchtitan==0.3.0
    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_qshard --config llama3_debugmodel_qshard

Your own config function passes its config to `with_qshard`, for any model of torchtitan. The model in checkpoints has
the format of the bf16 model. Scales and seeds are saved beside it, so a run resumes bit for bit with every recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from qshard.torch_bridge import convert, load_scaling_state, scaling_state, update_scales


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


class QshardTrainer(Trainer):
    """Updates delayed scales after each step, and keeps scales and seeds in the state `train_state` of checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The options of torchtitan's trainer."""

    def train_step(self, data_iterator: Any) -> None:
        """Train one step, then update the scales."""
        super().train_step(data_iterator)
        for part in self.model_parts:
            update_scales(part)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer with the scaling state of this rank's model parts."""
        return super().state_dict() | {"scaling_state": [scaling_state(part) for part in self.model_parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the trainer, and the scaling state."""
        super().load_state_dict(state_dict)
        for part, state in zip(self.model_parts, state_dict["scaling_state"], strict=True):
            load_scaling_state(part, state)


def with_qshard(config: Trainer.Config, **options: Any) -> QshardTrainer.Config:
    """Make a config of torchtitan train a converted model.

    Args:
      config: of any model, as its config registry returns it.
      options: fields of `QshardConverter.Config`.
    """
    converter = QshardConverter(QshardConverter.Config(**options))
    config.model_spec.model = converter.convert(config.model_spec.model)
    return QshardTrainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


def llama3_debugmodel_qshard() -> QshardTrainer.Config:
    """Return torchtitan's bf16 debug config with the converter added."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return with_qshard(llama3_debugmodel())
