// Rows of ops.def as Python sees them.
#ifndef QSHARD_HOST_ROWS_H_
#define QSHARD_HOST_ROWS_H_

#include <nanobind/nanobind.h>

namespace qshard::host {

// Adds the classes Row and Operand, and the function `ops`.
void DefineRows(nanobind::module_& m);

}  // namespace qshard::host

#endif  // QSHARD_HOST_ROWS_H_
