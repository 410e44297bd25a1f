// As Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication": a panel of the right matrix is
// copied to where it stays in the first cache, and multiplied by all rows of the left one, tile by tile.

#include "product/own_product.h"

#include <algorithm>
#include <cstring>

#include "common/buffer.h"
#include "common/vectors.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace jaxnn {
namespace {

constexpr int64_t kDepth = 256;   // of a panel
constexpr int64_t kLine = 16;     // floats of a cache line
constexpr int kPanel = 2;         // vectors in a row of a panel

constexpr int tile_rows_of(int lanes) { return lanes == 16 ? 14 : 6; }  // as registers for sums allow

// Adds the product of [rows, depth] and a panel [depth, columns] to the result, or writes it if it is the first.
template <int kLanes, int kRows>
JAXNN_INLINE void multiply_tile(const Matrix& left, const float* panel, int64_t depth, bool is_first, float* result,
                                int64_t stride) {
  using V = Vector<kLanes>;
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i)  // what is written in the end may be far away
    JAXNN_UNROLL for (int j = 0; j < kPanel * kLanes; j += kLine) __builtin_prefetch(result + i * stride + j, 1);
  V sums[kRows][kPanel];
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i)
    JAXNN_UNROLL for (int j = 0; j < kPanel; ++j)
      sums[i][j] = is_first ? V{} : load<kLanes>(result + i * stride + j * kLanes);
  const float* from = left.data;
  const int64_t row = left.row_stride, step = left.column_stride;
  for (int64_t k = 0; k < depth; ++k, from += step, panel += kPanel * kLanes) {
    V parts[kPanel];
    JAXNN_UNROLL for (int j = 0; j < kPanel; ++j) parts[j] = load<kLanes>(panel + j * kLanes);
    JAXNN_UNROLL for (int i = 0; i < kRows; ++i) {
      const V factor = from[i * row] - V{};  // with a sum, 0 + -0 would have to be computed
      JAXNN_UNROLL for (int j = 0; j < kPanel; ++j) sums[i][j] += factor * parts[j];
    }
  }
  JAXNN_UNROLL for (int i = 0; i < kRows; ++i)
    JAXNN_UNROLL for (int j = 0; j < kPanel; ++j) store<kLanes>(sums[i][j], result + i * stride + j * kLanes);
}

// Copies rows of a transposed matrix, which are next to one another, to [depth, rows].
template <int kRows>
void copy_tile(const Matrix& left, int64_t depth, float* tile) {
  const float* from = left.data;
  for (int64_t k = 0; k < depth; ++k, from += left.column_stride, tile += kRows)
    std::memcpy(tile, from, kRows * sizeof(float));
}

// Calls body with `rows`, at most kMost, as a type.
template <int kMost, typename Body>
JAXNN_INLINE void with_rows(int64_t rows, const Body& body) {
  if (rows == kMost) return body(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_rows<kMost - 1>(rows, body);
}

#ifdef __x86_64__
// Eight rows of eight, `stride` apart, to rows of the panel, `width` apart.
__attribute__((target("avx2"))) inline void transpose(const float* from, int64_t stride, float* panel, int64_t width) {
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
    _mm256_storeu_ps(panel + i * width, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
    _mm256_storeu_ps(panel + (i + 4) * width, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
  }
}
#endif

// Copies [depth, columns] to a panel of `kColumns`, with zeros behind.
template <int kLanes>
JAXNN_INLINE void copy_panel(const Matrix& right, int64_t depth, int64_t columns, float* panel) {
  constexpr int kColumns = kPanel * kLanes;
  int64_t k = 0;
  if (columns == kColumns && right.column_stride == 1)
    for (; k < depth; ++k)
      for (int j = 0; j < kColumns; j += kLanes)
        store<kLanes>(load<kLanes>(right.data + k * right.row_stride + j), panel + k * kColumns + j);
#ifdef __x86_64__
  else if (kLanes >= 8 && columns == kColumns && right.row_stride == 1)
    for (; k + 8 <= depth; k += 8)
      for (int j = 0; j < kColumns; j += 8)
        transpose(right.data + k + j * right.column_stride, right.column_stride, panel + k * kColumns + j, kColumns);
#endif
  for (; k < depth; ++k)
    for (int64_t j = 0; j < kColumns; ++j)
      panel[k * kColumns + j] = j < columns ? right.data[k * right.row_stride + j * right.column_stride] : 0;
}

// Fetches the cache lines `first` to `last` of the panel that starts here into the caches.
template <int kColumns>
JAXNN_INLINE void fetch_panel(const Matrix& right, int64_t first, int64_t last) {
  constexpr int64_t kAcross = std::max<int64_t>(kColumns / kLine, 1);
  for (int64_t line = first; line < last; ++line)
    __builtin_prefetch(right.data + (right.column_stride == 1
                                         ? line / kAcross * right.row_stride + line % kAcross * kLine
                                         : line / kColumns * kLine + line % kColumns * right.column_stride));
}

template <int kLanes>
JAXNN_INLINE void multiply_blocks(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns,
                                  int64_t summed, float* result, int64_t stride, bool adds) {
  constexpr int kColumns = kPanel * kLanes, kTileRows = tile_rows_of(kLanes);
  thread_local Buffer kept_panel, kept_tiles;
  float* const panel = kept_panel.reserve(kDepth * kColumns);
  const bool copies = left.column_stride != 1;
  float* const tiles = copies ? kept_tiles.reserve(rows * kDepth) : nullptr;
  const auto multiply_by_panel = [&](int64_t height, Matrix tile, int64_t depth, bool is_first, float* to,
                                     int64_t stride) JAXNN_INLINED {
    with_rows<kTileRows>(height, [&](auto count) JAXNN_INLINED {
      constexpr int kRows = decltype(count)::value;
      compiled<kLanes>([=](auto) JAXNN_INLINED { multiply_tile<kLanes, kRows>(tile, panel, depth, is_first, to, stride); });
    });
  };
  // Tiles as high as the others: a low one has too few sums to fill the processor.
  const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows, tile_rows = (rows + num_tiles - 1) / num_tiles;
  float edge[kTileRows * kColumns];
  for (int64_t k = 0; k < summed; k += kDepth) {
    const int64_t depth = std::min(kDepth, summed - k);
    const float* const from = left.data + k * left.column_stride;
    const bool is_first = k == 0 && !adds;
    if (copies)
      for (int64_t row = 0; row < rows; row += tile_rows)
        with_rows<kTileRows>(std::min(tile_rows, rows - row), [&](auto count) JAXNN_INLINED {
          copy_tile<decltype(count)::value>({from + row, 1, left.column_stride}, depth, tiles + row * depth);
        });
    for (int64_t column = 0; column < columns; column += kColumns) {
      const int64_t width = std::min<int64_t>(kColumns, columns - column);
      const float* const data = right.data + k * right.row_stride + column * right.column_stride;
      copy_panel<kLanes>({data, right.row_stride, right.column_stride}, depth, width, panel);
      const Matrix next{data + kColumns * right.column_stride, right.row_stride, right.column_stride};
      const int64_t lines = column + 2 * kColumns <= columns ? depth * kColumns / kLine : 0;
      const int64_t each = (lines + num_tiles - 1) / num_tiles;
      int64_t line = 0;
      for (int64_t row = 0; row < rows; row += tile_rows, line += each) {
        fetch_panel<kColumns>(next, std::min(line, lines), std::min(line + each, lines));
        const int64_t height = std::min(tile_rows, rows - row);
        const Matrix tile = copies ? Matrix{tiles + row * depth, 1, height}
                                   : Matrix{from + row * left.row_stride, left.row_stride, 1};
        float* const to = result + row * stride + column;
        if (width == kColumns) {
          multiply_by_panel(height, tile, depth, is_first, to, stride);
          continue;
        }
        if (!is_first)
          for (int64_t i = 0; i < height; ++i) std::copy_n(to + i * stride, width, edge + i * kColumns);
        multiply_by_panel(height, tile, depth, is_first, edge, kColumns);
        for (int64_t i = 0; i < height; ++i) std::copy_n(edge + i * kColumns, width, to + i * stride);
      }
    }
  }
}

}  // namespace

void multiply(const Matrix& left, const Matrix& right, int64_t rows, int64_t columns, int64_t summed, float* result,
              int64_t stride, bool adds) {
  vectorized([=](auto lanes) JAXNN_INLINED {
    multiply_blocks<decltype(lanes)::value>(left, right, rows, columns, summed, result, stride, adds);
  });
}

TileSize tile_size() {
  const int lanes = num_lanes();
  return {tile_rows_of(lanes), kPanel * lanes};
}

}  // namespace jaxnn
