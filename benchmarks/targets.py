"""Targets of benchmark rows: goals set before the first measurement, each with its comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, str]


@dataclass(frozen=True)
class Target:
    """A bound on a column, for every row of a file with a matching operation or kind.

    Attributes:
      rows: name of the file.
      operation: regular expression for the operation or kind.
      name: description of the target.
      bound: lower bound for columns `percent_of_...`, upper bound for other columns.
      beside: the comparison; for GPUs, on an H200.
      column: the bounded column.
      of: another operation of the file. The bound then applies to the ratio to it, of microseconds by default.
    """

    rows: str
    operation: str
    name: str
    bound: float
    beside: str
    column: str = "percent_of_copy"
    of: str = ""

    def value(self, row: Row, rows: Sequence[Row]) -> float | None:
        """Return the value that the bound applies to, or None if the row does not match or its base is missing."""
        if not re.fullmatch(self.operation, what_of(row)):
            return None
        if not self.of:
            return float(row[self.column])
        column = "us" if self.column == "percent_of_copy" else self.column
        other = [float(r[column]) for r in rows if what_of(r) == self.of]
        return float(row[column]) / other[0] if other else None

    @property
    def _is_percent(self) -> bool:
        return self.column.startswith("percent_of_")

    @property
    def at_most(self) -> bool:
        return bool(self.of) or not self._is_percent

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def text(self, value: float) -> str:
        return f"{value:.2f}" if self.of else f"{value:.1f}" if self.column == "percent_of_copy" else f"{value:g}"

    @property
    def unit(self) -> str:
        return f" of {self.of}" if self.of else " %" if self._is_percent else f" {self.column}"


def what_of(row: Row) -> str:
    return row["operation"] if "operation" in row else row["kind"]


_ONE_READ = r"(FP8_|MXFP)\w+"
TARGETS = (
    Target("gpu_ops", "cast_tensor qshard", "a cast, 95 % of a copy", 95, "TransformerEngine's has 95 %"),
    Target("gpu_ops", "cast_transpose qshard", "cast and transpose, 90 %", 90, "TransformerEngine's has 86 %"),
    Target("gpu_ops", "transpose qshard", "a transpose, 85 %", 85, "TransformerEngine's cast and transpose has 86 %"),
    Target("gpu_formats", "transpose .*", "a transpose, 85 %", 85, "TransformerEngine's cast and transpose has 86 %"),
    Target("gpu_ops", "dequantize qshard", "dequantize, 85 %", 85, "it moves as few bytes as a transpose"),
    Target("gpu_formats", "dequantize .*", "dequantize, 85 %", 85, "it moves as few bytes as a transpose"),
    Target(
        "gpu_formats",
        "current scaling qshard",
        "current scaling, 0.9 of the time of two separate passes",
        0.9,
        "up to 60 of the 134 MB of x are still in L2 when the cast begins",
        of="two separate passes qshard",
    ),
    Target(
        "gpu_formats",
        rf"quantize ({_ONE_READ} (row|column)wise|NVFP4\w* (row|column)wise, amax given,) qshard",
        "one plane of blocks, 90 %",
        90,
        "TransformerEngine's has 77 to 91 %, in blocks of 128",
    ),
    Target(
        "gpu_formats",
        rf"quantize ({_ONE_READ} both|NVFP4\w* both, amax given,) qshard",
        "both planes of blocks, 85 %",
        85,
        "TransformerEngine's have 66 to 90 %, in blocks of 128",
    ),
    Target(
        "gpu_formats",
        r"quantize NVFP4\w* (rowwise|columnwise|both) qshard",
        "NVFP4 with its amax, 85 %",
        85,
        "two passes, of which the second finds a part of x in L2",
    ),
    Target("gpu_adam", r"adam .*(?<!torch fused)", "Adam, 85 %", 85, "torch's fused AdamW has 83 %"),
    Target(
        "gpu_master",
        r"amaxes .* qshard",
        "amaxes of 64 slices of 2 M masters, 170 us",
        170,
        "to read them at 4 TB/s takes 134 us",
        column="us",
    ),
    Target(
        "numerics",
        r"stats .*",
        "numerics of 4096 x 4096 in 1 s a format, on 2 cores",
        1,
        "the same formulas in NumPy on the whole array take 4 s and more",
        column="seconds",
    ),
    Target(
        "numerics",
        r"stats .*",
        "numerics in 3 times the memory of the array",
        3,
        "the same formulas in NumPy on the whole array take 21 times",
        column="memory_per_array",
    ),
    Target(
        "host",
        "cast_tensor into given outputs",
        "host time of a call into given outputs, 4 us",
        4,
        "`torch.add` into a given output takes 5 to 6 us",
        column="us",
    ),
    *(
        Target("host", operation, f"host time of {what}, {bound:g} times that of {beside}", bound, why, column="times")
        for operation, what, bound, beside, why in (
            (r"quantize (FP8|MXFP8)_\w+ both", "quantize, both planes", 4, "torch.add", "it makes up to five tensors"),
            (r"Linear (?!nvfp4).*", "a layer, forward and backward", 2, "nn.Linear", "three GEMMs, and four casts"),
            (r"Linear nvfp4", "a layer in NVFP4", 3, "nn.Linear", "rotations, and two scales"),
            (r"GPT (?!bf16).*", "a step of a small GPT", 1.3, "bf16", "a third of it is Adam and attention"),
            (r"compiled GPT (?!bf16).*", "a compiled step of a small GPT", 1.4, "bf16", "casts are more calls"),
            (r"captured GPT (?!bf16).*", "a captured step of a small GPT", 1.25, "bf16", "a replay is one call"),
            (r"qshard\.jax\.quantize .*", "an eager quantize in JAX", 1.5, "jnp.add", "up to four results, not one"),
        )
    ),
    *(
        Target("step_torch", kind, f"a step of 2.0 B weights, {what}", bound, why, column=column, of=of)
        for kind, what, bound, why, column, of in (
            (
                r"(fp8|delayed) fused( loss)?( zero)?",
                "back to back, 145 ms",
                145,
                "torchao's takes 165",
                "running_ms",
                "",
            ),
            (r"(fp8|delayed) fused( loss)?( zero)?", "in 22 GiB", 22, "torchao's takes 22.8", "peak_GiB", ""),
            (
                r"fp8 fused( loss)?( zero)? bf16-states",
                "with low-precision states in 18 GiB",
                18,
                "of 26 with bf16",
                "peak_GiB",
                "",
            ),
            (
                r"block.*",
                "back to back in blocks of 128, 180 ms",
                180,
                "TransformerEngine's took 195",
                "running_ms",
                "",
            ),
            ("mxfp8 fused", "back to back in MXFP8, 1.08 of bf16", 1.08, "GEMMs of bf16", "running_ms", "bf16"),
            ("nvfp4 fused", "back to back in NVFP4, 1.15 of bf16", 1.15, "GEMMs of bf16", "running_ms", "bf16"),
            ("fp8 fused zero", "back to back, ZeRO at most FSDP2", 1.0, "the same recipe", "running_ms", "fp8 fused"),
        )
    ),
    *(
        Target(rows, kind, what, round(1 / times, 3), why, column=column, of=of)
        for rows, column, kinds in (
            ("tensor_parallel", "running_ms", (r"(fp8|block) codes", "fp8 overlap", "fp8 codes")),
            ("tensor_parallel_jax", "ms", ("fp8", "fp8 overlapped", "fp8")),
        )
        for kind, what, times, why, of in (
            (
                kinds[0],
                "tensor parallelism, 1.2 times as fast as bf16",
                1.2,
                "GEMMs of codes, half of the bytes",
                "bf16",
            ),
            (kinds[1], "1.1 times as fast overlapped", 1.1, "transfers are hidden", kinds[2]),
        )
    ),
    *(
        Target(
            "grouped",
            rf"{shape}: {recipe}{', codes' * given}, (host|device)",
            f"experts of {shape}, {recipe}{', codes given' * given}: {bound} of bfloat16",
            bound,
            "torch._grouped_mm",
            column="ms",
            of=f"{shape}: bf16 torch, device",
        )
        for shape, bounds in (
            ("Mixtral", (0.65, 0.75, 0.75, 0.82)),
            ("DeepSeek-V3", (0.80, 0.92, 1.10, 1.10)),
            ("Qwen3", (1.00, 1.08, 1.28, 1.25)),
        )
        for (given, recipe), bound in zip(
            ((True, "one scale"), (True, "blocks"), (False, "one scale"), (False, "blocks")), bounds, strict=True
        )
    ),
    *(
        Target(
            "moe",
            rf"(fp8( E4M3)?|block) codes, {shape}",
            f"a whole layer of experts, {shape}, weights given as codes: {share} of the time of bfloat16",
            share,
            "torch._grouped_mm",
            column="ms",
            of=f"bf16, {shape}",
        )
        for shape, share in (("mixtral", 0.72), ("deepseek", 0.85))
    ),
    *(
        Target("expert_parallel", rf"(fp8|block).*, {shape}, 2 GPUs", what, bound, why, column=column, of=of)
        for shape in ("mixtral", "deepseek")
        for column, bound, what, why, of in (
            ("times_bf16", 0.75, "expert parallelism on two GPUs, 0.75 of bfloat16", "the same layer in bfloat16", ""),
            (
                "wire_mib",
                0.5,
                "expert parallelism, half of the bytes of bfloat16 on the wire",
                "codes; results of experts go as values",
                f"bf16, {shape}, 2 GPUs",
            ),
        )
    ),
    Target(
        "stream_weights",
        r".*, \d+ GPUs",
        "weight sync, 80 % of an all-gather of the same bytes",
        80,
        "shards are cast while the bucket before is gathered",
        column="percent_of_all_gather",
    ),
    Target(
        "cross_entropy",
        r"cross entropy qshard(\.jax)?",
        "cross entropy, both ways, 85 % of a copy",
        85,
        "it reads logits twice and writes their gradient",
    ),
    *(
        Target("cross_entropy", operation, f"{what} in at most the time of {peer.split()[-1]}", 1, why, of=peer)
        for what in ("cross entropy", "linear cross entropy")
        for operation, peer, why in (
            (f"{what} qshard", f"{what} float32 torch", "F.cross_entropy of logits that are widened"),
            (f"{what} qshard", f"{what} float32 torch.compile", "one kernel forward, one backward"),
            (f"{what} qshard\\.jax", f"{what} float32 optax", "XLA fuses what optax writes"),
        )
    ),
    Target(
        "cross_entropy",
        "linear cross entropy of 128256 classes qshard",
        "a head of Llama 3 in at most the time of torch.compile",
        1,
        "one kernel forward, one backward",
        of="linear cross entropy of 128256 classes float32 torch.compile",
    ),
    Target(
        "cross_entropy",
        "cross entropy qshard",
        "cross entropy in at most the time of torch, of bfloat16 logits",
        1,
        "F.cross_entropy",
        of="cross entropy torch",
    ),
    Target(
        "cross_entropy",
        r"linear cross entropy( FP8)? qshard",
        "a head, 3 GiB less at peak than F.linear and F.cross_entropy(logits.float())",
        -3,
        "that takes 2.93 GiB, of which 0.31 are gradients: no head can",
        column="peak_beside_torch_GiB",
    ),
    Target("gpu_master", r"codes NVFP4.* qshard", "codes of NVFP4 slices, 80 %", 80, "one pass, but bytes are shared"),
)

# For whole quantizations and casts in cache: speedup over the faster of torch eager and jitted jnp.
CPU_TIMES_FASTER = 2.0


def training_bound(recipe: str) -> float:
    """Return by how many percent the validation loss of a recipe may exceed bf16's."""
    return 3.0 if recipe == "nvfp4" else 1.0
