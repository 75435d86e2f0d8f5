#ifndef QSHARD_HOST_SMALL_ARRAY_H_
#define QSHARD_HOST_SMALL_ARRAY_H_

#include <array>
#include <cstddef>
#include <memory>

namespace qshard::host {

// Fixed-size array that allocates only if it has more than kShort elements. Elements are
// uninitialized.
template <class T>
class SmallArray {
 public:
  explicit SmallArray(size_t size) : more_(size > kShort ? new T[size] : nullptr) {}
  T* data() { return more_ ? more_.get() : few_.data(); }
  T& operator[](size_t i) { return data()[i]; }

 private:
  static constexpr size_t kShort = 16;
  std::array<T, kShort> few_;
  std::unique_ptr<T[]> more_;
};

}  // namespace qshard::host

#endif  // QSHARD_HOST_SMALL_ARRAY_H_
