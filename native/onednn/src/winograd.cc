// Winograd's convolutions of the tiles of one thread, once for each width of vectors.

#include "winograd.h"

namespace jaxnn {
namespace {

constexpr int kTiles = Tiling::kTiles;

// The maps of one axis, as polynomials at points: 0, 1, -1 and infinity for 2 outputs.
template <int kSide>
struct Maps {
  template <typename V>
  static JAXNN_INLINE void input(const V* x, V* to) {
    to[0] = x[0] - x[2], to[1] = x[1] + x[2], to[2] = x[2] - x[1], to[3] = x[1] - x[3];
  }
  template <typename V>
  static JAXNN_INLINE void kernel(const V* x, V* to) {
    const V even = (x[0] + x[2]) * 0.5f, odd = x[1] * 0.5f;
    to[0] = x[0], to[1] = even + odd, to[2] = even - odd, to[3] = x[2];
  }
  template <typename V>
  static JAXNN_INLINE void output(const V* x, V* to) {
    to[0] = x[0] + x[1] + x[2], to[1] = x[1] - x[2] - x[3];
  }
  // The transposes of the last two.
  template <typename V>
  static JAXNN_INLINE void kernel_gradient(const V* x, V* to) {
    const V even = (x[1] + x[2]) * 0.5f;
    to[0] = x[0] + even, to[1] = (x[1] - x[2]) * 0.5f, to[2] = even + x[3];
  }
  template <typename V>
  static JAXNN_INLINE void output_gradient(const V* x, V* to) {
    to[0] = x[0], to[1] = x[0] + x[1], to[2] = x[0] - x[1], to[3] = -x[1];
  }
};

// For 4 outputs 0, infinity and the roots of 1/2 and 2, with which errors are six times smaller than with 1 and 2.
template <>
struct Maps<4> {
  static constexpr float kLow = 0.70710678118654752f, kHigh = 1.4142135623730951f;

  template <typename V>
  static JAXNN_INLINE void input(const V* x, V* to) {
    const V low = x[4] - 2.0f * x[2], low_odd = kLow * (x[3] - 2.0f * x[1]);
    const V high = x[4] - 0.5f * x[2], high_odd = kHigh * (x[3] - 0.5f * x[1]);
    to[0] = x[0] + x[4] - 2.5f * x[2], to[1] = low + low_odd, to[2] = low - low_odd;
    to[3] = high + high_odd, to[4] = high - high_odd, to[5] = x[1] + x[5] - 2.5f * x[3];
  }
  template <typename V>
  static JAXNN_INLINE void kernel(const V* x, V* to) {
    const V low = (x[0] + 0.5f * x[2]) * (-2 / 3.0f), low_odd = x[1] * (-2 / 3.0f * kLow);
    const V high = (x[0] + 2.0f * x[2]) * (1 / 6.0f), high_odd = x[1] * (1 / 6.0f * kHigh);
    to[0] = x[0], to[1] = low + low_odd, to[2] = low - low_odd;
    to[3] = high + high_odd, to[4] = high - high_odd, to[5] = x[2];
  }
  template <typename V>
  static JAXNN_INLINE void output(const V* x, V* to) {
    const V low = x[1] + x[2], low_odd = kLow * (x[1] - x[2]), high = x[3] + x[4], high_odd = kHigh * (x[3] - x[4]);
    to[0] = x[0] + low + high, to[1] = low_odd + high_odd;
    to[2] = 0.5f * low + 2.0f * high, to[3] = 0.5f * low_odd + 2.0f * high_odd + x[5];
  }
  template <typename V>
  static JAXNN_INLINE void kernel_gradient(const V* x, V* to) {
    const V low = (x[1] + x[2]) * (-2 / 3.0f), low_odd = (x[1] - x[2]) * (-2 / 3.0f * kLow);
    const V high = (x[3] + x[4]) * (1 / 6.0f), high_odd = (x[3] - x[4]) * (1 / 6.0f * kHigh);
    to[0] = x[0] + low + high, to[1] = low_odd + high_odd, to[2] = 0.5f * low + 2.0f * high + x[5];
  }
  template <typename V>
  static JAXNN_INLINE void output_gradient(const V* x, V* to) {
    const V low = x[0] + 0.5f * x[2], low_odd = kLow * (x[1] + 0.5f * x[3]);
    const V high = x[0] + 2.0f * x[2], high_odd = kHigh * (x[1] + 2.0f * x[3]);
    to[0] = x[0], to[1] = low + low_odd, to[2] = low - low_odd;
    to[3] = high + high_odd, to[4] = high - high_odd, to[5] = x[3];
  }
};

// Panels of a transformed kernel, [places, in, width]: each is of two vectors of outputs, or the last of one.
template <int kLanes>
JAXNN_INLINE int64_t panel_width(int64_t out, int64_t first) {
  return out - first >= 2 * kLanes ? 2 * kLanes : kLanes;
}

template <int kLanes, int kSide>
JAXNN_INLINE void transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last, float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2, kPlaces = kEdge * kEdge;
  const int64_t out = flipped ? g.in : g.out, size = g.in * g.out;  // of the kernel
  for (int64_t i = first; i < last; ++i) {
    for (int64_t o = 0; o < out; o += kLanes) {
      V rows[3][kEdge], columns[kEdge][3], all[kPlaces];
      JAXNN_UNROLL for (int y = 0; y < 3; ++y) {
        V k[3];
        JAXNN_UNROLL for (int x = 0; x < 3; ++x) {
          const int at = 3 * y + x;
          k[x] = load<kLanes>(kernel + (flipped ? 8 - at : at) * size + i * out + o);
        }
        Maps<kSide>::kernel(k, rows[y]);
        JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) columns[x][y] = rows[y][x];
      }
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
        V column[kEdge];
        Maps<kSide>::kernel(columns[x], column);
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) all[y * kEdge + x] = column[y];
      }
      const int64_t output = flipped ? i : o, input = flipped ? o : i;
      const int64_t panel = output / (2 * kLanes) * (2 * kLanes), width = panel_width<kLanes>(g.out, panel);
      float* at = to + kPlaces * g.in * panel + input * width + output - panel;
      for (int place = 0; place < kPlaces; ++place, at += g.in * width) {
        if (!flipped)
          store<kLanes>(all[place], at);
        else
          for (int lane = 0; lane < kLanes; ++lane) at[lane * width] = all[place][lane];
      }
    }
  }
}

// Where a tile is: its image, and its first row and column of outputs.
template <int kSide>
struct Place {
  int64_t image, row, column;

  JAXNN_INLINE Place(const Tiling& g, int64_t tile)
      : image(tile / (g.rows() * g.columns())),
        row(tile / g.columns() % g.rows() * kSide),
        column(tile % g.columns() * kSide) {}
  JAXNN_INLINE void advance(const Tiling& g) {
    if ((column += kSide) < g.out_width) return;
    column = 0;
    if ((row += kSide) >= g.out_height) row = 0, ++image;
  }
};

// Of `count` tiles, the transformed inputs as [places, in / kLanes, kTiles, kLanes]. `zeros` are as many as features.
template <int kLanes, int kSide>
JAXNN_INLINE void transform_inputs(const Tiling& g, const float* input, Place<kSide> place, int64_t count,
                                   const float* zeros, float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    const int64_t top = place.row - g.top, left = place.column - g.left;
    const float* const corner = input + ((place.image * g.height + top) * g.width + left) * g.in;
    const bool is_inside = top >= 0 && left >= 0 && top + kEdge <= g.height && left + kEdge <= g.width;
    const float* at[kEdge][kEdge];
    for (int y = 0; y < kEdge; ++y)
      for (int x = 0; x < kEdge; ++x) {
        const bool has = is_inside || (top + y >= 0 && top + y < g.height && left + x >= 0 && left + x < g.width);
        at[y][x] = has ? corner + (y * g.width + x) * g.in : zeros;
      }
    for (int64_t feature = 0; feature < g.in; feature += kLanes) {
      V rows[kEdge][kEdge];
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
        V column[kEdge], mapped[kEdge];
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) column[y] = load<kLanes>(at[y][x] + feature);
        Maps<kSide>::input(column, mapped);
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) rows[y][x] = mapped[y];
      }
      float* const first = to + feature * kTiles + tile * kLanes;
      JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) {
        V mapped[kEdge];
        Maps<kSide>::input(rows[y], mapped);
        JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) store<kLanes>(mapped[x], first + (kEdge * y + x) * kTiles * g.in);
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

// Of `count` tiles, the outputs from `first`, of kColumns vectors, from products [places, kTiles, kColumns, kLanes].
template <int kLanes, int kSide, int kColumns>
JAXNN_INLINE void write_outputs(const Tiling& g, const float* products, Place<kSide> place, int64_t count,
                                int64_t first, float* output) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    float* const corner = output + ((place.image * g.out_height + place.row) * g.out_width + place.column) * g.out + first;
    const int64_t height = g.out_height - place.row, width = g.out_width - place.column;
    for (int c = 0; c < kColumns; ++c) {
      const float* const from = products + (tile * kColumns + c) * kLanes;
      V rows[kSide][kEdge];
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
        V column[kEdge], mapped[kSide];
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y)
          column[y] = load<kLanes>(from + (kEdge * y + x) * kTiles * kColumns * kLanes);
        Maps<kSide>::output(column, mapped);
        JAXNN_UNROLL for (int y = 0; y < kSide; ++y) rows[y][x] = mapped[y];
      }
      JAXNN_UNROLL for (int y = 0; y < kSide; ++y) {
        if (y >= height) break;
        V mapped[kSide];
        Maps<kSide>::output(rows[y], mapped);
        float* const to = corner + y * g.out_width * g.out + c * kLanes;
        JAXNN_UNROLL for (int x = 0; x < kSide; ++x)
          if (x < width) store<kLanes>(mapped[x], to + x * g.out);
      }
    }
  }
}

// Sums stay in registers: of kRows tiles and two vectors of outputs, or of kLong tiles and one.
template <int kLanes, int kSide, int kRows, int kLong>
JAXNN_INLINE void convolve(const Tiling& g, const float* input, const float* transformed, int64_t first, int64_t last,
                           float* output, float* scratch) {
  static_assert(kTiles % kRows == 0 && kTiles % kLong == 0);
  const int64_t places = g.places(), stride = kTiles * g.in;
  float *const zeros = scratch, *const inputs = zeros + g.in, *const products = inputs + places * stride;
  std::memset(zeros, 0, g.in * sizeof(float));
  for (int64_t tile = first; tile < last; tile += kTiles) {
    const int64_t count = last - tile < kTiles ? last - tile : kTiles;
    const Place<kSide> place(g, tile);
    transform_inputs<kLanes, kSide>(g, input, place, count, zeros, inputs);
    const float* panel = transformed;
    for (int64_t o = 0, width; o < g.out; o += width) {
      width = panel_width<kLanes>(g.out, o);
      for (int64_t p = 0; p < places; ++p, panel += g.in * width) {
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
        write_outputs<kLanes, kSide, 2>(g, products, place, count, o, output);
      else
        write_outputs<kLanes, kSide, 1>(g, products, place, count, o, output);
    }
  }
}

// Of `count` tiles, the transformed gradients of the output, as transform_inputs.
template <int kLanes, int kSide>
JAXNN_INLINE void transform_outputs(const Tiling& g, const float* output, Place<kSide> place, int64_t count, float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2;
  for (int64_t tile = 0; tile < count; ++tile, place.advance(g)) {
    const float* const corner = output + ((place.image * g.out_height + place.row) * g.out_width + place.column) * g.out;
    const int64_t height = g.out_height - place.row, width = g.out_width - place.column;
    for (int64_t feature = 0; feature < g.out; feature += kLanes) {
      V rows[kEdge][kSide];
      JAXNN_UNROLL for (int x = 0; x < kSide; ++x) {
        V column[kSide], mapped[kEdge];
        JAXNN_UNROLL for (int y = 0; y < kSide; ++y)
          column[y] = y < height && x < width ? load<kLanes>(corner + (y * g.out_width + x) * g.out + feature) : V{};
        Maps<kSide>::output_gradient(column, mapped);
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) rows[y][x] = mapped[y];
      }
      float* const first = to + feature * kTiles + tile * kLanes;
      JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) {
        V mapped[kEdge];
        Maps<kSide>::output_gradient(rows[y], mapped);
        JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) store<kLanes>(mapped[x], first + (kEdge * y + x) * kTiles * g.out);
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

template <int kLanes, int kSide, int kRows, int kLong>
JAXNN_INLINE void kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first, int64_t last,
                                  float* gradient, float* scratch) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2, kPlaces = kEdge * kEdge;
  const int64_t size = g.in * g.out;
  float *const zeros = scratch, *const inputs = zeros + g.in, *const outputs = inputs + kPlaces * kTiles * g.in,
               *const sums = outputs + kPlaces * kTiles * g.out;
  std::memset(zeros, 0, g.in * sizeof(float));
  std::memset(sums, 0, kPlaces * size * sizeof(float));
  for (int64_t tile = first; tile < last; tile += kTiles) {
    const int64_t count = last - tile < kTiles ? last - tile : kTiles;
    const Place<kSide> place(g, tile);
    transform_inputs<kLanes, kSide>(g, input, place, count, zeros, inputs);
    transform_outputs<kLanes, kSide>(g, output, place, count, outputs);
    for (int p = 0; p < kPlaces; ++p) {
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
    V rows[3][kEdge];
    JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
      V column[kEdge], mapped[3];
      JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) column[y] = load<kLanes>(sums + (kEdge * y + x) * size + i);
      Maps<kSide>::kernel_gradient(column, mapped);
      JAXNN_UNROLL for (int y = 0; y < 3; ++y) rows[y][x] = mapped[y];
    }
    JAXNN_UNROLL for (int y = 0; y < 3; ++y) {
      V mapped[3];
      Maps<kSide>::kernel_gradient(rows[y], mapped);
      JAXNN_UNROLL for (int x = 0; x < 3; ++x) store<kLanes>(mapped[x], gradient + (3 * y + x) * size + i);
    }
  }
}

#define JAXNN_WINOGRAD(name, target, lanes, side, rows, long_rows, pairs, long_pairs)                                   \
  struct name {                                                                                                         \
    target static void transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last,       \
                                 float* to) {                                                                           \
      jaxnn::transform<lanes, side>(g, kernel, flipped, first, last, to);                                               \
    }                                                                                                                   \
    target static void convolve(const Tiling& g, const float* input, const float* transformed, int64_t first,           \
                                int64_t last, float* output, float* scratch) {                                          \
      jaxnn::convolve<lanes, side, rows, long_rows>(g, input, transformed, first, last, output, scratch);               \
    }                                                                                                                   \
    target static void kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first,         \
                                       int64_t last, float* gradient, float* scratch) {                                 \
      jaxnn::kernel_gradient<lanes, side, pairs, long_pairs>(g, input, output, first, last, gradient, scratch);         \
    }                                                                                                                   \
    static constexpr Winograd kAll{transform, convolve, kernel_gradient};                                               \
  };

#ifdef __x86_64__
JAXNN_WINOGRAD(Avx2Of2, JAXNN_AVX2, 8, 2, 6, 12, 4, 8)
JAXNN_WINOGRAD(Avx2Of4, JAXNN_AVX2, 8, 4, 6, 12, 4, 8)
JAXNN_WINOGRAD(Avx512Of2, JAXNN_AVX512, 16, 2, 12, 24, 8, 16)
JAXNN_WINOGRAD(Avx512Of4, JAXNN_AVX512, 16, 4, 12, 24, 8, 16)
#endif

}  // namespace

const Winograd* winograd([[maybe_unused]] Isa isa, [[maybe_unused]] int64_t side) {
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return side == 2 ? &Avx512Of2::kAll : &Avx512Of4::kAll;
  if (isa == Isa::kAvx2) return side == 2 ? &Avx2Of2::kAll : &Avx2Of4::kAll;
#endif
  return nullptr;
}

}  // namespace jaxnn
