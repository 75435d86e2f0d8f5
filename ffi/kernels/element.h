#ifndef QSHARD_KERNELS_ELEMENT_H_
#define QSHARD_KERNELS_ELEMENT_H_

#include "core/exec.h"
#include "core/format.h"

namespace qshard::kernels {

// One code a byte, no scale: codes[i] = Encode<Code>(x[i]) (E8M0: rounded up), x[i] =
// Decode<Code>(codes[i]).
template <class In, class Code>
Status EncodeElements(const Exec<Cpu>& exec, const In* x, int64_t n, uint8_t* codes);
template <class In, class Code>
Status EncodeElements(const Exec<Cuda>& exec, const In* x, int64_t n, uint8_t* codes);

template <class Code>
Status DecodeElements(const Exec<Cpu>& exec, const uint8_t* codes, int64_t n, float* x);
template <class Code>
Status DecodeElements(const Exec<Cuda>& exec, const uint8_t* codes, int64_t n, float* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ELEMENT_H_
