// Tests of GroupTiles: each group has the tiles that SwizzleScale would give its scales alone, and
// no tile of another.
#include "kernels/group_tiles.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (condition) break;                                                \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                        \
  } while (false)

namespace qshard::kernels {
namespace {

constexpr uint8_t kUnwritten = 0xEE;

// Scale of row `row` and column `col` of a group, or 0 outside it.
struct Group {
  const uint8_t* from;
  int64_t rows, cols, row_step, col_step, repeat;

  uint8_t At(int64_t row, int64_t col) const {
    return row < rows && col < cols ? from[row / repeat * row_step + col * col_step] : 0;
  }
};

// Checks the tiles of a group, and marks them. Formula: cuBLAS documentation, "1D Block Scaling
// Factors Layout".
void CheckGroup(const std::vector<uint8_t>& tiles, int64_t offset, const Group& group,
                std::vector<bool>* taken) {
  const int64_t across = (group.cols + 3) / 4;
  for (int64_t row = 0; row < (group.rows + 127) / 128 * 128; ++row)
    for (int64_t col = 0; col < across * 4; ++col) {
      const int64_t at = offset + (row / 128 * across + col / 4) * 512 + row % 32 * 16 +
                         row % 128 / 32 * 4 + col % 4;
      CHECK(at < static_cast<int64_t>(tiles.size()));
      CHECK(tiles[at] == group.At(row, col));
      CHECK(!(*taken)[at]);
      (*taken)[at] = true;
    }
}

void CheckTiles(GroupTiles tiles, const std::vector<int32_t>& stops) {
  const int64_t grid_rows = CeilDiv(tiles.rows, tiles.repeat), each = grid_rows * tiles.cols;
  std::vector<uint8_t> from(each * (tiles.divided == GroupTiles::kMatrices ? tiles.groups : 1));
  std::mt19937 random(1);
  for (uint8_t& scale : from) scale = static_cast<uint8_t>(1 + random() % 200);
  std::vector<uint32_t> words(tiles.Words() + 1, kUnwritten * 0x01010101u);
  tiles.from = from.data();
  tiles.to = reinterpret_cast<uint8_t*>(words.data());
  for (int64_t word = 0; word < tiles.Words(); ++word) tiles.Move(word, stops.data());
  CHECK(words.back() == kUnwritten * 0x01010101u);
  const std::vector<uint8_t> made(tiles.to, tiles.to + tiles.Tiles() * GroupTiles::kBytes);
  std::vector<bool> taken(made.size());
  const int64_t row_step = tiles.k_first ? 1 : tiles.cols;
  const int64_t col_step = tiles.k_first ? tiles.rows : 1;
  for (int group = 0; group < tiles.groups; ++group) {
    const int64_t start = StartOf(stops.data(), group) / tiles.block;
    const int64_t stop = stops[group] / tiles.block;
    Group own{from.data(), tiles.rows, tiles.cols, row_step, col_step, tiles.repeat};
    if (tiles.divided == GroupTiles::kMatrices) {
      own.from += group * each;
    } else if (tiles.divided == GroupTiles::kRows) {
      own.from += start * row_step;
      own.rows = stop - start;
    } else {
      own.from += start * col_step;
      own.cols = stop - start;
    }
    const uint8_t* const address = tiles.Address(stops.data(), group);
    CheckGroup(made, address - tiles.to, own, &taken);
  }
}

// Sizes of groups, in scales of the divided axis: some empty, some a whole tile, and rows of none.
void CheckSizes(const std::vector<int32_t>& sizes, int32_t rest, int32_t block) {
  std::vector<int32_t> stops;
  int32_t stop = 0;
  for (const int32_t size : sizes) stops.push_back(stop += size * block);
  const int64_t length = stop / block + rest;
  GroupTiles tiles{};
  tiles.groups = static_cast<int>(sizes.size());
  tiles.repeat = 1;
  tiles.block = 1;
  if (block == 1)
    for (const int64_t cols : {1, 4, 7}) {
      tiles.divided = GroupTiles::kRows;
      tiles.rows = length;
      tiles.cols = cols;
      CheckTiles(tiles, stops);
    }
  for (const bool k_first : {false, true})
    for (const int64_t rows : {16, 128, 272}) {
      tiles.divided = GroupTiles::kCols;
      tiles.k_first = k_first;
      tiles.block = block;
      tiles.rows = rows;
      tiles.cols = length;
      CheckTiles(tiles, stops);
    }
  tiles.divided = GroupTiles::kMatrices;
  tiles.k_first = false;
  for (const int64_t repeat : {1, 16, 32}) {
    tiles.repeat = repeat;
    tiles.rows = 144;
    tiles.cols = 6;
    CheckTiles(tiles, stops);
  }
}

}  // namespace
}  // namespace qshard::kernels

int main() {
  for (const int32_t block : {1, 16, 32})
    for (const int32_t rest : {0, 3, 200})
      for (const std::vector<int32_t>& sizes : {std::vector<int32_t>{5},
                                                {0, 0, 1},
                                                {128, 4, 0, 124, 1},
                                                {127, 2, 127, 2, 0, 0, 300, 4},
                                                {3, 1, 3, 1, 3, 1, 2, 6},
                                                {0, 0, 0}})
        qshard::kernels::CheckSizes(sizes, rest, block);
  std::puts("passed");
}
