"""`benchmarks/step_profile.py`: classification of a step's kernels, and sums of their times."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("step_profile", REPOSITORY / "benchmarks" / "step_profile.py")
step_profile = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(step_profile)

ATEN = "void at::native::"
FOREACH = f"{ATEN}(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
QSHARD = "void qshard::kernels::(anonymous namespace)::"
# As an H200 ran them, cut short.
NAMES = {
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int": "attention",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM",
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_Ablk128_Bvec128_TNN": "GEMM",
    f"{FOREACH}FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdam": "optimizer",
    f"{FOREACH}TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float": "optimizer",
    f"{QSHARD}AdamKernel<qshard::kernels::(anonymous namespace)::Only<(qshard::kernels::AdamType)0": "optimizer",
    f"{FOREACH}TensorListMetadata<2>, at::native::(anonymous namespace)::CopyFunctor<c10::BFloat16, float, 2, 1, 1>, "
    "at::native::Copy<c10::BFloat16": "copies",
    f"{FOREACH}TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<unsigned char, 2, 1, 1>, "
    "at::native::Copy<unsigned char": "copies",
    f"{ATEN}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)": "copies",
    "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**, long*": "copies",
    f"{ATEN}detail::chunk_cat_cuda_kernel<char, char>(char**, char*, long*": "copies",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    f"{ATEN}(anonymous namespace)::cunn_SoftMaxBackward<8, c10::BFloat16, float, c10::BFloat16": "loss",
    f"{ATEN}vectorized_gather_kernel<16, long>(char*, char*, long*, int": "embedding",
    f"{ATEN}(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*": "embedding",
    f"{ATEN}(anonymous namespace)::krn_partials_per_segment<long>(long*": "embedding",
    f"{ATEN}(anonymous namespace)::compute_num_of_partial_segments<long>(long const*": "embedding",
    "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail": "embedding",
    f"{ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float": "norms and activations",
    f"{ATEN}(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16": "norms and activations",
    f"{ATEN}vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::silu_kernel(": "norms and activations",
    "triton_poi_fused_mul_silu_silu_backward_view_0": "norms and activations",
    "triton_red_fused__fused_rms_norm_amax_tensor_cast_transpose_view_0": "norms and activations",
    "triton_poi_fused__unsafe_view_add_3": "other elementwise",
    f"{ATEN}vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16": "other elementwise",
    f"{ATEN}vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, std::array": "other elementwise",
    "void qshard::kernels::ForEachKernel<qshard::kernels::(anonymous namespace)::MoveScales(qshard::Exec<qshard::Cuda> "
    "const&, qshard::kernels::GemmProblem const&": "quantize",
    "void qshard::kernels::hopper::ContractKernel<qshard::E5M2, qshard::E4M3, qshard::bfloat16, ": "GEMM",
    f"{QSHARD}CombineRowsGradKernel<qshard::bfloat16, true>(qshard::bfloat16 const*": "other elementwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_that_were_seen(name):
    assert step_profile.part_of(name) == NAMES[name]


def test_every_kernel_of_qshard():
    """Kernels are classified by source file; those of unlisted files count as quantization."""
    parts = {"adam.cu": "optimizer", "rms_norm.cu": "norms and activations", "swiglu.cu": "norms and activations"}
    parts |= {"contract_rows.cuh": "GEMM", "combine_rows.cu": "other elementwise"}
    found = set()
    for path in (REPOSITORY / "ffi" / "kernels" / "cuda").rglob("*.cu*"):
        source = re.sub(r"__(?:launch_bounds|cluster_dims)__\((\([^()]*\)|[^()])*\)", "", path.read_text())
        for name in re.findall(r"__global__ [^;{(]*?(\w+)\(", source):
            found.add(name)
            for shown in (f"{QSHARD}{name}<qshard::bfloat16>(long)", f"qshard::kernels::{name}(long)"):
                assert step_profile.part_of(shown) == parts.get(path.name, "quantize"), (path.name, name)
    assert {"AdamKernel", "RmsNormGradKernel", "MapKernel", "BlockMapKernel", "ZeroAmaxes"} <= found


def test_parts_are_all_shown():
    assert {name for name, _ in step_profile.PARTS} | {"other elementwise", "exposed", "idle"} == {*step_profile.NAMES}


def test_milliseconds_a_step():
    """Of two steps. A collective hides behind two kernels that overlap, but for its end; then nothing runs."""
    kernels = [
        ("nvjet_a", 1000, 3000),
        ("qshard::kernels::CastKernel", 2000, 4000),
        ("ncclAllGather", 2500, 5000),
        ("nvjet_b", 6000, 6500),
        ("nvjet_a", 6000, 6250),
    ]
    ms, of_kernel = step_profile.summary(reversed(kernels), 2)
    want = {"step": 2.75, "GEMM": 1.375, "quantize": 1.0, "collectives": 1.25, "exposed": 0.5, "idle": 0.5}
    assert {name: value for name, value in ms.items() if value} == want
    assert [*ms] == ["step", *step_profile.NAMES]
    assert [*of_kernel.items()] == [
        ("ncclAllGather", 1.25),
        ("nvjet_a", 1.125),
        ("qshard::kernels::CastKernel", 1.0),
        ("nvjet_b", 0.25),
    ]


def test_nothing_recorded_is_an_error():
    with pytest.raises(ValueError, match="no kernel was recorded"):
        step_profile.summary([], 1)


def test_its_example():
    assert doctest.testmod(step_profile).failed == 0
