// Assigns padded rows to experts on the CPU.
#include "kernels/group_rows.h"

#include <algorithm>

namespace qshard::kernels {

Status GroupRows(const Exec<Cpu>&, const RowGroups& g) {
  int64_t end = 0, stop = 0;
  bool fits = true;
  for (int64_t e = 0; e < g.experts; ++e) {
    const int64_t rows = RowsThatFit(g.sizes[e], end, g.tokens);
    const int64_t padded = PaddedRows(rows, g.tile_rows);
    fits &= rows == g.sizes[e];
    for (int64_t i = 0; i < rows; ++i) {
      g.rows[stop + i] = static_cast<int32_t>(end + i);
      g.place[end + i] = static_cast<int32_t>(stop + i);
    }
    std::fill(g.rows + stop + rows, g.rows + stop + padded, static_cast<int32_t>(g.tokens));
    g.ends[e] = static_cast<int32_t>(end += rows);
    g.stops[e] = static_cast<int32_t>(stop += padded);
  }
  std::fill(g.rows + stop, g.rows + g.padded, static_cast<int32_t>(g.tokens));
  std::fill(g.place + end, g.place + g.tokens, static_cast<int32_t>(g.padded - 1));
  *g.fits = fits;
  return {};
}

}  // namespace qshard::kernels
