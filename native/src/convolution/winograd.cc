// Winograd's convolutions of the tiles of one thread, once for each width of vectors.

#include "convolution/winograd.h"

#include <algorithm>
#include <limits>

#include "common/vectors.h"

namespace jaxnn {
namespace {

constexpr int kTiles = Tiling::kTiles;

// What stays in registers: sums of kTileRows tiles and two vectors of outputs, or of kLongRows and one; of a kernel's
// gradient those of kPairs features and two vectors of outputs, or of kLongPairs and one.
template <int kLanes>
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
template <int kLanes>
constexpr int kLongRows = 2 * kTileRows<kLanes>;
template <int kLanes>
constexpr int kPairs = kLanes == 16 ? 8 : 4;
template <int kLanes>
constexpr int kLongPairs = 2 * kPairs<kLanes>;

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

// Maps both axes of a square: kFrom by kFrom values load(y, x) to kTo by kTo, which are given to store(y, x, value).
template <auto kMap, typename V, int kFrom, int kTo, typename Load, typename Store>
JAXNN_INLINE void map_square(const Load& load, const Store& store) {
  V rows[kTo][kFrom];
  JAXNN_UNROLL for (int x = 0; x < kFrom; ++x) {
    V column[kFrom], mapped[kTo];
    JAXNN_UNROLL for (int y = 0; y < kFrom; ++y) column[y] = load(y, x);
    kMap(column, mapped);
    JAXNN_UNROLL for (int y = 0; y < kTo; ++y) rows[y][x] = mapped[y];
  }
  JAXNN_UNROLL for (int y = 0; y < kTo; ++y) {
    V mapped[kTo];
    kMap(rows[y], mapped);
    JAXNN_UNROLL for (int x = 0; x < kTo; ++x) store(y, x, mapped[x]);
  }
}

// Panels of a transformed kernel, [places, in, width]: each is of two vectors of outputs, or the last of one. The last
// nine places are the kernel itself, for direct sums.
template <int kLanes>
JAXNN_INLINE int64_t panel_width(int64_t out, int64_t first) {
  return out - first >= 2 * kLanes ? 2 * kLanes : kLanes;
}

template <int kLanes, int kSide>
JAXNN_INLINE void transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last, float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2, kDirect = kEdge * kEdge, kPlaces = kDirect + 9;
  const int64_t out = flipped ? g.in : g.out, size = g.in * g.out;  // of the kernel
  for (int64_t i = first; i < last; ++i) {
    for (int64_t o = 0; o < out; o += kLanes) {
      V all[kPlaces];
      map_square<Maps<kSide>::template kernel<V>, V, 3, kEdge>([&](int x, int y) JAXNN_INLINED {
        const int at = 3 * y + x;
        return all[kDirect + at] = load<kLanes>(kernel + (flipped ? 8 - at : at) * size + i * out + o);
      }, [&](int x, int y, V value) JAXNN_INLINED { all[y * kEdge + x] = value; });
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

  Place() = default;
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

// Where the inputs of a tile are; beyond the input they are `zeros`, as many as features. Those places have their bit,
// 8 * row + column, in `padding`.
template <int kSide>
struct Inputs {
  static constexpr int kEdge = kSide + 2;
  const float* at[kEdge][kEdge];
  uint64_t padding = 0;

  Inputs() = default;
  JAXNN_INLINE Inputs(const Tiling& g, const float* input, const Place<kSide>& place, const float* zeros) {
    const int64_t top = place.row - g.top, left = place.column - g.left;
    const float* const corner = input + ((place.image * g.height + top) * g.width + left) * g.in;
    const bool is_inside = top >= 0 && left >= 0 && top + kEdge <= g.height && left + kEdge <= g.width;
    for (int y = 0; y < kEdge; ++y)
      for (int x = 0; x < kEdge; ++x) at[y][x] = corner + (y * g.width + x) * g.in;
    if (is_inside) return;
    for (int y = 0; y < kEdge; ++y)
      for (int x = 0; x < kEdge; ++x) {
        if (top + y >= 0 && top + y < g.height && left + x >= 0 && left + x < g.width) continue;
        at[y][x] = zeros;
        padding |= uint64_t{1} << (8 * y + x);
      }
  }

  // Of a window, the three rows of three bits.
  JAXNN_INLINE uint32_t padding_of(int window) const {
    const auto bits = static_cast<uint32_t>(padding >> (8 * (window / kSide) + window % kSide));
    return bits & 0x070707;
  }
};

template <int kLanes>
JAXNN_INLINE Integers<kLanes> bits(const Vector<kLanes>& x) {
  Integers<kLanes> same;
  std::memcpy(&same, &x, sizeof same);
  return same;
}

// Sizes of floats as the integers of their bits, whose order is the same; those that are not finite are the largest.
template <int kLanes>
JAXNN_INLINE Integers<kLanes> sizes(const Vector<kLanes>& x) {
  return bits<kLanes>(x) & 0x7fffffff;
}

template <typename V>
JAXNN_INLINE V larger(const V& a, const V& b) {
  return a > b ? a : b;
}

// The largest lane of each of four vectors.
template <int kLanes>
JAXNN_INLINE Integers<4> largest(const Integers<kLanes>* of) {
  Integers<4> parts[4];
  JAXNN_UNROLL for (int i = 0; i < 4; ++i) {
    Integers<4> quarters[kLanes / 4];
    std::memcpy(quarters, of + i, sizeof quarters);
    parts[i] = quarters[0];
    JAXNN_UNROLL for (int k = 1; k < kLanes / 4; ++k) parts[i] = larger(parts[i], quarters[k]);
  }
  const auto merged = [](Integers<4> a, Integers<4> b) JAXNN_INLINED {
    return larger(__builtin_shufflevector(a, b, 0, 2, 4, 6), __builtin_shufflevector(a, b, 1, 3, 5, 7));
  };
  return merged(merged(parts[0], parts[1]), merged(parts[2], parts[3]));
}

// Below what size the inputs of a window are small in a tile whose largest has this size: an eighth of it. In a tile of
// numbers whose transformed ones may be infinite, or of such that are not finite, all windows are.
JAXNN_INLINE int32_t small_below(int32_t largest) {
  constexpr int32_t kExponent = 1 << 23, kHuge = (127 + 100) * kExponent;  // 2^100
  return largest >= kHuge ? std::numeric_limits<int32_t>::max() : largest - 3 * kExponent;
}

// The size of the largest input of a tile, or -1 if it is sure that no window is small, and not all inputs are equal.
template <int kLanes, int kSide>
JAXNN_INLINE int32_t largest_unless_even(const Tiling& g, const Inputs<kSide>& inputs) {
  constexpr int kEdge = kSide + 2, kMiddle = kEdge / 2 - 1;
  Integers<kLanes> middle[4] = {}, others[4] = {};  // each window has one of the four inputs in the middle
  for (int64_t feature = 0; feature < g.in; feature += kLanes)
    JAXNN_UNROLL for (int y = 0; y < kEdge; ++y)
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
        const int row = y - kMiddle, column = x - kMiddle;
        const bool is_middle = (row == 0 || row == 1) && (column == 0 || column == 1);
        auto& most = is_middle ? middle[2 * row + column] : others[x % 4];
        most = larger(most, sizes<kLanes>(load<kLanes>(inputs.at[y][x] + feature)));
      }
  const Integers<kLanes> rest = larger(larger(others[0], others[1]), larger(others[2], others[3]));
  const Integers<kLanes> same[4] = {rest, rest, rest, rest};
  const Integers<4> four = largest<kLanes>(middle), all = larger(largest<kLanes>(same), four);
  const int32_t most = std::max(std::max(all[0], all[1]), std::max(all[2], all[3]));
  const int32_t least = std::min(std::min(four[0], four[1]), std::min(four[2], four[3]));
  const auto& same_row = inputs.at[kMiddle];
  const bool may_be_equal = !std::memcmp(same_row[kMiddle], same_row[kMiddle + 1], kLanes * sizeof(float));
  return most == 0 || least < small_below(most) || may_be_equal ? most : -1;
}

// Writes the transformed inputs of a tile, of those that are [places, in / kLanes, kTiles, kLanes].
template <int kLanes, int kSide>
JAXNN_INLINE void transform_inputs(const Tiling& g, const Inputs<kSide>& inputs, float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2;
  for (int64_t feature = 0; feature < g.in; feature += kLanes) {
    V rows[kEdge][kEdge];
    JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
      V column[kEdge], mapped[kEdge];
      JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) column[y] = load<kLanes>(inputs.at[y][x] + feature);
      Maps<kSide>::input(column, mapped);
      JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) rows[y][x] = mapped[y];
    }
    float* const first = to + feature * kTiles;
    JAXNN_UNROLL for (int y = 0; y < kEdge; ++y) {
      V mapped[kEdge];
      Maps<kSide>::input(rows[y], mapped);
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) store<kLanes>(mapped[x], first + (kEdge * y + x) * kTiles * g.in);
    }
  }
}

// Windows of a tile, a bit for each in the order of its outputs, that are not computed by the products of the tile:
// their inputs are so small that the rounding of others in the tile would count, or all inputs of the tile are equal.
struct Apart {
  uint32_t equal = 0;  // the same features at each place that is not beyond the input
  uint32_t others = 0;
  const float* features = nullptr;
  bool is_wide = false;  // one of the tile's inputs is 2^12 times as large as another
};

// From bits of places, as of Inputs, those of the windows that have such a place.
template <int kSide>
JAXNN_INLINE uint32_t windows_with(uint64_t places) {
  const uint64_t across = places | places >> 1 | places >> 2, all = across | across >> 8 | across >> 16;
  uint32_t bits = 0;
  for (int y = 0; y < kSide; ++y) bits |= (all >> (8 * y) & ((1 << kSide) - 1)) << (kSide * y);
  return bits;
}

// Among the windows of a tile that are in the image; its largest input has this size.
template <int kLanes, int kSide>
JAXNN_INLINE Apart find_apart(const Tiling& g, const Inputs<kSide>& inputs, uint32_t windows, int32_t most,
                              const float* zeros) {
  constexpr int kEdge = kSide + 2;
  const float* const* const at = inputs.at[0];
  const int32_t below = most ? small_below(most) : 1;
  int32_t least = most;
  uint64_t large = 0, nonzero = 0, differs = 0;
  const auto bit_of = [](int place) JAXNN_INLINED { return place / kEdge * 8 + place % kEdge; };
  for (int place = 0; place < kEdge * kEdge; place += 4) {
    Integers<kLanes> four[4] = {};
    for (int64_t feature = 0; feature < g.in; feature += kLanes)
      JAXNN_UNROLL for (int i = 0; i < 4; ++i)
        four[i] = larger(four[i], sizes<kLanes>(load<kLanes>(at[place + i] + feature)));
    const Integers<4> size = largest<kLanes>(four);
    JAXNN_UNROLL for (int i = 0; i < 4; ++i) {
      large |= uint64_t{size[i] >= below} << bit_of(place + i);
      nonzero |= uint64_t{size[i] != 0} << bit_of(place + i);
      least = size[i] ? std::min(least, size[i]) : least;
    }
  }
  Apart apart;
  apart.is_wide = most - least >= 12 << 23;
  const uint32_t small = windows & ~windows_with<kSide>(large), empty = windows & ~windows_with<kSide>(nonzero);
  if (empty) {
    apart.features = zeros;
    apart.equal = empty;
    apart.others = small & ~empty;
    return apart;
  }
  // Those of the first small window that has some, or of the tile.
  const int first = small ? __builtin_ctz(small) : 0;
  const uint64_t window = small ? uint64_t{0x070707} << (first / kSide * 8 + first % kSide) : ~uint64_t{0};
  const int chosen = __builtin_ctzll(nonzero & window);
  apart.features = inputs.at[chosen / 8][chosen % 8];
  for (int place = 0; place < kEdge * kEdge; place += 4) {
    Integers<kLanes> four[4] = {};
    for (int64_t feature = 0; feature < g.in; feature += kLanes) {
      const Integers<kLanes> wanted = bits<kLanes>(load<kLanes>(apart.features + feature));
      JAXNN_UNROLL for (int i = 0; i < 4; ++i)
        four[i] -= bits<kLanes>(load<kLanes>(at[place + i] + feature)) != wanted;  // a lane of true is -1
    }
    const Integers<4> count = largest<kLanes>(four);
    JAXNN_UNROLL for (int i = 0; i < 4; ++i) differs |= uint64_t{count[i] != 0} << bit_of(place + i);
  }
  differs &= ~inputs.padding;
  const uint32_t candidates = differs ? small : windows;
  apart.others = candidates & windows_with<kSide>(differs);
  apart.equal = candidates & ~apart.others;
  return apart;
}

// Results of windows of equal features, by which of their places are beyond the input.
struct Equal {
  static constexpr int kMost = 9;

  float* results;                   // [kMost, out]
  const float* features = nullptr;  // of all
  uint32_t padding[kMost] = {};
  int count = 0;

  JAXNN_INLINE bool is_of(const float* others, int64_t size) const {
    return features == others || (features && !std::memcmp(features, others, size * sizeof(float)));
  }
  // The place of a result: `count` if there is none, but kMost if there is no room.
  JAXNN_INLINE int find(uint32_t wanted) const {
    int index = 0;
    while (index < count && padding[index] != wanted) ++index;
    return index;
  }
};

// Gives each window apart to `of_equal(window, place of its result, whether it is new)` or to `directly(window)`.
// Before results of other features are forgotten, `ended()` is called.
template <int kSide, typename Ended, typename OfEqual, typename Directly>
JAXNN_INLINE void visit(const Tiling& g, const Inputs<kSide>& inputs, const Apart& apart, const float* zeros,
                        Equal& equal, const Ended& ended, const OfEqual& of_equal, const Directly& directly) {
  if (apart.equal && !equal.is_of(apart.features, g.in)) {
    ended();
    equal.features = apart.features;
    equal.count = 0;
  }
  for (uint32_t rest = apart.equal | apart.others; rest; rest &= rest - 1) {
    const int window = __builtin_ctz(rest);
    const uint32_t padding = apart.features == zeros ? 0 : inputs.padding_of(window);
    const int index = apart.equal & rest & -rest ? equal.find(padding) : Equal::kMost;
    if (index == Equal::kMost) {
      directly(window);
      continue;
    }
    const bool is_new = index == equal.count;
    if (is_new) equal.padding[equal.count++] = padding;
    of_equal(window, index, is_new);
  }
}

// A tile, and which of its outputs are in the image and computed by its products.
template <int kSide>
struct Tile {
  static constexpr uint32_t kWhole = (uint32_t{1} << (kSide * kSide)) - 1;
  Place<kSide> place;
  uint32_t kept;

  static JAXNN_INLINE uint32_t all(const Tiling& g, const Place<kSide>& place) {
    if (place.row + kSide <= g.out_height && place.column + kSide <= g.out_width) return kWhole;
    const int64_t height = std::min<int64_t>(g.out_height - place.row, kSide);
    const int64_t width = std::min<int64_t>(g.out_width - place.column, kSide);
    uint32_t bits = 0;
    for (int64_t y = 0; y < height; ++y) bits |= ((uint32_t{1} << width) - 1) << (kSide * y);
    return bits;
  }
  JAXNN_INLINE int64_t output(const Tiling& g, int window) const {
    const int64_t row = place.row + window / kSide, column = place.column + window % kSide;
    return ((place.image * g.out_height + row) * g.out_width + column) * g.out;
  }
};

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
JAXNN_INLINE void write_outputs(const Tiling& g, const float* products, const Tile<kSide>* tiles, int count,
                                int64_t first, float* output) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2, kWidth = kColumns * kLanes;
  for (int tile = 0; tile < count; ++tile) {
    float some[kSide * kSide * kWidth];  // of a tile of which not all are kept
    const bool is_whole = tiles[tile].kept == Tile<kSide>::kWhole;
    float* const corner = is_whole ? output + tiles[tile].output(g, 0) + first : some;
    const int64_t down = is_whole ? g.out_width * g.out : kSide * kWidth, right = is_whole ? g.out : kWidth;
    for (int c = 0; c < kColumns; ++c) {
      const float* const from = products + (tile * kColumns + c) * kLanes;
      V rows[kSide][kEdge];
      JAXNN_UNROLL for (int x = 0; x < kEdge; ++x) {
        V column[kEdge], mapped[kSide];
        JAXNN_UNROLL for (int y = 0; y < kEdge; ++y)
          column[y] = load<kLanes>(from + (kEdge * y + x) * kTiles * kWidth);
        Maps<kSide>::output(column, mapped);
        JAXNN_UNROLL for (int y = 0; y < kSide; ++y) rows[y][x] = mapped[y];
      }
      JAXNN_UNROLL for (int y = 0; y < kSide; ++y) {
        V mapped[kSide];
        Maps<kSide>::output(rows[y], mapped);
        float* const to = corner + y * down + c * kLanes;
        JAXNN_UNROLL for (int x = 0; x < kSide; ++x) store<kLanes>(mapped[x], to + x * right);
      }
    }
    if (is_whole) continue;
    for (uint32_t rest = tiles[tile].kept; rest; rest &= rest - 1) {
      const int window = __builtin_ctz(rest);
      std::memcpy(output + tiles[tile].output(g, window) + first, some + window * kWidth, kWidth * sizeof(float));
    }
  }
}

// Writes the inputs of a window in row `row` of [9, in / kLanes, kTiles, kLanes].
template <int kLanes, int kSide>
JAXNN_INLINE void gather(const Tiling& g, const Inputs<kSide>& from, int window, int row, float* inputs) {
  for (int k = 0; k < 9; ++k, inputs += g.in * kTiles) {
    const float* const features = from.at[window / kSide + k / 3][window % kSide + k % 3];
    for (int64_t i = 0; i < g.in; i += kLanes)
      store<kLanes>(load<kLanes>(features + i), inputs + i * kTiles + row * kLanes);
  }
}

// Whether a place of a window, in the order of a kernel, is in its padding.
JAXNN_INLINE bool is_padding(uint32_t padding, int place) { return padding >> (place / 3 * 8 + place % 3) & 1; }

// The products of `count` rows of tiles, or of windows, with each panel of a kernel from `place` on; those of a panel are
// given to `then(products, first, width)`.
template <int kLanes, typename Then>
JAXNN_INLINE void multiply_all(const Tiling& g, const float* inputs, const float* transformed, int64_t place,
                               int64_t places, int64_t depth, int count, float* products, const Then& then) {
  static_assert(kTiles % kTileRows<kLanes> == 0 && kTiles % kLongRows<kLanes> == 0);
  for (int64_t o = 0, width; o < g.out; o += width) {
    width = panel_width<kLanes>(g.out, o);
    const float* panel = transformed + (g.kernel_places() * o + place * width) * g.in;
    for (int64_t p = 0; p < places; ++p, panel += depth * width) {
      const float* const of = inputs + p * depth * kTiles;
      float* const to = products + p * kTiles * width;
      if (width == 2 * kLanes)
        for (int row = 0; row < count; row += kTileRows<kLanes>)
          multiply<kLanes, kTileRows<kLanes>, 2>(of + row * kLanes, panel, depth, to + row * width);
      else
        for (int row = 0; row < count; row += kLongRows<kLanes>)
          multiply<kLanes, kLongRows<kLanes>, 1>(of + row * kLanes, panel, depth, to + row * width);
    }
    then(products, o, width);
  }
}

// The outputs of `count` windows of [9, in / kLanes, kTiles, kLanes], by direct sums. Windows apart are rare: in a
// function of their own they leave the registers to the loops over tiles.
template <int kLanes>
JAXNN_INLINE void sum_windows(const Tiling& g, const float* inputs, const float* transformed, int count,
                              float* const* to, float* products) {
  compiled<kLanes>([=, &g](auto) JAXNN_INLINED {
    multiply_all<kLanes>(g, inputs, transformed, g.places(), 1, 9 * g.in, count, products,
                         [&](const float* sums, int64_t o, int64_t width) JAXNN_INLINED {
      for (int i = 0; i < count; ++i) std::memcpy(to[i] + o, sums + i * width, width * sizeof(float));
    });
  });
}

// Those of a window of equal features, in the same order of sums.
template <int kLanes>
JAXNN_INLINE void sum_of_equal(const Tiling& g, const float* features, uint32_t padding, const float* transformed,
                               float* to) {
  for (int64_t o = 0; o < g.out; o += kLanes) {
    const int64_t first = o / (2 * kLanes) * (2 * kLanes), width = panel_width<kLanes>(g.out, first);
    const float* at = transformed + (g.kernel_places() * first + g.places() * width) * g.in + o - first;
    Vector<kLanes> sum{};
    for (int k = 0; k < 9; ++k, at += g.in * width)
      for (int64_t i = 0; i < g.in && !is_padding(padding, k); ++i) sum += features[i] * load<kLanes>(at + i * width);
    store<kLanes>(sum, to + o);
  }
}

template <int kLanes, int kSide>
JAXNN_INLINE void convolve(const Tiling& g, const float* input, const float* transformed, int64_t first, int64_t last,
                           float* output, float* scratch) {
  const int64_t places = g.places();
  float *const zeros = scratch, *const inputs = zeros + g.in, *const products = inputs + places * kTiles * g.in;
  Equal equal{products + places * kTiles * g.out};
  float* const direct = equal.results + Equal::kMost * g.out;  // inputs of windows
  float* to[kTiles];                                           // and their outputs
  int num_direct = 0;
  std::memset(zeros, 0, g.in * sizeof(float));
  Place<kSide> place(g, first);
  for (int64_t at = first; at < last;) {
    Tile<kSide> tiles[kTiles];
    int count = 0;
    for (; at < last && count < kTiles; ++at, place.advance(g)) {
      Tile<kSide>& tile = tiles[count] = {place, Tile<kSide>::all(g, place)};
      const Inputs<kSide> of(g, input, place, zeros);
      const int32_t most = largest_unless_even<kLanes, kSide>(g, of);
      if (__builtin_expect(most >= 0, 0)) {  // expected: registers are for even tiles
        const Apart apart = find_apart<kLanes, kSide>(g, of, tile.kept, most, zeros);
        const auto of_equal = [&](int window, int index, bool is_new) JAXNN_INLINED {
          float* const sums = equal.results + index * g.out;
          if (is_new) sum_of_equal<kLanes>(g, equal.features, equal.padding[index], transformed, sums);
          std::memcpy(output + tile.output(g, window), sums, g.out * sizeof(float));
        };
        const auto directly = [&](int window) JAXNN_INLINED {
          gather<kLanes, kSide>(g, of, window, num_direct, direct);
          to[num_direct] = output + tile.output(g, window);
          if (++num_direct < kTiles) return;
          sum_windows<kLanes>(g, direct, transformed, num_direct, to, products);
          num_direct = 0;
        };
        visit<kSide>(g, of, apart, zeros, equal, [] {}, of_equal, directly);
        tile.kept &= ~(apart.equal | apart.others);
        if (!tile.kept) continue;
      }
      transform_inputs<kLanes, kSide>(g, of, inputs + count * kLanes);
      ++count;
    }
    multiply_all<kLanes>(g, inputs, transformed, 0, places, g.in, count, products,
                         [&](const float* products, int64_t o, int64_t width) JAXNN_INLINED {
      if (width == 2 * kLanes)
        write_outputs<kLanes, kSide, 2>(g, products, tiles, count, o, output);
      else
        write_outputs<kLanes, kSide, 1>(g, products, tiles, count, o, output);
    });
  }
  sum_windows<kLanes>(g, direct, transformed, num_direct, to, products);
}

// Writes the transformed gradients of the outputs of a tile, as transform_inputs; `some` is memory for all of them.
template <int kLanes, int kSide>
JAXNN_INLINE void transform_outputs(const Tiling& g, const float* output, const Tile<kSide>& tile, float* some,
                                    float* to) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2;
  const bool is_whole = tile.kept == Tile<kSide>::kWhole;
  const float* const corner = is_whole ? output + tile.output(g, 0) : some;
  const int64_t down = is_whole ? g.out_width * g.out : kSide * g.out;
  if (!is_whole) {
    std::memset(some, 0, kSide * kSide * g.out * sizeof(float));
    for (uint32_t rest = tile.kept; rest; rest &= rest - 1) {
      const int window = __builtin_ctz(rest);
      std::memcpy(some + window * g.out, output + tile.output(g, window), g.out * sizeof(float));
    }
  }
  for (int64_t feature = 0; feature < g.out; feature += kLanes) {
    float* const first = to + feature * kTiles;
    map_square<Maps<kSide>::template output_gradient<V>, V, kSide, kEdge>([&](int y, int x) JAXNN_INLINED {
      return load<kLanes>(corner + y * down + x * g.out + feature);
    }, [&](int y, int x, V value) JAXNN_INLINED { store<kLanes>(value, first + (kEdge * y + x) * kTiles * g.out); });
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

// Adds to `sums [places, in, out]` the products of `count` inputs and gradients of outputs, at each place.
template <int kLanes>
JAXNN_INLINE void add_all(const Tiling& g, const float* inputs, const float* outputs, bool one_output, int64_t places,
                          int count, float* sums) {
  for (int64_t p = 0; p < places; ++p) {
    const float *const from = inputs + p * kTiles * g.in, *const by = outputs + (one_output ? 0 : p) * kTiles * g.out;
    for (int64_t o = 0, width; o < g.out; o += width) {
      width = panel_width<kLanes>(g.out, o);
      float* const to = sums + p * g.in * g.out + o;
      const auto inputs_of = [&](int64_t i) JAXNN_INLINED { return from + i / kLanes * kLanes * kTiles + i % kLanes; };
      if (width == 2 * kLanes)
        for (int64_t i = 0; i < g.in; i += kPairs<kLanes>)
          add_products<kLanes, kPairs<kLanes>, 2>(inputs_of(i), by + o * kTiles, count, to + i * g.out, g.out);
      else
        for (int64_t i = 0; i < g.in; i += kLongPairs<kLanes>)
          add_products<kLanes, kLongPairs<kLanes>, 1>(inputs_of(i), by + o * kTiles, count, to + i * g.out, g.out);
    }
  }
}

// As sum_windows: adds the windows' products to `sums [9, in, out]`.
template <int kLanes>
JAXNN_INLINE void add_windows(const Tiling& g, const float* inputs, const float* outputs, int count, float* sums) {
  compiled<kLanes>([=, &g](auto) JAXNN_INLINED { add_all<kLanes>(g, inputs, outputs, true, 9, count, sums); });
}

template <int kLanes, int kSide>
JAXNN_INLINE void kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first, int64_t last,
                                  float* gradient, float* scratch) {
  using V = Vector<kLanes>;
  constexpr int kEdge = kSide + 2, kPlaces = kEdge * kEdge, kGroups = 4;
  const int64_t size = g.in * g.out;
  float *const zeros = scratch, *const inputs = zeros + g.in, *const outputs = inputs + kPlaces * kTiles * g.in,
               *const some = outputs + kPlaces * kTiles * g.out, *const sums = some + kSide * kSide * g.out,
               *const direct = sums + (kPlaces + 9) * size, *const direct_outputs = direct + 9 * kTiles * g.in,
               *const direct_sums = sums + kPlaces * size;
  Equal equal{direct_outputs + kTiles * g.out};  // the results are sums of the outputs' gradients
  int num_direct = 0;
  bool has_direct = false;
  std::memset(zeros, 0, g.in * sizeof(float));
  std::memset(sums, 0, kPlaces * size * sizeof(float));
  const auto sum_directly = [&]() JAXNN_INLINED {
    if (!has_direct) std::memset(direct_sums, 0, 9 * size * sizeof(float));
    has_direct = true;
    add_windows<kLanes>(g, direct, direct_outputs, num_direct, direct_sums);
    num_direct = 0;
  };
  const auto add_direct = [&](const float* gradients) JAXNN_INLINED {
    for (int64_t o = 0; o < g.out; o += kLanes)
      store<kLanes>(load<kLanes>(gradients + o), direct_outputs + o * kTiles + num_direct * kLanes);
    if (++num_direct == kTiles) sum_directly();
  };
  const auto add_equal = [&]() JAXNN_INLINED {
    for (int index = 0; index < equal.count; ++index) {
      Inputs<kSide> of;  // one window
      for (int k = 0; k < 9; ++k) of.at[k / 3][k % 3] = is_padding(equal.padding[index], k) ? zeros : equal.features;
      gather<kLanes, kSide>(g, of, 0, num_direct, direct);
      add_direct(equal.results + index * g.out);
    }
    equal.count = 0;
  };
  Place<kSide> place(g, first);
  int64_t groups = 0;
  for (int64_t at = first; at < last;) {
    int count = 0;
    for (; at < last && count < kTiles; ++at, place.advance(g)) {
      Tile<kSide> tile{place, Tile<kSide>::all(g, place)};
      const Inputs<kSide> of(g, input, place, zeros);
      const int32_t most = largest_unless_even<kLanes, kSide>(g, of);
      if (__builtin_expect(most >= 0, 0)) {  // expected: registers are for even tiles
        Apart apart = find_apart<kLanes, kSide>(g, of, tile.kept, most, zeros);
        if (apart.is_wide) apart.others = tile.kept & ~apart.equal;
        const auto of_equal = [&](int window, int index, bool is_new) JAXNN_INLINED {
          float* const sums = equal.results + index * g.out;
          const float* const more = output + tile.output(g, window);
          if (is_new) std::memset(sums, 0, g.out * sizeof(float));
          for (int64_t o = 0; o < g.out; o += kLanes)
            store<kLanes>(load<kLanes>(sums + o) + load<kLanes>(more + o), sums + o);
        };
        const auto directly = [&](int window) JAXNN_INLINED {
          gather<kLanes, kSide>(g, of, window, num_direct, direct);
          add_direct(output + tile.output(g, window));
        };
        visit<kSide>(g, of, apart, zeros, equal, add_equal, of_equal, directly);
        tile.kept &= ~(apart.equal | apart.others);
        if (!tile.kept) continue;
      }
      transform_inputs<kLanes, kSide>(g, of, inputs + count * kLanes);
      transform_outputs<kLanes, kSide>(g, output, tile, some, outputs + count * kLanes);
      ++count;
    }
    if (++groups % kGroups == 0 || at == last) add_equal();  // sums of sums, as those of tiles
    add_all<kLanes>(g, inputs, outputs, false, kPlaces, count, sums);
  }
  if (num_direct) sum_directly();
  for (int64_t i = 0; i < size; i += kLanes) {
    map_square<Maps<kSide>::template kernel_gradient<V>, V, kEdge, 3>([&](int y, int x) JAXNN_INLINED {
      return load<kLanes>(sums + (kEdge * y + x) * size + i);
    }, [&](int y, int x, V value) JAXNN_INLINED {
      const int64_t at = (3 * y + x) * size + i;
      store<kLanes>(has_direct ? value + load<kLanes>(direct_sums + at) : value, gradient + at);
    });
  }
}

// Calls body(lanes, side), with constants.
template <typename Body>
void by_tiles(int64_t side, Body body) {
  if (side == 2) vectorized([=](auto lanes) JAXNN_INLINED { body(lanes, std::integral_constant<int, 2>()); });
  else vectorized([=](auto lanes) JAXNN_INLINED { body(lanes, std::integral_constant<int, 4>()); });
}

}  // namespace

void winograd_transform(const Tiling& g, const float* kernel, bool flipped, int64_t first, int64_t last, float* to) {
  by_tiles(g.side, [=](auto lanes, auto side) JAXNN_INLINED {
    transform<decltype(lanes)::value, decltype(side)::value>(g, kernel, flipped, first, last, to);
  });
}

void winograd_convolve(const Tiling& g, const float* input, const float* transformed, int64_t first, int64_t last,
                       float* output, float* scratch) {
  by_tiles(g.side, [=](auto lanes, auto side) JAXNN_INLINED {
    convolve<decltype(lanes)::value, decltype(side)::value>(g, input, transformed, first, last, output, scratch);
  });
}

void winograd_kernel_gradient(const Tiling& g, const float* input, const float* output, int64_t first, int64_t last,
                              float* gradient, float* scratch) {
  by_tiles(g.side, [=](auto lanes, auto side) JAXNN_INLINED {
    kernel_gradient<decltype(lanes)::value, decltype(side)::value>(g, input, output, first, last, gradient, scratch);
  });
}

}  // namespace jaxnn
