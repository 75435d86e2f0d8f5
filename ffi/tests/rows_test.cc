// What is said of rows that are not well written. tests/null/test_cpp.py compiles it with an ops.def
// of its own.
#include <cstdio>
#include <stdexcept>

#include "core/pattern.h"

int main() {
  for (int again = 0; again < 2; ++again) {
    try {
      qshard::RowOf({});
    } catch (const std::invalid_argument& e) {
      std::puts(e.what());
      continue;
    }
    return 1;
  }
}
