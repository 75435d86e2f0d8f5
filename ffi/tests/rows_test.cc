// Prints the error of a malformed row, twice. tests/null/test_cpp.py compiles it with its own
// ops.def.
#include <cstdio>
#include <stdexcept>

#include "schema/pattern.h"

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
