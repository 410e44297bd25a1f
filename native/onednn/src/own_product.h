// Products of float32 matrices for AVX2 and AVX-512, of any strides.

#ifndef JAXNN_OWN_PRODUCT_H_
#define JAXNN_OWN_PRODUCT_H_

#include <cstdint>

#include "vectors.h"

namespace jaxnn {

// The element [row, column] is at row * row_stride + column * column_stride.
struct Matrix {
  const float* data;
  int64_t row_stride, column_stride;
};

struct OwnProduct {
  int tile_rows, tile_columns;  // of the result, that are summed in registers
  // The product of [rows, summed] and [summed, columns], to [rows, columns] of which rows are `stride` apart, or added
  // to what is there. Each element is summed in one order, so that its bits do not depend on how a product is cut into
  // blocks. Throws std::bad_alloc.
  void (*multiply)(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed,
                   float* result, int64_t stride, bool adds);
};

const OwnProduct* own_product(Isa isa);  // nullptr without these instructions

}  // namespace jaxnn

#endif  // JAXNN_OWN_PRODUCT_H_
