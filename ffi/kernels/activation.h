// Launchers of SwiGLU and RMSNorm, with the amax that the next quantization needs.
#ifndef QSHARD_KERNELS_ACTIVATION_H_
#define QSHARD_KERNELS_ACTIVATION_H_

#include "core/norm.h"
#include "core/swiglu.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// h[i] = Narrow<In>(SwiGlu(gate[i], up[i])), and amax[r] = max |h| over run r of [runs, length].
QSHARD_LAUNCHER_TEMPLATE((class In), SwiGluForward, const In* gate, const In* up, int64_t runs,
                         int64_t length, In* h, float* amax);

// Gradients d_gate and d_up for the gradient of h, and the amax of each run of both.
QSHARD_LAUNCHER_TEMPLATE((class In), SwiGluBackward, const In* gate, const In* up, const In* grad,
                         int64_t runs, int64_t length, In* d_gate, In* d_up, float* amax_gate,
                         float* amax_up);

// SwiGluForward of rows [2, cols] of gate_up: gate, then up. amax[r] = max |h| of row r.
QSHARD_LAUNCHER_TEMPLATE((class In), SwiGluGateUp, const In* gate_up, int64_t rows, int64_t cols,
                         In* h, float* amax);

// SwiGluBackward of the same rows. amax[r] is the largest |x| of both gradients of row r.
QSHARD_LAUNCHER_TEMPLATE((class In), SwiGluGateUpGrad, const In* gate_up, const In* grad,
                         int64_t rows, int64_t cols, In* d_gate_up, float* amax);

// data_t[i, m] = Encode<Code>(h[m, i] * *scale), for the h [rows, cols] of SwiGluForward.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), SwiGluCastTransposed, const In* gate, const In* up,
                         const float* scale, int64_t rows, int64_t cols, uint8_t* data_t);

// RMSNorm of matrices [runs, rows, cols], with weights [runs, cols]: rstd = RmsInverse of a row,
// y[r, m, i] = Narrow<In>(RmsNorm(x[r, m, i], rstd[r, m], weight[r, i])), and the amax of each run.
QSHARD_LAUNCHER_TEMPLATE((class In, class Weight), RmsNormForward, const In* x,
                         const Weight* weight, int64_t runs, int64_t rows, int64_t cols, float eps,
                         In* y, float* rstd, float* amax);

// Gradients dx and dweight for the gradient of y [runs, rows, cols]. `parts` receives partial sums
// of dweight first, [runs, ceil(rows / kSumRows), cols].
QSHARD_LAUNCHER_TEMPLATE((class In, class Weight), RmsNormBackward, const In* x,
                         const Weight* weight, const float* rstd, const In* grad, int64_t runs,
                         int64_t rows, int64_t cols, In* dx, float* parts, float* dweight);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ACTIVATION_H_
