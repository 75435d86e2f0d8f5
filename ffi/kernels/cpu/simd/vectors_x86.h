// Vector layer for AVX2 and AVX-512, from one source selected by QSHARD_SIMD_BYTES. Results equal
// the definitions in core/round.h, in fewer instructions.
//
// The compiler also vectorizes the loops of vectors_plain.h, at half the speed. It does not know
// that packing may saturate, that a minimum may pass NaN through, or that a byte fits in half a
// float16.
#ifndef QSHARD_KERNELS_CPU_SIMD_VECTORS_X86_H_
#define QSHARD_KERNELS_CPU_SIMD_VECTORS_X86_H_

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in that header: GCC bug 105593
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "kernels/cpu/simd/vectors.h"

namespace qshard::kernels {
namespace {

constexpr int kVectorBytes = QSHARD_SIMD_BYTES;
constexpr int64_t kLanes = kVectorBytes / 4;
constexpr int64_t kBlock = 4 * kLanes;

typedef float F32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));
typedef int16_t I16 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t U16 __attribute__((vector_size(kVectorBytes)));
typedef int8_t I8 __attribute__((vector_size(kVectorBytes)));
typedef int64_t I64 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfU16 __attribute__((vector_size(kVectorBytes / 2)));
typedef int8_t HalfI8 __attribute__((vector_size(kVectorBytes / 2)));

// Prefetches `bytes` bytes at p + ahead, which may be past the end of the buffer.
QSHARD_INLINE void Prefetch(const void* p, int64_t ahead, int64_t bytes) {
  const char* first = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + ahead);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i, 0, 0);
}

// --- operations without an operator. Pack and Interleave work within each 16 bytes. ---

#if QSHARD_SIMD_BYTES == 64
#define QSHARD_VECTOR(instruction) _mm512_##instruction
typedef __m512i Bits;
typedef __m256i HalfBits;
#else
#define QSHARD_VECTOR(instruction) _mm256_##instruction
typedef __m256i Bits;
typedef __m128i HalfBits;
#endif

// min(a, b), but b if either is NaN.
QSHARD_INLINE F32 Min(F32 a, F32 b) { return QSHARD_VECTOR(min_ps)(a, b); }
QSHARD_INLINE I16 Pack(I32 a, I32 b) { return (I16)QSHARD_VECTOR(packs_epi32)((Bits)a, (Bits)b); }
QSHARD_INLINE I8 Pack(I16 a, I16 b) { return (I8)QSHARD_VECTOR(packs_epi16)((Bits)a, (Bits)b); }
QSHARD_INLINE I16 PackUnsigned(I32 a, I32 b) {
  return (I16)QSHARD_VECTOR(packus_epi32)((Bits)a, (Bits)b);
}
QSHARD_INLINE I8 InterleaveLow(I8 a, I8 b) {
  return (I8)QSHARD_VECTOR(unpacklo_epi8)((Bits)a, (Bits)b);
}
QSHARD_INLINE I8 InterleaveHigh(I8 a, I8 b) {
  return (I8)QSHARD_VECTOR(unpackhi_epi8)((Bits)a, (Bits)b);
}
QSHARD_INLINE I16 InterleaveLow(I16 a, I16 b) {
  return (I16)QSHARD_VECTOR(unpacklo_epi16)((Bits)a, (Bits)b);
}
QSHARD_INLINE I16 InterleaveHigh(I16 a, I16 b) {
  return (I16)QSHARD_VECTOR(unpackhi_epi16)((Bits)a, (Bits)b);
}
QSHARD_INLINE I16 WidenBytes(HalfI8 b) { return (I16)QSHARD_VECTOR(cvtepi8_epi16)((HalfBits)b); }
QSHARD_INLINE F32 FromHalf(HalfU16 h) { return QSHARD_VECTOR(cvtph_ps)((HalfBits)h); }
QSHARD_INLINE HalfU16 ToHalf(F32 v) { return (HalfU16)QSHARD_VECTOR(cvtps_ph)(v, 0); }
#undef QSHARD_VECTOR

// Loads 16 bytes each from p, p + stride, and so on.
QSHARD_INLINE I8 LoadLanes(const uint8_t* p, int64_t stride) {
#if QSHARD_SIMD_BYTES == 64
  __m512i v = _mm512_castsi128_si512(Load<__m128i>(p));
  v = _mm512_inserti32x4(v, Load<__m128i>(p + stride), 1);
  v = _mm512_inserti32x4(v, Load<__m128i>(p + 2 * stride), 2);
  return (I8)_mm512_inserti32x4(v, Load<__m128i>(p + 3 * stride), 3);
#else
  const __m256i v = _mm256_castsi128_si256(Load<__m128i>(p));
  return (I8)_mm256_inserti128_si256(v, Load<__m128i>(p + stride), 1);
#endif
}

#if QSHARD_SIMD_BYTES == 64
#define QSHARD_LANES 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
#define QSHARD_PAIRS 0, 2, 4, 6, 1, 3, 5, 7
#else
#define QSHARD_LANES 0, 4, 1, 5, 2, 6, 3, 7
#define QSHARD_PAIRS 0, 2, 1, 3
#endif

// Pack interleaves the 16-byte lanes of its operands. These restore the order after one Pack, and
// after Pack(Pack(a, b), Pack(c, d)).
template <class V>
QSHARD_INLINE V LanesInOrder(V v) {
  return (V)__builtin_shufflevector((I64)v, (I64)v, QSHARD_PAIRS);
}
QSHARD_INLINE I8 LanesInOrderTwice(I8 v) {
  return (I8)__builtin_shufflevector((I32)v, (I32)v, QSHARD_LANES);
}
#undef QSHARD_LANES
#undef QSHARD_PAIRS

// --- scales of kBlock elements, in the order of LoadPair for inputs In ---

struct Pair {
  F32 a, b;
};
struct BlockScales {
  Pair pair[2];
};

// v in every lane, also for -0.
QSHARD_INLINE F32 Broadcast(float v) { return v - F32{}; }

// One scale for all.
QSHARD_INLINE BlockScales OneScale(float scale) {
  const Pair one = {Broadcast(scale), Broadcast(scale)};
  return {{one, one}};
}

// Loads 16 bytes each from p, p + 32, and so on.
QSHARD_INLINE F32 EveryOtherLane(const float* p) {
  return (F32)LoadLanes(reinterpret_cast<const uint8_t*>(p), 32);
}

// One scale per element.
template <class In>
QSHARD_INLINE BlockScales EachScales(const float* scale) {
  BlockScales each;
  for (Pair& pair : each.pair) {
    if constexpr (kInputIndex<In> == kInputIndex<bfloat16>)
      pair = {EveryOtherLane(scale), EveryOtherLane(scale + 4)};
    else
      pair = {Load<F32>(scale), Load<F32>(scale + kLanes)};
    scale += 2 * kLanes;
  }
  return each;
}

// One scale per 16 elements.
template <class In>
QSHARD_INLINE BlockScales SixteenScales(const float* scale) {
  BlockScales sixteens;
  for (Pair& pair : sixteens.pair) {
#if QSHARD_SIMD_BYTES == 64
    pair = {Broadcast(scale[0]), Broadcast(scale[1])};
    if constexpr (kInputIndex<In> == kInputIndex<bfloat16>)
      pair.a = pair.b = _mm512_shuffle_f32x4(pair.a, pair.b, 0);
#else
    pair.a = pair.b = Broadcast(*scale);
#endif
    scale += kLanes / 8;
  }
  return sixteens;
}

// --- codes ---

// Loads 2 * kLanes elements in the order that makes Pack(a, b) sequential, up to the order of
// lanes.
QSHARD_INLINE Pair LoadPair(const float* x) { return {Load<F32>(x), Load<F32>(x + kLanes)}; }
QSHARD_INLINE Pair LoadPair(const float16* x) {
  return {FromHalf(Load<HalfU16>(x)), FromHalf(Load<HalfU16>(x + kLanes))};
}
QSHARD_INLINE Pair LoadPair(const bfloat16* x) {
  const I16 h = Load<I16>(x);
  return {(F32)InterleaveLow(I16{}, h), (F32)InterleaveHigh(I16{}, h)};
}

// Returns the code of |v| plus kCodeBias<F>, and more than 2^15 for NaN.
//
// Let g be 2^kShift times the power of two at or below |v|, and at least 2^kShift times F's
// smallest normal number. Then |v| + g has the ulp that F has at |v|: the addition rounds as F does
// and leaves the significand as an integer in the low bits. Added to the exponent, it carries as it
// should. The minimum saturates but passes NaN. Then g is infinite, and the difference of the bits
// is the payload of a quiet NaN.
template <class F>
constexpr int16_t kCodeBias = (127 - F::kBias + 1) << F::kMantissaBits;

template <class F>
QSHARD_INLINE I32 MagnitudeCode(F32 v) {
  constexpr int kShift = 23 - F::kMantissaBits;
  const I32 min_normal = I32{} + ((127 - F::kBias + 1) << 23);
  const F32 a = Min(F32{} + F::kMax, (F32)((I32)v & kFloatMagnitudeMask));
  const I32 m = (I32)a;
  const I32 exponent = (m > min_normal ? m : min_normal) & kFloatInfinityBits;
  const F32 g = (F32)exponent * PowerOfTwo(kShift);
  return (I32)(a + g) - (I32)g + (exponent >> kShift);
}

// codes[i] = Encode(x[i] * scale of i) for i < kBlock, one code a byte.
//
// Saturating packs turn the code of NaN into 0x7F, which is FP8's NaN and no other result. From the
// bits of v they keep the sign, which is dropped for NaN.
template <class In, class Code>
QSHARD_INLINE void EncodeBlock(const In* x, const BlockScales& scales, uint8_t* codes) {
  static_assert(Code::kBits < 8 || Code::kNan == 0x7F);
  I16 v[2], code[2];
  for (int i = 0; i < 2; ++i) {
    const Pair wide = LoadPair(x + i * 2 * kLanes);
    const F32 a = wide.a * scales.pair[i].a, b = wide.b * scales.pair[i].b;
    v[i] = Pack((I32)a, (I32)b);
    code[i] = Pack(MagnitudeCode<Code>(a), MagnitudeCode<Code>(b)) - kCodeBias<Code>;
  }
  I8 magnitude = Pack(code[0], code[1]);
  I8 sign = Pack(v[0], v[1]) & INT8_MIN & (I8)(magnitude != 0x7F);
  if constexpr (Code::kBits < 8) {  // 0x7F becomes the largest code, which stands for NaN
    magnitude = magnitude < Code::kNan ? magnitude : I8{} + static_cast<int8_t>(Code::kNan);
    sign = (I8)((U16)sign >> (8 - Code::kBits));
  }
  if constexpr (kInputIndex<In> == kInputIndex<bfloat16>)
    Store(codes, LanesInOrder(magnitude | sign));
  else
    Store(codes, LanesInOrderTwice(magnitude | sign));
}

// Decodes to float16 up to a power of two, the difference of the two biases. Every value fits.
template <class Code>
QSHARD_INLINE I16 HalvesOf(HalfI8 codes) {
  const I16 c = WidenBytes(codes);
  static_assert(!Code::kInfinity || (Code::kMantissaBits == 2 && Code::kBias == 15),
                "an element with infinity must be the high byte of a float16");
  if constexpr (Code::kInfinity) return c << 8;
  constexpr int16_t kMagnitude = (1 << (Code::kBits - 1)) - 1;
  const I16 magnitude = c & kMagnitude;
  const I16 half =
      (magnitude << (10 - Code::kMantissaBits)) | ((c << (16 - Code::kBits)) & INT16_MIN);
  if constexpr (Code::kBits < 8) return half;
  return half | ((I16)(magnitude == Code::kNan) & 0x7E00);
}

template <class Code>
QSHARD_INLINE F32 DecodeHalves(HalfU16 halves) {
  const F32 v = FromHalf(halves);
  if constexpr (Code::kInfinity) return v;
  return v * PowerOfTwo(15 - Code::kBias);
}

QSHARD_INLINE F32 CanonicalNans(F32 v) { return v == v ? v : (F32)(I32{} + kNanBits); }

QSHARD_INLINE void StoreNarrow(F32 a, F32 b, float* x) {
  Store(x, CanonicalNans(a));
  Store(x + kLanes, CanonicalNans(b));
}

QSHARD_INLINE void StoreNarrow(F32 a, F32 b, float16* x) {
  Store(x, ToHalf(CanonicalNans(a)));
  Store(x + kLanes, ToHalf(CanonicalNans(b)));
}

QSHARD_INLINE I32 Bfloat16Of(F32 v) {
  const U32 u = (U32)v;
  const U32 rounded = u + 0x7FFF + ((u >> 16) & 1);
  return (I32)((v == v ? rounded : (U32)(I32{} + kNanBits)) >> 16);
}

QSHARD_INLINE void StoreNarrow(F32 a, F32 b, bfloat16* x) {
  Store(x, LanesInOrder(PackUnsigned(Bfloat16Of(a), Bfloat16Of(b))));
}

// x[i] = Narrow(Decode(codes[i]) * scale of i) for i < kBlock. Scales are in the order for float.
template <class Code, class Out>
QSHARD_INLINE void DecodeBlock(const uint8_t* codes, const BlockScales& scales, Out* x) {
  for (int i = 0; i < 2; ++i, codes += 2 * kLanes, x += 2 * kLanes) {
    const I16 h = HalvesOf<Code>(Load<HalfI8>(codes));
    HalfU16 halves[2];
    __builtin_memcpy(halves, &h, sizeof(h));
    StoreNarrow(DecodeHalves<Code>(halves[0]) * scales.pair[i].a,
                DecodeHalves<Code>(halves[1]) * scales.pair[i].b, x);
  }
}

// --- bytes ---

// Interleaving the bytes of the first and second half of the vectors rotates the bits of a byte's
// address (row, then column) left by one. Four rotations exchange the 16 rows and columns of each
// 16-byte lane. Lane l has rows 16 l + (0 .. 15), so each result is kVectorBytes of one column.
void TransposeTile(const uint8_t* __restrict in, int64_t in_stride, uint8_t* __restrict out,
                   int64_t out_stride) {
  for (int64_t i = 0; i < kByteTile; i += kVectorBytes) {
    for (int64_t j = 0; j < kByteTile; j += 16) {
      I8 v[16], w[16];
      const uint8_t* p = in + i * in_stride + j;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r, p += in_stride) v[r] = LoadLanes(p, 16 * in_stride);
#pragma GCC unroll 2
      for (int twice = 0; twice < 2; ++twice) {
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) {
          w[2 * r] = InterleaveLow(v[r], v[r + 8]);
          w[2 * r + 1] = InterleaveHigh(v[r], v[r + 8]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) {
          v[2 * r] = InterleaveLow(w[r], w[r + 8]);
          v[2 * r + 1] = InterleaveHigh(w[r], w[r + 8]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) Store(out + (j + r) * out_stride + i, v[r]);
    }
  }
}

// --- amax ---

// Blocks are short, so AVX-512 also uses 32 bytes at a time.
constexpr int kShortBytes = 32;
typedef int16_t I16x16 __attribute__((vector_size(kShortBytes)));
typedef int32_t I32x8 __attribute__((vector_size(kShortBytes)));

QSHARD_INLINE int32_t LargestLane(I16x16 v) {
  const __m128i h =
      _mm_max_epi16(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  // The only horizontal instruction is a minimum of unsigned numbers.
  return 0xFFFF ^ _mm_extract_epi16(_mm_minpos_epu16(h ^ _mm_set1_epi16(-1)), 0);
}

QSHARD_INLINE int32_t LargestLane(I32x8 v) {
  __m128i h =
      _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xB1)));
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_VECTORS_X86_H_
