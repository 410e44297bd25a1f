// Products of two matrices, of which one may be transposed: those of a dense layer and its gradients.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/call.h"

namespace jaxnn {

// The product of [rows, summed] and [summed, columns], of which one may be there as its transpose: [rows, columns].
struct ProductSize {
  enum Transposed { kNone, kLeft, kRight };

  int64_t summed, rows, columns;
  Transposed transposed;

  // Of a row and of a column.
  std::array<int64_t, 2> left_strides() const {
    return transposed == kLeft ? std::array<int64_t, 2>{1, rows} : std::array<int64_t, 2>{summed, 1};
  }
  std::array<int64_t, 2> right_strides() const {
    return transposed == kRight ? std::array<int64_t, 2>{1, summed} : std::array<int64_t, 2>{columns, 1};
  }
};

// A product cut into blocks of `rows` by `columns`; those at the ends may be smaller.
struct Blocks {
  int64_t rows, columns;

  // `parts` or a multiple, of at most `most_rows`, and no more than the work is worth.
  Blocks(const ProductSize& size, int64_t parts, int64_t most_rows, int64_t row_unit, int64_t column_unit) {
    constexpr int64_t kWork = 1 << 19;  // multiplications worth a thread
    const auto over = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    parts = std::clamp<int64_t>(size.summed * size.rows * size.columns / kWork, 1, parts);
    int64_t by_rows = over(size.rows, most_rows), by_columns = 1;
    if (size.rows >= size.columns || by_rows >= parts) by_rows = over(by_rows, parts) * parts;
    else by_columns = over(parts, by_rows);
    rows = std::min(over(over(size.rows, by_rows), row_unit) * row_unit, size.rows);
    columns = std::min(over(over(size.columns, by_columns), column_unit) * column_unit, size.columns);
  }
};

// Calls body(left, right, result, rows, columns) for each block of each member; arrays of members follow each other.
template <typename Body>
void for_each_block(Pool& pool, const ProductSize& size, const Blocks& cut, int64_t bytes,
                    const std::array<char*, 3>& arrays, int64_t members, const Body& body) {
  const int64_t left_row = size.left_strides()[0], right_column = size.right_strides()[1];
  const int64_t across = (size.columns + cut.columns - 1) / cut.columns;
  const int64_t blocks = (size.rows + cut.rows - 1) / cut.rows * across;
  parallel_for(pool, members * blocks, [&](int64_t index) {
    const int64_t member = index / blocks, row = index % blocks / across * cut.rows;
    const int64_t column = index % across * cut.columns;
    body(arrays[0] + (member * size.summed * size.rows + row * left_row) * bytes,
         arrays[1] + (member * size.summed * size.columns + column * right_column) * bytes,
         arrays[2] + ((member * size.rows + row) * size.columns + column) * bytes, std::min(cut.rows, size.rows - row),
         std::min(cut.columns, size.columns - column));
  });
}

// Computes `members` products of one size by oneDNN. Operands are not written to. Throws dnnl::error and std::bad_alloc.
void multiply_by_onednn(Pool& pool, const ProductSize& size, Type type, const std::array<char*, 3>& arrays,
                        int64_t members);

}  // namespace jaxnn
