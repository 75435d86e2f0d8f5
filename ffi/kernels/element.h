#ifndef QSHARD_KERNELS_ELEMENT_H_
#define QSHARD_KERNELS_ELEMENT_H_

#include "kernels/launcher.h"

namespace qshard::kernels {

// One code a byte, no scale: codes[i] = Encode<Code>(x[i]) (E8M0: rounded up), x[i] =
// Decode<Code>(codes[i]).
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), EncodeElements, const In* x, int64_t n,
                         uint8_t* codes);

QSHARD_LAUNCHER_TEMPLATE((class Code), DecodeElements, const uint8_t* codes, int64_t n, float* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ELEMENT_H_
