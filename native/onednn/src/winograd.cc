// Winograd's convolutions of the tiles of one thread, once for each width of vectors.

#include "winograd.h"

namespace jaxnn {
namespace {

constexpr int kTiles = Tiling::kTiles;

// The transformed kernel as panels [16, in, kWidth] of kWidth outputs: two vectors, but for the last maybe one.
template <int kLanes>
JAXNN_INLINE int64_t panel_width(int64_t out, int64_t first) {
  return out - first >= 2 * kLanes ? 2 * kLanes : kLanes;
}

template <int kLanes>
JAXNN_INLINE void transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last, float* to) {
  using V = Vector<kLanes>;
  const int64_t out = flipped ? g.in : g.out, size = g.in * g.out;  // of the kernel
  for (int64_t i = first; i < last; ++i) {
    for (int64_t o = 0; o < out; o += kLanes) {
      V rows[4][3], all[4][4];
      JAXNN_UNROLL for (int x = 0; x < 3; ++x) {
        V k[3];
        JAXNN_UNROLL for (int y = 0; y < 3; ++y) k[y] = load<kLanes>(kernel + (3 * y + x) * size + i * out + o);
        const V outer = k[0] + k[2];
        rows[0][x] = k[0], rows[1][x] = (outer + k[1]) * 0.5f, rows[2][x] = (outer - k[1]) * 0.5f, rows[3][x] = k[2];
      }
      JAXNN_UNROLL for (int y = 0; y < 4; ++y) {
        const V *k = rows[y], outer = k[0] + k[2];
        all[y][0] = k[0], all[y][1] = (outer + k[1]) * 0.5f, all[y][2] = (outer - k[1]) * 0.5f, all[y][3] = k[2];
      }
      for (int place = 0; place < Tiling::kPlaces; ++place) {
        const V& values = all[place / 4][place % 4];
        if (!flipped) {
          const int64_t width = 2 * kLanes, panel = o / width * width, wide = panel_width<kLanes>(out, panel);
          store<kLanes>(values, to + Tiling::kPlaces * g.in * panel + (place * g.in + i) * wide + (o - panel));
        } else {  // flipping exchanges the first and the last row and column
          constexpr int kFlip[] = {3, 1, 2, 0};
          const int64_t width = 2 * kLanes, panel = i / width * width, wide = panel_width<kLanes>(g.out, panel);
          const int at = kFlip[place / 4] * 4 + kFlip[place % 4];
          float* const column = to + Tiling::kPlaces * g.in * panel + (at * g.in + o) * wide + (i - panel);
          for (int lane = 0; lane < kLanes; ++lane) column[lane * wide] = values[lane];
        }
      }
    }
  }
}

// Where a tile is: its image, row and column.
struct Place {
  int64_t image, row, column;

  JAXNN_INLINE Place(const Tiling& g, int64_t tile)
      : image(tile / (g.rows() * g.columns())), row(tile / g.columns() % g.rows()), column(tile % g.columns()) {}
  JAXNN_INLINE void advance(const Tiling& g) {
    if (++column < g.columns()) return;
    column = 0;
    if (++row == g.rows()) row = 0, ++image;
  }
};

// Of `count` tiles, the transformed inputs as [16, in / kLanes, kTiles, kLanes]. `zeros` are as many as features.
template <int kLanes>
JAXNN_INLINE void transform_inputs(const Tiling& g, const float* input, Place place, int64_t count, const float* zeros,
                                   float* to) {
  using V = Vector<kLanes>;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    const int64_t top = 2 * place.row - g.top, left = 2 * place.column - g.left;
    const float* at[4][4];
    const float* const corner = input + ((place.image * g.height + top) * g.width + left) * g.in;
    if (top >= 0 && left >= 0 && top + 4 <= g.height && left + 4 <= g.width) {
      JAXNN_UNROLL for (int y = 0; y < 4; ++y)
        JAXNN_UNROLL for (int x = 0; x < 4; ++x) at[y][x] = corner + (y * g.width + x) * g.in;
    } else {
      for (int y = 0; y < 4; ++y)
        for (int x = 0; x < 4; ++x) {
          const bool inside = top + y >= 0 && top + y < g.height && left + x >= 0 && left + x < g.width;
          at[y][x] = inside ? corner + (y * g.width + x) * g.in : zeros;
        }
    }
    for (int64_t feature = 0; feature < g.in; feature += kLanes) {
      JAXNN_UNROLL for (int y = 4; y < 6; ++y)  // for the tile below
        JAXNN_UNROLL for (int x = 1; x < 3; ++x) __builtin_prefetch(corner + (y * g.width + x) * g.in + feature);
      V rows[4][4];
      JAXNN_UNROLL for (int x = 0; x < 4; ++x) {
        V d[4];
        JAXNN_UNROLL for (int y = 0; y < 4; ++y) d[y] = load<kLanes>(at[y][x] + feature);
        rows[0][x] = d[0] - d[2], rows[1][x] = d[1] + d[2], rows[2][x] = d[2] - d[1], rows[3][x] = d[1] - d[3];
      }
      float* const first = to + feature * kTiles + tile * kLanes;
      JAXNN_UNROLL for (int y = 0; y < 4; ++y) {
        const V* d = rows[y];
        const V all[] = {d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]};
        JAXNN_UNROLL for (int x = 0; x < 4; ++x) store<kLanes>(all[x], first + (4 * y + x) * kTiles * g.in);
      }
    }
  }
}

// The products of kRows tiles with a panel [depth, kColumns, kLanes].
template <int kLanes, int kRows, int kColumns>
JAXNN_INLINE void multiply(const float* tiles, const float* panel, int64_t depth, float* to) {
  using V = Vector<kLanes>;
  V sums[kRows][kColumns] = {};
  for (int64_t feature = 0; feature < depth; feature += kLanes, tiles += kTiles * kLanes)
    for (int lane = 0; lane < kLanes; ++lane, panel += kColumns * kLanes) {
      V columns[kColumns];
      JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) columns[c] = load<kLanes>(panel + c * kLanes);
      JAXNN_UNROLL for (int r = 0; r < kRows; ++r) {
        const float x = tiles[r * kLanes + lane];
        JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) sums[r][c] += x * columns[c];
      }
    }
  JAXNN_UNROLL for (int r = 0; r < kRows; ++r)
    JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) store<kLanes>(sums[r][c], to + (r * kColumns + c) * kLanes);
}

// Of `count` tiles, the outputs from `first`, of kColumns vectors, from products [16, kTiles, kColumns, kLanes].
template <int kLanes, int kColumns>
JAXNN_INLINE void write_outputs(const Tiling& g, const float* products, Place place, int64_t count, int64_t first,
                                float* output) {
  using V = Vector<kLanes>;
  constexpr int64_t kStep = kTiles * kColumns * kLanes;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    const int64_t y = 2 * place.row, x = 2 * place.column;
    float* const corner = output + ((place.image * g.out_height + y) * g.out_width + x) * g.out + first;
    for (int c = 0; c < kColumns; ++c) {
      const float* from = products + (tile * kColumns + c) * kLanes;
      V rows[2][4];
      JAXNN_UNROLL for (int k = 0; k < 4; ++k) {
        V m[4];
        JAXNN_UNROLL for (int row = 0; row < 4; ++row) m[row] = load<kLanes>(from + (4 * row + k) * kStep);
        rows[0][k] = m[0] + m[1] + m[2], rows[1][k] = m[1] - m[2] - m[3];
      }
      JAXNN_UNROLL for (int row = 0; row < 2; ++row) {
        if (y + row >= g.out_height) break;
        const V* m = rows[row];
        float* const to = corner + row * g.out_width * g.out + c * kLanes;
        store<kLanes>(m[0] + m[1] + m[2], to);
        if (x + 1 < g.out_width) store<kLanes>(m[1] - m[2] - m[3], to + g.out);
      }
    }
  }
}

// kRows * kColumns sums stay in registers, or kLong rows of one column.
template <int kLanes, int kRows, int kLong>
JAXNN_INLINE void convolve(const Tiling& g, const float* input, const float* transformed, int64_t first, int64_t last,
                           float* output, float* scratch) {
  static_assert(kTiles % kRows == 0 && kTiles % kLong == 0);
  const int64_t stride = kTiles * g.in;
  float *const zeros = scratch, *const inputs = zeros + g.in, *const products = inputs + Tiling::kPlaces * stride;
  std::memset(zeros, 0, g.in * sizeof(float));
  for (int64_t tile = first; tile < last; tile += kTiles) {
    const int64_t count = last - tile < kTiles ? last - tile : kTiles;
    const Place place(g, tile);
    transform_inputs<kLanes>(g, input, place, count, zeros, inputs);
    const float* panel = transformed;
    for (int64_t o = 0, width; o < g.out; o += width) {
      width = panel_width<kLanes>(g.out, o);
      for (int p = 0; p < Tiling::kPlaces; ++p, panel += g.in * width) {
        const float* const of = inputs + p * stride;
        float* const to = products + p * kTiles * width;
        if (width == 2 * kLanes)
          for (int row = 0; row < count; row += kRows)
            multiply<kLanes, kRows, 2>(of + row * kLanes, panel, g.in, to + row * width);
        else
          for (int row = 0; row < count; row += kLong)
            multiply<kLanes, kLong, 1>(of + row * kLanes, panel, g.in, to + row * width);
      }
      if (width == 2 * kLanes)
        write_outputs<kLanes, 2>(g, products, place, count, o, output);
      else
        write_outputs<kLanes, 1>(g, products, place, count, o, output);
    }
  }
}

// Of `count` tiles, the transformed gradients of the output, as transform_inputs.
template <int kLanes>
JAXNN_INLINE void transform_outputs(const Tiling& g, const float* output, Place place, int64_t count, float* to) {
  using V = Vector<kLanes>;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    const int64_t y = 2 * place.row, x = 2 * place.column, stride = g.out_width * g.out;
    const float* const corner = output + ((place.image * g.out_height + y) * g.out_width + x) * g.out;
    const bool below = y + 1 < g.out_height, right = x + 1 < g.out_width;
    for (int64_t feature = 0; feature < g.out; feature += kLanes) {
      const float* const at = corner + feature;
      const V d[2][2] = {{load<kLanes>(at), right ? load<kLanes>(at + g.out) : V{}},
                         {below ? load<kLanes>(at + stride) : V{}, below && right ? load<kLanes>(at + stride + g.out) : V{}}};
      float* const first = to + feature * kTiles + tile * kLanes;
      V rows[4][2];
      JAXNN_UNROLL for (int k = 0; k < 2; ++k)
        rows[0][k] = d[0][k], rows[1][k] = d[0][k] + d[1][k], rows[2][k] = d[0][k] - d[1][k], rows[3][k] = -d[1][k];
      JAXNN_UNROLL for (int row = 0; row < 4; ++row) {
        const V &a = rows[row][0], &b = rows[row][1];
        const V all[] = {a, a + b, a - b, -b};
        JAXNN_UNROLL for (int k = 0; k < 4; ++k) store<kLanes>(all[k], first + (4 * row + k) * kTiles * g.out);
      }
    }
  }
}

// Adds to `to [kRows, stride]` the products, summed over tiles, of kRows inputs and kColumns vectors of outputs.
template <int kLanes, int kRows, int kColumns>
JAXNN_INLINE void add_products(const float* inputs, const float* outputs, int64_t tiles, float* to, int64_t stride) {
  using V = Vector<kLanes>;
  V sums[kRows][kColumns] = {};
  for (int64_t tile = 0; tile < tiles; ++tile, inputs += kLanes, outputs += kLanes) {
    V columns[kColumns];
    JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) columns[c] = load<kLanes>(outputs + c * kTiles * kLanes);
    JAXNN_UNROLL for (int r = 0; r < kRows; ++r)
      JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) sums[r][c] += inputs[r] * columns[c];
  }
  JAXNN_UNROLL for (int r = 0; r < kRows; ++r)
    JAXNN_UNROLL for (int c = 0; c < kColumns; ++c) {
      float* const at = to + r * stride + c * kLanes;
      store<kLanes>(load<kLanes>(at) + sums[r][c], at);  // a sum of sums: smaller errors than one sum of all tiles
    }
}

template <int kLanes, int kRows, int kLong>
JAXNN_INLINE void kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first, int64_t last,
                                  float* gradient, float* scratch) {
  using V = Vector<kLanes>;
  const int64_t size = g.in * g.out;
  float *const zeros = scratch, *const inputs = zeros + g.in, *const outputs = inputs + Tiling::kPlaces * kTiles * g.in,
               *const sums = outputs + Tiling::kPlaces * kTiles * g.out;
  std::memset(zeros, 0, g.in * sizeof(float));
  std::memset(sums, 0, Tiling::kPlaces * size * sizeof(float));
  for (int64_t tile = first; tile < last; tile += kTiles) {
    const int64_t count = last - tile < kTiles ? last - tile : kTiles;
    const Place place(g, tile);
    transform_inputs<kLanes>(g, input, place, count, zeros, inputs);
    transform_outputs<kLanes>(g, output, place, count, outputs);
    for (int p = 0; p < Tiling::kPlaces; ++p) {
      const float *const from = inputs + p * kTiles * g.in, *const by = outputs + p * kTiles * g.out;
      for (int64_t o = 0, width; o < g.out; o += width) {
        width = panel_width<kLanes>(g.out, o);
        float* const to = sums + p * size + o;
        if (width == 2 * kLanes)
          for (int64_t i = 0; i < g.in; i += kRows)
            add_products<kLanes, kRows, 2>(from + i / kLanes * kLanes * kTiles + i % kLanes, by + o * kTiles, count,
                                           to + i * g.out, g.out);
        else
          for (int64_t i = 0; i < g.in; i += kLong)
            add_products<kLanes, kLong, 1>(from + i / kLanes * kLanes * kTiles + i % kLanes, by + o * kTiles, count,
                                           to + i * g.out, g.out);
      }
    }
  }
  for (int64_t i = 0; i < size; i += kLanes) {
    V rows[3][4];
    JAXNN_UNROLL for (int k = 0; k < 4; ++k) {
      V m[4];
      JAXNN_UNROLL for (int row = 0; row < 4; ++row) m[row] = load<kLanes>(sums + (4 * row + k) * size + i);
      const V sum = (m[1] + m[2]) * 0.5f;
      rows[0][k] = m[0] + sum, rows[1][k] = (m[1] - m[2]) * 0.5f, rows[2][k] = sum + m[3];
    }
    JAXNN_UNROLL for (int row = 0; row < 3; ++row) {
      const V *m = rows[row], sum = (m[1] + m[2]) * 0.5f;
      const V all[] = {m[0] + sum, (m[1] - m[2]) * 0.5f, sum + m[3]};
      JAXNN_UNROLL for (int k = 0; k < 3; ++k) store<kLanes>(all[k], gradient + (3 * row + k) * size + i);
    }
  }
}

#define JAXNN_WINOGRAD(suffix, target, lanes, rows, long_rows, pairs, long_pairs)                                        \
  target void transform_##suffix(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last, float* to) { \
    transform<lanes>(g, kernel, flipped, first, last, to);                                                               \
  }                                                                                                                      \
  target void convolve_##suffix(const Tiling& g, const float* input, const float* transformed, int64_t first,            \
                                int64_t last, float* output, float* scratch) {                                           \
    convolve<lanes, rows, long_rows>(g, input, transformed, first, last, output, scratch);                               \
  }                                                                                                                      \
  target void kernel_gradient_##suffix(const Tiling& g, const float* input, const float* output, int64_t first,          \
                                       int64_t last, float* gradient, float* scratch) {                                  \
    kernel_gradient<lanes, pairs, long_pairs>(g, input, output, first, last, gradient, scratch);                         \
  }                                                                                                                      \
  constexpr Winograd k_##suffix{transform_##suffix, convolve_##suffix, kernel_gradient_##suffix};

#ifdef __x86_64__
JAXNN_WINOGRAD(avx2, JAXNN_AVX2, 8, 6, 12, 4, 8)
JAXNN_WINOGRAD(avx512, JAXNN_AVX512, 16, 12, 24, 8, 16)
#endif

}  // namespace

const Winograd* winograd([[maybe_unused]] Isa isa) {
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return &k_avx512;
  if (isa == Isa::kAvx2) return &k_avx2;
#endif
  return nullptr;
}

}  // namespace jaxnn
