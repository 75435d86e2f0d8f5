// Blocks with one read of x: amax, scale and codes. The bits are those of the steps one by one.
#include "core/handler.h"
#include "kernels/quantize_block.h"

namespace qshard {
namespace {

// Which planes an op makes: of one set of blocks, in the order of x, transposed, or both; or in
// blocks 1 x block_cols, and in blocks block_rows x 1, in the order of x or transposed.
enum class Planes { kRowMajor, kTransposed, kSquareBoth, kBoth, kBothTransposed };

template <Planes kPlanes>
constexpr bool kTwoSets = kPlanes == Planes::kBoth || kPlanes == Planes::kBothTransposed;

// The results of an op with these planes, from byte `data` and scale `scales` of each on.
template <Planes kPlanes, class Stored, class Platform>
auto PlanesOf(const Call<Platform>& call) {
  const auto data = [&](int i) { return Mutable<uint8_t>(call.ret(i)); };
  const auto scale = [&](int i) { return Mutable<Stored>(call.ret(i)); };
  if constexpr (kTwoSets<kPlanes>)
    return kernels::BothPlanes<Stored>{data(0), scale(1), data(2), scale(3),
                                       kPlanes == Planes::kBothTransposed};
  else if constexpr (kPlanes == Planes::kRowMajor)
    return kernels::BlockPlane<Stored>{data(0), scale(1)};
  else if constexpr (kPlanes == Planes::kTransposed)
    return kernels::BlockPlane<Stored>{nullptr, nullptr, data(0), scale(1)};
  else
    return kernels::BlockPlane<Stored>{data(0), scale(1), data(2), scale(3)};
}

template <class In, class Code, class Platform, class Scales, class Stored>
Status Launch(const Exec<Platform>& exec, const In* x, const Scales& scales, const Blocks& blocks,
              const kernels::BlockPlane<Stored>& out) {
  return kernels::QuantizeBlock<In, Code>(exec, x, scales, blocks, out);
}
template <class In, class Code, class Platform, class Scales, class Stored>
Status Launch(const Exec<Platform>& exec, const In* x, const Scales& scales, const Blocks& blocks,
              const kernels::BothPlanes<Stored>& out) {
  return kernels::QuantizeBlockBoth<In, Code>(exec, x, scales, blocks, out);
}

// Any codes with E8M0 scales, those of a byte with fp32 scales.
template <Planes kPlanes, class Platform>
Error Quantize(const Call<Platform>& call) {
  const Blocks blocks = BlocksOf(call.binding);
  const auto with_scales = [&](auto scale, auto scales) {
    return DispatchScaledElement<typename decltype(scale)::type>(call, [&](auto code) -> Error {
      using Code = typename decltype(code)::type;
      if constexpr (kCodesPerByte<Code> > 1)
        for (int64_t side : {blocks.block_rows, blocks.block_cols})
          QSHARD_REQUIRE(side == 1 || (side % 2 == 0 && side <= kernels::kMaxPackedSide), call.op(),
                         ": block (", blocks.block_rows, "x", blocks.block_cols, ") of ",
                         Code::kName, " must have sides of 1, or even ones up to ",
                         kernels::kMaxPackedSide, "; two codes share a byte");
      return DispatchFloat(call.arg(0), [&](auto in) {
        using In = typename decltype(in)::type;
        return call(Launch<In, Code>(call.exec, Data<In>(call.arg(0)), scales, blocks,
                                     PlanesOf<kPlanes, typename decltype(scales)::Stored>(call)));
      });
    });
  };
  if (call.text("scale_dtype") == E8M0::kName)
    return with_scales(Type<E8M0>{},
                       kernels::E8M0Scales{call.text("rounding") == "up" ? PowerRounding::kUp
                                                                         : PowerRounding::kFloor,
                                           call.nonfinite()});
  return with_scales(Type<float>{},
                     kernels::FloatScales{call.number("eps"), call.flag("pow2"), call.nonfinite()});
}

// Both planes of NVFP4 for each matrix of x alone. A matrix has one global amax, but an operand
// that is cut with x has to have axes of x: all numbers of a matrix are the same, and the first is
// read.
template <class In, class Platform>
Error QuantizeNvfp4Each(const Call<Platform>& call, kernels::Nvfp4Scales scales,
                        const Blocks& blocks, kernels::BothPlanes<uint8_t> out) {
  const int64_t elements = blocks.rows * blocks.cols, scale_codes = elements / kNvfp4Block;
  const int64_t step = blocks.GridRows() * blocks.GridCols() / scales.run;
  Blocks one = blocks;
  one.batch = 1;
  scales.run = scale_codes;
  const In* x = Data<In>(call.arg(0));
  for (int64_t b = 0; b < blocks.batch; ++b) {
    QSHARD_RETURN_IF_ERROR(call(Launch<In, E2M1>(call.exec, x, scales, one, out)));
    x += elements;
    scales.global_amax += step;
    out.data += elements / 2;
    out.scale_inv += scale_codes;
    out.second_data += elements / 2;
    out.second_scale_inv += scale_codes;
  }
  return {};
}

// Packed E2M1 codes with E4M3 scales, once the global amax is known: the first axes of the grid.
template <Planes kPlanes, class Platform>
Error QuantizeNvfp4(const Call<Platform>& call) {
  const Blocks blocks = BlocksOf(call.binding);
  kernels::Nvfp4Scales scales{Data<float>(call.arg(1)), call.ArgRun(1), call.number("scale_max"),
                              call.nonfinite()};
  return DispatchFloat(call.arg(0), [&](auto in) -> Error {
    using In = typename decltype(in)::type;
    const auto planes = PlanesOf<kPlanes, uint8_t>(call);
    if constexpr (kTwoSets<kPlanes>) {
      if (scales.run < blocks.GridRows() * blocks.GridCols())
        return QuantizeNvfp4Each<In>(call, scales, blocks, planes);
      scales.run *= kNvfp4Block;  // A block of 16 x 16 is as many of 1 x 16, or of 16 x 1.
    }
    return call(Launch<In, E2M1>(call.exec, Data<In>(call.arg(0)), scales, blocks, planes));
  });
}

}  // namespace

QSHARD_DEFINE_OP(quantize_block) { return Quantize<Planes::kRowMajor>(call); }
QSHARD_DEFINE_OP(quantize_block_t) { return Quantize<Planes::kTransposed>(call); }
QSHARD_DEFINE_OP(quantize_block_both) { return Quantize<Planes::kBoth>(call); }
QSHARD_DEFINE_OP(quantize_block_both_t) { return Quantize<Planes::kBothTransposed>(call); }
QSHARD_DEFINE_OP(quantize_square_both) { return Quantize<Planes::kSquareBoth>(call); }

QSHARD_DEFINE_OP(quantize_nvfp4) { return QuantizeNvfp4<Planes::kRowMajor>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_t) { return QuantizeNvfp4<Planes::kTransposed>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_both) { return QuantizeNvfp4<Planes::kBothTransposed>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_square_both) { return QuantizeNvfp4<Planes::kSquareBoth>(call); }

}  // namespace qshard
