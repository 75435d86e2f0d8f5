"""The `config.json` entries by which serving engines recognize quantized weights.

| format | file | entry |
| --- | --- | --- |
| deepseek | `config.json` | `quantization_config`: `quant_method`, `weight_block_size`, `modules_to_not_convert` |
| compressed-tensors | `config.json` | `quantization_config`: `config_groups`, `format`, `ignore` |
| modelopt | `config.json` | `quantization_config`: `quant_algo`, `config_groups`, `ignore` |
| | `hf_quant_config.json` | `quantization`: `quant_algo`, `exclude_modules` |

Activations are not part of a file: every entry says that the engine quantizes them itself, or not at all (the 4-bit
schemes), because static scales of activations need calibration.

Sources: transformers, utils/quantization_config.py `FineGrainedFP8Config`; compressed-tensors 0.20,
quantization/quant_config.py and quant_scheme.py (the presets FP8_DYNAMIC, FP8_BLOCK, MXFP8, MXFP4A16 and NVFP4A16);
nvidia-modelopt 0.47, torch/export/convert_hf_config.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qshard._core.serialization import Description
from qshard._files.engine_formats import Scheme, engine_tensors, scheme_of

CONFIGS = CONFIG, HF_QUANT_CONFIG = "config.json", "hf_quant_config.json"
KEY = "quantization_config"
END = ".weight"
VERSION = "1"  # of these entries; engines do not read it
HEAD = "lm_head"  # the output layer's name in vLLM

_DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_NV = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_COMPRESSED: dict[Scheme, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    Scheme.FP8_TENSOR: ("float-quantized", _FP8 | {"strategy": "channel"}, _DYNAMIC | {"strategy": "token"}),
    Scheme.FP8_CHANNEL: ("float-quantized", _FP8 | {"strategy": "channel"}, _DYNAMIC | {"strategy": "token"}),
    Scheme.FP8_BLOCK: (
        "float-quantized",
        _FP8 | {"strategy": "block", "block_structure": [128, 128]},
        _DYNAMIC | {"strategy": "group", "group_size": 128},
    ),
    Scheme.MXFP8: ("mxfp8-quantized", _FP8 | _MX, _DYNAMIC | _MX),
    Scheme.MXFP4: ("mxfp4-pack-quantized", _FP8 | _MX | {"num_bits": 4}, None),
    Scheme.NVFP4: ("nvfp4-pack-quantized", _FP8 | _NV | {"num_bits": 4, "strategy": "tensor_group"}, None),
}
"""Scheme -> compression format, arguments of weights, arguments of activations."""
_MODELOPT: dict[Scheme, tuple[dict[str, Any], dict[str, Any]]] = {
    scheme: ({"quant_algo": algo} | group, {"weights": {"dynamic": False, "type": "float"} | weights})
    for scheme, algo, group, weights in (
        (Scheme.FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN", {}, {"num_bits": 8, "strategy": "channel"}),
        (Scheme.FP8_CHANNEL, "FP8_PER_CHANNEL_PER_TOKEN", {}, {"num_bits": 8, "strategy": "channel"}),
        (Scheme.FP8_BLOCK, "FP8_PB_WO", {}, {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
        (Scheme.MXFP8, "MXFP8", {"group_size": 32}, {"num_bits": 8, "group_size": 32}),
        (Scheme.NVFP4, "W4A16_NVFP4", {"group_size": 16}, {"num_bits": 4, "group_size": 16}),
    )
}
"""Scheme -> terms of the algorithm, and of its config group."""


def engine_configs(
    engine: str, weights: Mapping[str, Description], others: Iterable[str] = (), *, op: str = "to_engine"
) -> dict[str, dict[str, Any]]:
    """Return the entries that make an engine read quantized weights, by the name of their JSON file.

    Args:
      engine: one of `ENGINE_FORMATS`.
      weights: descriptions of the quantized weights, by name.
      others: names of the weights that are not quantized, with two axes or more.
      op: name of the operation in errors.

    Raises:
      ValueError: the engine's format is unknown, or cannot hold a weight.

    >>> from qshard.formats import FP8_128x128, Usage
    >>> of_w = Description(format=FP8_128x128, shape=(128, 128), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> engine_configs("deepseek", {"up.weight": of_w}, ["lm_head.weight"])["config.json"]["quantization_config"]
    ... # doctest: +NORMALIZE_WHITESPACE
    {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128],
     'modules_to_not_convert': ['lm_head']}
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for name, what in weights.items():
        engine_tensors(engine, name, what, op=op)  # raises for a weight that the engine cannot hold
        by_scheme.setdefault(scheme_of(what), []).append(name.removesuffix(END))  # type: ignore[arg-type]
    return _ENTRIES[engine](by_scheme, sorted(name.removesuffix(END) for name in others))


def _deepseek(by_scheme: dict[Scheme, list[str]], ignore: list[str]) -> dict[str, dict[str, Any]]:
    entry = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {CONFIG: {KEY: entry | {"modules_to_not_convert": ignore}}}


def _compressed_tensors(by_scheme: dict[Scheme, list[str]], ignore: list[str]) -> dict[str, dict[str, Any]]:
    groups, formats = {}, []
    for i, (scheme, modules) in enumerate(by_scheme.items()):
        compression, weights, activations = _COMPRESSED[scheme]
        formats.append(compression)
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(by_scheme) == 1 else modules,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": compression,
        }
    entry = {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }
    return {CONFIG: {KEY: entry}}


def _modelopt(by_scheme: dict[Scheme, list[str]], ignore: list[str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    for i, (scheme, modules) in enumerate(by_scheme.items()):
        terms, group = _MODELOPT[scheme]
        groups[f"group_{i}"] = group | {"targets": ["Linear"] if len(by_scheme) == 1 else modules}
        layers |= dict.fromkeys(modules, terms)
    if not any(module.rpartition(".")[2] == HEAD for module in [*layers, *ignore]):
        # With tied embeddings the file has no head. vLLM would expect codes of it, and not miss them in every format.
        ignore = [HEAD, *ignore]
    algorithm: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if len(by_scheme) == 1:
        algorithm = terms
    producer = {"name": "qshard", "version": VERSION}
    entry = {"config_groups": groups, "ignore": ignore} | algorithm | {"producer": producer, "quant_method": "modelopt"}
    return {
        CONFIG: {KEY: entry},
        HF_QUANT_CONFIG: {
            "producer": producer,
            "quantization": algorithm | {"kv_cache_quant_algo": None, "exclude_modules": ignore},
        },
    }


_ENTRIES = {"deepseek": _deepseek, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}
