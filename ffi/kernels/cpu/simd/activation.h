// Loops of SwiGLU and RMSNorm, and of sums of the rows of experts.
#ifndef QSHARD_KERNELS_CPU_SIMD_ACTIVATION_H_
#define QSHARD_KERNELS_CPU_SIMD_ACTIVATION_H_

#include "core/norm.h"
#include "core/swiglu.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

template <class In>
void SwiGluAll(const void* gate, const void* up, int64_t n, void* h) {
  const In* __restrict g = static_cast<const In*>(gate);
  const In* __restrict u = static_cast<const In*>(up);
  In* __restrict out = static_cast<In*>(h);
  for (int64_t i = 0; i < n; ++i) out[i] = Narrow<In>(SwiGlu(Widen(g[i]), Widen(u[i])));
}

template <class In>
void SwiGluGradAll(const void* gate, const void* up, const void* grad, int64_t n, void* d_gate,
                   void* d_up) {
  const In* __restrict g = static_cast<const In*>(gate);
  const In* __restrict u = static_cast<const In*>(up);
  const In* __restrict dh = static_cast<const In*>(grad);
  In* __restrict dg = static_cast<In*>(d_gate);
  In* __restrict du = static_cast<In*>(d_up);
  for (int64_t i = 0; i < n; ++i) {
    const SwiGluGradients made = SwiGluGrad(Widen(g[i]), Widen(u[i]), Widen(dh[i]));
    dg[i] = Narrow<In>(made.gate);
    du[i] = Narrow<In>(made.up);
  }
}

// Returns the sum of a(i) * b(i), in the order of core/norm.h.
template <class A, class B>
QSHARD_INLINE float SumOfProducts(int64_t n, const A& a, const B& b) {
  float lanes[kSumLanes] = {};
  for (int64_t begin = 0; begin < n; begin += kSumLanes) {
    const int64_t count = n - begin < kSumLanes ? n - begin : kSumLanes;
    for (int64_t i = 0; i < count; ++i)
      lanes[i] = FusedMultiplyAdd(a(begin + i), b(begin + i), lanes[i]);
  }
  constexpr int kThreads = kSumLanes / kLanesOfThread;
  constexpr int kOfWarp = kLanesOfWarp / kLanesOfThread, kWarps = kSumLanes / kLanesOfWarp;
  float threads[kThreads], warps[kWarps];
  for (int t = 0; t < kThreads; ++t)
    threads[t] = SumHalves<kLanesOfThread>(lanes + t * kLanesOfThread);
  for (int w = 0; w < kWarps; ++w) warps[w] = SumHalves<kOfWarp>(threads + w * kOfWarp);
  return SumHalves<kWarps>(warps);
}

template <class In>
float SquaresOf(const void* x, int64_t n) {
  const In* __restrict in = static_cast<const In*>(x);
  const auto value = [in](int64_t i) { return Widen(in[i]); };
  return SumOfProducts(n, value, value);
}

template <class In>
void RmsNormAll(const void* x, const float* __restrict weight, float rstd, int64_t n, void* y) {
  const In* __restrict in = static_cast<const In*>(x);
  In* __restrict out = static_cast<In*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = Narrow<In>(RmsNorm(Widen(in[i]), rstd, weight[i]));
}

template <class In>
float GradAlong(const void* x, const void* grad, const float* __restrict weight, float rstd,
                int64_t n) {
  const In* __restrict in = static_cast<const In*>(x);
  const In* __restrict dy = static_cast<const In*>(grad);
  return SumOfProducts(
      n, [dy, weight](int64_t i) { return Widen(dy[i]) * weight[i]; },
      [in, rstd](int64_t i) { return Widen(in[i]) * rstd; });
}

template <class In>
void RmsNormGradAll(const void* x, const void* grad, const float* __restrict weight, float rstd,
                    float along, int64_t n, void* dx, float* __restrict sums) {
  const In* __restrict in = static_cast<const In*>(x);
  const In* __restrict dy = static_cast<const In*>(grad);
  In* __restrict out = static_cast<In*>(dx);
  for (int64_t i = 0; i < n; ++i) {
    const float v = Widen(in[i]), g = Widen(dy[i]);
    out[i] = Narrow<In>(RmsNormGrad(v, rstd, weight[i], g, along));
    sums[i] = FusedMultiplyAdd(g, v * rstd, sums[i]);
  }
}

template <class In>
void MultiplyAddAll(const void* x, float weight, int64_t n, float* __restrict sums) {
  const In* __restrict in = static_cast<const In*>(x);
  for (int64_t i = 0; i < n; ++i) sums[i] = FusedMultiplyAdd(weight, Widen(in[i]), sums[i]);
}

template <class In>
void MultiplyAll(const void* x, float weight, int64_t n, void* y) {
  const In* __restrict in = static_cast<const In*>(x);
  In* __restrict out = static_cast<In*>(y);
  for (int64_t i = 0; i < n; ++i) out[i] = Narrow<In>(weight * Widen(in[i]));
}

template <class In>
float DotOf(const void* a, const void* b, int64_t n) {
  const In* __restrict left = static_cast<const In*>(a);
  const In* __restrict right = static_cast<const In*>(b);
  return SumOfProducts(
      n, [left](int64_t i) { return Widen(left[i]); },
      [right](int64_t i) { return Widen(right[i]); });
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_ACTIVATION_H_
