// As Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication": a panel of the right matrix is
// copied to where it stays in the first cache, and multiplied by all rows of the left one, tile by tile.

#include "own_product.h"

#include <algorithm>
#include <cstring>

#include "buffer.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxnn {

#if defined(__x86_64__)

namespace {

constexpr int kLanes = 8, kHalves = kTileColumns / kLanes;
constexpr int64_t kDepth = 256;  // of a panel
using Eight = Vector<kLanes>;

// Adds the product of [rows, depth] and a panel [depth, 16] to the result, or writes it if it is the first.
template <int kRows>
JAXNN_AVX2 void multiply_tile(const Matrix& left, const float* panel, int64_t depth, bool is_first, float* result,
                              int64_t stride) {
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i) {  // what is written in the end may be far away
    __builtin_prefetch(result + i * stride, 1);
    __builtin_prefetch(result + i * stride + kTileColumns - 1, 1);
  }
  Eight sums[kRows][kHalves];
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i)
    JAXNN_UNROLL for (int j = 0; j < kHalves; ++j)
      sums[i][j] = is_first ? Eight{} : load<kLanes>(result + i * stride + j * kLanes);
  const float* from = left.data;
  const int64_t row = left.row_stride, step = left.column_stride;
  for (int64_t k = 0; k < depth; ++k, from += step, panel += kTileColumns) {
    const Eight first = load<kLanes>(panel), second = load<kLanes>(panel + kLanes);
    JAXNN_UNROLL for (int i = 0; i < kRows; ++i) {
      const Eight factor = from[i * row] - Eight{};  // with a sum, 0 + -0 would have to be computed
      sums[i][0] += factor * first;
      sums[i][1] += factor * second;
    }
  }
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i)
    JAXNN_UNROLL for (int j = 0; j < kHalves; ++j) store<kLanes>(sums[i][j], result + i * stride + j * kLanes);
}

using MultiplyTile = void (*)(const Matrix&, const float*, int64_t, bool, float*, int64_t);
constexpr MultiplyTile kMultiplyTile[kTileRows + 1] = {nullptr,          multiply_tile<1>, multiply_tile<2>,
                                                       multiply_tile<3>, multiply_tile<4>, multiply_tile<5>,
                                                       multiply_tile<6>};

// Eight rows of eight, `stride` apart, to rows of the panel.
JAXNN_AVX2 void transpose(const float* from, int64_t stride, float* panel) {
  __m256 rows[8], pairs[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      rows[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(panel + i * kTileColumns, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
    _mm256_storeu_ps(panel + (i + 4) * kTileColumns, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
  }
}

// Copies [depth, columns], of at most 16 columns, to the panel, with zeros behind.
JAXNN_AVX2 void copy_panel(const Matrix& right, int64_t depth, int64_t columns, float* panel) {
  int64_t k = 0;
  if (columns == kTileColumns && right.column_stride == 1)
    for (; k < depth; ++k)
      for (int j = 0; j < kHalves; ++j)
        store<kLanes>(load<kLanes>(right.data + k * right.row_stride + j * kLanes),
                      panel + k * kTileColumns + j * kLanes);
  else if (columns == kTileColumns && right.row_stride == 1)
    for (; k + kLanes <= depth; k += kLanes)
      for (int j = 0; j < kHalves; ++j)
        transpose(right.data + k + j * kLanes * right.column_stride, right.column_stride,
                  panel + k * kTileColumns + j * kLanes);
  for (; k < depth; ++k)
    for (int64_t j = 0; j < kTileColumns; ++j)
      panel[k * kTileColumns + j] = j < columns ? right.data[k * right.row_stride + j * right.column_stride] : 0;
}

// Fetches the lines `first` to `last`, of `depth` lines, of the panel that starts here into the caches.
void fetch_panel(const Matrix& right, int64_t first, int64_t last) {
  for (int64_t line = first; line < last; ++line) {
    const int64_t along = line / kTileColumns * kTileColumns, column = line % kTileColumns;
    __builtin_prefetch(right.data + (right.column_stride == 1 ? line * right.row_stride
                                                              : along + column * right.column_stride));
  }
}

// Copies [rows, depth] of a transposed matrix, whose rows are next to one another, to [rows / 6, depth, 6].
JAXNN_AVX2 void copy_left(const Matrix& left, int64_t rows, int64_t depth, float* tiles) {
  for (int64_t first = 0; first < rows; first += kTileRows, tiles += depth * kTileRows) {
    const float* from = left.data + first;
    const int64_t count = std::min<int64_t>(kTileRows, rows - first), step = left.column_stride;
    for (int64_t k = 0; k < depth; ++k) {
      float* to = tiles + k * kTileRows;
      if (count == kTileRows) std::memcpy(to, from + k * step, kTileRows * sizeof(float));
      else std::copy_n(from + k * step, count, to);
    }
  }
}

void multiply_avx2(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed,
                   float* result, int64_t stride) {
  thread_local Buffer kept_panel, kept_tiles;
  float* const panel = reinterpret_cast<float*>(kept_panel.reserve(kDepth * kTileColumns * sizeof(float)));
  const bool copies = left.column_stride != 1;
  float* tiles = nullptr;
  if (copies) tiles = reinterpret_cast<float*>(kept_tiles.reserve((rows + kTileRows) * kDepth * sizeof(float)));
  float edge[kTileRows * kTileColumns];
  for (int64_t k = 0; k < summed; k += kDepth) {
    const int64_t depth = std::min(kDepth, summed - k);
    const Matrix from{left.data + k * left.column_stride, left.row_stride, left.column_stride};
    if (copies) copy_left(from, rows, depth, tiles);
    for (int64_t column = 0; column < columns; column += kTileColumns) {
      const int64_t width = std::min<int64_t>(kTileColumns, columns - column);
      const float* const data = right.data + k * right.row_stride + column * right.column_stride;
      copy_panel({data, right.row_stride, right.column_stride}, depth, width, panel);
      const Matrix next{data + kTileColumns * right.column_stride, right.row_stride, right.column_stride};
      const int64_t lines = column + 2 * kTileColumns <= columns ? (depth * kTileRows + rows - 1) / rows : 0;
      for (int64_t row = 0; row < rows; row += kTileRows) {
        const int64_t line = row / kTileRows * lines;
        fetch_panel(next, std::min(line, depth), std::min(line + lines, depth));
        const int64_t height = std::min<int64_t>(kTileRows, rows - row);
        const Matrix tile = copies ? Matrix{tiles + row * depth, 1, kTileRows}
                                   : Matrix{from.data + row * left.row_stride, left.row_stride, 1};
        const auto multiply = kMultiplyTile[height];
        float* const to = result + row * stride + column;
        if (width == kTileColumns) {
          multiply(tile, panel, depth, k == 0, to, stride);
          continue;
        }
        if (k > 0)
          for (int64_t i = 0; i < height; ++i) std::copy_n(to + i * stride, width, edge + i * kTileColumns);
        multiply(tile, panel, depth, k == 0, edge, kTileColumns);
        for (int64_t i = 0; i < height; ++i) std::copy_n(edge + i * kTileColumns, width, to + i * stride);
      }
    }
  }
}

}  // namespace

OwnProduct own_product(Isa isa) { return isa == Isa::kAvx2 ? multiply_avx2 : nullptr; }

#else

OwnProduct own_product(Isa) { return nullptr; }

#endif

}  // namespace jaxnn
