// The table of one SIMD target. The build compiles this source once per target, with the target's
// flags and:
//   QSHARD_SIMD_TARGET   namespace of the table, and name of the target
//   QSHARD_SIMD_BYTES    bytes of its vectors, 32 or 64, or 0 for plain loops
// Everything else compiled here is in an unnamed namespace or forced inline, and the standard
// library is not used. So the linker cannot pick a function compiled for a newer machine on an
// older one.
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd/activation.h"
#include "kernels/cpu/simd/adam.h"
#include "kernels/cpu/simd/amax.h"
#include "kernels/cpu/simd/cross_entropy.h"
#include "kernels/cpu/simd/hadamard.h"
#include "kernels/cpu/simd/rows.h"
#include "kernels/cpu/simd/scales.h"

namespace qshard::kernels::QSHARD_SIMD_TARGET {

#define QSHARD_NAME_OF(target) QSHARD_TEXT(target)
#define QSHARD_TEXT(target) #target
#define QSHARD_ENTRY(Function, ...) Function<__VA_ARGS__>,

const SimdKernels kKernels = {
    .target = QSHARD_NAME_OF(QSHARD_SIMD_TARGET),
    .amax = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, Amax)},
    .cast = {QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_ENTRY, Cast)},
    .dequantize = {QSHARD_FOR_EACH_ELEMENT(QSHARD_FOR_EACH_INPUT, QSHARD_ENTRY, Dequantize)},
    .cast_stochastic = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, CastStochastic)},
    .random = Random,
    .encode_e8m0 = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, EncodeAllE8M0)},
    .decode_e8m0 = DecodeAllE8M0,
    .float_scales = ScalesFrom<FloatScales>,
    .e8m0_scales = ScalesFrom<E8M0Scales>,
    .nvfp4_scales = ScalesFrom<Nvfp4Scales>,
    .takes_four = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, TakesFour)},
    .hadamard = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, HadamardBlocks)},
    .pack_pairs = PackPairs,
    .unpack_pairs = UnpackPairs,
    .pack_rows = PackRows,
    .transpose_pairs = TransposePairs,
    .transpose = TransposeTile,
    .add = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, AddAll)},
    .swiglu = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SwiGluAll)},
    .swiglu_grad = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SwiGluGradAll)},
    .squares = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SquaresOf)},
    .rms_norm = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, RmsNormAll)},
    .grad_along = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, GradAlong)},
    .rms_norm_grad = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, RmsNormGradAll)},
    .multiply_add = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, MultiplyAddAll)},
    .multiply = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, MultiplyAll)},
    .dot = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, DotOf)},
    .softmax_part = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SoftmaxPart)},
    .softmax_grad = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SoftmaxGrad)},
    .adam_decode = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, DecodeAll) DecodeAll<E4M3>,
                    DecodeAll<E5M2>},
    .adam_join = Join,
    .adam_narrow = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, NarrowAll)},
    .adam_encode = {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, EncodeAll) EncodeAll<E4M3>,
                    EncodeAll<E5M2>},
    .adam_halve = Halve,
    .adam_step = {Step<Decay::kNone>, Step<Decay::kCoupled>, Step<Decay::kDecoupled>},
};

}  // namespace qshard::kernels::QSHARD_SIMD_TARGET
