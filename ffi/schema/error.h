// Errors of ops: the operation, the argument, its value, the requirement and the remedy, as in
// "cast: x (int8) is not float32; cast it".
#ifndef QSHARD_SCHEMA_ERROR_H_
#define QSHARD_SCHEMA_ERROR_H_

#include <memory>
#include <sstream>
#include <string>

#include "core/exec.h"

namespace qshard {

// The Python exception that an error becomes.
enum class ErrorKind { kValue, kType, kInternal };

// An error, or null for success. Only an error allocates.
class [[nodiscard]] Error {
 public:
  Error() = default;
  Error(ErrorKind kind, std::string text) : what_(new What{kind, std::move(text)}) {}

  explicit operator bool() const { return what_ != nullptr; }
  ErrorKind kind() const { return what_->kind; }
  const std::string& text() const { return what_->text; }

 private:
  struct What {
    ErrorKind kind;
    std::string text;
  };
  std::unique_ptr<What> what_;
};

template <class... Parts>
Error MakeError(ErrorKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return Error(kind, text.str());
}
template <class... Parts>
Error ValueError(const Parts&... parts) {
  return MakeError(ErrorKind::kValue, parts...);
}
template <class... Parts>
Error TypeError(const Parts&... parts) {
  return MakeError(ErrorKind::kType, parts...);
}

#define QSHARD_REQUIRE(condition, ...) \
  if (!(condition)) return ::qshard::ValueError(__VA_ARGS__)

}  // namespace qshard

#endif  // QSHARD_SCHEMA_ERROR_H_
