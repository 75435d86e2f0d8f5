// The table of one SIMD target. The build compiles this source for each of them, within its own
// flags:
//   QSHARD_SIMD_TARGET   the namespace of the table, and the target's name
//   QSHARD_SIMD_BYTES    of the vectors that blocks are done in: 32 or 64; 0: plain loops
// Everything else that is compiled here is in an unnamed namespace or forced inline, and the
// standard library is not used, so no function compiled for a newer machine can be picked by the
// linker for an older one.
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
    QSHARD_NAME_OF(QSHARD_SIMD_TARGET),
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, Amax)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_ENTRY, Cast)},
    {QSHARD_FOR_EACH_ELEMENT(QSHARD_FOR_EACH_INPUT, QSHARD_ENTRY, Dequantize)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, CastStochastic)},
    Random,
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, EncodeAllE8M0)},
    DecodeAllE8M0,
    ScalesFrom<FloatScales>,
    ScalesFrom<E8M0Scales>,
    ScalesFrom<Nvfp4Scales>,
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, TakesFour)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, HadamardBlocks)},
    PackPairs,
    UnpackPairs,
    PackRows,
    TurnPairs,
    TransposeTile,
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, AddAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SwiGluAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SwiGluGradAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SquaresOf)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, RmsNormAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, GradAlong)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, RmsNormGradAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SoftmaxPart)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, SoftmaxGrad)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, DecodeAll) QSHARD_FOR_EACH_FP8(QSHARD_ENTRY, DecodeAll)},
    Join,
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, NarrowAll)},
    {QSHARD_FOR_EACH_INPUT(QSHARD_ENTRY, EncodeAll) QSHARD_FOR_EACH_FP8(QSHARD_ENTRY, EncodeAll)},
    Halve,
    {Step<Decay::kNone>, Step<Decay::kCoupled>, Step<Decay::kDecoupled>},
};

}  // namespace qshard::kernels::QSHARD_SIMD_TARGET
