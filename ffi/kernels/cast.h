#ifndef QSHARD_KERNELS_CAST_H_
#define QSHARD_KERNELS_CAST_H_

#include "core/exec.h"
#include "core/format.h"

namespace qshard::kernels {

// data[r, i] = Encode<Code>(x[r, i] * scale[r]) over x [runs, length].
template <class In, class Code>
Status Cast(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t runs, int64_t length,
            uint8_t* data);
template <class In, class Code>
Status Cast(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t runs, int64_t length,
            uint8_t* data);

// The same, and data_t[b, j, i] = data[b, i, j], for `batch` matrices of [rows, cols]. Element e of
// x, counted row-major over all matrices, has scale[e / length].
template <class In, class Code>
Status CastTranspose(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t);
template <class In, class Code>
Status CastTranspose(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t);

// data_t[b, j, i] = data[b, i, j], bytes.
Status Transpose(const Exec<Cpu>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                 int64_t cols, uint8_t* data_t);
Status Transpose(const Exec<Cuda>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                 int64_t cols, uint8_t* data_t);

// x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]) over data [runs, length].
template <class Code, class Out>
Status Dequantize(const Exec<Cpu>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x);
template <class Code, class Out>
Status Dequantize(const Exec<Cuda>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CAST_H_
