// Formats and their constants. Only this file and its Python mirror qshard/formats.py may spell
// these numbers. Tests compare both with each other and with ml_dtypes.
//
// Traits of a format F:
//   kBits          storage bits of one code
//   kExponentBits, kMantissaBits, kBias
//   kMax           largest finite value, and the value that encoding saturates to
//   kNan           code of an encoded NaN (formats below 8 bits have no NaN and use +max)
//   kInfinity      true if codes with a full exponent field decode as inf and NaN
//   kName          the ml_dtypes name, also used in attributes and Python
// E8M0 is a scale format, not an element format: value 2^(byte - 127), no sign, no zero.
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

// Input types besides float32. They are plain structs: values are widened exactly, and arithmetic
// is fp32.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  static constexpr float kMax = 65504.0f;
  uint16_t bits;
};

template <class F>
constexpr int64_t kCodesPerByte = F::kBits <= 4 ? 2 : 1;

// NVFP4: E2M1 in blocks of 1 x 16 or 16 x 16. The largest block of a tensor, or row, gets scale
// E4M3::kMax. With four over six it gets kNvfp4SmallScaleMax, which leaves room for a candidate 1.5
// times as large.
constexpr int kNvfp4Block = 16;
constexpr float kNvfp4SmallScaleMax = 256.0f;

// --- X-macro lists. Each calls X with the arguments after X and then one entry, so lists nest:
// QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, X, Cast) expands to X(Cast, float, E4M3) X(Cast,
// float, E5M2) X(Cast, bfloat16, E4M3) and so on. ---

// Input types of quantization, and output types of dequantization.
#define QSHARD_FOR_EACH_INPUT(X, ...) \
  X(__VA_ARGS__, float) X(__VA_ARGS__, bfloat16) X(__VA_ARGS__, float16)

// 8-bit elements, the only ones allowed with one scale per tensor.
#define QSHARD_FOR_EACH_FP8(X, ...) X(__VA_ARGS__, E4M3) X(__VA_ARGS__, E5M2)

// Elements stored in one byte each.
#define QSHARD_FOR_EACH_BYTE_ELEMENT(X, ...) \
  QSHARD_FOR_EACH_FP8(X, __VA_ARGS__) X(__VA_ARGS__, E2M3) X(__VA_ARGS__, E3M2)

// All elements. Every one can be used in blocks.
#define QSHARD_FOR_EACH_ELEMENT(X, ...) \
  QSHARD_FOR_EACH_BYTE_ELEMENT(X, __VA_ARGS__) X(__VA_ARGS__, E2M1)

// All formats that can be encoded without a scale.
#define QSHARD_FOR_EACH_CODE(X, ...) QSHARD_FOR_EACH_ELEMENT(X, __VA_ARGS__) X(__VA_ARGS__, E8M0)

// Pairs of an element and its block scale type, passed as `Float` for fp32 and `PowerOfTwo` for
// E8M0. NVFP4 is not listed, because its scales also need a global scale.
#define QSHARD_FOR_EACH_BLOCK_FORMAT(Float, PowerOfTwo, X, ...) \
  QSHARD_FOR_EACH_FP8(QSHARD_WITH, Float, X, __VA_ARGS__)       \
  QSHARD_FOR_EACH_ELEMENT(QSHARD_WITH, PowerOfTwo, X, __VA_ARGS__)
#define QSHARD_WITH(Last, X, ...) X(__VA_ARGS__, Last)

}  // namespace qshard

#endif  // QSHARD_CORE_FORMAT_H_
