// Products of float32 matrices for AVX2, where oneDNN's reach half of the processor's peak.

#ifndef JAXNN_OWN_PRODUCT_H_
#define JAXNN_OWN_PRODUCT_H_

#include <cstdint>

#include "vectors.h"

namespace jaxnn {

constexpr int kTileRows = 6, kTileColumns = 16;  // of the result, that are summed in registers

// The element [row, column] is at row * row_stride + column * column_stride.
struct Matrix {
  const float* data;
  int64_t row_stride, column_stride;
};

// The product of [rows, summed] and [summed, columns], to [rows, columns] of which rows are `stride` apart. Each element
// is summed in one order, so that its bits do not depend on how a product is cut into blocks. Throws std::bad_alloc.
using OwnProduct = void (*)(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed,
                            float* result, int64_t stride);
OwnProduct own_product(Isa isa);  // nullptr for instructions with which oneDNN is faster

}  // namespace jaxnn

#endif  // JAXNN_OWN_PRODUCT_H_
