// Fused block quantization: amax, scale and codes in one read of x, with the bits of the separate
// ops.
#include "kernels/grouped.h"
#include "kernels/quantize_block.h"
#include "ops/philox.h"
#include "ops/row_map.h"
#include "schema/handler.h"

namespace qshard {
namespace {

// Planes that an op writes. kRowMajor, kTransposed and kSquareBoth have one set of blocks, stored
// in the order of x, transposed, or both. kBoth and kBothTransposed have blocks 1 x block_cols, and
// blocks block_rows x 1 in the order of x or transposed.
enum class Planes { kRowMajor, kTransposed, kSquareBoth, kBoth, kBothTransposed };

template <Planes kPlanes>
constexpr bool kTwoSets = kPlanes == Planes::kBoth || kPlanes == Planes::kBothTransposed;

// Collects the results of an op with these planes.
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

template <Planes kPlanes, class In, class Code, class Platform, class Scales>
Error Launch(const Call<Platform>& call, const Scales& scales, const Blocks& blocks) {
  const In* x = Data<In>(call.arg(0));
  const auto out = PlanesOf<kPlanes, typename Scales::Stored>(call);
  if constexpr (kTwoSets<kPlanes>)
    return call(kernels::QuantizeBlockBoth<In, Code>(call.exec, x, scales, blocks, out));
  else
    return call(kernels::QuantizeBlock<In, Code>(call.exec, x, scales, blocks, out));
}

// Calls launch(scales, code, in) with the scales, element and dtype of a call, which quantizes to
// any element with E8M0 scales, or to an 8-bit element with fp32 scales.
template <class Platform, class Launcher>
Error WithScales(const Call<Platform>& call, int64_t block_rows, int64_t block_cols,
                 const Launcher& launch) {
  const auto with_scales = [&](auto scale, auto scales) {
    return DispatchScaledElement<decltype(scale)>(call, [&](auto code) -> Error {
      using Code = decltype(code);
      if constexpr (kCodesPerByte<Code> > 1)
        for (int64_t side : {block_rows, block_cols})
          QSHARD_REQUIRE(side == 1 || (side % 2 == 0 && side <= kernels::kMaxPackedSide), call.op(),
                         ": block (", block_rows, "x", block_cols, ") of ", Code::kName,
                         " must have sides of 1, or even ones up to ", kernels::kMaxPackedSide,
                         "; two codes share a byte");
      return DispatchFloat(call.arg(0), [&](auto in) { return launch(scales, code, in); });
    });
  };
  if (call.text("scale_dtype") == E8M0::kName)
    return with_scales(
        E8M0{}, kernels::E8M0Scales{
                    call.text("rounding") == "up" ? PowerRounding::kUp : PowerRounding::kFloor,
                    call.nonfinite()});
  return with_scales(0.0f,
                     kernels::FloatScales{call.number("eps"), call.flag("pow2"), call.nonfinite()});
}

template <Planes kPlanes, class Platform>
Error Quantize(const Call<Platform>& call) {
  const Blocks blocks = BlocksOf(call.binding);
  return WithScales(call, blocks.block_rows, blocks.block_cols,
                    [&](const auto& scales, auto code, auto in) {
                      return Launch<kPlanes, decltype(in), decltype(code)>(call, scales, blocks);
                    });
}

// Quantizes the padded rows of operands `x: float t k, rows: word p`.
template <Planes kPlanes, class Platform>
Error QuantizeRows(const Call<Platform>& call) {
  const RowMap map = RowMapOf(call);
  const Blocks blocks{1, map.count, call.binding.Length(1), call.integer("block_rows"),
                      call.integer("block_cols")};
  return WithScales(
      call, blocks.block_rows, blocks.block_cols, [&](const auto& scales, auto code, auto in) {
        using In = decltype(in);
        using Code = decltype(code);
        const auto out = PlanesOf<kPlanes, typename std::decay_t<decltype(scales)>::Stored>(call);
        const In* x = Data<In>(call.arg(0));
        if constexpr (kTwoSets<kPlanes>)
          return call(
              kernels::QuantizeBlockBothRows<In, Code>(call.exec, x, map, scales, blocks, out));
        else
          return call(kernels::QuantizeBlockRows<In, Code>(call.exec, x, map, scales, blocks, out));
      });
}

// Returns the NVFP4 scales under global amax `operand`, which has the first axes of the grid.
template <Planes kPlanes, class Platform>
kernels::Nvfp4Scales ScalesOf(const Call<Platform>& call, int operand, const Blocks& blocks) {
  kernels::Nvfp4Scales scales{Data<float>(call.arg(operand)), call.ArgRun(operand), 1,
                              call.number("scale_max"), call.nonfinite()};
  if constexpr (kTwoSets<kPlanes>) {
    // A matrix has one global amax, but an operand sharded along with x needs the axes of x. All
    // values of a matrix are equal, so only the first is read.
    const int64_t matrix = blocks.GridRows() * blocks.GridCols();
    if (scales.run < matrix) scales.step = matrix / scales.run, scales.run = matrix;
    scales.run *= kNvfp4Block;  // a 16x16 block is 16 blocks of 1x16 or 16x1
  }
  return scales;
}

// Quantizes to packed E2M1 codes with E4M3 scales, under known global amaxes.
template <Planes kPlanes, bool kStochastic, class Platform>
Error QuantizeNvfp4(const Call<Platform>& call) {
  constexpr int kAmaxes = kTwoSets<kPlanes> ? 2 : 1;
  const Blocks blocks = BlocksOf(call.binding);
  kernels::Nvfp4Options options;
  if constexpr (kPlanes == Planes::kTransposed || kTwoSets<kPlanes>)
    options.hadamard = call.flag("hadamard");
  QSHARD_REQUIRE(!options.hadamard || kTwoSets<kPlanes> || blocks.block_cols == 1, call.op(),
                 ": block (", blocks.block_rows, "x", blocks.block_cols, ") with hadamard must be ",
                 kNvfp4Block, "x1; rotated are blocks along columns");
  kernels::Philox philox;
  if constexpr (kStochastic) {
    QSHARD_RETURN_IF_ERROR(ReadPhilox(call, 1 + kAmaxes, blocks, &philox));
    options.philox = &philox;
  }
  const kernels::Nvfp4Scales scales = ScalesOf<kPlanes>(call, 1, blocks);
  const auto out = PlanesOf<kPlanes, uint8_t>(call);
  return DispatchFloat(call.arg(0), [&](auto in) {
    const auto* x = Data<decltype(in)>(call.arg(0));
    if constexpr (kTwoSets<kPlanes>)
      return call(kernels::QuantizeNvfp4Both(
          call.exec, x, scales, ScalesOf<kPlanes>(call, 2, blocks), options, blocks, out));
    else
      return call(kernels::QuantizeNvfp4(call.exec, x, scales, options, blocks, out));
  });
}

// Quantizes the padded rows of experts, with a global amax and a Philox key for each expert.
template <bool kBoth, bool kStochastic, class Platform>
Error QuantizeNvfp4Rows(const Call<Platform>& call) {
  kernels::Nvfp4Experts experts{StopsOf(call), Data<float>(call.arg(3)),
                                Data<float>(call.arg(kBoth ? 4 : 3)), call.number("scale_max"),
                                call.nonfinite()};
  if constexpr (kStochastic) experts.seeds = Data<uint32_t>(call.arg(kBoth ? 5 : 4));
  kernels::Nvfp4RowPlanes out{Mutable<uint8_t>(call.ret(0)), Mutable<uint8_t>(call.ret(1))};
  if constexpr (kBoth) {
    out.data_t = Mutable<uint8_t>(call.ret(2));
    out.scale_inv_t = Mutable<uint8_t>(call.ret(3));
    out.hadamard = call.flag("hadamard");
  } else {
    out.square = call.integer("block_rows") > 1;
  }
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::QuantizeNvfp4Rows(call.exec, Data<decltype(in)>(call.arg(0)),
                                           call.binding.Length(1), RowMapOf(call), experts, out));
  });
}

}  // namespace

// amax_block, block scales (scale_from_amax for fp32, scale_e8m0 for E8M0) and cast_block, in one
// read of x.
QSHARD_DEFINE_OP(quantize_block) { return Quantize<Planes::kRowMajor>(call); }
QSHARD_DEFINE_OP(quantize_block_t) { return Quantize<Planes::kTransposed>(call); }
QSHARD_DEFINE_OP(quantize_block_both) { return Quantize<Planes::kBoth>(call); }
QSHARD_DEFINE_OP(quantize_block_both_t) { return Quantize<Planes::kBothTransposed>(call); }
QSHARD_DEFINE_OP(quantize_square_both) { return Quantize<Planes::kSquareBoth>(call); }

// The same of the rows of x that `rows` names, in its order. A row outside x is padding, a row of
// zeros.
QSHARD_DEFINE_OP(quantize_block_rows) { return QuantizeRows<Planes::kRowMajor>(call); }
QSHARD_DEFINE_OP(quantize_block_both_rows) { return QuantizeRows<Planes::kBoth>(call); }
QSHARD_DEFINE_OP(quantize_block_both_t_rows) { return QuantizeRows<Planes::kBothTransposed>(call); }
QSHARD_DEFINE_OP(quantize_square_both_rows) { return QuantizeRows<Planes::kSquareBoth>(call); }

// E2M1 codes and E4M3 scales of blocks of 16, under the global scale of the whole tensor:
// amax_block, scale_nvfp4 and cast_block or cast_block_stochastic, in one read of x.
QSHARD_DEFINE_OP(quantize_nvfp4) { return QuantizeNvfp4<Planes::kRowMajor, false>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_t) { return QuantizeNvfp4<Planes::kTransposed, false>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_both) {
  return QuantizeNvfp4<Planes::kBothTransposed, false>(call);
}
QSHARD_DEFINE_OP(quantize_nvfp4_square_both) {
  return QuantizeNvfp4<Planes::kSquareBoth, false>(call);
}
QSHARD_DEFINE_OP(quantize_nvfp4_stochastic) { return QuantizeNvfp4<Planes::kRowMajor, true>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_stochastic_t) {
  return QuantizeNvfp4<Planes::kTransposed, true>(call);
}
QSHARD_DEFINE_OP(quantize_nvfp4_stochastic_both) {
  return QuantizeNvfp4<Planes::kBothTransposed, true>(call);
}

// The same of padded rows, under the global scale of each expert. `both` ops have blocks of 1 x 16
// and 16 x 1.
QSHARD_DEFINE_OP(quantize_nvfp4_rows) { return QuantizeNvfp4Rows<false, false>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_both_rows) { return QuantizeNvfp4Rows<true, false>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_stochastic_rows) { return QuantizeNvfp4Rows<false, true>(call); }
QSHARD_DEFINE_OP(quantize_nvfp4_stochastic_both_rows) {
  return QuantizeNvfp4Rows<true, true>(call);
}

}  // namespace qshard
