// The formats. This file, and its Python mirror qshard/formats.py, are the only places that may
// spell a format's numbers; tests hold both against each other and ml_dtypes.
//
// Traits of a format F:
//   kBits          storage bits of one code
//   kExponentBits, kMantissaBits, kBias
//   kMax           largest finite value; what encoding saturates to
//   kNan           code of NaN as encoded (E2M1 has no NaN: +max stands in)
//   kInfinity      true if codes with a full exponent field decode as inf and NaN
//   kName          the ml_dtypes name, as attributes and Python spell it
// E8M0 is a scale, not an element: its value is 2^(byte - 127), it has no sign and no zero.
#ifndef QSHARD_CORE_FORMAT_H_
#define QSHARD_CORE_FORMAT_H_

#include <cstdint>

namespace qshard {

struct E4M3 {
  static constexpr const char* kName = "float8_e4m3fn";
  static constexpr int kBits = 8, kExponentBits = 4, kMantissaBits = 3, kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint8_t kNan = 0x7F;
  static constexpr bool kInfinity = false;
};

struct E5M2 {
  static constexpr const char* kName = "float8_e5m2";
  static constexpr int kBits = 8, kExponentBits = 5, kMantissaBits = 2, kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint8_t kNan = 0x7F;
  static constexpr bool kInfinity = true;
};

struct E2M1 {
  static constexpr const char* kName = "float4_e2m1fn";
  static constexpr int kBits = 4, kExponentBits = 2, kMantissaBits = 1, kBias = 1;
  static constexpr float kMax = 6.0f;
  static constexpr uint8_t kNan = 0x7;
  static constexpr bool kInfinity = false;
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

// The lists from which tables and choices of types are made: X(type). A code has a byte to itself,
// or two share one.
#define QSHARD_FOR_UNPACKED_ELEMENTS(X) X(E4M3) X(E5M2)
#define QSHARD_FOR_PACKED_ELEMENTS(X) X(E2M1)
#define QSHARD_FOR_ELEMENTS(X) QSHARD_FOR_UNPACKED_ELEMENTS(X) QSHARD_FOR_PACKED_ELEMENTS(X)
#define QSHARD_FOR_FORMATS(X) QSHARD_FOR_ELEMENTS(X) X(E8M0)
#define QSHARD_FOR_FLOATS(X) X(float) X(bfloat16) X(float16)

template <class F>
constexpr int64_t kCodesPerByte = F::kBits <= 4 ? 2 : 1;

// NVFP4: E2M1 in blocks of 1 x 16 or 16 x 16. The largest block of a tensor, or row, gets the scale
// E4M3::kMax, or this one, which leaves room for the 1.5 times it that four over six tries.
constexpr int kNvfp4Block = 16;
constexpr float kNvfp4SmallScaleMax = 256.0f;

}  // namespace qshard

#endif  // QSHARD_CORE_FORMAT_H_
