#ifndef QSHARD_KERNELS_CAST_H_
#define QSHARD_KERNELS_CAST_H_

#include "kernels/launcher.h"

namespace qshard::kernels {

// data[r, i] = Encode<Code>(x[r, i] * scale[r]) over x [runs, length].
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), Cast, const In* x, const float* scale,
                         int64_t runs, int64_t length, uint8_t* data);

// The same, and data_t[b, j, i] = data[b, i, j], for `batch` matrices of [rows, cols]. Element e of
// x, counted row-major over all matrices, has scale[e / length].
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastTranspose, const In* x, const float* scale,
                         int64_t length, int64_t batch, int64_t rows, int64_t cols, uint8_t* data,
                         uint8_t* data_t);

// data_t[b, j, i] = data[b, i, j], bytes.
QSHARD_LAUNCHER(Transpose, const uint8_t* data, int64_t batch, int64_t rows, int64_t cols,
                uint8_t* data_t);

// x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]) over data [runs, length].
QSHARD_LAUNCHER_TEMPLATE((class Code, class Out), Dequantize, const uint8_t* data,
                         const float* scale_inv, int64_t runs, int64_t length, Out* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CAST_H_
