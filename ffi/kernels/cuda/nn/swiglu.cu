// SwiGLU and its gradients, each in one read of its operands, with the amax of each result.
//
// A thread takes vectors of 8 elements. A warp takes a run if there are enough, and a thread block
// would not be busy: rows of narrow experts. Else a thread block takes it, or many share it: on an
// H100 one vector a thread is faster than a wave of thread blocks that loop. They walk it forwards,
// so that the end of their output is in L2 for a cast that walks backwards. Runs that are not whole
// aligned vectors move one element at a time. Equals core/swiglu.h bit for bit.
#include "kernels/activation.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/cuda/transpose/tile.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;

template <class In, int kCount>
using Vector = Words<kCount * sizeof(In)>;

// Rounds v like NarrowExactly, and adds its magnitude to `m`.
template <class In, int kCount>
__device__ __forceinline__ Vector<In, kCount> NarrowAndAdd(const float (&v)[kCount],
                                                           Magnitude<In>& m) {
  Vector<In, kCount> x = NarrowWords<In>(v);
  Magnitude<In> own;
  own.Add(x);
  m.AddBits(own.Bits());
  if (own.HasNan()) x = NarrowExactly<In>(v, true);
  return x;
}

// The maps of the kernel below. With kPairs a run is a row, gate and up are halves [2, length] of
// one row, in operands and in results, and all results of a row have one amax.
template <class In, bool kPairs = false>
struct Forward {
  static constexpr int kOperands = 2, kResults = 1;
  static constexpr int kBlocksPerSm = 6, kAmaxes = 1;
  static constexpr int kPairedOperands = kPairs ? 2 : 0, kPairedResults = 0;
  const In* operand[kOperands];
  In* result[kResults];
  float* amax[kAmaxes];

  template <int kCount>
  static __device__ __forceinline__ void Of(const float (&v)[kOperands][kCount],
                                            Vector<In, kCount> (&made)[kResults],
                                            Magnitude<In> (&m)[kResults]) {
    float h[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) h[i] = SwiGlu(v[0][i], v[1][i]);
    made[0] = NarrowAndAdd<In>(h, m[0]);
  }
};

template <class In, bool kPairs = false>
struct Backward {
  static constexpr int kOperands = 3, kResults = 2;
  static constexpr int kBlocksPerSm = 4, kAmaxes = kPairs ? 1 : 2;
  static constexpr int kPairedOperands = kPairs ? 2 : 0, kPairedResults = kPairs ? 2 : 0;
  const In* operand[kOperands];  // gate, up, gradient of h
  In* result[kResults];          // gradients of gate and up
  float* amax[kAmaxes];

  template <int kCount>
  static __device__ __forceinline__ void Of(const float (&v)[kOperands][kCount],
                                            Vector<In, kCount> (&made)[kResults],
                                            Magnitude<In> (&m)[kResults]) {
    float gate[kCount], up[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const SwiGluGradients g = SwiGluGrad(v[0][i], v[1][i], v[2][i]);
      gate[i] = g.gate, up[i] = g.up;
    }
    made[0] = NarrowAndAdd<In>(gate, m[0]);
    made[1] = NarrowAndAdd<In>(up, m[1]);
  }
};

template <class Map, class In, int kCount>
struct Loaded {
  Vector<In, kCount> v[Map::kOperands];
};

// Element `at` of all runs is at that place, and in a pair as many elements later as the run
// begins.
struct At {
  int64_t begin, at;
  __device__ __forceinline__ int64_t Of(bool paired) const { return paired ? at + begin : at; }
};

template <int kCount, class Map, class In>
__device__ __forceinline__ Loaded<Map, In, kCount> LoadAll(const Map& map, const In*, const At& i) {
  Loaded<Map, In, kCount> x;
#pragma unroll
  for (int k = 0; k < Map::kOperands; ++k)
    x.v[k] = Load<kCount * sizeof(In)>(map.operand[k] + i.Of(k < Map::kPairedOperands));
  return x;
}

template <int kCount, class Map, class In>
__device__ __forceinline__ void MapAll(const Map& map, const Loaded<Map, In, kCount>& x,
                                       const At& i, Magnitude<In> (&m)[Map::kResults]) {
  float v[Map::kOperands][kCount];
#pragma unroll
  for (int k = 0; k < Map::kOperands; ++k) WidenWords<In>(x.v[k], v[k]);
  Vector<In, kCount> made[Map::kResults];
  Map::Of(v, made, m);
#pragma unroll
  for (int k = 0; k < Map::kResults; ++k)
    Store<Write::kCached>(map.result[k] + i.Of(k < Map::kPairedResults), made[k]);
}

// Grid: x is a thread block for kThreads / kTeam runs, y the split (LaunchRaising). `vectors`: runs
// are whole vectors.
template <int kTeam, class Map, class In>
__global__ void __launch_bounds__(kThreads, Map::kBlocksPerSm)
    MapKernel(const Map map, const In* type, int64_t runs, int64_t length, bool vectors) {
  const int thread = threadIdx.x % kTeam;
  const int64_t run = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (run >= runs) return;  // all threads of a team
  const int64_t begin = run * length;
  Magnitude<In> m[Map::kResults];
  if (vectors) {
    const int64_t count = length / kEight, step = int64_t{gridDim.y} * kTeam;
    for (int64_t i = int64_t{blockIdx.y} * kTeam + thread; i < count; i += step) {
      const At at{begin, begin + i * kEight};
      MapAll<kEight>(map, LoadAll<kEight>(map, type, at), at, m);
    }
  } else {
    for (int64_t i = int64_t{blockIdx.y} * kTeam + thread; i < length;
         i += int64_t{gridDim.y} * kTeam) {
      const At at{begin, begin + i};
      MapAll<1>(map, LoadAll<1>(map, type, at), at, m);
    }
  }
  int32_t bits[Map::kResults];
#pragma unroll
  for (int k = 0; k < Map::kResults; ++k) {
    if constexpr (kTeam > kWarp) __syncthreads();
    bits[k] = TeamMax<kTeam>(m[k].AsFloatBits());
  }
  if (thread != 0) return;
  AwaitZeros();
  if constexpr (Map::kAmaxes < Map::kResults) {
    StoreOrRaise(map.amax[0] + run, max(bits[0], bits[Map::kResults - 1]));
  } else {
#pragma unroll
    for (int k = 0; k < Map::kResults; ++k) StoreOrRaise(map.amax[k] + run, bits[k]);
  }
}

template <class In, class Map>
Status LaunchMap(const Exec<Cuda>& exec, const Map& map, int64_t runs, int64_t length) {
  if (runs == 0) return {};
  bool vectors = length % kEight == 0;
  for (const In* x : map.operand) vectors = vectors && IsAligned(x, 16);
  for (const In* x : map.result) vectors = vectors && IsAligned(x, 16);
  const int64_t wave = int64_t{Multiprocessors()} * Map::kBlocksPerSm;
  const int64_t pieces = CeilDiv(length, kThreads * (vectors ? kEight : 1));
  const In* type = nullptr;
  constexpr int kTeams = kThreads / kWarp;
  if (vectors && length < kThreads * kEight && runs >= wave * kTeams)
    return Launch(exec, MapKernel<kWarp, Map, In>, CeilDiv(runs, kTeams), kThreads, map, type, runs,
                  length, vectors);
  // One thread block per run if there are enough runs, else a few waves.
  constexpr int64_t kWaves = 64, kMostSplits = 65535;  // the limit of gridDim.y
  const int64_t splits =
      std::clamp<int64_t>(std::min(pieces, kWaves * wave / runs), 1, kMostSplits);
  return LaunchRaising(exec, MapKernel<kThreads, Map, In>, runs, splits, kThreads, map.amax[0],
                       Map::kAmaxes > 1 ? map.amax[Map::kAmaxes - 1] : nullptr, map, type, runs,
                       length, vectors);
}

// --- transposed codes: tiles of 128 x 128 elements (transpose/tile.cuh) ---

template <class In>
struct Pair {
  const In *gate, *up;
};

template <class In>
__device__ __forceinline__ EightOf<In> SwiGluRow(const EightOf<In>& gate, const EightOf<In>& up) {
  float g[kEight], u[kEight];
  WidenWords<In>(gate, g);
  WidenWords<In>(up, u);
#pragma unroll
  for (int i = 0; i < kEight; ++i) g[i] = SwiGlu(g[i], u[i]);
  return NarrowWords<In>(g);  // the bits of a NaN do not affect codes
}

template <class In, class Code>
__global__ void __launch_bounds__(kTileThreads, sizeof(In) == 4 ? 2 : 3)
    SwiGluTiles(const Pair<In> x, const float* scale, const TileGrid grid, bool wide,
                uint8_t* data_t) {
  __shared__ alignas(16) uint8_t tile[sizeof(typename TransposedTile<Code>::Bytes)];
  const int down = threadIdx.x / kPatches, across = threadIdx.x % kPatches;
  const Tile t = grid.At(blockIdx.x);
  const int height = t.PatchHeight(down * kPatch, across * kPatch);
  const int64_t at = grid.Offset(t, down * kPatch, across * kPatch);
  EightOf<In> gate[kPatch], up[kPatch];
  LoadRows<Read::kOnce>(x.gate + at, grid.cols, height, gate);
  LoadRows<Read::kOnce>(x.up + at, grid.cols, height, up);
  const float s = __ldg(scale);
  EightCodes<Code> codes[kPatch], columns[kPatch];
#pragma unroll
  for (int k = 0; k < kPatch; ++k) codes[k] = EncodeRow<In, Code>(SwiGluRow<In>(gate[k], up[k]), s);
  TransposeCodes<Code>(codes, columns);
  TransposedTile<Code>::Put(tile, down, across, columns);
  __syncthreads();
  TransposedTile<Code>::template WriteOut<Write::kStream>(tile, t, grid, wide, data_t);
}

}  // namespace

template <class In, class Code>
Status SwiGluCastTransposed(const Exec<Cuda>& exec, const In* gate, const In* up,
                            const float* scale, int64_t rows, int64_t cols, uint8_t* data_t) {
  if (rows * cols == 0) return {};
  const TileGrid grid(1, rows, cols);
  if (cols % kEight == 0 && IsAligned(gate, 16) && IsAligned(up, 16) && grid.tiles < kMaxDivided)
    return Launch(exec, SwiGluTiles<In, Code>, grid.tiles, kTileThreads, Pair<In>{gate, up}, scale,
                  grid, WideColumns<Code>(rows, data_t), data_t);
  return ForEach(exec, rows * cols, [=] __device__(int64_t i) {
    const float h = Widen(Narrow<In>(SwiGlu(Widen(gate[i]), Widen(up[i]))));
    data_t[i % cols * rows + i / cols] = Encode<Code>(__fmul_rn(h, *scale));
  });
}

template <class In>
Status SwiGluForward(const Exec<Cuda>& exec, const In* gate, const In* up, int64_t runs,
                     int64_t length, In* h, float* amax) {
  return LaunchMap<In>(exec, Forward<In>{{gate, up}, {h}, {amax}}, runs, length);
}

template <class In>
Status SwiGluBackward(const Exec<Cuda>& exec, const In* gate, const In* up, const In* grad,
                      int64_t runs, int64_t length, In* d_gate, In* d_up, float* amax_gate,
                      float* amax_up) {
  return LaunchMap<In>(exec, Backward<In>{{gate, up, grad}, {d_gate, d_up}, {amax_gate, amax_up}},
                       runs, length);
}

template <class In>
Status SwiGluGateUp(const Exec<Cuda>& exec, const In* gate_up, int64_t rows, int64_t cols, In* h,
                    float* amax) {
  return LaunchMap<In>(exec, Forward<In, true>{{gate_up, gate_up + cols}, {h}, {amax}}, rows, cols);
}

template <class In>
Status SwiGluGateUpGrad(const Exec<Cuda>& exec, const In* gate_up, const In* grad, int64_t rows,
                        int64_t cols, In* d_gate_up, float* amax) {
  return LaunchMap<In>(
      exec,
      Backward<In, true>{{gate_up, gate_up + cols, grad}, {d_gate_up, d_gate_up + cols}, {amax}},
      rows, cols);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, SwiGluForward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, SwiGluBackward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, SwiGluGateUp)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, SwiGluGateUpGrad)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, SwiGluCastTransposed)

}  // namespace qshard::kernels
