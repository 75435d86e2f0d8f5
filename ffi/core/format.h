// The formats. This file, and its Python mirror qshard/formats.py, are the only places that may
// spell a format's numbers; tests hold both against each other and ml_dtypes.
//
// Traits of a format F:
//   kBits          storage bits of one code
//   kExponentBits, kMantissaBits, kBias
//   kMax           largest finite value; what encoding saturates to
//   kNan           code of NaN as encoded (below 8 bits there is no NaN: +max stands in)
//   kInfinity      true if codes with a full exponent field decode as inf and NaN
//   kName          the ml_dtypes name, as attributes and Python spell it
// E8M0 is a scale, not an element: its value is 2^(byte - 127), it has no sign and no zero.
#ifndef QSHARD_CORE_FORMAT_H_
#define QSHARD_CORE_FORMAT_H_

#include <cstdint>

namespace qshard {

template <int kExponent, int kMantissa>
struct Element {
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr int kExponentBits = kExponent, kMantissaBits = kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint8_t kNan = (1 << (kBits - 1)) - 1;
  static constexpr bool kInfinity = false;
};

struct E4M3 : Element<4, 3> {
  static constexpr const char* kName = "float8_e4m3fn";
  static constexpr float kMax = 448.0f;
};

struct E5M2 : Element<5, 2> {
  static constexpr const char* kName = "float8_e5m2";
  static constexpr float kMax = 57344.0f;
  static constexpr bool kInfinity = true;
};

struct E2M3 : Element<2, 3> {
  static constexpr const char* kName = "float6_e2m3fn";
  static constexpr float kMax = 7.5f;
};

struct E3M2 : Element<3, 2> {
  static constexpr const char* kName = "float6_e3m2fn";
  static constexpr float kMax = 28.0f;
};

struct E2M1 : Element<2, 1> {
  static constexpr const char* kName = "float4_e2m1fn";
  static constexpr float kMax = 6.0f;
};

struct E8M0 {
  static constexpr const char* kName = "float8_e8m0fnu";
  static constexpr int kBits = 8, kExponentBits = 8, kMantissaBits = 0, kBias = 127;
  static constexpr float kMax = 0x1p127f;
  static constexpr uint8_t kMaxCode = 0xFE;
  static constexpr uint8_t kNan = 0xFF;
  static constexpr bool kInfinity = false;
};

// Inputs that are not float32. Plain structs: arithmetic happens in fp32, after an exact widening.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  static constexpr float kMax = 65504.0f;
  uint16_t bits;
};

template <class F>
constexpr int64_t kCodesPerByte = F::kBits <= 4 ? 2 : 1;

// NVFP4: E2M1 in blocks of 1 x 16 or 16 x 16. The largest block of a tensor, or row, gets the scale
// E4M3::kMax, or this one, which leaves room for the 1.5 times it that four over six tries.
constexpr int kNvfp4Block = 16;
constexpr float kNvfp4SmallScaleMax = 256.0f;

// --- lists: what there is of a kind, once. Each calls X with what follows X and then with an
// entry, so that lists nest: QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, X, Cast) is X(Cast, float,
// E4M3) X(Cast, float, E5M2) X(Cast, bfloat16, E4M3) and so on. ---

// What is quantized, and dequantized to.
#define QSHARD_FOR_EACH_INPUT(X, ...) \
  X(__VA_ARGS__, float) X(__VA_ARGS__, bfloat16) X(__VA_ARGS__, float16)

// Elements of 8 bits, which may have one scale for a whole tensor.
#define QSHARD_FOR_EACH_FP8(X, ...) X(__VA_ARGS__, E4M3) X(__VA_ARGS__, E5M2)

// Elements that are stored in a byte each, of blocks at least.
#define QSHARD_FOR_EACH_BYTE_ELEMENT(X, ...) \
  QSHARD_FOR_EACH_FP8(X, __VA_ARGS__) X(__VA_ARGS__, E2M3) X(__VA_ARGS__, E3M2)

// All elements: those of blocks.
#define QSHARD_FOR_EACH_ELEMENT(X, ...) \
  QSHARD_FOR_EACH_BYTE_ELEMENT(X, __VA_ARGS__) X(__VA_ARGS__, E2M1)

// All that can be a code of its own, without a scale.
#define QSHARD_FOR_EACH_CODE(X, ...) QSHARD_FOR_EACH_ELEMENT(X, __VA_ARGS__) X(__VA_ARGS__, E8M0)

// Elements and a scale that their blocks may have, in a word for fp32 and one for E8M0. NVFP4,
// whose scales are not complete by themselves, is not among them.
#define QSHARD_FOR_EACH_BLOCK_FORMAT(Float, PowerOfTwo, X, ...) \
  QSHARD_FOR_EACH_FP8(QSHARD_WITH, Float, X, __VA_ARGS__)       \
  QSHARD_FOR_EACH_ELEMENT(QSHARD_WITH, PowerOfTwo, X, __VA_ARGS__)
#define QSHARD_WITH(Last, X, ...) X(__VA_ARGS__, Last)

}  // namespace qshard

#endif  // QSHARD_CORE_FORMAT_H_
