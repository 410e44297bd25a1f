// Products of float32 matrices, of any strides.

#pragma once

#include <cstdint>

namespace jaxnn {

// The element [row, column] is at row * row_stride + column * column_stride.
struct Matrix {
  const float* data;
  int64_t row_stride, column_stride;
};

// The product of [rows, summed] and [summed, columns], none of which is 0, to [rows, columns] whose rows are `stride`
// apart, or added to what is there. Each element is summed in one order, so that its bits do not depend on how a product
// is cut into blocks. Throws std::bad_alloc.
void multiply(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed, float* result,
              int64_t stride, bool adds);

// The rows and columns of the result that are summed in registers.
struct TileSize {
  int64_t rows, columns;
};
TileSize tile_size();

}  // namespace jaxnn
